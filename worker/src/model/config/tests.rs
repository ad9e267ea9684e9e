//! Configurations as files give them, good and bad.

use super::*;
use crate::format::gguf::Gguf;
use crate::format::gguf_testing::{Value as G, Writer, model};
use crate::weights::ModelFile;
use hotcell_ipc::memory::{Mapping, sealed_memory};
use serde_json::json;

fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 500000.0, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2
    })
}

fn with(changes: Value) -> Value {
    let mut config = llama();
    for (key, value) in changes.as_object().expect("an object") {
        config[key] = value.clone();
    }
    config
}

pub(super) fn read(config: &Value) -> Checked<ModelConfig> {
    ModelConfig::from_hugging_face(config.as_object().expect("an object"), None)
}

fn ok(changes: Value) -> ModelConfig {
    read(&with(changes)).expect("valid")
}

fn without(field: &str) -> Value {
    let mut config = llama();
    config.as_object_mut().expect("an object").remove(field);
    config
}

pub(super) fn gguf(writer: Writer) -> Checked<ModelConfig> {
    let bytes = writer.write();
    let index = Gguf::parse(&bytes).expect("well formed");
    let mapping =
        Mapping::of_file(sealed_memory("gguf", &bytes).expect("memory")).expect("mapping");
    let file = ModelFile {
        name: "m.gguf".into(),
        mapping,
    };
    let mut weights = Weights::default();
    weights
        .add(&file, index.tensors().to_vec())
        .expect("distinct");
    ModelConfig::from_gguf("m.gguf", index.metadata(&bytes), &weights)
}

fn changed(arch: &str, key: &str, value: G) -> Checked<ModelConfig> {
    let mut writer = model(arch);
    writer.values.retain(|(name, _)| name != key);
    gguf(writer.value(key, value))
}

#[test]
fn a_llama_config_reads_as_it_is() {
    let expected = ModelConfig {
        architecture: Architecture::Llama,
        vocab: 100,
        hidden: 64,
        layers: 3,
        heads: 8,
        kv_heads: 2,
        head_dim: 8,
        intermediate: 128,
        rms_eps: 1e-5,
        rope: Rope {
            theta: 500_000.0,
            scaling: RopeScaling::None,
            interleaved: false,
        },
        local_rope: None,
        attention_scale: 1.0 / 8.0f64.sqrt(),
        attention_cap: None,
        logit_cap: None,
        norms_less_one: false,
        experts: None,
        context: 512,
        sliding_window: None,
        windowed: vec![false; 3],
        tied_embeddings: false,
        qkv_bias: false,
        o_bias: false,
        qk_norm: false,
        floats8: None,
        bos: Some(1),
        eos: vec![2],
    };
    assert_eq!(read(&llama()), Ok(expected));
}

#[test]
fn fields_that_may_be_absent_have_the_defaults_of_transformers() {
    assert_eq!(
        read(&without("num_key_value_heads"))
            .expect("valid")
            .kv_heads,
        8
    );
    assert_eq!(
        read(&without("rope_theta")).expect("valid").rope.theta,
        10_000.0
    );
    assert_eq!(read(&without("rms_norm_eps")).expect("valid").rms_eps, 1e-6);
    assert_eq!(
        read(&without("architectures")).expect("valid").architecture,
        Architecture::Llama
    );
    assert!(read(&without("hidden_act")).is_ok());
    assert_eq!(ok(json!({"head_dim": null})).head_dim, 8);
    assert_eq!(ok(json!({"head_dim": 16})).head_dim, 16);
    assert_eq!(
        ok(json!({"architectures": ["Qwen3ForCausalLM"]})).head_dim,
        128
    );
    assert!(
        ok(json!({"bos_token_id": null, "eos_token_id": null}))
            .eos
            .is_empty()
    );
    for field in [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
    ] {
        let error = read(&without(field)).expect_err("required").to_string();
        assert!(
            error.starts_with(&format!("config.json is damaged: it has no {field};")),
            "{error}"
        );
    }
}

