//! Coming back to a stream whose connection broke.

use std::time::Duration;

use hotcell_proto::{
    error::{Error, Reason},
    v1,
};
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Streaming;

use super::{Event, TraceHeader, traced};
use crate::connect::{Client, is_unknown_call, is_unreachable, read_status};

/// How long a broken connection is tried again, unless told otherwise.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Pauses between two tries, each twice the one before.
const PAUSE: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Hosts to which a stream is followed, one from the other, before it comes back.
const HOPS: u32 = 4;

/// Times in a row that a stream may break again before it brought anything new.
const FRUITLESS: u32 = 5;

/// What it takes to go on with a stream over another connection.
#[derive(Debug)]
pub(super) struct Held {
    client: Client,
    id: String,
    /// What to ask a server that does not know the stream; none if somebody else began it.
    request: Option<v1::GenerateRequest>,
    /// The span that it is made in.
    parent: Option<TraceHeader>,
    accepted: Option<v1::Accepted>,
    /// All tokens that the client has, and their text's bytes; if somebody else began it, those since then.
    generated: Vec<u32>,
    before: u64,
    text_bytes: Option<u64>,
    patience: Duration,
    fruitless: u32,
    /// Whether dropping it tells the server to stop.
    cancels: bool,
}

/// A stream come back to.
#[derive(Debug)]
pub(super) struct Back {
    pub(super) stream: Streaming<v1::GenerateEvent>,
    /// Whether the server did not know it, and was told what it had said.
    pub(super) resumed: bool,
    /// Where it is, if that is another host.
    pub(super) moved: Option<Client>,
}

/// What one attempt takes.
struct Way {
    client: Client,
    attach: v1::AttachRequest,
    again: Option<v1::GenerateRequest>,
    parent: Option<TraceHeader>,
    patience: Duration,
}

impl Held {
    /// Of a request that is about to be sent. With `cancels`, dropping it ends the stream.
    pub(super) fn of_request(
        client: &Client,
        request: &v1::GenerateRequest,
        parent: Option<TraceHeader>,
        patience: Duration,
        cancels: bool,
    ) -> Self {
        let resume = request.resume.clone().unwrap_or_default();
        Self {
            client: client.clone(),
            id: request.request_id.clone(),
            request: Some(request.clone()),
            parent,
            accepted: None,
            generated: resume.generated_ids,
            before: 0,
            text_bytes: Some(resume.text_bytes_emitted),
            patience,
            fruitless: 0,
            cancels,
        }
    }

    /// Of a stream that somebody else began.
    pub(super) fn of_stream(client: &Client, from: &v1::AttachRequest, patience: Duration) -> Self {
        Self {
            client: client.clone(),
            id: from.request_id.clone(),
            request: None,
            parent: None,
            accepted: None,
            generated: Vec::new(),
            before: from.next_token,
            text_bytes: from.text_bytes,
            patience,
            fruitless: 0,
            cancels: false,
        }
    }

    /// Takes note of what came.
    pub(super) fn note(&mut self, event: &Event) {
        self.fruitless = 0;
        match event {
            Event::Accepted(accepted) => {
                self.accepted = Some(accepted.clone());
                if let Some(request) = &mut self.request {
                    // Known by its ids from now on.
                    request.prompt = None;
                }
            }
            Event::Delta(delta) => {
                if delta.numerics.is_some() {
                    // Of more than one class by now: nobody but the scheduler that has it can go on with it.
                    self.request = None;
                }
                self.generated.extend_from_slice(&delta.token_ids);
                if let Some(bytes) = &mut self.text_bytes {
                    *bytes += delta.text.len() as u64;
                }
            }
            Event::Finished(_) => {}
        }
    }

    /// It is at another host from now on.
    pub(super) fn move_to(&mut self, client: Client) {
        self.client = client;
    }

    /// It is over: nothing is left to cancel.
    pub(super) fn release(&mut self) {
        self.cancels = false;
    }

