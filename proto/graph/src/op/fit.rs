//! What the rules and decompositions of the larger ops share beyond [`rules`](super::rules).

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, OpRow, ValueSpec, not_an_integer,
        rules::{cast_to, dtype_error, reshape_to, spec_of},
    },
    shape::{Dim, Shape, TensorSpec},
};

/// Input `i`, which must be of a float dtype.
///
/// # Errors
/// When it is something else.
pub(crate) fn float<'a>(call: &Call<'a>, i: usize) -> Result<&'a TensorSpec, GraphError> {
    let t = call.tensor(i)?;
    match t.dtype.is_float() {
        true => Ok(t),
        false => Err(call.error(format_args!(
            "{} must be of a float dtype, not {}; cast it first",
            call.input_name(i),
            t.dtype
        ))),
    }
}

/// Input `i`, if it is given, which must be of a float dtype.
///
/// # Errors
/// When it is something else.
pub(crate) fn optional_float<'a>(
    call: &Call<'a>,
    i: usize,
) -> Result<Option<&'a TensorSpec>, GraphError> {
    match call.optional(i)? {
        Some(_) => float(call, i).map(Some),
        None => Ok(None),
    }
}

/// Input `i`, if it is given, which must be a vector of `n` floats.
///
/// # Errors
/// When it is something else.
pub(crate) fn optional_vector(call: &Call<'_>, i: usize, n: usize) -> Result<(), GraphError> {
    match optional_float(call, i)? {
        Some(t) if t.shape.dims() != [Dim::Fixed(n)] => Err(call.error(format_args!(
            "{} must be [{n}], not {}",
            call.input_name(i),
            t.shape
        ))),
        _ => Ok(()),
    }
}

/// Input `i`, which must be integers.
///
/// # Errors
/// When it is something else.
pub(crate) fn integers<'a>(call: &Call<'a>, i: usize) -> Result<&'a TensorSpec, GraphError> {
    let t = call.tensor(i)?;
    match t.dtype.is_integer() {
        true => Ok(t),
        false => Err(call.error(not_an_integer(call.input_name(i), t.dtype))),
    }
}

/// What two inputs' dtypes promote to.
///
/// # Errors
/// When one is a block type.
pub(crate) fn pair(call: &Call<'_>, a: DType, b: DType) -> Result<DType, GraphError> {
    let block = if a.is_block() { a } else { b };
    a.promote(b).ok_or_else(|| dtype_error(call, block))
}

/// Axes one after the other.
pub(crate) fn join(a: &[Dim], b: &[Dim]) -> Vec<Dim> {
    [a, b].concat()
}

/// Axes for a message.
pub(crate) fn dims_text(dims: &[Dim]) -> String {
    let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
    format!("[{}]", dims.join(", "))
}

/// The dtype of a normalisation's insides: f64 for f64, else f32.
pub(crate) fn inside(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// An op that is being decomposed: its row and the specs of its inputs.
pub(crate) struct Parts<'a> {
    op: &'static OpRow,
    specs: Vec<ValueSpec>,
    attributes: &'a [Attribute],
}

impl<'a> Parts<'a> {
    /// Looks up the inputs' specs.
    ///
    /// # Errors
    /// When one is of another graph.
    pub(crate) fn of(
        op: &'static OpRow,
        graph: &GraphBuilder,
        inputs: &[Value],
        attributes: &'a [Attribute],
    ) -> Result<Self, GraphError> {
        let specs = inputs.iter().map(|&v| graph.spec(v));
        Ok(Self {
            op,
            specs: specs.collect::<Result<_, _>>()?,
            attributes,
        })
    }

    /// The call that is decomposed.
    pub(crate) fn call(&self) -> Call<'_> {
        Call {
            op: self.op,
            inputs: &self.specs,
            attributes: self.attributes,
        }
    }
}

/// Input `i`, if it is given, as this dtype.
///
/// # Errors
/// When there is no such cast.
pub(crate) fn given(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    i: usize,
    dtype: DType,
) -> Result<Option<Value>, GraphError> {
    match inputs.get(i) {
        None | Some(Value::Absent) => Ok(None),
        Some(&v) => cast_to(graph, v, dtype).map(Some),
    }
}

/// `x` under these axes.
///
/// # Errors
/// When the elements are not as many.
pub(crate) fn shaped(
    graph: &mut GraphBuilder,
    x: Value,
    dims: impl IntoIterator<Item = Dim>,
) -> Result<Value, GraphError> {
    reshape_to(graph, x, Shape::new(dims)?)
}

/// `x` with its last two axes exchanged.
///
/// # Errors
/// When it has fewer, or one of them is the row dimension.
pub(crate) fn swapped(graph: &mut GraphBuilder, x: Value) -> Result<Value, GraphError> {
    let rank = spec_of(graph, x)?.shape.rank() as i64;
    let mut axes: Vec<i64> = (0..rank).collect();
    if let [.., a, b] = axes.as_mut_slice() {
        std::mem::swap(a, b);
    }
    graph.transpose(x, &axes)
}