#[test]
fn architectures_differ_in_biases_and_norms() {
    let flags = |config: ModelConfig| (config.qkv_bias, config.o_bias, config.qk_norm);
    let class = |name: &str, bias: bool| {
        flags(ok(json!({"architectures": [name], "attention_bias": bias})))
    };
    assert_eq!(class("LlamaForCausalLM", true), (true, true, false));
    assert_eq!(class("MistralForCausalLM", true), (false, false, false));
    assert_eq!(class("Qwen2ForCausalLM", true), (true, false, false));
    assert_eq!(class("Qwen3ForCausalLM", false), (false, false, true));
    assert_eq!(class("Qwen3ForCausalLM", true), (true, true, true));
    assert!(ok(json!({"tie_word_embeddings": true})).tied_embeddings);
}

#[test]
fn bad_values_are_refused_by_name() {
    let table = [
        (
            json!({"hidden_size": 0}),
            "hidden_size is 0 but must be at least 1",
        ),
        (
            json!({"hidden_size": -64}),
            "hidden_size is -64 but must be a whole number",
        ),
        (
            json!({"hidden_size": 64.5}),
            "hidden_size is 64.5 but must be a whole number",
        ),
        (
            json!({"hidden_size": "64"}),
            "hidden_size is '64' but must be a whole number",
        ),
        (
            json!({"hidden_size": [64]}),
            "hidden_size is a list but must be a whole number",
        ),
        (
            json!({"hidden_size": 65537}),
            "hidden_size is 65537 where the limit is 65536",
        ),
        (json!({"hidden_size": u64::MAX}), "where the limit is 65536"),
        (
            json!({"num_hidden_layers": 1025}),
            "num_hidden_layers is 1025 where the limit is 1024",
        ),
        (
            json!({"num_attention_heads": 1025}),
            "num_attention_heads is 1025 where the limit is 1024",
        ),
        (
            json!({"vocab_size": (4 << 20) + 1}),
            "vocab_size is 4194305 where the limit is 4194304",
        ),
        (
            json!({"intermediate_size": (1 << 20) + 1}),
            "intermediate_size is 1048577",
        ),
        (
            json!({"max_position_embeddings": (1 << 24) + 1}),
            "max_position_embeddings is 16777217",
        ),
        (
            json!({"head_dim": 1026}),
            "head_dim is 1026 where the limit is 1024",
        ),
        (json!({"head_dim": 7}), "the head width 7 is odd"),
        (
            json!({"num_key_value_heads": 3}),
            "num_attention_heads (8) is not a multiple of num_key_value_heads (3)",
        ),
        (json!({"num_key_value_heads": 16}), "is not a multiple of"),
        (
            json!({"hidden_size": 65}),
            "hidden_size (65) is not a multiple of num_attention_heads (8)",
        ),
        (
            json!({"rms_norm_eps": 0.0}),
            "rms_norm_eps is 0.0 but must be between",
        ),
        (
            json!({"rms_norm_eps": 2}),
            "rms_norm_eps is 2.0 but must be between",
        ),
        (
            json!({"rms_norm_eps": "x"}),
            "rms_norm_eps is 'x' but must be a number",
        ),
        (
            json!({"rope_theta": 0.5}),
            "rope_theta is 0.5 but must be between 1.0 and",
        ),
        (json!({"rope_theta": -1}), "rope_theta is -1.0"),
        (
            json!({"hidden_act": "gelu"}),
            "hidden_act 'gelu' is not supported, only 'silu' is",
        ),
        (json!({"mlp_bias": true}), "mlp_bias is not supported"),
        (
            json!({"mlp_bias": 1}),
            "mlp_bias is 1 but must be true or false",
        ),
        (
            json!({"quantization_config": {"quant_method": "gptq"}}),
            "weights quantised with 'gptq' are not supported",
        ),
        (
            json!({"partial_rotary_factor": 0.5}),
            "partial_rotary_factor 0.5 is not supported",
        ),
        (
            json!({"eos_token_id": 100}),
            "eos_token_id is 100 but the vocabulary has 100 tokens",
        ),
        (
            json!({"eos_token_id": [1, -1]}),
            "eos_token_id is -1 but must be a whole number",
        ),
        (
            json!({"bos_token_id": u64::MAX}),
            "but the vocabulary has 100 tokens",
        ),
        (
            json!({"eos_token_id": vec![1; 65]}),
            "eos_token_id lists 65 tokens where the limit is 64",
        ),
        (
            json!({"architectures": ["GPT2LMHeadModel"]}),
            "architecture 'GPT2LMHeadModel' is not supported; supported are LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        (
            json!({"architectures": [], "model_type": "bert"}),
            "architecture 'bert' is not supported",
        ),
        (
            json!({"architectures": [], "model_type": null}),
            "architecture '(none given)' is not supported",
        ),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}),
            "unsupported rope scaling 'yarn'",
        ),
        (
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
            "unsupported rope scaling 'dynamic'",
        ),
        (
            json!({"rope_parameters": {"rope_type": "longrope"}}),
            "unsupported rope scaling 'longrope'",
        ),
        (
            json!({"rope_scaling": "linear"}),
            "rope_scaling is 'linear' but must be an object",
        ),
        (
            json!({"rope_scaling": {"rope_type": 3}}),
            "rope_type in rope_scaling is not a text",
        ),
        (
            json!({"rope_scaling": {"type": "linear"}}),
            "rope_scaling has no factor",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 0.0}}),
            "factor is 0.0 but must be between",
        ),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}}),
            "low_freq_factor (4.0) must be below high_freq_factor (4.0)",
        ),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
            "it has no original_max_position_embeddings",
        ),
    ];
    for (changes, expected) in table {
        let error = read(&with(changes.clone()))
            .expect_err("must be refused")
            .to_string();
        assert!(error.starts_with("config.json"), "{error}");
        assert!(error.contains(expected), "{changes}: {error}");
    }
}

