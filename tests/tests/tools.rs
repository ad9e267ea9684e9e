//! Calls of tools: forced ones are calls that the reader of the model's family understands, with arguments as their schema wants
//! them, and what a text means is said once each, whenever the worker dies.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{fs, path::Path};

use hotcell_client::{
    Client, Event, GenerateOptions, Generation, Grammar,
    v1::{self, FinishReason, output_part::Kind, tokens_client::TokensClient},
};
use hotcell_tests::{
    cluster::{Cluster, all_have, kjv, repository, signal_pid},
    synthetic::{self, Measures},
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tonic::{Code, transport::Channel};

const PROMPT: &str = "In the beginning";

/// Templates that say to which family a model belongs, and what a first call begins with in the text.
const FAMILIES: [(&str, &str, &str); 5] = [
    (
        "tagged",
        "{{ '<tool_call>' }}",
        "<tool_call>\n{\"name\": \"",
    ),
    ("python", "{{ '<|python_tag|>' }}", "{\"name\": \""),
    ("list", "{{ '[TOOL_CALLS]' }}", "[TOOL_CALLS][{\"name\": \""),
    ("named", "{{ '[TOOL_CALLS][ARGS]' }}", "[TOOL_CALLS]"),
    ("bare", "{{ messages }}", "{\"name\": \""),
];

fn with_template(folder: &Path, template: &str) {
    fs::write(folder.join("chat_template.jinja"), template).unwrap();
}

/// The bundled model, as one of a family.
fn model(template: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in fs::read_dir(kjv()).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    with_template(folder.path(), template);
    folder
}

/// A model of random weights whose marks are special tokens, which are in no text.
fn special() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let measures = Measures {
        hidden: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        inner: 128,
        vocab: 4098,
        context: 1024,
        tied: true,
    };
    synthetic::write(folder.path(), &measures).unwrap();
    let edit = |name: &str, change: &dyn Fn(&mut Value)| {
        let path = folder.path().join(name);
        let mut file = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut file);
        fs::write(&path, file.to_string()).unwrap();
    };
    edit("config.json", &|config| config["eos_token_id"] = json!(1));
    edit("tokenizer.json", &|tokenizer| {
        for (id, mark) in [(4096, "[TOOL_CALLS]"), (4097, "[ARGS]")] {
            let token = json!({
                "id": id, "content": mark, "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false,
            });
            tokenizer["added_tokens"]
                .as_array_mut()
                .unwrap()
                .push(token);
        }
    });
    with_template(folder.path(), "{{ '[TOOL_CALLS][ARGS]' }}");
    folder
}

const CITIES: [&str; 2] = ["Ur", "Zoar \"the }\" little"];

fn tools() -> Vec<v1::Tool> {
    let weather = json!({
        "type": "object",
        "properties": {
            "city": {"enum": CITIES},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "days"],
        "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false},
    });
    let nothing =
        json!({"additionalProperties": false, "x-guidance": {"whitespace_flexible": false}});
    let tool = |name: &str, parameters: Value| v1::Tool {
        name: name.to_owned(),
        description: String::new(),
        parameters: parameters.to_string(),
    };
    vec![tool("get_weather", weather), tool("now", nothing)]
}

/// Whether a call is one of [`tools`], by a reader that knows nothing of grammars.
fn is_valid((name, arguments): &(String, String)) -> bool {
    let Ok(Value::Object(arguments)) = serde_json::from_str(arguments) else {
        return false;
    };
    let city = arguments.get("city").and_then(Value::as_str);
    let days = arguments.get("days").and_then(Value::as_u64);
    match name.as_str() {
        "get_weather" => {
            let known = city.is_some_and(|c| CITIES.contains(&c));
            arguments.len() == 2 && known && days.is_some_and(|d| (1..=7).contains(&d))
        }
        "now" => arguments.is_empty(),
        _ => false,
    }
}

/// What a stream said.
#[derive(Clone, Debug, Default, PartialEq)]
struct Said {
    ids: Vec<u32>,
    text: String,
    content: String,
    reasoning: String,
    calls: Vec<(String, String)>,
    finished: Option<v1::Finished>,
}

impl Said {
    fn add(&mut self, delta: v1::Delta) {
        self.ids.extend(delta.token_ids);
        self.text.push_str(&delta.text);
        for part in delta.parts {
            match part.kind.unwrap() {
                Kind::Content(text) => self.content.push_str(&text),
                Kind::Reasoning(text) => self.reasoning.push_str(&text),
                Kind::ToolCall(call) => {
                    if !call.name.is_empty() {
                        self.calls.push((call.name, String::new()));
                    }
                    assert_eq!(call.index as usize + 1, self.calls.len());
                    self.calls.last_mut().unwrap().1.push_str(&call.arguments);
                }
            }
        }
    }

    /// Reads until so many tokens have come, or to the end.
    async fn read(&mut self, stream: &mut Generation, tokens: usize) {
        while self.ids.len() < tokens && self.finished.is_none() {
            match stream.next().await.unwrap().unwrap() {
                Event::Delta(delta) => self.add(delta),
                Event::Finished(finished) => self.finished = Some(finished),
                Event::Accepted(_) => {}
            }
        }
    }

