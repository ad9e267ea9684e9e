//! Texts that follow a JSON schema, a regular expression or a Lark grammar: they do whatever the seed, go on exactly when the
//! worker dies, and neither they nor a grammar that cannot be read change anything for the streams beside them.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use hotcell_client::{
    Client, Completion, Event, GenerateOptions, Generation, Grammar, Reason,
    v1::{self, FinishReason},
};
use hotcell_proto::limits;
use hotcell_tests::cluster::{Cluster, SOON, all_have, kjv, signal_pid};
use rustix::process::Signal;
use serde_json::Value;

const PROMPT: &str = "In the beginning";
const NAMES: [&str; 3] = ["Adam", "Eve", "Noah"];

/// With a bound on everything, so that a model that only knows one book comes to an end.
const SCHEMA: &str = r##"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 969},
        "righteous": {"type": "boolean"},
        "sons": {
            "type": "array",
            "items": {"enum": ["Shem", "Ham", "Japheth", "Cain \"the elder\""]},
            "minItems": 1,
            "maxItems": 3
        },
        "wife": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/wife"}]}
    },
    "required": ["name", "age", "righteous", "sons", "wife"],
    "additionalProperties": false,
    "$defs": {
        "wife": {
            "type": "object",
            "properties": {"name": {"const": "Sarai"}},
            "required": ["name"],
            "additionalProperties": false
        }
    },
    "x-guidance": {"whitespace_flexible": false}
}"##;

/// Whether a text is what [`SCHEMA`] says, by a reader that knows nothing of grammars.
fn is_valid(text: &str) -> bool {
    let Ok(Value::Object(value)) = serde_json::from_str::<Value>(text) else {
        return false;
    };
    let name = value.get("name").and_then(Value::as_str).is_some_and(|n| {
        let mut letters = n.chars();
        letters.next().is_some_and(|c| c.is_ascii_uppercase())
            && (1..=8).contains(&letters.clone().count())
            && letters.all(|c| c.is_ascii_lowercase())
    });
    let age = value.get("age").and_then(Value::as_u64);
    let sons = value
        .get("sons")
        .and_then(Value::as_array)
        .is_some_and(|s| {
            let known = ["Shem", "Ham", "Japheth", "Cain \"the elder\""];
            (1..=3).contains(&s.len())
                && s.iter()
                    .all(|s| s.as_str().is_some_and(|s| known.contains(&s)))
        });
    let wife = match value.get("wife") {
        Some(Value::Object(wife)) => wife.len() == 1 && wife.get("name") == Some(&"Sarai".into()),
        wife => wife == Some(&Value::Null),
    };
    let righteous = value.get("righteous").is_some_and(Value::is_boolean);
    value.len() == 5 && name && age.is_some_and(|a| a <= 969) && righteous && sons && wife
}

/// One of which a worker can die at every token.
const SHORT: &str =
    r#"{"type": "array", "items": {"enum": ["Shem", "Ham"]}, "minItems": 2, "maxItems": 4}"#;

/// Two to four names, joined.
const REGEX: &str = r"(Adam|Eve|Noah)( and (Adam|Eve|Noah)){1,3}\.";

fn is_list(text: &str) -> bool {
    let Some(list) = text.strip_suffix('.') else {
        return false;
    };
    let names: Vec<&str> = list.split(" and ").collect();
    (2..=4).contains(&names.len()) && names.iter().all(|n| NAMES.contains(n))
}

/// Balanced brackets around a name: no regular language.
const LARK: &str = r#"
start: "(" inner ")"
inner: NAME | "[" inner "]"
NAME: "Adam" | "Eve" | "Noah"
"#;

fn is_nested(text: &str) -> bool {
    let inner = text.strip_prefix('(').and_then(|t| t.strip_suffix(')'));
    let Some(mut inner) = inner else {
        return false;
    };
    while let Some(next) = inner.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
        inner = next;
    }
    NAMES.contains(&inner)
}

type Check = fn(&str) -> bool;

fn grammars() -> [(Grammar, Check); 3] {
    [
        (Grammar::JsonSchema(SCHEMA.to_owned()), is_valid),
        (Grammar::Regex(REGEX.to_owned()), is_list),
        (Grammar::Lark(LARK.to_owned()), is_nested),
    ]
}

async fn cluster() -> Cluster {
    let arguments = [
        "--restart-budget",
        "1000",
        "--restart-backoff",
        "1ms",
        "--restart-backoff-max",
        "5ms",
    ];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    cluster
}

