//! A stream that runs at another Hotcell: what comes from there, and what becomes of it when that ends.
//!
//! It is bounded by what bounds it here: its client's wishes, its model's limits, which its journal knows, and the end of
//! the drain. Whatever else ends it there is a loss, told in one way, and it goes on here.

use std::{
    ops::ControlFlow,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use hotcell_proto::{
    error::{CONTINUES_AT, Error, Reason},
    limits,
    v1::{Finished, GenerateEvent, Survived, generate_event::Event},
};
use tokio::time::timeout;

use super::{AWAY, Away, Next, strange};
use crate::{
    admission::draining,
    discover::clip,
    elsewhere::Elsewhere,
    fleet::{Placed, words},
    journal::Journal,
    onward,
    relay::Relayed,
};

/// Where a stream is, if that is not here: for whoever has to end it here.
#[derive(Debug, Default)]
pub struct Whereabouts(Mutex<Option<Arc<Elsewhere>>>);

impl Whereabouts {
    /// It is there from now on; none: here.
    pub fn set(&self, to: Option<&Arc<Elsewhere>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = to.cloned();
    }

    /// What a client is told whose stream ends because this host does.
    pub fn draining(&self) -> Error {
        let to = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        to.as_ref().map_or_else(draining, |to| goes_on_at(to))
    }
}

/// What its reader, or who comes back to it here, is told of a stream that is left to the other host.
pub(super) fn goes_on_at(to: &Elsewhere) -> Error {
    let what = format!("the scheduler is shutting down; this request goes on at {to}");
    Error::new(Reason::Draining, what).with(CONTINUES_AT, to)
}

/// Whether nothing would be gained by going on here.
fn is_final(error: &Error) -> bool {
    matches!(
        error.reason(),
        Reason::RequestPoisoned | Reason::DeadlineExceeded | Reason::Cancelled | Reason::TakenOver
    )
}

/// The workers that the other host lost under a stream, out of an event that tells of them.
fn survived(event: &mut GenerateEvent) -> Result<Vec<Survived>, Error> {
    let told = match &mut event.event {
        Some(Event::Delta(delta)) => std::mem::take(&mut delta.survived),
        Some(Event::Finished(finished)) => std::mem::take(&mut finished.survived),
        _ => Vec::new(),
    };
    let word = |word: &String| word.len() <= limits::MAX_WORD;
    let sane = |s: &Survived| {
        let words = [&s.worker, &s.exit_kind, &s.continued_on];
        words.into_iter().all(word) && s.pause_ms.is_finite() && s.pause_ms >= 0.0
    };
    match told.len() <= limits::MAX_CONTINUATIONS as usize && told.iter().all(sane) {
        true => Ok(told),
        false => Err(strange("deaths that cannot be")),
    }
}

/// What the other host says next. It may be silent for as long as it answers other calls.
///
/// # Errors
/// Its words, or that it says nothing any more.
async fn next(away: &mut Away, patience: Duration) -> Result<GenerateEvent, Error> {
    loop {
        let said = match timeout(patience, away.events.message()).await {
            Ok(said) => said,
            Err(_) if away.to.answers().await => continue,
            Err(_) => {
                let what = format!("it said nothing for {patience:?}, and does not answer");
                return Err(Error::new(Reason::WorkerLost, what));
            }
        };
        return match said {
            Ok(Some(event)) => Ok(event),
            Ok(None) => Err(strange("it ended the stream early")),
            Err(status) if Error::typed(&status).is_some() => Err(words(&status)),
            Err(status) => {
                let what = format!("its stream broke: {}", clip(status.message()));
                Err(Error::new(Reason::WorkerLost, what))
            }
        };
    }
}

impl Relayed<'_> {
    /// Goes on at the other host to the end, or else has a place here; `alone` as it had before.
    pub(in crate::relay) async fn settle(
        &mut self,
        journal: &mut Journal,
        next: Next,
        alone: bool,
    ) -> Result<ControlFlow<Finished, Placed>, Error> {
        let away = match next {
            Next::Here(placed) => return Ok(ControlFlow::Continue(placed)),
            Next::There(away) => away,
        };
        if let Some(finished) = self.forward(journal, away).await? {
            return Ok(ControlFlow::Break(finished));
        }
        let placed = self.place(journal, onward::wish(journal, ""), alone);
        placed.await.map(ControlFlow::Continue)
    }

    /// Relays what the other host says; none if it cannot go on, and the stream is to go on here.
    async fn forward(
        &mut self,
        journal: &mut Journal,
        mut away: Box<Away>,
    ) -> Result<Option<Finished>, Error> {
        let mut said = false;
        let patience = self.fleet.silence_patience();
        loop {
            let event = tokio::select! {
                biased;
                event = next(&mut away, patience) => event,
                () = self.left() => return Err(away.leave()),
            };
            let event = match event {
                Ok(event) => event,
                Err(error) if is_final(&error) => return Err(error),
                Err(error) => return Ok(self.back(journal, away, &error)),
            };
            let before = journal.generated();
            let (event, survived) = match heard(journal, event) {
                Ok(heard) => heard,
                // What it said before is in doubt as well, and was passed on.
                Err(error) if said => {
                    away.hold.cancel_soon();
                    let what = format!("{} broke the protocol: {error}", away.to);
                    return Err(Error::new(error.reason(), what));
                }
                Err(error) => return Ok(self.back(journal, away, &error)),
            };
            let tokens = journal.generated() - before;
            if tokens > 0 {
                self.times.count(tokens, &self.meter, self.trace);
            }
            let Some(mut event) = event else { continue };
            let mut deaths = self.tell_losses_at(&away.to.to_string());
            deaths.extend(survived);
            match &mut event.event {
                Some(Event::Delta(delta)) => {
                    said = true;
                    delta.survived = deaths;
                }
                Some(Event::Finished(finished)) => {
                    let mut finished = std::mem::take(finished);
                    finished.survived = deaths;
                    self.times.finished(&mut finished, true, &self.meter);
                    // Before the client hears of the end, so that it finds its place free when it comes back.
                    self.permit = None;
                    return Ok(Some(finished));
                }
                _ => {}
            }
            if !self.out.write(event) {
                self.streams.make_room();
                tokio::select! {
                    biased;
                    () = self.out.writable() => {}
                    () = self.left() => return Err(away.leave()),
                }
            }
        }
    }

    /// Returns once nobody reads a stream here that its client may come back to there.
    async fn left(&self) {
        match self.out.keeps() {
            true => self.out.forsaken(AWAY).await,
            false => std::future::pending().await,
        }
    }

    /// The other host could not go on.
    fn back(&mut self, journal: &Journal, mut away: Box<Away>, error: &Error) -> Option<Finished> {
        away.hold.cancel_soon();
        self.leaving.stays(&away.to, journal.request_id(), error);
        None
    }
}

/// Has the journal take an event of the other host's, which tells of its own workers' deaths.
fn heard(
    journal: &mut Journal,
    mut event: GenerateEvent,
) -> Result<(Option<GenerateEvent>, Vec<Survived>), Error> {
    let survived = survived(&mut event)?;
    if let Some(Event::Delta(delta)) = &event.event
        && let Some(class) = &delta.numerics
    {
        let crossed = journal.cross(class);
        crossed.map_err(|violation| strange(violation.to_string()))?;
    }
    for _ in &survived {
        journal.count_death();
    }
    let event = journal.take(event);
    let event = event.map_err(|violation| strange(violation.to_string()))?;
    Ok((event, survived))
}
