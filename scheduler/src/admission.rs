//! Who may come in: checks that need nothing but the request, and the count of those inside.

use std::sync::{Arc, Mutex, PoisonError};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{
        Chat, EmbedRequest, GenerateRequest, Prompt, Tool, ToolCall, grammar::Kind as Follow,
        prompt::Kind,
    },
};

use crate::access::{Held, Want};

fn at_most(what: &str, count: usize, limit: usize) -> Result<(), Error> {
    if count <= limit {
        return Ok(());
    }
    Err(Error::new(
        Reason::LimitExceeded,
        format!("{what}: {count} is more than the limit of {limit}"),
    )
    .with("limit", limit))
}

/// Checks a prompt's size. What it means is for a worker to find out.
///
/// # Errors
/// [`Reason::InvalidArgument`] for a missing prompt, [`Reason::LimitExceeded`] for a large one.
pub fn check_prompt(prompt: Option<&Prompt>) -> Result<(), Error> {
    match prompt.and_then(|p| p.kind.as_ref()) {
        None => Err(Error::new(
            Reason::InvalidArgument,
            "the request has no prompt; give text, token ids or chat messages",
        )),
        Some(Kind::Text(text)) => at_most("bytes of prompt", text.len(), limits::MAX_PROMPT_BYTES),
        Some(Kind::Ids(ids)) => at_most(
            "token ids in the prompt",
            ids.ids.len(),
            limits::MAX_PROMPT_TOKENS,
        ),
        Some(Kind::Chat(chat)) => {
            at_most(
                "chat messages",
                chat.messages.len(),
                limits::MAX_CHAT_MESSAGES,
            )?;
            for message in &chat.messages {
                let calls = message.tool_calls.len();
                at_most(
                    "tool calls in a chat message",
                    calls,
                    limits::MAX_TOOL_CALLS,
                )?;
            }
            check_tools(&chat.tools)?;
            at_most("bytes of chat", chat_bytes(chat), limits::MAX_PROMPT_BYTES)
        }
    }
}

/// Bytes of all that a chat says.
fn chat_bytes(chat: &Chat) -> usize {
    let calls = |call: &ToolCall| call.id.len() + call.name.len() + call.arguments.len();
    let messages = chat.messages.iter().map(|m| {
        let own = m.role.len() + m.content.len() + m.reasoning.len();
        let about = m.tool_call_id.len() + m.name.len();
        own + about + m.tool_calls.iter().map(calls).sum::<usize>()
    });
    let tools = chat.tools.iter().map(tool_bytes);
    messages.sum::<usize>() + tools.sum::<usize>() + chat.template_arguments.len()
}

fn tool_bytes(tool: &Tool) -> usize {
    tool.name.len() + tool.description.len() + tool.parameters.len()
}

/// Checks tools' number and their names, by which a model's calls are told apart.
fn check_tools(tools: &[Tool]) -> Result<(), Error> {
    at_most("tools", tools.len(), limits::MAX_TOOLS)?;
    for tool in tools {
        let name = tool.name.as_str();
        at_most(
            "characters of a tool's name",
            name.len(),
            limits::MAX_TOOL_NAME,
        )?;
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || !name.chars().all(plain) {
            let what = format!("the tool's name {name:?} is not of letters, digits, '-' and '_'");
            return Err(Error::new(Reason::InvalidArgument, what));
        }
    }
    Ok(())
}

/// Checks the size of a tenant's name.
fn check_tenant(tenant: &str) -> Result<(), Error> {
    at_most(
        "characters of the tenant",
        tenant.chars().count(),
        limits::MAX_TENANT,
    )
}

/// Checks the sizes of a request for embeddings.
///
/// # Errors
/// As [`check_request`].
pub fn check_embed(request: &EmbedRequest) -> Result<(), Error> {
    at_most("prompts", request.prompts.len(), limits::MAX_EMBED_PROMPTS)?;
    check_tenant(&request.tenant)?;
    let prompts = request.prompts.iter();
    prompts.map(Some).try_for_each(check_prompt)
}

