//! Model files from strangers: whole models opened from their files, and nothing that a file can hold makes a
//! reader panic or allocate more than a small multiple of what is there.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use hotcell_graph::DType;
use hotcell_ipc::memory::{Mapping, sealed_memory};
use hotcell_worker::format::gguf::Gguf;
use hotcell_worker::format::{ModelError, limits, safetensors};
use hotcell_worker::model::config::{Architecture, Floats8};
use hotcell_worker::weights::{ModelFile, ModelSource, NameScheme, TextSource};
use proptest::prelude::*;
use serde_json::{Value, json};

#[path = "../src/format/gguf_testing.rs"]
mod gguf_testing;

use gguf_testing::{Value as G, Writer, model, small};

/// Counts what the present thread holds, and the most it held.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // Allocations while a thread ends are nobody's business.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps this trait's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller keeps this trait's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `work` held at once.
fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    PEAK.set(before);
    let done = work();
    (done, (PEAK.get() - before) as usize)
}

/// A reader may hold 4 KiB for its errors and 32 bytes for each byte of the file.
#[track_caller]
fn within(len: usize, held: usize) {
    assert!(held <= 4096 + 32 * len, "{held} bytes for a file of {len}");
}

fn file(name: &str, bytes: &[u8]) -> ModelFile {
    let memory = sealed_memory("test", bytes).expect("memory");
    ModelFile {
        name: name.to_owned(),
        mapping: Mapping::of_file(memory).expect("mapping"),
    }
}

fn open(files: &[(&str, Vec<u8>)]) -> Result<ModelSource, ModelError> {
    ModelSource::open(
        files
            .iter()
            .map(|(name, bytes)| file(name, bytes))
            .collect(),
    )
}

fn message(files: &[(&str, Vec<u8>)]) -> String {
    open(files).expect_err("must be refused").to_string()
}

/// A safetensors file of this header and this much data.
fn raw_safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.resize(out.len() + data, 7);
    out
}

/// A safetensors file of these tensors, in order.
fn tensors(list: &[(&str, &str, &[usize])]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for (name, dtype, shape) in list {
        let width = match *dtype {
            "F32" => 4,
            "F16" | "BF16" => 2,
            _ => 1,
        };
        let end = at + shape.iter().product::<usize>() * width;
        header.insert(
            (*name).to_owned(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}),
        );
        at = end;
    }
    raw_safetensors(&Value::Object(header).to_string(), at)
}

fn config() -> Vec<u8> {
    json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 5, "hidden_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64, "eos_token_id": 1
    })
    .to_string()
    .into_bytes()
}

