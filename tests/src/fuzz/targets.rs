//! What strangers may write or send, as functions of bytes: each may refuse them; none may panic, hang or take memory
//! without bound. The same functions run under `tests/fuzz` with libFuzzer.

use std::collections::{BTreeMap, BTreeSet};

use hotcell_graph::wire;
use hotcell_ipc::{
    blackbox,
    memory::{Mapping, SharedMapping, sealed_memory},
};
use hotcell_proto::{ids::ModelName, v1};
use hotcell_scheduler::admission::{check_embed, check_request};
use hotcell_worker::{
    format::safetensors,
    inspect,
    model::config::ModelConfig,
    text::{
        Call, CalledFunction, Calls, ChatInput, ChatTemplate, Family, GgufVocab, Message as Said,
        Parser, Tokenizer, TokenizerConfig, tool_value,
    },
    weights::ModelFile,
};
use prost::Message;
use serde_json::Value;

use super::{Runner, calls, captures, seeds};

/// What bytes of a target are, for those who change them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Anything.
    Bytes,
    /// JSON.
    Json,
    /// Words of this list, and others.
    Text(&'static [&'static str]),
}

/// One way in.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, which is that of its folder of seeds too.
    pub name: &'static str,
    /// What its bytes are.
    pub form: Form,
    /// Takes bytes; whether they were accepted.
    pub run: fn(&[u8]) -> bool,
    /// Valid bytes.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All ways in but grown graphs ([`super::case`]). `graph` runs what it accepts, within bounds.
pub const TARGETS: &[Target] = &[
    target("gguf", Form::Bytes, gguf, seeds::gguf),
    target("safetensors", Form::Bytes, tensors, seeds::safetensors),
    target("shards", Form::Json, shards, seeds::shards),
    target("config", Form::Json, config, seeds::config),
    target("tokenizer", Form::Json, tokenizer, seeds::tokenizer),
    target("vocabulary", Form::Json, vocabulary, seeds::vocabulary),
    target(
        "tokenizer_config",
        Form::Json,
        tokenizer_config,
        seeds::tokenizer_config,
    ),
    target("template", Form::Text(JINJA), template, seeds::template),
    target("parts", Form::Text(MARKS), parts, seeds::parts),
    target("graph", Form::Bytes, graph, seeds::graph),
    target("requests", Form::Bytes, requests, seeds::requests),
    target("calls", Form::Bytes, calls::run, seeds::calls),
    target("blackbox", Form::Bytes, black_box, seeds::black_box),
    target(
        "capture",
        Form::Bytes,
        captures::capture,
        captures::capture_seeds,
    ),
    target(
        "reduced",
        Form::Bytes,
        captures::reduced,
        captures::reduced_seeds,
    ),
];

const fn target(
    name: &'static str,
    form: Form,
    run: fn(&[u8]) -> bool,
    seeds: fn() -> Vec<Vec<u8>>,
) -> Target {
    Target {
        name,
        form,
        run,
        seeds,
    }
}

/// The target of a name.
pub fn named(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

const JINJA: &[&str] = &[
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "{%-",
    "-%}",
    " for ",
    " in ",
    " if ",
    " else ",
    " elif ",
    " endif ",
    " endfor ",
    " set ",
    " endset ",
    " macro ",
    " endmacro ",
    " call ",
    " endcall ",
    " filter ",
    " endfilter ",
    " block ",
    " endblock ",
    " raw ",
    " endraw ",
    " generation ",
    " endgeneration ",
    " namespace(",
    " range(",
    " loop",
    " recursive ",
    " messages ",
    " message ",
    "['role']",
    ".content",
    "|trim",
    "|tojson",
    "|join('",
    "|replace(",
    "|length",
    "|list",
    "|upper",
    "|default(",
    "|map(",
    "|selectattr(",
    "|sort",
    "|indent(",
    "|batch(",
    "|format(",
    " ~ ",
    " + ",
    " * ",
    " ** ",
    " // ",
    " % ",
    " - ",
    " not ",
    " and ",
    " or ",
    " is ",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ":",
    ",",
    ".",
    "'",
    "\"",
    "\\",
    "\n",
    "99999999999",
    "-1",
    "1e308",
    "true",
    "none",
    "x",
    "\u{202e}",
    "\0",
    "strftime_now('",
    "raise_exception(",
    "caller()",
    "self.",
    "__charge",
    "|__charge",
    "|__stored",
];

/// What texts with thoughts and calls of tools are made of.
const MARKS: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "{\"name\": \"f\", \"arguments\": {",
    "{\"name\": \"f\", \"parameters\": {",
    "\"name\": \"f\"",
    "\"arguments\": ",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "\\",
    "\\u0001open",
    ":",
    ",",
    ";",
    " ",
    "\n",
    "null",
    "-1e308",
    "é",
    "\0",
];

