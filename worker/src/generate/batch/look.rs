//! What a batch is made of, for those who look into it.

use std::time::Instant;

use hotcell_proto::v1::{self, WatchedState};

use super::Batch;
use crate::generate::{batch::Running, task::Member};

fn told(model: &str, member: &Member, state: WatchedState, now: Instant) -> v1::WatchedRequest {
    let task = &member.task;
    v1::WatchedRequest {
        request_id: task.id().to_owned(),
        model: model.to_owned(),
        state: state.into(),
        tokens: task.tokens().len() as u64,
        computed: 0,
        prompt_tokens: task.prompt_len() as u64,
        age_ms: task.age(now).as_secs_f64() * 1e3,
        preempted: member.preempted,
    }
}

impl Batch {
    /// Requests inside, those that run first.
    pub fn requests(&self, model: &str, now: Instant) -> Vec<v1::WatchedRequest> {
        let running = self.running.iter().map(|running: &Running| {
            let state = match running.pending() {
                0 | 1 => WatchedState::Drawing,
                _ => WatchedState::Reading,
            };
            v1::WatchedRequest {
                computed: running.computed as u64,
                ..told(model, &running.member, state, now)
            }
        });
        let waiting = self.waiting.iter();
        let waiting = waiting.map(|member| told(model, member, WatchedState::Waiting, now));
        running.chain(waiting).collect()
    }

    /// Bytes that the model takes here besides its weights.
    pub fn memory(&self, model: &str) -> [v1::MemoryUse; 2] {
        let part = |kind: &str, bytes: usize| v1::MemoryUse {
            kind: kind.to_owned(),
            model: model.to_owned(),
            bytes: bytes as u64,
        };
        [
            part("cache", self.runner.cache_bytes()),
            part("plans", self.runner.plan_bytes()),
        ]
    }
}
