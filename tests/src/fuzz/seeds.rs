//! Valid bytes for each way in, small enough to be changed often.

use std::{collections::BTreeSet, fs};

use hotcell_graph::{DType, Graph, wire};
use hotcell_ipc::blackbox::{self, Doing, Node, Writer};
use hotcell_proto::v1;
use prost::Message;
use serde_json::{Value, json};

use super::{Choices, calls, case_seed, grow, run};
use crate::{
    cluster::golden,
    conformance::cases,
    hostile::tiny,
    synthetic::gguf::testing::{Value as Entry, small},
};

fn read(name: &str) -> Vec<u8> {
    fs::read(golden(name)).unwrap_or_default()
}

fn parsed(name: &str) -> Value {
    serde_json::from_slice(&read(name)).unwrap_or_default()
}

pub fn gguf() -> Vec<Vec<u8>> {
    let mut pieces = tiny();
    for (key, value) in &mut pieces.values {
        if key == "tokenizer.ggml.model" {
            *value = Entry::Str("llama".to_owned());
        }
    }
    let scores = Entry::F32s((0..320).map(|n| -(n as f32)).collect());
    pieces
        .values
        .push(("tokenizer.ggml.scores".to_owned(), scores));
    let mut talks = tiny();
    let template = String::from_utf8_lossy(&read("llama3/chat_template.jinja")).into_owned();
    talks
        .values
        .push(("tokenizer.chat_template".to_owned(), Entry::Str(template)));
    vec![small().write(), talks.write(), pieces.write()]
}

pub fn safetensors() -> Vec<Vec<u8>> {
    let file = |header: &str, data: usize| {
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header.as_bytes());
        out.resize(out.len() + data, 7);
        out
    };
    vec![
        file("{}", 0),
        file(
            r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}   "#,
            32,
        ),
        file(
            r#"{"__metadata__":{"format":"pt"},"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"y":{"dtype":"F16","shape":[0,9],"data_offsets":[1,1]}}"#,
            1,
        ),
    ]
}

pub fn shards() -> Vec<Vec<u8>> {
    vec![read("llama3/model.safetensors.index.json")]
}

pub fn config() -> Vec<Vec<u8>> {
    let folders = [
        "llama2",
        "llama3",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma3",
        "gemma3-cap",
    ];
    let with = |folder: &&str| {
        let mut config = parsed(&format!("{folder}/config.json"));
        config["generation"] = json!({"eos_token_id": [1, 2], "bos_token_id": 0});
        config.to_string().into_bytes()
    };
    folders.iter().map(with).collect()
}

/// A tokenizer with few tokens.
fn few(name: &str) -> Value {
    let mut file = parsed(&format!("{name}/tokenizer.json"));
    if let Some(vocab) = file["model"]["vocab"].as_object_mut() {
        vocab.retain(|_, id| id.as_u64().is_some_and(|id| id < 90));
    }
    let vocab = file["model"]["vocab"].clone();
    if let Some(merges) = file["model"]["merges"].as_array_mut() {
        let known = |token: &str| vocab.get(token).is_some();
        merges.retain(|merge| {
            let part = |at: usize| merge[at].as_str().unwrap_or_default();
            known(part(0)) && known(part(1)) && known(&format!("{}{}", part(0), part(1)))
        });
    }
    file
}

