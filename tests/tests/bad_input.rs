//! Bad input: one sentence that names the thing and the way out, the right status, and nothing dies.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{fs, path::Path};

use hotcell_client::{Client, GenerateOptions, Prompt, Reason, v1};
use hotcell_tests::cluster::{Cluster, all_have, golden, hotcell, kjv};

async fn refused(
    client: &Client,
    prompt: impl Into<Prompt>,
    options: GenerateOptions,
) -> hotcell_client::Error {
    match client.generate(prompt, options).await {
        Ok(stream) => stream.complete().await.unwrap_err(),
        Err(error) => error,
    }
}

#[tokio::test]
async fn requests_that_cannot_be_served_say_why() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    let client = cluster.client().await.unwrap();
    let pid = cluster.workers(all_have("kjv")).await.unwrap()[0].pid;
    let sampling = |s: v1::Sampling| GenerateOptions {
        sampling: s,
        ..GenerateOptions::default()
    };
    let default = v1::Sampling::default;
    let cases = [
        (
            sampling(v1::Sampling {
                temperature: Some(-1.0),
                ..default()
            }),
            Reason::InvalidSampling,
            "temperature",
        ),
        (
            sampling(v1::Sampling {
                temperature: Some(f32::NAN),
                ..default()
            }),
            Reason::InvalidSampling,
            "temperature",
        ),
        (
            sampling(v1::Sampling {
                top_p: Some(0.0),
                ..default()
            }),
            Reason::InvalidSampling,
            "top_p",
        ),
        (
            sampling(v1::Sampling {
                min_p: Some(2.0),
                ..default()
            }),
            Reason::InvalidSampling,
            "min_p",
        ),
        (
            sampling(v1::Sampling {
                logit_bias: vec![v1::LogitBias {
                    token: 1 << 30,
                    bias: 1.0,
                }],
                ..default()
            }),
            Reason::InvalidSampling,
            "1073741824",
        ),
        (
            GenerateOptions {
                top_logprobs: 1000,
                ..Default::default()
            },
            Reason::LimitExceeded,
            "1000",
        ),
        (
            GenerateOptions {
                model: "nobody".into(),
                ..Default::default()
            },
            Reason::ModelNotFound,
            "nobody",
        ),
        (
            GenerateOptions {
                stop: vec![String::new()],
                ..Default::default()
            },
            Reason::InvalidArgument,
            "stop",
        ),
        (
            GenerateOptions {
                stop: vec!["x".into(); 99],
                ..Default::default()
            },
            Reason::LimitExceeded,
            "99",
        ),
        (
            GenerateOptions {
                request_id: "a b".into(),
                ..Default::default()
            },
            Reason::InvalidArgument,
            "a b",
        ),
    ];
    for (options, reason, word) in cases {
        let error = refused(&client, "In the beginning", options.clone()).await;
        assert_eq!(error.reason(), reason, "{options:?}: {error}");
        assert!(error.message().contains(word), "{word} is not in: {error}");
    }
    let long = refused(
        &client,
        Prompt::Ids(vec![5; 5000]),
        GenerateOptions::default(),
    )
    .await;
    assert_eq!(long.reason(), Reason::PromptTooLong);
    assert!(long.message().contains("5000"), "{long}");
    let strange = refused(
        &client,
        Prompt::Ids(vec![1 << 20]),
        GenerateOptions::default(),
    )
    .await;
    assert_eq!(strange.reason(), Reason::InvalidArgument);
    let empty = refused(&client, Prompt::Ids(vec![]), GenerateOptions::default()).await;
    assert_eq!(empty.reason(), Reason::InvalidArgument);
    let huge = refused(&client, "a".repeat(5 << 20), GenerateOptions::default()).await;
    assert_eq!(huge.reason(), Reason::LimitExceeded, "{huge}");
    let after = cluster.workers(all_have("kjv")).await.unwrap();
    assert_eq!((after[0].pid, after[0].deaths), (pid, 0), "nothing died");
}

/// A copy of a golden model's folder in which one thing is changed.
fn spoilt(folder: &Path, name: &str, spoil: impl FnOnce(&Path)) -> String {
    let target = folder.join(name);
    fs::create_dir(&target).unwrap();
    for file in fs::read_dir(golden("llama2")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), target.join(file.file_name())).unwrap();
    }
    spoil(&target);
    target.to_str().unwrap().to_owned()
}

fn edit(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} is not in {}", path.display());
    fs::write(path, text.replace(from, to)).unwrap();
}