/// Checks the sizes of a request. Values (such as a temperature) are the worker's to check.
///
/// # Errors
/// [`Reason::LimitExceeded`] or [`Reason::InvalidArgument`], naming the field.
pub fn check_request(request: &GenerateRequest) -> Result<(), Error> {
    check_prompt(request.prompt.as_ref())?;
    check_tenant(&request.tenant)?;
    at_most("stop strings", request.stop.len(), limits::MAX_STOP_STRINGS)?;
    if let Some(grammar) = &request.grammar {
        let text = match &grammar.kind {
            Some(Follow::JsonSchema(text) | Follow::Regex(text) | Follow::Lark(text)) => text.len(),
            Some(Follow::ToolCalls(calls)) => {
                check_tools(&calls.tools)?;
                calls.tools.iter().map(tool_bytes).sum()
            }
            Some(Follow::JsonObject(_)) | None => 0,
        };
        at_most("bytes of grammar", text, limits::MAX_GRAMMAR_BYTES)?;
    }
    for stop in &request.stop {
        at_most("bytes of a stop string", stop.len(), limits::MAX_STOP_BYTES)?;
    }
    at_most(
        "stop tokens",
        request.stop_tokens.len(),
        limits::MAX_STOP_TOKENS,
    )?;
    at_most(
        "top_logprobs",
        request.top_logprobs as usize,
        limits::MAX_TOP_LOGPROBS as usize,
    )?;
    if let Some(sampling) = &request.sampling {
        at_most(
            "logit biases",
            sampling.logit_bias.len(),
            limits::MAX_LOGIT_BIASES,
        )?;
    }
    if let Some(resume) = &request.resume {
        at_most(
            "generated ids to resume from",
            resume.generated_ids.len(),
            limits::MAX_PROMPT_TOKENS,
        )?;
    }
    Ok(())
}

/// Who is inside.
#[derive(Debug, Default)]
struct Inside {
    count: usize,
    /// Of their prompts.
    bytes: usize,
    draining: bool,
}

/// The door: counts requests, and closes for the drain.
#[derive(Clone, Debug)]
pub struct Admission {
    limit: usize,
    inside: Arc<Mutex<Inside>>,
    changed: tokio::sync::watch::Sender<()>,
}

impl Admission {
    /// A door for `limit` requests at once.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            inside: Arc::default(),
            changed: tokio::sync::watch::Sender::new(()),
        }
    }

    fn inside(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a request with [so large](prompt_bytes) a prompt in until the permit is dropped.
    ///
    /// # Errors
    /// [`Reason::Draining`] or [`Reason::Overloaded`].
    pub fn admit(&self, bytes: usize) -> Result<Permit, Error> {
        let mut inside = self.inside();
        if inside.draining {
            return Err(draining());
        }
        if inside.count >= self.limit {
            return Err(Error::new(
                Reason::Overloaded,
                format!(
                    "{} requests are being served already; try again later",
                    self.limit
                ),
            ));
        }
        let bytes = if bytes > limits::SMALL_PROMPT_BYTES {
            bytes
        } else {
            0
        };
        let held = inside.bytes.saturating_add(bytes);
        if bytes > 0 && held > limits::MAX_PROMPTS_BYTES {
            let what = format!(
                "requests with {} bytes of prompts are being served already, of at most {}; try again later",
                inside.bytes,
                limits::MAX_PROMPTS_BYTES
            );
            return Err(Error::new(Reason::Overloaded, what));
        }
        inside.count += 1;
        inside.bytes = held;
        Ok(Permit {
            door: self.clone(),
            bytes,
            _tenants: None,
        })
    }

    /// Lets nobody in from now on.
    pub fn close(&self) {
        self.inside().draining = true;
    }

    /// Whether nobody is let in any more.
    pub fn is_closed(&self) -> bool {
        self.inside().draining
    }

    /// Requests inside.
    pub fn count(&self) -> usize {
        self.inside().count
    }

    /// Waits until nobody is inside.
    pub async fn empty(&self) {
        let mut changed = self.changed.subscribe();
        while self.count() > 0 {
            // Never an error: `self` holds the sender.
            let _ = changed.changed().await;
        }
    }
}

/// What every request is told while the scheduler drains.
pub fn draining() -> Error {
    Error::new(
        Reason::Draining,
        "the scheduler is shutting down; send the request again once it is back",
    )
}

/// A place inside, freed on drop, and what its tenant has by it.
#[derive(Debug)]
pub struct Permit {
    door: Admission,
    /// Of its prompt, as they are counted.
    bytes: usize,
    _tenants: Option<Held>,
}