const TEXT: &str =
    "Hello <s> wörld, 1234567 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!\n\n\t  e\u{301}<|end|>";

fn file(name: &str, bytes: &[u8]) -> Option<ModelFile> {
    let memory = sealed_memory("fuzz", bytes).ok()?;
    Some(ModelFile {
        name: name.to_owned(),
        mapping: Mapping::of_file(memory).ok()?,
    })
}

fn gguf(bytes: &[u8]) -> bool {
    let Some(file) = file("model.gguf", bytes) else {
        return false;
    };
    let (report, source) = inspect::read(&[file]);
    assert_eq!(source.is_some(), report.problem.is_empty());
    assert_ne!(report.reason, "INTERNAL", "{}", report.problem);
    source.is_some()
}

fn tensors(bytes: &[u8]) -> bool {
    let Ok(found) = safetensors::parse("model.safetensors", bytes) else {
        return false;
    };
    for tensor in &found {
        assert!(bytes.get(tensor.range.clone()).is_some(), "{tensor:?}");
    }
    true
}

fn shards(bytes: &[u8]) -> bool {
    let names = [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ];
    let names = BTreeSet::from(names);
    let found = safetensors::shards(&names, Some(bytes));
    found.is_ok_and(|found| found.files.iter().all(|file| names.contains(file.as_str())))
}

fn config(bytes: &[u8]) -> bool {
    let Ok(Value::Object(mut map)) = serde_json::from_slice(bytes) else {
        return false;
    };
    let generation = match map.remove("generation") {
        Some(Value::Object(map)) => Some(map),
        _ => None,
    };
    let Ok(config) = ModelConfig::from_hugging_face(&map, generation.as_ref()) else {
        return false;
    };
    // What later code multiplies without fear.
    assert!(config.heads * config.head_dim <= 1 << 20, "{config:?}");
    assert!(config.rope.inverse_frequencies(config.head_dim).len() == config.head_dim / 2);
    true
}

fn try_out(tokenizer: &Tokenizer) {
    for special in [false, true] {
        if let Ok(ids) = tokenizer.encode(TEXT, special) {
            assert!(ids.iter().all(|id| *id < tokenizer.vocab_size()));
            let _ = tokenizer.decode(&ids, special);
        }
    }
    let _ = tokenizer.encode_literal(TEXT);
    let few: Vec<u32> = (0..tokenizer.vocab_size().min(300)).collect();
    let _ = tokenizer.decode(&few, false);
    let _ = (tokenizer.bos_text(), tokenizer.eos_text());
}

fn tokenizer(bytes: &[u8]) -> bool {
    let found = Tokenizer::from_json(bytes);
    found.as_ref().is_ok_and(|tokenizer| {
        try_out(tokenizer);
        true
    })
}

fn vocabulary(bytes: &[u8]) -> bool {
    let Ok(vocab) = serde_json::from_slice::<GgufVocab>(bytes) else {
        return false;
    };
    let found = Tokenizer::from_gguf(vocab);
    found.as_ref().is_ok_and(|tokenizer| {
        try_out(tokenizer);
        true
    })
}

fn render(template: &ChatTemplate) -> bool {
    let said = |role: &str, content: &str| Said {
        role: role.to_owned(),
        content: content.to_owned(),
        ..Said::default()
    };
    let mut called = said("assistant", "");
    called.tool_calls = vec![Call {
        id: "123456789".to_owned(),
        function: CalledFunction {
            name: "f".to_owned(),
            arguments: serde_json::json!({"x": [1, TEXT]}),
        },
    }];
    let messages = [said("user", TEXT), said("assistant", "Yes."), called];
    let tools = [tool_value("f", TEXT, serde_json::json!({"type": "object"}))];
    let input = ChatInput {
        messages: &messages,
        tools: &tools,
        json_bytes: 512,
        add_generation_prompt: true,
        bos_token: "<s>",
        eos_token: "</s>",
        extra: &BTreeMap::new(),
        now: 1_700_000_000,
    };
    template.render(&input).is_ok()
}

