//! The op catalogue: each op is one row, written with [`ops!`], and everything derives from it.
//!
//! A row gives name, inputs, typed attributes with ranges, the rule for result specs and, for
//! composite ops, the decomposition. The macro turns it into an [`OpRow`] and a method of
//! [`GraphBuilder`](crate::graph::GraphBuilder) of the same name.

pub mod activation;
pub mod attention;
pub mod binary;
pub mod contract;
pub mod conv;
pub mod create;
pub mod encode;
mod fit;
pub mod fourier;
pub mod image;
pub mod index;
pub mod join;
pub mod linear;
pub mod matmul;
pub mod norm;
pub mod place;
pub mod quant;
pub mod random;
pub mod recurrent;
pub mod reduce;
pub mod resample;
pub mod rope;
pub mod rules;
pub mod scaled;
pub mod shape;
pub mod sort;
pub mod unary;
mod write;

use std::{collections::HashMap, fmt, sync::OnceLock};

use hotcell_proto::limits;

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value, brief},
    shape::{CacheSpec, Shape, TensorSpec},
};

#[allow(unused_imports)]
pub(crate) use write::{
    attribute_type, attribute_value, input_is_index, input_mode, input_push, input_type, ops,
    result_type, result_value, row_name,
};

/// What an op is, once.
pub struct OpRow {
    /// Stable snake_case name, the one on the wire.
    pub name: &'static str,
    /// One paragraph: semantics, shapes, dtypes, source.
    pub doc: &'static str,
    /// The inputs in order; an absent optional one keeps its place as [`Value::Absent`].
    pub inputs: &'static [InputSpec],
    /// Attributes in the order of [`Call::attributes`].
    pub attributes: &'static [AttributeSpec],
    /// Result shapes in terms of the inputs', one line for the reference page.
    pub shapes: &'static str,
    /// Input dtypes that are accepted and what they give, one line for the reference page.
    pub dtypes: &'static str,
    /// Which input, a cache, the op changes or reads; effects on one cache keep the graph's order.
    pub effect: Effect,
    /// Result specs from the inputs' specs, or why they do not fit.
    pub infer: fn(&Call<'_>) -> Result<Vec<TensorSpec>, GraphError>,
    /// The same in other ops; `None` for a primitive. A primitive that promotes its inputs decomposes into
    /// casts and itself, so that a backend need only have it for inputs of one dtype.
    pub decompose: Option<Decompose>,
}

impl OpRow {
    /// Fewest and most inputs, absent optional ones counted.
    pub fn arity(&self) -> (usize, usize) {
        match self.inputs.split_last() {
            Some((last, before)) if last.mode == InputMode::Many => {
                (before.len() + 1, limits::MAX_OP_INPUTS)
            }
            _ => (self.inputs.len(), self.inputs.len()),
        }
    }

    /// Specs of the results for inputs of these specs: checks arity, attributes and the row's rule.
    ///
    /// # Errors
    /// When something does not fit; the message names the op.
    pub fn check(
        &'static self,
        inputs: &[ValueSpec],
        attributes: &[Attribute],
    ) -> Result<Vec<TensorSpec>, GraphError> {
        let fail = |what: String| {
            Err(GraphError::Op {
                op: self.name,
                what,
            })
        };
        let (fewest, most) = self.arity();
        if !(fewest..=most).contains(&inputs.len()) {
            let takes = match fewest == most {
                true => fewest.to_string(),
                false => format!("{fewest} to {most}"),
            };
            return fail(format!("takes {takes} inputs, not {}", inputs.len()));
        }
        for (i, value) in inputs.iter().enumerate() {
            let Some(spec) = self.input(i) else { continue };
            match value {
                ValueSpec::Absent if spec.mode != InputMode::Optional => {
                    return fail(format!("{} must be given", spec.name));
                }
                ValueSpec::Tensor(t) if spec.is_index && !t.dtype.is_integer() => {
                    return fail(not_an_integer(spec.name, t.dtype));
                }
                _ => {}
            }
        }
        if attributes.len() != self.attributes.len() {
            return fail(format!(
                "takes {} attributes, not {}",
                self.attributes.len(),
                attributes.len()
            ));
        }
        for (spec, value) in self.attributes.iter().zip(attributes) {
            if !spec.kind.admits(value) {
                let shown = brief(&format!("{value:?}"), 80);
                return fail(format!("{} must be {}, not {shown}", spec.name, spec.kind));
            }
        }
        (self.infer)(&Call {
            op: self,
            inputs,
            attributes,
        })
    }

