//! What fails somewhere in a model is cut out of it and made small: it fails by itself then, where it did, and nowhere else.

use std::{path::Path, process::Output};

use hotcell_client::{
    Address,
    debug::{Recording, Reduced},
    tensor::{Session, SessionOptions},
};
use hotcell_tests::{
    cluster::{Cluster, binaries, hotcell},
    fault::{CACHE_TOKEN, CRASH_NODE, NAN_NODE, NAN_TOKEN, WRONG_CACHE, WRONG_NODE, WRONG_TOKEN},
};
use serde_json::Value;

use super::{
    comparing::{FAULTY, captured},
    kjv_cluster, reduced,
};

/// What `reduce --test` printed but for the test that calls it, with what `cargo fmt` makes of it.
const PRINTED: &str = include_str!("reduced.rs");
/// Tokens of the capture, and which of them is the one at which the faulty worker goes wrong.
const TOKENS: u32 = 6;
const STRUCK: usize = 2;

/// The command, at this cluster if one is named.
fn debug(folder: &Path, at: Option<&Cluster>, arguments: &[&str]) -> Output {
    let mut command = hotcell(folder).unwrap();
    if let Some(cluster) = at {
        command
            .arg("--address")
            .arg(format!("unix:{}", cluster.socket.display()));
    }
    // What it prints has numbers as every path but that of AMX computes them. Where there is no AVX-512 it is the best there is.
    command
        .env("HOTCELL_CPU_PATH", "avx512")
        .args(["--json", "debug"])
        .args(arguments)
        .output()
        .unwrap()
}

/// Its exit code, and its first line of JSON.
fn told(output: &Output) -> (Option<i32>, Value) {
    let said = String::from_utf8_lossy(&output.stdout);
    let first = said.lines().next().unwrap_or_default();
    let view = serde_json::from_str(first).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    (output.status.code(), view)
}

/// A capture of an answer's beginning. One of a host that has much to do may lack tokens.
async fn beginning(cluster: &Cluster, file: &Path) -> Recording {
    for _ in 0..10 {
        captured(cluster, file, TOKENS).await;
        let recording = Recording::read(file).unwrap();
        let indices = recording.tokens.iter().map(|token| token.index);
        if indices.take(STRUCK + 2).eq(0..STRUCK as u64 + 2) {
            return recording;
        }
    }
    panic!("none of ten captures is whole: {}", file.display());
}

/// A capture in which the faulty worker goes wrong at one token.
fn struck(whole: &Recording, token: u32, file: &Path) {
    let mut struck = whole.clone();
    // As if it had drawn that one there: the next one's row is computed from it.
    struck.tokens[STRUCK].token = Some(token);
    struck.write(file).unwrap();
}

/// Without what `cargo fmt` changes.
fn bare(text: &str) -> String {
    let text: String = text.split_whitespace().collect();
    text.replace(",]", "]")
        .replace(",)", ")")
        .replace(",}", "}")
}

