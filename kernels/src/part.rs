//! Nodes that a backend has no kernel for: a plan of the CPU backend in the middle of its own.

use std::{collections::HashMap, rc::Rc};

use hotcell_graph::{
    Graph, GraphBuilder, Value,
    op::{Call, Effect, ValueSpec},
};

use crate::{
    backend::{Buffer, Device, DeviceError},
    lower::Lowered,
    plan::{Origin, Plan, PlanHints},
};

/// Sizes that no number holds.
pub(crate) fn overflow() -> DeviceError {
    DeviceError::OutOfMemory {
        what: "the plan's values".to_owned(),
        bytes: usize::MAX,
    }
}

/// Numbers of a graph's values: inputs first, then each node's results.
pub(crate) struct Numbers {
    inputs: usize,
    /// Of each node's first result.
    pub firsts: Vec<usize>,
    /// How many there are.
    pub count: usize,
}

impl Numbers {
    pub fn new(graph: &Graph) -> Self {
        let inputs = graph.inputs().len();
        let mut count = inputs;
        let firsts = graph.nodes().iter().map(|node| {
            let first = count;
            count += node.outputs.len();
            first
        });
        Self {
            inputs,
            firsts: firsts.collect(),
            count,
        }
    }

    /// The number of a value; none for one that is not there.
    pub fn of(&self, value: Value) -> Option<usize> {
        match value {
            Value::Absent => None,
            Value::Input(i) => Some(i as usize).filter(|i| *i < self.inputs),
            Value::Node { node, output } => Some(self.firsts.get(node as usize)? + output as usize),
        }
    }
}

/// Whether decomposing a call only gives the same call again: what promotes its inputs, for inputs that need not be.
pub(crate) fn is_fixed_point(call: &Call<'_>) -> bool {
    let Some(decompose) = call.op.decompose else {
        return true;
    };
    let again = || -> Option<bool> {
        // One row is as good as any: what an op becomes does not depend on how many there are.
        let mut builder = GraphBuilder::new(1);
        let mut inputs = Vec::with_capacity(call.inputs.len());
        for spec in call.inputs {
            inputs.push(match spec {
                ValueSpec::Tensor(t) => builder.tensor("x", t.clone()).ok()?,
                ValueSpec::Cache(c) => builder.cache("c", *c).ok()?,
                ValueSpec::Absent => Value::Absent,
            });
        }
        let results = decompose(&mut builder, &inputs, call.attributes).ok()?;
        let graph = builder.finish(&results).ok()?;
        Some(graph.nodes().iter().any(|node| {
            std::ptr::eq(node.op, call.op)
                && graph
                    .input_specs(node)
                    .is_ok_and(|specs| specs == call.inputs)
        }))
    };
    again().unwrap_or(true)
}

/// What a part reads.
pub(crate) struct In {
    /// A value of the whole graph.
    pub value: usize,
    /// Where it is copied to first; nothing where it is read in place.
    pub copy: Option<Buffer>,
    #[cfg_attr(not(feature = "mlx"), expect(dead_code))]
    pub spec: ValueSpec,
    /// Whether the part changes it.
    pub written: bool,
}

/// What a part makes.
pub(crate) struct Out {
    pub value: usize,
    pub buffer: Option<Rc<Buffer>>,
}

/// Where a part reads what is an input of the whole graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inputs {
    /// Where it is: in the host's memory.
    #[cfg_attr(not(feature = "mlx"), allow(dead_code))]
    InPlace,
    /// In a copy: it is where the host cannot read it.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Copied,
}

/// Consecutive nodes on the CPU backend's kernels.
pub(crate) struct HostPart {
    pub plan: Box<dyn Plan>,
    /// What its steps compute.
    pub origins: Vec<Option<Origin>>,
    pub ins: Vec<In>,
    pub outs: Vec<Out>,
    /// Bytes of the copies.
    pub bytes: usize,
    /// Whether the copies of constants are those of what is bound.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code))]
    pub has_constants: bool,
}

