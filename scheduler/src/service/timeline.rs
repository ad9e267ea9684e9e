//! The scheduler's part of a trace of one worker: which requests were in the scheduler when, what became of the worker's
//! processes, and which streams went on, all on the first process's clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hotcell_proto::{
    limits,
    v1::{
        Event, EventKind, TraceEnd, TracePiece, TraceSpan, TraceSpans, TraceTrack,
        trace_piece::Kind,
    },
};

use crate::{discover::clip, streams::Stay};

/// Requests of one trace, at most.
const REQUESTS: usize = 4096;

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, ns)
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// What was seen so far.
#[derive(Default)]
pub(super) struct Timeline {
    /// When the worker's part began, nanoseconds since 1970.
    begun_ns: Option<u64>,
    /// The requests, those that ended.
    over: Vec<TraceSpan>,
    /// What happened, in its order.
    events: Vec<TraceSpan>,
    /// Since when no process tells, and what that is called.
    without: Option<(u64, String)>,
    /// What is to be added to times of the process that is traced now.
    shift_ns: u64,
    /// Steps that were passed on.
    steps: u32,
    /// What processes that are gone, and the one that is traced, left out.
    end: TraceEnd,
}

fn spans(spans: Vec<TraceSpan>) -> TracePiece {
    TracePiece {
        kind: Some(Kind::Spans(TraceSpans {
            spans,
            counts: Vec::new(),
        })),
    }
}

impl Timeline {
    fn now(&self) -> Option<u64> {
        Some(now_ns().saturating_sub(self.begun_ns?))
    }

    fn event(&mut self, begin_ns: u64, duration_ns: u64, name: &str) {
        if self.events.len() < limits::MAX_TRACED_EVENTS {
            self.events.push(TraceSpan {
                track: TraceTrack::Events.into(),
                begin_ns,
                duration_ns,
                name: clip(name),
                ..TraceSpan::default()
            });
        }
    }

    /// Marks what the traced worker, or a stream, has come to.
    pub(super) fn happened(&mut self, event: &Event, worker: &str) {
        let Some(now) = self.now() else {
            return;
        };
        let who = format!("{} (epoch {})", event.worker, event.epoch);
        let is_its = event.worker == worker;
        let name = match event.kind() {
            EventKind::WorkerDied => format!("{who} died: {}", event.message),
            EventKind::StreamContinued => event.message.clone(),
            EventKind::WorkerStarted if is_its => format!("{who} started"),
            EventKind::WorkerReady if is_its => format!("{who} is ready"),
            EventKind::WorkerQuarantined if is_its => format!("{who} is quarantined"),
            _ => return,
        };
        self.event(now, 0, &name);
    }

    /// The traced process is no more.
    pub(super) fn lost(&mut self, worker: &str) {
        self.end.deaths = self.end.deaths.saturating_add(1);
        // After one that was gone before it told anything, the time without goes on.
        if self.without.is_none() {
            self.without = (self.now()).map(|now| (now, format!("{worker} is not traced")));
        }
    }

    /// Until so long after the beginning no process told anything.
    fn found(&mut self, until: u64) {
        if let Some((from, name)) = self.without.take() {
            self.event(from, until.saturating_sub(from), &name);
        }
    }

    /// Whether there is something to go on with.
    pub(super) fn has_begun(&self) -> bool {
        self.begun_ns.is_some()
    }

    /// Steps that were told.
    pub(super) fn steps(&self) -> u32 {
        self.steps
    }

    /// A request that ends now. One that came before the trace is drawn from its beginning on.
    pub(super) fn stayed(&mut self, stay: Stay) {
        let Some(now) = self.now() else {
            return;
        };
        if self.over.len() >= REQUESTS {
            return;
        }
        let begin_ns = now.saturating_sub(ns(stay.born.elapsed()));
        self.over.push(TraceSpan {
            track: TraceTrack::Scheduler.into(),
            begin_ns,
            duration_ns: now.saturating_sub(begin_ns),
            name: stay.id.as_str().to_owned(),
            trace_id: stay.trace,
            ..TraceSpan::default()
        });
    }

    /// A request that outlives the trace. Its end may have been told already, if that is just now.
    pub(super) fn stays(&mut self, stay: Stay) {
        let begin_ns = (self.now()).map(|now| now.saturating_sub(ns(stay.born.elapsed())));
        // Two of one id are never there at once.
        let is_it = |span: &TraceSpan| {
            let end = span.begin_ns.saturating_add(span.duration_ns);
            span.name == stay.id.as_str() && begin_ns.is_some_and(|begin| begin < end)
        };
        if !self.over.iter().any(is_it) {
            self.stayed(stay);
        }
    }

    /// What is passed on for a piece of the worker's: before its end, this part of the trace. Of a process after the first
    /// one there is no head, and its times are those of the first one's clock.
    pub(super) fn pass(&mut self, mut piece: TracePiece) -> Vec<TracePiece> {
        match (&mut piece.kind, self.begun_ns) {
            (Some(Kind::Head(head)), None) => {
                self.begun_ns = Some(head.begun_ns);
                vec![piece]
            }
            (Some(Kind::Head(head)), Some(begun_ns)) => {
                // By its own word, and not from when it was heard: it may have done a step until then.
                self.shift_ns = head.begun_ns.saturating_sub(begun_ns);
                self.found(self.shift_ns);
                Vec::new()
            }
            (Some(Kind::Spans(some)), _) => {
                for span in &mut some.spans {
                    span.begin_ns = span.begin_ns.saturating_add(self.shift_ns);
                    let is_step = span.track() == TraceTrack::Steps;
                    self.steps = self.steps.saturating_add(u32::from(is_step));
                }
                for count in &mut some.counts {
                    count.at_ns = count.at_ns.saturating_add(self.shift_ns);
                }
                vec![piece]
            }
            (Some(Kind::End(end)), _) => {
                self.end.missed_steps = self.end.missed_steps.saturating_add(end.missed_steps);
                self.end.missed_nodes = self.end.missed_nodes.saturating_add(end.missed_nodes);
                self.finish()
            }
            (None, _) => vec![piece],
        }
    }

