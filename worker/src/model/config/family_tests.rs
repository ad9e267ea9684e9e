//! Configurations of Gemma 3 and of mixtures of experts, good and bad.

use super::tests::{gguf, read};
use super::*;
use crate::format::gguf_testing::{Value as G, Writer, model};
use serde_json::json;

/// `config.json` of google/gemma-3-1b-it, less what nobody reads.
fn gemma() -> Value {
    json!({
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": null,
        "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": null,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "vocab_size": 262144
    })
}

/// `config.json` of Qwen/Qwen3-30B-A3B, less what nobody reads.
fn mixture() -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": null,
        "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936
    })
}

fn with(mut config: Value, changes: &Value) -> Value {
    for (key, value) in changes.as_object().expect("an object") {
        match value {
            Value::String(gone) if gone == "(absent)" => {
                config.as_object_mut().expect("an object").remove(key);
            }
            _ => config[key] = value.clone(),
        }
    }
    config
}

fn gemma_with(changes: Value) -> ModelConfig {
    read(&with(gemma(), &changes)).expect("valid")
}

fn mixture_with(changes: Value) -> ModelConfig {
    read(&with(mixture(), &changes)).expect("valid")
}

fn rope(theta: f64, scaling: RopeScaling) -> Rope {
    Rope {
        theta,
        scaling,
        interleaved: false,
    }
}

#[test]
fn gemma_reads_as_it_is() {
    let config = gemma_with(json!({}));
    assert_eq!(
        (config.architecture, config.vocab, config.hidden),
        (Architecture::Gemma3, 262_144, 1152)
    );
    assert_eq!((config.layers, config.head_dim), (26, 256));
    assert!(config.tied_embeddings && config.norms_less_one && config.qk_norm);
    assert!(!config.qkv_bias && !config.o_bias);
    assert_eq!(config.attention_scale, 1.0 / 16.0);
    assert_eq!((config.attention_cap, config.logit_cap), (None, None));
    assert_eq!(config.rope, rope(1e6, RopeScaling::None));
    assert_eq!(config.local_rope, Some(rope(1e4, RopeScaling::None)));
    assert_eq!(config.eos, [1, 106]);
    let whole: Vec<usize> = (0..26).filter(|&i| config.window(i).is_none()).collect();
    assert_eq!(whole, [5, 11, 17, 23]);
    assert!((0..26).all(|i| config.window(i).is_none_or(|window| window == 512)));
}

#[test]
fn gemma_without_its_usual_fields_has_the_defaults_of_transformers() {
    let gone = json!({
        "head_dim": "(absent)", "hidden_activation": "(absent)", "query_pre_attn_scalar": "(absent)",
        "rope_local_base_freq": "(absent)", "rope_theta": "(absent)", "rope_scaling": "(absent)",
        "sliding_window": "(absent)", "sliding_window_pattern": "(absent)", "rms_norm_eps": "(absent)",
        "attn_logit_softcapping": "(absent)", "final_logit_softcapping": "(absent)"
    });
    let usual = gemma_with(json!({}));
    let expected = ModelConfig {
        sliding_window: Some(4096),
        ..usual.clone()
    };
    assert_eq!(gemma_with(gone), expected);
    assert!(!gemma_with(json!({"tie_word_embeddings": false})).tied_embeddings);
    // Layers stay local where the window is no narrower than the context: they have a rope of their own.
    let short = gemma_with(json!({"max_position_embeddings": 512}));
    assert_eq!((short.window(0), short.is_local(0)), (None, true));
    assert!(!short.is_local(5));
}

