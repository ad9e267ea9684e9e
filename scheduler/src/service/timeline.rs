//! The scheduler's part of a trace of one worker: which requests were in the scheduler when, on the same clock.

use std::{
    collections::HashMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hotcell_proto::v1::{TracePiece, TraceSpan, TraceSpans, TraceTrack, trace_piece::Kind};

use crate::streams::Streams;

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

    /// What is passed on for a piece of the worker's: before its end, this part of the trace.
    pub(super) fn pass(&mut self, piece: TracePiece) -> Vec<TracePiece> {
        match &piece.kind {
            Some(Kind::Head(head)) => {
                self.begun_ns = Some(head.begun_ns);
                vec![piece]
            }
            Some(Kind::End(_)) => {
                let now = now_ns().saturating_sub(self.begun_ns.unwrap_or_default());
                let rest: Vec<String> = self.inside.keys().cloned().collect();
                for id in rest {
                    self.end(id, now);
                }
                let ours = TraceSpans {
                    spans: std::mem::take(&mut self.over),
                    counts: Vec::new(),
                };
                let ours = TracePiece {
                    kind: Some(Kind::Spans(ours)),
                };
                vec![ours, piece]
            }
            _ => vec![piece],
        }
    }
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::{TraceEnd, TraceHead};

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
}
