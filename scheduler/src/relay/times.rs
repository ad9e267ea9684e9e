//! When what happened to one request, by the scheduler's clock.

use std::time::Duration;

use hotcell_proto::v1::{Finished, Timings};
use tokio::time::Instant;

use crate::{
    meters::Meter,
    traces::{FIRST_TOKEN, Span},
};

/// One request's times.
#[derive(Debug)]
pub(super) struct Times {
    arrived: Instant,
    /// When its prompt was read.
    began: Instant,
    /// How long it waited for a worker then.
    waited: Duration,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Times {
    /// Of one that comes now.
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            arrived: now,
            began: now,
            waited: Duration::ZERO,
            first_token: None,
            last_token: None,
        }
    }

    /// Its prompt was read: it waits for its first worker from now on.
    pub(super) fn begin(&mut self) {
        self.began = Instant::now();
    }

    /// It has a worker.
    pub(super) fn placed(&mut self) {
        self.waited = self.began.elapsed();
    }

    /// Tokens came.
    pub(super) fn count(&mut self, tokens: usize, meter: &Meter, trace: &mut Span) {
        let now = Instant::now();
        if self.first_token.is_none() {
            self.first_token = Some(now);
            trace.event(&FIRST_TOKEN, []);
            meter.first_token.observe(now - self.arrived, 1);
        }
        let after = self.last_token.replace(now).map(|last| now - last);
        meter.generated(tokens, after);
    }

    /// It ended well, as its last worker says; of `several`, each knows its own part only.
    pub(super) fn finished(&self, finished: &mut Finished, several: bool, meter: &Meter) {
        let last = finished.timings.unwrap_or_default();
        // A stranger's number: what is no time is none.
        let there = Duration::try_from_secs_f64(last.queue_ms / 1e3).unwrap_or_default();
        meter.queue.observe(self.waited.saturating_add(there), 1);
        let tokens = finished.usage.unwrap_or_default().generated_tokens;
        if let (Some(first), Some(end), Some(more)) = (
            self.first_token,
            self.last_token,
            tokens.checked_sub(1).filter(|more| *more > 0),
        ) {
            meter.each_token.observe((end - first) / more, 1);
        }
        if several {
            finished.timings = Some(self.over_all(last));
        }
    }

    /// Times of a stream that several workers had.
    fn over_all(&self, last: Timings) -> Timings {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let first = self.first_token.unwrap_or_else(Instant::now);
        Timings {
            queue_ms: last.queue_ms,
            prefill_ms: ms(first - self.began),
            decode_ms: ms(first.elapsed()),
        }
    }
}