#[test]
fn gemma_of_either_age_reads_alike() {
    let old = gemma_with(json!({
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 168
    }));
    assert_eq!(old.rope, rope(1e6, RopeScaling::Linear { factor: 8.0 }));
    assert_eq!((old.attention_cap, old.logit_cap), (Some(50.0), Some(30.0)));
    assert_eq!(old.attention_scale, 1.0 / 168.0f64.sqrt());
    let types: Vec<&str> = (1..=26)
        .map(|n| match n % 6 {
            0 => "full_attention",
            _ => "sliding_attention",
        })
        .collect();
    let new = gemma_with(json!({
        "rope_scaling": "(absent)", "rope_theta": "(absent)", "rope_local_base_freq": "(absent)",
        "sliding_window_pattern": "(absent)", "layer_types": types, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 168,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
        }
    }));
    assert_eq!(old, new);
    let types = gemma_with(
        json!({"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}),
    );
    assert_eq!((types.window(0), types.window(1)), (None, Some(512)));
    let pattern = gemma_with(json!({"sliding_window_pattern": 2}));
    assert_eq!((pattern.window(0), pattern.window(1)), (Some(512), None));
}

#[test]
fn a_mixture_reads_as_it_is() {
    let config = mixture_with(json!({}));
    let experts = |config: &ModelConfig| config.experts.clone().expect("experts");
    assert_eq!(
        (config.architecture, config.head_dim, config.qk_norm),
        (Architecture::Qwen3Moe, 128, true)
    );
    let expected = Experts {
        count: 128,
        used: 8,
        intermediate: 768,
        normalised: true,
        layers: vec![true; 48],
    };
    assert_eq!(experts(&config), expected);
    assert_eq!(config.window(0), None);
    let config = mixture_with(json!({
        "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1, 2, 99], "norm_topk_prob": "(absent)",
        "num_experts": "(absent)", "num_local_experts": 9, "head_dim": "(absent)", "use_sliding_window": true,
        "sliding_window": 64, "max_window_layers": 3
    }));
    let found = experts(&config);
    assert_eq!(found.layers, [false, false, false, true, false, true]);
    assert_eq!((found.count, found.normalised), (9, false));
    assert_eq!(config.head_dim, 64);
    assert!(
        (0..6).all(|layer| config.window(layer) == Some(64)),
        "whatever max_window_layers says"
    );
}

#[test]
fn bad_values_are_refused_by_name() {
    let table = [
        (
            gemma(),
            json!({"hidden_activation": "silu"}),
            "hidden_activation 'silu' is not supported, only 'gelu_pytorch_tanh' is",
        ),
        (
            gemma(),
            json!({"use_bidirectional_attention": true}),
            "use_bidirectional_attention is not supported",
        ),
        (
            gemma(),
            json!({"query_pre_attn_scalar": 0}),
            "query_pre_attn_scalar is 0.0 but must be between",
        ),
        (
            gemma(),
            json!({"query_pre_attn_scalar": -1}),
            "query_pre_attn_scalar is -1.0",
        ),
        (
            gemma(),
            json!({"attn_logit_softcapping": 0.0}),
            "attn_logit_softcapping is 0.0 but must be between",
        ),
        (
            gemma(),
            json!({"final_logit_softcapping": "x"}),
            "final_logit_softcapping is 'x' but must be a number",
        ),
        (
            gemma(),
            json!({"sliding_window_pattern": 0}),
            "sliding_window_pattern is 0 but must be at least 1",
        ),
        (
            gemma(),
            json!({"sliding_window": 0}),
            "sliding_window is 0 but must be at least 1",
        ),
        (
            gemma(),
            json!({"rope_local_base_freq": 0.1}),
            "rope_local_base_freq is 0.1 but must be between",
        ),
        (
            gemma(),
            json!({"layer_types": ["full_attention"]}),
            "layer_types lists 1 layers where num_hidden_layers is 26",
        ),
        (
            gemma(),
            json!({"num_hidden_layers": 1, "layer_types": ["linear_attention"]}),
            "layer type 'linear_attention' is not supported",
        ),
        (
            gemma(),
            json!({"rope_parameters": {"rope_type": "default"}}),
            "rope_parameters has neither full_attention nor sliding_attention",
        ),
        (
            gemma(),
            json!({"rope_parameters": 3}),
            "rope_parameters has neither",
        ),
        (
            gemma(),
            json!({"rope_parameters": {"full_attention": 3}}),
            "full_attention is 3 but must be an object",
        ),
        (
            gemma(),
            json!({"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}),
            "unsupported rope scaling 'yarn'",
        ),
        (
            gemma(),
            json!({"rope_scaling": {"rope_type": "linear"}}),
            "rope_scaling has no factor",
        ),
        (
            gemma(),
            json!({"architectures": ["Gemma3ForConditionalGeneration"]}),
            "architecture 'Gemma3ForConditionalGeneration' is not supported",
        ),
        (
            mixture(),
            json!({"num_experts": "(absent)"}),
            "it has no num_experts;",
        ),
        (
            mixture(),
            json!({"num_experts": 0}),
            "num_experts is 0 but must be at least 1",
        ),
        (
            mixture(),
            json!({"num_experts": 1025}),
            "num_experts is 1025 where the limit is 1024",
        ),
        (
            mixture(),
            json!({"num_experts": 7}),
            "num_experts_per_tok (8) is above num_experts (7)",
        ),
        (
            mixture(),
            json!({"num_experts_per_tok": 0}),
            "num_experts_per_tok is 0",
        ),
        (
            mixture(),
            json!({"num_experts_per_tok": "(absent)"}),
            "it has no num_experts_per_tok;",
        ),
        (
            mixture(),
            json!({"moe_intermediate_size": "(absent)"}),
            "it has no moe_intermediate_size;",
        ),
        (
            mixture(),
            json!({"moe_intermediate_size": u64::MAX}),
            "where the limit is 1048576",
        ),
        (
            mixture(),
            json!({"decoder_sparse_step": 0}),
            "decoder_sparse_step is 0",
        ),
        (
            mixture(),
            json!({"mlp_only_layers": 3}),
            "mlp_only_layers is not a list",
        ),
        (
            mixture(),
            json!({"mlp_only_layers": [-1]}),
            "mlp_only_layers is -1 but must be a whole number",
        ),
        (
            mixture(),
            json!({"norm_topk_prob": 1}),
            "norm_topk_prob is 1 but must be true or false",
        ),
    ];
    for (config, changes, expected) in table {
        let error = read(&with(config, &changes))
            .expect_err("must be refused")
            .to_string();
        assert!(error.starts_with("config.json"), "{error}");
        assert!(error.contains(expected), "{changes}: {error}");
    }
}

fn gemma_file() -> Writer {
    model("gemma3").value("gemma3.attention.sliding_window", G::U32(16))
}

fn mixture_file() -> Writer {
    model("qwen3moe")
        .value("qwen3moe.expert_count", G::U32(4))
        .value("qwen3moe.expert_used_count", G::U32(2))
        .value("qwen3moe.expert_feed_forward_length", G::U32(6))
        .zeros("blk.1.ffn_gate_inp.weight", &[8, 4])
}

#[test]
fn gguf_files_read_as_they_are() {
    let config = gguf(gemma_file()).expect("valid");
    assert_eq!(config.architecture, Architecture::Gemma3);
    assert!(!config.norms_less_one, "converters have added it");
    assert_eq!(config.attention_scale, 0.5);
    assert_eq!((config.window(0), config.window(1)), (Some(16), Some(16)));
    assert_eq!(config.local_rope, Some(rope(1e4, RopeScaling::None)));
    let config = gguf(
        gemma_file()
            .value("gemma3.attention.sliding_window_pattern", G::U32(2))
            .value("gemma3.rope.freq_base_swa", G::F32(500.0))
            .value("gemma3.rope.scaling.type", G::Str("linear".into()))
            .value("gemma3.rope.scaling.factor", G::F32(8.0))
            .value("gemma3.final_logit_softcapping", G::F32(30.0))
            .value("gemma3.attn_logit_softcapping", G::F32(0.0)),
    )
    .expect("valid");
    assert_eq!((config.window(0), config.window(1)), (Some(16), None));
    assert_eq!(config.local_rope, Some(rope(500.0, RopeScaling::None)));
    assert_eq!(config.rope, rope(1e4, RopeScaling::Linear { factor: 8.0 }));
    assert_eq!((config.attention_cap, config.logit_cap), (None, Some(30.0)));
    // 27B, as its layers tell: 5376 wide, 32 heads of 128.
    let mut large = gemma_file();
    for (key, value) in [
        ("block_count", 62),
        ("embedding_length", 5376),
        ("attention.head_count", 32),
    ] {
        let key = format!("gemma3.{key}");
        large.values.retain(|(name, _)| *name != key);
        large = large.value(&key, G::U32(value));
    }
    let large = gguf(large.value("gemma3.attention.key_length", G::U32(128))).expect("valid");
    assert_eq!(large.attention_scale, 1.0 / 168.0f64.sqrt());

    let experts = gguf(mixture_file())
        .expect("valid")
        .experts
        .expect("experts");
    let expected = Experts {
        count: 4,
        used: 2,
        intermediate: 6,
        normalised: true,
        layers: vec![false, true],
    };
    assert_eq!(experts, expected);
    let raw = mixture_file().value("qwen3moe.expert_weights_norm", G::Bool(false));
    assert!(
        !gguf(raw)
            .expect("valid")
            .experts
            .expect("experts")
            .normalised
    );
}

#[test]
fn bad_gguf_metadata_is_refused_by_name() {
    let refused = |mut writer: Writer, key: &str, value: Option<G>, expected: &str| {
        writer.values.retain(|(name, _)| name != key);
        let error = gguf(match value {
            Some(value) => writer.value(key, value),
            None => writer,
        })
        .expect_err("must be refused")
        .to_string();
        assert!(
            error.starts_with("m.gguf") && error.contains(expected),
            "{key}: {error}"
        );
    };
    let (window, pattern) = (
        "gemma3.attention.sliding_window",
        "gemma3.attention.sliding_window_pattern",
    );
    refused(
        gemma_file(),
        window,
        None,
        "it has no gemma3.attention.sliding_window",
    );
    refused(
        gemma_file(),
        window,
        Some(G::U32(0)),
        "gemma3.attention.sliding_window is 0",
    );
    refused(
        gemma_file(),
        pattern,
        Some(G::U32(0)),
        "sliding_window_pattern is 0",
    );
    refused(
        gemma_file(),
        pattern,
        Some(G::F32s(vec![1.0])),
        "should hold integers",
    );
    refused(
        gemma_file(),
        "gemma3.final_logit_softcapping",
        Some(G::F32(-1.0)),
        "must be between",
    );
    refused(
        gemma_file(),
        "gemma3.rope.freq_base_swa",
        Some(G::F32(f32::NAN)),
        "is not a finite number",
    );
    refused(
        gemma_file(),
        "gemma3.expert_count",
        Some(G::U32(2)),
        "supported in qwen3moe only",
    );
    let key = |name: &str| format!("qwen3moe.{name}");
    refused(
        mixture_file(),
        &key("expert_count"),
        None,
        "it has no qwen3moe.expert_count",
    );
    refused(
        mixture_file(),
        &key("expert_used_count"),
        Some(G::U32(5)),
        "qwen3moe.expert_used_count (5) is above qwen3moe.expert_count (4)",
    );
    refused(
        mixture_file(),
        &key("expert_feed_forward_length"),
        None,
        "it has no qwen3moe.expert_feed_forward_length",
    );
    refused(
        mixture_file(),
        &key("expert_shared_count"),
        Some(G::U32(1)),
        "qwen3moe.expert_shared_count 1 is not supported",
    );
    refused(
        mixture_file(),
        &key("expert_gating_func"),
        Some(G::U32(2)),
        "qwen3moe.expert_gating_func 2 is not supported",
    );
    refused(
        mixture_file(),
        &key("expert_weights_scale"),
        Some(G::F32(2.5)),
        "qwen3moe.expert_weights_scale 2.5 is not supported",
    );
    refused(
        mixture_file(),
        &key("expert_weights_norm"),
        Some(G::U32(1)),
        "is of type u32",
    );
}