fn sampled(seed: u64, grammar: Option<Grammar>) -> GenerateOptions {
    GenerateOptions {
        sampling: v1::Sampling {
            temperature: Some(if seed == 0 { 0.0 } else { 1.0 }),
            ..v1::Sampling::default()
        },
        seed: Some(seed),
        max_tokens: 400,
        grammar,
        ..GenerateOptions::default()
    }
}

/// A stream that follows no grammar, of a fixed length.
fn free(seed: u64) -> GenerateOptions {
    GenerateOptions {
        max_tokens: 60,
        ignore_eos: true,
        logprobs: true,
        top_logprobs: 2,
        ..sampled(seed, None)
    }
}

async fn complete(client: &Client, options: GenerateOptions) -> Completion {
    let stream = client.generate(PROMPT, options).await.unwrap();
    stream.complete().await.unwrap()
}

#[tokio::test]
async fn texts_follow_their_grammar_whatever_the_seed_and_disturb_nobody() {
    let cluster = cluster().await;
    let client = cluster.client().await.unwrap();
    let mut calm = Vec::new();
    for seed in 0..4 {
        calm.push(complete(&client, free(seed)).await);
    }
    for (grammar, check) in grammars() {
        let tasks: Vec<_> = (0..32)
            .map(|seed| {
                let (client, grammar) = (client.clone(), grammar.clone());
                tokio::spawn(async move {
                    let followed = complete(&client, sampled(seed, Some(grammar)));
                    // Beside some of them, in the same batch, one that follows nothing.
                    match seed % 8 {
                        0 => {
                            let free = complete(&client, free(seed / 8));
                            let (followed, free) = tokio::join!(followed, free);
                            (followed, Some(free))
                        }
                        _ => (followed.await, None),
                    }
                })
            })
            .collect();
        let mut texts = std::collections::HashSet::new();
        for (seed, task) in tasks.into_iter().enumerate() {
            let (followed, free) = task.await.unwrap();
            let end = &followed.finished;
            assert_eq!(end.reason(), FinishReason::EndToken, "{:?}", followed.text);
            assert!(check(&followed.text), "seed {seed}: {:?}", followed.text);
            texts.insert(followed.text);
            if let Some(free) = free {
                let calm = &calm[seed / 8];
                assert_eq!(free.token_ids, calm.token_ids);
                assert_eq!(free.logprobs, calm.logprobs);
            }
        }
        assert!(texts.len() > 1, "{texts:?}");
    }
}

#[tokio::test]
async fn a_json_object_is_one_and_log_probabilities_are_the_models_own() {
    let cluster = cluster().await;
    let client = cluster.client().await.unwrap();
    for seed in 0..12 {
        let options = GenerateOptions {
            max_tokens: 60,
            ..sampled(seed, Some(Grammar::JsonObject(true)))
        };
        let object = complete(&client, options).await;
        assert!(object.text.starts_with('{'), "{:?}", object.text);
        let value = serde_json::from_str::<Value>(&object.text);
        // Of any object there may be no end; as far as it came nothing is wrong with it.
        match object.finished.reason() {
            FinishReason::EndToken => assert!(value.unwrap().is_object()),
            _ => assert!(value.unwrap_err().is_eof(), "{:?}", object.text),
        }
    }
    let with = |grammar| GenerateOptions {
        ignore_eos: false,
        max_tokens: 1,
        grammar,
        ..free(1)
    };
    let free = complete(&client, with(None)).await;
    let followed = complete(&client, with(Some(Grammar::Regex("Q.*".to_owned())))).await;
    assert!(followed.text.starts_with('Q'));
    assert_ne!(free.token_ids, followed.token_ids);
    // What would have been likely is said, and that what was taken was not.
    assert_eq!(free.logprobs[0].top, followed.logprobs[0].top);
    assert!(followed.logprobs[0].logprob < followed.logprobs[0].top[0].logprob);
}

/// Reads on until so many tokens have come, or to the end.
async fn read(
    stream: &mut Generation,
    ids: &mut Vec<u32>,
    text: &mut String,
    tokens: usize,
) -> Option<v1::Finished> {
    while ids.len() < tokens {
        match stream.next().await?.unwrap() {
            Event::Delta(delta) => {
                ids.extend(delta.token_ids);
                text.push_str(&delta.text);
            }
            Event::Finished(finished) => return Some(finished),
            Event::Accepted(_) => {}
        }
    }
    None
}

