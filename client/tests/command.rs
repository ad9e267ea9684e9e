//! The command as a function, against a scripted scheduler: what it prints, and how it exits.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake;

use std::{collections::BTreeSet, ffi::OsString, time::Duration};

use clap::CommandFactory;
use hotcell_client::{
    cli::{self, Captured, Cli, Exit, Interrupt, Trigger, Ui},
    local::Bundled,
    v1,
};
use serde_json::Value;

const NOTHING: Bundled = Bundled {
    model: "kjv",
    files: &[],
};

fn parse(args: &[&str]) -> Result<Cli, clap::Error> {
    let args: Vec<OsString> = ["hotcell"].iter().chain(args).map(OsString::from).collect();
    cli::parse(&args)
}

struct Outcome {
    exit: Exit,
    out: String,
    err: String,
}

impl Outcome {
    fn lines(&self) -> Vec<Value> {
        self.out
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

async fn with_input(running: &fake::Running, input: &str, args: &[&str]) -> Outcome {
    let (_trigger, interrupt) = Interrupt::manual();
    start(running, input, args, interrupt).await
}

async fn start(
    running: &fake::Running,
    input: &str,
    args: &[&str],
    interrupt: Interrupt,
) -> Outcome {
    let address = running.address_flag();
    let cli = parse(&[args, &["--address", &address]].concat()).unwrap();
    let (mut ui, out, err): (Ui, Captured, Captured) = Ui::captured(cli.global.manner(), input);
    let exit = cli::run(cli, &mut ui, NOTHING, interrupt).await;
    Outcome {
        exit,
        out: out.text(),
        err: err.text(),
    }
}

async fn hotcell(running: &fake::Running, args: &[&str]) -> Outcome {
    with_input(running, "", args).await
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn every_command_teaches_by_example() {
    for command in Cli::command().get_subcommands() {
        let name = command.get_name();
        assert!(command.get_about().is_some(), "{name}");
        let after = command
            .get_after_help()
            .map(ToString::to_string)
            .unwrap_or_default();
        assert!(
            after.contains(&format!("hotcell {name}")),
            "{name} has no example"
        );
    }
    let mut command = Cli::command();
    let serve = command.find_subcommand_mut("serve").unwrap();
    let help = serve.render_long_help().to_string();
    for part in [
        "hotcell serve --listen",
        "5  worker program missing",
        "--log-json",
    ] {
        assert!(help.contains(part), "{help}");
    }
    let help = Cli::command().render_long_help().to_string();
    assert!(help.contains("hotcell-scheduler") && help.contains("HOTCELL_SOCKET"));
    for exit in Exit::ALL {
        assert!(help.contains(exit.words()), "{}", exit.words());
    }
}

#[test]
fn scheduler_flags_are_passed_on_as_they_are() {
    let args = [
        "serve",
        "--devices",
        "cpu:2",
        "--json",
        "--listen=127.0.0.1:1",
    ];
    let cli::Command::Serve(flags) = parse(&args).unwrap().command else {
        panic!("not serve");
    };
    assert_eq!(flags.flags, args[1..]);
    let cli::Command::Serve(flags) = parse(&["serve", "--", "--help"]).unwrap().command else {
        panic!("not serve");
    };
    assert_eq!(flags.flags, ["--help"]);
}

#[test]
fn a_wrong_command_line_is_told_apart_from_help() {
    for args in [
        &["nonsense"][..],
        &["run", "--top-k", "many"],
        &["run", "a", "--deadline", "0"],
        &["ps", "--address", "nowhere"],
        &["generate", "text", "--ids", "1"],
    ] {
        assert!(parse(args).unwrap_err().use_stderr(), "{args:?}");
    }
    for args in [&["--help"][..], &["--version"], &["run", "--help"]] {
        assert!(!parse(args).unwrap_err().use_stderr(), "{args:?}");
    }
}

#[tokio::test]
async fn completions_are_generated_for_every_shell() {
    let running = fake::start().await;
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let done = hotcell(&running, &["completions", shell]).await;
        assert_eq!(done.exit, Exit::Success);
        assert!(done.out.contains("repetition-penalty"), "{shell}");
    }
}

#[tokio::test]
async fn run_streams_text_and_ends_with_a_line() {
    let running = fake::start().await;
    let done = hotcell(&running, &["run", "In the beginning"]).await;
    assert_eq!(
        (done.exit, &*done.out, &*done.err),
        (Exit::Success, "In the beginning\n", "")
    );
    let seen = running.fake.seen.lock().unwrap();
    let request = &seen.requests[0];
    assert_eq!((&*request.model, request.max_tokens), ("kjv", 128));
    assert_eq!(request.sampling.as_ref().unwrap().temperature, Some(0.0));
    assert!(seen.loads.is_empty(), "it is loaded already");
}

#[tokio::test]
async fn the_prompt_may_come_from_standard_input() {
    let running = fake::start().await;
    let done = with_input(&running, "In the\n", &["run", "--verbose"]).await;
    assert_eq!(done.out, "In the\n");
    assert!(
        done.err.starts_with("2 tokens · first after "),
        "{}",
        done.err
    );
    assert!(done.err.contains("cpu/test"), "{}", done.err);
}

#[tokio::test]
async fn run_loads_what_is_not_loaded() {
    let running = fake::start().await;
    let done = hotcell(&running, &["run", "a", "--model", "spare"]).await;
    assert_eq!(done.exit, Exit::Success, "{}", done.err);
    let model = running.folder.path().join("model.gguf");
    std::fs::write(&model, "").unwrap();
    let done = hotcell(&running, &["run", "a", "--model", model.to_str().unwrap()]).await;
    assert_eq!(done.exit, Exit::Success, "{}", done.err);
    let seen = running.fake.seen.lock().unwrap();
    assert_eq!((&*seen.loads[0].name, &*seen.loads[0].path), ("spare", ""));
    assert_eq!(
        (&*seen.loads[1].name, &*seen.loads[1].path),
        ("", model.to_str().unwrap())
    );
    assert_eq!(seen.requests[1].model, "from-path");
}

#[tokio::test]
async fn a_worker_run_alone_is_asked_for_its_own_model() {
    let running = fake::start_worker().await;
    let done = hotcell(&running, &["run", "In the"]).await;
    assert_eq!((done.exit, &*done.out), (Exit::Success, "In the\n"));
    let done = hotcell(&running, &["run", "In the", "--model", "other"]).await;
    assert_eq!(done.exit, Exit::Success, "{}", done.err);
    let done = with_input(&running, "hello\n", &["chat"]).await;
    assert_eq!((done.exit, &*done.out), (Exit::Success, "1:hello\n"));
    let seen = running.fake.seen.lock().unwrap();
    let models: Vec<_> = seen.requests.iter().map(|r| &*r.model).collect();
    assert_eq!(models, ["", "other", ""]);
}

#[tokio::test]
async fn a_worker_run_alone_is_no_scheduler() {
    let running = fake::start_worker().await;
    for (args, lacks) in [
        (&["ps"][..], "has no list of workers"),
        (&["devices"], "has no list of devices"),
        (&["models"], "has no list of models"),
        (&["watch"], "has no list of events"),
        (&["crashes", "list"], "keeps no crash reports"),
        (&["load", "spare"], "keeps the model it was started with"),
        (&["unload", "spare"], "keeps the model it was started with"),
        (&["release", "w0"], "has no quarantine"),
        (&["run", "a", "--model", "/"], "keeps the model"),
    ] {
        let done = hotcell(&running, args).await;
        assert_eq!(done.exit, Exit::Failed, "{args:?}");
        let start = format!("error: this address is a single worker, which {lacks}");
        assert!(done.err.starts_with(&start), "{args:?}: {}", done.err);
        assert!(done.err.ends_with("; ask a scheduler\n"), "{}", done.err);
    }
}

#[tokio::test]
async fn a_named_scheduler_without_the_bundled_model_says_how_to_get_it() {
    let running = fake::start_bare().await;
    let done = hotcell(&running, &["run", "a"]).await;
    assert_eq!(done.exit, Exit::NotFound);
    for part in ["model kjv", "`hotcell serve`", "--model"] {
        assert!(done.err.contains(part), "{}", done.err);
    }
    assert!(running.fake.seen.lock().unwrap().requests.is_empty());
}

#[tokio::test]
async fn generate_prints_one_json_line_per_event() {
    let running = fake::start().await;
    let done = hotcell(
        &running,
        &["generate", "a b", "--json", "--top-logprobs", "1"],
    )
    .await;
    assert_eq!(done.exit, Exit::Success);
    let lines = done.lines();
    let events: Vec<_> = lines.iter().map(|l| l["event"].as_str().unwrap()).collect();
    assert_eq!(events, ["accepted", "delta", "delta", "finished"]);
    assert_eq!(lines[0]["seed"], u64::MAX);
    assert_eq!(lines[0]["numerics"]["reproducible"], true);
    assert_eq!(lines[1]["text"], "a ");
    assert_eq!(lines[1]["token_ids"][0], 10);
    assert_eq!(lines[1]["logprobs"][0]["top"][0]["token"], 10);
    assert_eq!(lines[3]["reason"], "max_tokens");
    assert_eq!(lines[3]["usage"]["generated_tokens"], 2);
    let timings = lines[3]["timings"].as_object().unwrap();
    assert!(timings["first_token_ms"].is_number());
    assert!(timings.contains_key("tokens_per_second"));
    // Not widened to the digits of a double.
    assert!(done.out.contains("\"logprob\":-0.1,"), "{}", done.out);
}

#[tokio::test]
async fn bench_sends_what_it_says_and_prints_a_row_of_each() {
    let running = fake::start().await;
    let args = [
        "bench", "-c", "1,2", "-p", "4", "-n", "8", "-r", "3", "--within", "30s",
    ];
    let done = hotcell(&running, &[&args[..], &["--json"]].concat()).await;
    assert_eq!(done.exit, Exit::Success, "{}", done.err);
    let rows = done.lines();
    let of = |name: &str| -> Vec<u64> {
        let values = rows.iter().map(|line| &line["row"][name]);
        values.map(|v| v.as_u64().unwrap()).collect()
    };
    assert_eq!((of("streams"), of("complete")), (vec![1, 2], vec![3, 3]));
    assert_eq!(
        (of("failed"), of("prompt_tokens")),
        (vec![0, 0], vec![4, 4])
    );
    for line in &rows {
        let row = &line["row"];
        assert!(row["tokens_per_second"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["goodput"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["first_token_ms"]["p99"].as_f64() >= row["first_token_ms"]["p50"].as_f64());
    }
    {
        let seen = running.fake.seen.lock().unwrap();
        // One to warm up per stream, and three that count.
        assert_eq!(seen.requests.len(), 1 + 3 + 2 + 3);
        let mut prompts = Vec::new();
        for request in &seen.requests {
            assert!(request.ignore_eos && request.max_tokens == 8, "{request:?}");
            prompts.push(format!("{:?}", request.prompt));
        }
        // Those that count, of both rows: none is known already.
        let counted: BTreeSet<_> = prompts[1..4].iter().chain(&prompts[6..9]).collect();
        assert_eq!(counted.len(), 6, "{prompts:?}");
    }
    let done = hotcell(&running, &args).await;
    let lines: Vec<&str> = done.out.lines().collect();
    assert!(lines[0].starts_with("PROMPT  ANSWER  STREAMS  TOKENS/S"));
    assert_eq!(lines.len(), 3, "{}", done.out);

    let done = hotcell(&running, &["bench", "-p", "4000000000", "-n", "8"]).await;
    assert_eq!(done.exit, Exit::Usage);
    assert!(done.err.contains("do not fit"), "{}", done.err);
    assert!(parse(&["bench", "-c", "0"]).is_err());
}

#[tokio::test]
async fn bench_draws_what_it_measured() {
    let running = fake::start().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bench.svg");
    let path = file.to_str().unwrap();
    let args = ["bench", "-c", "1,2", "-p", "4", "-n", "8", "-r", "2"];
    let done = hotcell(&running, &[&args[..], &["--svg", path]].concat()).await;
    assert_eq!(done.exit, Exit::Success, "{}", done.err);
    let picture = std::fs::read_to_string(&file).unwrap();
    assert!(
        picture.starts_with("<svg") && picture.contains("4 + 8 tokens"),
        "{picture}"
    );

    let nowhere = folder.path().join("missing/bench.svg");
    let nowhere = nowhere.to_str().unwrap();
    let done = hotcell(&running, &[&args[..], &["--svg", nowhere]].concat()).await;
    assert_eq!(done.exit, Exit::Failed);
    assert!(done.err.contains("missing/bench.svg"), "{}", done.err);
}

#[tokio::test]
async fn every_flag_of_generate_reaches_the_server() {
    let running = fake::start().await;
    let args = [
        "generate",
        "x",
        "--temperature",
        "0.7",
        "--top-k",
        "40",
        "--top-p",
        "0.9",
        "--min-p",
        "0.05",
        "--repetition-penalty",
        "1.1",
        "--presence-penalty",
        "-0.5",
        "--frequency-penalty",
        "0.25",
        "--logit-bias",
        "7=-2",
        "--logit-bias",
        "8=1.5",
        "--seed",
        "3",
        "--stop",
        ".",
        "--stop-token",
        "9",
        "-n",
        "5",
        "--ignore-eos",
        "--logprobs",
        "--deadline",
        "10s",
        "--branch",
        "1",
    ];
    let done = hotcell(&running, &args).await;
    assert_eq!(done.exit, Exit::Success, "{}", done.err);
    let seen = running.fake.seen.lock().unwrap();
    let request = seen.requests[0].clone();
    let sampling = v1::Sampling {
        temperature: Some(0.7),
        top_k: Some(40),
        top_p: Some(0.9),
        min_p: Some(0.05),
        repetition_penalty: Some(1.1),
        presence_penalty: Some(-0.5),
        frequency_penalty: Some(0.25),
        logit_bias: vec![
            v1::LogitBias {
                token: 7,
                bias: -2.0,
            },
            v1::LogitBias {
                token: 8,
                bias: 1.5,
            },
        ],
    };
    assert_eq!(request.sampling, Some(sampling));
    assert_eq!(
        (request.seed, request.max_tokens, request.branch),
        (Some(3), 5, 1)
    );
    assert_eq!(
        (request.stop, request.stop_tokens),
        (vec![".".to_owned()], vec![9])
    );
    assert!(request.ignore_eos && request.logprobs);
    assert!(seen.timeouts[0].is_some());
}

#[tokio::test]
async fn prompts_come_as_ids_and_chats_too() {
    let running = fake::start().await;
    let done = hotcell(&running, &["generate", "--ids", "1,2,3"]).await;
    assert_eq!(done.out, "3 ids\n");
    let chat =
        r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}"#;
    let done = with_input(&running, chat, &["generate", "--chat-file", "-"]).await;
    assert_eq!(done.out, "2:u\n");
    let done = with_input(&running, "{}", &["generate", "--chat-file", "-"]).await;
    assert_eq!(done.exit, Exit::InvalidInput);
    let done = hotcell(&running, &["generate", "--chat-file", "/nowhere.json"]).await;
    assert_eq!(done.exit, Exit::NotFound);
}

#[tokio::test]
async fn chat_keeps_the_history_and_resets_it() {
    let running = fake::start().await;
    let input = "hello\n\nagain\n/reset\nonce more\n";
    let done = with_input(&running, input, &["chat", "--system", "Be brief."]).await;
    assert_eq!(done.exit, Exit::Success, "{}", done.err);
    assert_eq!(done.out, "2:hello\n4:again\n2:once more\n");
    let seen = running.fake.seen.lock().unwrap();
    assert_eq!(seen.requests[0].max_tokens, 0);
}

#[tokio::test]
async fn failures_exit_by_their_reason_and_name_the_way_out() {
    let running = fake::start().await;
    for (reason, exit) in cli::REASONS {
        let prompt = format!("refuse {}", reason.name());
        let done = hotcell(&running, &["generate", &prompt]).await;
        assert_eq!(done.exit, *exit, "{reason:?}");
        assert_eq!(done.err, "error: temperature must be at most 100\n");
    }
    let done = hotcell(&running, &["generate", "stall", "--deadline", "200ms"]).await;
    assert_eq!((done.exit, &*done.out), (Exit::Deadline, " wait\n"));
    let done = hotcell(&running, &["generate", "die"]).await;
    assert_eq!((done.exit, &*done.out), (Exit::Unavailable, " half\n"));
    let done = hotcell(&running, &["run", "a", "--model", "./nothing-here"]).await;
    assert_eq!(done.exit, Exit::NotFound);
    assert!(done.err.contains("./nothing-here"), "{}", done.err);
    let done = hotcell(&running, &["load", "missing"]).await;
    assert_eq!(done.exit, Exit::NotFound);
}

#[tokio::test]
async fn json_failures_are_the_last_line_of_the_output() {
    let running = fake::start().await;
    let done = hotcell(&running, &["generate", "die", "--json"]).await;
    assert_eq!((done.exit, &*done.err), (Exit::Unavailable, ""));
    let last = done.lines().pop().unwrap();
    assert_eq!(last["error"]["reason"], "WORKER_LOST");
    assert_eq!(last["error"]["exit_code"], 7);
    let done = hotcell(&running, &["unload", "missing", "--json"]).await;
    assert_eq!(done.lines()[0]["error"]["metadata"]["model"], "missing");
}

#[tokio::test]
async fn a_scheduler_that_was_named_must_run() {
    let running = fake::start().await;
    running.server.abort();
    std::fs::remove_file(running.folder.path().join("hotcell.sock")).unwrap();
    for args in [&["ps"][..], &["run", "a"], &["chat"]] {
        let done = hotcell(&running, args).await;
        assert_eq!(done.exit, Exit::Unreachable, "{args:?}: {}", done.err);
        assert!(done.err.contains("hotcell serve"), "{}", done.err);
    }
    let done = hotcell(&running, &["ps", "--json"]).await;
    assert_eq!(done.lines()[0]["error"]["reason"], "UNREACHABLE");
}

async fn interrupted(running: &fake::Running, args: &[&str]) -> Outcome {
    let (trigger, interrupt): (Trigger, _) = Interrupt::manual();
    let press = async {
        while running.fake.seen.lock().unwrap().requests.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!trigger.press());
    };
    tokio::join!(start(running, "stall\n", args, interrupt), press).0
}

#[tokio::test]
async fn an_interrupt_cancels_the_stream_and_exits_130() {
    for args in [&["run", "stall"][..], &["generate", "stall"], &["chat"]] {
        let running = fake::start().await;
        let done = interrupted(&running, args).await;
        assert_eq!(
            (done.exit, &*done.out, &*done.err),
            (Exit::Interrupted, " wait\n", ""),
            "{args:?}"
        );
        assert!(running.cancelled(1).await, "{args:?}");
    }
    let running = fake::start().await;
    let done = interrupted(&running, &["run", "stall", "--json"]).await;
    assert_eq!(
        done.lines().pop().unwrap()["error"]["reason"],
        "INTERRUPTED"
    );
}

#[tokio::test]
async fn lists_are_one_json_document() {
    let running = fake::start().await;
    let done = hotcell(&running, &["ps", "--json"]).await;
    let worker = &done.lines()[0]["workers"][0];
    assert_eq!(worker["caches"][0]["used_blocks"], 3);
    assert_eq!(worker["caches"][0]["requests"][0]["bytes"], 48 << 10);
    assert_eq!(
        (&worker["id"], &worker["pid"], &worker["state"]),
        (&"w0".into(), &4242.into(), &"ready".into())
    );
    assert_eq!(
        (&worker["device"], &worker["deaths"]),
        (&"cpu:0".into(), &1.into())
    );
    let done = hotcell(&running, &["devices", "--json"]).await;
    assert_eq!(
        done.lines()[0]["devices"][0]["cores"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    let done = hotcell(&running, &["models", "--json"]).await;
    let models = &done.lines()[0]["models"];
    assert_eq!(
        (&models[0]["summary"]["parameters"], &models[1]["summary"]),
        (&4_726_016.into(), &Value::Null)
    );
    let done = hotcell(&running, &["load", "spare", "--json"]).await;
    let events: Vec<_> = done.lines().iter().map(|l| l["event"].clone()).collect();
    assert_eq!(events, ["loading", "loaded"]);
    let done = hotcell(&running, &["watch", "--json"]).await;
    assert_eq!(done.lines()[0]["event"], "worker_died");
    let done = hotcell(&running, &["tokenize", "hi", "--no-special", "--json"]).await;
    assert_eq!(done.lines()[0]["ids"], serde_json::json!([104, 105]));
}

#[tokio::test]
async fn the_doctor_tells_what_confines_whom() {
    let running = fake::start().await;
    let done = hotcell(&running, &["doctor"]).await;
    assert_eq!(done.exit, Exit::Success, "{}", done.err);
    let rows: Vec<String> = done
        .out
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    assert_eq!(rows[0], "WHERE LAYER STATE DETAIL");
    assert_eq!(rows[1], "host landlock in force ABI 7");
    assert_eq!(rows[2], "w0 user not needed root did not start it");
    assert!(
        rows[3].starts_with("w0 landlock missing the kernel"),
        "{rows:?}"
    );
    assert!(!done.out.contains('\x1b'), "{}", done.out);
    let done = hotcell(&running, &["doctor", "--json"]).await;
    let view = &done.lines()[0];
    assert_eq!(view["host"][0]["state"], "in_force");
    assert_eq!(view["workers"][1]["layers"][1]["layer"], "landlock");
    assert_eq!(view["workers"][1]["layers"][1]["state"], "missing");
}

#[tokio::test]
async fn crashes_are_listed_and_shown() {
    let running = fake::start().await;
    let done = hotcell(&running, &["crashes", "list"]).await;
    assert!(done.out.starts_with("ID    TIME"), "{}", done.out);
    for part in ["w0.1", "signal", "kjv", "mul_mat", "killed by SIGSEGV"] {
        assert!(done.out.contains(part), "{part} in {}", done.out);
    }
    let done = hotcell(&running, &["crashes", "show", "w0.1"]).await;
    for part in [
        "12 mul_mat",
        "r1 of kjv, after 3 tokens: continued on w0 (epoch 2)",
        "backtrace   0 0x1000000000000000",
    ] {
        assert!(done.out.contains(part), "{part} in {}", done.out);
    }
    assert!(!done.out.contains('\x1b'), "{}", done.out);
    let done = hotcell(&running, &["crashes", "show", "w0.1", "--json"]).await;
    let signal = &done.lines()[0]["blackbox"]["signal"];
    assert_eq!(signal["name"], "SIGSEGV");
    assert_eq!(signal["functions"][0], "0x1000000000000000");
    let done = hotcell(&running, &["crashes", "show", "w0.9"]).await;
    assert_eq!(done.exit, Exit::NotFound, "{}", done.err);
}

#[tokio::test]
async fn lists_are_tables_without_control_characters() {
    let running = fake::start().await;
    let done = hotcell(&running, &["ps"]).await;
    let lines: Vec<_> = done.out.lines().collect();
    assert!(
        lines[0].starts_with("WORKER  DEVICE  PID   STATE"),
        "{}",
        done.out
    );
    assert!(
        lines[1].contains("64.0 MiB  1m 1s   killed by SIGKILL"),
        "{}",
        done.out
    );
    assert!(
        lines[2].starts_with("w1      cpu:0   -     backoff"),
        "{}",
        done.out
    );
    let done = hotcell(&running, &["devices"]).await;
    assert!(!done.out.contains('\x1b'), "{}", done.out);
    let done = hotcell(&running, &["models"]).await;
    assert!(
        done.out
            .contains("kjv (default)  loaded     as book  llama"),
        "{}",
        done.out
    );
    let done = hotcell(&running, &["models", "--color", "always"]).await;
    assert!(done.out.starts_with("\x1b[1mMODEL"), "{}", done.out);
    let done = hotcell(&running, &["watch"]).await;
    assert_eq!(
        done.out,
        "01:02:03.004  worker_died  w0 epoch 1  killed by SIGKILL\n"
    );
    let done = hotcell(&running, &["load", "spare"]).await;
    assert_eq!(
        done.out,
        "spare: llama with 4.7M parameters, context 1024, bf16, 9.0 MiB on cpu:0\n"
    );
    let done = hotcell(&running, &["unload", "spare"]).await;
    assert_eq!(done.out, "unloaded spare\n");
    let done = hotcell(&running, &["release", "w1"]).await;
    assert_eq!(done.out, "released w1\n");
    let done = hotcell(&running, &["release", "w0"]).await;
    assert_eq!(done.err, "error: it is not quarantined\n");
    let done = hotcell(&running, &["tokenize", "hi"]).await;
    assert_eq!(done.out, "0 104 105\n");
    let done = hotcell(&running, &["detokenize", "104,105"]).await;
    assert_eq!(done.out, "hi\n");
    let done = hotcell(&running, &["embed", "hi", "you", "--mean"]).await;
    assert_eq!(done.out, "0.6 -0.8\n0.6 -0.8\n");
    let done = hotcell(&running, &["embed", "hi", "you", "--json"]).await;
    let embeddings = &done.lines()[0]["embeddings"];
    assert_eq!(embeddings[1]["prompt_tokens"], 3);
    assert_eq!(embeddings[0]["values"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn several_continuations_share_a_seed_and_the_likeliest_can_be_chosen() {
    let fake = fake::start().await;
    let args = ["generate", "branches", "--n", "3", "--branch", "4"];
    let outcome = hotcell(&fake, &args).await;
    assert_eq!(outcome.exit, Exit::Success, "{}", outcome.err);
    let expected = [4, 5, 6].map(|b| format!("--- branch {b} ---\n {b}.0 {b}.1\n"));
    assert_eq!(outcome.out, expected.concat());
    {
        let seen = fake.fake.seen.lock().unwrap();
        let asked = seen.requests.iter().map(|r| (r.branch, r.seed));
        let mut asked: Vec<_> = asked.collect();
        asked.sort_unstable();
        // The first is drawn a seed; the others get it.
        let seed = Some(u64::MAX);
        assert_eq!(asked, [(4, None), (5, seed), (6, seed)]);
    }
    let best = ["generate", "branches", "--best-of", "3", "--verbose"];
    let best = hotcell(&fake, &best).await;
    assert_eq!(best.out, " 1.0 1.1\n");
    let told = "the likeliest of 3 (branch 1, 0.000 per token)";
    assert!(best.err.contains(told), "{}", best.err);
    let two = [
        "generate",
        "branches",
        "--best-of",
        "3",
        "--n",
        "2",
        "--json",
    ];
    let lines = hotcell(&fake, &two).await.lines();
    let last = lines.last().unwrap();
    assert_eq!(last["event"], "chosen");
    let chosen = serde_json::json!([1, 0]);
    assert_eq!(last["branches"], chosen, "equally likely ones in order");
    let of_two = |line: &&Value| line["branch"] == 2 && line["event"] == "delta";
    assert_eq!(lines.iter().filter(of_two).count(), 2, "all are told");
    let none = hotcell(&fake, &["generate", "refuse", "--n", "2"]).await;
    assert_eq!(none.exit, Exit::InvalidInput, "{}", none.err);
    let fewer = hotcell(&fake, &["generate", "x", "--best-of", "2", "--n", "3"]).await;
    let why = "--best-of 2 cannot show --n 3";
    assert!(fewer.err.contains(why), "{}", fewer.err);
    for clash in [["--receipt", "r.json"], ["--request-id", "me"]] {
        let args = [&["generate", "x", "--n", "2"][..], &clash].concat();
        assert!(parse(&args).is_err(), "{clash:?}");
    }
    assert!(parse(&["generate", "x", "--n", "65"]).is_err());
}

#[tokio::test]
async fn ctrl_c_cancels_all_continuations() {
    let fake = fake::start().await;
    let (trigger, interrupt) = Interrupt::manual();
    let args = ["generate", "stall", "--n", "3"];
    let press = async {
        while fake.fake.seen.lock().unwrap().requests.len() < 3 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        trigger.press();
    };
    let (outcome, ()) = tokio::join!(start(&fake, "", &args, interrupt), press);
    assert_eq!(outcome.exit, Exit::Interrupted);
    assert!(fake.cancelled(3).await);
}

#[tokio::test]
async fn inspect_tells_all_and_ends_with_its_verdict() {
    let running = fake::start().await;
    let folder = tempfile::tempdir().unwrap();
    for (name, exit, words) in [
        ("fine.gguf", Exit::Success, "verdict    fine"),
        (
            "odd.gguf",
            Exit::Suspicious,
            "finding    trailing_bytes: 9000 bytes",
        ),
        (
            "broken.gguf",
            Exit::ModelUnusable,
            "refused    MODEL_CORRUPT",
        ),
        (
            "deadly.gguf",
            Exit::ModelUnusable,
            "died       killed by SIGSEGV",
        ),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, "").unwrap();
        let path = path.to_str().unwrap();
        let said = hotcell(&running, &["inspect", path]).await;
        assert_eq!(said.exit, exit, "{}{}", said.out, said.err);
        assert!(said.out.contains(words), "{words} is not in {}", said.out);
        assert!(said.out.contains("sha256 00ff") && !said.out.contains('\x1b'));
        let said = hotcell(&running, &["inspect", path, "--json"]).await;
        let lines = said.lines();
        assert_eq!(lines[0]["files"][0]["bytes"], 1 << 20);
        assert_eq!(said.exit, exit);
        assert_eq!(lines.len(), 1 + usize::from(exit != Exit::Success));
    }
}
