//! Hostile `tokenizer.json` and `tokenizer_config.json`.

use serde_json::{Map, Value, json};

use super::{
    Case, Class,
    Expect::{self, Either, Harmless, Refused},
    folder::Folder,
};

const FILE: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";

fn edit(
    name: impl Into<String>,
    expect: Expect,
    change: impl Fn(&mut Value) + Send + Sync + 'static,
) -> Case {
    Case::folder(Class::Tokenizer, name, expect, move |folder| {
        folder.edit(FILE, &change)
    })
}

fn whole(
    name: &str,
    expect: Expect,
    make: impl Fn(String) -> Vec<u8> + Send + Sync + 'static,
) -> Case {
    Case::folder(Class::Tokenizer, name, expect, move |folder| {
        let text = folder.json(FILE).to_string();
        folder.put(FILE, make(text));
    })
}

/// With another way of splitting, and a template that makes much text to split.
fn split(name: impl Into<String>, expect: Expect, splitter: Value, text: &'static str) -> Case {
    Case::folder(Class::Tokenizer, name, expect, move |folder| {
        folder.edit(FILE, |file| file["pre_tokenizer"] = splitter.clone());
        folder.put("chat_template.jinja", text);
    })
}

fn normal(name: impl Into<String>, expect: Expect, normalizer: Value) -> Case {
    edit(name, expect, move |file| {
        file["normalizer"] = normalizer.clone()
    })
}

fn regex(pattern: &str) -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]})
}

fn vocabulary(file: &mut Value) -> &mut Map<String, Value> {
    file["model"]["vocab"]
        .as_object_mut()
        .expect("the golden tokenizer's vocabulary")
}

fn list<'a>(file: &'a mut Value, key: &str) -> &'a mut Vec<Value> {
    let list = match key {
        "merges" => &mut file["model"]["merges"],
        key => &mut file[key],
    };
    list.as_array_mut().expect("a list of the golden tokenizer")
}

/// What rooms of text the templates make.
const AS: &str = "{% for i in range(40) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}!";
const MEGABYTE: &str = "{% set x = 'aaaaaaaa' %}{% for i in range(16) %}{% set x = x + x %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' * 1024 }}{% endfor %}!";

fn regexes() -> Vec<Case> {
    let bomb = Either("steps of the engine are bounded");
    let mut all = Vec::new();
    for pattern in [
        "(a+)+$",
        "(a*)*b",
        "(a|a)*b",
        "(a|aa)+$",
        "(.*)*c",
        "(?=(a+))(a+)+c",
        "(?:a?){60}a{60}",
        "(\\w+\\s?)*$",
        "^(([a-z])+.)+[A-Z]([a-z])+$",
        "(a)(?=.*\\1)(a+)+b",
        "(?<=(a+)+)b",
        "(?<!a)(a+)+(?!a)b",
        "(((((a+)+)+)+)+)+b",
    ] {
        all.push(split(
            format!("an exponential pattern, {pattern}"),
            bomb,
            regex(pattern),
            AS,
        ));
        all.push(split(
            format!("an exponential pattern over a long text, {pattern}"),
            bomb,
            regex(pattern),
            MEGABYTE,
        ));
    }
    let either = Either("the engine's size is bounded");
    for (pattern, what, expect) in [
        ("(".to_owned(), "that does not close", Refused),
        ("*".to_owned(), "that repeats nothing", Refused),
        (
            "a{1000000000}".to_owned(),
            "that counts to a milliard",
            Either("the engine decides"),
        ),
        (
            "(a{1000}){1000}".to_owned(),
            "that counts to a million",
            Either("the engine decides"),
        ),
        (
            "((a{1000}){1000}){1000}".to_owned(),
            "that counts to a milliard in steps",
            Either("the engine decides"),
        ),
        (
            "(?:\\p{L}{500}){500}".to_owned(),
            "of all letters, a quarter of a million times",
            either,
        ),
        (
            "(".repeat(5000) + &")".repeat(5000),
            "of 5000 groups inside each other",
            either,
        ),
        (
            "(?:".repeat(5000) + "a" + &")*".repeat(5000),
            "of 5000 repetitions inside each other",
            either,
        ),
        (
            "(?=".repeat(3000) + "a" + &")".repeat(3000),
            "of 3000 looks ahead inside each other",
            either,
        ),
        ("a?".repeat(8000), "of 8000 choices", either),
        ("(a)".repeat(5000), "of 5000 groups", either),
        (
            "\\1".to_owned(),
            "that refers to no group",
            Either("the engine decides"),
        ),
        ("(?R)".to_owned(), "that calls itself", Refused),
        (
            "(?<x>a\\g<x>)".to_owned(),
            "whose group calls itself",
            Either("the engine decides"),
        ),
        ("a".repeat(20_000), "of 20000 letters", Refused),
        (String::new(), "of nothing", Refused),
        ("()".to_owned(), "that matches nothing anywhere", either),
        ("(?!)".to_owned(), "that never matches", either),
        ("\u{0}".to_owned(), "of a zero", either),
        (
            "\\x{110000}".to_owned(),
            "of a character that does not exist",
            Refused,
        ),
        ("[z-a]".to_owned(), "of a reversed range", Refused),
        (
            "(?i)(?:ſ|K|\\p{Lu})*".to_owned(),
            "that folds cases",
            either,
        ),
    ] {
        all.push(split(
            format!("a pattern {what}"),
            expect,
            regex(&pattern),
            AS,
        ));
    }
    all
}

