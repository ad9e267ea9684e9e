//! Graphs: ops applied to inputs and to each other's results, in execution order.

use thiserror::Error;

use hotcell_proto::limits;

use crate::{
    op::{Attribute, Effect, OpRow, ValueSpec},
    shape::{CacheSpec, TensorSpec},
};

/// Why a graph is refused. The message names the op and the way out.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GraphError {
    /// A shape that cannot be.
    #[error("invalid shape: {0}")]
    Shape(String),
    /// An op's inputs or attributes do not fit.
    #[error("{op}: {what}")]
    Op {
        /// The op's name.
        op: &'static str,
        /// What does not fit.
        what: String,
    },
    /// No row of this name.
    #[error("there is no op named {0:?}")]
    UnknownOp(String),
    /// A value that is not an input and not an earlier result.
    #[error("{0} does not name an input or an earlier result")]
    UnknownValue(String),
    /// More nodes, inputs or rows than the limits allow.
    #[error("{0}")]
    Limit(String),
    /// An op without result was used as a value.
    #[error("an op without result was used as a value")]
    NoResult,
    /// A wire form that is incomplete.
    #[error("malformed graph: {0}")]
    Malformed(String),
}

impl GraphError {
    pub(crate) fn shape(what: impl Into<String>) -> Self {
        GraphError::Shape(what.into())
    }
}

/// The first characters of what a stranger sent, for a message.
pub(crate) fn brief(text: &str, chars: usize) -> String {
    text.chars().take(chars).collect()
}

/// A value of a graph: an input, or a result of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Value {
    /// An optional input that is not given.
    Absent,
    /// Index into [`Graph::inputs`].
    Input(u32),
    /// A result.
    Node {
        /// Index into [`Graph::nodes`].
        node: u32,
        /// Which of its results.
        output: u32,
    },
}

/// A named input.
#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    /// Name, for messages and binding.
    pub name: String,
    /// What it is.
    pub spec: ValueSpec,
    /// The same bytes at every execution, such as a weight.
    pub constant: bool,
}

/// An op applied.
#[derive(Clone)]
pub struct Node {
    /// The op.
    pub op: &'static OpRow,
    /// Its inputs.
    pub inputs: Vec<Value>,
    /// Its attributes, in the row's order.
    pub attributes: Vec<Attribute>,
    /// Specs of its results, computed by the row's rule.
    pub outputs: Vec<TensorSpec>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}({:?}; {:?})",
            self.op.name, self.inputs, self.attributes
        )
    }
}

/// A verified graph. It can only be made by a [`GraphBuilder`], which checks every step, so whoever
/// holds one need not check again.
#[derive(Clone, Debug)]
pub struct Graph {
    max_rows: usize,
    inputs: Vec<Input>,
    nodes: Vec<Node>,
    outputs: Vec<Value>,
}

impl Graph {
    /// Greatest number of rows of the symbolic dimension.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// The inputs.
    pub fn inputs(&self) -> &[Input] {
        &self.inputs
    }

    /// The nodes in execution order; effects on one cache happen in this order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The values that the graph returns.
    pub fn outputs(&self) -> &[Value] {
        &self.outputs
    }

    /// Spec of a value of this graph.
    ///
    /// # Errors
    /// [`GraphError::UnknownValue`] for a value of another graph.
    pub fn spec(&self, value: Value) -> Result<ValueSpec, GraphError> {
        spec_of(&self.inputs, &self.nodes, value)
    }

    /// Specs of a node's inputs.
    ///
    /// # Errors
    /// [`GraphError::UnknownValue`] for a node of another graph.
    pub fn input_specs(&self, node: &Node) -> Result<Vec<ValueSpec>, GraphError> {
        node.inputs.iter().map(|&v| self.spec(v)).collect()
    }

    /// Of each input, whether any of its elements can have a part in where an op reads or writes: through whatever ops
    /// lie between it and a slot that is marked so in the catalogue. An input that is not such may change while the graph
    /// is computed, which makes the results arbitrary and nothing else.
    pub fn inputs_read_as_indices(&self) -> Vec<bool> {
        let mut inputs = vec![false; self.inputs.len()];
        let mut nodes = vec![false; self.nodes.len()];
        // Whoever reads a value comes after it, so that from the end all of them have been seen.
        for (n, node) in self.nodes.iter().enumerate().rev() {
            for (i, value) in node.inputs.iter().enumerate() {
                let of_node = nodes.get(n).is_some_and(|leads| *leads);
                if !of_node && !node.op.input(i).is_some_and(|slot| slot.is_index) {
                    continue;
                }
                let leads = match value {
                    Value::Absent => None,
                    Value::Input(i) => inputs.get_mut(*i as usize),
                    Value::Node { node, .. } => nodes.get_mut(*node as usize),
                };
                if let Some(leads) = leads {
                    *leads = true;
                }
            }
        }
        inputs
    }
}