    /// The description of input `i`.
    pub fn input(&self, i: usize) -> Option<&'static InputSpec> {
        let many = || self.inputs.last().filter(|s| s.mode == InputMode::Many);
        self.inputs.get(i).or_else(many)
    }
}

/// What is wrong with an input of this dtype that must be integers.
pub(crate) fn not_an_integer(name: &str, dtype: DType) -> String {
    format!("{name} must be of an integer dtype, not {dtype}")
}

/// An input's name, whether it may be absent or repeat, and whether it says where to read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputSpec {
    /// Name, for messages and the reference page.
    pub name: &'static str,
    /// How many there may be.
    pub mode: InputMode,
    /// Whether its elements, integers, say where the op reads or writes: a backend checks them and goes there, so
    /// nobody may change them in between ([`Graph::inputs_read_as_indices`](crate::Graph::inputs_read_as_indices)).
    pub is_index: bool,
}

/// How many times an input may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputMode {
    /// Once.
    One,
    /// Once or [`Value::Absent`].
    Optional,
    /// Once or more; only the last input may be.
    Many,
}

/// Builds a composite op from others.
pub type Decompose =
    fn(&mut GraphBuilder, &[Value], &[Attribute]) -> Result<Vec<Value>, GraphError>;

/// An op's effect on a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A pure function of its inputs.
    None,
    /// Reads the resource that this input names.
    Reads(usize),
    /// Changes the resource that this input names.
    Writes(usize),
}

/// An attribute's name and range.
#[derive(Clone, Copy, Debug)]
pub struct AttributeSpec {
    /// Name on the wire.
    pub name: &'static str,
    /// Type and range.
    pub kind: AttributeKind,
}

/// Type and range of an attribute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttributeKind {
    /// An integer between these, both included.
    Int(i64, i64),
    /// A finite number between these, both included.
    Float(f64, f64),
    /// Yes or no.
    Bool,
    /// A shape.
    Shape,
    /// A dtype.
    DType,
    /// At most [`limits::MAX_ATTRIBUTE_INTS`] integers, each between these, both included.
    Ints(i64, i64),
    /// One of these names.
    Name(&'static [&'static str]),
    /// At most so many bytes.
    Bytes(usize),
}

/// An attribute's value.
#[derive(Clone, Debug, PartialEq)]
pub enum Attribute {
    /// An integer.
    Int(i64),
    /// A number.
    Float(f64),
    /// Yes or no.
    Bool(bool),
    /// A shape.
    Shape(Shape),
    /// A dtype.
    DType(DType),
    /// Integers.
    Ints(Vec<i64>),
    /// A name out of the row's list.
    Name(String),
    /// Bytes.
    Bytes(Vec<u8>),
}

impl AttributeKind {
    /// Whether a value has this type and lies in the range.
    pub fn admits(self, value: &Attribute) -> bool {
        match (self, value) {
            (AttributeKind::Int(lo, hi), Attribute::Int(v)) => (lo..=hi).contains(v),
            // NaN is in no range.
            (AttributeKind::Float(lo, hi), Attribute::Float(v)) => (lo..=hi).contains(v),
            (AttributeKind::Ints(lo, hi), Attribute::Ints(v)) => {
                v.len() <= limits::MAX_ATTRIBUTE_INTS && v.iter().all(|v| (lo..=hi).contains(v))
            }
            (AttributeKind::Name(names), Attribute::Name(v)) => names.contains(&v.as_str()),
            (AttributeKind::Bytes(max), Attribute::Bytes(v)) => v.len() <= max,
            (AttributeKind::Bool, Attribute::Bool(_))
            | (AttributeKind::Shape, Attribute::Shape(_))
            | (AttributeKind::DType, Attribute::DType(_)) => true,
            _ => false,
        }
    }
}

impl fmt::Display for AttributeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttributeKind::Int(lo, hi) => write!(f, "an integer in [{lo}, {hi}]"),
            AttributeKind::Float(lo, hi) => write!(f, "a number in [{lo}, {hi}]"),
            AttributeKind::Bool => f.write_str("a bool"),
            AttributeKind::Shape => f.write_str("a shape"),
            AttributeKind::DType => f.write_str("a dtype"),
            AttributeKind::Ints(lo, hi) => write!(
                f,
                "at most {} integers in [{lo}, {hi}]",
                limits::MAX_ATTRIBUTE_INTS
            ),
            AttributeKind::Name(names) => write!(f, "one of {}", names.join(", ")),
            AttributeKind::Bytes(max) => write!(f, "at most {max} bytes"),
        }
    }
}

