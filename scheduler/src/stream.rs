//! One stream between the relay that writes it and the client that reads it.
//!
//! The relay writes at the worker's pace, the client reads at its own from wherever it was, and may leave and come
//! back. So a slow client holds up no worker and no other client. What is written and not yet read is bounded: past
//! [`Room`]'s limits the relay reads no further, and the worker pauses that one sequence.

mod again;
mod held;
mod room;

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    v1::{
        Accepted, Candidate, Delta, Finished, GenerateEvent, GenerateRequest, NumericsClass,
        OutputPart, Survived, TokenLogprob, generate_event::Event, output_part::Kind as Part,
    },
};
use prost::Message as _;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep_until},
};
use tokio_stream::StreamExt as _;
use tokio_util::{sync::CancellationToken, task::task_tracker::TaskTrackerToken};
use tonic::Status;

pub use held::Restored;
pub use room::Room;

use crate::{suspicion::Process, traces::Place};

/// What a client's stream carries.
pub type Item = Result<GenerateEvent, Status>;

/// A place between two events: what came before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// Tokens.
    pub tokens: u64,
    /// Bytes of text.
    pub text: u64,
}

impl Mark {
    fn after(self, delta: &Delta) -> Self {
        Self {
            tokens: self.tokens + delta.token_ids.len() as u64,
            text: self.text + delta.text.len() as u64,
        }
    }
}

/// Bytes that a delta takes, with about what the allocator adds.
fn cost(delta: &Delta) -> usize {
    let allocations = 2 * size_of::<usize>();
    let text = |c: &Candidate| size_of::<Candidate>() + allocations + c.text.len();
    let top =
        |l: &TokenLogprob| 2 * allocations + l.text.len() + l.top.iter().map(text).sum::<usize>();
    let logprobs: usize = delta.logprobs.iter().map(top).sum();
    let words = |s: &Survived| s.worker.len() + s.exit_kind.len() + s.continued_on.len();
    let told = |s: &Survived| size_of::<Survived>() + 3 * allocations + words(s);
    let survived: usize = delta.survived.iter().map(told).sum();
    let part = |p: &OutputPart| {
        let strings = match &p.kind {
            Some(Part::Content(text) | Part::Reasoning(text)) => allocations + text.len(),
            Some(Part::ToolCall(c)) => 2 * allocations + c.name.len() + c.arguments.len(),
            None => 0,
        };
        size_of::<OutputPart>() + strings
    };
    let parts: usize = delta.parts.iter().map(part).sum();
    size_of::<Delta>()
        + (allocations + delta.text.len())
        + (allocations + size_of_val(&delta.token_ids[..]))
        + logprobs
        + survived
        + parts
        + size_of_val(&delta.logprobs[..])
}

/// What a stream was asked for, as long as it runs: enough to ask again.
#[derive(Debug)]
struct Request {
    /// Without its prompt once that was accepted.
    message: GenerateRequest,
    deadline: Option<Instant>,
    /// What the spans of a program after this one are children of.
    trace: Place,
    /// Workers that died under it, and the deaths that speak against it.
    deaths: u32,
    blamed: Vec<Process>,
    /// All tokens that were said.
    generated: Vec<u32>,
    /// The class in which it goes on, if that is not the one it began in.
    across: Option<NumericsClass>,
}

#[derive(Debug, Default)]
struct State {
    /// Set while it runs, if somebody told.
    request: Option<Request>,
    /// What it was asked for, once it has ended and is kept.
    asked: Option<Box<GenerateRequest>>,
    accepted: Option<Accepted>,
    deltas: VecDeque<Delta>,
    /// Before the first of `deltas`, and how many came before it.
    first: Mark,
    dropped: u64,
    /// After the last one.
    last: Mark,
    end: Option<Result<Finished, Status>>,
    forgotten: bool,
    /// What `accepted` and `deltas` take, and what of `deltas` the reader has not got.
    bytes: usize,
    unread: usize,
    /// Counts the readers: only the last one reads.
    turn: u64,
    attached: bool,
    greeted: bool,
    /// Number of the delta that it gets next.
    next: u64,
    reader: Option<Waker>,
}

