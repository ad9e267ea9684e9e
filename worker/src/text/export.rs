//! A tokenizer as a tokenizer.json, for programs that tokenise themselves: what a model's own file says, or what one would
//! say for a tokenizer that came from elsewhere.

use serde_json::{Value, json};
use tokenizers::{DecoderWrapper, PostProcessorWrapper};

use super::detokenizer::{DecoderKind, Lead};
use super::gguf::part;
use super::tokenizer::Tokenizer;
use super::{TextError, caught};

impl Tokenizer {
    /// The tokenizer.json that encodes and decodes as this does.
    ///
    /// # Errors
    /// A decoder that is not supported, or has no such form.
    pub fn to_json(&self) -> Result<String, TextError> {
        let decoder: DecoderWrapper = part(decoder(self.decoder_kind()?)?)?;
        let around: Option<PostProcessorWrapper> = match self.around() {
            ([], []) => None,
            (before, after) => Some(part(self.template(before, after)?)?),
        };
        caught("writing the tokenizer", || {
            let mut whole = self.inner().clone();
            whole.with_decoder(Some(decoder));
            whole.with_post_processor(around);
            let written = whole.to_string(false);
            written.map_err(|error| TextError::BadTokenizer(error.to_string()))
        })
    }

    /// What puts these ids before and after a text, and before and after two.
    fn template(&self, before: &[u32], after: &[u32]) -> Result<Value, TextError> {
        let mut tokens = serde_json::Map::new();
        let mut special = |ids: &[u32], side: u32| -> Result<Vec<Value>, TextError> {
            let each = ids.iter().map(|&id| {
                let unknown = || TextError::UnknownToken {
                    token: id,
                    vocab: self.vocab_size(),
                };
                let text = self.inner().id_to_token(id).ok_or_else(unknown)?;
                let row = json!({"id": text, "ids": [id], "tokens": [text]});
                tokens.insert(text.clone(), row);
                Ok(json!({"SpecialToken": {"id": text, "type_id": side}}))
            });
            each.collect()
        };
        let one = [
            special(before, 0)?,
            vec![json!({"Sequence": {"id": "A", "type_id": 0}})],
            special(after, 0)?,
        ];
        let other = [
            special(before, 1)?,
            vec![json!({"Sequence": {"id": "B", "type_id": 1}})],
            special(after, 1)?,
        ];
        let (one, other) = (one.concat(), other.concat());
        let pair = [one.clone(), other].concat();
        Ok(
            json!({"type": "TemplateProcessing", "single": one, "pair": pair, "special_tokens": tokens}),
        )
    }
}

/// The decoder in its tokenizer.json form.
fn decoder(kind: &DecoderKind) -> Result<Value, TextError> {
    if kind.byte_level {
        return Ok(json!({
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true
        }));
    }
    let replace = |(from, to): &(String, String)| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let mut all: Vec<Value> = kind.replace.iter().map(replace).collect();
    if kind.byte_fallback {
        all.push(json!({"type": "ByteFallback"}));
    }
    all.push(json!({"type": "Fuse"}));
    match kind.lead {
        Lead::Nothing => {}
        Lead::Strip(byte, most) => {
            let content = char::from(byte);
            all.push(json!({"type": "Strip", "content": content, "start": most, "stop": 0}));
        }
        Lead::FirstToken => {
            let what = "a decoder that looks at the first token, in a file of its own";
            return Err(TextError::Unsupported(what.into()));
        }
    }
    Ok(json!({"type": "Sequence", "decoders": all}))
}
