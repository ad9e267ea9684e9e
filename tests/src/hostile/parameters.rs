//! GGUF metadata with absurd measures of a model.

use super::{
    Case, Class,
    Expect::{self, Either, Refused},
    gguf::{Value, set, valid},
};

fn case(name: String, expect: Expect, key: &'static str, value: Option<Value>) -> Case {
    Case::gguf(Class::GgufParameters, name, expect, move || {
        let mut writer = valid();
        match &value {
            Some(value) => set(&mut writer, key, value.clone()),
            None => writer.values.retain(|(known, _)| known != key),
        }
        writer.write()
    })
}

/// What a valid model says: whole numbers that are needed.
const SIZES: [&str; 5] = [
    "llama.block_count",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.context_length",
];

/// GGUF files of all these kinds.
pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for key in SIZES {
        let mut wrong = |what: &str, value: Option<Value>| {
            let name = format!("{key} {what}");
            all.push(case(name, Refused, key, value));
        };
        wrong("is missing", None);
        wrong("is 0", Some(Value::U32(0)));
        wrong("is 2^31", Some(Value::U32(1 << 31)));
        wrong("is 2^32 - 1", Some(Value::U32(u32::MAX)));
        wrong("is 2^64 - 1", Some(Value::U64(u64::MAX)));
        wrong(
            "is 2^32 + 1, which is 1 in 32 bits",
            Some(Value::U64((1 << 32) + 1)),
        );
        wrong("is -1", Some(Value::I32(-1)));
        wrong("is a text", Some(Value::Str("32".to_owned())));
        wrong("is a float", Some(Value::F32(32.0)));
        wrong("is NaN", Some(Value::F32(f32::NAN)));
        wrong("is true", Some(Value::Bool(true)));
    }
    for key in SIZES {
        // Layers may differ in some models; one number for all of them is that number.
        let same = Either("a list of one number is that number");
        let name = format!("{key} is a list of 2^20 numbers");
        all.push(case(name, same, key, Some(Value::I32s(vec![1; 1 << 20]))));
        let numbers = (0..1 << 20).map(|n| n % 7).collect();
        let name = format!("{key} is a list of 2^20 different numbers");
        all.push(case(name, Refused, key, Some(Value::I32s(numbers))));
    }
    let either = Either("its bounds are wide and the cache is fitted to what there is");
    let number = |key: &'static str, n: u32, expect: Expect| {
        case(format!("{key} is {n}"), expect, key, Some(Value::U32(n)))
    };
    all.extend([
        number("llama.block_count", 2, Refused),
        number("llama.block_count", 1024, Refused),
        number("llama.embedding_length", 33, Refused),
        number("llama.embedding_length", 65_536, Refused),
        number("llama.attention.head_count", 3, Refused),
        number("llama.attention.head_count", 32, Refused),
        number("llama.attention.head_count", 1024, Refused),
        number("llama.attention.head_count_kv", 0, Refused),
        number("llama.attention.head_count_kv", 2, Refused),
        number("llama.attention.head_count_kv", 1 << 31, Refused),
        number("llama.feed_forward_length", 1 << 20, Refused),
        number("llama.context_length", 1, either),
        number("llama.context_length", 1 << 24, either),
        number("llama.attention.sliding_window", 1, either),
        number("llama.attention.sliding_window", u32::MAX, Refused),
        number("llama.attention.key_length", 0, Refused),
        number("llama.attention.key_length", 15, Refused),
        number("llama.attention.key_length", 1024, Refused),
        number("llama.attention.value_length", 8, Refused),
        number("llama.rope.dimension_count", 0, Refused),
        number("llama.rope.dimension_count", 8, Refused),
        number("llama.rope.dimension_count", u32::MAX, Refused),
        number("llama.expert_count", 8, Refused),
        number("llama.expert_count", u32::MAX, Refused),
        number("split.count", 1000, Refused),
        number("tokenizer.ggml.bos_token_id", 320, Refused),
        number("tokenizer.ggml.bos_token_id", u32::MAX, Refused),
        number("tokenizer.ggml.eos_token_id", 320, Refused),
        number("tokenizer.ggml.eos_token_id", 1 << 31, Refused),
        number("tokenizer.ggml.eot_token_id", u32::MAX, Refused),
        number("tokenizer.ggml.unknown_token_id", u32::MAX, Refused),
    ]);
    for key in [
        "llama.attention.layer_norm_rms_epsilon",
        "llama.rope.freq_base",
        "llama.rope.scale_linear",
    ] {
        for (value, what) in [
            (f32::NAN, "NaN"),
            (f32::INFINITY, "infinite"),
            (f32::NEG_INFINITY, "-infinite"),
            (0.0, "0"),
            (-1.0, "-1"),
            (f32::MAX, "the largest number"),
        ] {
            all.push(case(
                format!("{key} is {what}"),
                Refused,
                key,
                Some(Value::F32(value)),
            ));
        }
        all.push(case(
            format!("{key} is a text"),
            Refused,
            key,
            Some(Value::Str("1".to_owned())),
        ));
    }
    for name in ["", "mamba", "LLAMA", "llama\0", "../llama", "\x1b[31mllama"] {
        let value = Some(Value::Str(name.to_owned()));
        let what = format!("the architecture is {name:?}");
        all.push(case(what, Refused, "general.architecture", value));
    }
    let long = Value::Str("a".repeat(1 << 20));
    all.extend([
        case(
            "the architecture has a megabyte".to_owned(),
            Refused,
            "general.architecture",
            Some(long),
        ),
        case(
            "there is no architecture".to_owned(),
            Refused,
            "general.architecture",
            None,
        ),
        case(
            "the architecture is a number".to_owned(),
            Refused,
            "general.architecture",
            Some(Value::U32(1)),
        ),
        case(
            "it is an adapter".to_owned(),
            Refused,
            "general.type",
            Some(Value::Str("adapter".to_owned())),
        ),
        case(
            "its rope is stretched in an unknown way".to_owned(),
            Refused,
            "llama.rope.scaling.type",
            Some(Value::Str("exec".to_owned())),
        ),
        case(
            "it has attention both ways".to_owned(),
            Refused,
            "llama.attention.causal",
            Some(Value::Bool(false)),
        ),
    ]);
    for architecture in ["qwen2", "qwen3", "qwen3moe", "gemma3"] {
        let value = Some(Value::Str(architecture.to_owned()));
        let what = format!("a llama that says it is {architecture}");
        all.push(case(what, Refused, "general.architecture", value));
    }
    all
}