fn spec_of(inputs: &[Input], nodes: &[Node], value: Value) -> Result<ValueSpec, GraphError> {
    let found = match value {
        Value::Absent => Some(ValueSpec::Absent),
        Value::Input(i) => inputs.get(i as usize).map(|x| x.spec.clone()),
        Value::Node { node, output } => nodes
            .get(node as usize)
            .and_then(|n| n.outputs.get(output as usize))
            .map(|t| ValueSpec::Tensor(t.clone())),
    };
    found.ok_or_else(|| GraphError::UnknownValue(format!("{value:?}")))
}

/// Builds a graph, verifying each step. One method per catalogue row is generated beside the row.
#[derive(Debug)]
pub struct GraphBuilder {
    graph: Graph,
}

impl GraphBuilder {
    /// A graph whose symbolic dimension has at most `max_rows` rows (0: it has none).
    pub fn new(max_rows: usize) -> Self {
        Self {
            graph: Graph {
                max_rows,
                inputs: vec![],
                nodes: vec![],
                outputs: vec![],
            },
        }
    }

    fn input(
        &mut self,
        name: String,
        spec: ValueSpec,
        constant: bool,
    ) -> Result<Value, GraphError> {
        if self.graph.inputs.len() >= limits::MAX_GRAPH_INPUTS {
            return Err(GraphError::Limit(format!(
                "more than {} inputs",
                limits::MAX_GRAPH_INPUTS
            )));
        }
        let max_rows = self.graph.max_rows;
        let short = || brief(&name, 64);
        let fits = match &spec {
            ValueSpec::Tensor(t) if t.shape.is_symbolic() && (max_rows == 0 || constant) => {
                return Err(GraphError::shape(format!(
                    "{:?} has rows where there are none",
                    short()
                )));
            }
            ValueSpec::Cache(c) if [c.blocks, c.block_len, c.kv_heads, c.head_dim].contains(&0) => {
                return Err(GraphError::shape(format!(
                    "{:?} ({spec}) has an axis of 0",
                    short()
                )));
            }
            ValueSpec::Tensor(t) => t.bytes(max_rows).is_some(),
            ValueSpec::Cache(c) => c.bytes().is_some(),
            ValueSpec::Absent => {
                return Err(GraphError::Malformed(format!(
                    "input {:?} has no spec",
                    short()
                )));
            }
        };
        if !fits {
            return Err(GraphError::Limit(format!(
                "input {:?} ({spec}) is too large",
                short()
            )));
        }
        self.graph.inputs.push(Input {
            name,
            spec,
            constant,
        });
        Ok(Value::Input((self.graph.inputs.len() - 1) as u32))
    }

    /// A tensor that is given anew for each execution.
    ///
    /// # Errors
    /// When it is too large or there are too many inputs.
    pub fn tensor(
        &mut self,
        name: impl Into<String>,
        spec: TensorSpec,
    ) -> Result<Value, GraphError> {
        self.input(name.into(), ValueSpec::Tensor(spec), false)
    }

    /// A tensor with the same bytes at every execution, such as a weight.
    ///
    /// # Errors
    /// When it is too large, has rows, or there are too many inputs.
    pub fn constant(
        &mut self,
        name: impl Into<String>,
        spec: TensorSpec,
    ) -> Result<Value, GraphError> {
        self.input(name.into(), ValueSpec::Tensor(spec), true)
    }

    /// A cache that the graph reads and writes.
    ///
    /// # Errors
    /// When it is too large, has an axis of 0, or there are too many inputs.
    pub fn cache(&mut self, name: impl Into<String>, spec: CacheSpec) -> Result<Value, GraphError> {
        self.input(name.into(), ValueSpec::Cache(spec), false)
    }

    /// Applies an op by its row: checks arity, attributes, specs and effects.
    ///
    /// # Errors
    /// When something does not fit; the message names the op.
    pub fn apply(
        &mut self,
        op: &'static OpRow,
        inputs: Vec<Value>,
        attributes: Vec<Attribute>,
    ) -> Result<Vec<Value>, GraphError> {
        let fail = |what: String| GraphError::Op { op: op.name, what };
        if self.graph.nodes.len() >= limits::MAX_GRAPH_NODES {
            return Err(GraphError::Limit(format!(
                "more than {} nodes",
                limits::MAX_GRAPH_NODES
            )));
        }
        let specs = inputs
            .iter()
            .map(|&v| spec_of(&self.graph.inputs, &self.graph.nodes, v))
            .collect::<Result<Vec<_>, _>>()?;
        if let Effect::Reads(i) | Effect::Writes(i) = op.effect
            && !matches!(inputs.get(i), Some(Value::Input(_)))
        {
            return Err(fail("its cache must be an input of the graph".to_owned()));
        }
        let outputs = op.check(&specs, &attributes)?;
        if self.graph.max_rows == 0 && outputs.iter().any(|t| t.shape.is_symbolic()) {
            return Err(fail(
                "its result has rows, but the graph has none".to_owned(),
            ));
        }
        if outputs
            .iter()
            .any(|t| t.bytes(self.graph.max_rows).is_none())
        {
            return Err(fail("its result is too large".to_owned()));
        }
        let node = self.graph.nodes.len() as u32;
        let values = (0..outputs.len() as u32)
            .map(|output| Value::Node { node, output })
            .collect();
        self.graph.nodes.push(Node {
            op,
            inputs,
            attributes,
            outputs,
        });
        Ok(values)
    }

