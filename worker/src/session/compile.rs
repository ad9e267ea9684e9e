//! From a verified graph to a plan under a handle: what is long about it beside the engine's thread, where the device allows
//! that, the rest on it.

use std::{rc::Rc, sync::Arc};

use hotcell_graph::{
    Graph,
    op::{Call, ValueSpec},
    wire::encode_tensor_spec,
};
use hotcell_kernels::{
    backend::{Device, DeviceError},
    lower,
    plan::{Plan, PlanHints, PlanMemory, Planner, Prepared, Unfinished},
};
use hotcell_proto::{
    error::{Error, Reason},
    v1::{self, FusedAttention},
};

use super::{
    plan::{self, PlanEntry},
    quota,
    state::Session,
};
use crate::error::{of_graph, of_plan};

/// Bytes that a step, an input or an output of a plan takes besides the arena, about.
const STEP_BYTES: usize = 512;

/// The op that [`FusedAttention`] is about.
const ATTENTION: &str = "scaled_dot_product_attention";

/// What a session's plans are made with.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    hints: PlanHints,
    attention: FusedAttention,
}

/// A graph on its way to a plan.
pub struct Draft {
    graph: Graph,
    terms: Terms,
    /// `None`: all of it is the engine's to do.
    prepared: Option<Box<dyn Prepared>>,
}

impl Draft {
    /// Does what needs no device, on whatever thread.
    ///
    /// # Errors
    /// When the device cannot do it.
    pub fn new(
        graph: Graph,
        terms: Terms,
        planner: Option<&Arc<dyn Planner>>,
    ) -> Result<Self, Error> {
        let graph = match terms.attention {
            FusedAttention::Off => lower::without(&graph, ATTENTION).map_err(|e| of_plan(&e))?,
            FusedAttention::On | FusedAttention::Auto => graph,
        };
        let prepared = planner.map(|planner| planner.prepare(&graph, &terms.hints));
        Ok(Self {
            graph,
            terms,
            prepared: prepared.transpose().map_err(|e| of_plan(&e))?,
        })
    }

    /// The graph, of which something may have been taken apart; its inputs and outputs are those that came.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// What the plan will take.
    fn memory(&self, device: &dyn Device) -> Result<PlanMemory, DeviceError> {
        let dry = PlanHints {
            allocate: false,
            ..self.terms.hints
        };
        match &self.prepared {
            Some(prepared) => Ok(prepared.memory()),
            None => Ok(device.plan(&self.graph, &dry)?.memory()),
        }
    }

    /// The plan, if it takes no more than `most` bytes. After a lack of memory it can be tried again.
    fn finish(
        &mut self,
        device: &dyn Device,
        allocate: bool,
        most: u64,
    ) -> Result<Box<dyn Plan>, DeviceError> {
        let hints = PlanHints {
            allocate,
            max_bytes: Some(usize::try_from(most).unwrap_or(usize::MAX)),
            ..self.terms.hints
        };
        let Some(prepared) = self.prepared.take() else {
            return device.plan(&self.graph, &hints);
        };
        device
            .finish(prepared, &hints)
            .map_err(|Unfinished { error, prepared }| {
                self.prepared = prepared;
                error
            })
    }
}

/// Whether the device has a kernel for each attention of the graph.
fn is_fused(graph: &Graph, device: &dyn Device) -> Result<(), Error> {
    for node in graph.nodes().iter().filter(|n| n.op.name == ATTENTION) {
        let inputs = graph.input_specs(node).map_err(|e| of_graph(&e))?;
        let call = Call {
            op: node.op,
            inputs: &inputs,
            attributes: &node.attributes,
        };
        if !device.supports(&call) {
            let inputs: Vec<String> = inputs.iter().map(ToString::to_string).collect();
            let what = format!("fused attention of {}", inputs.join(", "));
            return Err(not_fused(device, &what));
        }
    }
    Ok(())
}

fn not_fused(device: &dyn Device, what: &str) -> Error {
    let id = &device.info().id;
    let what = format!(
        "device {id} has no {what}, which the session demands; open it with fused attention auto or off"
    );
    Error::new(Reason::OpUnsupported, what).with("op", ATTENTION)
}

