//! Maps one ONNX node onto ops of the catalogue.
//!
//! Inputs become inputs of our graph when a mapping first asks for them; what ONNX gives as a tensor and we
//! as an attribute (axes, shapes, pads, k) is read from the case instead.

mod attention;
mod elementwise;
mod index;
mod linear;
mod loss;
mod norm;
mod pool;
mod quant;
mod recurrent;
mod reduce;
mod resize;
mod shape;
mod signal;

use std::cell::RefCell;

use anyhow::{Context, Result, anyhow, bail};
use hotcell_graph::{
    DType, Graph, GraphBuilder, Shape, Value,
    op::{self, Attribute, ValueSpec},
};

use super::case::{self, Case, Tensor};

/// A case as a graph of ours.
pub struct Mapped<'c> {
    /// The graph.
    pub graph: Graph,
    /// What its inputs are given.
    pub inputs: Vec<&'c Tensor>,
}

type Mapping = fn(&Mapper<'_>, &str) -> Result<Option<Vec<Value>>>;

const MAPPINGS: &[Mapping] = &[
    elementwise::map,
    reduce::map,
    shape::map,
    index::map,
    linear::map,
    norm::map,
    attention::map,
    pool::map,
    quant::map,
    loss::map,
    resize::map,
    signal::map,
    recurrent::map,
];

/// Builds the graph of a case.
///
/// # Errors
/// Says what has no counterpart in the catalogue.
pub fn map(case: &Case) -> Result<Mapped<'_>> {
    if !["", "ai.onnx.preview"].contains(&case.node.domain.as_str()) {
        bail!("ops of the domain {} have no counterpart", case.node.domain);
    }
    for (_, expected) in &case.outputs {
        if let Err(e) = expected {
            bail!("{e}");
        }
    }
    let mapper = Mapper {
        case,
        state: RefCell::new(State {
            builder: GraphBuilder::new(0),
            bound: vec![],
        }),
    };
    let op = case.node.op_type.as_str();
    let mut found = None;
    for mapping in MAPPINGS {
        found = mapping(&mapper, op)?;
        if found.is_some() {
            break;
        }
    }
    let values = found.with_context(|| format!("{op} has no counterpart in the catalogue"))?;
    let mut outputs: Vec<Value> = case
        .outputs
        .iter()
        .map(|(name, _)| {
            let place = case.node.output.iter().position(|o| o == name);
            place
                .and_then(|i| values.get(i).copied())
                .with_context(|| format!("{op}'s output {name} is not mapped"))
        })
        .collect::<Result<_>>()?;
    // A plan writes each output once and from a node, so that what only passes through is copied.
    for i in 0..outputs.len() {
        if matches!(outputs[i], Value::Input(_)) || outputs[..i].contains(&outputs[i]) {
            let dtype = Attribute::DType(mapper.dtype(outputs[i])?);
            outputs[i] = mapper.one("cast", &[outputs[i]], vec![dtype])?;
        }
    }
    let state = mapper.state.into_inner();
    let inputs = state
        .bound
        .iter()
        .map(|(name, _)| tensor(case, name))
        .collect::<Result<_>>()?;
    Ok(Mapped {
        graph: state.builder.finish(&outputs)?,
        inputs,
    })
}

fn tensor<'c>(case: &'c Case, name: &str) -> Result<&'c Tensor> {
    match case.inputs.get(name) {
        Some(Ok(t)) => Ok(t),
        Some(Err(e)) => Err(anyhow!("{e}")),
        None => bail!("the case has no input {name}"),
    }
}

struct State {
    builder: GraphBuilder,
    bound: Vec<(String, Value)>,
}

/// The graph so far, with a method for each op that mappings use often.
struct Mapper<'c> {
    case: &'c Case,
    // So that calls nest: m.mul(m.x(0)?, m.x(1)?)?.
    state: RefCell<State>,
}

fn ints(values: &[i64]) -> Attribute {
    Attribute::Ints(values.to_vec())
}

fn word(name: &str) -> Attribute {
    Attribute::Name(name.to_owned())
}

/// A negative axis counted from the end.
fn axis_of(axis: i64, rank: usize) -> Result<usize> {
    let turned = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(turned)
        .ok()
        .filter(|&a| a <= rank)
        .with_context(|| format!("axis {axis} of {rank}"))
}

fn as_i64(dims: &[usize]) -> Vec<i64> {
    dims.iter().map(|&d| d as i64).collect()
}

impl<'c> Mapper<'c> {
    // What the case says.