/// What a value is: a tensor, a resource, or an optional input that is not given.
#[derive(Clone, Debug, PartialEq)]
pub enum ValueSpec {
    /// Nothing.
    Absent,
    /// A tensor.
    Tensor(TensorSpec),
    /// A paged KV cache.
    Cache(CacheSpec),
}

impl fmt::Display for ValueSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueSpec::Absent => f.write_str("nothing"),
            ValueSpec::Tensor(t) => t.fmt(f),
            ValueSpec::Cache(c) => c.fmt(f),
        }
    }
}

/// An op applied to inputs: what `infer`, `supports` and `launch` look at. Arity and attributes have
/// been checked against the row.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The op.
    pub op: &'static OpRow,
    /// Specs of its inputs.
    pub inputs: &'a [ValueSpec],
    /// Its attributes, in the row's order.
    pub attributes: &'a [Attribute],
}

impl<'a> Call<'a> {
    /// An error that names the op.
    pub fn error(&self, what: impl fmt::Display) -> GraphError {
        GraphError::Op {
            op: self.op.name,
            what: what.to_string(),
        }
    }

    fn missing(&self, i: usize, what: &str) -> GraphError {
        self.error(format_args!("{} must be {what}", self.input_name(i)))
    }

    /// Name of input `i`, for messages.
    pub fn input_name(&self, i: usize) -> &'static str {
        self.op.input(i).map_or("input", |s| s.name)
    }

    /// Input `i` as a tensor, if it is given.
    ///
    /// # Errors
    /// When it is a cache.
    pub fn optional(&self, i: usize) -> Result<Option<&'a TensorSpec>, GraphError> {
        match self.inputs.get(i) {
            Some(ValueSpec::Absent) | None => Ok(None),
            _ => self.tensor(i).map(Some),
        }
    }

    /// Input `i` as a tensor.
    ///
    /// # Errors
    /// When it is a cache.
    pub fn tensor(&self, i: usize) -> Result<&'a TensorSpec, GraphError> {
        match self.inputs.get(i) {
            Some(ValueSpec::Tensor(t)) => Ok(t),
            _ => Err(self.missing(i, "a tensor")),
        }
    }

    /// Input `i` as a tensor of this dtype.
    ///
    /// # Errors
    /// When it is something else.
    pub fn tensor_of(&self, i: usize, dtype: DType) -> Result<&'a TensorSpec, GraphError> {
        let t = self.tensor(i)?;
        if t.dtype != dtype {
            return Err(self.missing(i, &format!("{dtype}, not {}", t.dtype)));
        }
        Ok(t)
    }

    /// Input `i` as a cache.
    ///
    /// # Errors
    /// When it is a tensor.
    pub fn cache(&self, i: usize) -> Result<&'a CacheSpec, GraphError> {
        match self.inputs.get(i) {
            Some(ValueSpec::Cache(c)) => Ok(c),
            _ => Err(self.missing(i, "a cache")),
        }
    }

    /// Integer attribute `i`.
    ///
    /// # Errors
    /// When the row has none there.
    pub fn int(&self, i: usize) -> Result<i64, GraphError> {
        match self.attributes.get(i) {
            Some(Attribute::Int(v)) => Ok(*v),
            _ => Err(self.error(format_args!("attribute {i} is no integer"))),
        }
    }

    /// Number attribute `i`.
    ///
    /// # Errors
    /// When the row has none there.
    pub fn float(&self, i: usize) -> Result<f64, GraphError> {
        match self.attributes.get(i) {
            Some(Attribute::Float(v)) => Ok(*v),
            _ => Err(self.error(format_args!("attribute {i} is no number"))),
        }
    }

    /// Bool attribute `i`.
    ///
    /// # Errors
    /// When the row has none there.
    pub fn bool(&self, i: usize) -> Result<bool, GraphError> {
        match self.attributes.get(i) {
            Some(Attribute::Bool(v)) => Ok(*v),
            _ => Err(self.error(format_args!("attribute {i} is no bool"))),
        }
    }

    /// Dtype attribute `i`.
    ///
    /// # Errors
    /// When the row has none there.
    pub fn dtype(&self, i: usize) -> Result<DType, GraphError> {
        match self.attributes.get(i) {
            Some(Attribute::DType(v)) => Ok(*v),
            _ => Err(self.error(format_args!("attribute {i} is no dtype"))),
        }
    }

    /// Integers attribute `i`.
    ///
    /// # Errors
    /// When the row has none there.
    pub fn ints(&self, i: usize) -> Result<&'a [i64], GraphError> {
        match self.attributes.get(i) {
            Some(Attribute::Ints(v)) => Ok(v),
            _ => Err(self.error(format_args!("attribute {i} is no list of integers"))),
        }
    }

    /// Name attribute `i`.
    ///
    /// # Errors
    /// When the row has none there.
    pub fn name(&self, i: usize) -> Result<&'a str, GraphError> {
        match self.attributes.get(i) {
            Some(Attribute::Name(v)) => Ok(v),
            _ => Err(self.error(format_args!("attribute {i} is no name"))),
        }
    }

    /// Bytes attribute `i`.
    ///
    /// # Errors
    /// When the row has none there.
    pub fn bytes(&self, i: usize) -> Result<&'a [u8], GraphError> {
        match self.attributes.get(i) {
            Some(Attribute::Bytes(v)) => Ok(v),
            _ => Err(self.error(format_args!("attribute {i} is no bytes"))),
        }
    }

    /// Shape attribute `i`.
    ///
    /// # Errors
    /// When the row has none there.
    pub fn shape(&self, i: usize) -> Result<&'a Shape, GraphError> {
        match self.attributes.get(i) {
            Some(Attribute::Shape(v)) => Ok(v),
            _ => Err(self.error(format_args!("attribute {i} is no shape"))),
        }
    }
}

