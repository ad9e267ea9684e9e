//! The op catalogue's conformance cases: read from `golden/ops`, built as graphs, run by an [`Executor`], compared.
//!
//! What a case is stands in `golden/ops/make.py`. The executor alone knows how a graph is run, so the same cases hold a
//! device in this process and a worker behind its door to the same values.

mod classes;
mod compare;
mod derived;
mod dtypes;
mod eager;
mod elementwise;
mod local;
mod remote;
mod repeated;
mod unsteady;
mod zeros;

use std::{fmt, ops::Range, path::Path, rc::Rc};

use anyhow::{Context, Result, anyhow, bail};
use hotcell_graph::{
    CacheSpec, DType, Graph, GraphBuilder, GraphError, Shape, TensorSpec, Value,
    op::{Attribute, AttributeKind, OpRow, ValueSpec, find},
    shape::Dim,
};
use serde_json::Value as Json;

use crate::cluster::repository;
pub use classes::{Classed, Scope, derived, eager, empty, forms, fused, moved, repeated, turned};
pub use compare::{difference, rounds_others, tolerance};
pub use derived::{Derived, moves, moves_input};
pub use dtypes::{Dtypes, Place, dtypes};
pub use eager::Eager;
pub use elementwise::{Form, elementwise};
pub use local::Local;
pub use remote::Remote;
pub use unsteady::unsteady;
pub use zeros::zeros;

/// How many more rows than a case has its graph is made for: a plan must not touch what lies behind.
const SPARE_ROWS: usize = 3;

/// Runs graphs.
pub trait Executor {
    /// What runs them, for messages.
    fn name(&self) -> String;

    /// Runs a graph once for `rows` rows.
    ///
    /// `inputs` are the bytes of the graph's inputs in order, of the row dimension only the first `rows` rows; a cache's
    /// are its contents. The results come back in the same way.
    ///
    /// # Errors
    /// [`RunError`], saying at what it failed.
    fn run(&mut self, graph: &Graph, rows: usize, inputs: &[&[u8]]) -> Result<Outcome, RunError>;

    /// Whether ops may be fused in what it runs from now on. They may at first.
    fn set_fused(&mut self, fused: bool);
}

/// What an execution left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Bytes of each output, for as many rows as were run.
    pub outputs: Vec<Vec<u8>>,
    /// Contents of each input that is a cache, in order, afterwards.
    pub caches: Vec<Vec<u8>>,
}

/// At what a run failed.
#[derive(Clone, Debug)]
pub enum RunError {
    /// The graph was not accepted.
    Plan(String),
    /// It was executed and failed, as an index out of range does.
    Run(String),
    /// It broke something: a panic, a write outside of its memory.
    Broken(String),
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::Plan(what) => write!(f, "no plan: {what}"),
            RunError::Run(what) => write!(f, "execution failed: {what}"),
            RunError::Broken(what) => write!(f, "broken: {what}"),
        }
    }
}

/// How floats are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Bit for bit; any NaN for a NaN.
    Exact,
    /// Every element within the tolerance by itself.
    Each,
    /// All elements together, by the normalised mean squared error.
    Together,
}

/// Where an execution must fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fails {
    /// The builder refuses the last node.
    Verify,
    /// The execution ends in an error.
    Run,
    /// One of the two.
    Either,
}

/// An input of a case.
enum CaseInput {
    Tensor(TensorSpec, Range<usize>),
    Cache {
        spec: CacheSpec,
        before: Range<usize>,
        after: Option<Range<usize>>,
    },
}

/// A value of a case's graph, before there is one.
#[derive(Clone, Copy)]
enum Reference {
    Absent,
    Input(usize),
    Node(usize, usize),
}

struct CaseNode {
    op: String,
    inputs: Vec<Reference>,
    attributes: serde_json::Map<String, Json>,
}

