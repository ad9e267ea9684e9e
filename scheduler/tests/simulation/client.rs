//! Simulated clients: each knows the only right answer, and what may be told instead.

use std::{sync::Arc, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    v1::{AttachRequest, GenerateRequest, Prompt, TokenIds, generate_event::Event, prompt::Kind},
};
use hotcell_scheduler::{access::Caller, service::Shared, stream::EventStream};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_stream::StreamExt;
use tonic::Status;

use crate::{chance::Chance, worker, world::World};

/// What a client does with its stream at one of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whim {
    /// Leaves for good.
    Leave,
    /// Cancels by id.
    Cancel,
    /// Loses its connection and comes back.
    Return(Duration),
    /// Sends the same request again on another connection, which gets the stream from its beginning.
    Again,
    /// Asks to go on from where nothing is, or from a stream that nobody knows.
    Astray,
    /// Somebody else reads the stream from its beginning; then it takes it back, or leaves it to them.
    Rival(bool),
    /// Reads nothing for so long.
    Pause(Duration),
}

/// One request and what came of it so far.
pub struct Client {
    world: Arc<World>,
    shared: Shared,
    name: String,
    chance: Chance,
    request: GenerateRequest,
    prompt: Vec<u32>,
    seed: u64,
    deadline: Option<Instant>,
    ids: Vec<u32>,
    text: String,
    greeted: bool,
    left: bool,
}

/// How a part of a stream ended.
enum Part {
    Over,
    Whim(Whim),
}

impl Client {
    pub fn new(world: &Arc<World>, shared: &Shared, name: &str, models: &[&str]) -> Self {
        let mut chance = world.chance(name);
        let prompt: Vec<u32> = (0..chance.within(1, 6))
            .map(|_| chance.within(1, 120) as u32)
            .collect();
        let seed = chance.next();
        // Some send text, which a worker has to tokenise first.
        let kind = match chance.percent(20) {
            true => Kind::Text(prompt.iter().map(|&id| id as u8 as char).collect()),
            false => Kind::Ids(TokenIds {
                ids: prompt.clone(),
            }),
        };
        let model = models[chance.below(models.len() as u64) as usize];
        let own = chance.percent(40);
        let request = GenerateRequest {
            model: model.to_owned(),
            prompt: Some(Prompt { kind: Some(kind) }),
            seed: Some(seed),
            max_tokens: chance.within(1, 40) as u32,
            continue_across: chance.percent(30),
            request_id: if own { name.to_owned() } else { String::new() },
            ..GenerateRequest::default()
        };
        let limited = chance.percent(40);
        let time = chance.ms(1, 4_000);
        Self {
            world: Arc::clone(world),
            shared: shared.clone(),
            name: name.to_owned(),
            chance,
            request,
            prompt,
            seed,
            deadline: limited.then(|| Instant::now() + time),
            ids: vec![],
            text: String::new(),
            greeted: false,
            left: false,
        }
    }

    fn note(&self, what: impl AsRef<str>) {
        self.world.note(format!("{} {}", self.name, what.as_ref()));
    }

    fn wrong(&self, what: impl AsRef<str>) {
        self.world.wrong(format!("{} {}", self.name, what.as_ref()));
    }

    fn own_id(&self) -> bool {
        !self.request.request_id.is_empty()
    }

    fn expected(&self, count: usize) -> (Vec<u32>, String) {
        let ids: Vec<_> = (0..count)
            .map(|i| worker::token(&self.prompt, self.seed, i))
            .collect();
        let text = ids.iter().map(|&id| worker::text(id)).collect();
        (ids, text)
    }

    fn whims(&mut self) -> Vec<(Whim, usize)> {
        let own = self.own_id();
        let max = u64::from(self.request.max_tokens);
        let c = &mut self.chance;
        let count = if c.percent(45) { c.within(1, 3) } else { 0 };
        (0..count)
            .map(|_| {
                let whim = match c.below(13) {
                    0 => Whim::Leave,
                    1 if own => Whim::Cancel,
                    2..=5 if own => Whim::Return(c.ms(0, 3_000)),
                    6 if own => Whim::Again,
                    7..=8 if own => Whim::Astray,
                    9..=10 if own => Whim::Rival(c.percent(60)),
                    _ => Whim::Pause(c.ms(1, 3_000)),
                };
                (whim, c.below(max + 1) as usize)
            })
            .collect()
    }

