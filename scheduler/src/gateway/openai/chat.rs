//! Chats.

use axum::{body::Body, extract::State, http::Extensions, response::Response};
use hotcell_proto::{
    error::Error,
    v1::{
        Chat, ChatMessage, Delta, Finished, GenerateRequest, Prompt, Usage, generate_event::Event,
        prompt::Kind,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    Head, answered, failed, finish_reason, json_response, logprobs,
    options::{Content, OneOrMany, Options, at_most, refused, text_of},
    tools::{self, CallSpec, CallView, ToolChoice, ToolSpec},
    usage,
};
use crate::{
    access::Caller,
    gateway::{
        ask::{self, Answer, Branches, Piece, Tell, call_id, complete, pieces, stream},
        body,
        sse::{Framing, Gone, Out},
    },
    service::Shared,
};

/// A request for chats.
#[derive(Debug, Deserialize)]
struct Request {
    #[serde(default)]
    model: String,
    messages: Vec<Message>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    tools: Option<Vec<ToolSpec>>,
    tool_choice: Option<ToolChoice>,
    parallel_tool_calls: Option<bool>,
    /// Further variables of the model's template.
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<String>,
    // What would change the answer and is not here.
    functions: Option<Value>,
    function_call: Option<Value>,
    audio: Option<Value>,
    web_search_options: Option<Value>,
    #[serde(flatten)]
    options: Options,
}

#[derive(Debug, Deserialize)]
struct Message {
    role: String,
    content: Option<Content>,
    name: Option<String>,
    tool_calls: Option<Vec<CallSpec>>,
    tool_call_id: Option<String>,
    #[serde(alias = "reasoning")]
    reasoning_content: Option<String>,
}

fn message(message: Message) -> Result<ChatMessage, Error> {
    // A name of OpenAI's for what templates know as the system.
    let role = match message.role.as_str() {
        "developer" => "system".to_owned(),
        _ => message.role,
    };
    let calls = message.tool_calls.unwrap_or_default();
    Ok(ChatMessage {
        role,
        content: text_of(message.content)?,
        tool_calls: calls.into_iter().map(Into::into).collect(),
        tool_call_id: message.tool_call_id.unwrap_or_default(),
        name: message.name.unwrap_or_default(),
        reasoning: message.reasoning_content.unwrap_or_default(),
    })
}

/// What a request asks for, and how it wants to be told.
struct Asked {
    request: GenerateRequest,
    n: u32,
    stream: bool,
    one_call: bool,
    include_usage: bool,
}

fn read(request: Request) -> Result<Asked, Error> {
    for (field, given, instead) in [
        ("functions", &request.functions, "give tools"),
        ("function_call", &request.function_call, "give tool_choice"),
        ("audio", &request.audio, "leave it out"),
        (
            "web_search_options",
            &request.web_search_options,
            "leave it out",
        ),
    ] {
        if given.is_some() {
            return Err(refused(
                field,
                format!("{field} is not served here; {instead}"),
            ));
        }
    }
    let options = request.options;
    let told = tools::tools(request.tools.unwrap_or_default())?;
    let one_call = request.parallel_tool_calls == Some(false);
    let (told, must) = tools::choose(request.tool_choice.as_ref(), told, one_call)?;
    let grammar = match (options.grammar()?, must) {
        (Some(_), Some(_)) => {
            let why = "the text cannot be both a call of a tool and follow response_format";
            return Err(refused("response_format", why));
        }
        (grammar, must) => must.or(grammar),
    };
    let messages = request.messages.into_iter().map(message);
    let mut told_template = request.reasoning_effort.as_deref().map(ask::effort);
    if let Some(own) = request.chat_template_kwargs {
        told_template.get_or_insert_default().extend(own);
    }
    let arguments = told_template.map(|all| Value::from(all).to_string());
    let chat = Chat {
        messages: messages.collect::<Result<_, _>>()?,
        tools: told,
        template_arguments: arguments.unwrap_or_default(),
    };
    let wants = request.logprobs.unwrap_or(false);
    let n = options.n.unwrap_or(1);
    Ok(Asked {
        n,
        one_call,
        stream: options.streams(),
        include_usage: options.includes_usage(),
        request: GenerateRequest {
            model: request.model,
            prompt: Some(Prompt {
                kind: Some(Kind::Chat(chat)),
            }),
            sampling: Some(options.sampling()?),
            max_tokens: at_most("max_completion_tokens", request.max_completion_tokens)?
                .or(at_most("max_tokens", request.max_tokens)?)
                .unwrap_or(0),
            seed: options.seed(),
            priority: options.priority()?,
            ignore_eos: options.ignore_eos.unwrap_or(false),
            logprobs: wants,
            top_logprobs: if wants {
                request.top_logprobs.unwrap_or(0)
            } else {
                0
            },
            grammar,
            stop_tokens: options.stop_token_ids.unwrap_or_default(),
            stop: options.stop.map(OneOrMany::into_vec).unwrap_or_default(),
            parse_output: true,
            ..GenerateRequest::default()
        },
    })
}

/// `POST /v1/chat/completions`.
pub(super) async fn chat(
    State(shared): State<Shared>,
    extensions: Extensions,
    body: Body,
) -> Response {
    answered(run(&shared, &Caller::of(&extensions), body).await)
}

async fn run(shared: &Shared, caller: &Caller, body: Body) -> Result<Response, Error> {
    let asked = read(body::json(body).await?)?;
    let branches = Branches::begin(shared, asked.request, asked.n, None, caller)?;
    let branches = branches.one_call(asked.one_call);
    if !asked.stream {
        let answers = complete(branches, asked.n as usize, true).await?;
        return Ok(json_response(whole(&answers)));
    }
    let telling = Telling::new(asked.n, asked.include_usage);
    stream(branches, telling).await
}

fn whole(answers: &[Answer]) -> Value {
    let accepted = answers.first().map(|a| a.accepted.clone());
    let head = Head::of((KIND, WHOLE), &accepted.unwrap_or_default());
    let choices = answers.iter().enumerate().map(|(index, answer)| {
        let calls = !answer.calls.is_empty();
        let content = match calls && answer.content.is_empty() {
            true => Value::Null,
            false => Value::from(answer.content.as_str()),
        };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !answer.reasoning.is_empty() {
            message["reasoning_content"] = Value::from(answer.reasoning.as_str());
        }
        if calls {
            let calls: Vec<_> = answer.calls.iter().map(CallView::from).collect();
            message["tool_calls"] = json!(calls);
        }
        let told = !answer.logprobs.is_empty();
        json!({
            "index": index,
            "message": message,
            "logprobs": told.then(|| logprobs::chat(&answer.logprobs)),
            "finish_reason": finish_reason(&answer.finished, calls),
        })
    });
    let mut value = head.json(choices.collect());
    value["usage"] = usage(answers.iter().map(Answer::usage));
    value
}

/// What ids begin with.
const KIND: &str = "chatcmpl";
/// What an answer is called.
const WHOLE: &str = "chat.completion";
/// What a piece of a stream is called.
const CHUNK: &str = "chat.completion.chunk";

#[derive(Serialize)]
struct ChoiceView<'a> {
    index: u32,
    delta: DeltaView<'a>,
    logprobs: Option<Value>,
    finish_reason: Option<&'a str>,
}