/// Every op. A row that is not listed here does not exist.
pub fn catalogue() -> impl Iterator<Item = &'static OpRow> {
    [
        create::ROWS,
        unary::ROWS,
        binary::ROWS,
        activation::ROWS,
        reduce::ROWS,
        shape::ROWS,
        join::ROWS,
        index::ROWS,
        place::ROWS,
        sort::ROWS,
        matmul::ROWS,
        scaled::ROWS,
        contract::ROWS,
        conv::ROWS,
        image::ROWS,
        resample::ROWS,
        fourier::ROWS,
        linear::ROWS,
        quant::ROWS,
        encode::ROWS,
        random::ROWS,
        norm::ROWS,
        rope::ROWS,
        attention::ROWS,
        recurrent::ROWS,
    ]
    .into_iter()
    .flatten()
    .copied()
}

/// The op of this name.
pub fn find(name: &str) -> Option<&'static OpRow> {
    numbered().get(name).map(|(_, row)| *row)
}

/// The place of an op in the catalogue. It changes from release to release: for use within one only.
pub fn number(name: &str) -> Option<u16> {
    numbered().get(name).map(|(number, _)| *number)
}

fn numbered() -> &'static HashMap<&'static str, (u16, &'static OpRow)> {
    static NUMBERED: OnceLock<HashMap<&'static str, (u16, &'static OpRow)>> = OnceLock::new();
    NUMBERED.get_or_init(|| {
        let rows = (0..).zip(catalogue());
        rows.map(|(number, row)| (row.name, (number, row)))
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_snake_case() {
        let mut names: Vec<_> = catalogue().map(|r| r.name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        for row in catalogue() {
            assert!(
                row.name
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            );
            assert!(std::ptr::eq(find(row.name).unwrap(), row));
            for text in [row.doc, row.shapes, row.dtypes] {
                assert!(!text.trim().is_empty(), "{} has an empty text", row.name);
            }
            let before = row.inputs.split_last().map_or(row.inputs, |(_, b)| b);
            assert!(
                before.iter().all(|i| i.mode != InputMode::Many),
                "{}",
                row.name
            );
        }
    }

    #[test]
    fn ranges_refuse_what_is_outside() {
        let kind = AttributeKind::Float(0.0, 1.0);
        assert!(kind.admits(&Attribute::Float(1.0)));
        for bad in [f64::NAN, f64::INFINITY, -0.1] {
            assert!(!kind.admits(&Attribute::Float(bad)));
        }
        assert!(!kind.admits(&Attribute::Int(1)));
    }
}