    /// This part of the trace, and its end.
    pub(super) fn finish(&mut self) -> Vec<TracePiece> {
        let now = self.now().unwrap_or_default();
        self.found(now);
        let mut ours = std::mem::take(&mut self.over);
        ours.append(&mut self.events);
        let end = TracePiece {
            kind: Some(Kind::End(self.end)),
        };
        vec![spans(ours), end]
    }
}

#[cfg(test)]
mod tests {
    use hotcell_proto::{ids::RequestId, v1::TraceHead};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn requests_are_drawn_from_when_they_came_until_they_are_gone() {
        let mut timeline = Timeline::default();
        let ms = Duration::from_millis;
        tokio::time::advance(ms(90_000)).await;
        let stay = |id: &str, age: u64, trace: &str| Stay {
            id: RequestId::new(id).unwrap(),
            born: tokio::time::Instant::now() - ms(age),
            trace: trace.to_owned(),
        };
        timeline.stayed(stay("r0", 1, ""));
        assert!(timeline.over.is_empty(), "nothing before the trace began");
        let head = Kind::Head(TraceHead {
            begun_ns: now_ns() - 60_000_000_000,
            ..TraceHead::default()
        });
        timeline.pass(TracePiece { kind: Some(head) });
        // Before the trace; shorter than anybody looks; as long as can be.
        timeline.stayed(stay("r1", 70_000, "4bf9"));
        timeline.stayed(stay("r2", 0, ""));
        timeline.stayed(stay("r3", 25_000, ""));
        // One that has just been told of, and one that goes on.
        timeline.stays(stay("r3", 25_000, ""));
        timeline.stays(stay("r4", 5_000, ""));
        let end = TracePiece {
            kind: Some(Kind::End(TraceEnd::default())),
        };
        let told = timeline.pass(end);
        let [
            TracePiece {
                kind: Some(Kind::Spans(ours)),
            },
            TracePiece {
                kind: Some(Kind::End(_)),
            },
        ] = &told[..]
        else {
            panic!("{told:?}");
        };
        let [first, second, third, fourth] = &ours.spans[..] else {
            panic!("{ours:?}");
        };
        assert_eq!((first.name.as_str(), first.begin_ns), ("r1", 0));
        assert!(first.duration_ns >= 60_000_000_000);
        assert_eq!(first.trace_id, "4bf9");
        assert_eq!((second.name.as_str(), second.duration_ns), ("r2", 0));
        assert_eq!(third.duration_ns, 25_000_000_000);
        assert!(third.begin_ns >= 35_000_000_000);
        let (name, lasted) = (fourth.name.as_str(), fourth.duration_ns);
        assert_eq!((name, lasted), ("r4", 5_000_000_000));
    }

    #[test]
    fn a_process_after_the_first_is_told_on_the_firsts_clock() {
        let begun_ns = now_ns() - 1_000_000_000;
        let mut timeline = Timeline::default();
        let head = |begun_ns| TracePiece {
            kind: Some(Kind::Head(TraceHead {
                begun_ns,
                ..TraceHead::default()
            })),
        };
        let step = || {
            spans(vec![TraceSpan {
                track: TraceTrack::Steps.into(),
                begin_ns: 7,
                ..TraceSpan::default()
            }])
        };
        let event = |kind: EventKind, worker: &str, message: &str| Event {
            kind: kind.into(),
            worker: worker.into(),
            epoch: 1,
            message: message.into(),
            ..Event::default()
        };
        timeline.happened(&event(EventKind::WorkerDied, "w0", "before"), "w0");
        assert_eq!(timeline.pass(head(begun_ns)).len(), 1);
        timeline.pass(step());
        timeline.lost("w0");
        timeline.happened(&event(EventKind::WorkerDied, "w0", "killed"), "w0");
        timeline.happened(&event(EventKind::WorkerReady, "w1", ""), "w0");
        timeline.happened(&event(EventKind::StreamContinued, "w1", "r goes on"), "w0");
        let next = 2_000_000_000;
        assert!(timeline.pass(head(begun_ns + next)).is_empty());
        let told = timeline.pass(step());
        let Some(Kind::Spans(told)) = &told[0].kind else {
            panic!("{told:?}");
        };
        assert_eq!((told.spans[0].begin_ns, timeline.steps()), (next + 7, 2));
        let one = TraceEnd {
            missed_steps: 3,
            ..TraceEnd::default()
        };
        let told = timeline.pass(TracePiece {
            kind: Some(Kind::End(one)),
        });
        let (Some(Kind::Spans(ours)), Some(Kind::End(end))) = (&told[0].kind, &told[1].kind) else {
            panic!("{told:?}");
        };
        assert_eq!((end.deaths, end.missed_steps), (1, 3));
        let names: Vec<&str> = ours.spans.iter().map(|span| span.name.as_str()).collect();
        let expected = ["w0 (epoch 1) died: killed", "r goes on", "w0 is not traced"];
        assert_eq!(names, expected);
        let gone = &ours.spans[2];
        assert_eq!(gone.begin_ns + gone.duration_ns, next);
    }
}