/// What is new of a message.
#[derive(Serialize)]
#[serde(untagged)]
enum DeltaView<'a> {
    Content { content: &'a str },
    Reasoning { reasoning_content: &'a str },
    Other(Value),
}

/// What was told of one continuation.
#[derive(Clone, Default)]
struct Told {
    request: String,
    calls: bool,
    usage: Usage,
}

/// Tells a stream's events as chunks.
struct Telling {
    head: Option<Head>,
    told: Vec<Told>,
    include_usage: bool,
}

impl Telling {
    fn new(n: u32, include_usage: bool) -> Self {
        Self {
            head: None,
            told: vec![Told::default(); n as usize],
            include_usage,
        }
    }

    fn chunk(&self, choices: Value) -> Value {
        let Some(head) = &self.head else {
            return Value::Null;
        };
        let mut value = head.json(choices);
        if self.include_usage {
            value["usage"] = Value::Null;
        }
        value
    }

    async fn choice(
        &self,
        out: &Out,
        index: u32,
        delta: DeltaView<'_>,
        logprobs: Option<Value>,
        finish_reason: Option<&str>,
    ) -> Result<(), Gone> {
        let Some(head) = &self.head else {
            return Ok(());
        };
        let choice = ChoiceView {
            index,
            delta,
            logprobs,
            finish_reason,
        };
        head.piece(out, &choice, self.include_usage).await
    }

    async fn delta(&mut self, out: &Out, index: u32, delta: &Delta) -> Result<(), Gone> {
        let mut odds = (!delta.logprobs.is_empty()).then(|| logprobs::chat(&delta.logprobs));
        for piece in pieces(delta, true) {
            let value = match piece {
                Piece::Content(content) => DeltaView::Content { content },
                Piece::Reasoning(reasoning_content) => DeltaView::Reasoning { reasoning_content },
                Piece::Call {
                    index: call,
                    name,
                    arguments,
                } => {
                    let Some(told) = self.told.get_mut(index as usize) else {
                        continue;
                    };
                    told.calls = true;
                    let mut function = json!({ "arguments": arguments });
                    let mut value = json!({ "index": call });
                    if !name.is_empty() {
                        function["name"] = Value::from(name);
                        value["id"] = Value::from(call_id(&told.request, call));
                        value["type"] = Value::from("function");
                    }
                    value["function"] = function;
                    DeltaView::Other(json!({ "tool_calls": [value] }))
                }
            };
            self.choice(out, index, value, odds.take(), None).await?;
        }
        // Of tokens whose text is not told yet.
        match odds {
            Some(odds) => {
                let nothing = DeltaView::Other(json!({}));
                self.choice(out, index, nothing, Some(odds), None).await
            }
            None => Ok(()),
        }
    }

    async fn finished(&mut self, out: &Out, index: u32, finished: &Finished) -> Result<(), Gone> {
        let Some(told) = self.told.get_mut(index as usize) else {
            return Ok(());
        };
        told.usage = finished.usage.unwrap_or_default();
        let reason = finish_reason(finished, told.calls);
        let nothing = DeltaView::Other(json!({}));
        self.choice(out, index, nothing, None, Some(reason)).await
    }
}

impl Tell for Telling {
    const FRAMING: Framing = Framing::Events;

    async fn tell(&mut self, out: &Out, (index, event): (u32, Event)) -> Result<(), Gone> {
        match event {
            Event::Accepted(accepted) => {
                self.head
                    .get_or_insert_with(|| Head::of((KIND, CHUNK), &accepted));
                if let Some(told) = self.told.get_mut(index as usize) {
                    told.request = accepted.request_id;
                }
                let delta = DeltaView::Other(json!({"role": "assistant", "content": ""}));
                self.choice(out, index, delta, None, None).await
            }
            Event::Delta(delta) => self.delta(out, index, &delta).await,
            Event::Finished(finished) => self.finished(out, index, &finished).await,
        }
    }

    async fn fail(&mut self, out: &Out, error: &Error) -> Result<(), Gone> {
        out.data(&failed(error)).await
    }

    async fn end(&mut self, out: &Out) -> Result<(), Gone> {
        if self.include_usage {
            let mut value = self.chunk(json!([]));
            value["usage"] = usage(self.told.iter().map(|told| told.usage));
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
    fn a_request_is_read_as_its_client_means_it() {
        let asked = asked(json!({
            "model": "m",
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": null, "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "4"},
            ],
            "max_tokens": 5, "max_completion_tokens": 6, "stop": "x", "n": 2,
            "logprobs": true, "top_logprobs": 3, "stream": true,
            "stream_options": {"include_usage": true}, "unknown": {"of": "others"},
        }))
        .unwrap();
        assert!(asked.stream && asked.include_usage && asked.n == 2);
        let request = asked.request;
        assert_eq!((request.max_tokens, request.top_logprobs), (6, 3));
        assert_eq!(request.stop, ["x"]);
        let Some(Kind::Chat(chat)) = request.prompt.unwrap().kind else {
            panic!("no chat");
        };
        assert_eq!(chat.messages[0].role, "system");
        assert_eq!(chat.messages[1].content, "hi");
        assert_eq!(chat.messages[2].tool_calls[0].name, "f");
        assert_eq!(chat.messages[3].tool_call_id, "c");
    }

    #[test]
    fn how_much_to_think_is_told_to_the_template() {
        let told = |value: Value| match asked(value).unwrap().request.prompt.unwrap().kind {
            Some(Kind::Chat(chat)) => serde_json::from_str::<Value>(&chat.template_arguments),
            other => panic!("{other:?}"),
        };
        let none = told(json!({"messages": [], "reasoning_effort": "none"})).unwrap();
        assert_eq!(none, json!({"enable_thinking": false}));
        let own = told(json!({
            "messages": [], "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": false},
        }));
        assert_eq!(
            own.unwrap(),
            json!({"enable_thinking": false, "reasoning_effort": "low"})
        );
    }

    #[test]
    fn what_would_change_the_answer_is_read_or_refused() {
        for field in ["functions", "function_call", "audio", "web_search_options"] {
            let error = asked(json!({"messages": [], field: {}})).err().unwrap();
            assert_eq!(error.get("field"), Some(field));
            assert!(asked(json!({"messages": [], field: null})).is_ok());
        }
        for field in ["max_tokens", "max_completion_tokens"] {
            let error = asked(json!({"messages": [], field: 0})).err().unwrap();
            assert_eq!(error.get("field"), Some(field));
        }
    }

    #[test]
    fn a_text_is_a_call_or_follows_a_format() {
        let both = asked(json!({
            "messages": [],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
        }));
        assert!(both.is_err());
    }
}