impl Permit {
    /// With what it takes of what its tenant may have.
    #[must_use]
    pub fn with(self, held: Held) -> Self {
        // Not by an update of the struct, which would give up the place.
        let mut permit = self;
        permit._tenants = Some(held);
        permit
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut inside = self.door.inside();
        inside.count = inside.count.saturating_sub(1);
        inside.bytes = inside.bytes.saturating_sub(self.bytes);
        drop(inside);
        self.door.changed.send_replace(());
    }
}

/// Bytes of text that are counted as one token before a worker has seen them.
const BYTES_PER_TOKEN: u64 = 4;

/// Tokens that a prompt is counted for: its ids, or by the length of its text.
fn prompt_tokens(prompt: Option<&Prompt>) -> u64 {
    let of_text = |bytes: usize| (bytes as u64).div_ceil(BYTES_PER_TOKEN);
    match prompt.and_then(|p| p.kind.as_ref()) {
        None => 0,
        Some(Kind::Text(text)) => of_text(text.len()),
        Some(Kind::Ids(ids)) => ids.ids.len() as u64,
        Some(Kind::Chat(chat)) => of_text(chat_bytes(chat)),
    }
}

/// Bytes that prompts take in memory.
pub fn prompt_bytes<'a>(prompts: impl IntoIterator<Item = Option<&'a Prompt>>) -> usize {
    let bytes = |prompt: Option<&Prompt>| match prompt.and_then(|p| p.kind.as_ref()) {
        None => 0,
        Some(Kind::Text(text)) => text.len(),
        Some(Kind::Ids(ids)) => size_of_val(&ids.ids[..]),
        Some(Kind::Chat(chat)) => chat_bytes(chat),
    };
    prompts.into_iter().map(bytes).sum()
}

/// What a request takes of what its tenant may have at once: a place, its prompt's tokens and those that it may
/// generate. `context` is its model's.
pub fn wanted(request: &GenerateRequest, context: Option<u32>) -> Want {
    let prompt = prompt_tokens(request.prompt.as_ref());
    let context = context.map_or(u64::MAX, u64::from);
    let more = match request.max_tokens {
        0 => context.saturating_sub(prompt),
        most => u64::from(most),
    };
    Want {
        requests: 1,
        tokens: prompt.saturating_add(more).min(context.max(prompt)),
        ..Want::default()
    }
}

