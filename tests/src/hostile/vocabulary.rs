//! GGUF metadata about text: tokens, merges, scores, kinds, special tokens.

use super::{
    Case, Class,
    Expect::{self, Either, Harmless, Odd, Refused},
    gguf::{Value, Writer, set, valid},
};

/// Tokens of the valid model.
const TOKENS: usize = 320;

fn changed(
    name: impl Into<String>,
    expect: Expect,
    change: impl Fn(&mut Writer) + Send + Sync + 'static,
) -> Case {
    Case::gguf(Class::GgufVocabulary, name, expect, move || {
        let mut writer = valid();
        change(&mut writer);
        writer.write()
    })
}

/// With another value of this key below `tokenizer.ggml`.
fn with(
    name: impl Into<String>,
    expect: Expect,
    key: &'static str,
    value: impl Fn() -> Value + Send + Sync + 'static,
) -> Case {
    changed(name, expect, move |w| {
        set(w, &format!("tokenizer.ggml.{key}"), value())
    })
}

fn edit(
    name: &str,
    expect: Expect,
    key: &'static str,
    edit: impl Fn(&mut Vec<String>) + Send + Sync + 'static,
) -> Case {
    changed(name, expect, move |w| {
        let key = format!("tokenizer.ggml.{key}");
        if let Some((_, Value::Strs(list))) = w.values.iter_mut().find(|(known, _)| *known == key) {
            edit(list);
        }
    })
}

/// The same vocabulary as SentencePiece's.
fn sentence_piece(
    name: &str,
    expect: Expect,
    change: impl Fn(&mut Writer) + Send + Sync + 'static,
) -> Case {
    changed(name, expect, move |w| {
        set(w, "tokenizer.ggml.model", Value::Str("llama".to_owned()));
        let scores = (0..TOKENS).map(|n| -(n as f32)).collect();
        set(w, "tokenizer.ggml.scores", Value::F32s(scores));
        w.values
            .retain(|(key, _)| key != "tokenizer.ggml.merges" && key != "tokenizer.ggml.pre");
        change(w);
    })
}

/// An embedding for so many tokens.
fn widen(w: &mut Writer, tokens: usize) {
    let embedding = &mut w.tensors[0];
    embedding.dims = vec![32, tokens as u64];
    embedding.data = vec![0; tokens * 32 * 4];
}

fn letters(n: usize, length: usize) -> String {
    let letter = |at: usize| char::from(b'a' + (n / 26usize.pow(at.min(6) as u32) % 26) as u8);
    (0..length).map(letter).collect()
}

fn merges() -> Vec<Case> {
    let joined = |all: Vec<(&'static str, Expect, String)>| {
        let case = |(what, expect, merge): (&str, Expect, String)| {
            edit(what, expect, "merges", move |list| list.push(merge.clone()))
        };
        all.into_iter().map(case).collect::<Vec<_>>()
    };
    let mut all = joined(vec![
        ("a merge of one token", Refused, "a".to_owned()),
        ("a merge of three tokens", Refused, "a b c".to_owned()),
        ("an empty merge", Refused, String::new()),
        ("a merge of a space", Refused, " ".to_owned()),
        (
            "a merge of unknown tokens",
            Refused,
            "\u{10ffff} \u{10fffe}".to_owned(),
        ),
        (
            "a merge into an unknown token",
            Refused,
            "</s> </s>".to_owned(),
        ),
        (
            "a merge of a megabyte",
            Refused,
            format!("{} b", "a".repeat(1 << 19)),
        ),
    ]);
    all.extend([
        edit(
            "all merges are there a thousand times",
            Either("later ones change nothing"),
            "merges",
            |list| {
                let once = list.clone();
                (0..1000).for_each(|_| list.extend(once.iter().cloned()));
            },
        ),
        edit(
            "one merge is there a million times",
            Either("later ones change nothing"),
            "merges",
            |list| {
                let first = list[0].clone();
                *list = vec![first; 1 << 20];
            },
        ),
        with("5 million merges", Refused, "merges", || {
            Value::Strs(vec!["a b".to_owned(); 5 << 20])
        }),
        with("the merges are numbers", Refused, "merges", || {
            Value::I32s(vec![1; 64])
        }),
        with("the merges are one text", Refused, "merges", || {
            Value::Str("a b".to_owned())
        }),
        changed(
            "merges that build one token of 8 KiB, letter by letter",
            Either("lengths are bounded"),
            |w| {
                // Token n is n letters; each merge adds one: as many characters as the square of their number.
                let steps = 2048;
                let long: Vec<String> = (2..=steps).map(|n| "a".repeat(n)).collect();
                let add: Vec<String> = (1..steps).map(|n| format!("{} a", "a".repeat(n))).collect();
                extend(w, &long, &add);
            },
        ),
        changed(
            "a vocabulary in which every merge can be undone",
            Either("merges never are"),
            |w| {
                let add = ["a b", "b a", "ab a", "a ba", "ba b", "b ab"].map(str::to_owned);
                extend(w, &["ab", "ba", "aba", "bab"].map(str::to_owned), &add);
            },
        ),
    ]);
    all
}