    /// Runs the request to its end, checking everything that comes.
    pub async fn run(mut self) {
        let what = format!(
            "asks {} for {} tokens{}{}",
            self.request.model,
            self.request.max_tokens,
            if self.own_id() { ", by its own id" } else { "" },
            self.deadline.map_or_else(String::new, |at| format!(
                ", within {:?}",
                at.saturating_duration_since(Instant::now())
            )),
        );
        self.note(format!("({}) {what}", self.seed));
        let mut whims = self.whims();
        let mut stream = match self.generate() {
            Ok(stream) => stream,
            Err(error) => return self.ended_badly(&error.into()),
        };
        loop {
            let Part::Whim(whim) = self.read(&mut stream, &mut whims).await else {
                return;
            };
            self.note(format!("{whim:?} after {} tokens", self.ids.len()));
            match whim {
                Whim::Pause(time) => sleep(time).await,
                Whim::Leave => return,
                Whim::Cancel => {
                    self.left = true;
                    let id = hotcell_proto::ids::RequestId::new(self.name.as_str()).unwrap();
                    match self.shared.streams.find(&id, &Caller::own()) {
                        Ok(found) => found.cancel(),
                        Err(error) => self.wrong(format!("cannot cancel: {error}")),
                    }
                }
                // One that was cancelled is not there any more.
                _ if self.left => {}
                Whim::Return(time) => {
                    drop(stream);
                    sleep(time).await;
                    stream = match self.attach(self.ids.len(), self.text.len()) {
                        Ok(stream) => stream,
                        // While nobody read it, others may have needed the room.
                        Err(error) if self.may_be_forgotten(&error) => {
                            return self.note(format!("is forgotten: {}", error.reason().name()));
                        }
                        Err(error) => {
                            return self.wrong(format!("cannot come back: {error}"));
                        }
                    };
                    self.greeted = false;
                }
                Whim::Again => {
                    let again = self.generate();
                    let mut before = match again {
                        Ok(again) => std::mem::replace(&mut stream, again),
                        Err(error) if self.may_be_forgotten(&error) => continue,
                        Err(error) => return self.wrong(format!("cannot ask again: {error}")),
                    };
                    self.taken_over(&mut before).await;
                    self.ids.clear();
                    self.text.clear();
                    self.greeted = false;
                }
                Whim::Astray => self.go_astray(),
                Whim::Rival(back) => self.compete(&mut stream, back).await,
            }
        }
    }

    fn generate(&self) -> Result<EventStream, Error> {
        let request = self.request.clone();
        self.shared.generate(request, self.deadline, &Caller::own())
    }

    fn attach(&self, tokens: usize, text: usize) -> Result<EventStream, Error> {
        let request = AttachRequest {
            request_id: self.request.request_id.clone(),
            next_token: tokens as u64,
            text_bytes: Some(text as u64),
        };
        self.shared.attach(request, &Caller::own())
    }

    /// Whether a stream's beginning, or a finished stream, may be gone: only where there is little room.
    fn may_be_forgotten(&self, error: &Error) -> bool {
        let gone = [Reason::TokensForgotten, Reason::RequestNotFound];
        self.world.is_tight() && gone.contains(&error.reason())
    }

    /// The stream of whoever read it before ends.
    async fn taken_over(&self, before: &mut EventStream) {
        match before.next().await {
            Some(Err(status)) if is(&status, Reason::TakenOver) => {}
            other => self.wrong(format!("both read one stream: {other:?}")),
        }
    }

    /// What is refused disturbs nobody.
    fn go_astray(&self) {
        let (ids, text) = (self.ids.len(), self.text.len());
        let beyond = self.request.max_tokens as usize + 1;
        for (tokens, text) in [(beyond, text), (beyond, 0), (ids, text + 1_000_000)] {
            match self.attach(tokens, text) {
                Err(error) if error.reason() == Reason::InvalidArgument => {}
                Err(error) if self.may_be_forgotten(&error) => {}
                Err(error) => self.wrong(format!("goes astray and hears {error}")),
                Ok(_) => self.wrong(format!("reads from {tokens} tokens, {text} bytes")),
            }
        }
        let unknown = AttachRequest {
            request_id: format!("{}-not", self.name),
            ..AttachRequest::default()
        };
        let unknown = self.shared.attach(unknown, &Caller::own());
        if unknown.err().map(|e| e.reason()) != Some(Reason::RequestNotFound) {
            self.wrong("reads a stream that nobody knows");
        }
    }

