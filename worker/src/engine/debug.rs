//! Asking the engine what it has and does, for those who look into this worker.

use std::{collections::HashMap, sync::Arc, time::Instant};

use hotcell_kernels::backend::Device;
use hotcell_proto::{error::Error, plan_part::PlanPart, v1};
use tokio::sync::oneshot;

use super::{Command, Engine, Loop};
use crate::{debug::observer::Observer, generate::batch::Batch, session::plane::TensorPlane};

/// Something that is done between two steps.
pub(super) type DebugWork = Box<dyn FnOnce(&mut Inside<'_>) + Send>;

/// What of the engine may be looked into.
pub struct Inside<'a> {
    /// The models, by name.
    pub models: &'a mut HashMap<String, Batch>,
    /// Sessions of tensors.
    pub tensors: &'a TensorPlane,
    /// The device.
    pub device: &'a dyn Device,
}

/// What the engine has.
#[derive(Clone, Debug, Default)]
pub struct Look {
    /// Caches of its models, without their requests.
    pub caches: Vec<v1::CacheStatus>,
    /// Requests, those that wait included.
    pub requests: Vec<v1::WatchedRequest>,
    /// What its models and sessions hold.
    pub memory: Vec<v1::MemoryUse>,
    /// Sessions, tensors and plans.
    pub tensors: v1::TensorCensus,
    /// What the places are called that were asked for, as [`Inside::name`] has it.
    pub names: Vec<String>,
}

/// Where a plan was found: which one, if that is known, the step in it, and its op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Which of its model's plans, if that is known.
    pub part: Option<PlanPart>,
    /// The step.
    pub step: u32,
    /// The op that it said.
    pub op: &'static str,
}

impl Inside<'_> {
    /// What the node at a place that was seen since then is called, as in a capture. Empty where the device does not tell,
    /// where several models have different ones there, or where the plan may be another one by now.
    pub fn name(&self, place: &Place, since: Instant) -> String {
        let at = usize::try_from(place.step).unwrap_or(usize::MAX);
        let named = self.models.values().filter_map(|batch| {
            let step = batch.plan_steps_since(place.part?, since).get(at)?;
            // One that was said just before another plan began is of that one.
            (step.op == place.op && !step.name.is_empty()).then_some(&step.name)
        });
        let mut names: Vec<&String> = named.collect();
        names.dedup();
        match names.as_slice() {
            [name] => (*name).clone(),
            _ => String::new(),
        }
    }
}

impl Engine {
    /// Where it notes its steps.
    pub fn observer(&self) -> &Arc<Observer> {
        &self.observer
    }

    /// Commands that wait.
    pub fn queued(&self) -> usize {
        self.queued.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Does something with what it has, between two steps.
    ///
    /// # Errors
    /// When the engine has ended or its queue is full.
    pub async fn inside<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Inside<'_>) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Debug(Box::new(move |inside| {
            // Who left meanwhile misses it.
            if !reply.is_closed() {
                let _ = reply.send(work(inside));
            }
        })))?;
        answer.await.map_err(Self::gone)
    }

    /// Forgets those who looked into its models and left.
    pub async fn leave_alone(&self) {
        let forget = |inside: &mut Inside<'_>| {
            inside.models.values_mut().for_each(Batch::leave_alone);
        };
        // An engine that has ended has forgotten them.
        let _ = self.inside(forget).await;
    }

    /// What it has now, and how the nodes are called at these places.
    ///
    /// # Errors
    /// As [`Engine::inside`].
    pub async fn look(&self, places: Vec<Place>, since: Instant) -> Result<Look, Error> {
        self.inside(move |inside| {
            let now = Instant::now();
            let mut look = Look {
                tensors: inside.tensors.census(),
                names: places
                    .iter()
                    .map(|place| inside.name(place, since))
                    .collect(),
                ..Look::default()
            };
            let mut names: Vec<&String> = inside.models.keys().collect();
            names.sort_unstable();
            for name in names {
                let Some(batch) = inside.models.get(name) else {
                    continue;
                };
                let mut cache = batch.status(name);
                cache.requests.clear();
                look.caches.push(cache);
                look.requests.extend(batch.requests(name, now));
                look.memory.extend(batch.memory(name));
            }
            look.memory.extend(inside.tensors.memory());
            look
        })
        .await
    }
}

impl Loop {
    pub(super) fn look_inside(&mut self, work: DebugWork) {
        work(&mut Inside {
            models: &mut self.models,
            tensors: &self.tensors,
            device: self.device.as_ref(),
        });
    }
}
