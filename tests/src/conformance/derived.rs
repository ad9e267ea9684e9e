//! Golden cases in other forms: of inputs that lie in memory the other way round, and of elements of another dtype.

use anyhow::{Context, Result};
use hotcell_graph::{DType, Graph, GraphBuilder, Shape, TensorSpec, Value, op::OpRow};

use super::{Case, CaseInput, Refused};

/// Rows that only move elements, whatever they are, and the inputs that they move; none: all of them.
const MOVING: &[(&[&str], Option<usize>)] = &[
    (
        &[
            "reshape",
            "transpose",
            "broadcast_to",
            "slice",
            "pad",
            "expand_dims",
            "squeeze",
            "flatten",
            "tile",
            "repeat",
            "flip",
            "concat",
            "stack",
            "split",
            "tril",
            "triu",
            "diag",
            "diagonal",
            "roll",
            "all_gather",
            "as_strided",
            "slice_update",
            "im2col",
        ],
        None,
    ),
    (
        &["take", "take_along_axis", "gather_nd", "slice_dynamic"],
        Some(0),
    ),
];

/// Whether a row only moves elements.
pub fn moves(row: &OpRow) -> bool {
    MOVING.iter().any(|(rows, _)| rows.contains(&row.name))
}

/// Whether this input of a row is one of those that it only moves: then [`Case::numbered`] has cases of every plain dtype.
pub fn moves_input(row: &OpRow, input: &str) -> bool {
    let of_row = MOVING.iter().find(|(rows, _)| rows.contains(&row.name));
    of_row.is_some_and(|(_, which)| match which {
        None => row.inputs.iter().any(|spec| spec.name == input),
        Some(i) => row.inputs.get(*i).is_some_and(|spec| spec.name == input),
    })
}

/// A graph and the bytes of its inputs.
pub struct Derived {
    /// The graph.
    pub graph: Graph,
    /// Bytes of its inputs.
    pub inputs: Vec<Vec<u8>>,
}

impl Derived {
    /// Its inputs as an executor takes them.
    pub fn inputs(&self) -> Vec<&[u8]> {
        self.inputs.iter().map(Vec::as_slice).collect()
    }
}

fn dims(spec: &TensorSpec) -> Vec<usize> {
    spec.shape.dims().iter().map(|d| d.at(0)).collect()
}

/// The bytes of a tensor whose axes are those of `bytes` in reverse.
fn reversed(bytes: &[u8], dims: &[usize], width: usize) -> Vec<u8> {
    let mut turned = Vec::with_capacity(bytes.len());
    for element in 0..dims.iter().product() {
        // The innermost axis is the outermost of the original.
        let (mut rest, mut at) = (element, 0);
        for &size in dims {
            at = at * size + rest % size;
            rest /= size;
        }
        turned.extend_from_slice(&bytes[at * width..][..width]);
    }
    turned
}

/// Numbers as elements of a dtype, different ones as far as it has so many.
fn numbered(dtype: DType, numbers: impl Iterator<Item = usize>) -> Vec<u8> {
    let width = dtype.block_bytes();
    let mut bytes = Vec::new();
    for number in numbers {
        let number = match dtype {
            DType::Bool => number.count_ones() as usize % 2,
            _ => number,
        };
        bytes.extend((0..width).map(|byte| (number >> (8 * (byte % 8))) as u8));
    }
    bytes
}

impl Case {
    /// A graph of its nodes over other inputs. `dtype`: what its results are instead of what they were.
    fn of(&self, builder: GraphBuilder, inputs: Vec<Value>, dtype: Option<DType>) -> Result<Graph> {
        let graph = self.build_of(builder, &inputs, dtype);
        graph.map_err(|refused| match refused {
            Refused::Last(error) => error.into(),
            Refused::Other(error) => error,
        })
    }

    /// The case with every input turned in memory and back in the graph, if it has one that can be.
    ///
    /// # Errors
    /// When it is refused.
    pub fn turned(&self) -> Result<Option<Derived>> {
        if self.rows.is_some() || self.fails.is_some() {
            return Ok(None);
        }
        let mut builder = GraphBuilder::new(0);
        let (mut values, mut inputs, mut any) = (Vec::new(), Vec::new(), false);
        for (i, input) in self.inputs.iter().enumerate() {
            let CaseInput::Tensor(spec, range) = input else {
                return Ok(None);
            };
            let (bytes, dims, name) = (self.bytes(range), dims(spec), format!("input {i}"));
            if spec.dtype.is_block() {
                values.push(builder.constant(name, spec.clone())?);
                inputs.push(bytes.to_vec());
                continue;
            }
            any |= dims.len() > 1;
            let turned: Vec<usize> = dims.iter().rev().copied().collect();
            let spec = TensorSpec::new(spec.dtype, Shape::fixed(&turned)?)?;
            let width = spec.dtype.block_bytes();
            let value = builder.tensor(name, spec)?;
            values.push(builder.transpose(value, &[])?);
            inputs.push(reversed(bytes, &dims, width));
        }
        if !any {
            return Ok(None);
        }
        let graph = self.of(builder, values, None)?;
        Ok(Some(Derived { graph, inputs }))
    }

