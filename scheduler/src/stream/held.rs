//! Streams that go from one program to the one that takes its place.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    receipt::{Hash, Output},
    v1::{self, Accepted, Delta, GenerateRequest, NumericsClass},
};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{Mark, Request, Room, State, Stream, cost};
use crate::{
    journal::{Past, parts_bytes},
    suspicion::Process,
    traces::Place,
};

impl State {
    /// All of it, for another program.
    fn hold(&self, id: &str, fingerprint: Option<Hash>, begin: Mark) -> v1::HeldStream {
        let named = || GenerateRequest {
            request_id: id.to_owned(),
            ..GenerateRequest::default()
        };
        let request = self.request.as_ref();
        let (finished, failed) = match &self.end {
            Some(Ok(finished)) => (Some(finished.clone()), None),
            Some(Err(status)) => {
                let error = Error::from_status(status);
                let metadata = error.metadata();
                let failed = v1::CallError {
                    reason: error.reason().name().to_owned(),
                    message: error.message().to_owned(),
                    metadata: metadata
                        .map(|(k, v)| (k.to_owned(), v.to_owned()))
                        .collect(),
                };
                (None, Some(failed))
            }
            None => (None, None),
        };
        let left = |at: Instant| {
            let left = at.saturating_duration_since(Instant::now());
            u64::try_from(left.as_millis()).unwrap_or(u64::MAX)
        };
        v1::HeldStream {
            request: Some(request.map_or_else(named, |r| r.message.clone())),
            fingerprint: fingerprint.map(Vec::from).unwrap_or_default(),
            accepted: self.accepted.clone(),
            deltas: self.deltas.iter().cloned().collect(),
            begin_tokens: begin.tokens,
            begin_text: begin.text,
            first_tokens: self.first.tokens,
            first_text: self.first.text,
            generated: request.map(|r| r.generated.clone()).unwrap_or_default(),
            across: request.and_then(|r| r.across.clone()),
            finished,
            failed,
            deadline_ms: request.and_then(|r| r.deadline).map(left),
            deaths: request.map_or(0, |r| r.deaths),
            blamed: request.map_or_else(Vec::new, |r| {
                r.blamed.iter().map(v1::HeldProcess::from).collect()
            }),
            ended: 0,
            traceparent: request.map_or_else(String::new, |r| r.trace.parent()),
            tracestate: request.map_or("", |r| r.trace.state.as_str()).to_owned(),
        }
    }
}

/// A stream that cannot go on while this is held.
#[derive(Debug)]
pub struct Frozen<'a> {
    state: MutexGuard<'a, State>,
    begin: Mark,
    wanted: bool,
}

impl Frozen<'_> {
    /// All of it, for another program; nothing of one that was forgotten or that its client cancelled.
    pub fn hold(&self, id: &str, fingerprint: Option<Hash>) -> Option<v1::HeldStream> {
        let wanted = self.wanted && !self.state.forgotten;
        let known = wanted && (self.state.request.is_some() || self.state.end.is_some());
        known.then(|| self.state.hold(id, fingerprint, self.begin))
    }
}

/// A stream of another program.
#[derive(Debug)]
pub struct Restored {
    /// The stream.
    pub stream: Arc<Stream>,
    /// Its request's id.
    pub id: String,
    /// Of the request, if its client chose the id.
    pub fingerprint: Option<Hash>,
    /// What is to go on; none if it has ended.
    pub running: Option<Running>,
}

/// A request whose stream goes on.
#[derive(Debug)]
pub struct Running {
    /// The request.
    pub request: GenerateRequest,
    /// When its client stops waiting.
    pub deadline: Option<Instant>,
    /// What its spans are children of.
    pub trace: Place,
    /// What its stream said; none if it was not accepted yet.
    pub past: Option<Past>,
}

fn doubt(what: &str) -> Error {
    Error::new(
        Reason::ProtocolViolation,
        format!("a stream that was handed over contradicts itself: {what}"),
    )
}

/// The mark after these deltas.
fn after(first: Mark, deltas: &[Delta]) -> Result<Mark, Error> {
    deltas.iter().try_fold(first, |mark, delta| {
        let tokens = mark.tokens.checked_add(delta.token_ids.len() as u64);
        let text = mark.text.checked_add(delta.text.len() as u64);
        match (tokens, text) {
            (Some(tokens), Some(text)) => Ok(Mark { tokens, text }),
            _ => Err(doubt("too many tokens")),
        }
    })
}