#[test]
fn rope_is_read_from_old_and_new_files() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let old = ok(json!({"rope_scaling": llama3})).rope;
    assert_eq!(old.theta, 500_000.0);
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    assert_eq!(old.scaling, scaling);
    let mut newer = llama3.clone();
    newer["rope_theta"] = json!(1_000_000.0);
    let new = ok(json!({"rope_theta": null, "rope_parameters": newer})).rope;
    assert_eq!(new, Rope { theta: 1e6, ..old });
    assert_eq!(
        ok(json!({"rope_scaling": {"type": "linear", "factor": 4}}))
            .rope
            .scaling,
        RopeScaling::Linear { factor: 4.0 }
    );
    assert_eq!(
        ok(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}))
            .rope
            .scaling,
        RopeScaling::None
    );
    assert_eq!(
        ok(json!({"rope_scaling": {}})).rope.scaling,
        RopeScaling::None
    );
}

#[test]
fn frequencies_agree_with_transformers() {
    // From the formulas of transformers' modeling_rope_utils.py in f32, run with NumPy.
    let close = |found: &[f32], expected: &[(usize, f32)]| {
        for &(pair, value) in expected {
            let relative = (found[pair] / value - 1.0).abs();
            assert!(relative < 1e-6, "{pair}: {} for {value}", found[pair]);
        }
    };
    let rope = |theta, scaling| Rope {
        theta,
        scaling,
        interleaved: false,
    };
    let plain = rope(10_000.0, RopeScaling::None).inverse_frequencies(64);
    assert_eq!(plain.len(), 32);
    close(
        &plain,
        &[
            (0, 1.0),
            (1, 0.749_894_2),
            (7, 0.133_352_15),
            (31, 0.000_133_352_15),
        ],
    );

    let llama3 = |factor| RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    // Llama 3.1 8B.
    let expected = [
        (0, 1.0),
        (1, 0.814_617_2),
        (10, 0.128_687_38),
        (20, 0.016_560_44),
        (28, 0.003_211_446),
        (29, 0.002_166_570_6),
        (30, 0.001_371_893_7),
        (31, 0.000_856_751_46),
        (32, 0.000_524_846),
        (33, 0.000_312_693_65),
        (34, 0.000_178_507_79),
        (35, 9.556_213e-5),
        (36, 7.784_655_5e-5),
        (40, 3.428_102_4e-5),
        (50, 4.411_534_5e-6),
        (63, 3.068_926e-7),
    ];
    close(
        &rope(500_000.0, llama3(8.0)).inverse_frequencies(128),
        &expected,
    );
    // Llama 3.2 1B.
    let expected = [
        (13, 0.004_839_421_2),
        (14, 0.003_211_446),
        (15, 0.001_290_548),
        (16, 0.000_429_556_7),
        (17, 9.708_286e-5),
        (18, 1.946_163_9e-5),
        (31, 9.418_307e-8),
    ];
    close(
        &rope(500_000.0, llama3(32.0)).inverse_frequencies(64),
        &expected,
    );

    let linear = rope(10_000.0, RopeScaling::Linear { factor: 4.0 }).inverse_frequencies(64);
    assert!(linear.iter().zip(&plain).all(|(a, b)| *a == b / 4.0));
    let factors: Vec<f32> = (0..32)
        .map(|pair| if pair < 16 { 1.0 } else { 8.0 })
        .collect();
    let divided = rope(10_000.0, RopeScaling::Factors(factors)).inverse_frequencies(64);
    assert_eq!((divided[15], divided[16]), (plain[15], plain[16] / 8.0));
}