    /// Which of its inputs are moved, if all its ops only move elements.
    fn moved(&self) -> Option<Vec<usize>> {
        if self.rows.is_some() || self.fails.is_some() {
            return None;
        }
        let of = |op: &str| MOVING.iter().find(|(rows, _)| rows.contains(&op));
        let mut which = of(&self.op)?.1;
        for node in &self.nodes {
            let (_, moved) = of(&node.op)?;
            which = which.or(*moved);
        }
        // A view before an op whose other inputs say where: only a single node is simple enough.
        if which.is_some() && self.nodes.len() > 1 {
            return None;
        }
        let which = match which {
            Some(input) => vec![input],
            None => (0..self.inputs.len()).collect(),
        };
        // Of different ones some are converted.
        let dtype = |i: &usize| match self.inputs.get(*i)? {
            CaseInput::Tensor(spec, _) => Some(spec.dtype),
            CaseInput::Cache { .. } => None,
        };
        let first = dtype(which.first()?)?;
        let same = which.iter().all(|i| dtype(i) == Some(first))
            && self.outputs.iter().all(|(spec, _)| spec.dtype == first);
        same.then_some(which)
    }

    /// The case with elements of another dtype, numbered from 1 on through all its inputs, if it only moves elements. What is
    /// none of them, as padding, is 0.
    ///
    /// # Errors
    /// When it is refused.
    pub fn numbered(&self, dtype: DType) -> Result<Option<Derived>> {
        let Some(which) = self.moved() else {
            return Ok(None);
        };
        let mut builder = GraphBuilder::new(0);
        let (mut values, mut inputs, mut next) = (Vec::new(), Vec::new(), 1);
        for (i, input) in self.inputs.iter().enumerate() {
            let CaseInput::Tensor(spec, range) = input else {
                return Ok(None);
            };
            if spec.dtype.is_block() {
                return Ok(None);
            }
            let is_moved = which.contains(&i);
            let made = match is_moved {
                true => TensorSpec::new(dtype, spec.shape.clone())?,
                false => spec.clone(),
            };
            values.push(builder.tensor(format!("input {i}"), made)?);
            inputs.push(match is_moved {
                true => {
                    let count: usize = dims(spec).iter().product();
                    next += count;
                    numbered(dtype, next - count..next)
                }
                false => self.bytes(range).to_vec(),
            });
        }
        let graph = self.of(builder, values, Some(dtype))?;
        Ok(Some(Derived { graph, inputs }))
    }

    /// What a run of [`Case::numbered`] with `u64` says of where elements go, for elements of another dtype.
    ///
    /// # Errors
    /// For a number that no element has.
    pub fn placed(&self, places: &[Vec<u8>], dtype: DType) -> Result<Vec<Vec<u8>>> {
        let place = |bytes: &[u8]| -> Result<usize> {
            Ok(u64::from_le_bytes(bytes.try_into().context("8 bytes")?) as usize)
        };
        let of = |output: &Vec<u8>| {
            let numbers: Result<Vec<usize>> = output.chunks(8).map(place).collect();
            Ok(numbered(dtype, numbers?.into_iter()))
        };
        places.iter().map(of).collect()
    }

    /// Whether such a run moves the case's own elements to where its results have them.
    ///
    /// # Errors
    /// The result that is not so.
    pub fn moves_so(&self, places: &[Vec<u8>]) -> Result<()> {
        let which = self.moved().context("it does more than move")?;
        let mut elements: Vec<&[u8]> = vec![&[0; 16]];
        for (i, input) in self.inputs.iter().enumerate() {
            if let (CaseInput::Tensor(spec, range), true) = (input, which.contains(&i)) {
                elements.extend(self.bytes(range).chunks(spec.dtype.block_bytes()));
            }
        }
        for (i, ((spec, range), places)) in self.outputs.iter().zip(places).enumerate() {
            let mut moved = Vec::new();
            for place in places.chunks(8) {
                let place = u64::from_le_bytes(place.try_into()?) as usize;
                let element = elements.get(place).context("no such element")?;
                let width = spec.dtype.block_bytes();
                moved.extend_from_slice(
                    element
                        .get(..width)
                        .context("an element of another dtype")?,
                );
            }
            let same = moved == self.bytes(range);
            anyhow::ensure!(same, "result {i} ({spec}) has other elements");
        }
        Ok(())
    }

    /// The dtype of its first input, by which its row's cases are told apart.
    pub fn first_dtype(&self) -> Option<DType> {
        self.inputs.first().map(|input| match input {
            CaseInput::Tensor(spec, _) => spec.dtype,
            CaseInput::Cache { spec, .. } => spec.dtype,
        })
    }
}
