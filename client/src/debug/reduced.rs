//! What is left of a capture that fails: one node or a few with their inputs, as a file, and as a Rust test.
//!
//! The file is a safetensors file that other programs read, too: `graph` (the encoded graph), `input.0` and so on (those
//! of block types as bytes), `expected`, and in the metadata under [`KEY`] where it comes from.

use std::{collections::HashMap, fmt::Write as _, fs, path::Path};

use hotcell_graph::{
    CacheSpec, DType, Shape, TensorSpec, Value,
    op::{Attribute, ValueSpec},
    wire,
};
use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};
use prost::Message;
use serde::{Deserialize, Serialize};

use super::reduce::Case;
use crate::tensor::{Comparison, HostTensor, TensorFile};

/// Name of the metadata's entry.
const KEY: &str = "hotcell.reduced";
/// Of that entry.
const LAYOUT: u32 = 1;

/// What is wrong with a result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// Its normalised mean square error is above this, or a value is no number on one side only.
    Differs {
        /// The bound.
        nmse: f64,
    },
    /// A value is NaN.
    Nan,
    /// A value is infinite.
    Infinite,
    /// An absolute value is above this.
    Above {
        /// The bound.
        value: f64,
    },
    /// The root of the values' mean square is outside of these.
    RmsOutside {
        /// The bounds.
        least: f64,
        /// See `least`.
        most: f64,
    },
    /// All values are zero.
    Zero,
    /// The worker that computes it dies.
    Dies,
}

impl Fault {
    /// Whether a result has it. `expected` is what another device or program computes.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] if the two cannot be compared.
    pub fn is_in(self, found: &HostTensor, expected: Option<&HostTensor>) -> Result<bool, Error> {
        let any = |is: &dyn Fn(f64) -> bool| {
            let all = found.plain()?;
            Ok(all.iter().any(|value| is(value.as_f64())))
        };
        match (self, expected) {
            (Self::Differs { nmse }, Some(expected)) => {
                let apart = Comparison::of(found, expected)?;
                // NaN is beyond any bound.
                Ok(apart.mismatched > 0 || apart.nmse.is_nan() || apart.nmse > nmse)
            }
            (Self::Differs { .. }, None) => Err(invalid("there is nothing to compare it with")),
            (Self::Nan, _) => any(&f64::is_nan),
            (Self::Infinite, _) => any(&f64::is_infinite),
            (Self::Above { value }, _) => any(&|v| v.abs() > value),
            (Self::RmsOutside { least, most }, _) => {
                let all = found.plain()?;
                let squares = all.iter().map(|value| value.as_f64().powi(2));
                let rms = (squares.sum::<f64>() / all.len().max(1) as f64).sqrt();
                // NaN is within no bounds.
                Ok(!(least..=most).contains(&rms))
            }
            (Self::Zero, _) => Ok(!any(&|v| v != 0.0)?),
            // It came back.
            (Self::Dies, _) => Ok(false),
        }
    }

    /// In words that follow what fails.
    pub fn words(self) -> String {
        match self {
            Self::Differs { nmse } => format!("is further from what is expected than {nmse:.0e}"),
            Self::Nan => "is NaN".to_owned(),
            Self::Infinite => "is infinite".to_owned(),
            Self::Above { value } => format!("is above {value}"),
            Self::RmsOutside { least, most } => {
                format!("has a root mean square outside of {least} to {most}")
            }
            Self::Zero => "is zero throughout".to_owned(),
            Self::Dies => "kills its worker".to_owned(),
        }
    }
}

/// Where it comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// The model and its node, for example `layers.3.mul_mat.0`.
    pub model: String,
    /// See `model`.
    pub node: String,
    /// The weight that the node reads; empty if none.
    pub weight: String,
    /// Which token of the answer.
    pub token: u64,
    /// On what it failed.
    pub failed_on: String,
    /// What computed the expected result; empty if nothing did.
    pub expected_from: String,
    /// Hotcell's version.
    pub version: String,
}

/// Something small that fails.
#[derive(Clone, Debug)]
pub struct Reduced {
    /// What is computed.
    pub case: Case,
    /// How it fails.
    pub fault: Fault,
    /// What should come of it, if that is known.
    pub expected: Option<HostTensor>,
    /// Where it comes from.
    pub origin: Origin,
}

/// The metadata's entry.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    layout: u32,
    fault: Fault,
    origin: Origin,
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(Reason::InvalidArgument, what)
}