    /// The nodes so far.
    pub fn nodes(&self) -> &[Node] {
        self.graph.nodes()
    }

    /// Spec of a value so far.
    ///
    /// # Errors
    /// [`GraphError::UnknownValue`] for a value of another graph.
    pub fn spec(&self, value: Value) -> Result<ValueSpec, GraphError> {
        self.graph.spec(value)
    }

    /// Ends the graph with the values it returns.
    ///
    /// # Errors
    /// When one of them does not exist or is a cache.
    pub fn finish(mut self, outputs: &[Value]) -> Result<Graph, GraphError> {
        for &v in outputs {
            match self.graph.spec(v)? {
                ValueSpec::Tensor(_) => {}
                ValueSpec::Cache(_) => {
                    return Err(GraphError::UnknownValue(format!("{v:?}, a cache,")));
                }
                ValueSpec::Absent => return Err(GraphError::UnknownValue(format!("{v:?}"))),
            }
        }
        self.graph.outputs = outputs.to_vec();
        Ok(self.graph)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Shape};

    fn spec(dtype: DType, dims: &[usize]) -> TensorSpec {
        TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap()
    }

    #[test]
    fn a_builder_infers_and_refuses() {
        let mut g = GraphBuilder::new(8);
        let x = g
            .tensor(
                "x",
                TensorSpec::new(DType::F32, Shape::rows(&[64]).unwrap()).unwrap(),
            )
            .unwrap();
        let w = g.constant("w", spec(DType::Q4_0, &[96, 64])).unwrap();
        let y = g.mul_mat(x, w).unwrap();
        assert_eq!(g.spec(y).unwrap().to_string(), "f32[rows, 96]");
        let heads = g.reshape(y, Shape::rows(&[3, 32]).unwrap()).unwrap();
        assert!(g.reshape(heads, Shape::fixed(&[96]).unwrap()).is_err());
        assert!(
            g.mul_mat(y, w)
                .unwrap_err()
                .to_string()
                .starts_with("mul_mat: ")
        );
        assert!(g.add(x, y).is_err());
        assert!(g.rms_norm(x, Some(w), 1e-5).is_err());
        assert!(g.swiglu(x, w).is_err());
        let n = g.constant("n", spec(DType::F32, &[64])).unwrap();
        assert!(g.rms_norm(x, Some(n), f64::NAN).is_err());
        let foreign = Value::Node {
            node: 99,
            output: 0,
        };
        assert!(g.silu(foreign).is_err());
        assert!(g.finish(&[foreign]).is_err());
    }

    #[test]
    fn inputs_lead_to_indices_through_whatever_lies_between() {
        let mut g = GraphBuilder::new(0);
        let table = g.tensor("table", spec(DType::F32, &[8, 4])).unwrap();
        let direct = g.tensor("direct", spec(DType::I32, &[2])).unwrap();
        let float = g.tensor("float", spec(DType::F32, &[2])).unwrap();
        let bytes = g.tensor("bytes", spec(DType::U8, &[2])).unwrap();
        let unused = g.tensor("unused", spec(DType::I32, &[2])).unwrap();
        let at = g.reshape(float, Shape::fixed(&[2, 1]).unwrap()).unwrap();
        let at = g.cast(at, DType::I32).unwrap();
        let ids = g.tensor("ids", spec(DType::I64, &[2, 1])).unwrap();
        let sum = g.add(at, ids).unwrap();
        let some = g.take(table, sum, 0).unwrap();
        let rows = g.get_rows(table, direct).unwrap();
        let numbers = g.cast(bytes, DType::F32).unwrap();
        let most = g.reduce_max(numbers, &[0], false).unwrap();
        let g = g.finish(&[some, rows, most, unused]).unwrap();
        let names = g.inputs().iter().map(|i| i.name.as_str());
        let leads = g.inputs_read_as_indices();
        let leading: Vec<_> = names
            .zip(leads)
            .filter(|(_, l)| *l)
            .map(|(n, _)| n)
            .collect();
        assert_eq!(leading, ["direct", "float", "ids"]);
    }

    #[test]
    fn what_is_picked_by_index_may_be_an_index_itself() {
        let mut g = GraphBuilder::new(0);
        let table = g.tensor("table", spec(DType::F32, &[8])).unwrap();
        let places = g.tensor("places", spec(DType::U8, &[5])).unwrap();
        let first = g.tensor("first", spec(DType::U8, &[3])).unwrap();
        let picked = g.take(places, first, 0).unwrap();
        let y = g.take(table, picked, 0).unwrap();
        let g = g.finish(&[y]).unwrap();
        assert_eq!(g.inputs_read_as_indices(), [false, true, true]);
    }

    #[test]
    fn a_constant_has_no_rows() {
        let mut g = GraphBuilder::new(8);
        let rows = TensorSpec::new(DType::F32, Shape::rows(&[4]).unwrap()).unwrap();
        assert!(g.constant("w", rows.clone()).is_err());
        assert!(GraphBuilder::new(0).tensor("x", rows).is_err());
    }
}
