//! Text to tokens and back, by any worker that has the model: the scheduler knows no tokenizer.

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{
        DetokenizeRequest, DetokenizeResponse, Prompt, TokenizeRequest, TokenizeResponse,
        prompt::Kind, tokens_client::TokensClient,
    },
};
use tokio::time::Instant;
use tonic::{Response, Status, transport::Channel};

use crate::{
    fleet::Fleet,
    placement::{Estimate, Wish},
    relay::{bounded, verdict},
};

/// Calls a worker, and another one if it dies.
async fn ask<T, F>(
    fleet: &Fleet,
    model: &ModelName,
    call: impl Fn(TokensClient<Channel>) -> F,
) -> Result<T, Error>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let mut avoid: Option<String> = None;
    for _ in 0..=limits::MAX_CONTINUATIONS {
        let wish = Wish {
            class: None,
            avoid: avoid.as_deref(),
        };
        let placed = fleet.acquire(model, wish, Estimate::default).await?;
        match call(placed.link.tokens()).await {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) => match verdict(&placed, &status).await {
                Some(error) => return Err(error),
                None => avoid = Some(placed.link.worker.clone()),
            },
        }
    }
    Err(Error::new(
        Reason::WorkerLost,
        "every worker that was asked died; the request itself may be what kills them",
    ))
}

fn doubt(what: &str) -> Error {
    tracing::error!(what, "a worker broke the protocol");
    Error::new(
        Reason::ProtocolViolation,
        format!("a worker answered {what}; this is a fault of Hotcell"),
    )
}

/// Renders and tokenises a prompt.
///
/// # Errors
/// The worker's words, or why there is no worker.
pub async fn tokenize(
    fleet: &Fleet,
    model: &ModelName,
    prompt: Option<Kind>,
    without_special: bool,
    deadline: Option<Instant>,
) -> Result<TokenizeResponse, Error> {
    let request = TokenizeRequest {
        model: model.as_str().to_owned(),
        prompt: Some(Prompt { kind: prompt }),
        without_special,
    };
    let answer = ask(fleet, model, |mut tokens| {
        let request = bounded(request.clone(), deadline);
        async move { tokens.tokenize(request).await }
    })
    .await?;
    let vocabulary = fleet.bounds(model).map_or(0, |b| b.vocabulary);
    if answer.ids.len() > limits::MAX_PROMPT_TOKENS {
        return Err(Error::new(
            Reason::LimitExceeded,
            format!(
                "the prompt has {} tokens, more than the limit of {}",
                answer.ids.len(),
                limits::MAX_PROMPT_TOKENS
            ),
        ));
    }
    if answer.ids.iter().any(|&id| id >= vocabulary) {
        return Err(doubt("with a token that is not in the vocabulary"));
    }
    Ok(TokenizeResponse {
        model: model.as_str().to_owned(),
        ..answer
    })
}

/// Turns token ids into text.
///
/// # Errors
/// The worker's words, or why there is no worker.
pub async fn detokenize(
    fleet: &Fleet,
    model: &ModelName,
    ids: Vec<u32>,
    with_special: bool,
    deadline: Option<Instant>,
) -> Result<DetokenizeResponse, Error> {
    let request = DetokenizeRequest {
        model: model.as_str().to_owned(),
        ids,
        with_special,
    };
    let answer = ask(fleet, model, |mut tokens| {
        let request = bounded(request.clone(), deadline);
        async move { tokens.detokenize(request).await }
    })
    .await?;
    Ok(DetokenizeResponse {
        model: model.as_str().to_owned(),
        text: answer.text,
    })
}
