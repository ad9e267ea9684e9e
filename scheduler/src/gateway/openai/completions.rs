//! Completions of texts as they are, without a template.

use axum::{body::Body, extract::State, http::Extensions, response::Response};
use hotcell_proto::{
    error::Error,
    v1::{Delta, GenerateRequest, TokenLogprob, Usage, generate_event::Event, prompt::Kind},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    Head, answered,
    embeddings::Input,
    failed, finish_reason, json_response, logprobs,
    options::{OneOrMany, Options, at_most, refused},
    usage_of,
};
use crate::{
    access::Caller,
    gateway::{
        ask::{Answer, Branches, Tell, complete as put_together, stream},
        body,
        sse::{Framing, Gone, Out},
    },
    service::Shared,
};

/// OpenAI's default.
const MAX_TOKENS: u32 = 16;

#[derive(Debug, Deserialize)]
struct Request {
    #[serde(default)]
    model: String,
    prompt: Option<Input>,
    suffix: Option<String>,
    max_tokens: Option<u32>,
    logprobs: Option<u32>,
    echo: Option<bool>,
    best_of: Option<u32>,
    #[serde(flatten)]
    options: Options,
}

struct Asked {
    requests: Vec<GenerateRequest>,
    n: u32,
    stream: bool,
    include_usage: bool,
    echo: bool,
    logprobs: bool,
}

fn read(request: Request) -> Result<Asked, Error> {
    let options = request.options;
    let n = options.n.unwrap_or(1);
    if request.suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(refused("suffix", "suffix is not supported; leave it out"));
    }
    if request.best_of.is_some_and(|best| best != n) {
        return Err(refused(
            "best_of",
            "best_of is not supported; ask for n and choose by logprobs",
        ));
    }
    let echo = request.echo.unwrap_or(false);
    if echo && request.logprobs.is_some() {
        return Err(refused(
            "echo",
            "a prompt's own logprobs are not supported; leave out echo or logprobs",
        ));
    }
    let input = request.prompt.unwrap_or(Input::Text(String::new()));
    if echo && matches!(input, Input::Ids(_) | Input::ManyIds(_)) {
        return Err(refused(
            "echo",
            "only a prompt that is text can be repeated; leave out echo",
        ));
    }
    let model = GenerateRequest {
        model: request.model,
        sampling: Some(options.sampling()?),
        max_tokens: at_most("max_tokens", request.max_tokens)?.unwrap_or(MAX_TOKENS),
        seed: options.seed(),
        priority: options.priority()?,
        ignore_eos: options.ignore_eos.unwrap_or(false),
        logprobs: request.logprobs.is_some(),
        top_logprobs: request.logprobs.unwrap_or(0),
        grammar: options.grammar()?,
        ..GenerateRequest::default()
    };
    let (stream, include_usage) = (options.streams(), options.includes_usage());
    let stop = options.stop.map(OneOrMany::into_vec).unwrap_or_default();
    let stop_tokens = options.stop_token_ids.unwrap_or_default();
    let prompts = input.prompts();
    if prompts.is_empty() {
        return Err(refused(
            "prompt",
            "prompt is an empty list; give at least one",
        ));
    }
    let requests = prompts.into_iter().map(|prompt| GenerateRequest {
        prompt: Some(prompt),
        stop: stop.clone(),
        stop_tokens: stop_tokens.clone(),
        ..model.clone()
    });
    Ok(Asked {
        requests: requests.collect(),
        n,
        stream,
        include_usage,
        echo,
        logprobs: request.logprobs.is_some(),
    })
}

/// `POST /v1/completions`.
pub(super) async fn complete(
    State(shared): State<Shared>,
    extensions: Extensions,
    body: Body,
) -> Response {
    answered(run(&shared, &Caller::of(&extensions), body).await)
}

/// The text that a prompt's continuations begin with, if they repeat it.
fn echoed(asked: &Asked, index: usize) -> String {
    let place = index / asked.n.max(1) as usize;
    let prompt = asked.requests.get(place).and_then(|r| r.prompt.as_ref());
    match prompt.and_then(|p| p.kind.as_ref()) {
        Some(Kind::Text(text)) if asked.echo => text.clone(),
        _ => String::new(),
    }
}

async fn run(shared: &Shared, caller: &Caller, body: Body) -> Result<Response, Error> {
    let asked = read(body::json(body).await?)?;
    let count = asked.requests.len() * asked.n as usize;
    let before: Vec<_> = (0..count).map(|index| echoed(&asked, index)).collect();
    let branches = Branches::begin_all(shared, asked.requests, asked.n, None, caller)?;
    if !asked.stream {
        let answers = put_together(branches, count, false).await?;
        return Ok(json_response(whole(
            &answers,
            &before,
            asked.n,
            asked.logprobs,
        )));
    }
    let telling = Telling {
        head: None,
        told: before.into_iter().map(Told::new).collect(),
        n: asked.n,
        include_usage: asked.include_usage,
    };
    stream(branches, telling).await
}

/// What ids begin with.
const KIND: &str = "cmpl";
/// What answers, and pieces of them, are called.
const OBJECT: &str = "text_completion";

#[derive(Serialize)]
struct ChoiceView<'a> {
    index: u32,
    text: &'a str,
    logprobs: Option<Value>,
    finish_reason: Option<&'a str>,
}

/// What several prompts, each with `n` continuations, took together.
fn used(all: &[Usage], n: u32) -> Value {
    let generated = all.iter().map(|u| u64::from(u.generated_tokens)).sum();
    let each = all.chunks(n.max(1) as usize).filter_map(<[Usage]>::first);
    let (prompt, cached) = each.fold((0, 0), |(prompt, cached), u| {
        (
            prompt + u64::from(u.prompt_tokens),
            cached + u64::from(u.cached_tokens),
        )
    });
    usage_of(prompt, cached, generated)
}

