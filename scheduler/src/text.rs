//! Text to tokens and back, and to vectors, by any worker that has the model: the scheduler knows no tokenizer.

use std::sync::Arc;

use hotcell_proto::{
    error::{Error, Reason},
    ids::{ModelName, RequestId},
    limits,
    v1::{
        DetokenizeRequest, DetokenizeResponse, EmbedRequest, EmbedResponse, Prompt,
        TokenizeRequest, TokenizeResponse, prompt::Kind, tokens_client::TokensClient,
    },
};
use tokio::time::Instant;
use tonic::{Response, Status, transport::Channel};

use crate::{
    fleet::{Fleet, Lost, Placed},
    onward,
    placement::{Estimate, Wish},
    suspicion::{Next, Record},
    traces::{PLACEMENT, Span, died, part_of},
    verdict::{bounded, verdict},
};

/// Calls a worker, and another one if it dies; a throw-away one if several died. Also gives the place where it was answered,
/// unless that is a throw-away worker.
async fn ask<T, F>(
    fleet: &Arc<Fleet>,
    (model, tenant): (&ModelName, &str),
    trace: &mut Span,
    call: impl Fn(TokensClient<Channel>, &Span) -> F,
) -> Result<(T, Option<Placed>), Error>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let mut record = Record::default();
    let id = RequestId::random()?;
    let mut home: Option<String> = None;
    let mut next = Next::GoOn;
    loop {
        let wish = Wish {
            avoid: home.as_deref(),
            tenant: Some(tenant),
            ..Wish::default()
        };
        let cost = Estimate::default;
        let mut waited = trace.child(&PLACEMENT);
        let placed = match (next, &home) {
            (Next::Alone, Some(home)) => {
                fleet.acquire_alone(model, wish, home, &record, cost).await
            }
            _ => fleet.acquire(model, wish, cost).await,
        };
        let placed = placed.inspect_err(|error| waited.fail(error.reason().name()))?;
        drop(waited);
        let mut part = part_of(trace, &placed.link);
        let status = match call(placed.link.tokens(), &part).await {
            Ok(answer) => {
                fleet.served(&placed.home, id.as_str());
                let place = Some(placed).filter(|placed| !placed.is_alone());
                return Ok((answer.into_inner(), place));
            }
            Err(status) => status,
        };
        if let Some(error) = verdict(&placed, &status).await {
            part.fail(error.reason().name());
            return Err(error);
        }
        let link = &placed.link;
        died(trace, part, link);
        let lost = Lost {
            request: id.as_str(),
            link,
            home: &placed.home,
            alone: placed.is_alone(),
            accepted: false,
        };
        next = fleet.witness(&mut record, &lost);
        let (deaths, death) = (record.deaths(), link.fate.death());
        match next {
            Next::GoOn | Next::Alone => home = Some(placed.home.clone()),
            Next::Poison => return Err(onward::poison("this text", &link.worker, deaths, death)),
            Next::GiveUp => return Err(onward::too_often(&link.worker, deaths, death)),
        }
    }
}

fn doubt(what: &str) -> Error {
    tracing::error!(what, "a worker broke the protocol");
    Error::new(
        Reason::ProtocolViolation,
        format!("a worker answered {what}; this is a fault of Hotcell"),
    )
}

/// Renders and tokenises a prompt. What the tokens are for may go on in the place that comes with them.
///
/// # Errors
/// The worker's words, or why there is no worker.
pub async fn tokenize(
    fleet: &Arc<Fleet>,
    (model, tenant): (&ModelName, &str),
    prompt: Option<Kind>,
    without_special: bool,
    (deadline, trace): (Option<Instant>, &mut Span),
) -> Result<(TokenizeResponse, Option<Placed>), Error> {
    let request = TokenizeRequest {
        model: model.as_str().to_owned(),
        prompt: Some(Prompt { kind: prompt }),
        without_special,
    };
    let (answer, place) = ask(fleet, (model, tenant), trace, |mut tokens, part| {
        let request = bounded(request.clone(), deadline, part);
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
    let answer = TokenizeResponse {
        model: model.as_str().to_owned(),
        ..answer
    };
    Ok((answer, place))
}

/// Turns token ids into text.
///
/// # Errors
/// The worker's words, or why there is no worker.
pub async fn detokenize(
    fleet: &Arc<Fleet>,
    (model, tenant): (&ModelName, &str),
    ids: Vec<u32>,
    with_special: bool,
    (deadline, trace): (Option<Instant>, &mut Span),
) -> Result<DetokenizeResponse, Error> {
    let request = DetokenizeRequest {
        model: model.as_str().to_owned(),
        ids,
        with_special,
    };
    let (answer, _) = ask(fleet, (model, tenant), trace, |mut tokens, part| {
        let request = bounded(request.clone(), deadline, part);
        async move { tokens.detokenize(request).await }
    })
    .await?;
    Ok(DetokenizeResponse {
        model: model.as_str().to_owned(),
        text: answer.text,
    })
}

/// Pools the hidden states of prompts.
///
/// # Errors
/// The worker's words, or why there is no worker.
pub async fn embed(
    fleet: &Arc<Fleet>,
    model: &ModelName,
    request: EmbedRequest,
    (deadline, trace): (Option<Instant>, &mut Span),
) -> Result<EmbedResponse, Error> {
    let request = EmbedRequest {
        model: model.as_str().to_owned(),
        ..request
    };
    let count = request.prompts.len();
    let (answer, _) = ask(
        fleet,
        (model, &request.tenant),
        trace,
        |mut tokens, part| {
            let request = bounded(request.clone(), deadline, part);
            async move { tokens.embed(request).await }
        },
    )
    .await?;
    let width = answer.embeddings.first().map_or(0, |e| e.values.len());
    if answer.embeddings.len() != count || answer.embeddings.iter().any(|e| e.values.len() != width)
    {
        return Err(doubt(
            "with another number of embeddings, or of their values",
        ));
    }
    Ok(EmbedResponse {
        model: model.as_str().to_owned(),
        ..answer
    })
}
