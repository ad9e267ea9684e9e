//! Expressions become graphs.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use bytes::Bytes;
use prost::Message;

use hotcell_graph::{
    Graph, GraphBuilder, TensorSpec, Value,
    op::{self, Attribute, Effect},
    wire,
};
use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};

use super::array::{OpNode, State, Tensor, invalid, of_graph};

/// Nodes of one graph. Longer expressions are computed in pieces, which also bounds what a worker takes in one call.
pub(super) const PIECE: usize = 8192;

/// Identifies a graph: its encoding.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct PlanKey {
    bytes: Bytes,
    pure: bool,
}

impl PlanKey {
    pub fn new(bytes: impl Into<Bytes>, pure: bool) -> Self {
        let bytes = bytes.into();
        Self { bytes, pure }
    }

    /// The encoding.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Whether it computes its results and does nothing besides, so that it may be computed again.
    pub fn is_pure(&self) -> bool {
        self.pure
    }

    /// The graph.
    ///
    /// # Errors
    /// [`Reason::Internal`] if this is no key.
    pub fn decode(&self) -> Result<v1::Graph, Error> {
        let odd = |e| Error::new(Reason::Internal, format!("a graph cannot be read: {e}"));
        v1::Graph::decode(self.bytes.clone()).map_err(odd)
    }
}

/// A graph and the tensors that are its inputs.
pub(super) struct Program {
    pub graph: Graph,
    pub inputs: Vec<Tensor>,
}

impl Program {
    /// Its wire form and key.
    ///
    /// # Errors
    /// [`Reason::LimitExceeded`] when the encoding is larger than one call may carry.
    pub fn encode(&self) -> Result<(v1::Graph, PlanKey), Error> {
        let graph = wire::encode(&self.graph);
        let bytes = graph.encode_to_vec();
        if bytes.len() > limits::MAX_GRAPH_BYTES {
            let what = format!(
                "the graph takes {} bytes, at most {} may travel; evaluate parts of it first",
                bytes.len(),
                limits::MAX_GRAPH_BYTES
            );
            return Err(Error::new(Reason::LimitExceeded, what));
        }
        // What reads a cache depends on when it does.
        let pure = |node: &hotcell_graph::graph::Node| node.op.effect == Effect::None;
        let pure = self.graph.nodes().iter().all(pure);
        let key = PlanKey::new(bytes, pure);
        Ok((graph, key))
    }
}

fn address(tensor: &Tensor) -> usize {
    Arc::as_ptr(&tensor.0) as usize
}

fn node_address(node: &Arc<OpNode>) -> usize {
    Arc::as_ptr(node) as usize
}

/// The nodes that `outputs` need, each after those it reads.
pub(super) fn order(outputs: &[Tensor]) -> Vec<Arc<OpNode>> {
    order_with(outputs, None)
}

/// The same with a step's effects up to the `last`, in their order.
pub(super) fn order_with(outputs: &[Tensor], last: Option<&Arc<OpNode>>) -> Vec<Arc<OpNode>> {
    let mut seen = HashSet::new();
    let mut ordered = Vec::new();
    // A node is pushed once to be entered and once to be left.
    let mut stack: Vec<(Arc<OpNode>, bool)> = Vec::new();
    let enter = |tensor: &Tensor, stack: &mut Vec<(Arc<OpNode>, bool)>| {
        if let State::Lazy { node, .. } = tensor.state() {
            stack.push((node, false));
        }
    };
    for output in outputs.iter().rev() {
        enter(output, &mut stack);
    }
    stack.extend(last.map(|node| (Arc::clone(node), false)));
    while let Some((node, done)) = stack.pop() {
        if done {
            ordered.push(node);
        } else if seen.insert(node_address(&node)) {
            stack.push((Arc::clone(&node), true));
            for input in node.inputs.iter().rev().flatten() {
                enter(input, &mut stack);
            }
            if let Some(before) = node.turn.as_ref().and_then(|turn| turn.after.as_ref()) {
                stack.push((Arc::clone(before), false));
            }
        }
    }
    ordered
}

