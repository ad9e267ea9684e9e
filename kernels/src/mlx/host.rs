//! Nodes that MLX has no op for: a plan of the CPU backend in the middle of MLX's.

use std::{collections::HashMap, rc::Rc};

use hotcell_graph::{Graph, GraphBuilder, Value, op::ValueSpec};

use super::plan::overflow;
use crate::{
    backend::{Buffer, Device, DeviceError},
    plan::{Plan, PlanHints},
};

/// What a part reads.
pub(super) struct In {
    /// A value of the whole graph.
    pub value: usize,
    /// Where it is copied to first; nothing where it is an input of the whole graph, which is read in place.
    pub copy: Option<Buffer>,
    pub spec: ValueSpec,
}

/// What a part makes.
pub(super) struct Out {
    pub value: usize,
    pub buffer: Option<Rc<Buffer>>,
}

/// Consecutive nodes on the CPU backend's kernels.
pub(super) struct HostPart {
    pub plan: Box<dyn Plan>,
    pub ins: Vec<In>,
    pub outs: Vec<Out>,
    /// Bytes of the copies.
    pub bytes: usize,
}

impl HostPart {
    /// A plan for nodes `from..to` of `graph`. `number` names values of the whole graph, `wanted` says which results
    /// others read.
    pub fn new(
        graph: &Graph,
        range: std::ops::Range<usize>,
        number: &dyn Fn(Value) -> Option<usize>,
        wanted: &dyn Fn(usize) -> bool,
        cpu: &dyn Device,
        hints: &PlanHints,
    ) -> Result<Self, DeviceError> {
        let mut builder = GraphBuilder::new(graph.max_rows());
        let mut here: HashMap<Value, Value> = HashMap::from([(Value::Absent, Value::Absent)]);
        let (mut ins, mut outs, mut results) = (vec![], vec![], vec![]);
        let mut bytes = 0usize;
        let mut place = |spec: &ValueSpec| {
            let size = match spec {
                ValueSpec::Tensor(t) => t.bytes(graph.max_rows()),
                _ => None,
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
                    Value::Node { .. } => place(&spec)?,
                    _ => None,
                };
                let value = number(value).ok_or_else(overflow)?;
                ins.push(In { value, copy, spec });
            }
            let inputs = node.inputs.iter().filter_map(|v| here.get(v).copied());
            let made = builder.apply(node.op, inputs.collect(), node.attributes.clone())?;
            for (output, (result, spec)) in made.into_iter().zip(&node.outputs).enumerate() {
                let value = Value::Node {
                    node: n as u32,
                    output: output as u32,
                };
                here.insert(value, result);
                let value = number(value).ok_or_else(overflow)?;
                if wanted(value) {
                    let buffer = place(&ValueSpec::Tensor(spec.clone()))?.map(Rc::new);
                    outs.push(Out { value, buffer });
                    results.push(result);
                }
            }
        }
        let plan = cpu.plan(&builder.finish(&results)?, hints)?;
        Ok(Self {
            plan,
            ins,
            outs,
            bytes,
        })
    }
}