/// One case.
pub struct Case {
    /// The row it is a case of.
    pub op: String,
    /// What is special about it.
    pub note: String,
    /// How floats are compared.
    pub check: Check,
    /// Whether and where it must fail.
    pub fails: Option<Fails>,
    rows: Option<usize>,
    inputs: Vec<CaseInput>,
    nodes: Vec<CaseNode>,
    results: Vec<Reference>,
    outputs: Vec<(TensorSpec, Range<usize>)>,
    data: Rc<Vec<u8>>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.op, self.note)
    }
}

/// Every case there is.
///
/// # Errors
/// When a file is missing or malformed.
pub fn cases() -> Result<Vec<Case>> {
    let folder = repository().join("tests/golden/ops");
    let mut found = Vec::new();
    let mut paths: Vec<_> = std::fs::read_dir(&folder)
        .with_context(|| format!("{}", folder.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "json"))
        .collect();
    paths.sort();
    for path in paths {
        read(&path, &mut found).with_context(|| format!("{}", path.display()))?;
    }
    Ok(found)
}

fn read(path: &Path, found: &mut Vec<Case>) -> Result<()> {
    let index: Json = serde_json::from_slice(&std::fs::read(path)?)?;
    let data = Rc::new(std::fs::read(path.with_extension("bin"))?);
    for case in list(&index)? {
        let parsed = parse(case, &data).with_context(|| format!("{case}"))?;
        found.push(parsed);
    }
    Ok(())
}

fn parse(case: &Json, data: &Rc<Vec<u8>>) -> Result<Case> {
    let rows = case["rows"].as_u64().map(|n| n as usize);
    let nodes = list(&case["nodes"])?.iter().map(|n| {
        Ok(CaseNode {
            op: text(&n[0])?,
            inputs: references(&n[1])?,
            attributes: n[2].as_object().context("attributes")?.clone(),
        })
    });
    Ok(Case {
        op: text(&case["op"])?,
        note: text(&case["note"])?,
        check: match case["check"].as_str() {
            None => Check::Together,
            Some("exact") => Check::Exact,
            Some("each") => Check::Each,
            Some(other) => bail!("there is no check {other:?}"),
        },
        fails: match case["fails"].as_str() {
            None => None,
            Some("verify") => Some(Fails::Verify),
            Some("run") => Some(Fails::Run),
            Some("either") => Some(Fails::Either),
            Some(other) => bail!("there is no failure {other:?}"),
        },
        rows,
        inputs: list(&case["inputs"])?
            .iter()
            .map(|i| input(i, rows, data))
            .collect::<Result<_>>()?,
        nodes: nodes.collect::<Result<_>>()?,
        results: references(&case["results"])?,
        outputs: list(&case["outputs"])?
            .iter()
            .map(|o| tensor(o, rows, data))
            .collect::<Result<_>>()?,
        data: data.clone(),
    })
}

fn list(json: &Json) -> Result<&Vec<Json>> {
    json.as_array()
        .with_context(|| format!("{json} is no list"))
}

fn text(json: &Json) -> Result<String> {
    Ok(json
        .as_str()
        .with_context(|| format!("{json} is no text"))?
        .to_owned())
}

fn number(json: &Json) -> Result<usize> {
    let n = json.as_u64().with_context(|| format!("{json} is no size"));
    Ok(n? as usize)
}

fn references(json: &Json) -> Result<Vec<Reference>> {
    let one = |r: &Json| match r {
        Json::Null => Ok(Reference::Absent),
        Json::Array(pair) if pair.len() == 2 => {
            Ok(Reference::Node(number(&pair[0])?, number(&pair[1])?))
        }
        other => Ok(Reference::Input(number(other)?)),
    };
    list(json)?.iter().map(one).collect()
}

/// `bytes` of the data at the offset `at`.
fn range(at: &Json, bytes: Option<usize>, data: &[u8]) -> Result<Range<usize>> {
    let start = number(at)?;
    let end = start + bytes.context("a size that overflows")?;
    data.get(start..end).context("data that ends too early")?;
    Ok(start..end)
}