    /// All but what a death changes.
    fn rest(&self) -> Said {
        Said {
            finished: None,
            ..self.clone()
        }
    }
}

fn options(seed: u64, grammar: Option<Grammar>, max_tokens: u32) -> GenerateOptions {
    GenerateOptions {
        sampling: v1::Sampling {
            temperature: Some(1.0),
            ..v1::Sampling::default()
        },
        seed: Some(seed),
        max_tokens,
        grammar,
        parse_output: true,
        ..GenerateOptions::default()
    }
}

fn forced(seed: u64) -> GenerateOptions {
    called(seed, false)
}

fn called(seed: u64, single: bool) -> GenerateOptions {
    let calls = v1::ToolCalls {
        tools: tools(),
        single,
    };
    options(seed, Some(Grammar::ToolCalls(calls)), 200)
}

async fn whole(client: &Client, options: GenerateOptions) -> Said {
    let mut stream = client.generate(PROMPT, options).await.unwrap();
    let mut said = Said::default();
    said.read(&mut stream, usize::MAX).await;
    said
}

async fn cluster(model: &Path) -> Cluster {
    let arguments = [
        "--restart-budget",
        "1000",
        "--restart-backoff",
        "1ms",
        "--restart-backoff-max",
        "5ms",
    ];
    let cluster = Cluster::with_model("m", model, &arguments).await.unwrap();
    cluster.workers(all_have("m")).await.unwrap();
    cluster
}

/// Calls are valid, the last one too if the text came to its end, and all the text is calls.
fn check(said: &Said, seed: u64) {
    let complete = said.finished.as_ref().unwrap().reason() == FinishReason::EndToken;
    let sure = said.calls.len() - usize::from(!complete);
    assert!(
        sure > 0 && said.calls[..sure].iter().all(is_valid),
        "seed {seed}: {said:?}"
    );
    // A text cut off in the beginning of a call is no call yet.
    assert!(
        said.reasoning.is_empty() && (!complete || said.content.is_empty()),
        "{said:?}"
    );
}

#[tokio::test]
async fn a_single_call_is_one_in_every_family() {
    let mut several = 0;
    for (name, template, _) in FAMILIES {
        let folder = model(template);
        let cluster = cluster(folder.path()).await;
        let client = cluster.client().await.unwrap();
        let mut complete = 0;
        for seed in 0..8 {
            let said = whole(&client, called(seed, true)).await;
            let ended = said.finished.as_ref().unwrap().reason() == FinishReason::EndToken;
            complete += usize::from(ended);
            assert!(
                said.calls.len() == 1 && (!ended || is_valid(&said.calls[0])),
                "{name}, seed {seed}: {said:?}"
            );
            several += usize::from(whole(&client, called(seed, false)).await.calls.len() > 1);
        }
        assert!(complete > 0, "{name}");
    }
    // Or else nothing was asked of it.
    assert!(several > 0);
}

#[tokio::test]
async fn forced_calls_are_calls_of_the_tools_in_every_family() {
    for (name, template, begin) in FAMILIES {
        let folder = model(template);
        let cluster = cluster(folder.path()).await;
        let client = cluster.client().await.unwrap();
        let mut complete = 0;
        for seed in 0..4 {
            let said = whole(&client, forced(seed)).await;
            assert!(said.text.starts_with(begin), "{name}: {}", said.text);
            check(&said, seed);
            complete += usize::from(said.content.is_empty());
        }
        assert!(complete > 0, "{name}");
    }
}

#[tokio::test]
async fn marks_that_are_special_tokens_are_in_no_text_and_make_calls_all_the_same() {
    let folder = special();
    let cluster = cluster(folder.path()).await;
    let client = cluster.client().await.unwrap();
    for seed in 0..4 {
        let said = whole(&client, forced(seed)).await;
        assert_eq!(said.ids[0], 4096);
        assert!(
            said.text.starts_with("now{") || said.text.starts_with("get_weather{"),
            "{}",
            said.text
        );
        check(&said, seed);
    }
}