/// How safetensors has a tensor; of block types the bytes.
fn stored(tensor: &HostTensor) -> Result<HostTensor, Error> {
    if !tensor.spec().dtype.is_block() {
        return Ok(tensor.clone());
    }
    HostTensor::from_slice(tensor.bytes(), &[tensor.bytes().len()])
}

/// What was stored for a tensor of this spec.
fn restored(stored: &HostTensor, spec: &TensorSpec) -> Result<HostTensor, Error> {
    HostTensor::new(spec.clone(), stored.bytes().clone())
}

impl Reduced {
    /// Writes it into a file that replaces another one of this name.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] naming the file.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let header = Header {
            layout: LAYOUT,
            fault: self.fault,
            origin: self.origin.clone(),
        };
        let header = serde_json::to_string(&header)
            .map_err(|e| invalid(format!("{} cannot be written: {e}", path.display())))?;
        let graph = wire::encode(&self.case.graph).encode_to_vec();
        let graph = HostTensor::from_slice(&graph, &[graph.len()])?;
        let mut all = vec![("graph".to_owned(), graph)];
        for (number, input) in self.case.inputs.iter().enumerate() {
            all.push((format!("input.{number}"), stored(input)?));
        }
        if let Some(expected) = &self.expected {
            all.push(("expected".to_owned(), expected.clone()));
        }
        TensorFile::write(path, &all, Some(HashMap::from([(KEY.to_owned(), header)])))
    }

    /// Reads a file that may be anybody's.
    ///
    /// # Errors
    /// [`Reason::FileNotFound`], [`Reason::LimitExceeded`], or [`Reason::InvalidArgument`] saying what is wrong with it.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let wrong = |what: &str| {
            let what = format!(
                "{} is nothing that `hotcell debug reduce` wrote: {what}",
                path.display()
            );
            invalid(what)
        };
        if fs::metadata(path).is_ok_and(|found| found.len() > limits::MAX_CAPTURE_BYTES) {
            let what = format!("{} is larger than any capture", path.display());
            return Err(Error::new(Reason::LimitExceeded, what));
        }
        let file = TensorFile::open(path)?;
        let header = file.metadata().get(KEY);
        let header = header.ok_or_else(|| wrong("it has no such metadata"))?;
        let header: Header = serde_json::from_str(header).map_err(|e| wrong(&e.to_string()))?;
        if header.layout != LAYOUT {
            return Err(wrong("its layout is another version's"));
        }
        let graph = file.get("graph")?.ok_or_else(|| wrong("it has no graph"))?;
        let graph = v1::Graph::decode(graph.bytes().clone()).map_err(|e| wrong(&e.to_string()))?;
        // Verifies it.
        let graph = wire::decode(&graph).map_err(|e| wrong(&e.to_string()))?;
        let mut inputs = Vec::new();
        let specs = graph.inputs().iter().filter_map(|input| match &input.spec {
            ValueSpec::Tensor(spec) => Some(spec),
            _ => None,
        });
        for (number, spec) in specs.enumerate() {
            let value = file.get(&format!("input.{number}"))?;
            let value = value.ok_or_else(|| wrong(&format!("it lacks the input {number}")))?;
            inputs.push(restored(&value, spec).map_err(|e| wrong(e.message()))?);
        }
        let reduced = Self {
            case: Case::new(graph, inputs).map_err(|e| wrong(e.message()))?,
            fault: header.fault,
            expected: file.get("expected")?,
            origin: header.origin,
        };
        if matches!(reduced.fault, Fault::Differs { .. }) && reduced.expected.is_none() {
            return Err(wrong("it lacks what is expected"));
        }
        Ok(reduced)
    }

    /// What it is, in a line: each op and each input's spec.
    pub fn words(&self) -> String {
        let ops = self.case.graph.nodes().iter().map(|node| node.op.name);
        let inputs = self.case.graph.inputs().iter();
        let inputs = inputs.map(|input| format!("{} {}", input.name, input.spec));
        format!(
            "{} of {}",
            ops.collect::<Vec<_>>().join(", "),
            inputs.collect::<Vec<_>>().join(", ")
        )
    }

    /// A Rust function that computes it in a session and panics if it fails, and a test that calls it on the scheduler of its
    /// environment.
    ///
    /// # Errors
    /// [`Reason::Internal`] if it cannot be told.
    pub fn test(&self) -> Result<String, Error> {
        let mut text = String::new();
        self.tell(&mut text)
            .map_err(|_| Error::new(Reason::Internal, "the test cannot be written"))?;
        Ok(text)
    }

    fn tell(&self, to: &mut String) -> std::fmt::Result {
        let Origin { model, node, .. } = &self.origin;
        let one_line = |text: &str| text.replace(|c: char| c.is_control(), " ");
        writeln!(
            to,
            "//! {} of {}, at token {} of an answer on {}: it {}.",
            one_line(node),
            one_line(model),
            self.origin.token,
            one_line(&self.origin.failed_on),
            self.fault.words()
        )?;
        writeln!(
            to,
            "//! Made smaller by `hotcell debug reduce`, which printed this with `--test`.\n"
        )?;
        let mut body = String::new();
        self.body(&mut body)?;
        let used = |names: &[&'static str]| {
            let is_used = |name: &str| {
                let said = [format!("{name}::"), format!("{name} {{")];
                name == "Session" || said.iter().any(|said| body.contains(said))
            };
            let used = names.iter().filter(|name| is_used(name));
            used.copied().collect::<Vec<_>>().join(", ")
        };
        let tensors = used(&[
            "CacheSpec",
            "DType",
            "HostTensor",
            "Session",
            "Shape",
            "TensorSpec",
        ]);
        writeln!(
            to,
            "use hotcell_client::{{debug::Fault, tensor::{{{tensors}}}}};"
        )?;
        let ops = match body.contains("Attribute::") {
            true => "op::{self, Attribute}",
            false => "op",
        };
        let graph = match body.contains("Value::") {
            true => format!("GraphBuilder, Value, {ops}"),
            false => format!("GraphBuilder, {ops}"),
        };
        writeln!(to, "use hotcell_graph::{{{graph}}};\n")?;
        let name: String = node
            .chars()
            .map(|c| {
                if c.is_ascii_alphanumeric() {
                    c.to_ascii_lowercase()
                } else {
                    '_'
                }
            })
            .collect();
        writeln!(
            to,
            "/// Panics where it fails.\npub async fn node_{name}(session: &Session) {{"
        )?;
        to.push_str(&body);
        writeln!(
            to,
            "}}\n\n\
             #[tokio::test]\n\
             async fn node_{name}_on_the_scheduler_of_the_environment() {{\n    \
             let address = hotcell_client::Address::from_environment().unwrap();\n    \
             let options = hotcell_client::tensor::SessionOptions::default();\n    \
             let session = Session::open(&address, options).await.unwrap();\n    \
             node_{name}(&session).await;\n\
             }}"
        )
    }

    /// What the test does.
    fn body(&self, to: &mut String) -> std::fmt::Result {
        writeln!(to, "    let inputs = [")?;
        for value in &self.case.inputs {
            writeln!(to, "        {},", tensor(value))?;
        }
        writeln!(to, "    ];")?;
        writeln!(to, "    let spec = |at: usize| inputs[at].spec().clone();")?;
        writeln!(to, "    let mut graph = GraphBuilder::new(0);")?;
        let mut values = 0..;
        for (number, input) in self.case.graph.inputs().iter().enumerate() {
            if let ValueSpec::Cache(spec) = input.spec {
                writeln!(to, "    let input_{number} = {};", cache(&input.name, spec))?;
                continue;
            }
            let value = values.next().unwrap_or_default();
            let method = if input.constant { "constant" } else { "tensor" };
            let name = &input.name;
            writeln!(
                to,
                "    let input_{number} = graph.{method}({name:?}, spec({value})).unwrap();"
            )?;
        }
        for (number, node) in self.case.graph.nodes().iter().enumerate() {
            let inputs = node.inputs.iter().map(|value| place(*value));
            let attributes = node.attributes.iter().map(attribute);
            let (inputs, attributes): (Vec<_>, Vec<_>) = (inputs.collect(), attributes.collect());
            writeln!(
                to,
                "    let node_{number} = graph\n        .apply(op::find({:?}).unwrap(), vec![{}], vec![{}])\n        .unwrap();",
                node.op.name,
                inputs.join(", "),
                attributes.join(", ")
            )?;
        }
        let outputs = self.case.graph.outputs().iter().map(|value| place(*value));
        writeln!(
            to,
            "    let graph = graph.finish(&[{}]).unwrap();",
            outputs.collect::<Vec<_>>().join(", ")
        )?;
        writeln!(
            to,
            "    let found = session.run(&graph, &inputs).await.unwrap();"
        )?;
        match &self.expected {
            Some(expected) => writeln!(to, "    let expected = Some({});", tensor(expected))?,
            None => writeln!(to, "    let expected = None;")?,
        }
        let fault = match self.fault {
            Fault::Differs { nmse } => format!("Differs {{ nmse: {nmse:?} }}"),
            Fault::Above { value } => format!("Above {{ value: {value:?} }}"),
            Fault::RmsOutside { least, most } => {
                format!("RmsOutside {{ least: {least:?}, most: {most:?} }}")
            }
            other => format!("{other:?}"),
        };
        writeln!(to, "    let fault = Fault::{fault};")?;
        writeln!(
            to,
            "    assert!(!fault.is_in(&found[0], expected.as_ref()).unwrap(), \"{{found:?}}\");"
        )
    }
}

