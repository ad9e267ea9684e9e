//! Text to tokens and back, and to vectors.

use hotcell_proto::{error::Error, v1};

use crate::{connect::Client, tokens::Prompt};

/// How prompts become vectors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EmbedOptions {
    /// Name of a model; empty: the scheduler's default.
    pub model: String,
    /// The mean of all tokens' states instead of the last token's.
    pub mean: bool,
    /// Leave the vectors as long as they are instead of making their length 1.
    pub unnormalized: bool,
    /// As in [`GenerateOptions`](crate::GenerateOptions).
    pub tenant: String,
    /// As in [`GenerateOptions`](crate::GenerateOptions).
    pub priority: u32,
}

impl Client {
    /// Renders (a chat) and tokenises `prompt` without generating.
    ///
    /// # Errors
    /// The server's.
    pub async fn tokenize(
        &self,
        model: &str,
        prompt: impl Into<Prompt>,
        without_special: bool,
    ) -> Result<v1::TokenizeResponse, Error> {
        let request = v1::TokenizeRequest {
            model: model.to_owned(),
            prompt: Some(prompt.into().into()),
            without_special,
        };
        let response = self.tokens_client().tokenize(request).await;
        self.answer(response)
    }

    /// Reads prompts without generating; a vector for each, in their order.
    ///
    /// # Errors
    /// The server's.
    pub async fn embed(
        &self,
        prompts: impl IntoIterator<Item = Prompt>,
        options: EmbedOptions,
    ) -> Result<v1::EmbedResponse, Error> {
        let pooling = match options.mean {
            true => v1::Pooling::Mean,
            false => v1::Pooling::Last,
        };
        let request = v1::EmbedRequest {
            model: options.model,
            prompts: prompts.into_iter().map(v1::Prompt::from).collect(),
            pooling: pooling.into(),
            unnormalized: options.unnormalized,
            tenant: options.tenant,
            priority: options.priority,
        };
        let response = self.tokens_client().embed(request).await;
        self.answer(response)
    }

    /// Turns token ids back into text.
    ///
    /// # Errors
    /// The server's.
    pub async fn detokenize(
        &self,
        model: &str,
        ids: Vec<u32>,
        with_special: bool,
    ) -> Result<String, Error> {
        let request = v1::DetokenizeRequest {
            model: model.to_owned(),
            ids,
            with_special,
        };
        let response = self.tokens_client().detokenize(request).await;
        Ok(self.answer(response)?.text)
    }
}