/// The same of prompts that nothing is generated for.
pub fn wanted_for<'a>(prompts: impl IntoIterator<Item = Option<&'a Prompt>>) -> Want {
    let prompts = prompts.into_iter().map(prompt_tokens);
    Want {
        requests: 1,
        tokens: prompts.fold(0, u64::saturating_add),
        ..Want::default()
    }
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::{ChatMessage, Sampling, TokenIds};

    use super::*;

    fn request(kind: Kind) -> GenerateRequest {
        GenerateRequest {
            prompt: Some(Prompt { kind: Some(kind) }),
            ..GenerateRequest::default()
        }
    }

    #[test]
    fn sizes_are_checked_before_anything_is_parsed() {
        let ok = request(Kind::Text("x".into()));
        assert_eq!(check_request(&ok), Ok(()));
        let many = vec![ChatMessage::default(); limits::MAX_CHAT_MESSAGES + 1];
        let long = ChatMessage {
            role: "user".into(),
            content: "x".repeat(limits::MAX_PROMPT_BYTES),
            ..ChatMessage::default()
        };
        for bad in [
            request(Kind::Text("x".repeat(limits::MAX_PROMPT_BYTES + 1))),
            request(Kind::Ids(TokenIds {
                ids: vec![0; limits::MAX_PROMPT_TOKENS + 1],
            })),
            request(Kind::Chat(Chat {
                messages: many,
                ..Chat::default()
            })),
            request(Kind::Chat(Chat {
                messages: vec![long],
                ..Chat::default()
            })),
            GenerateRequest {
                stop: vec!["x".repeat(limits::MAX_STOP_BYTES + 1)],
                ..ok.clone()
            },
            GenerateRequest {
                top_logprobs: u32::MAX,
                ..ok.clone()
            },
            GenerateRequest {
                tenant: "x".repeat(limits::MAX_TENANT + 1),
                ..ok.clone()
            },
            GenerateRequest {
                sampling: Some(Sampling {
                    logit_bias: vec![Default::default(); limits::MAX_LOGIT_BIASES + 1],
                    ..Sampling::default()
                }),
                ..ok
            },
        ] {
            let error = check_request(&bad).unwrap_err();
            assert_eq!(error.reason(), Reason::LimitExceeded);
        }
        let none = GenerateRequest::default();
        assert_eq!(
            check_request(&none).unwrap_err().reason(),
            Reason::InvalidArgument
        );
    }

    #[test]
    fn embeddings_have_the_same_bounds() {
        let prompt = |text: String| Prompt {
            kind: Some(Kind::Text(text)),
        };
        let of = |prompts| EmbedRequest {
            prompts,
            ..EmbedRequest::default()
        };
        assert_eq!(check_embed(&of(vec![])), Ok(()));
        assert_eq!(
            check_embed(&of(vec![prompt("x".into()); limits::MAX_EMBED_PROMPTS])),
            Ok(())
        );
        for (prompts, reason) in [
            (
                vec![prompt("x".into()); limits::MAX_EMBED_PROMPTS + 1],
                Reason::LimitExceeded,
            ),
            (
                vec![prompt("x".repeat(limits::MAX_PROMPT_BYTES + 1))],
                Reason::LimitExceeded,
            ),
            (vec![Prompt::default()], Reason::InvalidArgument),
        ] {
            assert_eq!(check_embed(&of(prompts)).unwrap_err().reason(), reason);
        }
    }

    #[test]
    fn large_prompts_are_let_in_as_long_as_there_is_room_for_them() {
        let door = Admission::new(1000);
        let largest = limits::MAX_PROMPT_BYTES;
        let count = limits::MAX_PROMPTS_BYTES / largest;
        let mut inside: Vec<_> = (0..count).map(|_| door.admit(largest).unwrap()).collect();
        let error = door.admit(largest).unwrap_err();
        assert_eq!(error.reason(), Reason::Overloaded);
        assert!(error.message().contains("bytes of prompts"), "{error}");
        // Small ones need none.
        let small = door.admit(limits::SMALL_PROMPT_BYTES).unwrap();
        assert_eq!(door.count(), count + 1);
        inside.pop();
        drop(door.admit(largest).unwrap());
        inside.push(door.admit(largest).unwrap());
        assert!(door.admit(largest).is_err());
        drop((small, inside));
        assert_eq!(door.inside().bytes, 0);
    }

    #[test]
    fn a_request_counts_for_its_prompt_and_what_it_may_generate() {
        let ids = |n: usize| Kind::Ids(TokenIds { ids: vec![1; n] });
        let of = |kind, max_tokens, context| {
            let request = GenerateRequest {
                max_tokens,
                ..request(kind)
            };
            wanted(&request, context).tokens
        };
        assert_eq!(of(ids(10), 5, Some(100)), 15);
        assert_eq!(of(ids(10), 0, Some(100)), 100);
        assert_eq!(of(ids(10), u32::MAX, Some(100)), 100);
        assert_eq!(of(ids(200), 5, Some(100)), 200);
        assert_eq!(of(Kind::Text("x".repeat(9)), 5, Some(100)), 8);
        assert_eq!(of(ids(1), 0, None), u64::MAX);
    }

    #[test]
    fn the_door_counts_and_closes() {
        let door = Admission::new(2);
        let a = door.admit(0).unwrap();
        let reason = |r: Result<Permit, Error>| r.unwrap_err().reason();
        let b = door.admit(0).unwrap();
        assert_eq!(reason(door.admit(0)), Reason::Overloaded);
        drop(a);
        let c = door.admit(0).unwrap();
        door.close();
        assert_eq!(reason(door.admit(0)), Reason::Draining);
        assert_eq!(door.count(), 2);
        drop((b, c));
        assert_eq!(door.count(), 0);
    }

    #[tokio::test]
    async fn the_drain_waits_for_the_last_to_leave() {
        let door = Admission::new(2);
        let permit = door.admit(0).unwrap();
        let waiting = tokio::spawn({
            let door = door.clone();
            async move { door.empty().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(permit);
        waiting.await.unwrap();
    }
}
