//! Golden cases of elementwise rows in other shapes. What such an op makes of an element it makes of it anywhere, so the
//! reference values of a small case are those of any other shape that holds the same elements.

use anyhow::Context;
use hotcell_graph::{
    DType, Graph, GraphBuilder, Shape, TensorSpec, Value,
    op::{Attribute, OpRow, activation, binary, find, unary},
};

use super::{Case, CaseInput, Reference, attributes};

/// The rows whose results are made element by element.
pub fn elementwise() -> impl Iterator<Item = &'static OpRow> {
    let rows = [unary::ROWS, binary::ROWS, activation::ROWS];
    // Two of them say something about all elements.
    rows.into_iter()
        .flatten()
        .copied()
        .filter(|row| row.shapes != "[]")
}

/// A class of shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// No element.
    Empty,
    /// One, without an axis.
    Scalar,
    /// Two axes of odd sizes.
    Odd,
    /// More than 20,000 elements.
    Large,
    /// Inputs that lie in memory the other way round.
    NonContiguous,
}

impl Form {
    /// All of them.
    pub const ALL: [Form; 5] = [
        Form::Empty,
        Form::Scalar,
        Form::Odd,
        Form::Large,
        Form::NonContiguous,
    ];

    fn dims(self) -> &'static [usize] {
        match self {
            Form::Empty => &[3, 0],
            Form::Scalar => &[],
            Form::Odd => &[7, 3],
            Form::Large => &[3, 6967],
            Form::NonContiguous => &[13, 5],
        }
    }
}

/// A case whose operands all have the result's shape.
pub struct Flat {
    row: &'static OpRow,
    attributes: Vec<Attribute>,
    /// `None`: not given.
    operands: Vec<Option<(DType, Vec<u8>)>>,
    /// Dtype of the result.
    pub result: DType,
    elements: usize,
}

/// A flat case's elements in another shape.
pub struct Formed {
    /// The graph.
    pub graph: Graph,
    /// Bytes of its inputs.
    pub inputs: Vec<Vec<u8>>,
    /// Which elements of the case's result the elements of this result have to be.
    pub elements: Vec<usize>,
}

impl Flat {
    /// Dtypes of the operands.
    pub fn dtypes(&self) -> Vec<Option<DType>> {
        let dtypes = self.operands.iter();
        dtypes
            .map(|o| o.as_ref().map(|(dtype, _)| *dtype))
            .collect()
    }

    /// The elements in a shape.
    ///
    /// # Errors
    /// When the op refuses it.
    pub fn form(&self, form: Form) -> anyhow::Result<Formed> {
        let dims = form.dims();
        let count: usize = dims.iter().product();
        let middle = self.elements / 2;
        let elements: Vec<usize> = (0..count).map(|i| (middle + i) % self.elements).collect();
        let mut builder = GraphBuilder::new(0);
        let (mut values, mut inputs) = (Vec::new(), Vec::new());
        for (i, operand) in self.operands.iter().enumerate() {
            let Some((dtype, bytes)) = operand else {
                values.push(Value::Absent);
                continue;
            };
            let turned: Vec<usize> = match form {
                Form::NonContiguous => dims.iter().rev().copied().collect(),
                _ => dims.to_vec(),
            };
            let spec = TensorSpec::new(*dtype, Shape::fixed(&turned)?)?;
            let value = builder.tensor(format!("input {i}"), spec)?;
            values.push(match form {
                Form::NonContiguous => builder.transpose(value, &[])?,
                _ => value,
            });
            let width = dtype.block_bytes();
            let element = |at: usize| &bytes[at * width..][..width];
            let picked: Vec<&[u8]> = match (form, dims) {
                (Form::NonContiguous, [rows, columns]) => (0..*columns)
                    .flat_map(|c| (0..*rows).map(move |r| r * columns + c))
                    .map(|i| element(elements[i]))
                    .collect(),
                _ => elements.iter().map(|&at| element(at)).collect(),
            };
            inputs.push(picked.concat());
        }
        let made = builder.apply(self.row, values, self.attributes.clone())?;
        Ok(Formed {
            graph: builder.finish(&made)?,
            inputs,
            elements,
        })
    }
}