fn failure(failed: v1::CallError) -> tonic::Status {
    let reason = Reason::from_name(&failed.reason).unwrap_or(Reason::Internal);
    let error = Error::new(reason, failed.message);
    let metadata = failed.metadata.into_iter();
    metadata
        .fold(error, |error, (key, value)| error.with(key, value))
        .into()
}

impl Stream {
    /// Keeps it from going on.
    pub fn freeze(&self) -> Frozen<'_> {
        Frozen {
            state: self.state(),
            begin: self.begin,
            wanted: !self.cancelled.is_cancelled(),
        }
    }

    /// A stream as another program held it. Nobody reads it yet; it is kept for who comes back.
    ///
    /// # Errors
    /// If it contradicts itself.
    pub fn restore(room: Arc<Room>, held: v1::HeldStream) -> Result<Restored, Error> {
        let message = held.request.ok_or_else(|| doubt("no request"))?;
        let begin = Mark {
            tokens: held.begin_tokens,
            text: held.begin_text,
        };
        let first = Mark {
            tokens: held.first_tokens,
            text: held.first_text,
        };
        let last = after(first, &held.deltas)?;
        let large = |d: &Delta| {
            d.text.len() > limits::MAX_DELTA_BYTES
                || d.token_ids.len() > limits::MAX_DELTA_TOKENS
                || parts_bytes(&d.parts).is_none()
        };
        if held.deltas.iter().any(large) || first.tokens < begin.tokens || first.text < begin.text {
            return Err(doubt("its events"));
        }
        let end = held
            .finished
            .map(Ok)
            .or(held.failed.map(|f| Err(failure(f))));
        let resume = message.resume.clone().unwrap_or_default();
        let spoken = begin.tokens.checked_add(held.generated.len() as u64);
        let resumed = (resume.generated_ids.len() as u64, resume.text_bytes_emitted);
        if end.is_none() && (spoken != Some(last.tokens) || resumed != (begin.tokens, begin.text)) {
            return Err(doubt("the number of its tokens"));
        }
        let blamed: Vec<Process> = held.blamed.into_iter().map(Process::from).collect();
        if blamed.len() > limits::MAX_CONTINUATIONS as usize + 1 {
            return Err(doubt("its deaths"));
        }
        let allowed = held.deadline_ms.map(Duration::from_millis);
        let deadline = allowed.and_then(|left| Instant::now().checked_add(left));
        let trace = Place::parse(&held.traceparent, &held.tracestate);
        let id = message.request_id.clone();
        let running = end.is_none().then(|| Running {
            past: held.accepted.clone().map(|accepted| {
                let whole = (first == begin).then_some(&held.deltas[..]);
                past(
                    accepted,
                    &resume,
                    &held.generated,
                    whole,
                    (last.text, held.across.clone(), held.deaths, blamed.clone()),
                )
            }),
            request: message.clone(),
            deadline,
            trace: trace.clone(),
        });
        let request = end.is_none().then_some(Request {
            message,
            deadline,
            trace,
            deaths: held.deaths,
            blamed,
            generated: held.generated,
            across: held.across,
        });
        let prompt = held.accepted.iter().map(|a| size_of_val(&a.prompt_ids[..]));
        let bytes = prompt.chain(held.deltas.iter().map(cost)).sum();
        room.take(bytes);
        let state = State {
            request,
            accepted: held.accepted,
            unread: held.deltas.iter().map(cost).sum(),
            deltas: VecDeque::from(held.deltas),
            first,
            last,
            end,
            bytes,
            ..State::default()
        };
        let stream = Arc::new(Stream {
            room,
            keeps: true,
            begin,
            // Here.
            born: Instant::now(),
            state: Mutex::new(state),
            freed: Notify::new(),
            absent: watch::Sender::new(Some(Instant::now())),
            cancelled: CancellationToken::new(),
        });
        Ok(Restored {
            stream,
            id,
            fingerprint: Hash::try_from(&held.fingerprint[..]).ok(),
            running,
        })
    }
}

