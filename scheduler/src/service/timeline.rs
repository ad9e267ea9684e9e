//! The scheduler's part of a trace of one worker: which requests were in the scheduler when, what became of the worker's
//! processes, and which streams went on, all on the first process's clock.

use std::{
    collections::HashMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hotcell_proto::{
    limits,
    v1::{
        Event, EventKind, TraceEnd, TracePiece, TraceSpan, TraceSpans, TraceTrack,
        trace_piece::Kind,
    },
};

use crate::{discover::clip, streams::Streams};

/// Time between two looks at what runs.
pub(super) const LOOK: Duration = Duration::from_millis(20);

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
    /// By id: from when on, since the beginning, and the trace.
    inside: HashMap<String, (u64, String)>,
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
    /// Looks at what runs now. What does not any more did until now.
    pub(super) fn look(&mut self, streams: &Streams) {
        let running = streams.running();
        let running = running
            .into_iter()
            .map(|(id, born, trace)| (id.as_str().to_owned(), born.elapsed(), trace));
        self.see(running.collect(), now_ns());
    }

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

    fn see(&mut self, running: Vec<(String, Duration, String)>, now_ns: u64) {
        let Some(begun) = self.begun_ns else {
            return;
        };
        let now = now_ns.saturating_sub(begun);
        let gone = |id: &&String| !running.iter().any(|(other, ..)| other == *id);
        let over: Vec<String> = self.inside.keys().filter(gone).cloned().collect();
        for id in over {
            self.end(id, now);
        }
        for (id, age, trace) in running {
            if self.inside.len() + self.over.len() < REQUESTS {
                // One that came before the trace is drawn from its beginning on.
                let from = now.saturating_sub(ns(age));
                self.inside.entry(id).or_insert((from, trace));
            }
        }
    }

    fn end(&mut self, id: String, now: u64) {
        if let Some((begin_ns, trace_id)) = self.inside.remove(&id) {
            self.over.push(TraceSpan {
                track: TraceTrack::Scheduler.into(),
                begin_ns,
                duration_ns: now.saturating_sub(begin_ns),
                name: id,
                trace_id,
                ..TraceSpan::default()
            });
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
        let rest: Vec<String> = self.inside.keys().cloned().collect();
        for id in rest {
            self.end(id, now);
        }
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
    use hotcell_proto::v1::TraceHead;

    use super::*;

    #[test]
    fn requests_are_drawn_from_when_they_came_until_they_are_gone() {
        let mut timeline = Timeline::default();
        let ms = Duration::from_millis;
        let one = |age| vec![("r1".to_owned(), ms(age), "4bf9".to_owned())];
        timeline.see(one(1), 5);
        assert!(timeline.inside.is_empty(), "nothing before the trace began");
        let begun_ns = now_ns() - 60_000_000_000;
        let head = Kind::Head(TraceHead {
            begun_ns,
            ..TraceHead::default()
        });
        timeline.pass(TracePiece { kind: Some(head) });
        timeline.see(one(10), begun_ns + 4_000_000);
        timeline.see(
            [one(40), vec![("r2".to_owned(), ms(5), String::new())]].concat(),
            begun_ns + 30_000_000,
        );
        timeline.see(
            vec![("r2".to_owned(), ms(25), String::new())],
            begun_ns + 50_000_000,
        );
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
        let [first, second] = &ours.spans[..] else {
            panic!("{ours:?}");
        };
        assert_eq!(
            (first.name.as_str(), first.begin_ns, first.duration_ns),
            ("r1", 0, 50_000_000)
        );
        assert_eq!(first.trace_id, "4bf9");
        assert_eq!((second.name.as_str(), second.begin_ns), ("r2", 25_000_000));
        assert!(second.duration_ns >= 59_000_000_000);
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