    /// How to come back after `error`, if that is of use.
    pub(super) fn way_back(
        &mut self,
        error: &Error,
    ) -> Option<impl Future<Output = Result<Back, Error>> + Send + 'static> {
        self.fruitless += 1;
        let may = !self.patience.is_zero() && self.fruitless <= FRUITLESS;
        if !may || !(is_unreachable(error) || self.client.leads_to(error).is_some()) {
            return None;
        }
        let way = Way {
            client: self.client.clone(),
            attach: v1::AttachRequest {
                request_id: self.id.clone(),
                next_token: self.before + self.generated.len() as u64,
                text_bytes: self.text_bytes,
            },
            again: self.again(),
            parent: self.parent.clone(),
            patience: self.patience,
        };
        Some(way.take(error.clone()))
    }

    /// What to ask a server that does not know the stream.
    fn again(&self) -> Option<v1::GenerateRequest> {
        let request = self.request.clone()?;
        let Some(accepted) = &self.accepted else {
            return Some(request);
        };
        let ids = accepted.prompt_ids.clone();
        let fresh = self.generated.is_empty();
        Some(v1::GenerateRequest {
            model: accepted.model.clone(),
            prompt: Some(super::Prompt::Ids(ids).into()),
            seed: Some(accepted.seed),
            resume: (!fresh).then(|| v1::Resume {
                generated_ids: self.generated.clone(),
                text_bytes_emitted: self.text_bytes.unwrap_or_default(),
            }),
            ..request
        })
    }

    /// Whether a greeting is that of the stream come back to.
    ///
    /// # Errors
    /// If the rest would not be what it would have been.
    pub(super) fn recognise(&self, said: &v1::Accepted, resumed: bool) -> Result<(), Error> {
        let Some(known) = &self.accepted else {
            return Ok(());
        };
        if said.prompt_ids != known.prompt_ids || said.seed != known.seed {
            return Err(Error::new(
                Reason::ProtocolViolation,
                format!(
                    "{} knows another stream by this request's id; please report it",
                    self.client.peer()
                ),
            ));
        }
        let exact = known.numerics.as_ref().is_some_and(|n| n.reproducible);
        if resumed && !(exact && said.numerics == known.numerics) {
            return Err(Error::new(
                Reason::WorkerLost,
                format!(
                    "the scheduler at {} started anew, and cannot go on with the very tokens that the old one would have \
                     given; ask again",
                    self.client.peer()
                ),
            ));
        }
        Ok(())
    }

    /// Tells the server to end it, in the background.
    pub(super) fn cancel_soon(&mut self) {
        self.cancels = false;
        let cancel = cancel(self.client.clone(), self.id.clone());
        // Without a runtime nobody could tell it anything; it ends for want of a reader.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(cancel);
        }
    }

    /// Tells the server to end it.
    pub(super) async fn cancel(&mut self) {
        self.cancels = false;
        cancel(self.client.clone(), self.id.clone()).await;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.cancels {
            self.cancel_soon();
        }
    }
}

/// One try, and not for long: a stream that nobody reads ends by itself.
async fn cancel(client: Client, request_id: String) {
    let until = Instant::now() + Duration::from_secs(1);
    let request = v1::CancelStreamRequest { request_id };
    let _ = timeout_at(until, client.tokens_client().cancel(request)).await;
}

impl Way {
    async fn take(mut self, cause: Error) -> Result<Back, Error> {
        let until = Instant::now() + self.patience;
        let mut pause = PAUSE;
        let mut last = cause;
        let mut moved = false;
        let mut hops = 0;
        // Where it goes on, as it was told last: nobody else has it, so nobody else is asked until that is reached.
        let mut there = self.client.leads_to(&last).cloned();
        loop {
            if let Some(to) = &there {
                match timeout_at(until, self.client.at(to)).await {
                    Ok(Ok(client)) => {
                        self.client = client;
                        moved = true;
                        hops += 1;
                        there = None;
                    }
                    Ok(Err(error)) if is_unreachable(&error) => last = error,
                    Ok(Err(error)) => return Err(error),
                    Err(_) => return Err(last),
                }
            }
            let step = async {
                match &there {
                    None => Some(self.step(moved).await),
                    Some(_) => None,
                }
            };
            match timeout_at(until, step).await {
                Ok(None) => {}
                Ok(Some(Ok(back))) => {
                    let moved = moved.then(|| self.client.clone());
                    return Ok(Back { moved, ..back });
                }
                // A scheduler that has just started may not serve yet, nor one that forgets a stream have forgotten it.
                Ok(Some(Err(error)))
                    if is_unreachable(&error)
                        || error.reason() == Reason::NoWorker
                        || (moved && error.reason() == Reason::RequestExists)
                        || (hops < HOPS && self.client.leads_to(&error).is_some()) =>
                {
                    if hops < HOPS {
                        there = self.client.leads_to(&error).cloned();
                    }
                    last = error;
                }
                Ok(Some(Err(error))) => return Err(error),
                Err(_) => return Err(last),
            }
            if Instant::now() + pause > until {
                return Err(last);
            }
            sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    async fn step(&self, moved: bool) -> Result<Back, Error> {
        let read = |status: tonic::Status| read_status(self.client.peer(), &status);
        let mut client = self.client.tokens_client();
        let unknown = match client.attach(self.attach.clone()).await.map_err(read) {
            Ok(answer) => {
                return Ok(Back {
                    stream: answer.into_inner(),
                    resumed: false,
                    moved: None,
                });
            }
            Err(error) => error,
        };
        // What was on its way here when the stream moved was never said at the other host.
        let begins_later = moved && unknown.reason() == Reason::TokensForgotten;
        let unknown_here = unknown.reason() == Reason::RequestNotFound || is_unknown_call(&unknown);
        let again = match &self.again {
            Some(again) if unknown_here || begins_later => again.clone(),
            _ => return Err(unknown),
        };
        if begins_later {
            cancel(self.client.clone(), self.attach.request_id.clone()).await;
        }
        let again = traced(again, self.parent.clone());
        let answer = client.generate(again).await.map_err(read)?;
        Ok(Back {
            stream: answer.into_inner(),
            resumed: true,
            moved: None,
        })
    }
}