/// What a running stream said. `whole` is all that this side said, if all is held.
fn past(
    accepted: Accepted,
    resume: &v1::Resume,
    generated: &[u32],
    whole: Option<&[Delta]>,
    (text_bytes, across, deaths, blamed): (u64, Option<NumericsClass>, u32, Vec<Process>),
) -> Past {
    let generated = [&resume.generated_ids, generated].concat();
    let output = match whole {
        Some(deltas) => {
            let mut output = Output::new(&resume.generated_ids, resume.text_bytes_emitted);
            for delta in deltas {
                output.push(&delta.token_ids, &delta.text);
            }
            output
        }
        // What the text was is not known any more, only how long.
        None => Output::new(&generated, text_bytes),
    };
    Past {
        accepted,
        generated,
        output,
        text_bytes,
        across,
        deaths,
        blamed,
    }
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::{GenerateEvent, generate_event::Event};
    use tokio_stream::StreamExt;
    use tokio_util::task::TaskTracker;

    use super::*;

    fn event(event: Event) -> GenerateEvent {
        GenerateEvent { event: Some(event) }
    }

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    /// A stream that resumed after a token, and said two more.
    fn spoken() -> Arc<Stream> {
        let begin = Mark { tokens: 1, text: 2 };
        let stream = Stream::new(Arc::new(Room::default()), false, begin);
        let request = GenerateRequest {
            request_id: "r".into(),
            resume: Some(v1::Resume {
                generated_ids: vec![7],
                text_bytes_emitted: 2,
            }),
            ..GenerateRequest::default()
        };
        stream.asked(request, None, Place::parse(PARENT, "a=1"));
        stream.write(event(Event::Accepted(Accepted {
            prompt_ids: vec![1, 2],
            ..Accepted::default()
        })));
        for id in [8, 9] {
            stream.write(event(Event::Delta(Delta {
                text: "x".into(),
                token_ids: vec![id],
                parts: vec![v1::OutputPart {
                    kind: Some(v1::output_part::Kind::Content("x".into())),
                }],
                ..Delta::default()
            })));
        }
        stream
    }

    #[tokio::test]
    async fn it_goes_on_where_it_was_and_is_kept_for_its_client() {
        let held = spoken().freeze().hold("r", Some([3; 32])).unwrap();
        let room = Arc::new(Room::default());
        let restored = Stream::restore(Arc::clone(&room), held).unwrap();
        assert_eq!(
            (&restored.id[..], restored.fingerprint),
            ("r", Some([3; 32]))
        );
        let running = restored.running.unwrap();
        assert_eq!(running.trace, Place::parse(PARENT, "a=1"));
        let past = running.past.unwrap();
        assert_eq!(past.generated, [7, 8, 9]);
        assert_eq!((past.text_bytes, past.deaths), (4, 0));
        assert_eq!(past.accepted.prompt_ids, [1, 2]);
        let stream = restored.stream;
        assert!(stream.keeps() && room.held() > 0);
        // After the token before the last.
        let reader = stream.attach(Some((2, Some(3))), TaskTracker::new().token());
        let mut reader = reader.unwrap();
        let mut next = async || reader.next().await.unwrap().unwrap().event.unwrap();
        assert!(matches!(next().await, Event::Accepted(_)));
        assert!(
            matches!(next().await, Event::Delta(d) if d.token_ids == [9] && d.parts.len() == 1)
        );
        drop(reader);
        drop(stream);
        assert_eq!(room.held(), 0);
    }

    #[tokio::test]
    async fn the_end_goes_over_too_and_what_nobody_wants_does_not() {
        let stream = spoken();
        let error = Error::new(Reason::WorkerLost, "gone").with("worker", "w0");
        stream.finish(Err(error.clone().into()));
        let held = stream.freeze().hold("r", None).unwrap();
        let restored = Stream::restore(Arc::new(Room::default()), held).unwrap();
        assert!(restored.running.is_none());
        let reader = restored.stream.attach(None, TaskTracker::new().token());
        let events: Vec<_> = reader.unwrap().collect().await;
        let last = events.last().unwrap().clone();
        assert_eq!(Error::from_status(&last.unwrap_err()), error);
        let cancelled = spoken();
        cancelled.cancel();
        assert_eq!(cancelled.freeze().hold("r", None), None);
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let held = spoken().freeze().hold("r", None).unwrap();
        for spoil in [
            &(|h: &mut v1::HeldStream| h.request = None) as &dyn Fn(&mut v1::HeldStream),
            &|h| h.first_tokens = u64::MAX,
            &|h| h.begin_tokens = 5,
            &|h| h.generated.truncate(1),
            &|h| h.begin_text = 1,
            &|h| h.blamed = vec![v1::HeldProcess::default(); 100],
            &|h| h.deltas[0].parts = vec![v1::OutputPart::default()],
            &|h| h.deltas[0].text = "x".repeat(limits::MAX_DELTA_BYTES + 1),
        ] {
            let mut held = held.clone();
            spoil(&mut held);
            let room = Arc::new(Room::default());
            let refused = Stream::restore(Arc::clone(&room), held).unwrap_err();
            assert_eq!(refused.reason(), Reason::ProtocolViolation);
            assert_eq!(room.held(), 0);
        }
    }
}
