//! A trace of one worker on its way to who asked for it. It outlives the process that it began with: what that told is kept,
//! and the next one goes on with it.

use std::{pin::Pin, sync::Arc, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{TracePiece, TraceRequest, trace_piece::Kind},
};
use tokio::{
    sync::{broadcast, mpsc},
    time::{Instant, sleep, sleep_until, timeout},
};
use tonic::{Status, Streaming};

use super::{Shared, debug::STALLED, timeline::Timeline};
use crate::{
    admission::draining,
    fleet::{Fleet, Link, believe_traced},
    streams::Stay,
};

/// Time between two looks for the process after one that is gone. Short: what that does until it is found is not traced.
const NEXT: Duration = Duration::from_millis(2);

/// A process that tells, and what it tells.
type Telling = (Arc<Link>, Box<Streaming<TracePiece>>);

/// Where pieces come from.
enum Source {
    Process(Telling),
    /// The next process, once it is there.
    Next(Pin<Box<dyn Future<Output = Telling> + Send>>),
}

/// What came of it.
enum Came {
    Piece(Result<Option<TracePiece>, Status>),
    Process(Telling),
}

impl Source {
    async fn next(&mut self) -> Came {
        match self {
            Self::Process((_, pieces)) => Came::Piece(pieces.message().await),
            Self::Next(process) => Came::Process(process.await),
        }
    }
}

/// A trace that goes on.
pub(super) struct Traced {
    shared: Shared,
    asked: TraceRequest,
    until: Instant,
    /// The worker's name.
    worker: String,
    source: Source,
    /// The requests that end.
    ends: broadcast::Receiver<Stay>,
    timeline: Timeline,
}

async fn ask(link: &Link, asked: TraceRequest) -> Result<Box<Streaming<TracePiece>>, Error> {
    let mut client = link.debug().await?;
    match client.trace(asked).await {
        Ok(pieces) => Ok(Box::new(pieces.into_inner())),
        Err(status) => Err(link.said(&status).await),
    }
}

/// The process after this one, once it is ready and tells what it does until then.
async fn successor(
    fleet: Arc<Fleet>,
    before: Arc<Link>,
    asked: TraceRequest,
    until: Instant,
) -> Telling {
    loop {
        sleep(NEXT).await;
        let Ok(link) = fleet.for_debug(&before.worker) else {
            continue;
        };
        if link.epoch == before.epoch {
            continue;
        }
        let asked = TraceRequest {
            duration_ms: millis(until.saturating_duration_since(Instant::now())),
            ..asked.clone()
        };
        if let Ok(pieces) = ask(&link, asked).await {
            return (link, pieces);
        }
    }
}

/// At least one, which is not the same as to say nothing.
fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX).max(1)
}

impl Traced {
    /// Has a process tell what it does.
    ///
    /// # Errors
    /// The worker's.
    pub(super) async fn begin(
        shared: Shared,
        link: Arc<Link>,
        asked: TraceRequest,
    ) -> Result<Self, Error> {
        // Before the worker's part, so that none is missed.
        let ends = shared.streams.ends();
        let pieces = ask(&link, asked.clone()).await?;
        let ms = match (asked.duration_ms, asked.steps) {
            (0, 0) => limits::TRACE_MILLIS,
            (0, _) => limits::MAX_TRACE_MILLIS,
            (ms, _) => ms,
        };
        Ok(Self {
            shared,
            asked,
            until: Instant::now() + Duration::from_millis(ms.into()),
            worker: link.worker.clone(),
            source: Source::Process((link, pieces)),
            ends,
            timeline: Timeline::default(),
        })
    }

    /// What follows the end of a process's words. None: nothing does.
    async fn broken(&mut self, status: &Status) -> Option<Error> {
        let Source::Process((link, _)) = &self.source else {
            return None;
        };
        let error = link.said(status).await;
        if error.reason() != Reason::WorkerLost || !self.timeline.has_begun() {
            return Some(error);
        }
        self.go_on();
        None
    }

    /// Goes on with the next process.
    fn go_on(&mut self) {
        let Source::Process((link, _)) = &self.source else {
            return;
        };
        self.timeline.lost(&self.worker);
        let mut asked = self.asked.clone();
        if asked.steps > 0 {
            // With none left it would have ended before.
            asked.steps = asked.steps.saturating_sub(self.timeline.steps()).max(1);
        }
        let (fleet, link) = (Arc::clone(&self.shared.fleet), Arc::clone(link));
        self.source = Source::Next(Box::pin(successor(fleet, link, asked, self.until)));
    }

    /// Those that ended and were not looked at yet, and those that run on.
    fn see_rest(&mut self) {
        loop {
            match self.ends.try_recv() {
                Ok(stay) => self.timeline.stayed(stay),
                Err(broadcast::error::TryRecvError::Lagged(_)) => {}
                Err(_) => break,
            }
        }
        for stay in self.shared.streams.running() {
            self.timeline.stays(stay);
        }
    }

    /// Passes it on until its end, with the scheduler's part before that.
    pub(super) async fn pass(mut self, to: mpsc::Sender<Result<TracePiece, Status>>) {
        let mut events = self.shared.fleet.events.watch();
        loop {
            let is_due = matches!(self.source, Source::Next(_));
            let came = tokio::select! {
                () = self.shared.abort.cancelled() => Came::Piece(Err(draining().into())),
                () = to.closed() => return,
                stay = self.ends.recv() => {
                    // Of what was missed nobody can tell.
                    if let Ok(stay) = stay {
                        self.timeline.stayed(stay);
                    }
                    continue;
                }
                event = events.recv() => {
                    if let Ok(event) = event {
                        self.timeline.happened(&event, &self.worker);
                    }
                    continue;
                }
                () = sleep_until(self.until), if is_due => Came::Piece(Ok(None)),
                came = self.source.next() => came,
            };
            let (passed, is_last) = match came {
                Came::Process(telling) => {
                    self.source = Source::Process(telling);
                    continue;
                }
                Came::Piece(Ok(Some(piece))) => match &self.source {
                    Source::Process((link, _)) => {
                        let piece = believe_traced(piece, link);
                        let is_end = matches!(piece.kind, Some(Kind::End(_)));
                        if is_end {
                            self.see_rest();
                        }
                        (self.timeline.pass(piece), Ok(is_end))
                    }
                    Source::Next(_) => continue,
                },
                // There is no other process, and no time left.
                Came::Piece(Ok(None)) if is_due => {
                    self.see_rest();
                    (self.timeline.finish(), Ok(true))
                }
                // It left in order.
                Came::Piece(Ok(None)) if self.timeline.has_begun() => {
                    self.go_on();
                    continue;
                }
                Came::Piece(Ok(None)) => return,
                Came::Piece(Err(_)) if self.shared.abort.is_cancelled() => {
                    (Vec::new(), Err(draining()))
                }
                Came::Piece(Err(status)) => match self.broken(&status).await {
                    None => continue,
                    Some(error) => (Vec::new(), Err(error)),
                },
            };
            for piece in passed {
                let sent = timeout(STALLED, to.send(Ok(piece))).await;
                if !matches!(sent, Ok(Ok(()))) {
                    return;
                }
            }
            match is_last {
                Ok(false) => {}
                Ok(true) => return,
                Err(error) => {
                    // To one who left this goes nowhere.
                    let _ = timeout(STALLED, to.send(Err(error.into()))).await;
                    return;
                }
            }
        }
    }
}