fn tokenizer_config(bytes: &[u8]) -> bool {
    let Ok(config) = TokenizerConfig::from_json(bytes) else {
        return false;
    };
    config.chat_template("default").is_ok_and(|t| render(&t))
}

fn template(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    ChatTemplate::new(&text).is_ok_and(|template| render(&template))
}

/// What a text means does not depend on how it came, and is never more than the text; whether there is a call in it.
/// The first byte says how it is read.
fn parts(bytes: &[u8]) -> bool {
    const FAMILIES: [Calls; 5] = [
        Calls::Tagged,
        Calls::Python,
        Calls::List,
        Calls::Named,
        Calls::Bare,
    ];
    let Some((&how, text)) = bytes.split_first() else {
        return false;
    };
    let text = String::from_utf8_lossy(text);
    let how = usize::from(how);
    let family = Family::plain(FAMILIES[how % 5], how & 64 != 0);
    let names = BTreeSet::from(["f".to_owned()]);
    let parser = Parser::new(&family, names.into_iter().collect(), how & 128 != 0);
    let whole = meaning(parser.clone(), [&*text].into_iter());
    let mut ends: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    ends.push(text.len());
    let pieces = ends.windows(2).map(|w| &text[w[0]..w[1]]);
    assert!(whole == meaning(parser, pieces), "the cut matters");
    let size = |(name, arguments): &(String, String)| name.len() + arguments.len();
    let calls: usize = whole.2.iter().map(size).sum();
    assert!(whole.0.len() + whole.1.len() + calls <= text.len());
    !whole.2.is_empty()
}

/// Answer, thoughts and calls, each put together.
fn meaning<'a>(
    mut parser: Parser,
    pieces: impl Iterator<Item = &'a str>,
) -> (String, String, Vec<(String, String)>) {
    let mut parts = Vec::new();
    for piece in pieces {
        parser.text(piece);
        parts.extend(parser.parts());
    }
    parser.finish();
    parts.extend(parser.parts());
    let mut whole = (String::new(), String::new(), Vec::new());
    for part in parts {
        match part.kind {
            Some(v1::output_part::Kind::Content(text)) => whole.0.push_str(&text),
            Some(v1::output_part::Kind::Reasoning(text)) => whole.1.push_str(&text),
            Some(v1::output_part::Kind::ToolCall(call)) => {
                if !call.name.is_empty() {
                    whole.2.push((call.name, String::new()));
                }
                assert_eq!(call.index as usize + 1, whole.2.len());
                if let Some((_, arguments)) = whole.2.last_mut() {
                    arguments.push_str(&call.arguments);
                }
            }
            None => panic!("an empty part"),
        }
    }
    whole
}

fn graph(bytes: &[u8]) -> bool {
    let Ok(message) = v1::Graph::decode(bytes) else {
        return false;
    };
    let Ok(graph) = wire::decode(&message) else {
        return false;
    };
    let again = wire::encode(&graph);
    let second = wire::decode(&again).expect("what was decoded is refused when it is encoded");
    assert!(wire::encode(&second) == again, "encoding is not stable");
    RUNNER.with(|runner| runner.run_foreign(&graph, bytes));
    true
}

thread_local! {
    /// Its devices have threads of their own, which are not started for each graph.
    static RUNNER: Runner = Runner::new().expect("no thread to compute on");
}

/// Decodes a message, and once more what it is encoded to.
fn decoded<M: Message + Default + PartialEq>(bytes: &[u8]) -> Option<M> {
    let message = M::decode(bytes).ok()?;
    let again = message.encode_to_vec();
    let second = M::decode(again.as_slice()).expect("what was encoded cannot be decoded");
    assert_eq!(second.encode_to_vec(), again);
    Some(message)
}

fn readable<M: Message + Default + PartialEq>(bytes: &[u8]) -> bool {
    decoded::<M>(bytes).is_some()
}