#[tokio::test]
async fn a_chats_tools_are_told_to_its_template_and_unreadable_ones_are_named() {
    let templates = fs::read(repository().join("tests/golden/templates/tools.json")).unwrap();
    let templates: Value = serde_json::from_slice(&templates).unwrap();
    let folder = model(templates["templates"]["hermes"].as_str().unwrap());
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let arguments = ["--listen", address.as_str()];
    let cluster = Cluster::with_model("m", folder.path(), &arguments);
    let cluster = cluster.await.unwrap();
    cluster.workers(all_have("m")).await.unwrap();
    let channel = Channel::from_shared(format!("http://{address}")).unwrap();
    let mut client = TokensClient::new(channel.connect().await.unwrap());

    let message = |role: &str, content: &str| v1::ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
        ..v1::ChatMessage::default()
    };
    let called = v1::ChatMessage {
        tool_calls: vec![v1::ToolCall {
            id: "1".to_owned(),
            name: "get_weather".to_owned(),
            arguments: "{\"days\": 2, \"city\": \"Ur\"}".to_owned(),
        }],
        ..message("assistant", "")
    };
    let chat = v1::Chat {
        messages: vec![
            message("user", "How is it?"),
            called,
            message("tool", "dry"),
        ],
        tools: tools(),
        template_arguments: "{\"enable_thinking\": false}".to_owned(),
    };
    let ask = |chat: &v1::Chat| v1::TokenizeRequest {
        prompt: Some(v1::Prompt {
            kind: Some(v1::prompt::Kind::Chat(chat.clone())),
        }),
        ..v1::TokenizeRequest::default()
    };
    let told = client.tokenize(ask(&chat)).await.unwrap().into_inner().text;
    for part in [
        "{\"type\": \"function\", \"function\": {\"name\": \"get_weather\", \"description\": \"\", \"parameters\": {\"",
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"days\": 2, \"city\": \"Ur\"}}\n</tool_call>",
        "<tool_response>\ndry\n</tool_response>",
        "assistant\n<think>\n\n</think>\n\n",
    ] {
        assert!(told.contains(part), "{part} is not in {told}");
    }

    let mut bad = vec![
        (chat.clone(), "get_weather"),
        (chat.clone(), "now"),
        (chat.clone(), "messages"),
    ];
    bad[0].0.messages[1].tool_calls[0].arguments = "[1".to_owned();
    bad[1].0.tools[1].parameters = "no JSON".to_owned();
    bad[2].0.template_arguments = "{\"messages\": []}".to_owned();
    for (chat, word) in bad {
        let refused = client.tokenize(ask(&chat)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(word), "{refused}");
    }

    let forced = v1::ToolCalls {
        tools: tools(),
        single: false,
    };
    let request = v1::GenerateRequest {
        prompt: ask(&chat).prompt,
        max_tokens: 200,
        seed: Some(2),
        grammar: Some(v1::Grammar {
            kind: Some(Grammar::ToolCalls(forced)),
        }),
        parse_output: true,
        ..v1::GenerateRequest::default()
    };
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let mut said = Said::default();
    while let Some(event) = stream.message().await.unwrap() {
        match event.event.unwrap() {
            v1::generate_event::Event::Delta(delta) => said.add(delta),
            v1::generate_event::Event::Finished(finished) => said.finished = Some(finished),
            v1::generate_event::Event::Accepted(_) => {}
        }
    }
    check(&said, 2);
}

/// Tokens of a text at each of which a worker dies.
const MOST_KILLS: usize = 24;

async fn kill_everywhere(folder: &Path, options: GenerateOptions) {
    let cluster = cluster(folder).await;
    let client = cluster.client().await.unwrap();
    let calm = whole(&client, options.clone()).await;
    let mut deaths = 0;
    for kill_at in 0..calm.ids.len().min(MOST_KILLS) {
        let before = cluster.workers(all_have("m")).await.unwrap()[0].clone();
        let mut stream = client.generate(PROMPT, options.clone()).await.unwrap();
        stream.next().await.unwrap().unwrap();
        let mut said = Said::default();
        said.read(&mut stream, kill_at).await;
        signal_pid(before.pid, Signal::KILL).unwrap();
        said.read(&mut stream, usize::MAX).await;
        assert_eq!(said.rest(), calm.rest(), "killed at {kill_at}");
        deaths += said.finished.unwrap().deaths_survived;
        let later = |w: &[v1::WorkerInfo]| all_have("m")(w) && w[0].epoch > before.epoch;
        cluster.workers(later).await.unwrap();
    }
    assert!(deaths > 0);
}

#[tokio::test]
async fn a_worker_that_dies_in_a_call_changes_nothing_of_it() {
    let (_, tagged, _) = FAMILIES[0];
    let mut options = forced(1);
    options.max_tokens = 40;
    kill_everywhere(model(tagged).path(), options.clone()).await;
    // Marks that are in no text, at its beginning and between calls.
    kill_everywhere(special().path(), options).await;
}

#[tokio::test]
async fn thoughts_and_answer_are_told_apart_whenever_the_worker_dies() {
    let folder = model("{{ '<think></think>' }}");
    // The text that a thinking model might say.
    let lark = r#"
start: "<think>\n" name "\n</think>\n\n" name " or <tool_call> " name "\n"
name: "Adam" | "Eve" | "Noah"
"#;
    let options = options(3, Some(Grammar::Lark(lark.to_owned())), 60);
    {
        let cluster = cluster(folder.path()).await;
        let client = cluster.client().await.unwrap();
        let said = whole(&client, options.clone()).await;
        let (thought, answer) = said.text.split_once("\n</think>\n\n").unwrap();
        assert_eq!(said.reasoning, thought.trim_start_matches("<think>\n"));
        assert_eq!(said.content, answer);
        assert!(said.calls.is_empty());
        // What was not asked for is not said.
        let mut silent = options.clone();
        silent.parse_output = false;
        let silent = whole(&client, silent).await;
        assert_eq!((silent.text, silent.content), (said.text, String::new()));
    }
    kill_everywhere(folder.path(), options).await;
}
