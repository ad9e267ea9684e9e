//! What architectures weave their graphs with: a builder that finds weights and remembers where inputs come from.

use std::ops::Range;

use hotcell_graph::{DType, Graph, GraphBuilder, GraphError, Shape, TensorSpec, Value};
use hotcell_kernels::communicator::Share;

use super::{config::ModelConfig, run::RunShape};
use crate::{
    format::ModelError,
    weights::{NameScheme, Weights},
};

/// Where the bytes of a graph's input come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// A weight, or some rows of it, in place in its file.
    Weight {
        /// Its name.
        name: String,
        /// Which rows; none: all.
        rows: Option<Range<usize>>,
    },
    /// Weights of one dtype, or rows of them, copied together one after another.
    Stack(Vec<Piece>),
    /// A small weight (norm, bias), or some elements of it, converted to f32.
    Vector {
        /// Its name.
        name: String,
        /// Which elements; none: all.
        elements: Option<Range<usize>>,
    },
    /// The same plus one: a norm whose file holds what is over one.
    OneAnd(String),
    /// The inverse frequencies of the positions.
    Frequencies,
    /// Those of the layers that have others.
    LocalFrequencies,
    /// The KV cache of a layer.
    Cache(usize),
    /// Token ids, one per row.
    Tokens,
    /// Positions in their sequences, one per row.
    Positions,
    /// Which block table a row reads, one per row.
    Sequences,
    /// Where a row's keys and values go in layers of a kind, one per row.
    Slots(usize),
    /// Block tables of all sequences, for layers of a kind.
    Tables(usize),
    /// Hidden states that the process with the layers before these handed on.
    Handed,
    /// Hidden states that the body computed.
    Hidden,
    /// Which of them the head reads, one per row.
    Picks,
}

/// A weight, or some rows of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// Its name.
    pub name: String,
    /// Which rows, counted through all dimensions but the last; none: all.
    pub rows: Option<Range<usize>>,
}

/// A graph and where each of its inputs comes from.
#[derive(Debug)]
pub struct Sourced {
    /// The graph.
    pub graph: Graph,
    /// One source per input of the graph.
    pub sources: Vec<Source>,
}

/// Why a model has no graphs.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A tensor is missing or has another shape.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Sizes that the catalogue refuses.
    #[error("the model's sizes do not fit together: {0}")]
    Graph(#[from] GraphError),
}

/// A model that graphs are made of.
#[derive(Clone, Copy)]
pub struct Pattern<'a> {
    /// Its sizes and constants.
    pub config: &'a ModelConfig,
    /// How its tensors are named.
    pub names: NameScheme,
    /// Its tensors.
    pub weights: &'a Weights,
    /// Sizes that it is run with.
    pub shape: &'a RunShape,
}

pub(super) struct Weaver<'a> {
    pub builder: GraphBuilder,
    pub config: &'a ModelConfig,
    pub names: NameScheme,
    pub shape: &'a RunShape,
    pub weights: &'a Weights,
    sources: Vec<Source>,
}

impl<'a> Weaver<'a> {
    pub fn new(pattern: Pattern<'a>, max_rows: usize) -> Self {
        let Pattern {
            config,
            names,
            weights,
            shape,
        } = pattern;
        Self {
            builder: GraphBuilder::new(max_rows),
            config,
            names,
            shape,
            weights,
            sources: vec![],
        }
    }

    pub fn finish(self, output: Value) -> Result<Sourced, BuildError> {
        Ok(Sourced {
            graph: self.builder.finish(&[output])?,
            sources: self.sources,
        })
    }

    /// A weight of this shape, in place.
    pub fn weight(&mut self, name: &str, shape: &[usize]) -> Result<Value, BuildError> {
        let dtype = self.weights.expect(name, shape)?.dtype;
        let source = Source::Weight {
            name: name.to_owned(),
            rows: None,
        };
        self.constant(source, name, dtype, shape)
    }