#[test]
fn windows_hold_where_the_architecture_says() {
    let window = |changes: Value| {
        let config = ok(changes);
        (0..4).map(|layer| config.window(layer)).collect::<Vec<_>>()
    };
    let none = vec![None; 4];
    let (qwen, mistral) = (json!(["Qwen2ForCausalLM"]), json!(["MistralForCausalLM"]));
    assert_eq!(
        window(json!({"sliding_window": 100})),
        none,
        "Llama has no window"
    );
    let all = vec![Some(100), Some(100), Some(100), None];
    assert_eq!(
        window(json!({"architectures": mistral, "sliding_window": 100})),
        all
    );
    assert_eq!(
        window(json!({"architectures": mistral, "sliding_window": null})),
        none
    );
    assert_eq!(
        window(json!({"architectures": mistral, "sliding_window": 512})),
        none,
        "as long as the context"
    );
    assert!(
        read(&with(
            json!({"architectures": mistral, "sliding_window": 0})
        ))
        .is_err()
    );
    assert_eq!(
        window(json!({"architectures": qwen, "sliding_window": 100})),
        none
    );
    assert_eq!(
        window(json!({"architectures": qwen, "sliding_window": 100, "use_sliding_window": false})),
        none
    );
    let asked = |rest: Value| {
        let mut changes =
            json!({"architectures": qwen, "sliding_window": 100, "use_sliding_window": true});
        changes
            .as_object_mut()
            .expect("an object")
            .extend(rest.as_object().expect("an object").clone());
        changes
    };
    assert_eq!(window(asked(json!({}))), all);
    assert_eq!(window(asked(json!({"max_window_layers": 3}))), none);
    assert_eq!(
        window(asked(json!({"max_window_layers": 2}))),
        [None, None, Some(100), None]
    );
    let types = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    assert_eq!(
        window(asked(json!({"layer_types": types}))),
        [Some(100), None, Some(100), None]
    );
    assert!(read(&with(asked(json!({"layer_types": ["full_attention"]})))).is_err());
    assert!(
        read(&with(asked(
            json!({"layer_types": ["full_attention", "chunked_attention", "full_attention"]})
        )))
        .is_err()
    );
}

#[test]
fn the_generation_config_decides_what_ends_a_text() {
    let config = with(json!({"eos_token_id": [2, 3, 2]}));
    let config = config.as_object().expect("an object");
    let read = |generation: Value| ModelConfig::from_hugging_face(config, generation.as_object());
    assert_eq!(read(json!(null)).expect("valid").eos, [2, 3]);
    assert_eq!(
        read(json!({"eos_token_id": [7, 8]})).expect("valid").eos,
        [7, 8]
    );
    assert_eq!(
        read(json!({"eos_token_id": null, "bos_token_id": 9}))
            .expect("valid")
            .bos,
        Some(9)
    );
    let error = read(json!({"eos_token_id": "x"}))
        .expect_err("no number")
        .to_string();
    assert!(
        error.starts_with("generation_config.json is damaged: eos_token_id"),
        "{error}"
    );
}