/// If the expressions are longer than one graph may be: tensors to compute first. `ordered` is what `wanted` need.
///
/// There is always one: the last node before the cut is read behind it or is itself wanted.
pub(super) fn first_piece(ordered: &[Arc<OpNode>], wanted: &[Tensor]) -> Option<Vec<Tensor>> {
    let (head, tail) = ordered.split_at_checked(PIECE)?;
    if tail.is_empty() {
        return None;
    }
    let head: HashSet<usize> = head.iter().map(node_address).collect();
    let mut seen = HashSet::new();
    let mut cut = Vec::new();
    let read = tail.iter().flat_map(|n| n.inputs.iter().flatten());
    for tensor in read.chain(wanted) {
        if let State::Lazy { node, .. } = tensor.state()
            && head.contains(&node_address(&node))
            && seen.insert(address(tensor))
        {
            cut.push(tensor.clone());
        }
    }
    Some(cut)
}

/// What stands for the arguments of a traced function.
pub(super) struct Arguments<'a> {
    pub trace: u64,
    pub specs: &'a [TensorSpec],
}

/// Of what a graph is built.
pub(super) enum Scope<'a> {
    /// Expressions.
    Plain,
    /// The results of a traced function.
    Traced(&'a Arguments<'a>),
    /// A step: its effects in their order, up to the last one.
    Step {
        id: u64,
        last: Option<&'a Arc<OpNode>>,
    },
}

/// Builds the graph of `outputs`. Its inputs are the arguments, if any, then the tensors and caches that have a value.
///
/// # Errors
/// What is wrong with an expression, an argument outside of its trace, or an effect outside of its step.
pub(super) fn build(
    outputs: &[Tensor],
    scope: &Scope<'_>,
    max_rows: usize,
) -> Result<Program, Error> {
    let (arguments, step, last) = match *scope {
        Scope::Plain => (None, None, None),
        Scope::Traced(arguments) => (Some(arguments), None, None),
        Scope::Step { id, last } => (None, Some(id), last),
    };
    let mut builder = GraphBuilder::new(max_rows);
    let mut values: HashMap<usize, Value> = HashMap::new();
    let mut placeholders = Vec::new();
    for (i, spec) in arguments.iter().flat_map(|a| a.specs).enumerate() {
        let value = builder.tensor(format!("argument {i}"), spec.clone());
        placeholders.push(value.map_err(|e| of_graph(&e))?);
    }
    let mut inputs = Vec::new();
    let mut results: HashMap<usize, Vec<Value>> = HashMap::new();

    let mut leaf = |tensor: &Tensor,
                    builder: &mut GraphBuilder,
                    results: &HashMap<usize, Vec<Value>>|
     -> Result<Value, Error> {
        // A lazy tensor's node is in `results` already; anything else is looked up by the tensor.
        let state = tensor.state();
        if let State::Lazy { node, output } = &state {
            let found = results
                .get(&node_address(node))
                .and_then(|r| r.get(*output));
            return found
                .copied()
                .ok_or_else(|| Error::new(Reason::Internal, "an expression is out of order"));
        }
        if let Some(value) = values.get(&address(tensor)) {
            return Ok(*value);
        }
        let value = match state {
            State::Wrong(ref error) => return Err(error.clone()),
            State::Argument { trace, index } => match arguments {
                Some(own) if own.trace == trace => placeholders.get(index).copied(),
                _ => None,
            }
            .ok_or_else(|| {
                invalid("an argument of a function being traced has no value; do not evaluate inside the function")
            })?,
            State::Host {
                ref data,
                literal: true,
            } => literal(builder, data)?,
            State::Host { .. } | State::Remote(_) | State::Lazy { .. } => {
                let name = format!("input {}", inputs.len());
                let made = match (&state, tensor.0.cache) {
                    (_, Some(cache)) => builder.cache(name, cache),
                    // What a plan takes is said apart from the weights that it reads.
                    (State::Remote(remote), _) if remote.is_weight => {
                        builder.constant(name, tensor.spec()?.clone())
                    }
                    _ => builder.tensor(name, tensor.spec()?.clone()),
                };
                inputs.push(tensor.clone());
                made.map_err(|e| of_graph(&e))?
            }
        };
        values.insert(address(tensor), value);
        Ok(value)
    };

    for node in order_with(outputs, last) {
        if let Some(turn) = &node.turn
            && step != Some(turn.step)
        {
            let what = "is an effect of a step, and only that step's run computes it";
            return Err(invalid(format!("{}: it {what}", node.row.name)));
        }
        let mut operands = Vec::with_capacity(node.inputs.len());
        for input in &node.inputs {
            operands.push(match input {
                None => Value::Absent,
                Some(tensor) => leaf(tensor, &mut builder, &results)?,
            });
        }
        let made = builder.apply(node.row, operands, node.attributes.clone());
        results.insert(node_address(&node), made.map_err(|e| of_graph(&e))?);
    }
    let mut wanted = Vec::with_capacity(outputs.len());
    for output in outputs {
        wanted.push(leaf(output, &mut builder, &results)?);
    }
    let graph = builder.finish(&wanted).map_err(|e| of_graph(&e))?;
    Ok(Program { graph, inputs })
}