/// A cache in the test.
fn cache(name: &str, spec: CacheSpec) -> String {
    let CacheSpec {
        dtype,
        blocks,
        block_len,
        kv_heads,
        head_dim,
    } = spec;
    format!(
        "graph.cache({name:?}, CacheSpec {{ dtype: DType::{dtype:?}, blocks: {blocks}, block_len: {block_len}, kv_heads: {kv_heads}, head_dim: {head_dim} }}).unwrap()"
    )
}

/// A value in the test.
fn place(value: Value) -> String {
    match value {
        Value::Absent => "Value::Absent".to_owned(),
        Value::Input(at) => format!("input_{at}"),
        Value::Node { node, output } => format!("node_{node}[{output}]"),
    }
}

fn shape(shape: &Shape) -> String {
    let dims: Vec<String> = shape
        .dims()
        .iter()
        .map(|dim| dim.at(0).to_string())
        .collect();
    format!("Shape::fixed(&[{}]).unwrap()", dims.join(", "))
}

/// An attribute in the test.
fn attribute(attribute: &Attribute) -> String {
    match attribute {
        Attribute::Shape(dims) => format!("Attribute::Shape({})", shape(dims)),
        Attribute::DType(dtype) => format!("Attribute::DType(DType::{dtype:?})"),
        Attribute::Ints(all) => format!("Attribute::Ints(vec!{all:?})"),
        Attribute::Bytes(all) => format!("Attribute::Bytes(vec!{all:?})"),
        Attribute::Name(name) => format!("Attribute::Name({name:?}.to_owned())"),
        Attribute::Int(n) => format!("Attribute::Int({n})"),
        Attribute::Bool(is) => format!("Attribute::Bool({is})"),
        Attribute::Float(v) if v.is_finite() => format!("Attribute::Float({v:?})"),
        Attribute::Float(v) => format!("Attribute::Float(f64::from_bits({}))", v.to_bits()),
    }
}