#[test]
fn gguf_metadata_reads_as_it_is() {
    let config = gguf(model("llama")).expect("valid");
    assert_eq!(
        (
            config.architecture,
            config.vocab,
            config.hidden,
            config.layers
        ),
        (Architecture::Llama, 5, 8, 2)
    );
    assert_eq!(
        (
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.intermediate
        ),
        (2, 1, 4, 16)
    );
    assert_eq!(
        (
            config.context,
            config.rms_eps,
            config.bos,
            config.eos.as_slice()
        ),
        (64, 1e-5, Some(0), &[1][..])
    );
    assert_eq!(
        config.rope,
        Rope {
            theta: 10_000.0,
            scaling: RopeScaling::None,
            interleaved: true
        }
    );
    assert!(config.tied_embeddings && !config.qkv_bias && !config.qk_norm);
    let config = gguf(
        model("llama")
            .zeros("output.weight", &[8, 5])
            .zeros("blk.0.attn_q.bias", &[8]),
    )
    .expect("valid");
    assert!(!config.tied_embeddings && config.qkv_bias);

    let qwen2 = gguf(model("qwen2")).expect("valid");
    assert!(!qwen2.rope.interleaved && qwen2.qkv_bias);
    let qwen3 = changed("qwen3", "qwen3.attention.key_length", G::U32(6)).expect("valid");
    assert!(!qwen3.rope.interleaved && qwen3.qk_norm && qwen3.head_dim == 6);
    let ends = model("llama")
        .value("tokenizer.ggml.eot_token_id", G::U32(3))
        .value("tokenizer.ggml.eom_token_id", G::U32(1));
    assert_eq!(gguf(ends).expect("valid").eos, [1, 3]);
    let per_layer = changed(
        "llama",
        "llama.attention.head_count_kv",
        G::I32s(vec![2, 2]),
    );
    assert_eq!(per_layer.expect("valid").kv_heads, 2);
    let window = changed("llama", "llama.attention.sliding_window", G::U32(16)).expect("valid");
    assert_eq!(
        (window.window(0), window.window(1), window.window(2)),
        (Some(16), Some(16), None)
    );
}