fn folder(rest: Vec<(&'static str, Vec<u8>)>) -> Vec<(&'static str, Vec<u8>)> {
    let mut files = vec![
        ("config.json", config()),
        ("tokenizer.json", b"{}".to_vec()),
    ];
    files.retain(|(name, _)| rest.iter().all(|(other, _)| name != other));
    files.extend(rest);
    files
}

fn one() -> Vec<u8> {
    tensors(&[
        ("a", "F32", &[2, 3]),
        ("b", "BF16", &[4]),
        ("c", "F8_E5M2", &[3]),
    ])
}

fn index(map: &Value) -> Vec<u8> {
    json!({"metadata": {"total_size": 1}, "weight_map": map})
        .to_string()
        .into_bytes()
}

#[test]
fn a_gguf_model_opens_in_place() {
    let bytes = model("llama").write();
    let files = vec![file("m.gguf", &bytes), file("README.md", b"x")];
    let mapped = files[0].mapping.bytes().as_ptr_range();
    let (source, held) = peak(|| ModelSource::open(files).expect("valid"));
    within(bytes.len(), held);
    assert_eq!(
        (source.config.architecture, source.names),
        (Architecture::Llama, NameScheme::Gguf)
    );
    let (names, weights) = (source.names, &source.weights);
    let q = weights.expect(&names.q(1), &[8, 8]).expect("there");
    assert!(mapped.contains(&q.bytes().as_ptr()), "a view of the file");
    assert_eq!(
        (q.dtype, q.bytes().len(), q.elements()),
        (DType::F32, 256, 64)
    );
    assert_eq!(weights.get(&names.k(0)).expect("there").shape, [4, 8]);
    assert_eq!(
        (weights.len(), weights.size()),
        (20, weights.iter().map(|(_, w)| w.range.len()).sum())
    );
    let found = weights
        .expect(&names.k(0), &[8, 4])
        .expect_err("another shape")
        .to_string();
    assert!(
        found.starts_with("tensor 'blk.0.attn_k.weight' has shape [4, 8] but"),
        "{found}"
    );
    assert!(matches!(
        weights.get("no"),
        Err(ModelError::MissingTensor { .. })
    ));
    assert_eq!(weights.changed_file(), None);
    let TextSource::Gguf(text) = &source.text else {
        panic!("GGUF")
    };
    let tokens = text
        .metadata()
        .get_strings("tokenizer.ggml.tokens")
        .expect("strings")
        .expect("present");
    assert_eq!((tokens.len(), text.name()), (5, "m.gguf"));
}

#[test]
fn scales_are_those_of_a_matrix_its_rows_or_its_rectangles() {
    let all = tensors(&[
        ("bare", "F8_E4M3", &[6, 8]),
        ("whole", "F8_E4M3", &[6, 8]),
        ("whole_scale", "F32", &[]),
        ("rows", "F8_E4M3", &[6, 8]),
        ("rows_scale", "F16", &[6, 1]),
        ("cut", "F8_E4M3", &[2, 6, 8]),
        ("cut_scale_inv", "BF16", &[2, 2, 3]),
        ("each", "F8_E4M3", &[2, 6, 8]),
        ("each_scale", "F32", &[2]),
        ("bytes", "F8_E4M3", &[6, 8]),
        ("bytes_scale", "U8", &[6]),
        ("integers", "I8", &[6, 8]),
        ("integers_scale", "F32", &[6]),
        ("flat", "F8_E4M3", &[]),
    ]);
    let source = open(&folder(vec![("model.safetensors", all)])).expect("valid");
    let weights = &source.weights;
    let said = |rectangle| Some(Floats8 { rectangle });
    let found = |name: &str, shape: &[usize], said| {
        let found = weights.expect_scaled(name, shape, said);
        let (weight, scales) = found.map_err(|error| error.to_string())?;
        assert_eq!(weight.dtype, DType::F8E4M3);
        Ok::<_, String>(scales.map(|s| (s.name, s.height, s.width)))
    };
    let of = |name: &str, height, width| Ok(Some((name.to_owned(), height, width)));
    let by = said(Some([4, 3]));
    assert_eq!(found("bare", &[6, 8], None), Ok(None));
    for said in [None, said(None), by] {
        let whole = of("whole_scale", 1 << 31, 8);
        assert_eq!(found("whole", &[6, 8], said), whole);
        assert_eq!(found("rows", &[6, 8], said), of("rows_scale", 1, 8));
        let each = of("each_scale", 1 << 31, 8);
        assert_eq!(found("each", &[2, 6, 8], said), each);
    }
    assert_eq!(found("cut", &[2, 6, 8], by), of("cut_scale_inv", 4, 3));
    for (name, shape, said, what) in [
        ("bare", &[6, 8][..], said(None), "'bare_scale' is missing"),
        ("bare", &[6, 8], by, "'bare_scale_inv' is missing"),
        (
            "cut",
            &[2, 6, 8],
            said(None),
            "'cut_scale_inv' has shape [2, 2, 3] but",
        ),
        ("cut", &[2, 6, 8], said(Some([4, 4])), "calls for [2, 2, 2]"),
        (
            "bytes",
            &[6, 8],
            by,
            "tensor 'bytes' is to be multiplied with tensor 'bytes_scale'",
        ),
        ("integers", &[6, 8], by, "tensor 'integers' is stored as i8"),
        ("flat", &[], by, "tensor 'flat' is stored as f8_e4m3"),
    ] {
        let error = found(name, shape, said).expect_err(name);
        assert!(error.contains(what), "{name}: {error}");
    }
    // Who does not ask for scales gets no weights that have some.
    let error = weights.expect("rows", &[6, 8]).expect_err("scaled");
    assert!(error.to_string().contains("is to be multiplied"), "{error}");
}

#[test]
fn a_safetensors_folder_opens_in_place() {
    let template = |text: &str| json!({"chat_template": text}).to_string().into_bytes();
    let source = open(&folder(vec![
        ("model.safetensors", one()),
        ("tokenizer_config.json", template("T")),
    ]))
    .expect("valid");
    assert_eq!(
        (source.names, source.weights.len()),
        (NameScheme::HuggingFace, 2)
    );
    let a = source.weights.expect("a", &[2, 3]).expect("there");
    assert_eq!((a.dtype, a.bytes()), (DType::F32, &[7u8; 24][..]));
    let c = source
        .weights
        .expect("c", &[3])
        .expect_err("unsupported")
        .to_string();
    assert!(
        c.starts_with(
            "model.safetensors: tensor 'c' is stored as f8_e5m2, which is not supported;"
        ),
        "{c}"
    );
    assert!(source.weights.contains("c"));
    let TextSource::HuggingFace {
        tokenizer_json,
        chat_template,
        tokenizer_config,
        generation_config,
    } = &source.text
    else {
        panic!("Hugging Face")
    };
    assert_eq!(
        (tokenizer_json.bytes(), chat_template.as_deref()),
        (&b"{}"[..], Some("T"))
    );
    assert!(tokenizer_config.is_some() && generation_config.is_none());
}

#[test]
fn chat_templates_are_found_where_transformers_finds_them() {
    let chat = |files: Vec<(&'static str, Vec<u8>)>| {
        let mut files = folder(files);
        files.push(("model.safetensors", one()));
        open(&files).map(|source| match source.text {
            TextSource::HuggingFace { chat_template, .. } => chat_template,
            TextSource::Gguf(_) => None,
        })
    };
    let in_config = |value: Value| {
        (
            "tokenizer_config.json",
            json!({"chat_template": value}).to_string().into_bytes(),
        )
    };
    let list = json!([{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]);
    assert_eq!(chat(vec![in_config(list.clone())]), Ok(Some("D".into())));
    assert_eq!(
        chat(vec![
            in_config(list),
            ("chat_template.jinja", b"J".to_vec())
        ]),
        Ok(Some("J".into()))
    );
    assert_eq!(
        chat(vec![in_config(json!([{"name": "x", "template": "X"}]))]),
        Ok(Some("X".into()))
    );
    assert_eq!(chat(vec![in_config(json!(null))]), Ok(None));
    assert_eq!(chat(vec![]), Ok(None));
    assert!(chat(vec![in_config(json!([{"name": "default"}]))]).is_err());
    assert!(chat(vec![in_config(json!(7))]).is_err());
    assert!(chat(vec![("chat_template.jinja", vec![0xff])]).is_err());
    let long = vec![b'x'; limits::CHAT_TEMPLATE_BYTES + 1];
    assert!(matches!(
        chat(vec![("chat_template.jinja", long)]),
        Err(ModelError::TooLarge { .. })
    ));
}

#[test]
fn shards_must_be_complete_and_agree_with_their_index() {
    let (first, second) = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    );
    let (a, b) = (
        tensors(&[("a", "F32", &[2])]),
        tensors(&[("b", "F16", &[3])]),
    );
    let both = json!({"a": first, "b": second});
    let ok = open(&folder(vec![
        (first, a.clone()),
        (second, b.clone()),
        (safetensors::INDEX, index(&both)),
    ]));
    let ok = ok.expect("complete").weights;
    assert_eq!((ok.len(), ok.files().len()), (2, 2));
    // Without an index too.
    assert_eq!(
        open(&folder(vec![(first, a.clone()), (second, b.clone())]))
            .expect("complete")
            .weights
            .len(),
        2
    );

    let error = message(&folder(vec![
        (first, a.clone()),
        (safetensors::INDEX, index(&both)),
    ]));
    assert_eq!(
        error,
        "'model-00002-of-00002.safetensors' is missing: the index names it; download it into the model's folder"
    );
    let error = message(&folder(vec![(second, b.clone())]));
    assert!(
        error.starts_with(
            "'model-00001-of-00002.safetensors' is missing: the other shards ask for it"
        ),
        "{error}"
    );
    let wrong = json!({"a": second, "b": second});
    let error = message(&folder(vec![
        (first, a.clone()),
        (second, b.clone()),
        (safetensors::INDEX, index(&wrong)),
    ]));
    assert!(
        error.starts_with("model-00002-of-00002.safetensors is damaged: tensor 'a' is not in it"),
        "{error}"
    );
    let more = json!({"a": first, "b": second, "c": second});
    let error = message(&folder(vec![
        (first, a.clone()),
        (second, b.clone()),
        (safetensors::INDEX, index(&more)),
    ]));
    assert!(
        error.contains("tensor 'c' is not in it although model.safetensors.index.json says so"),
        "{error}"
    );
    let error = message(&folder(vec![
        (first, a.clone()),
        (second, a.clone()),
        (safetensors::INDEX, index(&both)),
    ]));
    assert!(
        error.contains("tensor 'a' is also in another file"),
        "{error}"
    );
    let outside = json!({"a": "../../etc/passwd"});
    let error = message(&folder(vec![
        (first, a.clone()),
        (safetensors::INDEX, index(&outside)),
    ]));
    assert!(
        error.starts_with("'../../etc/passwd' is missing"),
        "{error}"
    );
    for bad in [
        r#"{"weight_map": {"a": "x", "a": "x"}}"#,
        r#"{"weight_map": [1]}"#,
        r#"{"weight_map": {"a": 1}}"#,
        "{}",
        "",
        "[[[",
    ] {
        let error = message(&folder(vec![
            (first, a.clone()),
            (safetensors::INDEX, bad.into()),
        ]));
        assert!(
            error.starts_with("model.safetensors.index.json is damaged: "),
            "{error}"
        );
    }
    let third = "model-00001-of-00003.safetensors";
    let error = message(&folder(vec![(first, a.clone()), (second, b), (third, a)]));
    assert!(
        error.contains("shards of a set of 2 and of a set of 3"),
        "{error}"
    );
    let many = vec![("model-00001-of-99999.safetensors", one())];
    assert!(matches!(
        open(&folder(many)),
        Err(ModelError::TooLarge { .. })
    ));
}

#[test]
fn folders_that_are_no_models_say_what_is_missing() {
    let gguf = || model("llama").write();
    assert!(message(&[]).starts_with("this is not a model: give one GGUF file, or a folder"));
    assert!(
        message(&[("a.gguf", gguf()), ("b.gguf", gguf())])
            .contains("several GGUF files, 'a.gguf' and 'b.gguf'")
    );
    assert!(
        message(&[("a.gguf", gguf()), ("a.gguf", gguf())])
            .contains("two of its files are named 'a.gguf'")
    );
    assert!(message(&[("a.gguf", b"GGML".to_vec())]).contains("a.gguf is no GGUF file"));
    assert!(message(&[("a.gguf", vec![])]).contains("ends inside the magic"));
    assert!(message(&[("model.safetensors", one())]).starts_with("config.json is missing"));
    assert!(message(&folder(vec![])).starts_with("model.safetensors is missing"));
    assert!(
        message(&[("config.json", config()), ("model.safetensors", one())])
            .starts_with("tokenizer.json is missing")
    );
    let config = |text: &str| {
        message(&folder(vec![
            ("config.json", text.into()),
            ("model.safetensors", one()),
        ]))
    };
    assert!(config("[]").contains("JSON but not an object"));
    assert!(config("{").contains("not JSON"));
    assert!(config(&"[".repeat(100_000)).contains("not JSON"));
    assert!(config(&" ".repeat(limits::CONFIG_BYTES + 1)).starts_with("config.json is too large"));
}

#[test]
fn the_fingerprint_tells_models_apart() {
    let print = |writer: &Writer| {
        open(&[("m.gguf", writer.write())])
            .expect("valid")
            .fingerprint()
    };
    let base = model("llama");
    assert_eq!(print(&base), print(&base.clone()));
    let mut other = base.clone();
    other.tensors[5].data[0] = 1;
    assert_ne!(print(&base), print(&other), "data");
    let mut other = base.clone();
    other.tensors[0].kind = 26;
    assert_ne!(print(&base), print(&other), "dtype");
    let mut other = base.clone();
    other.values[8].1 = G::F32(20_000.0);
    let weights = |writer: &Writer| {
        open(&[("m.gguf", writer.write())])
            .expect("valid")
            .weights
            .fingerprint()
    };
    assert_eq!(
        weights(&base),
        weights(&other),
        "the configuration is not of the weights"
    );
    assert_ne!(print(&base), print(&other), "but of the model");
    let big = |at: usize| {
        let mut data = vec![0; 40_000];
        data[at] = 1;
        weights(&base.clone().tensor("big", &[10_000], 0, data))
    };
    assert_ne!(big(0), big(39_999));
    assert_eq!(big(4096), big(35_903), "the middle is not sampled");
}

#[test]
fn safetensors_cut_anywhere_are_refused() {
    let bytes = one();
    assert_eq!(safetensors::parse("m", &bytes).expect("valid").len(), 3);
    for len in 0..bytes.len() {
        let error = safetensors::parse("m", &bytes[..len]).expect_err("truncated");
        assert!(
            matches!(error, ModelError::Corrupt { .. }),
            "{len}: {error}"
        );
    }
    let mut longer = bytes;
    longer.push(0);
    assert!(safetensors::parse("m", &longer).is_err(), "no polyglots");
}

#[test]
fn bad_safetensors_headers_are_refused() {
    for length in [limits::SAFETENSORS_HEADER_BYTES + 1, 1 << 40, u64::MAX] {
        let mut bytes = one();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        let (error, held) = peak(|| safetensors::parse("m", &bytes).expect_err("huge"));
        assert!(matches!(error, ModelError::TooLarge { .. }), "{error}");
        within(0, held);
    }
    let entry =
        |rest: &str| format!(r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]{rest}}}}}"#);
    assert!(safetensors::parse("m", &raw_safetensors(&entry(""), 8)).is_ok());
    let padded = format!("{}   ", entry(""));
    assert!(safetensors::parse("m", &raw_safetensors(&padded, 8)).is_ok());
    let table = [
        (entry(r#","more":1"#), 8),
        (entry(r#","shape":[2]"#), 8),
        (entry("").replace("[2]", "[3]"), 8),
        (entry("").replace("[2]", "[-2]"), 8),
        (entry("").replace("[2]", "[4611686018427387904,4]"), 8),
        (entry("").replace("[2]", "[2,1,1,1,1,1,1,1,1]"), 8),
        (entry("").replace("[0,8]", "[8,0]"), 8),
        (entry("").replace("[0,8]", "[4,12]"), 12),
        (entry("").replace("[0,8]", "[0,18446744073709551615]"), 8),
        (entry("").replace("[0,8]", "[0,8,9]"), 8),
        (entry("").replace("F32", "Q4"), 8),
        (entry(""), 7),
        (entry(""), 9),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#.into(), 8),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#.into(), 12),
        (r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0),
        (r#"{"__metadata__":{"a":1}}"#.into(), 0),
        ("[".repeat(100_000), 0),
        (format!(r#"{{"a":{}"#, "[".repeat(100_000)), 0),
        ("[]".into(), 0),
        ("null".into(), 0),
        (String::new(), 0),
        ("\u{feff}{}".into(), 0),
    ];
    for (header, data) in table {
        let error = safetensors::parse("m", &raw_safetensors(&header, data)).expect_err(&header);
        assert!(matches!(error, ModelError::Corrupt { .. }), "{error}");
        assert!(error.to_string().len() < 400, "{error}");
    }
    let mut invalid = raw_safetensors(&entry(""), 8);
    invalid[11] = 0xff;
    assert!(safetensors::parse("m", &invalid).is_err());
}

#[test]
fn bloated_headers_cost_no_more_than_their_bytes() {
    let empty: Vec<String> = (0..100_000)
        .map(|i| format!(r#""{i:x}":{{"dtype":"U8","shape":[],"data_offsets":[0,0]}}"#))
        .collect();
    let zeros = "0,".repeat(500_000);
    for header in [
        format!("{{{}}}", empty.join(",")),
        format!(r#"{{"a":{{"dtype":"F32","shape":[{zeros}0],"data_offsets":[0,0]}}}}"#),
        format!(r#"{{"a":{{"dtype":[{zeros}0],"shape":[0],"data_offsets":[0,0]}}}}"#),
        format!(r#"{{"__metadata__":{{"a":[{zeros}0]}}}}"#),
        format!(r#"{{"__metadata__":[{zeros}0]}}"#),
    ] {
        let bytes = raw_safetensors(&header, 0);
        let (error, held) = peak(|| safetensors::parse("m", &bytes).map(|_| ()));
        assert!(error.is_err());
        within(bytes.len(), held);
    }
    // The most that is accepted.
    let empty: Vec<String> = (0..50_000)
        .map(|i| format!(r#""{i:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#))
        .collect();
    let bytes = raw_safetensors(&format!("{{{}}}", empty.join(",")), 0);
    let (parsed, held) = peak(|| safetensors::parse("m", &bytes).map(|list| list.len()));
    assert_eq!(parsed, Ok(50_000));
    within(bytes.len(), held);
}

#[test]
fn many_small_gguf_parts_cost_no_more_than_their_bytes() {
    let mut writer = Writer::default();
    for i in 0..60_000 {
        writer = writer.value(&format!("{i:x}"), G::U8(0));
    }
    for i in 0..20_000u32 {
        writer = writer.tensor(&format!("{i:x}"), &[], 24, vec![0]);
    }
    let bytes = writer.write();
    let header = bytes.len() - 20_000 * 32;
    let (parsed, held) = peak(|| Gguf::parse(&bytes).map(|gguf| gguf.tensors().len()));
    assert_eq!(parsed, Ok(20_000));
    within(header, held);
    // A count without the things.
    let claims = Writer {
        n_tensors: Some(limits::TENSORS),
        n_kv: Some(limits::GGUF_KEYS),
        ..Writer::default()
    };
    let (parsed, held) = peak(|| Gguf::parse(&claims.write()).map(|_| ()));
    assert!(parsed.is_err());
    within(100, held);
}

/// Parses, walks all that parsed, and gives the most that was held.
fn read_gguf(bytes: &[u8]) -> usize {
    peak(|| {
        let Ok(gguf) = Gguf::parse(bytes) else { return };
        for tensor in gguf.tensors() {
            assert!(
                bytes
                    .get(tensor.range.clone())
                    .is_some_and(|data| !data.is_empty())
            );
        }
        let metadata = gguf.metadata(bytes);
        for key in metadata.keys() {
            let _ = (
                metadata.get_u32(key),
                metadata.get_f32(key),
                metadata.get_bool(key),
                metadata.get_str(key),
            );
            if let Ok(Some(array)) = metadata.get_array(key) {
                let walked = array
                    .strings()
                    .map(|s| s.take(1000).filter(Result::is_ok).count());
                let _ = walked
                    .or(array.ints().map(|i| i.take(1000).count()))
                    .or(array.floats().map(|f| f.count()));
            }
        }
    })
    .1
}

/// Bytes of `base` overwritten at these places (modulo its length), then cut or extended.
fn mutate(mut bytes: Vec<u8>, changes: &[(usize, u8)], len: Option<usize>) -> Vec<u8> {
    for &(at, value) in changes {
        let at = at % bytes.len();
        bytes[at] = value;
    }
    if let Some(len) = len {
        bytes.resize(len % (2 * bytes.len()), 0xff);
    }
    bytes
}

fn changes() -> impl Strategy<Value = Vec<(usize, u8)>> {
    let value = prop_oneof![any::<u8>(), Just(0), Just(0xff), Just(0x80), Just(0x7f)];
    prop::collection::vec((any::<usize>(), value), 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_are_read_safely(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let mut gguf = b"GGUF\x03\0\0\0\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0".to_vec();
        gguf.extend(&bytes);
        within(gguf.len(), read_gguf(&gguf));
        within(bytes.len(), read_gguf(&bytes));
        let mut tensors = (bytes.len() as u64 / 2).to_le_bytes().to_vec();
        tensors.extend(&bytes);
        within(tensors.len(), peak(|| safetensors::parse("m", &tensors).map(|_| ())).1);
    }

    #[test]
    fn mutated_gguf_files_are_read_safely(changes in changes(), len in prop::option::of(any::<usize>())) {
        for base in [small(), model("qwen3")] {
            let bytes = mutate(base.write(), &changes, len);
            within(bytes.len(), read_gguf(&bytes));
            let _ = open(&[("m.gguf", bytes)]);
        }
    }

    #[test]
    fn mutated_safetensors_are_read_safely(changes in changes(), len in prop::option::of(any::<usize>())) {
        let bytes = mutate(one(), &changes, len);
        let (parsed, held) = peak(|| safetensors::parse("m", &bytes));
        within(bytes.len(), held);
        for tensor in parsed.unwrap_or_default() {
            prop_assert!(bytes.get(tensor.range).is_some());
        }
    }

    #[test]
    fn mutated_json_is_read_safely(changes in changes(), len in prop::option::of(any::<usize>())) {
        let both = index(&json!({"a": "x.safetensors", "b": "y.safetensors"}));
        for (name, base) in [("config.json", config()), (safetensors::INDEX, both)] {
            let bytes = mutate(base, &changes, len);
            let _ = open(&folder(vec![(name, bytes), ("x.safetensors", one())]));
        }
    }
}