impl HostPart {
    /// A plan for nodes `range` of a graph. `numbers` names values of the whole graph, `wanted` says which results
    /// others read.
    pub fn new(
        lowered: &Lowered,
        range: std::ops::Range<usize>,
        numbers: &Numbers,
        wanted: &dyn Fn(usize) -> bool,
        cpu: &dyn Device,
        inputs: Inputs,
        hints: &PlanHints,
    ) -> Result<Self, DeviceError> {
        let graph = &lowered.graph;
        let start = range.start;
        let mut builder = GraphBuilder::new(graph.max_rows());
        let mut here: HashMap<Value, Value> = HashMap::from([(Value::Absent, Value::Absent)]);
        let (mut ins, mut outs, mut results) = (vec![], vec![], vec![]);
        let mut bytes = 0usize;
        let mut place = |spec: &ValueSpec| {
            let size = match spec {
                ValueSpec::Tensor(t) => t.bytes(graph.max_rows()),
                ValueSpec::Cache(c) => c.bytes(),
                ValueSpec::Absent => None,
            };
            let size = size.ok_or_else(overflow)?;
            bytes = bytes.checked_add(size).ok_or_else(overflow)?;
            match hints.allocate {
                true => cpu.allocate("a value between devices", size).map(Some),
                false => Ok(None),
            }
        };
        for n in range {
            let node = &graph.nodes()[n];
            for &value in &node.inputs {
                if here.contains_key(&value) {
                    continue;
                }
                let spec = graph.spec(value)?;
                let name = format!("{value:?}");
                let constant = match value {
                    Value::Input(i) => graph.inputs().get(i as usize).is_some_and(|i| i.constant),
                    _ => false,
                };
                let inner = match &spec {
                    ValueSpec::Tensor(t) if constant => builder.constant(name, t.clone())?,
                    ValueSpec::Tensor(t) => builder.tensor(name, t.clone())?,
                    ValueSpec::Cache(c) => builder.cache(name, *c)?,
                    ValueSpec::Absent => Value::Absent,
                };
                here.insert(value, inner);
                let copy = match value {
                    Value::Input(_) if inputs == Inputs::InPlace => None,
                    _ => place(&spec)?,
                };
                let value = numbers.of(value).ok_or_else(overflow)?;
                ins.push(In {
                    value,
                    copy,
                    spec,
                    written: false,
                });
            }
            if let Effect::Writes(at) = node.op.effect
                && let Some(value) = node.inputs.get(at).and_then(|v| numbers.of(*v))
            {
                for changed in ins.iter_mut().filter(|i: &&mut In| i.value == value) {
                    changed.written = true;
                }
            }
            let taken = node.inputs.iter().filter_map(|v| here.get(v).copied());
            let made = builder.apply(node.op, taken.collect(), node.attributes.clone())?;
            for (output, (result, spec)) in made.into_iter().zip(&node.outputs).enumerate() {
                let value = Value::Node {
                    node: n as u32,
                    output: output as u32,
                };
                here.insert(value, result);
                let value = numbers.of(value).ok_or_else(overflow)?;
                if wanted(value) {
                    let buffer = place(&ValueSpec::Tensor(spec.clone()))?.map(Rc::new);
                    outs.push(Out { value, buffer });
                    results.push(result);
                }
            }
        }
        let plan = cpu.plan(&builder.finish(&results)?, hints)?;
        // Each of its nodes is one of the graph's.
        let of_the_whole = |Origin { node, op }: Origin| {
            let whole = lowered.origin(start.checked_add(node as usize)?)?;
            Some(Origin { op, ..whole })
        };
        let origins = plan.origins().into_iter();
        Ok(Self {
            origins: origins
                .map(|origin| origin.and_then(of_the_whole))
                .collect(),
            plan,
            ins,
            outs,
            bytes,
            has_constants: false,
        })
    }
}
