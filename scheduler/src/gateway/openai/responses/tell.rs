//! Responses as they are told: the items of an answer, whole and streamed.

use hotcell_proto::{
    error::Error,
    v1::{Accepted, generate_event::Event},
};
use serde_json::{Value, json};

use crate::gateway::{
    ask::{Answer, Call, Piece, Tell, call_id, is_cut, now, pieces},
    failure::Flavor,
    sse::{Framing, Gone, Out},
};

fn message_item(request: &str, status: &str, text: Option<&str>) -> Value {
    let content = text.map(|text| json!({"type": "output_text", "text": text, "annotations": []}));
    json!({
        "type": "message",
        "id": format!("msg_{request}"),
        "status": status,
        "role": "assistant",
        "content": content.into_iter().collect::<Vec<_>>(),
    })
}

fn thought_item(request: &str, index: usize, status: &str, text: Option<&str>) -> Value {
    let content = text.map(|text| json!({"type": "reasoning_text", "text": text}));
    json!({
        "type": "reasoning",
        "id": format!("rs_{request}_{index}"),
        "status": status,
        "summary": [],
        "content": content.into_iter().collect::<Vec<_>>(),
    })
}

fn call_item(request: &str, index: u32, status: &str, call: &Call) -> Value {
    json!({
        "type": "function_call",
        "id": format!("fc_{request}_{index}"),
        "call_id": call_id(request, index),
        "status": status,
        "name": call.name,
        "arguments": call.arguments,
    })
}

/// What an answer consists of, each with its number in the order in which they began.
#[derive(Default)]
pub(super) struct Items(Vec<Value>);

impl Items {
    pub fn of(answer: &Answer) -> Self {
        let request = &answer.accepted.request_id;
        let mut all = Vec::new();
        if !answer.reasoning.is_empty() {
            all.push(thought_item(
                request,
                0,
                "completed",
                Some(&answer.reasoning),
            ));
        }
        if !answer.content.is_empty() || answer.calls.is_empty() {
            all.push(message_item(request, "completed", Some(&answer.content)));
        }
        let calls = answer.calls.iter().zip(0..);
        all.extend(calls.map(|(call, index)| call_item(request, index, "completed", call)));
        Self(all)
    }

    /// The whole response.
    pub fn response(&self, echo: &Value, answer: &Answer) -> Value {
        let mut value = head(&answer.accepted, echo, "completed");
        if is_cut(&answer.finished) {
            value["status"] = Value::from("incomplete");
            value["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        value["output"] = Value::from(self.0.clone());
        value["usage"] = usage(answer);
        value
    }
}

fn usage(answer: &Answer) -> Value {
    let usage = answer.usage();
    let (prompt, generated) = (
        u64::from(usage.prompt_tokens),
        u64::from(usage.generated_tokens),
    );
    json!({
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": answer.thought_tokens},
        "total_tokens": prompt + generated,
    })
}

fn head(accepted: &Accepted, echo: &Value, status: &str) -> Value {
    let mut value = json!({
        "id": format!("resp_{}", accepted.request_id),
        "object": "response",
        "created_at": now(),
        "status": status,
        "model": accepted.model,
        "output": [],
        "usage": null,
    });
    if let (Value::Object(value), Value::Object(echo)) = (&mut value, echo) {
        value.extend(echo.clone());
    }
    value
}

/// What is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Message,
    Thought,
    Call(u32),
}

/// Tells a stream's events as theirs, each with its number.
pub(super) struct Telling {
    echo: Value,
    answer: Answer,
    number: u64,
    open: Option<Open>,
    /// Items that are told whole.
    items: Items,
    /// The text of the open message or thought.
    text: String,
}

impl Telling {
    pub fn new(echo: Value) -> Self {
        Self {
            echo,
            answer: Answer::default(),
            number: 0,
            open: None,
            items: Items::default(),
            text: String::new(),
        }
    }

    async fn say(&mut self, out: &Out, kind: &str, mut value: Value) -> Result<(), Gone> {
        value["type"] = Value::from(kind);
        value["sequence_number"] = Value::from(self.number);
        self.number += 1;
        out.event(kind, &value).await
    }

    fn index(&self) -> usize {
        self.items.0.len()
    }

    fn request(&self) -> String {
        self.answer.accepted.request_id.clone()
    }

    async fn close(&mut self, out: &Out) -> Result<(), Gone> {
        let (request, index) = (self.request(), self.index());
        let item = match self.open.take() {
            None => return Ok(()),
            Some(Open::Message) => {
                let text = std::mem::take(&mut self.text);
                let about = json!({"item_id": format!("msg_{request}"), "output_index": index, "content_index": 0});
                let mut done = about.clone();
                done["text"] = Value::from(text.as_str());
                done["logprobs"] = json!([]);
                self.say(out, "response.output_text.done", done).await?;
                let mut part = about;
                part["part"] = json!({"type": "output_text", "text": text, "annotations": []});
                self.say(out, "response.content_part.done", part).await?;
                message_item(&request, "completed", Some(&text))
            }
            Some(Open::Thought) => {
                let text = std::mem::take(&mut self.text);
                let done = json!({
                    "item_id": format!("rs_{request}_{index}"),
                    "output_index": index,
                    "content_index": 0,
                    "text": text,
                });
                self.say(out, "response.reasoning_text.done", done).await?;
                thought_item(&request, index, "completed", Some(&text))
            }
            Some(Open::Call(call)) => {
                let whole = self
                    .answer
                    .calls
                    .get(call as usize)
                    .cloned()
                    .unwrap_or_default();
                let done = json!({
                    "item_id": format!("fc_{request}_{call}"),
                    "output_index": index,
                    "name": whole.name,
                    "arguments": whole.arguments,
                });
                self.say(out, "response.function_call_arguments.done", done)
                    .await?;
                call_item(&request, call, "completed", &whole)
            }
        };
        let done = json!({"output_index": index, "item": item});
        self.items.0.push(item);
        self.say(out, "response.output_item.done", done).await
    }