/// Adds tokens and merges.
fn extend(w: &mut Writer, tokens: &[String], merges: &[String]) {
    let mut count = TOKENS;
    for (key, value) in &mut w.values {
        match (key.as_str(), value) {
            ("tokenizer.ggml.tokens", Value::Strs(list)) => {
                let new: Vec<String> = tokens
                    .iter()
                    .filter(|t| !list.contains(t))
                    .cloned()
                    .collect();
                list.extend(new);
                count = list.len();
            }
            ("tokenizer.ggml.merges", Value::Strs(list)) => list.extend(merges.iter().cloned()),
            _ => {}
        }
    }
    set(w, "tokenizer.ggml.token_type", Value::I32s(vec![1; count]));
    set(w, "llama.vocab_size", Value::U32(count as u32));
    widen(w, count);
}

fn tokens() -> Vec<Case> {
    vec![
        edit(
            "one token more than the embedding has",
            Refused,
            "tokens",
            |list| list.push("xyz".to_owned()),
        ),
        edit("one token less", Refused, "tokens", |list| {
            list.pop();
        }),
        edit("no tokens", Refused, "tokens", Vec::clear),
        edit("all tokens are the same", Refused, "tokens", |list| {
            list.fill("a".to_owned())
        }),
        edit("all tokens are empty", Refused, "tokens", |list| {
            list.fill(String::new())
        }),
        edit("a token of a megabyte", Refused, "tokens", |list| {
            list[300] = "a".repeat(1 << 20)
        }),
        edit("a token of 64 MiB", Refused, "tokens", |list| {
            list[300] = "a".repeat(64 << 20)
        }),
        edit(
            "tokens that steer a terminal",
            Either("tokens are bytes"),
            "tokens",
            |list| {
                list[300] = "\x1b[2J\x1b]0;gotcha\x07".to_owned();
            },
        ),
        edit(
            "tokens with zeros in them",
            Either("tokens are bytes"),
            "tokens",
            |list| list[300] = "\0\0".to_owned(),
        ),
        edit(
            "the bytes are missing",
            Either("text of them cannot be written"),
            "tokens",
            |list| {
                for (n, token) in list.iter_mut().enumerate().take(258).skip(2) {
                    *token = format!("missing{n}");
                }
            },
        ),
        edit(
            "the begin token is text that everybody writes",
            Either("a model may be stupid"),
            "tokens",
            |list| list[0] = "e".to_owned(),
        ),
        with("tokens that are not UTF-8", Refused, "tokens", || {
            let head = [&8u32.to_le_bytes()[..], &(TOKENS as u64).to_le_bytes()].concat();
            let one = [&2u64.to_le_bytes()[..], &[0xc0, 0xaf]].concat();
            Value::Raw(9, [head, one.repeat(TOKENS)].concat())
        }),
        with("the tokens are numbers", Refused, "tokens", || {
            Value::I32s(vec![1; TOKENS])
        }),
        with("the tokens are one text", Refused, "tokens", || {
            Value::Str("a".to_owned())
        }),
        with("two million empty tokens", Refused, "tokens", || {
            Value::Strs(vec![String::new(); 2 << 20])
        }),
        changed(
            "a million tokens and an embedding of half of them",
            Refused,
            |w| {
                set(
                    w,
                    "tokenizer.ggml.tokens",
                    Value::Strs((0..1 << 20).map(|n| format!("t{n}")).collect()),
                );
                widen(w, 1 << 19);
            },
        ),
        changed(
            "a quarter of a million control tokens",
            Either("within the bounds of a vocabulary"),
            |w| {
                let count = 1 << 18;
                set(
                    w,
                    "tokenizer.ggml.tokens",
                    Value::Strs((0..count).map(|n| format!("<|{n}|>")).collect()),
                );
                set(w, "tokenizer.ggml.token_type", Value::I32s(vec![3; count]));
                set(w, "tokenizer.ggml.merges", Value::Strs(Vec::new()));
                widen(w, count);
            },
        ),
        changed(
            "65000 control tokens of a kilobyte with one beginning",
            Either("within the bounds of a vocabulary"),
            |w| {
                let count = 65_000;
                let long = "<".repeat(1000);
                set(
                    w,
                    "tokenizer.ggml.tokens",
                    Value::Strs((0..count).map(|n| format!("{long}{n}")).collect()),
                );
                set(w, "tokenizer.ggml.token_type", Value::I32s(vec![3; count]));
                set(w, "tokenizer.ggml.merges", Value::Strs(Vec::new()));
                widen(w, count);
            },
        ),
        changed(
            "there are no tokens at all, only their number",
            Refused,
            |w| w.values.retain(|(key, _)| key != "tokenizer.ggml.tokens"),
        ),
        with("one kind of token too few", Refused, "token_type", || {
            Value::I32s(vec![1; TOKENS - 1])
        }),
        with("a kind of token too many", Refused, "token_type", || {
            Value::I32s(vec![1; TOKENS + 1])
        }),
        with(
            "all tokens are unknown ones",
            Either("it can write, if not read"),
            "token_type",
            || Value::I32s(vec![2; TOKENS]),
        ),
        with(
            "all tokens are control tokens",
            Either("it can write, if not read"),
            "token_type",
            || Value::I32s(vec![3; TOKENS]),
        ),
        with(
            "all tokens are the user's",
            Either("it is another way to split"),
            "token_type",
            || Value::I32s(vec![4; TOKENS]),
        ),
        with(
            "all tokens are bytes that they are not",
            Either("kinds are hints"),
            "token_type",
            || Value::I32s(vec![6; TOKENS]),
        ),
        with(
            "kinds of tokens that do not exist",
            Either("kinds are hints"),
            "token_type",
            || Value::I32s(vec![i32::MIN; TOKENS]),
        ),
        with("kinds of tokens are texts", Refused, "token_type", || {
            Value::Strs(vec!["1".to_owned(); TOKENS])
        }),
        with("a tokenizer that does not exist", Refused, "model", || {
            Value::Str("../../bin/sh".to_owned())
        }),
        with("a tokenizer of another kind", Refused, "model", || {
            Value::Str("bert".to_owned())
        }),
        with("the tokenizer is a number", Refused, "model", || {
            Value::U32(1)
        }),
        with(
            "a way of splitting that does not exist",
            Refused,
            "pre",
            || Value::Str("(a+)+$".to_owned()),
        ),
        with(
            "the way of splitting has a megabyte",
            Refused,
            "pre",
            || Value::Str("(".repeat(1 << 20)),
        ),
        with(
            "whether to begin is a number",
            Refused,
            "add_bos_token",
            || Value::U32(2),
        ),
        changed(
            "a tokenizer.json of 32 MiB inside",
            Either("nobody reads it"),
            |w| {
                set(
                    w,
                    "tokenizer.huggingface.json",
                    Value::Str("[".repeat(32 << 20)),
                );
            },
        ),
        changed(
            "a tokenizer.json of more than 64 MiB inside",
            Refused,
            |w| {
                set(
                    w,
                    "tokenizer.huggingface.json",
                    Value::Str(" ".repeat((64 << 20) + 1)),
                );
            },
        ),
    ]
}

