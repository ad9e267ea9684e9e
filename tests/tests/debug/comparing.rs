//! Two worker programs beside each other: what one computes wrongly is found by name, in one token and among many.

use std::path::Path;

use hotcell_client::debug::Recording;
use hotcell_tests::{
    cluster::{Cluster, binaries, hotcell},
    fault::{NAN_NODE, NAN_TOKEN, WRONG_NODE, WRONG_TOKEN},
};
use serde_json::Value;

use super::{kjv_cluster, long};

pub(super) const FAULTY: &str = env!("CARGO_BIN_EXE_hotcell-worker-fault");
/// Tokens of a capture, and which of them is the one at which the faulty worker goes wrong.
const TOKENS: u32 = 24;
const STRUCK: usize = 13;
/// A weight that one of two models has otherwise.
const NORM: &str = "model.layers.2.input_layernorm.weight";

/// A capture of the logits of a few tokens, with the prompt.
pub(super) async fn captured(cluster: &Cluster, file: &Path, tokens: u32) {
    let arguments = [
        "debug",
        "capture",
        "--next",
        "--only-logits",
        "--reveal",
        "-o",
    ];
    let mut command = hotcell(cluster.folder.path()).unwrap();
    let address = format!("unix:{}", cluster.socket.display());
    let command = command
        .arg("--address")
        .arg(address)
        .args(arguments)
        .arg(file);
    let mut capture = hotcell_tests::cluster::Process::start(command).unwrap();
    let begun = std::time::Instant::now();
    while !capture.log().contains("waiting") {
        assert!(
            begun.elapsed() < hotcell_tests::cluster::SOON,
            "{}",
            capture.log()
        );
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let options = hotcell_client::GenerateOptions {
        max_tokens: tokens,
        ..long("")
    };
    let client = cluster.client().await.unwrap();
    let stream = client.generate("In the beginning", options).await.unwrap();
    stream.complete().await.unwrap();
    assert!(capture.wait().unwrap().success(), "{}", capture.log());
}

/// The command's exit code, and each line of JSON that it says; without a scheduler.
pub(super) fn compare(folder: &Path, arguments: &[&str]) -> (Option<i32>, Vec<Value>) {
    let mut command = hotcell(folder).unwrap();
    let output = command
        .args(["--json", "debug", "compare"])
        .args(arguments)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let all = said
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    (output.status.code(), all)
}

#[tokio::test(flavor = "multi_thread")]
async fn two_model_files_and_tensors_of_another_program_are_compared() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let folder = cluster.folder.path();
    let file = folder.join("one.hotcell");
    captured(&cluster, &file, 3).await;
    let file = file.to_str().unwrap();
    let (same, other) = (folder.join("same"), folder.join("other"));
    hotcell_tests::cluster::copy_kjv(&same).unwrap();
    hotcell_tests::cluster::copy_kjv(&other).unwrap();
    super::holding::fill(&other.join("model.safetensors"), NORM, 0.5);
    let kjv = hotcell_tests::cluster::kjv();
    let paths = [&kjv, &same, &other].map(|path| path.to_str().unwrap());
    let sides = |other: usize| {
        [
            file,
            "--backend",
            "cpu",
            "--model-path",
            paths[other],
            "--model-path",
            paths[0],
        ]
    };
    let (code, said) = compare(folder, &sides(1));
    assert_eq!(
        (code, &said[0]["equal"]),
        (Some(0), &true.into()),
        "{said:?}"
    );
    let (code, said) = compare(folder, &sides(2));
    assert_eq!(code, Some(9), "{said:?}");
    let first = said[0]["first"]["node"].as_str().unwrap();
    assert!(first.starts_with("layers.2.rms_norm"), "{said:?}");

    // What it computed, as another program would write it: the capture's own values, and then one that is another.
    let whole = folder.join("whole.hotcell");
    let replay = ["debug", "replay", file, "--values", "all", "--reveal", "-o"];
    super::hotcell(
        &cluster,
        &[&replay[..], &[whole.to_str().unwrap()]].concat(),
    );
    let read = Recording::read(&whole).unwrap();
    let token = &read.tokens[0];
    for changed in [false, true] {
        let mut rows: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
        for (node, row) in read.head.nodes.iter().zip(&token.nodes) {
            let mut data = row.data.clone();
            if changed && node.name == "layers.3.add.0" {
                // The exponent of the first value.
                data[3] ^= 0x40;
            }
            let dims = node.dims.iter().map(|n| *n as usize).collect();
            if node.dtype == "f32" {
                rows.push((format!("{}/{}", token.index, node.name), dims, data));
            }
        }
        let views = rows.iter().map(|(name, dims, data)| {
            let view =
                safetensors::tensor::TensorView::new(safetensors::Dtype::F32, dims.clone(), data);
            (name.clone(), view.unwrap())
        });
        let bytes = safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap();
        let reference = folder.join("theirs.safetensors");
        std::fs::write(&reference, bytes).unwrap();
        let (code, said) = compare(
            folder,
            &[whole.to_str().unwrap(), reference.to_str().unwrap()],
        );
        match changed {
            false => assert_eq!(
                (code, &said[0]["equal"]),
                (Some(0), &true.into()),
                "{said:?}"
            ),
            true => {
                assert_eq!(code, Some(9), "{said:?}");
                assert_eq!(said[0]["first"]["node"], "layers.3.add.0", "{said:?}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_faulty_program_computes_is_found_among_many_tokens_by_name() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let folder = cluster.folder.path();
    let file = folder.join("long.hotcell");
    captured(&cluster, &file, TOKENS).await;
    let whole = Recording::read(&file).unwrap();
    assert_eq!(whole.tokens.len(), TOKENS as usize);
    assert!(!whole.head.graph.is_empty());
    let healthy = binaries().unwrap().join("hotcell-worker");
    let healthy = healthy.to_str().unwrap();
    // Both healthy: nothing is found, whatever is looked at.
    let path = file.to_str().unwrap();
    let both = [
        "--program",
        healthy,
        "--program",
        healthy,
        "--backend",
        "cpu",
    ];
    let (code, said) = compare(folder, &[&[path][..], &both, &["--layer", "2"]].concat());
    assert_eq!(code, Some(0), "{said:?}");
    assert_eq!(
        (&said[0]["equal"], said[0]["tokens"].as_u64()),
        (&true.into(), Some(TOKENS.into()))
    );
    assert!(
        said[0]["rows"].as_u64().unwrap() > 5 * u64::from(TOKENS),
        "{}",
        said[0]["rows"]
    );
    for (token, weight, layer) in [
        (WRONG_TOKEN, WRONG_NODE, "layers.2."),
        (NAN_TOKEN, NAN_NODE, "layers.1."),
    ] {
        // As if it had drawn that one there: the next one's row is computed from it.
        let mut struck = whole.clone();
        struck.tokens[STRUCK].token = Some(token);
        let file = folder.join(format!("{token}.hotcell"));
        struck.write(&file).unwrap();
        let html = folder.join(format!("{token}.html"));
        let sides = [
            "--program",
            FAULTY,
            "--program",
            healthy,
            "--backend",
            "cpu",
            "--bisect",
            "--html",
        ];
        let arguments = [
            &[file.to_str().unwrap()][..],
            &sides,
            &[html.to_str().unwrap()],
        ]
        .concat();
        let (code, said) = compare(folder, &arguments);
        assert_eq!(code, Some(9), "{said:?}");
        let found = &said[0];
        let first = STRUCK as u64 + 1;
        assert_eq!(
            found["bisected"]["first"].as_u64(),
            Some(first),
            "{}",
            found["bisected"]
        );
        assert!(
            found["bisected"]["looks"].as_u64().unwrap() <= 6,
            "{}",
            found["bisected"]
        );
        assert_eq!(found["first"]["weight"], weight);
        assert_eq!(found["first"]["token"].as_u64(), Some(first));
        let node = said[1]["error"]["metadata"]["node"].as_str().unwrap();
        assert!(node.starts_with(layer), "{node}");
        let nodes = found["nodes"].as_array().unwrap();
        let named = nodes.iter().position(|one| one["node"] == node).unwrap();
        // All before it is the same to the bit.
        assert!(nodes[..named].iter().all(|one| one["same"] == one["rows"]));
        if token == WRONG_TOKEN {
            let worst = &nodes[named]["worst"];
            let nmse = worst["nmse"].as_f64().unwrap();
            assert!((9e-7..1.1e-6).contains(&nmse), "{worst}");
            assert!(nodes[named]["ulps"].as_array().unwrap().len() > 1);
        }
        let page = std::fs::read_to_string(html).unwrap();
        assert!(page.contains(node) && page.contains("the first beyond its bound"));
        assert!(!page.contains("<script"));
        // Drawn, too: as many points as nodes at least, and that one among them.
        let points = page.matches("<circle").count();
        assert!(points >= nodes.len(), "{points} of {}", nodes.len());
        assert!(page.contains("<circle class=\"beyond\""));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sides_are_other_backends_models_and_files() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let folder = cluster.folder.path();
    let file = folder.join("c.hotcell");
    captured(&cluster, &file, TOKENS).await;
    let path = file.to_str().unwrap();
    let run = |arguments: &[&str]| {
        let output = cluster
            .hotcell(&[&["debug", "compare"], arguments].concat())
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };
    // The capture has no values, and needs none where all bits are the same.
    let (code, said) = run(&[path, "--backend", "cpu"]);
    assert!(
        code == Some(0) && said.contains("same bits: 24 rows of 24 tokens"),
        "{said}"
    );
    let (code, said) = run(&[path, path]);
    assert!(code == Some(0) && said.contains("same bits"), "{said}");
    // A cache of another dtype rounds otherwise, by less than a product of f16 may.
    let (code, said) = run(&[
        path,
        "--kv-cache",
        "f16",
        "--kv-cache",
        "f32",
        "--times",
        "10000",
    ]);
    assert!(code == Some(0) && said.contains("within bounds"), "{said}");
    let (code, said) = run(&[
        path,
        "--kv-cache",
        "f16",
        "--kv-cache",
        "f32",
        "--times",
        "0.0001",
    ]);
    assert!(
        code == Some(9) && said.contains("is the first beyond its bound"),
        "{said}"
    );
    assert!(
        said.contains("NODE") && said.contains("layers.0."),
        "{said}"
    );
    for (arguments, wanted) in [
        (&[path][..], "compare it with what?"),
        (
            &[path, "--backend", "abacus"],
            "no worker is ready on a device of the backend",
        ),
        (&[path, path, "--backend", "cpu"], "not both"),
        (
            &[path, "--worker", "w0", "--worker", "w0", "--worker", "w0"],
            "two sides at most",
        ),
        (&[path, "--backend", "cpu", "--times", "0"], "above 0"),
    ] {
        let (code, said) = run(arguments);
        assert!(
            code != Some(0) && said.contains(wanted),
            "{arguments:?}: {said}"
        );
    }
}