pub fn tokenizer() -> Vec<Vec<u8>> {
    let mut split = few("llama3");
    split["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|\\s+(?!\\S)|\\w+"}, "behavior": "Isolated", "invert": false},
        {"type": "Digits", "individual_digits": true},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]});
    split["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]});
    split["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    split["model"]["byte_fallback"] = json!(true);
    [few("llama3"), few("llama2"), split]
        .map(|file| file.to_string().into_bytes())
        .to_vec()
}

pub fn vocabulary() -> Vec<Vec<u8>> {
    let letters: Vec<String> = (b'a'..=b'z').map(|b| char::from(b).to_string()).collect();
    let words = ["<s>", "</s>", "<unk>", "▁", "Ġ", "ab", "abc", "<0x41>"].map(str::to_owned);
    let tokens = [&words[..], &letters].concat();
    let kinds: Vec<i32> = (0..tokens.len())
        .map(|n| if n < 3 { 3 } else { 1 })
        .collect();
    let vocab = |model: &str, pre: &str| {
        json!({"model": model, "pre": pre, "tokens": tokens, "merges": ["a b", "ab c"],
            "scores": (0..tokens.len()).map(|n| -(n as f32)).collect::<Vec<_>>(),
            "token_types": kinds, "bos": 0, "eos": 1, "unk": 2, "add_bos": true, "add_eos": false,
            "add_space_prefix": true})
        .to_string()
        .into_bytes()
    };
    ["gpt-2", "llama-bpe", "qwen2", "smollm", "deepseek-v3"]
        .map(|pre| vocab("gpt2", pre))
        .into_iter()
        .chain([vocab("llama", "default")])
        .collect()
}

pub fn tokenizer_config() -> Vec<Vec<u8>> {
    let text = String::from_utf8_lossy(&read("llama3/chat_template.jinja")).into_owned();
    vec![
        json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": true,
            "tokenizer_class": "LlamaTokenizerFast", "chat_template": text})
        .to_string()
        .into_bytes(),
        json!({"chat_template": [{"name": "default", "template": text}, {"name": "tool", "template": "x"}]})
            .to_string()
            .into_bytes(),
    ]
}

pub fn template() -> Vec<Vec<u8>> {
    let own = [
        "{%- set n = namespace(last=-1) -%}{% for m in messages %}{% if m.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}{% endfor %}{{ n.last }}",
        "{% macro say(m) %}<|{{ m['role'] }}|>{{ m.content|trim|replace('a', 'bb') }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
        "{{ messages|map(attribute='role')|join(', ') }}{{ messages|tojson(indent=2) }}{{ range(3)|list }}",
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{{ loop.index ~ m.content[:10] }}{% endfor %}{{ strftime_now('%Y') }}",
        "{% for m in messages recursive %}{% call say() %}x{% endcall %}{% endfor %}{% raw %}{{ }}{% endraw %}{# note #}",
        "{% generation %}{{ raise_exception('no') if messages|length % 2 else 'yes' }}{% endgeneration %}",
    ];
    let mut all = vec![read("llama3/chat_template.jinja")];
    all.extend(own.map(|text| text.as_bytes().to_vec()));
    all
}

pub fn graph() -> Vec<Vec<u8>> {
    let grown = |index| wire::encode(&grow::graph(&mut Choices::new(case_seed(3, index))));
    let mut all: Vec<Vec<u8>> = (0..64).map(|n| grown(n).encode_to_vec()).collect();
    all.retain(|bytes| bytes.len() < 4096);
    all.truncate(16);
    // And a golden case of each row, the first that is small enough to be run.
    let mut rows = BTreeSet::new();
    for case in cases().unwrap_or_default() {
        let small = |graph: &Graph| run::is_short(graph);
        if case.fails.is_none()
            && !rows.contains(&case.op)
            && let Some(graph) = case.graph().ok().filter(small)
        {
            let bytes = wire::encode(&graph).encode_to_vec();
            if bytes.len() < 4096 {
                rows.insert(case.op);
                all.push(bytes);
            }
        }
    }
    all
}

pub fn parts() -> Vec<Vec<u8>> {
    let of = |how: u8, text: &str| [&[how], text.as_bytes()].concat();
    vec![
        of(
            65,
            "<think>\nHm.\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}\"}}\n</tool_call>\n<tool_call>{\"arguments\": {}, \"name\": \"g\"}</tool_call>",
        ),
        of(
            1,
            "{\"name\": \"f\", \"parameters\": {\"a\": [1, 2]}}; {\"name\": \"g\", \"parameters\": {}}",
        ),
        of(
            2,
            "Yes. [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": \"\\\"\"}, \"id\": \"1\"}, {\"name\": \"g\", \"arguments\": {}}]",
        ),
        of(
            3,
            "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{\"a\": {}}[TOOL_CALLS]g[ARGS]{}",
        ),
        of(4, "\n{\"name\": \"f\", \"arguments\": {}}"),
        of(0, "An answer, {in} words. <tool_call> is none."),
    ]
}

fn ids(ids: &[u32]) -> v1::Prompt {
    let ids = v1::TokenIds { ids: ids.to_vec() };
    v1::Prompt {
        kind: Some(v1::prompt::Kind::Ids(ids)),
    }
}

fn text(text: &str) -> v1::Prompt {
    v1::Prompt {
        kind: Some(v1::prompt::Kind::Text(text.to_owned())),
    }
}