/// A tensor in the test, bit by bit.
fn tensor(value: &HostTensor) -> String {
    let spec = value.spec();
    if let (DType::F32, Ok(values)) = (spec.dtype, value.to_vec::<f32>()) {
        let number = |v: &f32| match v.is_finite() {
            true => format!("{v:?}f32"),
            false => format!("f32::from_bits({:#x})", v.to_bits()),
        };
        let values: Vec<String> = values.iter().map(number).collect();
        let values = values.join(", ");
        return format!(
            "HostTensor::from_slice(&[{values}], &{:?}).unwrap()",
            value.shape()
        );
    }
    format!(
        "HostTensor::new(TensorSpec::new(DType::{:?}, {}).unwrap(), vec!{:?}).unwrap()",
        spec.dtype,
        shape(&spec.shape),
        value.bytes().as_ref()
    )
}

#[cfg(test)]
mod tests {
    use hotcell_graph::{DType, GraphBuilder};

    use super::*;

    fn reduced() -> Reduced {
        let mut g = GraphBuilder::new(0);
        let spec =
            |dtype, dims: &[usize]| TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap();
        let x = g.tensor("x", spec(DType::F32, &[1, 32])).unwrap();
        let w = g.constant("w", spec(DType::Q4_0, &[2, 32])).unwrap();
        let y = g.mul_mat(x, w).unwrap();
        let y = g.reshape(y, Shape::fixed(&[2]).unwrap()).unwrap();
        let graph = g.finish(&[y]).unwrap();
        let mut values = [1.5f32; 32];
        values[3] = f32::INFINITY;
        let inputs = vec![
            HostTensor::from_slice(&values, &[1, 32]).unwrap(),
            HostTensor::new(spec(DType::Q4_0, &[2, 32]), vec![7; 36]).unwrap(),
        ];
        Reduced {
            case: Case::new(graph, inputs).unwrap(),
            fault: Fault::Differs { nmse: 5e-4 },
            expected: Some(HostTensor::from_slice(&[0.5f32, 2.0], &[2]).unwrap()),
            origin: Origin {
                model: "m".into(),
                node: "layers.2.mul_mat.3".into(),
                weight: "w".into(),
                token: 7,
                failed_on: "cpu".into(),
                expected_from: "other".into(),
                version: "0".into(),
            },
        }
    }

