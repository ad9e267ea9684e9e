//! Hostile `config.json` and `generation_config.json`.

use serde_json::{Value, json};

use super::{
    Case, Class,
    Expect::{self, Either, Harmless, Odd, Refused},
};

const FILE: &str = "config.json";

fn field(name: impl Into<String>, expect: Expect, key: &'static str, value: Value) -> Case {
    Case::folder(Class::Config, name, expect, move |folder| {
        folder.edit(FILE, |config| config[key] = value.clone());
    })
}

fn rope(name: &str, expect: Expect, key: &'static str, value: Value) -> Case {
    Case::folder(Class::Config, name, expect, move |folder| {
        folder.edit(FILE, |config| {
            config["rope_parameters"][key] = value.clone()
        });
    })
}

/// The whole file.
fn whole(
    name: &str,
    expect: Expect,
    make: impl Fn(String) -> Vec<u8> + Send + Sync + 'static,
) -> Case {
    Case::folder(Class::Config, name, expect, move |folder| {
        let text = folder.json(FILE).to_string();
        folder.put(FILE, make(text));
    })
}

fn generation(
    name: &str,
    expect: Expect,
    make: impl Fn() -> Vec<u8> + Send + Sync + 'static,
) -> Case {
    Case::folder(Class::Config, name, expect, move |folder| {
        folder.put("generation_config.json", make())
    })
}

const SIZES: [&str; 7] = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
];

fn sizes() -> Vec<Case> {
    let mut all = Vec::new();
    for key in SIZES {
        for value in [
            json!(0),
            json!(-1),
            json!(1u64 << 31),
            json!((1u64 << 32) + 1),
            json!(u64::MAX),
            json!(1e300),
            json!(64.5),
            json!("64"),
            json!([64]),
            json!({"value": 64}),
            json!(true),
        ] {
            all.push(field(format!("{key} is {value}"), Refused, key, value));
        }
    }
    for key in ["hidden_size", "intermediate_size", "vocab_size"] {
        all.push(field(format!("{key} is one"), Refused, key, json!(1)));
    }
    all.extend([
        field(
            "heads that do not divide the width",
            Refused,
            "num_attention_heads",
            json!(3),
        ),
        field(
            "more key heads than heads",
            Refused,
            "num_key_value_heads",
            json!(8),
        ),
        field("a head of odd width", Refused, "head_dim", json!(15)),
        field("a head of no width", Refused, "head_dim", json!(0)),
        field("a head of width 2^20", Refused, "head_dim", json!(1 << 20)),
        field(
            "one layer where there are two",
            Either("the other one is not read"),
            "num_hidden_layers",
            json!(1),
        ),
        field("1025 layers", Refused, "num_hidden_layers", json!(1025)),
        field(
            "1024 layers of which two are there",
            Refused,
            "num_hidden_layers",
            json!(1024),
        ),
        field(
            "a vocabulary of fewer tokens than the tokenizer's",
            Refused,
            "vocab_size",
            json!(287),
        ),
        field(
            "a context of 16 million",
            Either("the cache is fitted to what there is"),
            "max_position_embeddings",
            json!(1 << 24),
        ),
        field(
            "a context of one",
            Either("it is short"),
            "max_position_embeddings",
            json!(1),
        ),
        field(
            "the window is negative",
            Either("this family has none"),
            "sliding_window",
            json!(-1),
        ),
        field(
            "the end token is past the vocabulary",
            Refused,
            "eos_token_id",
            json!(288),
        ),
        field(
            "the end token is negative",
            Refused,
            "eos_token_id",
            json!(-1),
        ),
        field(
            "the end token is 2^32",
            Refused,
            "eos_token_id",
            json!(1u64 << 32),
        ),
        field(
            "the end token is a text",
            Refused,
            "eos_token_id",
            json!("</s>"),
        ),
        field(
            "1000 end tokens",
            Refused,
            "eos_token_id",
            json!((0..1000).map(|n| n % 288).collect::<Vec<u32>>()),
        ),
        field(
            "no end token",
            Harmless("it writes until it may not"),
            "eos_token_id",
            json!(null),
        ),
        field(
            "end tokens inside lists",
            Refused,
            "eos_token_id",
            json!([[1], [2]]),
        ),
        field(
            "the begin token is past the vocabulary",
            Refused,
            "bos_token_id",
            json!(u32::MAX),
        ),
    ]);
    all
}