fn splitters() -> Vec<Case> {
    let level = || json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let deep = |depth: usize| {
        (0..depth).fold(
            level(),
            |inner, _| json!({"type": "Sequence", "pretokenizers": [inner]}),
        )
    };
    let ten = |depth: usize| {
        (0..depth).fold(
            level(),
            |inner, _| json!({"type": "Sequence", "pretokenizers": vec![inner; 10]}),
        )
    };
    let replace =
        |n: usize| json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(n)});
    let sequence = |parts: Vec<Value>| json!({"type": "Sequence", "normalizers": parts});
    vec![
        split(
            "splitters 60 deep",
            Either("within the bounds"),
            deep(60),
            AS,
        ),
        split("splitters 100 deep", Refused, deep(100), AS),
        split("ten splitters in ten in ten", Refused, ten(3), AS),
        split(
            "a thousand splitters",
            Refused,
            json!({"type": "Sequence", "pretokenizers": vec![level(); 1000]}),
            AS,
        ),
        split(
            "a splitter that does not exist",
            Refused,
            json!({"type": "Exec"}),
            AS,
        ),
        split("a splitter without a type", Refused, json!({}), AS),
        split("the splitter is a list", Refused, json!([level()]), AS),
        split(
            "the splitter's type is a list",
            Refused,
            json!({"type": ["ByteLevel"]}),
            AS,
        ),
        split(
            "a splitter whose fields are wrong",
            Refused,
            json!({"type": "ByteLevel", "add_prefix_space": "no"}),
            AS,
        ),
        split(
            "a splitter with a pattern of 16 KiB",
            Either("within the bounds"),
            json!({"type": "Split", "pattern": {"String": "a".repeat(16 << 10)}, "behavior": "Removed", "invert": false}),
            AS,
        ),
        split(
            "a splitter that removes everything",
            Either("text is then empty"),
            json!({"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Removed", "invert": false}),
            AS,
        ),
        split(
            "a splitter by an empty text",
            Refused,
            json!({"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": false}),
            AS,
        ),
        split(
            "a splitter of unknown behaviour",
            Refused,
            json!({"type": "Split", "pattern": {"String": "a"}, "behavior": "Exec", "invert": false}),
            AS,
        ),
        split(
            "no splitter, and a megabyte in one word",
            Either("bounded work"),
            json!(null),
            MEGABYTE,
        ),
        split(
            "a Metaspace of a long mark",
            Refused,
            json!({"type": "Metaspace", "replacement": "aaaa", "prepend_scheme": "always", "split": true}),
            AS,
        ),
        normal(
            "replacements that double a text 10 times",
            Either("within the bound on growth"),
            sequence(vec![replace(2); 10]),
        ),
        normal(
            "replacements that double a text 60 times",
            Refused,
            sequence(vec![replace(2); 60]),
        ),
        normal(
            "a replacement by 256 letters",
            Either("within the bounds"),
            replace(256),
        ),
        normal("a replacement by 257 letters", Refused, replace(257)),
        normal(
            "a replacement of nothing",
            Refused,
            json!({"type": "Replace", "pattern": {"String": ""}, "content": "a"}),
        ),
        normal(
            "a replacement by an exponential pattern",
            Either("steps of the engine are bounded"),
            json!({"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}),
        ),
        normal(
            "a replacement of nothing between any two characters",
            Either("within the bound on growth"),
            json!({"type": "Replace", "pattern": {"Regex": "()"}, "content": "b"}),
        ),
        normal(
            "a prefix of 10 MB",
            Refused,
            json!({"type": "Prepend", "prepend": "a".repeat(10 << 20)}),
        ),
        normal(
            "a normalizer that does not exist",
            Refused,
            json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ),
        normal(
            "a normalizer with a table that lies",
            Refused,
            json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
        ),
        normal("the normalizer is a text", Refused, json!("NFC")),
        normal(
            "normalizers 100 deep",
            Refused,
            (0..100).fold(
                json!({"type": "NFC"}),
                |inner, _| json!({"type": "Sequence", "normalizers": [inner]}),
            ),
        ),
        edit(
            "a decoder that does not exist",
            Either("text cannot be written then"),
            |f| f["decoder"] = json!({"type": "Exec"}),
        ),
        edit(
            "a decoder 100 deep",
            Either("text cannot be written then"),
            |f| {
                f["decoder"] = (0..100).fold(
                    json!({"type": "Fuse"}),
                    |inner, _| json!({"type": "Sequence", "decoders": [inner]}),
                )
            },
        ),
        edit(
            "a decoder that blows text up",
            Either("pieces are bounded"),
            |f| f["decoder"] = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(1 << 20)}),
        ),
        edit("a post-processor that does not exist", Refused, |f| {
            f["post_processor"] = json!({"type": "Exec"})
        }),
        edit(
            "a post-processor of unknown tokens",
            Refused,
            |f| f["post_processor"] = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "ghost", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}}),
        ),
        edit(
            "a post-processor of tokens past the vocabulary",
            Refused,
            |f| f["post_processor"] = json!({"type": "RobertaProcessing", "cls": ["a", u32::MAX], "sep": ["b", 1], "trim_offsets": true, "add_prefix_space": true}),
        ),
        edit(
            "a post-processor that writes the text twice",
            Refused,
            |f| f["post_processor"] = json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}}),
        ),
        edit("a post-processor that writes 100000 tokens", Refused, |f| {
            f["post_processor"] = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"x": {"id": "x", "ids": vec![1; 100_000], "tokens": []}}})
        }),
        edit("post-processors 100 deep", Refused, |f| {
            f["post_processor"] = (0..100).fold(
                json!({"type": "ByteLevel"}),
                |inner, _| json!({"type": "Sequence", "processors": [inner]}),
            )
        }),
        edit("the post-processor is a number", Refused, |f| {
            f["post_processor"] = json!(7)
        }),
    ]
}