fn chat() -> v1::Prompt {
    let message = v1::ChatMessage {
        role: "user".to_owned(),
        content: "Hello".to_owned(),
        ..v1::ChatMessage::default()
    };
    let chat = v1::Chat {
        messages: vec![message],
        ..v1::Chat::default()
    };
    v1::Prompt {
        kind: Some(v1::prompt::Kind::Chat(chat)),
    }
}

fn generate(prompt: v1::Prompt) -> v1::GenerateRequest {
    v1::GenerateRequest {
        prompt: Some(prompt),
        max_tokens: 3,
        seed: Some(7),
        stop: vec!["x".to_owned()],
        stop_tokens: vec![9],
        logprobs: true,
        top_logprobs: 2,
        sampling: Some(v1::Sampling {
            temperature: Some(0.7),
            top_k: Some(40),
            top_p: Some(0.9),
            min_p: Some(0.1),
            repetition_penalty: Some(1.1),
            presence_penalty: Some(0.5),
            frequency_penalty: Some(0.5),
            logit_bias: vec![v1::LogitBias {
                token: 5,
                bias: 1.0,
            }],
        }),
        ..v1::GenerateRequest::default()
    }
}

fn followed(kind: v1::grammar::Kind) -> v1::GenerateRequest {
    v1::GenerateRequest {
        grammar: Some(v1::Grammar { kind: Some(kind) }),
        ..generate(text("{"))
    }
}

fn resumed() -> v1::GenerateRequest {
    v1::GenerateRequest {
        resume: Some(v1::Resume {
            generated_ids: vec![40, 41],
            text_bytes_emitted: 2,
        }),
        request_id: "again".to_owned(),
        ..generate(ids(&[1, 2, 3]))
    }
}

fn generates() -> Vec<v1::GenerateRequest> {
    vec![
        generate(text("Hello")),
        generate(ids(&[1, 2, 3])),
        generate(chat()),
        resumed(),
        followed(v1::grammar::Kind::Regex("[a-z]+".to_owned())),
        followed(v1::grammar::Kind::JsonSchema(
            r#"{"type":"object","properties":{"a":{"type":"integer"}}}"#.to_owned(),
        )),
        followed(v1::grammar::Kind::Lark(
            "start: \"a\" | \"b\" start".to_owned(),
        )),
    ]
}

fn handle(id: u8) -> v1::Handle {
    v1::Handle {
        epoch: calls::EPOCH,
        id: vec![id; 16],
    }
}

fn matrix() -> v1::TensorSpec {
    let dim = |n| v1::Dim {
        kind: Some(v1::dim::Kind::Fixed(n)),
    };
    v1::TensorSpec {
        dtype: DType::F32.name().to_owned(),
        dims: vec![dim(2), dim(3)],
    }
}

fn create(id: u8) -> v1::CreateRequest {
    v1::CreateRequest {
        spec: Some(v1::create_request::Spec::Tensor(matrix())),
        id: vec![id; 16],
    }
}

fn execute() -> v1::ExecuteRequest {
    let data = |byte: u8| v1::Operand {
        kind: Some(v1::operand::Kind::Data(vec![byte; 24].into())),
    };
    v1::ExecuteRequest {
        plan: Some(handle(calls::PLAN)),
        inputs: vec![data(1), data(2)],
        outputs: vec![v1::OutputWish {
            kind: Some(v1::output_wish::Kind::Inline(true)),
        }],
        ..v1::ExecuteRequest::default()
    }
}

pub fn requests() -> Vec<Vec<u8>> {
    let tagged = |kind: u8, message: Vec<u8>| [vec![kind], message].concat();
    let mut all: Vec<Vec<u8>> = generates()
        .iter()
        .map(|request| tagged(0, request.encode_to_vec()))
        .collect();
    let embed = v1::EmbedRequest {
        prompts: vec![text("a"), ids(&[1])],
        ..v1::EmbedRequest::default()
    };
    all.push(tagged(1, embed.encode_to_vec()));
    all.push(tagged(2, create(7).encode_to_vec()));
    let load = v1::LoadModelRequest {
        name: "a-model".to_owned(),
        path: "/models/a".to_owned(),
        ..v1::LoadModelRequest::default()
    };
    all.push(tagged(3, load.encode_to_vec()));
    all.push(tagged(24, execute().encode_to_vec()));
    all.push(tagged(37, v1::Inspected::default().encode_to_vec()));
    // The other types of request are found from these by their first byte.
    all
}