fn numbers() -> Vec<Case> {
    let mut all = Vec::new();
    for value in [
        json!(0),
        json!(-1),
        json!(2),
        json!(1e308),
        json!("NaN"),
        json!([1e-5]),
        json!(true),
    ] {
        all.push(field(
            format!("rms_norm_eps is {value}"),
            Refused,
            "rms_norm_eps",
            value,
        ));
    }
    for value in [
        json!(0),
        json!(-1),
        json!(0.5),
        json!(1e300),
        json!("1"),
        json!(null),
    ] {
        let expect = if value.is_null() {
            Either("older files do not say it")
        } else {
            Refused
        };
        all.push(rope(
            &format!("the base of rope is {value}"),
            expect,
            "rope_theta",
            value,
        ));
    }
    for (key, value) in [
        ("factor", json!(0)),
        ("factor", json!(-8)),
        ("factor", json!(1e300)),
        ("factor", json!("8")),
        ("low_freq_factor", json!(0)),
        ("low_freq_factor", json!(4)),
        ("high_freq_factor", json!(0)),
        ("original_max_position_embeddings", json!(0)),
        ("original_max_position_embeddings", json!(u64::MAX)),
        ("rope_type", json!("yarn")),
        ("rope_type", json!("")),
        ("rope_type", json!(["llama3"])),
        ("partial_rotary_factor", json!(0.5)),
        ("partial_rotary_factor", json!("all")),
    ] {
        all.push(rope(
            &format!("rope's {key} is {value}"),
            Refused,
            key,
            value,
        ));
    }
    all.extend([
        field("rope is a list", Refused, "rope_parameters", json!([8])),
        field(
            "rope is a text",
            Refused,
            "rope_parameters",
            json!("llama3"),
        ),
        field(
            "rope is scaled in two ways",
            Either("the newer field counts"),
            "rope_scaling",
            json!({"rope_type": "linear", "factor": 4.0}),
        ),
    ]);
    all
}

fn kinds() -> Vec<Case> {
    vec![
        field(
            "the architecture runs code",
            Refused,
            "architectures",
            json!(["__import__('os').system('id')"]),
        ),
        field(
            "no architecture",
            Either("there is the model's type"),
            "architectures",
            json!([]),
        ),
        field(
            "a list of 100000 architectures",
            Either("the first one counts"),
            "architectures",
            json!(vec!["LlamaForCausalLM"; 100_000]),
        ),
        field(
            "the architecture is a number",
            Either("there is the model's type"),
            "architectures",
            json!(7),
        ),
        field(
            "the architecture steers a terminal",
            Refused,
            "architectures",
            json!(["\x1b[2J\x1b]0;gotcha\x07"]),
        ),
        field(
            "the architecture has 500 KB",
            Refused,
            "architectures",
            json!(["A".repeat(500_000)]),
        ),
        field(
            "the activation is unknown",
            Refused,
            "hidden_act",
            json!("eval"),
        ),
        field(
            "the activation is a list",
            Refused,
            "hidden_act",
            json!(["silu"]),
        ),
        field(
            "feed-forward layers with biases that are not there",
            Refused,
            "mlp_bias",
            json!(true),
        ),
        field(
            "attention with biases that are not there",
            Refused,
            "attention_bias",
            json!(true),
        ),
        field("a bias that is 1", Refused, "attention_bias", json!(1)),
        field(
            "an output head that is not there",
            Refused,
            "tie_word_embeddings",
            json!(false),
        ),
        field(
            "tying is a text",
            Refused,
            "tie_word_embeddings",
            json!("no"),
        ),
        field(
            "weights are said to be quantised",
            Refused,
            "quantization_config",
            json!({"quant_method": "gptq"}),
        ),
        field(
            "it asks for code of its own",
            Odd("python_code"),
            "auto_map",
            json!({"AutoModel": "evil.py--Model"}),
        ),
        field(
            "a field of 900 KB that nobody reads",
            Harmless("its beginning is told"),
            "note",
            json!("x".repeat(900_000)),
        ),
        field(
            "a field's value steers a terminal",
            Harmless("it is told without controls"),
            "note",
            json!("\x1b[2J\u{7}"),
        ),
    ]
}