fn pieces() -> Vec<Case> {
    let mut all = vec![
        sentence_piece(
            "SentencePiece's way, and nothing wrong",
            Harmless("it is another vocabulary of the same size"),
            |_| (),
        ),
        sentence_piece("a score is missing", Refused, |w| {
            set(
                w,
                "tokenizer.ggml.scores",
                Value::F32s(vec![0.0; TOKENS - 1]),
            )
        }),
        sentence_piece("there are no scores", Refused, |w| {
            w.values.retain(|(key, _)| key != "tokenizer.ggml.scores")
        }),
        sentence_piece("a score is NaN", Refused, |w| {
            set(
                w,
                "tokenizer.ggml.scores",
                Value::F32s(vec![f32::NAN; TOKENS]),
            )
        }),
        sentence_piece(
            "scores are infinite",
            Either("they are only compared"),
            |w| {
                set(
                    w,
                    "tokenizer.ggml.scores",
                    Value::F32s(vec![f32::INFINITY; TOKENS]),
                );
            },
        ),
        sentence_piece("scores are texts", Refused, |w| {
            set(
                w,
                "tokenizer.ggml.scores",
                Value::Strs(vec!["0".to_owned(); TOKENS]),
            )
        }),
        sentence_piece(
            "all pieces are bytes",
            Either("it can write, if not read"),
            |w| {
                set(w, "tokenizer.ggml.token_type", Value::I32s(vec![6; TOKENS]));
                set(
                    w,
                    "tokenizer.ggml.tokens",
                    Value::Strs(
                        (0..TOKENS)
                            .map(|n| format!("<0x{:02X}>", n % 256))
                            .collect(),
                    ),
                );
            },
        ),
    ];
    // As long as tokens may be, and as many as the bound on the squares of their lengths lets in; and one more.
    for (count, length, expect) in [
        (15, 8 << 10, Either("within the bound on work")),
        (17, 8 << 10, Refused),
        (4000, 512, Either("within the bound on work")),
        (60_000, 128, Either("within the bound on work")),
    ] {
        let name = format!("{count} pieces of {length} bytes, each of which may be split anywhere");
        all.push(sentence_piece(&name, expect, move |w| {
            let parts = (1..length).map(|n| "a".repeat(n)).take(2000);
            let long = (0..count).map(|n| format!("{}{}", "a".repeat(length - 8), letters(n, 8)));
            let tokens: Vec<String> = parts.chain(long).collect();
            let total = tokens.len();
            set(w, "tokenizer.ggml.scores", Value::F32s(vec![0.0; total]));
            set(w, "tokenizer.ggml.token_type", Value::I32s(vec![1; total]));
            set(w, "tokenizer.ggml.tokens", Value::Strs(tokens));
            widen(w, total);
        }));
    }
    all
}

/// Templates in metadata; those of folders are more.
fn templates() -> Vec<Case> {
    let template = |name: &str, expect: Expect, value: Value| {
        changed(name, expect, move |w| {
            set(w, "tokenizer.chat_template", value.clone())
        })
    };
    let text = |text: &str| Value::Str(text.to_owned());
    vec![
        template(
            "its template never ends",
            Odd("template_fails"),
            text(
                "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
            ),
        ),
        template(
            "its template opens a file",
            Odd("template_unreadable"),
            text("{% include '/etc/passwd' %}"),
        ),
        template(
            "its template is no template",
            Odd("template_unreadable"),
            text("{% for %}"),
        ),
        template("its template is a number", Refused, Value::U32(7)),
        template(
            "its template is a list",
            Refused,
            Value::Strs(vec!["{{ 1 }}".to_owned()]),
        ),
        template(
            "its template has a megabyte",
            Odd("template_unreadable"),
            Value::Str("x".repeat(1 << 20)),
        ),
    ]
}

/// GGUF files of all these kinds.
pub fn cases() -> Vec<Case> {
    let parts = [merges(), tokens(), pieces(), templates()];
    parts.into_iter().flatten().collect()
}