fn vocabularies() -> Vec<Case> {
    let added = |id: u64, content: &str| json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    vec![
        edit("no vocabulary", Refused, |f| {
            f["model"]["vocab"] = json!(null)
        }),
        edit(
            "the vocabulary is empty",
            Either("the added tokens remain"),
            |f| {
                vocabulary(f).clear();
                list(f, "merges").clear();
            },
        ),
        edit("the vocabulary is a list", Refused, |f| {
            f["model"]["vocab"] = json!(["a", "b"])
        }),
        edit("an id is negative", Refused, |f| {
            vocabulary(f)["a"] = json!(-1)
        }),
        edit("an id is 2^32", Refused, |f| {
            vocabulary(f)["a"] = json!(1u64 << 32)
        }),
        edit("an id is 2^32 - 1", Refused, |f| {
            vocabulary(f)["a"] = json!(u32::MAX)
        }),
        edit("an id is 2^20", Refused, |f| {
            vocabulary(f)["a"] = json!(1 << 20)
        }),
        edit("an id is just past the model's", Refused, |f| {
            vocabulary(f).insert("xyz".to_owned(), json!(288));
        }),
        edit("an id is a text", Refused, |f| {
            vocabulary(f)["a"] = json!("7")
        }),
        edit("an id is a float", Refused, |f| {
            vocabulary(f)["a"] = json!(7.5)
        }),
        edit("all tokens have one id", Refused, |f| {
            vocabulary(f).values_mut().for_each(|id| *id = json!(7))
        }),
        edit("two tokens have one id", Refused, |f| {
            let id = vocabulary(f)["b"].clone();
            vocabulary(f)["a"] = id;
        }),
        edit("a token of 9 KiB", Refused, |f| {
            vocabulary(f).insert("x".repeat(9 << 10), json!(287));
        }),
        edit("a token of 32 MiB", Refused, |f| {
            vocabulary(f).insert("x".repeat(32 << 20), json!(287));
        }),
        edit("2 million tokens", Refused, |f| {
            (0..2_000_000).for_each(|n| {
                vocabulary(f).insert(format!("t{n}"), json!(n));
            });
        }),
        edit("a merge of one", Refused, |f| {
            list(f, "merges").push(json!(["a"]))
        }),
        edit("a merge of three", Refused, |f| {
            list(f, "merges").push(json!(["a", "b", "c"]))
        }),
        edit("a merge of numbers", Refused, |f| {
            list(f, "merges").push(json!([1, 2]))
        }),
        edit("a merge of nothing", Refused, |f| {
            list(f, "merges").push(json!(["", ""]))
        }),
        edit("a merge of unknown tokens", Refused, |f| {
            list(f, "merges").push(json!(["ghost", "ghost"]))
        }),
        edit("a merge into an unknown token", Refused, |f| {
            list(f, "merges").push(json!(["z", "q"]))
        }),
        edit("a merge that is a text of three", Refused, |f| {
            list(f, "merges").push(json!("a b c"))
        }),
        edit(
            "one merge a million times",
            Either("later ones change nothing"),
            |f| {
                let first = list(f, "merges")[0].clone();
                *list(f, "merges") = vec![first; 1 << 20];
            },
        ),
        edit("5 million merges", Refused, |f| {
            let first = list(f, "merges")[0].clone();
            *list(f, "merges") = vec![first; 5 << 20];
        }),
        edit("merges are a text", Refused, |f| {
            f["model"]["merges"] = json!("a b")
        }),
        edit("an added token of another id", Refused, move |f| {
            list(f, "added_tokens").push(added(286, "a"))
        }),
        edit(
            "an added token past the model's vocabulary",
            Refused,
            move |f| list(f, "added_tokens").push(added(288, "<|new|>")),
        ),
        edit("an added token of id 2^32 - 1", Refused, move |f| {
            list(f, "added_tokens").push(added(u64::from(u32::MAX), "<|new|>"))
        }),
        edit("an added token of id 2^63", Refused, move |f| {
            list(f, "added_tokens").push(added(1 << 63, "<|new|>"))
        }),
        edit("an added token of no text", Refused, move |f| {
            list(f, "added_tokens")[0]["content"] = json!("")
        }),
        edit(
            "an added token of a space",
            Either("a model may be stupid"),
            move |f| list(f, "added_tokens")[0]["content"] = json!(" "),
        ),
        edit("100000 added tokens", Refused, move |f| {
            *list(f, "added_tokens") = vec![added(280, "<|bos|>"); 100_000]
        }),
        edit(
            "60000 times the same added token",
            Either("within the bound on added tokens"),
            move |f| *list(f, "added_tokens") = vec![added(280, "<|bos|>"); 60_000],
        ),
        edit("an added token without an id", Refused, |f| {
            list(f, "added_tokens").push(json!({"content": "x"}))
        }),
        edit("added tokens that are texts", Refused, |f| {
            list(f, "added_tokens").push(json!("x"))
        }),
        edit(
            "every added token swallows the space around it",
            Either("a model may be stupid"),
            |f| {
                for token in list(f, "added_tokens") {
                    token["lstrip"] = json!(true);
                    token["rstrip"] = json!(true);
                    token["single_word"] = json!(true);
                    token["normalized"] = json!(true);
                }
            },
        ),
        edit("the unknown token is unknown", Refused, |f| {
            f["model"]["unk_token"] = json!("ghost")
        }),
        edit("the unknown token is a list", Refused, |f| {
            f["model"]["unk_token"] = json!(["a"])
        }),
        edit("dropout", Refused, |f| f["model"]["dropout"] = json!(0.5)),
        edit("dropout of 1e300", Refused, |f| {
            f["model"]["dropout"] = json!(1e300)
        }),
        edit("a suffix at the end of words", Refused, |f| {
            f["model"]["end_of_word_suffix"] = json!("</w>")
        }),
        edit("a model of another kind", Refused, |f| {
            f["model"]["type"] = json!("Unigram")
        }),
        edit("a model that does not exist", Refused, |f| {
            f["model"]["type"] = json!("../../lib/evil.so")
        }),
        edit("no model", Refused, |f| f["model"] = json!(null)),
        edit(
            "it cuts and pads texts to a milliard",
            Harmless("neither is done"),
            |f| {
                f["truncation"] = json!({"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0});
                f["padding"] = json!({"strategy": {"Fixed": 1_000_000_000}, "direction": "Left", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
            },
        ),
        edit("its version is another", Either("the model counts"), |f| {
            f["version"] = json!("99.0")
        }),
        edit(
            "one token is as long as may be, built letter by letter",
            Either("lengths are bounded"),
            |f| {
                let steps = 2048usize;
                f["model"]["vocab"] = json!({});
                *list(f, "merges") = Vec::new();
                *list(f, "added_tokens") = Vec::new();
                for n in 1..280 {
                    vocabulary(f).insert("a".repeat(n * steps / 280), json!(n));
                }
                for n in 1..steps {
                    list(f, "merges").push(json!(["a".repeat(n), "a"]));
                }
            },
        ),
    ]
}

fn files() -> Vec<Case> {
    vec![
        whole("it is empty", Refused, |_| Vec::new()),
        whole("it is {}", Refused, |_| b"{}".to_vec()),
        whole("it is a list", Refused, |_| b"[]".to_vec()),
        whole("it is cut in the middle", Refused, |t| {
            let mut bytes = t.into_bytes();
            bytes.truncate(bytes.len() / 2);
            bytes
        }),
        whole("it is not UTF-8", Refused, |t| {
            t.bytes()
                .map(|b| if b == b'z' { 0xff } else { b })
                .collect()
        }),
        whole("it is in UTF-16", Refused, |t| {
            t.encode_utf16().flat_map(u16::to_le_bytes).collect()
        }),
        whole("more follows its end", Refused, |t| {
            format!("{t}{t}").into_bytes()
        }),
        whole("lists 100000 deep", Refused, |_| {
            "[".repeat(100_000).into_bytes()
        }),
        whole("lists 100000 deep in what nobody reads", Refused, |t| {
            t.replacen('{', &format!("{{\"x\":{}", "[".repeat(100_000)), 1)
                .into_bytes()
        }),
        whole("lists 100000 deep in the splitter", Refused, |t| {
            t.replacen(
                "\"pre_tokenizer\":",
                &format!("\"pre_tokenizer\":{}", "[".repeat(100_000)),
                1,
            )
            .into_bytes()
        }),
        whole("a key is there twice", Either("the reader decides"), |t| {
            t.replacen('{', "{\"model\":{},", 1).into_bytes()
        }),
        whole(
            "a token is there twice",
            Either("the last word counts"),
            |t| {
                t.replacen("\"vocab\":{", "\"vocab\":{\"a\":7,", 1)
                    .into_bytes()
            },
        ),
        whole("a lone surrogate", Refused, |t| {
            t.replacen("\"vocab\":{", "\"vocab\":{\"\\ud800\":287,", 1)
                .into_bytes()
        }),
        whole("more than 128 MiB of blanks", Refused, |t| {
            format!("{t}{}", " ".repeat(128 << 20)).into_bytes()
        }),
        whole(
            "127 MiB of numbers in what nobody reads",
            Either("within the bound on the file"),
            |t| {
                t.replacen('{', &format!("{{\"x\":[{}0],", "1,".repeat(63 << 20)), 1)
                    .into_bytes()
            },
        ),
        whole("127 MiB of numbers in the splitter", Refused, |t| {
            t.replacen(
                "\"pre_tokenizer\":",
                &format!("\"pre_tokenizer\":[{}0],\"y\":", "1,".repeat(63 << 20)),
                1,
            )
            .into_bytes()
        }),
        whole("120 MiB of empty objects in the normalizer", Refused, |t| {
            t.replacen(
                "\"normalizer\":",
                &format!("\"normalizer\":[{}0],\"y\":", "{},".repeat(40 << 20)),
                1,
            )
            .into_bytes()
        }),
        whole("120 MiB of merges", Refused, |t| {
            t.replacen(
                "\"merges\":[",
                &format!("\"merges\":[{}", "[\"a\",\"b\"],".repeat(11 << 20)),
                1,
            )
            .into_bytes()
        }),
        whole("100 MiB of added tokens", Refused, |t| {
            t.replacen("\"added_tokens\":[", &format!("\"added_tokens\":[{}", "{\"id\":280,\"content\":\"<|bos|>\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true},".repeat(800_000)), 1).into_bytes()
        }),
        Case::folder(Class::Tokenizer, "there is none", Refused, |f| {
            f.0.remove(FILE);
        }),
    ]
}

fn configs() -> Vec<Case> {
    let edit = |name: &str, expect: Expect, change: fn(&mut Value)| {
        Case::folder(Class::TokenizerConfig, name, expect, move |folder| {
            folder.edit(CONFIG, change)
        })
    };
    let whole = |name: &str, expect: Expect, make: fn() -> Vec<u8>| {
        Case::folder(Class::TokenizerConfig, name, expect, move |folder| {
            folder.put(CONFIG, make())
        })
    };
    let template = |name: &str, expect: Expect, make: fn() -> Value| {
        Case::folder(
            Class::TokenizerConfig,
            name,
            expect,
            move |folder: &mut Folder| {
                folder.0.remove("chat_template.jinja");
                folder.edit(CONFIG, |config| config["chat_template"] = make());
            },
        )
    };
    let usable = Either("what is not understood is not used");
    vec![
        edit("the begin token is not in the vocabulary", Refused, |v| {
            v["bos_token"] = json!("ghost")
        }),
        edit("the end token is not in the vocabulary", Refused, |v| {
            v["eos_token"] = json!({"content": "ghost"})
        }),
        edit("the begin token has a megabyte", Refused, |v| {
            v["bos_token"] = json!("x".repeat(1 << 20))
        }),
        edit("the begin token steers a terminal", Refused, |v| {
            v["bos_token"] = json!("\x1b[2J\x1b]0;gotcha\x07")
        }),
        edit("the begin token is a number", usable, |v| {
            v["bos_token"] = json!(7)
        }),
        edit("the begin token is a list", usable, |v| {
            v["bos_token"] = json!(["<|bos|>"])
        }),
        edit("whether to begin is a text", usable, |v| {
            v["add_bos_token"] = json!("yes")
        }),
        edit("the class is code", usable, |v| {
            v["tokenizer_class"] = json!("__import__('os')")
        }),
        edit("the class is a list", usable, |v| {
            v["tokenizer_class"] = json!([1])
        }),
        edit("it asks for code of its own", usable, |v| {
            v["auto_map"] = json!({"AutoTokenizer": ["evil.py", null]})
        }),
        edit(
            "the longest text is negative",
            Harmless("nobody reads it"),
            |v| v["model_max_length"] = json!(-1),
        ),
        whole("it is empty", Refused, Vec::new),
        whole("it is a list", Refused, || b"[]".to_vec()),
        whole("it is 100000 deep", Refused, || {
            "{\"a\":".repeat(100_000).into_bytes()
        }),
        whole("it is not UTF-8", Refused, || {
            b"{\"bos_token\":\"\xff\"}".to_vec()
        }),
        whole("it has more than 4 MiB", Refused, || {
            format!("{{}}{}", " ".repeat(4 << 20)).into_bytes()
        }),
        whole("it has 4 MiB of numbers", usable, || {
            format!("{{\"x\":[{}0]}}", "1,".repeat((2 << 20) - 16)).into_bytes()
        }),
        whole("it holds 1e999", Refused, || {
            b"{\"model_max_length\":1e999}".to_vec()
        }),
        template("the template is a number", Refused, || json!(7)),
        template(
            "the template is an object",
            Refused,
            || json!({"default": "x"}),
        ),
        template(
            "a list of templates without texts",
            Refused,
            || json!([{"name": "default"}]),
        ),
        template("an empty list of templates", usable, || json!([])),
        template("100000 templates", usable, || {
            json!(vec![json!({"name": "x", "template": "{{ 1 }}"}); 50_000])
        }),
        template(
            "two templates of one name",
            usable,
            || json!([{"name": "default", "template": "{{ 1 }}"}, {"name": "default", "template": "{{ 2 }}"}]),
        ),
        template("a template of more than a megabyte", Refused, || {
            json!("x".repeat((1 << 20) + 1))
        }),
        template(
            "a template that never ends",
            Expect::Odd("template_fails"),
            || {
                json!(
                    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
                )
            },
        ),
    ]
}

/// Folders of all these kinds.
pub fn cases() -> Vec<Case> {
    let parts = [vocabularies(), regexes(), splitters(), files(), configs()];
    parts.into_iter().flatten().collect()
}