impl Flat {
    /// The case's own elements, each operand behind two ops that undo one another, and the result before two: what a device
    /// makes one pass of. It gives the result twice, before and after them.
    ///
    /// # Errors
    /// When it is refused.
    pub fn among(&self) -> anyhow::Result<Formed> {
        let mut builder = GraphBuilder::new(0);
        let there_and_back = |builder: &mut GraphBuilder, dtype: DType, value| {
            let inverts_bits = dtype == DType::Bool || dtype.is_integer();
            let op = if inverts_bits { "bitwise_not" } else { "neg" };
            let row = find(op).context("no such op")?;
            let mut value = value;
            for _ in 0..2 {
                let made = builder.apply(row, vec![value], vec![])?;
                value = *made.first().context("no result")?;
            }
            anyhow::Ok(value)
        };
        let (mut values, mut inputs) = (Vec::new(), Vec::new());
        for (i, operand) in self.operands.iter().enumerate() {
            let Some((dtype, bytes)) = operand else {
                values.push(Value::Absent);
                continue;
            };
            let spec = TensorSpec::new(*dtype, Shape::fixed(&[self.elements])?)?;
            let value = builder.tensor(format!("input {i}"), spec)?;
            values.push(there_and_back(&mut builder, *dtype, value)?);
            inputs.push(bytes.clone());
        }
        let made = builder.apply(self.row, values, self.attributes.clone())?;
        let result = *made.first().context("no result")?;
        let after = there_and_back(&mut builder, self.result, result)?;
        Ok(Formed {
            graph: builder.finish(&[result, after])?,
            inputs,
            elements: (0..self.elements).collect(),
        })
    }
}

impl Case {
    /// The case with operands of the result's shape, if it is one of an elementwise row that runs, with plain dtypes.
    pub fn flat(&self) -> Option<Flat> {
        let row = find(&self.op)?;
        let ([node], [(result, _)], None, None) =
            (&self.nodes[..], &self.outputs[..], self.rows, self.fails)
        else {
            return None;
        };
        if node.op != row.name || !elementwise().any(|r| r.name == row.name) {
            return None;
        }
        let dims = |spec: &TensorSpec| -> Vec<usize> {
            spec.shape.dims().iter().map(|d| d.at(0)).collect()
        };
        let out = dims(result);
        let elements: usize = out.iter().product();
        if elements == 0 || result.dtype.is_block() {
            return None;
        }
        let operand = |reference: &Reference| match reference {
            Reference::Absent => Some(None),
            Reference::Node(..) => None,
            Reference::Input(i) => match self.inputs.get(*i)? {
                CaseInput::Tensor(spec, range) if !spec.dtype.is_block() => {
                    let bytes = spread(self.bytes(range), &dims(spec), &out, spec.dtype)?;
                    Some(Some((spec.dtype, bytes)))
                }
                _ => None,
            },
        };
        Some(Flat {
            row,
            attributes: attributes(row, &node.attributes, &self.data).ok()?,
            operands: node.inputs.iter().map(operand).collect::<Option<_>>()?,
            result: result.dtype,
            elements,
        })
    }
}

/// A tensor's bytes broadcast to a shape.
fn spread(bytes: &[u8], from: &[usize], to: &[usize], dtype: DType) -> Option<Vec<u8>> {
    let width = dtype.block_bytes();
    let outer = to.len().checked_sub(from.len())?;
    let mut spread = Vec::new();
    for element in 0..to.iter().product() {
        let (mut rest, mut at, mut step) = (element, 0, 1);
        for (axis, &size) in to.iter().enumerate().rev() {
            let place = rest % size;
            rest /= size;
            if let Some(&own) = axis.checked_sub(outer).and_then(|axis| from.get(axis)) {
                if own != 1 {
                    at += place * step;
                }
                step *= own;
            }
        }
        spread.extend_from_slice(bytes.get(at * width..(at + 1) * width)?);
    }
    Some(spread)
}