/// Tokens of a text at each of which a worker dies.
const MOST_KILLS: u32 = 32;

#[tokio::test]
async fn a_worker_that_dies_at_any_token_changes_nothing() {
    let cluster = cluster().await;
    let client = cluster.client().await.unwrap();
    let [_, regex, lark] = grammars();
    let short: (Grammar, Check) = (Grammar::JsonSchema(SHORT.to_owned()), |text| {
        let names = serde_json::from_str::<Vec<String>>(text);
        names.is_ok_and(|n| {
            (2..=4).contains(&n.len()) && n.iter().all(|n| n == "Shem" || n == "Ham")
        })
    });
    for (seed, (grammar, check)) in (1..).zip([short, regex, lark]) {
        let mut options = sampled(seed, Some(grammar));
        // Brackets may go on for long, and each token costs a worker.
        options.max_tokens = MOST_KILLS;
        // Two names are said; the second one ends the text.
        if seed == 2 {
            options.stop = vec![" and Noah".to_owned(), " and Eve and Eve".to_owned()];
        }
        let calm = complete(&client, options.clone()).await;
        let cut = calm.token_ids.len() == MOST_KILLS as usize;
        assert!(seed == 2 || cut || check(&calm.text), "{}", calm.text);
        let mut deaths = 0;
        for kill_at in 0..calm.token_ids.len() {
            let before = cluster.workers(all_have("kjv")).await.unwrap()[0].clone();
            let mut stream = client.generate(PROMPT, options.clone()).await.unwrap();
            stream.next().await.unwrap().unwrap();
            let (mut ids, mut text) = (Vec::new(), String::new());
            let early = read(&mut stream, &mut ids, &mut text, kill_at).await;
            signal_pid(before.pid, Signal::KILL).unwrap();
            let finished = match early {
                Some(finished) => finished,
                None => read(&mut stream, &mut ids, &mut text, usize::MAX)
                    .await
                    .unwrap(),
            };
            assert_eq!(ids, calm.token_ids, "killed at {kill_at}");
            assert_eq!(text, calm.text, "killed at {kill_at}");
            assert_eq!(finished.reason, calm.finished.reason);
            assert_eq!(finished.matched_stop, calm.finished.matched_stop);
            deaths += finished.deaths_survived;
            cluster
                .workers(|w| all_have("kjv")(w) && w[0].epoch > before.epoch)
                .await
                .unwrap();
        }
        assert!(deaths > 0);
    }
}

