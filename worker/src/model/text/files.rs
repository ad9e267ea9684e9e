//! A model's text side as the files in which others keep it.

use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};
use serde_json::json;

use super::ModelText;
use crate::error::of_text;

impl ModelText {
    /// tokenizer.json, tokenizer_config.json and config.json of a model of which this is said, as far as programs that
    /// tokenise and render chats need them.
    ///
    /// # Errors
    /// A tokenizer that cannot be written so, [`Reason::LimitExceeded`].
    pub fn files(&self, about: &v1::ModelSummary) -> Result<Vec<(&'static str, Vec<u8>)>, Error> {
        let tokenizer = self.tokenizer.to_json().map_err(|e| of_text(&e))?;
        let (before, after) = self.tokenizer.around();
        let named = |text: String| (!text.is_empty()).then_some(text);
        let settings = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": named(self.tokenizer.bos_text()),
            "eos_token": named(self.tokenizer.eos_text()),
            "add_bos_token": !before.is_empty(),
            "add_eos_token": !after.is_empty(),
            "clean_up_tokenization_spaces": false,
            "model_max_length": about.context_length,
            "chat_template": self.template_text,
        });
        let config = json!({
            "model_type": about.architecture,
            "vocab_size": about.vocabulary,
            "max_position_embeddings": about.context_length,
            "bos_token_id": self.tokenizer.bos(),
            "eos_token_id": about.end_tokens,
        });
        let files = vec![
            ("config.json", config.to_string().into_bytes()),
            ("tokenizer.json", tokenizer.into_bytes()),
            ("tokenizer_config.json", settings.to_string().into_bytes()),
        ];
        let bytes: u64 = files.iter().map(|(_, file)| file.len() as u64).sum();
        if bytes > limits::MAX_TOKENIZER_BYTES {
            let most = limits::MAX_TOKENIZER_BYTES >> 20;
            let what = format!("the model's tokenizer has {bytes} bytes; the limit is {most} MiB");
            return Err(Error::new(Reason::LimitExceeded, what));
        }
        Ok(files)
    }
}