/// Whether the printed function finds nothing wrong on a cluster.
async fn passes(cluster: &Cluster) -> bool {
    let address = Address::Unix(cluster.socket.clone());
    let session = Session::open(&address, SessionOptions::default())
        .await
        .unwrap();
    let done = tokio::spawn(async move { reduced::node_layers_2_mul_mat_3(&session).await });
    match done.await {
        Ok(()) => true,
        Err(error) => {
            let what = error.into_panic();
            let what = what.downcast_ref::<String>().unwrap();
            assert!(what.starts_with("[HostTensor"), "{what}");
            false
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_kernel_is_all_that_is_left_of_its_model() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let folder = cluster.folder.path();
    let file = folder.join("long.hotcell");
    let whole = beginning(&cluster, &file).await;
    let file = folder.join("struck.hotcell");
    struck(&whole, WRONG_TOKEN, &file);
    let (file, small) = (file.to_str().unwrap(), folder.join("small.safetensors"));
    let small = small.to_str().unwrap();
    let healthy = binaries().unwrap().join("hotcell-worker");
    let healthy = healthy.to_str().unwrap();
    let sides = [
        "--program",
        FAULTY,
        "--program",
        healthy,
        "--backend",
        "cpu",
    ];
    let ends = ["-o", small, "--test"];
    let (code, view) = told(&debug(
        folder,
        None,
        &[&["reduce", file][..], &sides, &ends].concat(),
    ));
    assert_eq!(code, Some(0), "{view}");
    assert_eq!(view["ops"], serde_json::json!(["mul_mat"]), "{view}");
    assert_eq!(view["origin"]["weight"], WRONG_NODE, "{view}");
    assert_eq!(view["origin"]["token"], STRUCK as u64 + 1, "{view}");
    // One number times one number.
    let inputs = view["inputs"].as_array().unwrap();
    assert_eq!(inputs.len(), 2, "{view}");
    for input in inputs {
        assert_eq!(input["shape"], serde_json::json!([1, 1]), "{view}");
    }
    let test = view["test"].as_str().unwrap();
    let test = test.replace(FAULTY, "hotcell-worker-fault");
    let (function, call) = test.split_once("#[tokio::test]").unwrap();
    assert_eq!(
        bare(function),
        bare(PRINTED),
        "tests/tests/debug/reduced.rs is not this:\n{function}"
    );
    assert!(
        call.contains("node_layers_2_mul_mat_3(&session).await;"),
        "{call}"
    );
    // It fails where it failed, and only there.
    let (code, view) = told(&debug(folder, None, &["rerun", small, "--program", FAULTY]));
    assert_eq!((code, &view["fails"]), (Some(9), &true.into()), "{view}");
    let nmse = view["nmse"].as_f64().unwrap();
    assert!((9e-7..1.1e-6).contains(&nmse), "{view}");
    let (code, view) = told(&debug(folder, Some(&cluster), &["rerun", small]));
    assert_eq!((code, &view["nmse"]), (Some(0), &0.0.into()), "{view}");
    assert!(passes(&cluster).await);
    let arguments = ["--worker-binary", FAULTY, "--devices", "cpu:1"];
    let faulty = Cluster::ready_with(&arguments).await.unwrap();
    assert!(!passes(&faulty).await);
    // Both healthy: there is nothing to reduce.
    let sides = [
        "--program",
        healthy,
        "--program",
        healthy,
        "--backend",
        "cpu",
    ];
    let (code, view) = told(&debug(
        folder,
        None,
        &[&["reduce", file][..], &sides, &ends].concat(),
    ));
    assert_eq!(code, Some(5), "{view}");
    let said = view["error"]["message"].as_str().unwrap();
    assert!(said.contains("no node is beyond its bound"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_reads_the_cache_is_cut_out_with_what_was_in_it() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let folder = cluster.folder.path();
    let file = folder.join("long.hotcell");
    let whole = beginning(&cluster, &file).await;
    let struck_file = folder.join("struck.hotcell");
    struck(&whole, CACHE_TOKEN, &struck_file);
    let small = folder.join("small.safetensors");
    let small_path = small.to_str().unwrap();
    let healthy = binaries().unwrap().join("hotcell-worker");
    let healthy = healthy.to_str().unwrap();
    let arguments = ["reduce", struck_file.to_str().unwrap(), "-o", small_path];
    let sides = ["--program", FAULTY, "--program", healthy];
    let ends = ["--backend", "cpu", "--test"];
    let (code, view) = told(&debug(
        folder,
        None,
        &[&arguments[..], &sides, &ends].concat(),
    ));
    assert_eq!(code, Some(0), "{view}");
    let ops = serde_json::json!(["cache_write", "paged_attention"]);
    assert_eq!(view["ops"], ops, "{view}");
    let origin = &view["origin"];
    assert_eq!(origin["node"], "layers.2.paged_attention.0", "{view}");
    assert_eq!(origin["token"], STRUCK as u64 + 1, "{view}");
    // One token of one number is enough.
    let case = Reduced::read(&small).unwrap().case;
    let values = case
        .tensors()
        .filter(|(input, _)| input.name.contains("values"));
    let values: Vec<Vec<usize>> = values.map(|(_, value)| value.shape()).collect();
    assert_eq!(values, [[1, 1, 1]], "{view}");
    assert!(case.graph.inputs().iter().any(|i| i.name == WRONG_CACHE));
    let test = view["test"].as_str().unwrap();
    assert!(
        test.contains("graph.cache(\"cache.2\", CacheSpec {"),
        "{test}"
    );
    let (code, view) = told(&debug(
        folder,
        None,
        &["rerun", small_path, "--program", FAULTY],
    ));
    assert_eq!((code, &view["fails"]), (Some(9), &true.into()), "{view}");
    let (code, view) = told(&debug(folder, Some(&cluster), &["rerun", small_path]));
    assert_eq!((code, &view["nmse"]), (Some(0), &0.0.into()), "{view}");
    // What was in the cache counts: without it the greatest value of the node would not come of its query again.
    let values = folder.join("values.hotcell");
    let node = "layers.2.paged_attention.0";
    let replay = ["replay", file.to_str().unwrap(), "--node", node, "-o"];
    let output = debug(
        folder,
        Some(&cluster),
        &[&replay[..], &[values.to_str().unwrap()]].concat(),
    );
    assert!(output.status.success(), "{output:?}");
    let row = &Recording::read(&values).unwrap().tokens[STRUCK].nodes[0];
    let greatest = row.greatest.max(-row.least);
    for (share, code) in [(0.9999, 0), (1.0001, 5)] {
        let bound = (greatest * share).to_string();
        let at = STRUCK.to_string();
        let arguments = ["reduce", file.to_str().unwrap(), "-o", small_path];
        let fault = ["--above", &bound, "--at", &at, "--node", node];
        let (ended, view) = told(&debug(
            folder,
            Some(&cluster),
            &[&arguments[..], &fault].concat(),
        ));
        assert_eq!(ended, Some(code), "{view}");
        if code == 0 {
            assert_eq!(view["ops"], ops, "{view}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn logits_are_cut_out_too() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let folder = cluster.folder.path();
    let file = folder.join("long.hotcell");
    beginning(&cluster, &file).await;
    let small = folder.join("small.safetensors");
    let arguments = ["reduce", file.to_str().unwrap(), "-o"];
    let logits = [small.to_str().unwrap(), "--node", "logits", "--above", "3"];
    let (code, view) = told(&debug(
        folder,
        Some(&cluster),
        &[&arguments[..], &logits].concat(),
    ));
    assert_eq!(code, Some(0), "{view}");
    assert_eq!(view["origin"]["node"], "logits", "{view}");
    let ops: Vec<&str> = view["ops"]
        .as_array()
        .unwrap()
        .iter()
        .map(|op| op.as_str().unwrap())
        .collect();
    assert!(ops.contains(&"mul_mat"), "{view}");
    let (code, view) = told(&debug(
        folder,
        Some(&cluster),
        &["rerun", small.to_str().unwrap()],
    ));
    assert_eq!((code, &view["fails"]), (Some(9), &true.into()), "{view}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nan_and_a_crash_are_reduced_on_one_side() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let folder = cluster.folder.path();
    let file = folder.join("long.hotcell");
    let whole = beginning(&cluster, &file).await;
    let struck_file = folder.join("struck.hotcell");
    struck(&whole, NAN_TOKEN, &struck_file);
    let small = folder.join("nan.safetensors");
    let small_path = small.to_str().unwrap();
    let arguments = [
        "reduce",
        struck_file.to_str().unwrap(),
        "--nan",
        "--program",
        FAULTY,
    ];
    let (code, view) = told(&debug(
        folder,
        None,
        &[&arguments[..], &["-o", small_path]].concat(),
    ));
    assert_eq!(code, Some(0), "{view}");
    assert_eq!(view["origin"]["weight"], NAN_NODE, "{view}");
    assert_eq!(view["ops"], serde_json::json!(["mul_mat"]), "{view}");
    let elements = Reduced::read(&small).unwrap().case.inputs;
    assert!(
        elements.iter().all(|input| input.shape() == [1, 1]),
        "{view}"
    );
    let (code, _) = told(&debug(
        folder,
        None,
        &["rerun", small_path, "--program", FAULTY],
    ));
    assert_eq!(code, Some(9));
    let (code, _) = told(&debug(folder, Some(&cluster), &["rerun", small_path]));
    assert_eq!(code, Some(0));

    // What was computed before the node that kills is in the capture.
    let values = folder.join("values.hotcell");
    let arguments = ["replay", file.to_str().unwrap(), "-n", "1", "--layer", "3"];
    let more = [
        "--values",
        "all",
        "--reveal",
        "-o",
        values.to_str().unwrap(),
    ];
    let output = debug(folder, Some(&cluster), &[&arguments[..], &more].concat());
    assert!(output.status.success(), "{output:?}");
    let head = Recording::read(&values).unwrap().head;
    let node = head
        .nodes
        .iter()
        .find(|node| node.weight == CRASH_NODE)
        .unwrap();
    let small = folder.join("crash.safetensors");
    let small = small.to_str().unwrap();
    let arguments = [
        "reduce",
        values.to_str().unwrap(),
        "--dies",
        "--node",
        &node.name,
    ];
    let (code, view) = told(&debug(
        folder,
        None,
        &[&arguments[..], &["--program", FAULTY, "-o", small]].concat(),
    ));
    assert_eq!(code, Some(0), "{view}");
    assert_eq!(view["inputs"][1]["name"], CRASH_NODE, "{view}");
    assert_eq!(
        view["inputs"][1]["shape"],
        serde_json::json!([1, 1]),
        "{view}"
    );
    let (code, view) = told(&debug(folder, None, &["rerun", small, "--program", FAULTY]));
    assert_eq!((code, &view["fails"]), (Some(9), &true.into()), "{view}");
    let healthy = binaries().unwrap().join("hotcell-worker");
    let healthy = ["rerun", small, "--program", healthy.to_str().unwrap()];
    let (code, view) = told(&debug(folder, None, &healthy));
    assert_eq!((code, &view["fails"]), (Some(0), &false.into()), "{view}");
    // Nobody's worker is killed who serves others.
    let (code, view) = told(&debug(folder, Some(&cluster), &["rerun", small]));
    assert_eq!(code, Some(2), "{view}");
}