#[tokio::test]
async fn a_grammar_that_cannot_be_read_is_that_requests_error() {
    let cluster = cluster().await;
    let client = cluster.client().await.unwrap();
    let calm = complete(&client, free(3)).await;
    let beside = tokio::spawn({
        let client = client.clone();
        async move { complete(&client, free(3)).await }
    });
    let before = cluster.workers(all_have("kjv")).await.unwrap()[0].epoch;
    let nested = |open: &str, close: &str| format!("{}a{}", open.repeat(6000), close.repeat(6000));
    let json = |text: &str| Grammar::JsonSchema(text.to_owned());
    let lark = |text: &str| Grammar::Lark(text.to_owned());
    let bad = [
        json("no schema"),
        json(""),
        json(r#"{"type": "nothing"}"#),
        json(r##"{"$ref": "#/nowhere"}"##),
        json(r#"{"type": "string", "pattern": "("}"#),
        json(&nested("[", "]")),
        json(&nested(r#"{"items":"#, "}")),
        Grammar::Regex("(".to_owned()),
        Grammar::Regex(nested("(", ")")),
        Grammar::Regex(r"(?=x)y".to_owned()),
        lark("start: nothing"),
        lark(""),
        lark("%%%"),
        lark(&format!(
            "start: {}",
            nested("(", ")").replace('a', "\"a\"")
        )),
        lark("start: a\na: b\nb: a"),
        Grammar::JsonObject(false),
    ];
    for grammar in bad {
        let shown = format!("{grammar:?}").chars().take(60).collect::<String>();
        let asked = client.generate(PROMPT, sampled(1, Some(grammar))).await;
        let answer = match asked {
            Ok(stream) => stream.complete().await.err(),
            Err(error) => Some(error),
        };
        let error = answer.unwrap_or_else(|| panic!("{shown} was followed"));
        assert_eq!(error.reason(), Reason::GrammarInvalid, "{shown}: {error}");
        assert!(error.message().len() < 1000);
    }
    for (grammar, reason, ignore_eos) in [
        (
            Grammar::Regex("a".repeat(limits::MAX_GRAMMAR_BYTES + 1)),
            Reason::LimitExceeded,
            false,
        ),
        (
            Grammar::Regex("a".to_owned()),
            Reason::InvalidArgument,
            true,
        ),
    ] {
        let options = GenerateOptions {
            ignore_eos,
            ..sampled(1, Some(grammar))
        };
        let error = match client.generate(PROMPT, options).await {
            Ok(stream) => stream.complete().await.unwrap_err(),
            Err(error) => error,
        };
        assert_eq!(error.reason(), reason, "{error}");
    }
    // One that was begun elsewhere by other rules.
    let options = GenerateOptions {
        resume: Some(v1::Resume {
            generated_ids: calm.token_ids[..2].to_vec(),
            text_bytes_emitted: 0,
        }),
        ..sampled(1, Some(Grammar::Regex("[0-9]+".to_owned())))
    };
    let error = match client.generate(PROMPT, options).await {
        Ok(stream) => stream.complete().await.unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(error.reason(), Reason::GrammarInvalid, "{error}");
    let beside = beside.await.unwrap();
    assert_eq!(beside.token_ids, calm.token_ids);
    assert_eq!(beside.logprobs, calm.logprobs);
    let now = cluster.workers(all_have("kjv")).await.unwrap()[0].epoch;
    assert_eq!(now, before, "no worker died of it");
}

/// Grammars that are short and mean very much: exponential automata, huge counts, doubling references.
fn bombs() -> Vec<Grammar> {
    let json = |text: String| Grammar::JsonSchema(text);
    let lark = |text: String| Grammar::Lark(text);
    let doubling = |line: &dyn Fn(usize) -> String| (0..40).map(line).collect::<Vec<_>>();
    let definitions = doubling(&|i| {
        let next = format!("{{\"$ref\": \"#/$defs/a{}\"}}", i + 1);
        format!("\"a{i}\": {{\"allOf\": [{next}, {next}]}}")
    });
    let any = doubling(&|i| {
        let next = format!("{{\"$ref\": \"#/$defs/a{}\"}}", i + 1);
        format!("\"a{i}\": {{\"type\": \"array\", \"items\": {next}, \"minItems\": 2}}")
    });
    let schema = |definitions: Vec<String>| {
        let all = definitions.join(", ");
        format!(
            "{{\"$ref\": \"#/$defs/a0\", \"$defs\": {{{all}, \"a40\": {{\"type\": \"string\"}}}}}}"
        )
    };
    let rules = doubling(&|i| format!("a{i}: a{} a{}", i + 1, i + 1)).join("\n");
    let terminals = doubling(&|i| format!("A{i}: A{} A{}", i + 1, i + 1)).join("\n");
    vec![
        Grammar::Regex("(a|b)*a(a|b){2000}".to_owned()),
        Grammar::Regex("(((a{100}){100}){100}){100}".to_owned()),
        Grammar::Regex("(x+x+)+y".to_owned()),
        Grammar::Regex("(.*a){80}b(.*c){80}".to_owned()),
        Grammar::Regex(format!("({})+", ["(a|aa)+"; 400].join(""))),
        json(r#"{"type": "array", "minItems": 1000000000}"#.to_owned()),
        json(r#"{"type": "string", "minLength": 1000000000}"#.to_owned()),
        json(r#"{"type": "integer", "multipleOf": 999999999999989}"#.to_owned()),
        json(schema(definitions)),
        json(schema(any)),
        lark(format!("start: a0\n{rules}\na40: \"x\"")),
        lark(format!("start: A0\n{terminals}\nA40: \"x\"")),
        lark("start: start start | \"a\" | \"\"".to_owned()),
    ]
}

#[tokio::test]
async fn a_grammar_that_explodes_costs_its_request_and_nobody_else() {
    let cluster = cluster().await;
    let client = cluster.client().await.unwrap();
    let before = cluster.workers(all_have("kjv")).await.unwrap()[0].clone();
    for grammar in bombs() {
        let shown = format!("{grammar:?}").chars().take(60).collect::<String>();
        let bomb = async {
            let options = GenerateOptions {
                max_tokens: 8,
                ..sampled(1, Some(grammar))
            };
            match client.generate(PROMPT, options).await {
                Ok(stream) => stream.complete().await,
                Err(error) => Err(error),
            }
        };
        let (bomb, beside) =
            tokio::join!(tokio::time::timeout(SOON, bomb), complete(&client, free(3)));
        // Followed for as long as it can be, or refused.
        match bomb {
            Ok(Ok(done)) => assert!(done.token_ids.len() <= 8, "{shown}"),
            Ok(Err(error)) => {
                assert_eq!(error.reason(), Reason::GrammarInvalid, "{shown}: {error}")
            }
            Err(_) => panic!("{shown} never ended"),
        }
        assert!(!beside.token_ids.is_empty());
    }
    let now = cluster.workers(all_have("kjv")).await.unwrap()[0].clone();
    assert_eq!(
        (now.epoch, now.pid),
        (before.epoch, before.pid),
        "no worker died of it"
    );
    let grown = now.resident_bytes.saturating_sub(before.resident_bytes);
    assert!(grown < 1 << 30, "{grown} bytes more than before");
}

#[tokio::test]
async fn a_grammar_that_goes_on_in_too_many_ways_ends_its_own_request_only() {
    let cluster = cluster().await;
    let client = cluster.client().await.unwrap();
    let calm = complete(&client, free(3)).await;
    let before = cluster.workers(all_have("kjv")).await.unwrap()[0].epoch;
    // What can be read, and followed up to here, may be any sentence after that, put together in any order.
    let begins = "And it came to pass ";
    let bomb = format!("start: \"{begins}\" s\ns: C | s s | s s s | s s s s\nC: /[a-z ]/");
    let beside: Vec<_> = (0..2)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { complete(&client, free(3)).await })
        })
        .collect();
    for seed in 0..3 {
        let options = sampled(seed, Some(Grammar::Lark(bomb.clone())));
        let mut stream = client.generate(PROMPT, options).await.unwrap();
        let mut text = String::new();
        let error = loop {
            match stream.next().await.expect("it does not end by itself") {
                Ok(Event::Delta(delta)) => text.push_str(&delta.text),
                Ok(Event::Finished(finished)) => panic!("{text:?} {finished:?}"),
                Ok(Event::Accepted(_)) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.reason(), Reason::GrammarInvalid, "{error}");
        assert!(
            !text.is_empty() && begins.starts_with(text.trim_end()) || text.starts_with(begins)
        );
    }
    for beside in beside {
        let beside = beside.await.unwrap();
        assert_eq!(beside.token_ids, calm.token_ids);
        assert_eq!(beside.logprobs, calm.logprobs);
    }
    let now = cluster.workers(all_have("kjv")).await.unwrap()[0].epoch;
    assert_eq!(now, before, "no worker died of it");
}

#[tokio::test]
async fn the_command_takes_grammars_and_verifies_what_followed_them() {
    let cluster = cluster().await;
    let path = |name: &str| {
        cluster
            .folder
            .path()
            .join(name)
            .to_str()
            .unwrap()
            .to_owned()
    };
    std::fs::write(path("schema.json"), SCHEMA).unwrap();
    std::fs::write(path("grammar.lark"), LARK).unwrap();
    let run = |arguments: &[&str]| {
        let done = cluster.hotcell(arguments).unwrap();
        let text = String::from_utf8(done.stdout).unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        (done.status.success(), text.trim_end().to_owned(), said)
    };
    let (schema, lark, receipt) = (path("schema.json"), path("grammar.lark"), path("r.json"));
    let cases: [([&str; 2], Check); 3] = [
        (["--json-schema", &schema], is_valid),
        (["--regex", REGEX], is_list),
        (["--grammar", &lark], is_nested),
    ];
    for ([flag, value], check) in cases {
        let _ = std::fs::remove_file(&receipt);
        let (done, text, said) = run(&[
            "generate",
            PROMPT,
            "--temperature",
            "1",
            "--seed",
            "7",
            "-n",
            "400",
            flag,
            value,
            "--receipt",
            &receipt,
        ]);
        assert!(done && check(&text), "{flag}: {text:?} {said}");
        let (same, _, said) = run(&["verify", &receipt]);
        assert!(same, "{flag}: {said}");
    }
    let (done, _, said) = run(&["generate", PROMPT, "--regex", "("]);
    assert!(!done && said.contains("the grammar is refused"), "{said}");
    let (done, _, said) = run(&["generate", PROMPT, "--regex", "a", "--ignore-eos"]);
    assert!(!done && said.contains("--ignore-eos"), "{said}");
    let (done, _, said) = run(&["generate", PROMPT, "--grammar", "nowhere"]);
    assert!(!done && said.contains("nowhere"), "{said}");
}