impl State {
    /// Forgets the first delta.
    fn drop_first(&mut self) -> Option<(Delta, usize)> {
        let delta = self.deltas.pop_front()?;
        let bytes = cost(&delta);
        self.first = self.first.after(&delta);
        self.dropped += 1;
        self.bytes -= bytes;
        Some((delta, bytes))
    }
}

/// A stream that a relay writes and one client at a time reads.
#[derive(Debug)]
pub struct Stream {
    room: Arc<Room>,
    /// Whether what was read is kept for a client that comes back.
    keeps: bool,
    begin: Mark,
    /// When it came in here.
    born: Instant,
    state: Mutex<State>,
    /// Told when the reader made room.
    freed: Notify,
    /// Since when nobody reads.
    absent: watch::Sender<Option<Instant>>,
    cancelled: CancellationToken,
}

impl Stream {
    /// A stream that holds nothing and goes on from `begin`. One that `keeps` what was read can be read again.
    pub fn new(room: Arc<Room>, keeps: bool, begin: Mark) -> Arc<Self> {
        let state = State {
            first: begin,
            last: begin,
            ..State::default()
        };
        Arc::new(Self {
            room,
            keeps,
            begin,
            born: Instant::now(),
            state: Mutex::new(state),
            freed: Notify::new(),
            absent: watch::Sender::new(None),
            cancelled: CancellationToken::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When it came in, and the trace that it belongs to (none: empty), while it runs.
    pub fn running(&self) -> Option<(Instant, String)> {
        let state = self.state();
        let request = state.request.as_ref().filter(|_| state.end.is_none())?;
        // version-trace-parent-flags
        let parent = request.trace.parent();
        let trace = parent.split('-').nth(1).unwrap_or_default();
        Some((self.born, trace.to_owned()))
    }

    /// Notes what it was asked for, and in which trace.
    pub fn asked(&self, message: GenerateRequest, deadline: Option<Instant>, trace: Place) {
        self.state().request = Some(Request {
            message,
            deadline,
            trace,
            deaths: 0,
            blamed: Vec::new(),
            generated: Vec::new(),
            across: None,
        });
    }

    /// Notes the workers that died under it.
    pub fn suffered(&self, deaths: u32, blamed: &[Process]) {
        if let Some(request) = &mut self.state().request {
            request.deaths = deaths;
            request.blamed = blamed.to_vec();
        }
    }

    /// Whether what was read is kept for a client that comes back.
    pub fn keeps(&self) -> bool {
        self.keeps
    }

    /// Drops all it holds and lets nobody read it any more, unless somebody does; whether it did so.
    pub fn forget(&self) -> bool {
        let mut state = self.state();
        if state.attached {
            return false;
        }
        state.forgotten = true;
        state.accepted = None;
        state.asked = None;
        state.deltas.clear();
        let bytes = std::mem::take(&mut state.bytes);
        drop(state);
        self.room.give(bytes);
        self.cancel();
        true
    }

    /// Writes what was accepted, or tokens; whether there is room for more. The end has [`Stream::finish`].
    pub fn write(&self, event: GenerateEvent) -> bool {
        let mut state = self.state();
        match event.event {
            Some(Event::Accepted(accepted)) => {
                let bytes = size_of_val(&accepted.prompt_ids[..]);
                if let Some(request) = &mut state.request {
                    request.message.prompt = None;
                }
                state.accepted = Some(accepted);
                state.bytes += bytes;
                self.room.take(bytes);
            }
            Some(Event::Delta(delta)) => {
                let bytes = cost(&delta);
                if let Some(request) = &mut state.request {
                    request.generated.extend_from_slice(&delta.token_ids);
                    if let Some(class) = &delta.numerics {
                        request.across = Some(class.clone());
                    }
                }
                state.last = state.last.after(&delta);
                state.bytes += bytes;
                state.unread += bytes;
                state.deltas.push_back(delta);
                self.room.take(bytes);
            }
            Some(Event::Finished(_)) | None => {}
        }
        self.trim(&mut state);
        let more = self.may_write(&state);
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
        more
    }

    /// Drops what was read, as far as room is wanted. While nobody reads, nobody knows what arrived.
    fn trim(&self, state: &mut State) {
        let wanted = |state: &State| state.bytes >= self.room.each || self.room.is_full();
        while state.attached && state.dropped < state.next && wanted(state) {
            let Some((_, bytes)) = state.drop_first() else {
                return;
            };
            self.room.give(bytes);
        }
    }

    fn may_write(&self, state: &State) -> bool {
        let held = match state.attached {
            true => state.unread,
            false => state.bytes,
        };
        held < self.room.share || (held < self.room.each && !self.room.is_full())
    }

    /// Returns when there is room for another event.
    pub async fn writable(&self) {
        loop {
            let own = self.freed.notified();
            let all = self.room.freed.notified();
            tokio::pin!(own, all);
            own.as_mut().enable();
            all.as_mut().enable();
            if self.may_write(&self.state()) {
                return;
            }
            tokio::select! {
                biased;
                () = own => {}
                () = all => {}
            }
        }
    }

    /// Ends it. What comes after the first end is dropped.
    pub fn finish(&self, end: Result<Finished, Status>) {
        let mut state = self.state();
        state.end.get_or_insert(end);
        let keeps = self.keeps && !state.forgotten;
        if let Some(request) = state.request.take().filter(|_| keeps) {
            // One that was never accepted has nothing to be run again for, unless workers died of its very prompt.
            if state.accepted.is_none() && request.deaths > 0 {
                let bytes = request.message.encoded_len();
                state.bytes += bytes;
                self.room.take(bytes);
            }
            let keeps = state.accepted.is_some() || request.deaths > 0;
            state.asked = keeps.then(|| Box::new(request.message));
        }
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// What it was asked for, if it runs; without its prompt once that was accepted.
    pub fn asked_for(&self) -> Option<GenerateRequest> {
        let state = self.state();
        state.request.as_ref().map(|r| r.message.clone())
    }

    /// Where it began.
    pub fn begin(&self) -> Mark {
        self.begin
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.state().end.is_some()
    }

    /// Whether a client reads it.
    pub fn is_attached(&self) -> bool {
        self.state().attached
    }

    /// Reads from the beginning or, if told how many tokens the client has (and how many bytes of text), from there.
    /// Whoever read it before is told so. `open` goes with the reader.
    ///
    /// # Errors
    /// [`Reason::TokensForgotten`] if what comes next is held no more; [`Reason::InvalidArgument`] if no event ends
    /// there.
    pub fn attach(
        self: &Arc<Self>,
        from: Option<(u64, Option<u64>)>,
        open: TaskTrackerToken,
    ) -> Result<EventStream, Error> {
        let mut state = self.state();
        let (tokens, text) = from.unwrap_or((self.begin.tokens, Some(self.begin.text)));
        let mut at = state.first;
        let fits = |at: Mark| at.tokens == tokens && text.is_none_or(|text| at.text == text);
        let behind =
            state.forgotten || tokens < at.tokens || text.is_some_and(|text| text < at.text);
        let mut deltas = state.deltas.iter();
        let mut next = state.dropped;
        while !fits(at) && !behind {
            let Some(delta) = deltas.next() else { break };
            at = at.after(delta);
            next += 1;
        }
        // A client that counts no text got all that came with its last token.
        for delta in deltas.take_while(|d| text.is_none() && tokens > 0 && d.token_ids.is_empty()) {
            at = at.after(delta);
            next += 1;
        }
        if behind {
            return Err(Error::new(
                Reason::TokensForgotten,
                format!(
                    "what this stream said after {tokens} tokens is held no more, for want of room; send the request again under another id"
                ),
            ));
        }
        if !fits(at) {
            return Err(Error::new(
                Reason::InvalidArgument,
                format!(
                    "no event of this stream ends after {tokens} tokens{}; it has said {} so far",
                    text.map_or_else(String::new, |n| format!(" and {n} bytes of text")),
                    state.last.tokens
                ),
            ));
        }
        let read = usize::try_from(next - state.dropped).unwrap_or(usize::MAX);
        state.unread = state.deltas.iter().skip(read).map(cost).sum();
        state.next = next;
        state.turn += 1;
        state.attached = true;
        state.greeted = false;
        let turn = state.turn;
        let before = state.reader.take();
        self.absent.send_replace(None);
        drop(state);
        self.freed.notify_one();
        if let Some(before) = before {
            before.wake();
        }
        Ok(EventStream {
            stream: Arc::clone(self),
            turn,
            first: None,
            over: false,
            _open: open,
        })
    }

    /// Returns once nobody has read it for `patience` at one stretch.
    pub async fn forsaken(&self, patience: Duration) {
        let mut absent = self.absent.subscribe();
        loop {
            let since = *absent.borrow_and_update();
            let changed = async {
                // Never an error: `self` holds the sender.
                let _ = absent.changed().await;
            };
            match since {
                None => changed.await,
                Some(at) => tokio::select! {
                    biased;
                    () = changed => {}
                    () = sleep_until(at + patience) => return,
                },
            }
        }
    }

    /// Returns once somebody reads it, or nobody has for `patience`.
    pub async fn settled(&self, patience: Duration) {
        let mut absent = self.absent.subscribe();
        loop {
            let Some(since) = *absent.borrow_and_update() else {
                return;
            };
            tokio::select! {
                biased;
                // Never an error: `self` holds the sender.
                _ = absent.changed() => {}
                () = sleep_until(since + patience) => return,
            }
        }
    }

    /// Is cancelled when its client wants no more.
    pub fn cancellation(&self) -> CancellationToken {
        self.cancelled.clone()
    }

    /// Ends it for good: its client wants no more.
    pub fn cancel(&self) {
        self.cancelled.cancel();
    }

    /// Returns once it is [cancelled](Stream::cancel).
    pub async fn cancelled(&self) {
        self.cancelled.cancelled().await;
    }

    fn poll_read(&self, turn: u64, cx: &mut Context<'_>) -> Poll<Item> {
        let event = |event| Ok(GenerateEvent { event: Some(event) });
        let mut state = self.state();
        if state.turn != turn {
            return Poll::Ready(Err(Error::new(
                Reason::TakenOver,
                "another call with the same request id reads this stream now",
            )
            .into()));
        }
        if !state.greeted
            && let Some(accepted) = state.accepted.clone()
        {
            state.greeted = true;
            return Poll::Ready(event(Event::Accepted(accepted)));
        }
        if let Some(delta) = self.read(&mut state) {
            return Poll::Ready(event(Event::Delta(delta)));
        }
        match &state.end {
            Some(Ok(finished)) => Poll::Ready(event(Event::Finished(finished.clone()))),
            Some(Err(status)) => Poll::Ready(Err(status.clone())),
            None => {
                state.reader = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    fn read(&self, state: &mut State) -> Option<Delta> {
        let index = usize::try_from(state.next - state.dropped).ok()?;
        let full = !self.may_write(state);
        let (delta, bytes) = if self.keeps {
            let delta = state.deltas.get(index)?.clone();
            let bytes = cost(&delta);
            (delta, bytes)
        } else {
            // Only what was not read is held.
            let (delta, bytes) = state.drop_first()?;
            self.room.give(bytes);
            (delta, bytes)
        };
        state.unread -= bytes;
        state.next += 1;
        if full {
            self.freed.notify_one();
        }
        Some(delta)
    }

    fn leave(&self, turn: u64) {
        let mut state = self.state();
        if state.turn == turn {
            state.attached = false;
            state.reader = None;
            self.absent.send_replace(Some(Instant::now()));
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let bytes = self.state().bytes;
        self.room.give(bytes);
    }
}

/// A client's end of a stream. Dropping it leaves the stream.
#[derive(Debug)]
pub struct EventStream {
    stream: Arc<Stream>,
    turn: u64,
    /// What came first, once that was waited for.
    first: Option<GenerateEvent>,
    /// Whether Finished or a status has come.
    over: bool,
    /// The drain waits for it: what was written may still wait here for a slow client.
    _open: TaskTrackerToken,
}

impl EventStream {
    /// The same once its first event is there.
    ///
    /// # Errors
    /// The status, if that comes first: whoever passes calls on may send it elsewhere while nothing was answered.
    pub async fn begun(mut self) -> Result<Self, Status> {
        self.first = self.next().await.transpose()?;
        Ok(self)
    }
}

impl tokio_stream::Stream for EventStream {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        if self.over {
            return Poll::Ready(None);
        }
        let item = std::task::ready!(self.stream.poll_read(self.turn, cx));
        self.over = match &item {
            Ok(event) => matches!(event.event, Some(Event::Finished(_))),
            Err(_) => true,
        };
        Poll::Ready(Some(item))
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.stream.leave(self.turn);
    }
}
