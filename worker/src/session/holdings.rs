//! What a session holds, as it is told to who looks into this worker.

use std::cmp::Reverse;

use hotcell_graph::op::ValueSpec;
use hotcell_proto::{limits, v1};

use super::{account::Charge, plan::PlanEntry, plane::TensorPlane, state::Session, tensor::Tensor};

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn tensor(tensor: &Tensor) -> v1::HeldHandle {
    let kind = match (&tensor.weight, &tensor.shared, &tensor.spec) {
        (Some(_), ..) => "weight",
        (_, Some(_), _) => "shared",
        (.., ValueSpec::Cache(_)) => "cache",
        _ => "tensor",
    };
    let what = match tensor.weight.as_deref() {
        Some((model, name)) => format!("{model} {name} {}", tensor.spec),
        None => tensor.spec.to_string(),
    };
    v1::HeldHandle {
        kind: kind.to_owned(),
        what,
        bytes: tensor.bytes as u64,
    }
}

fn plan(plan: &PlanEntry) -> v1::HeldHandle {
    let bytes = plan.charges.iter().map(Charge::bytes);
    v1::HeldHandle {
        kind: "plan".to_owned(),
        what: format!("{} steps", plan.memory.steps),
        bytes: bytes.fold(0, u64::saturating_add),
    }
}

impl Session {
    fn told(&self, number_of: u64, handles: usize) -> v1::SessionMemory {
        let usage = self.pool.account().usage();
        let tensors = self.tensors.values().map(tensor);
        let mut all: Vec<_> = tensors
            .chain(self.plans.values().map(|entry| plan(entry)))
            .collect();
        all.sort_by(|a, b| (Reverse(a.bytes), &a.what).cmp(&(Reverse(b.bytes), &b.what)));
        let further = number(all.len().saturating_sub(handles));
        all.truncate(handles);
        v1::SessionMemory {
            number: number_of,
            active_bytes: usage.active,
            kept_bytes: usage.cached,
            peak_bytes: usage.peak,
            most_bytes: usage.limit,
            tensors: number(self.tensors.len()),
            plans: number(self.plans.len()),
            handles: all,
            further_handles: further,
        }
    }
}

impl TensorPlane {
    /// What sessions hold, the one with most first, with the largest of their handles; and how many others there are.
    pub fn holdings(&self, handles: usize) -> (Vec<v1::SessionMemory>, u32) {
        let mut all: Vec<_> = self
            .sessions()
            .map(|(key, session)| session.told(key, handles))
            .collect();
        let held = |one: &v1::SessionMemory| one.active_bytes.saturating_add(one.kept_bytes);
        all.sort_by_key(|one| (Reverse(held(one)), one.number));
        let further = number(all.len().saturating_sub(limits::MAX_TOLD_SESSIONS));
        all.truncate(limits::MAX_TOLD_SESSIONS);
        (all, further)
    }
}