fn files() -> Vec<Case> {
    vec![
        whole("it is empty", Refused, |_| Vec::new()),
        whole("it is a list", Refused, |t| format!("[{t}]").into_bytes()),
        whole("it is a text", Refused, |_| b"\"config\"".to_vec()),
        whole("it is cut in the middle", Refused, |t| {
            t[..t.len() / 2].into()
        }),
        whole("it is in UTF-16", Refused, |t| {
            t.encode_utf16().flat_map(u16::to_le_bytes).collect()
        }),
        whole("it is not UTF-8", Refused, |t| {
            t.replace("silu", "si\u{1}u")
                .bytes()
                .map(|b| if b == 1 { 0xff } else { b })
                .collect()
        }),
        whole(
            "it begins with a byte-order mark",
            Harmless("editors write it"),
            |t| [b"\xef\xbb\xbf", t.as_bytes()].concat(),
        ),
        whole("it begins with two byte-order marks", Refused, |t| {
            [b"\xef\xbb\xbf\xef\xbb\xbf", t.as_bytes()].concat()
        }),
        whole("more follows its end", Refused, |t| {
            format!("{t} {t}").into_bytes()
        }),
        whole("zeros follow its end", Refused, |t| {
            format!("{t}\0\0").into_bytes()
        }),
        whole("it holds comments", Refused, |t| {
            t.replacen('{', "{ // a comment\n", 1).into_bytes()
        }),
        whole("it holds NaN", Refused, |t| {
            t.replacen('{', "{\"x\":NaN,", 1).into_bytes()
        }),
        whole("it holds 1e999", Refused, |t| {
            t.replacen('{', "{\"x\":1e999,", 1).into_bytes()
        }),
        whole(
            "it says everything twice",
            Either("the last word counts"),
            |t| format!("{},{}", &t[..t.len() - 1], &t[1..]).into_bytes(),
        ),
        whole("lists 100000 deep", Refused, |_| {
            "[".repeat(100_000).into_bytes()
        }),
        whole("objects 100000 deep in what nobody reads", Refused, |t| {
            t.replacen('{', &format!("{{\"x\":{}", "{\"a\":".repeat(100_000)), 1)
                .into_bytes()
        }),
        whole(
            "a thousand lists, each 100 deep",
            Either("within the bound on depth"),
            |t| {
                let one = format!("{}{}", "[".repeat(100), "]".repeat(100));
                t.replacen('{', &format!("{{\"x\":[{}],", vec![one; 1000].join(",")), 1)
                    .into_bytes()
            },
        ),
        whole(
            "50000 fields that nobody reads",
            Harmless("the first ones are told"),
            |t| {
                let many: Vec<String> = (0..50_000).map(|n| format!("\"f{n}\":{n}")).collect();
                t.replacen('{', &format!("{{{},", many.join(",")), 1)
                    .into_bytes()
            },
        ),
        whole("it has more than a megabyte", Refused, |t| {
            format!("{t}{}", " ".repeat(1 << 20)).into_bytes()
        }),
        Case::folder(Class::Config, "there is none", Refused, |f| {
            f.0.remove(FILE);
        }),
        generation("generation_config.json is no JSON", Refused, || {
            b"{".to_vec()
        }),
        generation("generation_config.json is a list", Refused, || {
            b"[]".to_vec()
        }),
        generation("generation_config.json is 100000 deep", Refused, || {
            "[".repeat(100_000).into_bytes()
        }),
        generation(
            "generation_config.json has more than a megabyte",
            Refused,
            || format!("{{}}{}", " ".repeat(1 << 20)).into_bytes(),
        ),
        generation(
            "generation_config.json ends with a token that is not there",
            Refused,
            || json!({"eos_token_id": 1 << 30}).to_string().into_bytes(),
        ),
        generation(
            "generation_config.json ends with a thousand tokens",
            Refused,
            || {
                json!({"eos_token_id": vec![1; 1000]})
                    .to_string()
                    .into_bytes()
            },
        ),
        generation(
            "generation_config.json begins with a token that is not there",
            Refused,
            || json!({"bos_token_id": 288}).to_string().into_bytes(),
        ),
    ]
}

/// Folders of all these kinds.
pub fn cases() -> Vec<Case> {
    let parts = [sizes(), numbers(), kinds(), files()];
    parts.into_iter().flatten().collect()
}
