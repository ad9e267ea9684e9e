//! Streams: from a worker through the journal to where the client reads, and on with another worker when one dies.
//!
//! A client never learns from a broken stream that a worker died. A worker's stream is read at the worker's pace,
//! whether or not the client reads: what is in the journal is what the client gets, sooner or later.

mod away;
mod loss;
mod times;

use std::{ops::ControlFlow, pin::pin, sync::Arc, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    ids::{ModelName, RequestId},
    v1::{AffectedRequest, Finished, GenerateRequest, generate_event::Event, prompt::Kind},
};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use away::{Away, Leaving, Next, Whereabouts};
use loss::Loss;
use times::Times;

use crate::{
    admission::Permit,
    fleet::{Fleet, Link, Placed, Using},
    journal::{Bounds, Journal, Past},
    meters::Meter,
    onward,
    placement::Wish,
    rarely::{Patience, Rarely},
    stream::Stream,
    streams::Streams,
    suspicion::Record,
    text,
    traces::{self, PLACEMENT, Span, TOKENIZE, TOKENS, Value},
    verdict::{bounded, condemn, verdict, violated},
};

/// One request on its way.
#[derive(Debug)]
pub struct Call {
    /// As the client sent it, with id, model's name and seed filled in.
    pub request: GenerateRequest,
    /// Its id.
    pub id: RequestId,
    /// Its model.
    pub model: ModelName,
    /// When the client stops waiting.
    pub deadline: Option<Instant>,
    /// Its place inside.
    pub permit: Permit,
    /// What its stream said in the program before this one.
    pub past: Option<Past>,
    /// Keeps its model where it is.
    pub using: Using,
    /// Its span.
    pub trace: Span,
}

/// How one worker's part of a stream ended.
enum Part {
    Finished(Box<Finished>),
    /// The worker was lost.
    Lost,
    /// The worker had no place for it, in its words.
    Full(Error),
    /// It goes on at another host.
    There(Box<Away>),
}

/// Pauses between two tries to get into workers that say they are full, each twice the one before.
const FULL_PAUSE: Duration = Duration::from_millis(10);
const FULL_PAUSE_MAX: Duration = Duration::from_millis(320);

/// Tokens between two times that a stream testifies that its device serves.
const TESTIFY_EVERY: usize = 32;

/// Ends a stream whose relay is gone without a word; it must not look as if more came.
struct Writer(Arc<Stream>);

impl Drop for Writer {
    fn drop(&mut self) {
        let error = Error::new(Reason::Internal, "the relay of this stream failed");
        self.0.finish(Err(error.into()));
    }
}

/// Serves a request to its end, by Finished or a status, and keeps its stream for as long as its client may want it.
pub async fn run(
    fleet: Arc<Fleet>,
    mut call: Box<Call>,
    stream: Arc<Stream>,
    streams: Streams,
    abort: CancellationToken,
) {
    let id = call.id.clone();
    let model = call.model.clone();
    let writer = Writer(stream);
    let (meter, arrived) = (fleet.meters.of(&model), Instant::now());
    let mut trace = std::mem::take(&mut call.trace);
    let end = serve(&fleet, (call, &mut trace), &writer.0, &streams, abort).await;
    match &end {
        Ok(finished) => {
            meter.finished(finished, arrived.elapsed());
            traces::finished(&mut trace, finished);
        }
        Err(error) => {
            meter.failed(error.reason().name());
            trace.fail(error.reason().name());
        }
    }
    drop(trace);
    match &end {
        Ok(_) => {}
        Err(error) if error.reason() == Reason::Cancelled => {
            tracing::debug!(request = %id, %model, %error, "request ended");
        }
        Err(error) => {
            let reason = error.reason().name();
            tracing::info!(request = %id, %model, reason, %error, "request failed");
        }
    }
    let end = end.map_err(|error| error.with("request_id", &id).into());
    streams.finish(&id, &writer.0, end);
    streams.keep(&id, &writer.0).await;
}