    #[test]
    fn a_file_has_all_of_it_and_a_strangers_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let written = reduced();
        written.write(&path).unwrap();
        let read = Reduced::read(&path).unwrap();
        assert_eq!(read.case.inputs, written.case.inputs);
        assert_eq!(
            wire::encode(&read.case.graph),
            wire::encode(&written.case.graph)
        );
        assert_eq!(
            (read.fault, &read.expected),
            (written.fault, &written.expected)
        );
        assert_eq!(read.origin, written.origin);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let good = fs::read(&path).unwrap();
        for cut in (0..good.len()).step_by(7) {
            fs::write(&path, &good[..cut]).unwrap();
            assert!(Reduced::read(&path).is_err(), "cut at {cut}");
        }
        for at in 0..good.len() {
            let mut changed = good.clone();
            changed[at] ^= 0x11;
            fs::write(&path, &changed).unwrap();
            // Other values are as good as these; nothing else may come of it than an error.
            let _ = Reduced::read(&path);
        }
        let lacks = Reduced {
            expected: None,
            ..written
        };
        lacks.write(&path).unwrap();
        let error = Reduced::read(&path).unwrap_err();
        assert!(
            error.message().contains("lacks what is expected"),
            "{error}"
        );
    }

    #[test]
    fn faults_are_told_from_what_is_as_it_should_be() {
        let of = |values: &[f32]| HostTensor::from_slice(values, &[values.len()]).unwrap();
        let good = of(&[1.0, -2.0]);
        let differs = Fault::Differs { nmse: 1e-7 };
        for (fault, found, is) in [
            (differs, of(&[1.0, -2.0]), false),
            (differs, of(&[1.001, -2.0]), true),
            (differs, of(&[f32::NAN, -2.0]), true),
            (Fault::Nan, of(&[1.0]), false),
            (Fault::Nan, of(&[1.0, f32::NAN]), true),
            (Fault::Infinite, of(&[1.0, f32::NEG_INFINITY]), true),
            (Fault::Above { value: 2.0 }, of(&[2.0, -2.0]), false),
            (Fault::Above { value: 2.0 }, of(&[-2.5]), true),
            (Fault::Dies, of(&[1.0]), false),
        ] {
            let found = fault.is_in(&found, Some(&good)).unwrap();
            assert_eq!(found, is, "{fault:?}");
        }
        assert!(differs.is_in(&good, None).is_err());
        assert!(differs.is_in(&good, Some(&of(&[1.0]))).is_err());
    }

    #[test]
    fn a_test_has_every_bit() {
        let text = reduced().test().unwrap();
        for wanted in [
            "pub async fn node_layers_2_mul_mat_3(session: &Session) {",
            "graph.constant(\"w\", spec(1))",
            "op::find(\"reshape\").unwrap(), vec![node_0[0]], vec![Attribute::Shape(Shape::fixed(&[2]).unwrap())]",
            "1.5f32, f32::from_bits(0x7f800000)",
            "DType::Q4_0, Shape::fixed(&[2, 32]).unwrap()).unwrap(), vec![7, 7,",
            "Some(HostTensor::from_slice(&[0.5f32, 2.0f32], &[2]).unwrap())",
            "Fault::Differs { nmse: 0.0005 }",
            "use hotcell_graph::{GraphBuilder, op::{self, Attribute}};",
            "    node_layers_2_mul_mat_3(&session).await;\n}\n",
        ] {
            assert!(text.contains(wanted), "no {wanted} in\n{text}");
        }
    }
}