fn specified(bytes: &[u8]) -> bool {
    let specs = decoded::<v1::CreateRequest>(bytes).and_then(|request| request.spec);
    match specs {
        Some(v1::create_request::Spec::Tensor(spec)) => wire::decode_tensor_spec(&spec).is_ok(),
        _ => false,
    }
}

/// Every type of request, those that the scheduler sends too.
const REQUESTS: &[fn(&[u8]) -> bool] = &[
    |b| decoded::<v1::GenerateRequest>(b).is_some_and(|r| check_request(&r).is_ok()),
    |b| decoded::<v1::EmbedRequest>(b).is_some_and(|r| check_embed(&r).is_ok()),
    specified,
    |b| decoded::<v1::LoadModelRequest>(b).is_some_and(|r| ModelName::new(&r.name).is_ok()),
    |b| decoded::<v1::UnloadModelRequest>(b).is_some_and(|r| ModelName::new(&r.name).is_ok()),
    |b| decoded::<v1::InspectModelRequest>(b).is_some_and(|r| ModelName::new(&r.name).is_ok()),
    readable::<v1::AttachRequest>,
    readable::<v1::CancelStreamRequest>,
    readable::<v1::TokenizeRequest>,
    readable::<v1::DetokenizeRequest>,
    readable::<v1::ListDevicesRequest>,
    readable::<v1::ListWorkersRequest>,
    readable::<v1::ListModelsRequest>,
    readable::<v1::ListCrashesRequest>,
    readable::<v1::GetCrashRequest>,
    readable::<v1::ReleaseWorkerRequest>,
    readable::<v1::WatchEventsRequest>,
    readable::<v1::DescribeRequest>,
    readable::<v1::OpenSessionRequest>,
    readable::<v1::UploadChunk>,
    readable::<v1::DownloadRequest>,
    readable::<v1::FreeRequest>,
    readable::<v1::ListRequest>,
    readable::<v1::CompileRequest>,
    readable::<v1::ExecuteRequest>,
    readable::<v1::SynchronizeRequest>,
    readable::<v1::CancelRequest>,
    readable::<v1::MemoryRequest>,
    readable::<v1::ListWeightsRequest>,
    readable::<v1::GetWeightRequest>,
    readable::<v1::ImportSharedRequest>,
    readable::<v1::HandshakeRequest>,
    readable::<v1::HandshakeResponse>,
    readable::<v1::LoadRequest>,
    readable::<v1::LoadProgress>,
    readable::<v1::UnloadRequest>,
    readable::<v1::InspectRequest>,
    readable::<v1::Inspected>,
    readable::<v1::PackRequest>,
    readable::<v1::PackPiece>,
    readable::<v1::UsePackedRequest>,
    readable::<v1::OpenTensorsRequest>,
    readable::<v1::JoinRequest>,
    readable::<v1::CheckRequest>,
    readable::<v1::CheckResponse>,
    readable::<v1::StatusRequest>,
    readable::<v1::StatusResponse>,
    readable::<v1::DrainRequest>,
    readable::<v1::WatchRequest>,
    readable::<v1::CaptureRequest>,
    readable::<v1::ReplayRequest>,
    readable::<v1::GuardRequest>,
    readable::<v1::TraceRequest>,
];

fn requests(bytes: &[u8]) -> bool {
    let Some((kind, rest)) = bytes.split_first() else {
        return false;
    };
    let at = usize::from(*kind) % REQUESTS.len();
    REQUESTS.get(at).is_some_and(|request| request(rest))
}

fn black_box(bytes: &[u8]) -> bool {
    let (Ok(memory), most) = (blackbox::make(), bytes.len().min(blackbox::BYTES)) else {
        return false;
    };
    let written = SharedMapping::of_memory(&memory).and_then(|m| m.write(0, &bytes[..most]));
    let (Ok(()), Ok(reader)) = (written, blackbox::Reader::open(&memory)) else {
        return false;
    };
    let (pulse, _) = (reader.pulse(), reader.engine_thread());
    assert!(!pulse.moved_since(&pulse));
    let Ok(seen) = reader.snapshot() else {
        return false;
    };
    let text = format!("{seen:?}");
    assert!(!text.contains('\x1b'), "an escape is in {text}");
    true
}