fn dtype(json: &Json) -> Result<DType> {
    let name = text(json)?;
    DType::from_name(&name).with_context(|| format!("there is no dtype {name}"))
}

fn tensor(json: &Json, rows: Option<usize>, data: &[u8]) -> Result<(TensorSpec, Range<usize>)> {
    let dims: Vec<usize> = list(&json[1])?.iter().map(number).collect::<Result<_>>()?;
    let symbolic = json[3].as_bool() == Some(true);
    let dims = dims.into_iter().enumerate().map(|(i, n)| match i {
        0 if symbolic => Dim::Rows,
        _ => Dim::Fixed(n),
    });
    let spec = TensorSpec::new(dtype(&json[0])?, Shape::new(dims)?)?;
    let data = range(&json[2], spec.bytes(rows.unwrap_or(0)), data)?;
    Ok((spec, data))
}

fn input(json: &Json, rows: Option<usize>, data: &[u8]) -> Result<CaseInput> {
    let Some(cache) = json["cache"].as_array() else {
        let (spec, data) = tensor(json, rows, data)?;
        return Ok(CaseInput::Tensor(spec, data));
    };
    let size = |i: usize| number(cache.get(i).unwrap_or(&Json::Null));
    let spec = CacheSpec {
        dtype: dtype(cache.first().unwrap_or(&Json::Null))?,
        blocks: size(1)?,
        block_len: size(2)?,
        kv_heads: size(3)?,
        head_dim: size(4)?,
    };
    let after = match &json["after"] {
        Json::Null => None,
        at => Some(range(at, spec.bytes(), data)?),
    };
    Ok(CaseInput::Cache {
        spec,
        before: range(&json["at"], spec.bytes(), data)?,
        after,
    })
}