async fn serve(
    fleet: &Arc<Fleet>,
    (call, trace): (Box<Call>, &mut Span),
    stream: &Stream,
    streams: &Streams,
    abort: CancellationToken,
) -> Result<Finished, Error> {
    let deadline = call.deadline;
    let deadline_passed = async {
        match deadline {
            Some(at) => sleep_until(at).await,
            None => std::future::pending().await,
        }
    };
    let there = Whereabouts::default();
    let given_up = async {
        tokio::select! {
            biased;
            why = streams.unwanted(stream) => Error::new(Reason::Cancelled, why),
            () = deadline_passed => Error::new(
                Reason::DeadlineExceeded,
                "the deadline passed before the stream was complete; allow more time or ask for fewer tokens",
            ),
            () = abort.cancelled() => there.draining(),
        }
    };
    let given_up = pin!(given_up);
    let given_up = Rarely::new(given_up);
    // Whatever ends this drops the road, and with it the worker's stream: the worker stops at its next step.
    tokio::select! {
        biased;
        error = given_up => Err(error),
        end = road(fleet, (call, trace), (stream, streams), &there) => end,
    }
}

async fn road(
    fleet: &Arc<Fleet>,
    (call, trace): (Box<Call>, &mut Span),
    (out, streams): (&Stream, &Streams),
    there: &Whereabouts,
) -> Result<Finished, Error> {
    let tenant = call.request.tenant.clone();
    let mut stream = Relayed {
        fleet,
        model: &call.model,
        tenant: &tenant,
        deadline: call.deadline,
        leaving: Leaving::new(
            (fleet, &call.model),
            (out, streams),
            (call.deadline, trace.place()),
            there,
        ),
        out,
        streams,
        meter: fleet.meters.of(&call.model),
        times: Times::new(),
        permit: Some(call.permit),
        record: Record::default(),
        losses: Vec::new(),
        trace,
        crowded: false,
    };
    let (mut journal, mut placed) = match call.past {
        None => {
            let (mut journal, next) = Box::pin(stream.begin_somewhere(call.request)).await?;
            match Box::pin(stream.settle(&mut journal, next, false)).await? {
                ControlFlow::Continue(placed) => (journal, placed),
                ControlFlow::Break(finished) => return Ok(finished),
            }
        }
        Some(past) => Box::pin(stream.go_on(call.request, past)).await?,
    };
    let mut full: Option<(Instant, Duration)> = None;
    // What is rare has memory of its own while it lasts: a task is as large as all that it may ever wait for.
    loop {
        let had = Had {
            link: Arc::clone(&placed.link),
            home: placed.home.clone(),
            alone: placed.is_alone(),
        };
        placed = match stream.relay(&mut journal, placed).await? {
            Part::Finished(finished) => return Ok(*finished),
            Part::There(away) => {
                full = None;
                let next = Next::There(away);
                match Box::pin(stream.settle(&mut journal, next, had.alone)).await? {
                    ControlFlow::Continue(placed) => placed,
                    ControlFlow::Break(finished) => return Ok(finished),
                }
            }
            Part::Lost => {
                full = None;
                stream.losses.push(Loss {
                    link: Arc::clone(&had.link),
                    at: Instant::now(),
                    generated: journal.generated() as u64,
                });
                stream.affected(&journal, &had, String::new());
                let next = Box::pin(stream.next_somewhere(&mut journal, &had)).await;
                let outcome = match &next {
                    Ok(Next::Here(on)) => {
                        format!("continued on {} (epoch {})", on.link.worker, on.link.epoch)
                    }
                    Ok(Next::There(away)) => format!("continued at {}", away.to()),
                    Err(error) => format!("ended: {}", error.reason().name()),
                };
                stream.affected(&journal, &had, outcome);
                match Box::pin(stream.settle(&mut journal, next?, false)).await? {
                    ControlFlow::Continue(placed) => placed,
                    ControlFlow::Break(finished) => return Ok(finished),
                }
            }
            Part::Full(error) => {
                // It counts otherwise than we do; no change of ours tells when it has room again.
                let until = || Instant::now() + fleet.queue_patience();
                let (until, pause) = full.unwrap_or_else(|| (until(), FULL_PAUSE));
                if Instant::now() + pause > until {
                    return Err(error);
                }
                sleep(pause).await;
                full = Some((until, (2 * pause).min(FULL_PAUSE_MAX)));
                let wish = onward::wish(&journal, &had.home);
                Box::pin(stream.place(&journal, wish, had.alone)).await?
            }
        };
    }
}

