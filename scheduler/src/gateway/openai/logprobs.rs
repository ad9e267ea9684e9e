//! Log probabilities in OpenAI's two forms.

use hotcell_proto::v1::{Candidate, TokenLogprob};
use serde_json::{Map, Value, json};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn candidate(c: &Candidate) -> Value {
    json!({"token": text(&c.text), "logprob": c.logprob, "bytes": c.text})
}

/// Those of a chat.
pub(super) fn chat(all: &[TokenLogprob]) -> Value {
    let content = all.iter().map(|l| {
        json!({
            "token": text(&l.text),
            "logprob": l.logprob,
            "bytes": l.text,
            "top_logprobs": l.top.iter().map(candidate).collect::<Vec<_>>(),
        })
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

/// Those of a completion, with where each token begins in the text: characters, after `offset` of them.
pub(super) fn completion(all: &[TokenLogprob], offset: &mut usize) -> Value {
    let offsets = all.iter().map(|l| {
        let at = *offset;
        *offset += text(&l.text).chars().count();
        at
    });
    let offsets: Vec<_> = offsets.collect();
    let top = all.iter().map(|l| {
        // Of two tokens with one text the likelier one is told.
        let mut row = Map::new();
        for c in &l.top {
            row.entry(text(&c.text)).or_insert_with(|| json!(c.logprob));
        }
        row
    });
    json!({
        "tokens": all.iter().map(|l| text(&l.text)).collect::<Vec<_>>(),
        "token_logprobs": all.iter().map(|l| l.logprob).collect::<Vec<_>>(),
        "top_logprobs": top.collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_count_characters() {
        let token = |text: &str| TokenLogprob {
            text: text.as_bytes().to_vec(),
            logprob: -0.5,
            ..TokenLogprob::default()
        };
        let mut offset = 3;
        let value = completion(&[token("é"), token("ab"), token("c")], &mut offset);
        assert_eq!(value["text_offset"], json!([3, 4, 6]));
        assert_eq!((offset, &value["tokens"][1]), (7, &json!("ab")));
    }
}
