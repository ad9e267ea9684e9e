//! Embeddings: several prompts at once, each a task of its own.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};
use tokio::sync::oneshot;

use super::tokens::{at_most, class, in_vocabulary, place};
use crate::{
    generate::{
        embed::{Pooling, Reading},
        task::Task,
    },
    host::{Host, Loaded},
};

/// Prompts of one request that are in the engine at a time: some fill a step, and leave room in its queue for others'.
const AT_ONCE: usize = 8;

/// Token ids of a prompt that can be read.
fn read(prompt: &v1::Prompt, model: &Loaded) -> Result<Vec<u32>, Error> {
    let ids = model.text.prepare(Some(prompt), false)?.ids;
    in_vocabulary("prompt id", &ids, model)?;
    if ids.is_empty() {
        return Err(Error::new(
            Reason::InvalidArgument,
            "a prompt is empty; give at least one token",
        ));
    }
    if ids.len() > model.context {
        return Err(Error::new(
            Reason::PromptTooLong,
            format!(
                "a prompt has {} tokens and the model's context {}; shorten it by {}",
                ids.len(),
                model.context,
                ids.len() - model.context
            ),
        ));
    }
    Ok(ids)
}

/// Computes the embeddings of all prompts of a request. One that fails ends them all.
///
/// # Errors
/// What is wrong with the request, or why it cannot be computed.
pub(super) async fn embed(
    host: &Host,
    request: v1::EmbedRequest,
    deadline: Option<Instant>,
) -> Result<v1::EmbedResponse, Error> {
    host.accepting()?;
    at_most("prompts", request.prompts.len(), limits::MAX_EMBED_PROMPTS)?;
    let pooling = match v1::Pooling::try_from(request.pooling) {
        Ok(v1::Pooling::Unspecified | v1::Pooling::Last) => Pooling::Last,
        Ok(v1::Pooling::Mean) => Pooling::Mean,
        Err(_) => {
            let what = format!("there is no pooling {}", request.pooling);
            return Err(Error::new(Reason::InvalidArgument, what));
        }
    };
    let how = (pooling, !request.unnormalized);
    let class = class(&request.tenant, request.priority)?;
    let model = host.model(&request.model)?;
    let prompts = {
        let model = Arc::clone(&model);
        let read = move || -> Result<Vec<Vec<u32>>, Error> {
            request.prompts.iter().map(|p| read(p, &model)).collect()
        };
        host.text_work(read).await?
    };
    let place = Arc::new(place(host)?);
    let mut embeddings = Vec::with_capacity(prompts.len());
    let mut inside = VecDeque::with_capacity(AT_ONCE);
    let mut prompts = prompts.into_iter();
    loop {
        for tokens in prompts.by_ref().take(AT_ONCE.saturating_sub(inside.len())) {
            let (reply, answer) = oneshot::channel();
            let count = tokens.len() as u32;
            let outlet = (reply, Arc::clone(&place));
            let reading = Reading::new(tokens, how, class.clone(), deadline, outlet);
            let task = Task::Embed(Box::new(reading));
            host.engine().compute(model.name.clone(), task)?;
            inside.push_back((answer, count));
        }
        let Some((answer, prompt_tokens)) = inside.pop_front() else {
            break;
        };
        let gone = |_| Error::new(Reason::Internal, "the engine has ended");
        let values = answer.await.map_err(gone)??;
        embeddings.push(v1::Embedding {
            values,
            prompt_tokens,
        });
    }
    Ok(v1::EmbedResponse {
        model: model.name.clone(),
        embeddings,
        numerics: Some(model.numerics.clone()),
    })
}