/// Why a case has no graph.
enum Refused {
    /// The builder refused the last node.
    Last(GraphError),
    /// Anything else.
    Other(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Refused {
    fn from(error: E) -> Self {
        Refused::Other(error.into())
    }
}

impl Case {
    /// The graph, unless building it fails.
    ///
    /// # Errors
    /// When it is refused, which for some cases is right.
    pub fn graph(&self) -> Result<Graph> {
        self.build().map_err(|refused| match refused {
            Refused::Last(error) => error.into(),
            Refused::Other(error) => error,
        })
    }

    fn build(&self) -> Result<Graph, Refused> {
        let mut builder = GraphBuilder::new(self.rows.map_or(0, |n| n + SPARE_ROWS));
        let mut inputs = Vec::new();
        for (i, input) in self.inputs.iter().enumerate() {
            inputs.push(match input {
                // A block type is a weight, and weights are constants.
                CaseInput::Tensor(spec, _) if spec.dtype.is_block() => {
                    builder.constant(format!("input {i}"), spec.clone())?
                }
                CaseInput::Tensor(spec, _) => builder.tensor(format!("input {i}"), spec.clone())?,
                CaseInput::Cache { spec, .. } => builder.cache(format!("input {i}"), *spec)?,
            });
        }
        self.build_of(builder, &inputs, None)
    }

    /// Its nodes over these inputs. `dtype`: what its results are instead of what they were.
    fn build_of(
        &self,
        mut builder: GraphBuilder,
        inputs: &[Value],
        dtype: Option<DType>,
    ) -> Result<Graph, Refused> {
        let mut values: Vec<Vec<Value>> = Vec::new();
        for (n, node) in self.nodes.iter().enumerate() {
            let row = find(&node.op).ok_or_else(|| anyhow!("there is no op {}", node.op))?;
            let arguments = node
                .inputs
                .iter()
                .map(|&r| value(r, inputs, &values))
                .collect::<Result<_>>()?;
            let attributes = attributes(row, &node.attributes, &self.data)?;
            match builder.apply(row, arguments, attributes) {
                Ok(results) => values.push(results),
                Err(error) if n + 1 == self.nodes.len() => return Err(Refused::Last(error)),
                Err(error) => return Err(error.into()),
            }
        }
        // A case that must fail while running has no expected results: everything of the last node is one.
        let outputs = match self.fails {
            Some(_) => values.last().cloned().unwrap_or_default(),
            None => self
                .results
                .iter()
                .map(|&r| value(r, inputs, &values))
                .collect::<Result<_>>()?,
        };
        if self.fails.is_none() {
            let count = values.last().map_or(0, Vec::len);
            if self.nodes.len() == 1 && count != self.outputs.len() {
                let wanted = self.outputs.len();
                return Err(anyhow!("{count} results instead of {wanted}").into());
            }
        }
        for (&output, (spec, _)) in outputs.iter().zip(&self.outputs) {
            let ValueSpec::Tensor(found) = builder.spec(output)? else {
                return Err(anyhow!("a result is no tensor").into());
            };
            let rows = self.rows.unwrap_or(0);
            let size = |t: &TensorSpec| -> Vec<usize> {
                t.shape.dims().iter().map(|d| d.at(rows)).collect()
            };
            if found.dtype != dtype.unwrap_or(spec.dtype) || size(&found) != size(spec) {
                return Err(anyhow!("infers {found} instead of {spec}").into());
            }
        }
        Ok(builder.finish(&outputs)?)
    }

    /// Whether an input is of a type for which the others may be rounded.
    fn has_blocks(&self) -> bool {
        let block = |input: &CaseInput| matches!(input, CaseInput::Tensor(spec, _) if rounds_others(spec.dtype));
        self.inputs.iter().any(block)
    }

    /// Whether all plain tensors that it reads are of these dtypes.
    pub fn reads_only(&self, dtypes: &[DType]) -> bool {
        self.inputs.iter().all(|input| match input {
            CaseInput::Tensor(spec, _) => spec.dtype.is_block() || dtypes.contains(&spec.dtype),
            CaseInput::Cache { .. } => true,
        })
    }

    /// Dtypes of its results.
    fn result_dtypes(&self) -> Vec<DType> {
        self.outputs.iter().map(|(spec, _)| spec.dtype).collect()
    }

    fn bytes(&self, range: &Range<usize>) -> &[u8] {
        self.data.get(range.clone()).unwrap_or_default()
    }

    /// Whether two executions gave the same bits. Which of its many bit patterns a NaN has is nobody's promise.
    pub fn same(&self, a: &Outcome, b: &Outcome) -> bool {
        let equal = |dtype, a: &[u8], b: &[u8]| difference(dtype, Check::Exact, 0.0, a, b).is_ok();
        let outputs = self.outputs.iter().zip(a.outputs.iter().zip(&b.outputs));
        a.caches == b.caches
            && a.outputs.len() == b.outputs.len()
            && outputs
                .into_iter()
                .all(|((spec, _), (a, b))| equal(spec.dtype, a, b))
    }

    /// Whether it multiplies with weights of this dtype.
    pub fn has_weights_in(&self, dtype: DType) -> bool {
        let is_product = |node: &CaseNode| node.op.starts_with("mul_mat");
        let is_of =
            |input: &CaseInput| matches!(input, CaseInput::Tensor(spec, _) if spec.dtype == dtype);
        self.nodes.iter().any(is_product) && self.inputs.iter().any(is_of)
    }

    /// Runs the case and compares. What was computed comes back, nothing for a case that fails as it must.
    ///
    /// # Errors
    /// What differs.
    pub fn check(&self, executor: &mut dyn Executor) -> Result<Option<Outcome>> {
        let graph = match (self.build(), self.fails) {
            (Ok(_), Some(Fails::Verify)) => bail!("the builder accepts it"),
            (Ok(graph), _) => graph,
            (Err(Refused::Last(_)), Some(Fails::Verify | Fails::Either)) => return Ok(None),
            (Err(Refused::Last(error)), _) => bail!("refused: {error}"),
            (Err(Refused::Other(error)), _) => return Err(error),
        };
        let inputs: Vec<&[u8]> = self
            .inputs
            .iter()
            .map(|input| match input {
                CaseInput::Tensor(_, range) => self.bytes(range),
                CaseInput::Cache { before, .. } => self.bytes(before),
            })
            .collect();
        let blocks = self.has_blocks();
        let outcome = match (
            executor.run(&graph, self.rows.unwrap_or(0), &inputs),
            self.fails,
        ) {
            (Ok(outcome), None) => outcome,
            (Ok(_), Some(_)) => bail!("it runs, and should fail"),
            (Err(RunError::Run(_)), Some(_)) => return Ok(None),
            (Err(error), _) => bail!("{error}"),
        };
        for (i, ((spec, range), got)) in self.outputs.iter().zip(&outcome.outputs).enumerate() {
            let limit = tolerance(&self.op, spec.dtype, blocks);
            difference(spec.dtype, self.check, limit, got, self.bytes(range))
                .map_err(|what| anyhow!("result {i} ({spec}): {what}"))?;
        }
        let after = self.inputs.iter().filter_map(|input| match input {
            CaseInput::Cache { spec, after, .. } => Some((spec, after)),
            CaseInput::Tensor(..) => None,
        });
        for ((spec, after), got) in after.zip(&outcome.caches) {
            let Some(range) = after else { continue };
            difference(spec.dtype, Check::Exact, 0.0, got, self.bytes(range))
                .map_err(|what| anyhow!("{spec} afterwards: {what}"))?;
        }
        Ok(Some(outcome))
    }
}

fn value(reference: Reference, inputs: &[Value], values: &[Vec<Value>]) -> Result<Value> {
    let found = match reference {
        Reference::Absent => Some(Value::Absent),
        Reference::Input(i) => inputs.get(i).copied(),
        Reference::Node(n, o) => values.get(n).and_then(|v| v.get(o)).copied(),
    };
    found.context("a reference to no value")
}

/// A row's attributes in its order, by their names.
fn attributes(
    row: &OpRow,
    given: &serde_json::Map<String, Json>,
    data: &[u8],
) -> Result<Vec<Attribute>> {
    if let Some(stranger) = given
        .keys()
        .find(|k| row.attributes.iter().all(|a| a.name != k.as_str()))
    {
        bail!("{} has no attribute {stranger}", row.name);
    }
    let ints = |json: &Json| -> Result<Vec<i64>> {
        let int = |v: &Json| v.as_i64().with_context(|| format!("{v} is no integer"));
        list(json)?.iter().map(int).collect()
    };
    let one = |spec: &hotcell_graph::op::AttributeSpec| -> Result<Attribute> {
        let json = given
            .get(spec.name)
            .with_context(|| format!("the case lacks {}'s {}", row.name, spec.name))?;
        Ok(match spec.kind {
            AttributeKind::Int(..) => Attribute::Int(json.as_i64().context("no integer")?),
            AttributeKind::Float(..) => Attribute::Float(json.as_f64().context("no number")?),
            AttributeKind::Bool => Attribute::Bool(json.as_bool().context("no bool")?),
            AttributeKind::Name(_) => Attribute::Name(text(json)?),
            AttributeKind::DType => Attribute::DType(dtype(json)?),
            AttributeKind::Ints(..) => Attribute::Ints(ints(json)?),
            AttributeKind::Shape => {
                let dims: Vec<usize> = list(json)?.iter().map(number).collect::<Result<_>>()?;
                Attribute::Shape(Shape::fixed(&dims)?)
            }
            AttributeKind::Bytes(_) => {
                let at = range(&json["at"], Some(number(&json["bytes"])?), data)?;
                Attribute::Bytes(data.get(at).unwrap_or_default().to_vec())
            }
        })
    };
    row.attributes.iter().map(one).collect()
}