pub fn calls() -> Vec<Vec<u8>> {
    let call = |method: &str, message: Vec<u8>| {
        let at = calls::METHODS
            .iter()
            .position(|known| known.ends_with(method));
        let length = u16::try_from(message.len()).unwrap_or(u16::MAX);
        let head = [&[at.unwrap_or(0) as u8][..], &length.to_le_bytes()].concat();
        [head, message].concat()
    };
    let mut all: Vec<Vec<u8>> = generates()
        .iter()
        .map(|request| call("/Generate", request.encode_to_vec()))
        .collect();
    let upload = v1::UploadChunk {
        target: Some(v1::UploadTarget {
            kind: Some(v1::upload_target::Kind::Create(matrix())),
            id: vec![8; 16],
            ..v1::UploadTarget::default()
        }),
        data: vec![1; 24].into(),
    };
    let download = v1::DownloadRequest {
        tensor: Some(handle(7)),
        length: 24,
        checksum: true,
        ..v1::DownloadRequest::default()
    };
    let compile = v1::CompileRequest {
        graph: Some(calls::sum()),
        ..v1::CompileRequest::default()
    };
    let free = v1::FreeRequest {
        handles: vec![handle(7)],
    };
    let tokenize = v1::TokenizeRequest {
        prompt: Some(text("Hello")),
        ..v1::TokenizeRequest::default()
    };
    let detokenize = v1::DetokenizeRequest {
        ids: vec![40, 41],
        ..v1::DetokenizeRequest::default()
    };
    let embed = v1::EmbedRequest {
        prompts: vec![text("a"), ids(&[1])],
        ..v1::EmbedRequest::default()
    };
    let weight = v1::GetWeightRequest {
        model: calls::MODEL.to_owned(),
        ..v1::GetWeightRequest::default()
    };
    let weights = v1::ListWeightsRequest {
        model: calls::MODEL.to_owned(),
    };
    all.extend([
        call("/Create", create(7).encode_to_vec()),
        call("/Upload", upload.encode_to_vec()),
        [
            call("/Create", create(7).encode_to_vec()),
            call("/Download", download.encode_to_vec()),
        ]
        .concat(),
        [
            call("/Create", create(7).encode_to_vec()),
            call("/Free", free.encode_to_vec()),
            call("/List", Vec::new()),
        ]
        .concat(),
        call("/Compile", compile.encode_to_vec()),
        call("/Execute", execute().encode_to_vec()),
        call("/ExecuteMany", execute().encode_to_vec()),
        call("/Tokenize", tokenize.encode_to_vec()),
        call("/Detokenize", detokenize.encode_to_vec()),
        call("/Embed", embed.encode_to_vec()),
        call("/GetWeight", weight.encode_to_vec()),
        call("/ListWeights", weights.encode_to_vec()),
        call("/Synchronize", Vec::new()),
        call("/Memory", Vec::new()),
        call("/Describe", Vec::new()),
        call(
            "/OpenSession",
            v1::OpenSessionRequest::default().encode_to_vec(),
        ),
    ]);
    all
}

pub fn black_box() -> Vec<Vec<u8>> {
    let mut all = vec![vec![0; 64]];
    let Ok(memory) = blackbox::make() else {
        return all;
    };
    let Ok(writer) = Writer::open(&memory, ["matmul", "softmax"].into_iter()) else {
        return all;
    };
    writer.doing(Doing::Stepping);
    writer.model("tiny");
    writer.stepped();
    writer.enter(Node {
        step: 17,
        op: 1,
        group: true,
    });
    writer.memory(10, 20);
    let _running = writer.begin("request-1");
    writer.error("it went \u{1b}[31mwrong\nhere");
    let mut bytes = vec![0; blackbox::BYTES];
    let read = hotcell_ipc::memory::SharedMapping::of_memory(&memory);
    if read.is_ok_and(|mapping| mapping.read(0, &mut bytes).is_ok()) {
        // Its process is another one in every run.
        let own = u64::from(std::process::id()).to_le_bytes();
        let at = bytes.windows(own.len()).position(|word| word == own);
        if let Some(word) = at.and_then(|at| bytes.get_mut(at..at + own.len())) {
            word.copy_from_slice(&1u64.to_le_bytes());
        }
        all.push(bytes);
    }
    all
}
