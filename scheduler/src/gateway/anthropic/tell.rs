//! Answers in Anthropic's form.

use hotcell_proto::{
    error::Error,
    v1::{Accepted, FinishReason, Finished, Usage, generate_event::Event},
};
use serde_json::{Value, json};

use crate::gateway::{
    ask::{Answer, Call, Piece, Tell, arguments, call_id, is_cut, pieces},
    failure::Flavor,
    sse::{Framing, Gone, Out},
};

fn usage(usage: Usage) -> Value {
    json!({
        // Theirs counts what was read anew, and apart from it what was there already.
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.generated_tokens,
    })
}

/// Why it ended, and by which stop sequence.
fn stop(finished: &Finished, calls: bool) -> (&'static str, Value) {
    match finished.reason() {
        _ if is_cut(finished) => ("max_tokens", Value::Null),
        _ if calls => ("tool_use", Value::Null),
        FinishReason::StopString => ("stop_sequence", Value::from(finished.matched_stop.as_str())),
        _ => ("end_turn", Value::Null),
    }
}

fn message(accepted: &Accepted, content: Vec<Value>, usage: Value) -> Value {
    json!({
        "id": format!("msg_{}", accepted.request_id),
        "type": "message",
        "role": "assistant",
        "model": accepted.model,
        "content": content,
        "stop_reason": null,
        "stop_sequence": null,
        "usage": usage,
    })
}

fn call(call: &Call) -> Value {
    json!({
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": arguments(&call.arguments),
    })
}

/// A whole answer.
pub(super) fn whole(answer: &Answer) -> Value {
    let mut content = Vec::new();
    if !answer.reasoning.is_empty() {
        content.push(json!({"type": "thinking", "thinking": answer.reasoning, "signature": ""}));
    }
    if !answer.content.is_empty() || answer.calls.is_empty() {
        content.push(json!({"type": "text", "text": answer.content}));
    }
    content.extend(answer.calls.iter().map(call));
    let mut value = message(&answer.accepted, content, usage(answer.usage()));
    let (reason, sequence) = stop(&answer.finished, !answer.calls.is_empty());
    value["stop_reason"] = Value::from(reason);
    value["stop_sequence"] = sequence;
    value
}

/// The kind of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    /// The call of this number.
    Call(u32),
}

/// Tells a stream's events as theirs: blocks that begin, grow and end.
#[derive(Default)]
pub(super) struct Telling {
    request: String,
    /// The block that is open, and how many were before it.
    open: Option<Block>,
    index: u32,
    calls: bool,
}

impl Telling {
    async fn close(&mut self, out: &Out) -> Result<(), Gone> {
        if self.open.take().is_some() {
            let value = json!({"type": "content_block_stop", "index": self.index});
            self.index += 1;
            out.event("content_block_stop", &value).await?;
        }
        Ok(())
    }

    /// Makes this the open block; `content` is what it begins with.
    async fn open(&mut self, out: &Out, block: Block, content: Value) -> Result<(), Gone> {
        if self.open == Some(block) {
            return Ok(());
        }
        self.close(out).await?;
        self.open = Some(block);
        let value =
            json!({"type": "content_block_start", "index": self.index, "content_block": content});
        out.event("content_block_start", &value).await
    }

    async fn grow(&self, out: &Out, delta: Value) -> Result<(), Gone> {
        let value = json!({"type": "content_block_delta", "index": self.index, "delta": delta});
        out.event("content_block_delta", &value).await
    }

    async fn piece(&mut self, out: &Out, piece: Piece<'_>) -> Result<(), Gone> {
        match piece {
            Piece::Content(text) => {
                self.open(out, Block::Text, json!({"type": "text", "text": ""}))
                    .await?;
                self.grow(out, json!({"type": "text_delta", "text": text}))
                    .await
            }
            Piece::Reasoning(text) => {
                let begin = json!({"type": "thinking", "thinking": "", "signature": ""});
                self.open(out, Block::Thinking, begin).await?;
                self.grow(out, json!({"type": "thinking_delta", "thinking": text}))
                    .await
            }
            Piece::Call {
                index,
                name,
                arguments,
            } => {
                self.calls = true;
                let id = call_id(&self.request, index);
                let begin = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.open(out, Block::Call(index), begin).await?;
                match arguments.is_empty() {
                    true => Ok(()),
                    false => {
                        let delta = json!({"type": "input_json_delta", "partial_json": arguments});
                        self.grow(out, delta).await
                    }
                }
            }
        }
    }
}

impl Tell for Telling {
    const FRAMING: Framing = Framing::Events;

    async fn tell(&mut self, out: &Out, (_, event): (u32, Event)) -> Result<(), Gone> {
        match event {
            Event::Accepted(accepted) => {
                let read = Usage {
                    prompt_tokens: u32::try_from(accepted.prompt_ids.len()).unwrap_or(u32::MAX),
                    ..Usage::default()
                };
                let message = message(&accepted, Vec::new(), usage(read));
                self.request = accepted.request_id;
                let value = json!({"type": "message_start", "message": message});
                out.event("message_start", &value).await
            }
            Event::Delta(delta) => {
                for one in pieces(&delta, true) {
                    self.piece(out, one).await?;
                }
                Ok(())
            }
            Event::Finished(finished) => {
                if self.index == 0 && self.open.is_none() {
                    // An answer has at least one block, empty as it may be.
                    self.open(out, Block::Text, json!({"type": "text", "text": ""}))
                        .await?;
                }
                self.close(out).await?;
                let (reason, sequence) = stop(&finished, self.calls);
                let value = json!({
                    "type": "message_delta",
                    "delta": {"stop_reason": reason, "stop_sequence": sequence},
                    "usage": usage(finished.usage.unwrap_or_default()),
                });
                out.event("message_delta", &value).await?;
                out.event("message_stop", &json!({"type": "message_stop"}))
                    .await
            }
        }
    }

    async fn fail(&mut self, out: &Out, error: &Error) -> Result<(), Gone> {
        out.event("error", &Flavor::Anthropic.body(error)).await
    }
}
