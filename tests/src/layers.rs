//! Layers of a Llama's shape as a graph, without a model's files: for tests and benchmarks of one device.

use anyhow::{Result, ensure};
use hotcell_graph::{CacheSpec, DType, Graph, GraphBuilder, Shape, TensorSpec, Value};

use crate::chance::Chance;

/// How they are to be.
#[derive(Clone, Copy, Debug)]
pub struct Layers {
    /// How many.
    pub count: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// Numbers between a layer's last two products.
    pub inner: usize,
    /// Rows of the table of tokens, and logits.
    pub tokens: usize,
    /// Rows of an execution at most.
    pub max_rows: usize,
    /// Blocks of sixteen tokens in the cache: one sequence has all of them.
    pub blocks: usize,
    /// Weights of most products; those in 8-bit floats have a scale for each 128 × 128.
    pub weights: DType,
    /// Weights of values, and of what ends a layer.
    pub of_values: DType,
    /// Keys and values.
    pub cache: DType,
    /// Whether the numbers that are turned together are neighbours.
    pub interleaved: bool,
}

/// What an input of the graph is to be filled with.
#[derive(Clone, Debug)]
pub enum Filling {
    /// A number for each row: token, position, sequence, slot.
    Rows(Row),
    /// Numbers of the sequence's blocks, in order.
    Blocks,
    /// So many weights.
    Weights(DType, usize),
    /// So many bytes of zeros: a cache.
    Zeros(usize),
}

/// Which number of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// Of its token.
    Token,
    /// Its place in the sequence.
    Position,
    /// Of its sequence.
    Sequence,
    /// Where its keys and values go.
    Slot,
}

impl Filling {
    /// Weights, of which scales are no NaN; other fillings have no weights, and so no bytes here.
    pub fn weights(&self, chance: &mut Chance) -> Vec<u8> {
        let Self::Weights(dtype, n) = self else {
            return Vec::new();
        };
        match dtype {
            DType::F32 => (0..*n)
                .flat_map(|_| (chance.below(2001) as f32 / 1e3 - 1.0).to_le_bytes())
                .collect(),
            DType::BF16 => {
                // The upper half of a number is one.
                let mut one = || (chance.below(201) as f32 / 1e3 - 0.1).to_bits() >> 16;
                (0..*n).flat_map(|_| (one() as u16).to_le_bytes()).collect()
            }
            DType::F8E4M3 => (0..*n).map(|_| chance.number() as u8 & 0xab).collect(),
            _ => (0..dtype.row_bytes(*n).unwrap_or(0))
                .map(|_| chance.number() as u8 & 0x2b)
                .collect(),
        }
    }
}

/// Tokens of a block of the cache.
pub const BLOCK_LEN: usize = 16;

/// A graph on its way.
struct Builder {
    g: GraphBuilder,
    fillings: Vec<Filling>,
    layers: Layers,
}

fn fixed(dtype: DType, dims: &[usize]) -> Result<TensorSpec> {
    Ok(TensorSpec::new(dtype, Shape::fixed(dims)?)?)
}

impl Builder {
    fn weight(&mut self, dtype: DType, dims: &[usize]) -> Result<Value> {
        let name = format!("w{}", self.fillings.len());
        let n = dims.iter().product();
        self.fillings.push(Filling::Weights(dtype, n));
        Ok(self.g.constant(name, fixed(dtype, dims)?)?)
    }

    fn row(&mut self, name: &str, row: Row) -> Result<Value> {
        self.fillings.push(Filling::Rows(row));
        let spec = TensorSpec::new(DType::I32, Shape::rows(&[])?)?;
        Ok(self.g.tensor(name, spec)?)
    }

    fn product(&mut self, x: Value, dtype: DType, n: usize, k: usize) -> Result<Value> {
        let w = self.weight(dtype, &[n, k])?;
        if dtype != DType::F8E4M3 {
            return Ok(self.g.mul_mat(x, w)?);
        }
        // As published checkpoints have it.
        let side = 128;
        let scales = self.weight(DType::F32, &[n.div_ceil(side), k.div_ceil(side)])?;
        Ok((self.g).mul_mat_scaled(x, w, scales, side as i64, side as i64)?)
    }

    fn norm(&mut self, x: Value) -> Result<Value> {
        let w = self.weight(DType::F32, &[self.layers.hidden()])?;
        Ok(self.g.rms_norm(x, Some(w), 1e-5)?)
    }
}

impl Layers {
    /// Numbers of the residual stream.
    pub fn hidden(&self) -> usize {
        self.heads * self.head_dim
    }

    /// The graph, whose results are logits and the residual stream, and what its inputs are to be filled with.
    ///
    /// # Errors
    /// When no graph is so.
    pub fn graph(&self) -> Result<(Graph, Vec<Filling>)> {
        ensure!(self.count > 0, "no layers");
        let (hidden, kv) = (self.hidden(), self.kv_heads * self.head_dim);
        let mut b = Builder {
            g: GraphBuilder::new(self.max_rows),
            fillings: Vec::new(),
            layers: *self,
        };
        let tokens = b.row("tokens", Row::Token)?;
        let positions = b.row("positions", Row::Position)?;
        let sequences = b.row("sequences", Row::Sequence)?;
        let slots = b.row("slots", Row::Slot)?;
        b.fillings.push(Filling::Blocks);
        let spec = fixed(DType::I32, &[1, self.blocks])?;
        let tables = b.g.tensor("tables", spec)?;
        let frequencies = b.weight(DType::F32, &[self.head_dim / 2])?;
        let table = b.weight(DType::BF16, &[self.tokens, hidden])?;
        let scale = 1.0 / (self.head_dim as f64).sqrt();
        let heads = |n: usize| Shape::rows(&[n, self.head_dim]);
        let mut x = b.g.get_rows(table, tokens)?;
        for layer in 0..self.count {
            let normed = b.norm(x)?;
            let q = b.product(normed, self.weights, hidden, hidden)?;
            let k = b.product(normed, self.weights, kv, hidden)?;
            let v = b.product(normed, self.of_values, kv, hidden)?;
            let q = b.g.reshape(q, heads(self.heads)?)?;
            let k = b.g.reshape(k, heads(self.kv_heads)?)?;
            let v = b.g.reshape(v, heads(self.kv_heads)?)?;
            let q = b.g.rope(q, positions, frequencies, self.interleaved)?;
            let k = b.g.rope(k, positions, frequencies, self.interleaved)?;
            let spec = CacheSpec {
                dtype: self.cache,
                blocks: self.blocks,
                block_len: BLOCK_LEN,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
            };
            let cache = b.g.cache(format!("cache{layer}"), spec)?;
            let bytes = spec.bytes().unwrap_or(0);
            b.fillings.push(Filling::Zeros(bytes));
            b.g.cache_write(cache, k, v, slots)?;
            let y = (b.g).paged_attention(q, cache, tables, sequences, positions, scale, 0, 0.0)?;
            let y = b.g.reshape(y, Shape::rows(&[hidden])?)?;
            let y = b.product(y, self.weights, hidden, hidden)?;
            x = b.g.add(x, y)?;
            let normed = b.norm(x)?;
            let gate = b.product(normed, self.weights, self.inner, hidden)?;
            let up = b.product(normed, self.weights, self.inner, hidden)?;
            let y = b.g.swiglu(gate, up)?;
            let y = b.product(y, self.of_values, hidden, self.inner)?;
            x = b.g.add(x, y)?;
        }
        let normed = b.norm(x)?;
        let logits = b.product(normed, self.weights, self.tokens, hidden)?;
        Ok((b.g.finish(&[logits, x])?, b.fillings))
    }
}