fn whole(answers: &[Answer], before: &[String], n: u32, told: bool) -> Value {
    let choices = answers
        .iter()
        .zip(before)
        .enumerate()
        .map(|(index, (answer, before))| {
            let mut offset = before.chars().count();
            json!({
                "index": index,
                "text": format!("{before}{}", answer.content),
                "logprobs": told.then(|| logprobs::completion(&answer.logprobs, &mut offset)),
                "finish_reason": finish_reason(&answer.finished, false),
            })
        });
    let accepted = answers
        .first()
        .map(|a| a.accepted.clone())
        .unwrap_or_default();
    let mut value = Head::of((KIND, OBJECT), &accepted).json(choices.collect());
    let usages: Vec<_> = answers.iter().map(Answer::usage).collect();
    value["usage"] = used(&usages, n);
    value
}

struct Told {
    /// The prompt, until it was repeated.
    before: String,
    /// Characters that were told.
    offset: usize,
    usage: Usage,
}

impl Told {
    fn new(before: String) -> Self {
        Self {
            offset: before.chars().count(),
            before,
            usage: Usage::default(),
        }
    }
}

struct Telling {
    head: Option<Head>,
    told: Vec<Told>,
    n: u32,
    include_usage: bool,
}

impl Telling {
    fn chunk(&self, choices: Value) -> Value {
        let mut value = self
            .head
            .as_ref()
            .map_or(Value::Null, |head| head.json(choices));
        if self.include_usage {
            value["usage"] = Value::Null;
        }
        value
    }

    async fn choice(
        &self,
        out: &Out,
        index: u32,
        text: &str,
        logprobs: Option<Value>,
        finish_reason: Option<&str>,
    ) -> Result<(), Gone> {
        let Some(head) = &self.head else {
            return Ok(());
        };
        let choice = ChoiceView {
            index,
            text,
            logprobs,
            finish_reason,
        };
        head.piece(out, &choice, self.include_usage).await
    }
}

impl Tell for Telling {
    const FRAMING: Framing = Framing::Events;

    async fn tell(&mut self, out: &Out, (index, event): (u32, Event)) -> Result<(), Gone> {
        let Some(told) = self.told.get_mut(index as usize) else {
            return Ok(());
        };
        match event {
            Event::Accepted(accepted) => {
                self.head
                    .get_or_insert_with(|| Head::of((KIND, OBJECT), &accepted));
                let before = std::mem::take(&mut told.before);
                match before.is_empty() {
                    true => Ok(()),
                    false => self.choice(out, index, &before, None, None).await,
                }
            }
            Event::Delta(Delta {
                text,
                logprobs: odds,
                ..
            }) => {
                let odds: Vec<TokenLogprob> = odds;
                let odds = match odds.is_empty() {
                    true => None,
                    false => Some(logprobs::completion(&odds, &mut told.offset)),
                };
                match text.is_empty() && odds.is_none() {
                    true => Ok(()),
                    false => self.choice(out, index, &text, odds, None).await,
                }
            }
            Event::Finished(finished) => {
                told.usage = finished.usage.unwrap_or_default();
                let reason = finish_reason(&finished, false);
                self.choice(out, index, "", None, Some(reason)).await
            }
        }
    }

    async fn fail(&mut self, out: &Out, error: &Error) -> Result<(), Gone> {
        out.data(&failed(error)).await
    }

    async fn end(&mut self, out: &Out) -> Result<(), Gone> {
        if self.include_usage {
            let mut value = self.chunk(json!([]));
            let usages: Vec<_> = self.told.iter().map(|told| told.usage).collect();
            value["usage"] = used(&usages, self.n);
            out.data(&value).await?;
        }
        out.raw("data: [DONE]\n\n").await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(value: Value) -> Result<Asked, Error> {
        read(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn prompts_are_texts_or_ids_one_or_several() {
        let count = |prompt: Value| asked(json!({ "prompt": prompt })).unwrap().requests.len();
        assert_eq!(count(json!("a")), 1);
        assert_eq!(count(json!(["a", "b"])), 2);
        assert_eq!(count(json!([1, 2, 3])), 1);
        assert_eq!(count(json!([[1], [2, 3]])), 2);
        assert_eq!(asked(json!({})).unwrap().requests[0].max_tokens, MAX_TOKENS);
    }

    #[test]
    fn what_would_silently_be_left_out_is_refused() {
        for bad in [
            json!({"prompt": "a", "suffix": "b"}),
            json!({"prompt": "a", "best_of": 3}),
            json!({"prompt": "a", "echo": true, "logprobs": 1}),
            json!({"prompt": [1], "echo": true}),
            json!({"prompt": []}),
            json!({"prompt": "a", "max_tokens": 0}),
            json!({"prompt": "a", "guided_choice": []}),
        ] {
            assert!(asked(bad).is_err());
        }
    }

    #[test]
    fn a_prompt_is_counted_once_however_many_continuations_it_has() {
        let usage = |prompt_tokens, generated_tokens| Usage {
            prompt_tokens,
            generated_tokens,
            ..Usage::default()
        };
        let value = used(&[usage(3, 1), usage(3, 2), usage(5, 4), usage(5, 8)], 2);
        assert_eq!(
            (&value["prompt_tokens"], &value["completion_tokens"]),
            (&json!(8), &json!(15))
        );
    }
}