struct Relayed<'a> {
    fleet: &'a Arc<Fleet>,
    model: &'a ModelName,
    tenant: &'a str,
    deadline: Option<Instant>,
    leaving: Leaving<'a>,
    out: &'a Stream,
    streams: &'a Streams,
    meter: Arc<Meter>,
    times: Times,
    permit: Option<Permit>,
    /// The deaths it ran in.
    record: Record,
    /// Those that the client has not been told of.
    losses: Vec<Loss>,
    trace: &'a mut Span,
    /// Whether the last worker had no place for it.
    crowded: bool,
}

/// The place a stream had.
struct Had {
    link: Arc<Link>,
    home: String,
    alone: bool,
}

impl Relayed<'_> {
    fn bounds(&self) -> Result<Bounds, Error> {
        let bounds = self.fleet.bounds(self.model);
        bounds.ok_or_else(|| Error::new(Reason::Internal, "a loaded model has no bounds"))
    }

    /// The journal of a new stream, and a place for it.
    async fn begin(&mut self, mut request: GenerateRequest) -> Result<(Journal, Placed), Error> {
        let (fleet, model) = (self.fleet, self.model);
        let prompt = request.prompt.take();
        let (ids, had) = match prompt.and_then(|p| p.kind) {
            Some(Kind::Ids(ids)) => (ids.ids, None),
            kind => {
                let mut part = self.trace.child(&TOKENIZE);
                let with = (self.deadline, &mut part);
                let tokenized = text::tokenize(fleet, (model, self.tenant), kind, false, with);
                let tokenized = tokenized.await;
                let (tokenized, place) =
                    tokenized.inspect_err(|error| part.fail(error.reason().name()))?;
                (tokenized.ids, place)
            }
        };
        request.max_tokens = fleet.most_tokens(model, ids.len(), request.max_tokens)?;
        self.times.begin();
        // Not before a worker has the model: its bounds come from there.
        let placed = self.first_place(&request, &ids, had).await?;
        self.times.placed();
        let bounds = self.bounds()?;
        let given = request.resume.iter().flat_map(|r| &r.generated_ids);
        if let Some(id) = ids.iter().chain(given).find(|&&id| id >= bounds.vocabulary) {
            return Err(Error::new(
                Reason::InvalidArgument,
                format!(
                    "token {id} is not in the vocabulary of model {model}, which has {} tokens",
                    bounds.vocabulary
                ),
            ));
        }
        Ok((Journal::new(request, ids, bounds), placed))
    }

    /// The journal of a stream that another program began, and a place for the rest.
    async fn go_on(
        &mut self,
        request: GenerateRequest,
        past: Past,
    ) -> Result<(Journal, Placed), Error> {
        if self.fleet.bounds(self.model).is_none() {
            drop(
                self.first_place(&request, &past.accepted.prompt_ids, None)
                    .await?,
            );
        }
        self.record = Record::restore(past.deaths, past.blamed.clone());
        let journal = Journal::restore(request, past, self.bounds()?);
        let last = self.record.blamed().last().map(|p| p.worker.clone());
        let last = last.unwrap_or_default();
        let home = last.split_once('.').map_or(&last[..], |(home, _)| home);
        let alone = self.fleet.suspects(&self.record);
        let placed = self
            .place(&journal, onward::wish(&journal, home), alone)
            .await?;
        Ok((journal, placed))
    }

    /// Has the report of the worker's death tell what becomes of this request.
    fn affected(&self, journal: &Journal, had: &Had, outcome: String) {
        let request = AffectedRequest {
            request_id: journal.request_id().to_owned(),
            model: self.model.as_str().to_owned(),
            generated: journal.generated() as u64,
            outcome,
            trace_id: self.trace.trace_id(),
        };
        let crashes = &self.fleet.crashes;
        crashes.affected(&had.link.worker, had.link.epoch, request);
    }

    /// A place for a stream that begins, after that where its prompt was tokenised.
    async fn first_place(
        &self,
        request: &GenerateRequest,
        prompt: &[u32],
        had: Option<Placed>,
    ) -> Result<Placed, Error> {
        let resumed = request.resume.as_ref().map_or(0, |r| r.generated_ids.len());
        let cost = || {
            let bounds = self.fleet.bounds(self.model);
            let context = bounds.map_or(0, |b| b.context);
            crate::placement::estimate(prompt.len(), resumed, request.max_tokens, context)
        };
        let prints = self.fleet.prints(&request.tenant, self.model, prompt);
        let wish = Wish {
            tenant: Some(self.tenant),
            prints: Some(&prints),
            ..Wish::default()
        };
        let mut waited = self.trace.child(&PLACEMENT);
        let placed = self.fleet.acquire_after(had, self.model, wish, cost).await;
        placed.inspect_err(|error| waited.fail(error.reason().name()))
    }

    /// A place for the rest of a stream: of its class, or of another one if none comes up and the request says so.
    async fn place(&self, journal: &Journal, wish: Wish<'_>, alone: bool) -> Result<Placed, Error> {
        let home = wish.avoid.unwrap_or_default();
        let tenant = Some(self.tenant);
        let wish = Wish { tenant, ..wish };
        let find = async |wish: Wish<'_>| match alone {
            true => {
                let cost = || journal.estimate();
                let (model, record) = (self.model, &self.record);
                self.fleet
                    .acquire_alone(model, wish, home, record, cost)
                    .await
            }
            false => {
                self.fleet
                    .acquire(self.model, wish, || journal.estimate())
                    .await
            }
        };
        let mut waited = self.trace.child(&PLACEMENT);
        if self.crowded {
            // It is asked again and again.
            waited.forget();
        }
        let found = match find(wish).await {
            Err(error) if error.reason() == Reason::NoWorker && journal.may_cross() => {
                find(Wish {
                    class: None,
                    ..wish
                })
                .await
            }
            found => found,
        };
        found.inspect_err(|error| waited.fail(error.reason().name()))
    }

    /// Relays one worker's part, and has it in the trace.
    async fn relay(&mut self, journal: &mut Journal, placed: Placed) -> Result<Part, Error> {
        let link = Arc::clone(&placed.link);
        let mut part = traces::part_of(self.trace, &link);
        let before = journal.generated();
        let end = self.hear(journal, placed, &part).await;
        let crowded = matches!(end, Ok(Part::Full(_)));
        let tokens = journal.generated() - before;
        part.set(&TOKENS, Value::Whole(tokens as u64));
        match &end {
            Ok(Part::Finished(_) | Part::There(_)) => {}
            Ok(Part::Lost) => traces::died(self.trace, part, &link),
            Ok(Part::Full(_)) if self.crowded => part.forget(),
            Ok(Part::Full(error)) | Err(error) => part.fail(error.reason().name()),
        }
        self.crowded = crowded;
        end
    }

    /// Hears one worker out.
    async fn hear(
        &mut self,
        journal: &mut Journal,
        mut placed: Placed,
        part: &Span,
    ) -> Result<Part, Error> {
        let link = Arc::clone(&placed.link);
        journal.begin(&placed.class);
        let request = bounded(journal.request(), self.deadline, part);
        let mut tokens = link.tokens();
        // A connection may lose its thread while both its ends live: then nothing ever comes, nor an end.
        let mut patience = Patience::new(self.fleet.silence_patience());
        let mut asked = Box::pin(tokens.generate(request));
        let mut testify_at = journal.generated();
        let mut said = false;
        let mut events = loop {
            match patience.of(&mut asked).await {
                Ok(Ok(answer)) => break answer.into_inner(),
                Ok(Err(status)) => return self.broken(journal, &placed, &status).await,
                Err(_) if Box::pin(link.is_lost()).await => return Ok(Part::Lost),
                Err(_) => {}
            }
        };
        drop(asked);
        // One that is suspected of killing workers is for this host to find out about.
        let may_go = self.leaving.may_go() && !placed.is_alone();
        let drains = pin!(self.leaving.drains());
        let mut drains = Rarely::new(drains);
        let mut draining = false;
        loop {
            let next = tokio::select! {
                biased;
                () = &mut drains, if may_go && !draining => {
                    draining = true;
                    continue;
                }
                turn = self.leaving.turn(), if draining && self.leaving.may_go() => {
                    match Box::pin(self.leaving.hand_over(journal, turn)).await? {
                        Some(away) => return Ok(Part::There(away)),
                        None => continue,
                    }
                }
                next = patience.of(events.message()) => next,
            };
            let event = match next {
                Ok(next) => next,
                Err(_) if Box::pin(link.is_lost()).await => return Ok(Part::Lost),
                Err(_) => continue,
            };
            let event = match event {
                Ok(Some(event)) => event,
                // Said nothing wrong and did not finish: a process that ends in order does this too.
                Ok(None) => return self.broken(journal, &placed, &Status::ok("")).await,
                Err(status) => return self.broken(journal, &placed, &status).await,
            };
            let before = journal.generated();
            let event = match journal.take(event) {
                Ok(event) => event,
                Err(violation) => {
                    let what = violation.to_string();
                    condemn(&link, &what).await;
                    // What it said before is in doubt as well, and was passed on.
                    return match said {
                        true => Err(violated(&link, &what)),
                        false => Ok(Part::Lost),
                    };
                }
            };
            let tokens = journal.generated() - before;
            if tokens > 0 {
                if journal.generated() > testify_at {
                    self.fleet.served(&placed.home, journal.request_id());
                    testify_at = journal.generated() + TESTIFY_EVERY;
                }
                self.times.count(tokens, &self.meter, self.trace);
                placed.prefilled();
                placed.generated(tokens);
            }
            let Some(mut event) = event else { continue };
            if let Some(Event::Delta(delta)) = &mut event.event {
                said = true;
                delta.survived = self.tell_losses(&link);
            }
            if let Some(Event::Finished(mut finished)) = event.event {
                finished.survived = self.tell_losses(&link);
                if let Some(timings) = &finished.timings {
                    traces::timed(part, timings);
                }
                let several = finished.deaths_survived > 0;
                self.times.finished(&mut finished, several, &self.meter);
                // Before the client hears of the end, so that it finds its place free when it comes back.
                drop(placed);
                self.permit = None;
                return Ok(Part::Finished(Box::new(finished)));
            }
            if !self.out.write(event) {
                self.streams.make_room();
                self.out.writable().await;
            }
        }
    }

    /// Tells the words of a living worker from a death.
    async fn broken(
        &self,
        journal: &Journal,
        placed: &Placed,
        status: &Status,
    ) -> Result<Part, Error> {
        match Box::pin(verdict(placed, status)).await {
            None => Ok(Part::Lost),
            Some(error) if error.reason() == Reason::Overloaded && journal.is_greeting() => {
                Ok(Part::Full(error))
            }
            // It was taken from this device, and is on another one.
            Some(error)
                if error.reason() == Reason::ModelNotFound
                    && self.fleet.has_moved(self.model, &placed.link.worker) =>
            {
                Ok(Part::Full(error))
            }
            Some(error) => Err(error),
        }
    }
}