    /// Pieces of weights that have one shape and dtype, one after another, which together have another shape.
    pub fn stack(
        &mut self,
        pieces: Vec<Piece>,
        each: &[usize],
        shape: &[usize],
    ) -> Result<Value, BuildError> {
        let mut dtype = None;
        for Piece { name, .. } in &pieces {
            let found = self.weights.expect(name, each)?.dtype;
            let first = *dtype.get_or_insert(found);
            if found != first {
                return Err(BuildError::Model(ModelError::Unsupported {
                    file: "the model's weights".to_owned(),
                    what: format!(
                        "tensor '{name}' is {found} and its likes are {first}, which is not supported; \
                         use a model whose experts are stored alike"
                    ),
                }));
            }
        }
        let name = pieces.first().map(|piece| piece.name.clone());
        let name = name.unwrap_or_default();
        let dtype = dtype.unwrap_or(DType::F32);
        self.constant(Source::Stack(pieces), &name, dtype, shape)
    }

    fn constant(
        &mut self,
        source: Source,
        name: &str,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Value, BuildError> {
        let spec = TensorSpec::new(dtype, Shape::fixed(shape)?)?;
        self.sources.push(source);
        Ok(self.builder.constant(name, spec)?)
    }

    fn vector(&mut self, source: Source, name: &str, n: usize) -> Result<Value, BuildError> {
        self.weights.expect(name, &[n])?;
        self.constant(source, name, DType::F32, &[n])
    }

    pub fn input(
        &mut self,
        source: Source,
        name: &str,
        dtype: DType,
        shape: Shape,
    ) -> Result<Value, BuildError> {
        self.sources.push(source);
        Ok(self.builder.tensor(name, TensorSpec::new(dtype, shape)?)?)
    }

    pub fn per_row(&mut self, source: Source, name: &str) -> Result<Value, BuildError> {
        self.input(source, name, DType::I32, Shape::rows(&[])?)
    }

    /// The cache of a layer.
    pub fn cache(&mut self, layer: usize) -> Result<Value, BuildError> {
        self.sources.push(Source::Cache(layer));
        let spec = self.shape.cache(self.config, self.config.kind(layer));
        Ok(self.builder.cache(format!("cache.{layer}"), spec)?)
    }

    /// A number.
    pub fn scalar(&mut self, value: f32) -> Result<Value, BuildError> {
        let bytes = value.to_le_bytes();
        Ok(self.builder.literal(DType::F32, Shape::default(), &bytes)?)
    }

    /// `x @ wᵀ (+ bias)`, `[rows, n]`. Where other members of a communicator compute the model as well, each computes its
    /// part, which is then given to all.
    pub fn linear(
        &mut self,
        x: Value,
        weight: &str,
        bias: Option<&str>,
        n: usize,
        k: usize,
    ) -> Result<Value, BuildError> {
        let share = self.shape.parts.columns();
        let y = self.linear_part(share, x, weight, bias, n, k)?;
        self.gathered(share, y, n)
    }

    /// A member's part of [`Weaver::linear`]: `[rows, share of n]`.
    pub fn linear_part(
        &mut self,
        share: Share,
        x: Value,
        weight: &str,
        bias: Option<&str>,
        n: usize,
        k: usize,
    ) -> Result<Value, BuildError> {
        let (part, own) = (share.of(n), share.divides(n).then(|| share.range(n)));
        let dtype = self.weights.expect(weight, &[n, k])?.dtype;
        let source = Source::Weight {
            name: weight.to_owned(),
            rows: own.clone(),
        };
        let w = self.constant(source, weight, dtype, &[part, k])?;
        let y = self.builder.mul_mat(x, w)?;
        let Some(bias) = bias else {
            return Ok(y);
        };
        self.weights.expect(bias, &[n])?;
        let source = Source::Vector {
            name: bias.to_owned(),
            elements: own,
        };
        let b = self.constant(source, bias, DType::F32, &[part])?;
        Ok(self.builder.add(y, b)?)
    }

    /// What all members have of `n` columns, of which `part` is one member's share.
    pub fn gathered(&mut self, share: Share, part: Value, n: usize) -> Result<Value, BuildError> {
        match share.divides(n) {
            true => Ok(self.builder.all_gather(part, share.members as i64)?),
            false => Ok(part),
        }
    }

    /// RMS norm over the last axis, `n` wide.
    pub fn norm(&mut self, x: Value, weight: &str, n: usize) -> Result<Value, BuildError> {
        let source = match self.config.norms_less_one {
            true => Source::OneAnd(weight.to_owned()),
            false => Source::Vector {
                name: weight.to_owned(),
                elements: None,
            },
        };
        let w = self.vector(source, weight, n)?;
        let eps = f64::from(self.config.rms_eps);
        Ok(self.builder.rms_norm(x, Some(w), eps)?)
    }
}