#[cfg(test)]
pub(crate) mod testing {
    //! Rows applied to inputs that are written as text.

    use super::*;

    /// The spec that `f32[rows, 3]` says.
    pub(crate) fn spec(text: &str) -> TensorSpec {
        let (dtype, dims) = text.split_once('[').unwrap();
        let dims = dims.strip_suffix(']').unwrap();
        let dim = |d: &str| match d {
            "rows" => Dim::Rows,
            n => Dim::Fixed(n.parse().unwrap()),
        };
        let dims = dims.split(", ").filter(|d| !d.is_empty()).map(dim);
        let dtype = DType::from_name(dtype).unwrap();
        TensorSpec::new(dtype, Shape::new(dims).unwrap()).unwrap()
    }

    /// A graph with these inputs, where `-` is an absent one.
    fn with_inputs(inputs: &[&str]) -> (GraphBuilder, Vec<Value>) {
        let mut graph = GraphBuilder::new(8);
        let values = inputs.iter().map(|text| match *text {
            "-" => Value::Absent,
            text => graph.tensor("x", spec(text)).unwrap(),
        });
        let values = values.collect();
        (graph, values)
    }

    fn said(graph: &GraphBuilder, values: &[Value]) -> String {
        let specs = values
            .iter()
            .map(|&v| spec_of(graph, v).unwrap().to_string());
        specs.collect::<Vec<_>>().join(" ")
    }

    /// What a row gives for these inputs, as text.
    pub(crate) fn infer(
        row: &'static OpRow,
        inputs: &[&str],
        attributes: &[Attribute],
    ) -> Result<String, String> {
        let (mut graph, values) = with_inputs(inputs);
        let results = graph.apply(row, values, attributes.to_vec());
        let results = results.map_err(|e| e.to_string())?;
        Ok(said(&graph, &results))
    }

    /// Each case's inputs, attributes and results, or a part of what the refusal says after `!`.
    #[track_caller]
    pub(crate) fn table(row: &'static OpRow, cases: &[(&[&str], &[Attribute], &str)]) {
        for (inputs, attributes, want) in cases {
            let got = infer(row, inputs, attributes);
            let fits = match want.strip_prefix('!') {
                None => got.as_deref() == Ok(*want),
                Some(why) => got.as_ref().is_err_and(|e| e.contains(why)),
            };
            assert!(
                fits,
                "{}{inputs:?} {attributes:?}: {got:?}, not {want}",
                row.name
            );
        }
    }

    /// Decomposes a row and, again and again, what its own name is left; each has the specs that the row says.
    #[track_caller]
    pub(crate) fn decomposes(row: &'static OpRow, inputs: &[&str], attributes: &[Attribute]) {
        let want = infer(row, inputs, attributes);
        let want = want.unwrap_or_else(|e| panic!("{}{inputs:?} {attributes:?}: {e}", row.name));
        let (mut graph, values) = with_inputs(inputs);
        let decompose = row.decompose.unwrap();
        let results = decompose(&mut graph, &values, attributes)
            .unwrap_or_else(|e| panic!("{}{inputs:?} {attributes:?}: {e}", row.name));
        assert_eq!(said(&graph, &results), want, "{}{inputs:?}", row.name);
        let graph = graph.finish(&results).unwrap();
        // An input that an op of the parts goes by is one of the row itself: backends may have it as a kernel.
        let given = values
            .iter()
            .enumerate()
            .filter(|(_, v)| **v != Value::Absent);
        for ((i, _), leads) in given.zip(graph.inputs_read_as_indices()) {
            let slot = row.input(i).unwrap();
            assert!(slot.is_index || !leads, "{} is no index", slot.name);
        }
        for node in graph.nodes().iter().filter(|n| n.op.name == row.name) {
            let specs = graph.input_specs(node).unwrap();
            let texts: Vec<String> = (specs.iter())
                .map(|s| match s {
                    ValueSpec::Absent => "-".to_owned(),
                    s => s.to_string(),
                })
                .collect();
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            assert!(
                texts != inputs || node.attributes != attributes,
                "{} comes back as it was",
                row.name
            );
            // What remains is for a kernel, or decomposes further.
            let (mut graph, values) = with_inputs(&texts);
            if decompose(&mut graph, &values, &node.attributes).is_ok() {
                decomposes(row, &texts, &node.attributes);
            }
        }
    }

    /// Shorthands for attributes.
    pub(crate) fn int(v: i64) -> Attribute {
        Attribute::Int(v)
    }

    pub(crate) fn number(v: f64) -> Attribute {
        Attribute::Float(v)
    }

    pub(crate) fn ints(v: &[i64]) -> Attribute {
        Attribute::Ints(v.to_vec())
    }

    pub(crate) fn name(v: &str) -> Attribute {
        Attribute::Name(v.to_owned())
    }

    pub(crate) fn yes(v: bool) -> Attribute {
        Attribute::Bool(v)
    }

    pub(crate) fn shape(dims: &[usize]) -> Attribute {
        Attribute::Shape(Shape::fixed(dims).unwrap())
    }
}