    /// Somebody else, who has nothing of it yet, reads the stream at least as far as this client did.
    async fn compete(&mut self, stream: &mut EventStream, back: bool) {
        let mut rival = match self.attach(0, 0) {
            Ok(rival) => rival,
            Err(error) if self.may_be_forgotten(&error) => return,
            Err(error) => return self.wrong(format!("has no rival: {error}")),
        };
        self.taken_over(stream).await;
        let (mut ids, mut text, mut greeted) = (Vec::new(), String::new(), false);
        while ids.len() < self.ids.len() || text.len() < self.text.len() || !greeted {
            // All of that was said already.
            match rival.next().await.map(|item| item.map(|e| e.event)) {
                Some(Ok(Some(Event::Accepted(_)))) if !greeted => greeted = true,
                Some(Ok(Some(Event::Delta(delta)))) if greeted => {
                    ids.extend(delta.token_ids);
                    text.push_str(&delta.text);
                }
                other => return self.wrong(format!("its rival reads {other:?}")),
            }
        }
        if back {
            match self.attach(self.ids.len(), self.text.len()) {
                Ok(own) => {
                    self.taken_over(&mut rival).await;
                    self.greeted = false;
                    *stream = own;
                    return;
                }
                // Its rival read on.
                Err(error) if self.may_be_forgotten(&error) => {}
                Err(error) => return self.wrong(format!("cannot take it back: {error}")),
            }
        }
        (self.ids, self.text) = (ids, text);
        self.check_prefix();
        *stream = rival;
    }

    /// Reads until the stream ends or a whim takes it.
    async fn read(&mut self, stream: &mut EventStream, whims: &mut Vec<(Whim, usize)>) -> Part {
        loop {
            let due = |(_, at): &(Whim, usize)| *at <= self.ids.len() && self.greeted;
            if let Some(index) = whims.iter().position(due) {
                return Part::Whim(whims.remove(index).0);
            }
            // What is late by a second is late for ever.
            let limit = match self.deadline {
                Some(at) => at.max(Instant::now()) + Duration::from_secs(1),
                None => Instant::now() + Duration::from_secs(900),
            };
            let Ok(item) = timeout_at(limit, stream.next()).await else {
                self.wrong(format!("hangs after {} tokens", self.ids.len()));
                return Part::Over;
            };
            let event = match item {
                Some(Ok(event)) => event.event,
                Some(Err(status)) => {
                    self.ended_badly(&status);
                    return Part::Over;
                }
                None => {
                    self.wrong("ends without a word");
                    return Part::Over;
                }
            };
            match event {
                Some(Event::Accepted(accepted)) => {
                    if self.greeted {
                        self.wrong("is greeted twice");
                    }
                    if accepted.prompt_ids != self.prompt || accepted.seed != self.seed {
                        self.wrong("is greeted with another request");
                    }
                    self.greeted = true;
                }
                Some(Event::Delta(delta)) => {
                    self.ids.extend(&delta.token_ids);
                    self.text.push_str(&delta.text);
                    self.check_prefix();
                }
                Some(Event::Finished(finished)) => {
                    self.check_end(&finished);
                    if stream.next().await.is_some() {
                        self.wrong("hears more after the end");
                    }
                    return Part::Over;
                }
                None => self.wrong("gets an empty event"),
            }
        }
    }

    fn check_prefix(&self) {
        let (ids, text) = self.expected(self.ids.len());
        if self.ids != ids {
            self.wrong(format!("gets {:?} instead of {ids:?}", self.ids));
        }
        if !text.starts_with(&self.text) {
            self.wrong(format!("gets {:?} instead of {text:?}", self.text));
        }
        if !self.greeted {
            self.wrong("gets tokens before it is greeted");
        }
    }

    fn check_end(&self, finished: &hotcell_proto::v1::Finished) {
        let count = self.request.max_tokens as usize;
        let (ids, text) = self.expected(count);
        let deaths = finished.deaths_survived;
        self.note(format!("has all {count} tokens, {deaths} deaths survived"));
        if self.ids != ids || self.text != text {
            let (has, chars) = (self.ids.len(), self.text.len());
            self.wrong(format!(
                "is told that all is said with {has} of {count} tokens and {chars} of {} bytes",
                text.len()
            ));
        }
        let usage = finished.usage.unwrap_or_default();
        if usage.generated_tokens as usize != count
            || usage.prompt_tokens as usize != self.prompt.len()
        {
            self.wrong(format!("is told {usage:?}"));
        }
        if finished.seed != self.seed || finished.receipt.is_none() {
            self.wrong("gets another's end, or no receipt");
        }
    }

    /// Whether a status that ended the stream had a reason.
    fn ended_badly(&self, status: &Status) {
        let Some(error) = Error::typed(status) else {
            return self.wrong(format!("gets an untyped status: {status:?}"));
        };
        let reason = error.reason();
        self.note(format!("{} after {} tokens", reason.name(), self.ids.len()));
        let excused = match reason {
            Reason::DeadlineExceeded => self.deadline.is_some_and(|at| Instant::now() >= at),
            Reason::Cancelled => self.left,
            other => self.world.is_excused(self.seed, other),
        };
        if !excused {
            self.wrong(format!(
                "gets {}, for which there is no reason: {error}",
                reason.name()
            ));
        }
    }
}

fn is(status: &Status, reason: Reason) -> bool {
    Error::typed(status).is_some_and(|error| error.reason() == reason)
}