    fn input_name(&self, i: usize) -> Option<&'c str> {
        let name = self.case.node.input.get(i)?;
        (!name.is_empty()).then_some(name.as_str())
    }

    fn inputs(&self) -> usize {
        self.case.node.input.len()
    }

    /// Input `i` of the node, read now.
    fn given(&self, i: usize) -> Result<Option<&'c Tensor>> {
        self.input_name(i).map(|n| tensor(self.case, n)).transpose()
    }

    /// Input `i` of the node as integers, read now.
    fn given_ints(&self, i: usize) -> Result<Option<Vec<i64>>> {
        let Some(t) = self.given(i)? else {
            return Ok(None);
        };
        let values = t.integers()?.into_iter().map(|v| v as i64).collect();
        Ok(Some(values))
    }

    /// Input `i` of the node, one number, read now.
    fn given_number(&self, i: usize) -> Result<Option<f64>> {
        let Some(t) = self.given(i)? else {
            return Ok(None);
        };
        Ok(t.numbers()?.first().copied())
    }

    fn attribute(&self, name: &str) -> Option<&'c super::proto::AttributeProto> {
        self.case.node.attribute.iter().find(|a| a.name == name)
    }

    fn int(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).map_or(default, |a| a.i)
    }

    fn float(&self, name: &str, default: f64) -> f64 {
        self.attribute(name).map_or(default, |a| f64::from(a.f))
    }

    fn text(&self, name: &str, default: &'static str) -> &'c str {
        self.attribute(name)
            .and_then(|a| std::str::from_utf8(&a.s).ok())
            .unwrap_or(default)
    }

    fn list(&self, name: &str) -> Option<Vec<i64>> {
        self.attribute(name).map(|a| a.ints.clone())
    }

    /// The dtype that output `i` must have.
    fn wanted(&self, i: usize) -> Result<DType> {
        let name = self.case.node.output.get(i);
        let found = self.case.outputs.iter().find(|(n, _)| Some(n) == name);
        match found {
            Some((_, Ok(t))) => Ok(t.dtype),
            _ => bail!("output {i} is no tensor"),
        }
    }

    /// Whether the case looks at output `i`.
    fn wants_output(&self, i: usize) -> bool {
        let name = self.case.node.output.get(i);
        self.case.outputs.iter().any(|(n, _)| Some(n) == name)
    }

    // Values.

    /// Input `i` of the node as an input of the graph.
    fn x(&self, i: usize) -> Result<Value> {
        self.optional(i)?
            .with_context(|| format!("input {i} is absent"))
    }

    fn optional(&self, i: usize) -> Result<Option<Value>> {
        let Some(name) = self.input_name(i) else {
            return Ok(None);
        };
        let mut state = self.state.borrow_mut();
        if let Some((_, value)) = state.bound.iter().find(|(n, _)| n == name) {
            return Ok(Some(*value));
        }
        let value = state
            .builder
            .tensor(name, tensor(self.case, name)?.spec()?)?;
        state.bound.push((name.to_owned(), value));
        Ok(Some(value))
    }

    fn all_inputs(&self) -> Result<Vec<Value>> {
        (0..self.inputs()).map(|i| self.x(i)).collect()
    }

    fn op(&self, name: &str, inputs: &[Value], attributes: Vec<Attribute>) -> Result<Vec<Value>> {
        let row = op::find(name).with_context(|| format!("there is no op named {name}"))?;
        let mut state = self.state.borrow_mut();
        Ok(state.builder.apply(row, inputs.to_vec(), attributes)?)
    }

    fn one(&self, name: &str, inputs: &[Value], attributes: Vec<Attribute>) -> Result<Value> {
        let results = self.op(name, inputs, attributes)?;
        results.first().copied().context("an op without result")
    }

    fn dims(&self, value: Value) -> Result<Vec<usize>> {
        match self.state.borrow().builder.spec(value)? {
            ValueSpec::Tensor(t) => Ok(t.shape.dims().iter().map(|d| d.at(0)).collect()),
            other => bail!("{other} is no tensor"),
        }
    }

    fn dtype(&self, value: Value) -> Result<DType> {
        match self.state.borrow().builder.spec(value)? {
            ValueSpec::Tensor(t) => Ok(t.dtype),
            other => bail!("{other} is no tensor"),
        }
    }

    /// A tensor that is part of the graph.
    fn literal(&self, tensor: &Tensor) -> Result<Value> {
        let attributes = vec![
            Attribute::DType(tensor.dtype),
            Attribute::Shape(Shape::fixed(&tensor.dims)?),
            Attribute::Bytes(tensor.bytes.clone()),
        ];
        self.one("literal", &[], attributes)
    }

    fn i64s(&self, dims: &[usize], values: &[i64]) -> Result<Value> {
        self.literal(&Tensor {
            dtype: DType::I64,
            dims: dims.to_vec(),
            bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        })
    }

    fn f32s(&self, dims: &[usize], values: &[f32]) -> Result<Value> {
        self.literal(&Tensor {
            dtype: DType::F32,
            dims: dims.to_vec(),
            bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        })
    }

    /// A scalar of a dtype.
    fn number(&self, value: f64, dtype: DType) -> Result<Value> {
        let wide = self.literal(&Tensor {
            dtype: DType::F64,
            dims: vec![],
            bytes: value.to_le_bytes().to_vec(),
        })?;
        self.cast(wide, dtype)
    }

    /// A scalar of `value`'s dtype.
    fn like(&self, number: f64, value: Value) -> Result<Value> {
        self.number(number, self.dtype(value)?)
    }

    fn arange(&self, start: f64, step: f64, length: usize, dtype: DType) -> Result<Value> {
        let attributes = vec![
            Attribute::Float(start),
            Attribute::Float(step),
            Attribute::Int(length as i64),
            Attribute::DType(dtype),
        ];
        self.one("arange", &[], attributes)
    }

    /// 0, 1, … along `axis` of `rank` axes, the others of size 1, as i64.
    fn places(&self, length: usize, axis: usize, rank: usize) -> Result<Value> {
        let flat = self.arange(0.0, 1.0, length, DType::I64)?;
        let mut dims = vec![1; rank];
        *dims.get_mut(axis).context("an axis past the rank")? = length;
        self.reshape(flat, &dims)
    }

    fn cast(&self, x: Value, dtype: DType) -> Result<Value> {
        if self.dtype(x)? == dtype {
            return Ok(x);
        }
        self.one("cast", &[x], vec![Attribute::DType(dtype)])
    }

    fn unary(&self, name: &str, x: Value) -> Result<Value> {
        self.one(name, &[x], vec![])
    }

    fn binary(&self, name: &str, a: Value, b: Value) -> Result<Value> {
        self.one(name, &[a, b], vec![])
    }

    fn add(&self, a: Value, b: Value) -> Result<Value> {
        self.binary("add", a, b)
    }

    fn sub(&self, a: Value, b: Value) -> Result<Value> {
        self.binary("sub", a, b)
    }

    fn mul(&self, a: Value, b: Value) -> Result<Value> {
        self.binary("mul", a, b)
    }

    fn div(&self, a: Value, b: Value) -> Result<Value> {
        self.binary("div", a, b)
    }

    /// `x · factor` in `x`'s dtype.
    fn scale(&self, x: Value, factor: f64) -> Result<Value> {
        self.mul(x, self.like(factor, x)?)
    }

    /// `x + number` in `x`'s dtype.
    fn shift(&self, x: Value, number: f64) -> Result<Value> {
        self.add(x, self.like(number, x)?)
    }

    fn select(&self, condition: Value, a: Value, b: Value) -> Result<Value> {
        self.one("where", &[condition, a, b], vec![])
    }

    /// Between two numbers.
    fn clamp(&self, x: Value, low: f64, high: f64) -> Result<Value> {
        let bounds = [x, self.like(low, x)?, self.like(high, x)?];
        self.one("clamp", &bounds, vec![])
    }

    fn reduce(&self, name: &str, x: Value, axes: &[i64], keep: bool) -> Result<Value> {
        self.one(name, &[x], vec![ints(axes), Attribute::Bool(keep)])
    }

    fn reshape(&self, x: Value, dims: &[usize]) -> Result<Value> {
        let shape = Attribute::Shape(Shape::fixed(dims)?);
        self.one("reshape", &[x], vec![shape])
    }

    fn broadcast(&self, x: Value, dims: &[usize]) -> Result<Value> {
        let shape = Attribute::Shape(Shape::fixed(dims)?);
        self.one("broadcast_to", &[x], vec![shape])
    }

    fn transpose(&self, x: Value, axes: &[i64]) -> Result<Value> {
        self.one("transpose", &[x], vec![ints(axes)])
    }

    fn concat(&self, tensors: &[Value], axis: i64) -> Result<Value> {
        self.one("concat", tensors, vec![Attribute::Int(axis)])
    }

    /// NumPy's `x[..., start:stop:step, ...]` on one axis.
    fn slice(&self, x: Value, axis: usize, start: i64, stop: i64, step: i64) -> Result<Value> {
        let rank = self.dims(x)?.len();
        let (mut starts, mut stops, mut steps) =
            (vec![0; rank], vec![i64::MAX; rank], vec![1; rank]);
        starts[axis] = start;
        stops[axis] = stop;
        steps[axis] = step;
        self.one(
            "slice",
            &[x],
            vec![ints(&starts), ints(&stops), ints(&steps)],
        )
    }

    /// Zeros around it.
    fn pad(&self, x: Value, low: &[i64], high: &[i64]) -> Result<Value> {
        let attributes = vec![ints(low), ints(high), word("constant")];
        self.one("pad", &[x, Value::Absent], attributes)
    }

    fn take(&self, x: Value, indices: Value, axis: i64) -> Result<Value> {
        self.one("take", &[x, indices], vec![Attribute::Int(axis)])
    }
}

/// ONNX's type number for an attribute such as `to`.
fn dtype_attribute(m: &Mapper<'_>, name: &str, default: i64) -> Result<DType> {
    case::dtype(m.int(name, default) as i32)
}