#[tokio::test]
async fn models_that_cannot_be_loaded_say_why() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    let client = cluster.client().await.unwrap();
    let pid = cluster.workers(all_have("kjv")).await.unwrap()[0].pid;
    let folder = cluster.folder.path().join("models");
    fs::create_dir(&folder).unwrap();
    let gguf = fs::read(golden("gguf/llama3-q8_0.gguf")).unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let mut flipped = gguf.clone();
    flipped[24..32].fill(0xff);
    let cases = [
        (
            folder.join("missing").to_str().unwrap().to_owned(),
            Reason::FileNotFound,
            "missing",
        ),
        (
            spoilt(&folder, "noconfig", |p| {
                fs::remove_file(p.join("config.json")).unwrap()
            }),
            Reason::NotAModel,
            "config.json",
        ),
        (
            spoilt(&folder, "notokenizer", |p| {
                fs::remove_file(p.join("tokenizer.json")).unwrap()
            }),
            Reason::NotAModel,
            "tokenizer.json",
        ),
        (
            spoilt(&folder, "strange", |p| {
                edit(
                    &p.join("config.json"),
                    "LlamaForCausalLM",
                    "MambaForCausalLM",
                )
            }),
            Reason::ModelUnsupported,
            "MambaForCausalLM",
        ),
        (
            spoilt(&folder, "badjson", |p| {
                fs::write(p.join("config.json"), "{").unwrap()
            }),
            Reason::ModelCorrupt,
            "config.json",
        ),
        (
            spoilt(&folder, "short", |p| {
                let file = fs::OpenOptions::new()
                    .write(true)
                    .open(p.join("model.safetensors"))
                    .unwrap();
                file.set_len(20_000).unwrap();
            }),
            Reason::ModelCorrupt,
            "model.safetensors",
        ),
        (
            write("garbage.gguf", &[7; 4096]),
            Reason::NotAModel,
            "garbage.gguf",
        ),
        (
            write("cut.gguf", &gguf[..gguf.len() / 2]),
            Reason::ModelCorrupt,
            "cut.gguf",
        ),
        (
            write("flipped.gguf", &flipped),
            Reason::LimitExceeded,
            "flipped.gguf",
        ),
        (write("empty.gguf", &[]), Reason::ModelCorrupt, "empty.gguf"),
    ];
    for (path, reason, word) in cases {
        let error = client.load("", &path).await.unwrap_err();
        assert_eq!(error.reason(), reason, "{path}: {error}");
        assert!(error.message().contains(word), "{word} is not in: {error}");
        assert!(!error.message().contains('\n'));
    }
    let after = cluster.workers(all_have("kjv")).await.unwrap();
    assert_eq!((after[0].pid, after[0].deaths), (pid, 0), "nothing died");
    let done = client.generate(
        "And",
        GenerateOptions {
            max_tokens: 4,
            model: "kjv".into(),
            ..Default::default()
        },
    );
    assert_eq!(
        done.await
            .unwrap()
            .complete()
            .await
            .unwrap()
            .token_ids
            .len(),
        4
    );
}

/// A worker that has nothing else to do makes a model ready beside the reading of its tokenizer.
#[tokio::test]
async fn a_name_is_free_again_whose_tokenizer_was_broken() {
    let cluster = Cluster::ready().await.unwrap();
    let client = cluster.client().await.unwrap();
    let folder = cluster.folder.path().join("models");
    fs::create_dir(&folder).unwrap();
    let broken = spoilt(&folder, "broken", |p| {
        fs::write(p.join("tokenizer.json"), "{\"model\": 1}").unwrap()
    });
    let whole = spoilt(&folder, "whole", |_| ());
    let pid = cluster.workers(|all| !all.is_empty()).await.unwrap()[0].pid;
    for _ in 0..3 {
        let error = client.load("m", &broken).await.unwrap_err();
        assert_eq!(error.reason(), Reason::ModelCorrupt, "{error}");
        assert!(error.message().contains("tokenizer"), "{error}");
    }
    client.load("m", &whole).await.unwrap();
    let options = GenerateOptions {
        max_tokens: 4,
        ignore_eos: true,
        model: "m".into(),
        ..Default::default()
    };
    let stream = client.generate("And", options).await.unwrap();
    assert_eq!(stream.complete().await.unwrap().token_ids.len(), 4);
    let after = cluster.workers(all_have("m")).await.unwrap();
    assert_eq!((after[0].pid, after[0].deaths), (pid, 0), "nothing died");
}

#[tokio::test]
async fn a_second_scheduler_on_one_socket_or_port_is_refused_and_a_stale_socket_is_replaced() {
    let cluster = Cluster::start(&[]).await.unwrap();
    let socket = cluster.socket.to_str().unwrap();
    let mut command = hotcell(cluster.folder.path()).unwrap();
    let output = command
        .args(["serve", "--socket", socket])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains(socket), "{said}");

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().to_string();
    let free = cluster.folder.path().join("other.sock");
    let mut command = hotcell(cluster.folder.path()).unwrap();
    let output = command
        .args([
            "serve",
            "--socket",
            free.to_str().unwrap(),
            "--listen",
            &port,
        ])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains(&port), "{said}");
}

#[tokio::test]
async fn the_command_says_why_and_ends_with_the_documented_code() {
    let folder = hotcell_tests::cluster::private_folder().unwrap();
    let run = |arguments: &[&str]| {
        let output = hotcell(folder.path())
            .unwrap()
            .args(arguments)
            .output()
            .unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (code, said) = run(&["ps"]);
    assert_eq!(code, Some(3), "{said}");
    assert!(
        said.contains("hotcell serve"),
        "the way out is missing: {said}"
    );
    let (code, said) = run(&["run", "--model", "/nowhere/model.gguf", "x"]);
    assert_eq!(code, Some(4), "{said}");
    assert!(said.contains("/nowhere/model.gguf"), "{said}");
    let (code, said) = run(&["run", "--temperature", "-3", "x"]);
    assert!(matches!(code, Some(2 | 5)), "{code:?} {said}");
    let (code, said) = run(&["run", "--frobnicate"]);
    assert_eq!(code, Some(2), "{said}");
}