/// Whether a session on the device may demand this of its attention.
///
/// # Errors
/// [`Reason::OpUnsupported`] when it must be fused and the device never does that.
pub fn admits(device: &dyn Device, attention: FusedAttention) -> Result<(), Error> {
    match attention == FusedAttention::On && !device.ops().contains(&ATTENTION) {
        true => Err(not_fused(device, "fused attention")),
        false => Ok(()),
    }
}

/// The numerics class of a session's graphs, of the device's.
pub fn numerics(device: &str, attention: FusedAttention) -> String {
    match attention {
        FusedAttention::Off => format!("{device}/attention:parts"),
        FusedAttention::On | FusedAttention::Auto => device.to_owned(),
    }
}

impl Session {
    /// What its plans are made with. `fuse`: elementwise ops become one kernel where they can.
    pub fn terms(&self, fuse: bool) -> Terms {
        Terms {
            hints: PlanHints {
                threads: Some(self.quotas.threads),
                fuse,
                ..PlanHints::default()
            },
            attention: self.quotas.attention,
        }
    }

    /// Makes a plan of a verified graph; `dry_run`: only says what it would take, with nothing else in the session.
    ///
    /// # Errors
    /// When the device cannot do it, or quotas or memory are short.
    pub fn compile(
        &mut self,
        draft: &mut Draft,
        dry_run: bool,
    ) -> Result<v1::CompileResponse, Error> {
        if !dry_run && self.plans.len() >= self.quotas.plans {
            return Err(quota("plans", self.quotas.plans));
        }
        let device = Rc::clone(self.pool.device());
        if draft.terms.attention == FusedAttention::On {
            is_fused(&draft.graph, device.as_ref())?;
        }
        let outputs = plan::outputs(&draft.graph)?;
        let specs = || outputs.iter().map(encode_tensor_spec);
        let slots = draft.graph.inputs().len() + outputs.len();
        let parts = |steps: usize| (steps + slots).saturating_mul(STEP_BYTES);
        if dry_run {
            let about = draft.memory(device.as_ref()).map_err(|e| of_plan(&e))?;
            let memory = plan::memory(&draft.graph, &outputs, about);
            self.pool.could_hold(&memory, parts(about.steps))?;
            return Ok(v1::CompileResponse {
                plan: None,
                memory: Some(memory),
                outputs: specs().collect(),
                ..v1::CompileResponse::default()
            });
        }
        // How many steps the device makes of the nodes is known only afterwards; then all are charged.
        let least = draft.graph.nodes().len().saturating_mul(STEP_BYTES) as u64;
        let mut make = || {
            let available = self.pool.account().available().saturating_sub(least);
            draft.finish(device.as_ref(), !self.pool.dry_run(), available)
        };
        let mut made = make();
        if let Err(DeviceError::OutOfMemory { .. }) = made {
            self.pool.clear();
            made = make();
        }
        let plan = made.map_err(|error| match &error {
            DeviceError::OutOfMemory { bytes, .. } => {
                let said = of_plan(&error)
                    .with("bytes", *bytes)
                    .with("available", self.pool.account().available());
                match draft.memory(device.as_ref()) {
                    Ok(about) => {
                        plan::with_sizes(said, &plan::memory(&draft.graph, &outputs, about))
                    }
                    Err(_) => said,
                }
            }
            error => of_plan(error),
        })?;
        let about = plan.memory();
        let memory = plan::memory(&draft.graph, &outputs, about);
        let charges = [
            self.pool.charge("the plan", about.arena)?,
            self.pool.charge_held("the plan", parts(about.steps))?,
        ];
        let id = self.fresh(None)?;
        let response = v1::CompileResponse {
            plan: Some(id.handle(self.epoch)),
            memory: Some(memory),
            outputs: specs().collect(),
            ..v1::CompileResponse::default()
        };
        let inputs = draft.graph.inputs().iter().map(|i| i.spec.clone());
        let inputs: Vec<ValueSpec> = inputs.collect();
        let is_cache = |i: &usize| matches!(inputs[*i], ValueSpec::Cache(_));
        let entry = PlanEntry {
            plan: plan.into(),
            caches: (0..inputs.len()).filter(is_cache).collect(),
            inputs,
            outputs,
            max_rows: draft.graph.max_rows(),
            memory,
            executions: 0.into(),
            is_quick: false.into(),
            busy: false.into(),
            charges,
        };
        self.plans.insert(id, Rc::new(entry));
        self.pool.compiled();
        Ok(response)
    }
}