#[test]
fn gguf_rope_scaling_is_by_type_or_by_factors() {
    let scaling = |config: Checked<ModelConfig>| {
        config
            .map(|config| config.rope.scaling)
            .map_err(|e| e.to_string())
    };
    let linear = model("llama").value("llama.rope.scaling.type", G::Str("linear".into()));
    let linear = linear.value("llama.rope.scaling.factor", G::F32(2.0));
    assert_eq!(
        scaling(gguf(linear.clone())),
        Ok(RopeScaling::Linear { factor: 2.0 })
    );
    assert_eq!(
        scaling(changed("llama", "llama.rope.scale_linear", G::F32(4.0))),
        Ok(RopeScaling::Linear { factor: 4.0 })
    );
    assert_eq!(
        scaling(changed(
            "llama",
            "llama.rope.scaling.type",
            G::Str("none".into())
        )),
        Ok(RopeScaling::None)
    );
    let factors = |values: [f32; 2]| {
        values
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let with_factors = model("llama").tensor("rope_freqs.weight", &[2], 0, factors([1.0, 8.0]));
    assert_eq!(
        scaling(gguf(with_factors)),
        Ok(RopeScaling::Factors(vec![1.0, 8.0]))
    );
    let refused = |config, expected: &str| {
        let error = scaling(config).expect_err("must be refused");
        assert!(
            error.starts_with("m.gguf") || error.starts_with("tensor"),
            "{error}"
        );
        assert!(error.contains(expected), "{error}");
    };
    refused(
        changed("llama", "llama.rope.scaling.type", G::Str("yarn".into())),
        "unsupported rope scaling 'yarn'",
    );
    refused(
        changed("llama", "llama.rope.scaling.type", G::Str("linear".into())),
        "it has no llama.rope.scaling.factor",
    );
    refused(
        gguf(linear.zeros("rope_freqs.weight", &[2])),
        "is not supported",
    );
    refused(
        gguf(model("llama").zeros("rope_freqs.weight", &[3])),
        "has shape [3] but",
    );
    refused(
        gguf(model("llama").zeros("rope_freqs.weight", &[2])),
        "0.0, which is not between",
    );
    refused(
        gguf(model("llama").tensor("rope_freqs.weight", &[2], 0, factors([1.0, f32::NAN]))),
        "NaN",
    );
    refused(
        gguf(model("llama").tensor("rope_freqs.weight", &[2], 1, vec![0; 4])),
        "stored as f16",
    );
}

#[test]
fn bad_gguf_metadata_is_refused_by_name() {
    let table = [
        (
            "general.architecture",
            G::Str("gpt2".into()),
            "architecture 'gpt2' is not supported; supported are llama, qwen2, qwen3",
        ),
        (
            "general.architecture",
            G::U32(1),
            "'general.architecture' is of type u32 but should be a string",
        ),
        (
            "general.type",
            G::Str("adapter".into()),
            "it holds a 'adapter' rather than a model",
        ),
        ("split.count", G::U32(3), "one part of a split model"),
        (
            "llama.expert_count",
            G::U32(8),
            "llama.expert_count is not 0",
        ),
        (
            "llama.attention.causal",
            G::Bool(false),
            "llama.attention.causal is false",
        ),
        ("llama.block_count", G::U32(0), "llama.block_count is 0"),
        ("llama.block_count", G::I32(-1), "does not fit"),
        (
            "llama.block_count",
            G::F32(2.0),
            "is of type f32 but should be an integer",
        ),
        (
            "llama.embedding_length",
            G::U32(u32::MAX),
            "llama.embedding_length is 4294967295 where the limit is 65536",
        ),
        (
            "llama.embedding_length",
            G::U64(u64::MAX),
            "where the limit is 65536",
        ),
        (
            "llama.attention.head_count",
            G::U32(3),
            "llama.embedding_length (8) is not a multiple of llama.attention.head_count (3)",
        ),
        (
            "llama.attention.head_count_kv",
            G::I32s(vec![1, 2]),
            "differs from layer to layer",
        ),
        (
            "llama.attention.head_count_kv",
            G::I32s(vec![-1, -1]),
            "llama.attention.head_count_kv is negative",
        ),
        (
            "llama.attention.head_count_kv",
            G::F32s(vec![1.0]),
            "should hold integers",
        ),
        (
            "llama.attention.layer_norm_rms_epsilon",
            G::F32(f32::NAN),
            "is not a finite number",
        ),
        (
            "llama.attention.layer_norm_rms_epsilon",
            G::F32(-1.0),
            "must be between",
        ),
        (
            "llama.rope.freq_base",
            G::F32(f32::INFINITY),
            "is not a finite number",
        ),
        (
            "llama.rope.dimension_count",
            G::U32(2),
            "llama.rope.dimension_count 2 is not supported for heads 4 wide",
        ),
        (
            "llama.attention.value_length",
            G::U32(8),
            "llama.attention.value_length 8 is not supported",
        ),
        (
            "tokenizer.ggml.eos_token_id",
            G::U32(5),
            "tokenizer.ggml.eos_token_id is 5 but the vocabulary has 5 tokens",
        ),
        (
            "tokenizer.ggml.tokens",
            G::Strs(vec![]),
            "the length of tokenizer.ggml.tokens is 0",
        ),
        ("tokenizer.ggml.tokens", G::U32(5), "should be an array"),
    ];
    for (key, value, expected) in table {
        let error = changed("llama", key, value.clone())
            .expect_err("must be refused")
            .to_string();
        assert!(error.starts_with("m.gguf"), "{error}");
        // An architecture that is not the file's prefix is another error.
        assert!(error.contains(expected), "{key} {value:?}: {error}");
    }
    let mut writer = model("llama");
    writer
        .values
        .retain(|(key, _)| key != "llama.attention.layer_norm_rms_epsilon");
    assert!(gguf(writer).is_err());
}