    async fn open(&mut self, out: &Out, open: Open, name: &str) -> Result<(), Gone> {
        if self.open == Some(open) {
            return Ok(());
        }
        self.close(out).await?;
        self.open = Some(open);
        let (request, index) = (self.request(), self.index());
        let item = match open {
            Open::Message => message_item(&request, "in_progress", None),
            Open::Thought => thought_item(&request, index, "in_progress", None),
            Open::Call(call) => {
                let begun = Call {
                    name: name.to_owned(),
                    ..Call::default()
                };
                call_item(&request, call, "in_progress", &begun)
            }
        };
        let added = json!({"output_index": index, "item": item});
        self.say(out, "response.output_item.added", added).await?;
        if open == Open::Message {
            let part = json!({
                "item_id": format!("msg_{request}"),
                "output_index": index,
                "content_index": 0,
                "part": {"type": "output_text", "text": "", "annotations": []},
            });
            self.say(out, "response.content_part.added", part).await?;
        }
        Ok(())
    }

    async fn piece(&mut self, out: &Out, piece: Piece<'_>) -> Result<(), Gone> {
        let request = self.request();
        match piece {
            Piece::Content(text) => {
                self.open(out, Open::Message, "").await?;
                self.text.push_str(text);
                let delta = json!({
                    "item_id": format!("msg_{request}"),
                    "output_index": self.index(),
                    "content_index": 0,
                    "delta": text,
                    "logprobs": [],
                });
                self.say(out, "response.output_text.delta", delta).await
            }
            Piece::Reasoning(text) => {
                self.open(out, Open::Thought, "").await?;
                self.text.push_str(text);
                let index = self.index();
                let delta = json!({
                    "item_id": format!("rs_{request}_{index}"),
                    "output_index": index,
                    "content_index": 0,
                    "delta": text,
                });
                self.say(out, "response.reasoning_text.delta", delta).await
            }
            Piece::Call {
                index,
                name,
                arguments,
            } => {
                self.answer.call(index, name, arguments);
                self.open(out, Open::Call(index), name).await?;
                if arguments.is_empty() {
                    return Ok(());
                }
                let delta = json!({
                    "item_id": format!("fc_{request}_{index}"),
                    "output_index": self.index(),
                    "delta": arguments,
                });
                self.say(out, "response.function_call_arguments.delta", delta)
                    .await
            }
        }
    }
}

impl Tell for Telling {
    const FRAMING: Framing = Framing::Events;

    async fn tell(&mut self, out: &Out, (_, event): (u32, Event)) -> Result<(), Gone> {
        match event {
            Event::Accepted(accepted) => {
                let value = head(&accepted, &self.echo, "in_progress");
                self.answer.accepted = accepted;
                let begun = json!({ "response": value });
                self.say(out, "response.created", begun.clone()).await?;
                self.say(out, "response.in_progress", begun).await
            }
            Event::Delta(delta) => {
                self.answer.count(&delta);
                for piece in pieces(&delta, true) {
                    self.piece(out, piece).await?;
                }
                Ok(())
            }
            Event::Finished(finished) => {
                if self.items.0.is_empty() && self.open.is_none() {
                    self.open(out, Open::Message, "").await?;
                }
                self.close(out).await?;
                let kind = match is_cut(&finished) {
                    true => "response.incomplete",
                    false => "response.completed",
                };
                self.answer.finished = finished;
                let value = self.items.response(&self.echo, &self.answer);
                self.say(out, kind, json!({ "response": value })).await
            }
        }
    }

    async fn fail(&mut self, out: &Out, error: &Error) -> Result<(), Gone> {
        let mut value = head(&self.answer.accepted, &self.echo, "failed");
        let told = Flavor::Openai.body(error);
        value["error"] = json!({"code": "server_error", "message": told["error"]["message"]});
        self.say(out, "response.failed", json!({ "response": value }))
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thought_is_an_item_and_its_tokens_are_counted() {
        let answer = Answer {
            reasoning: "hm".to_owned(),
            content: "4".to_owned(),
            thought_tokens: 3,
            ..Answer::default()
        };
        let whole = Items::of(&answer).response(&json!({}), &answer);
        assert_eq!(whole["output"][0]["type"], "reasoning");
        assert_eq!(whole["output"][0]["content"][0]["text"], "hm");
        assert_eq!(whole["output"][1]["type"], "message");
        assert_eq!(
            whole["usage"]["output_tokens_details"]["reasoning_tokens"],
            3
        );
    }
}
