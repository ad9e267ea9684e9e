//! What a session holds, as it is told to who looks into this worker.

use std::cmp::Reverse;

use hotcell_graph::op::ValueSpec;
use hotcell_proto::{limits, session::HandleId, v1};

use super::{account::Charge, plan::PlanEntry, plane::TensorPlane, state::Session, tensor::Tensor};

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// What a handle stands for.
enum Held<'a> {
    Tensor(&'a Tensor),
    Plan(&'a PlanEntry),
}

impl Held<'_> {
    fn bytes(&self) -> u64 {
        match self {
            Self::Tensor(tensor) => tensor.bytes as u64,
            Self::Plan(plan) => {
                let bytes = plan.charges.iter().map(Charge::bytes);
                bytes.fold(0, u64::saturating_add)
            }
        }
    }

    fn told(&self) -> v1::HeldHandle {
        let (kind, what) = match self {
            Self::Tensor(one) => tensor(one),
            Self::Plan(plan) => ("plan", format!("{} steps", plan.memory.steps)),
        };
        v1::HeldHandle {
            kind: kind.to_owned(),
            what,
            bytes: self.bytes(),
        }
    }
}

fn tensor(tensor: &Tensor) -> (&'static str, String) {
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
    (kind, what)
}

impl Session {
    fn told(&self, number_of: u64, handles: usize) -> v1::SessionMemory {
        let usage = self.pool.account().usage();
        let tensors = self
            .tensors
            .iter()
            .map(|(id, one)| (*id, Held::Tensor(one)));
        let plans = self.plans.iter().map(|(id, one)| (*id, Held::Plan(one)));
        let mut all: Vec<_> = tensors.chain(plans).collect();
        let further = number(all.len().saturating_sub(handles));
        // There may be tens of thousands, and steps wait meanwhile: only those that are told are put in words and in order.
        let order = |(id, held): &(HandleId, Held<'_>)| (Reverse(held.bytes()), *id);
        if handles < all.len() {
            all.select_nth_unstable_by_key(handles, order);
            all.truncate(handles);
        }
        let mut all: Vec<_> = all.iter().map(|(_, held)| held.told()).collect();
        all.sort_by(|a, b| (Reverse(a.bytes), &a.what).cmp(&(Reverse(b.bytes), &b.what)));
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