fn literal(builder: &mut GraphBuilder, data: &super::host::HostTensor) -> Result<Value, Error> {
    let row = op::find("literal").ok_or_else(|| invalid("there is no op named literal"))?;
    let attributes = vec![
        Attribute::DType(data.spec().dtype),
        Attribute::Shape(data.spec().shape.clone()),
        Attribute::Bytes(data.bytes().to_vec()),
    ];
    let made = builder
        .apply(row, vec![], attributes)
        .map_err(|e| of_graph(&e))?;
    made.first()
        .copied()
        .ok_or_else(|| invalid("a literal without result"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::HostTensor;

    fn number() -> Tensor {
        Tensor::host(None, HostTensor::from_slice(&[1.0f32], &[]).unwrap(), false)
    }

    /// Tensors of each piece, and how often the last graph's nodes are computed at all.
    fn pieces(wanted: &[Tensor]) -> (Vec<usize>, usize) {
        let mut sizes = Vec::new();
        loop {
            let lazy: Vec<Tensor> = wanted
                .iter()
                .filter(|t| !t.is_evaluated())
                .cloned()
                .collect();
            let ordered = order(&lazy);
            let Some(piece) = first_piece(&ordered, &lazy) else {
                return (sizes, ordered.len());
            };
            assert!(!piece.is_empty(), "nothing to compute first: for ever");
            assert!(order(&piece).len() <= PIECE);
            sizes.push(piece.len());
            for tensor in piece {
                // As a computed one: what made it is forgotten.
                let State::Host { data, literal } = number().state() else {
                    panic!("a number has no value")
                };
                tensor.set(State::Host { data, literal });
            }
        }
    }

    #[test]
    fn long_expressions_are_cut_wherever_they_are_long() {
        let x = number();
        let wide: Vec<Tensor> = (0..2 * PIECE + 1).map(|_| x.neg()).collect();
        // Nobody reads what lies before the cut; it is wanted itself.
        assert_eq!(pieces(&wide), (vec![PIECE, PIECE], 1));
        let exact: Vec<Tensor> = (0..PIECE).map(|_| x.neg()).collect();
        assert_eq!(pieces(&exact), (vec![], PIECE));
        let deep = (0..2 * PIECE + 1).fold(x.clone(), |t, _| t.neg());
        assert_eq!(pieces(&[deep]), (vec![1, 1], 1));
        // Both at once: a tensor that is wanted, and read behind the cut as well.
        let first = x.neg();
        let mut both = vec![first.clone()];
        both.extend((0..PIECE).map(|_| &first + &x));
        assert_eq!(pieces(&both), (vec![PIECE], 1));
        // The second result alone is read behind the cut.
        let many = HostTensor::from_slice(&[3.0f32, 1.0, 2.0], &[3]).unwrap();
        let (values, at) = Tensor::host(None, many, false).topk(2, 0, true);
        let mut top = vec![values];
        top.extend((0..PIECE).map(|_| &at + &at));
        assert_eq!(pieces(&top).1, 1);
    }
}
