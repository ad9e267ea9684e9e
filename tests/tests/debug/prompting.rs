//! The prompt of `hotcell debug`, fed with lines as from a file.

use std::{
    io::Write,
    process::{Command, Stdio},
};

use hotcell_tests::cluster::{Cluster, hotcell};

use super::{kjv_cluster, long};

/// What the prompt says to these lines, and its exit code.
fn typed(cluster: &Cluster, arguments: &[&str], lines: &str) -> (Option<i32>, String) {
    let mut command: Command = hotcell(cluster.folder.path()).unwrap();
    command
        .arg("--address")
        .arg(format!("unix:{}", cluster.socket.display()))
        .arg("debug")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(lines.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_are_done_one_after_the_other_and_a_wrong_one_ends_nothing() {
    let cluster = kjv_cluster(&["--devices", "cpu:2"]).await;
    let client = cluster.client().await.unwrap();
    let options = hotcell_client::GenerateOptions {
        max_tokens: 5,
        ..long("typed")
    };
    let stream = client.generate("In the beginning", options).await.unwrap();
    stream.complete().await.unwrap();
    let lines = "help watch\nwatch -n 1 --every 100ms\nnonsense\nuse w9\nuse w1\nworkers\n\
                 replay typed --at 3 --until layers.0.mul_mat.0\nreplay 'no such request'\n\
                 crashes list\ndrain --within 1s\nrelease\n# as it is\nquit\nuse w7\n";
    let (code, said) = typed(&cluster, &["w0"], lines);
    assert_eq!(code, Some(0), "{said}");
    for wanted in [
        "Show what a worker does, line by line",
        "unrecognized subcommand 'nonsense'",
        "there is no worker \"w9\" There are w0, w1",
        "layers.0.mul_mat.0 (model.layers.0",
        "same tokens: 2 of 2",
        "no such request",
        "no worker died",
        "drained w1",
        "released w1",
    ] {
        assert!(said.contains(wanted), "no {wanted:?} in:\n{said}");
    }
    // What comes after the last line is not done.
    assert!(!said.contains("no worker \"w7\""), "{said}");
    let (code, said) = typed(&cluster, &[], "quit\n");
    assert_eq!(code, Some(7), "{said}");
    assert!(said.contains("which worker? There are w0, w1"), "{said}");
    // The end of the lines is the end.
    let (code, said) = typed(&cluster, &["w1"], "workers");
    assert!(code == Some(0) && said.contains("w1"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_gone_through_node_by_node_and_back() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let options = hotcell_client::GenerateOptions {
        max_tokens: 4,
        ..long("stepped")
    };
    let stream = client.generate("In the beginning", options).await.unwrap();
    stream.complete().await.unwrap();
    let file = cluster.folder.path().join("stepped.safetensors");
    let file = file.to_str().unwrap();
    let lines = format!(
        "step\nopen stepped --at 1\nstep 2\nprint --items 2 --edge-items 1 --precision 2\nuntil layers.0.mul_mat.3\n\
         until get_rows.0\nsave {file}\nback 1000000\nnext\nprint logits --items 2 --edge-items 1\nopen stepped --at 4\n"
    );
    let (code, said) = typed(&cluster, &["w0"], &lines);
    assert_eq!(code, Some(0), "{said}");
    for wanted in [
        "go through what? open a request or a capture first",
        "token 1, from position ",
        "  get_rows.0 (model.embed_tokens.weight): least ",
        "layers.0.rms_norm.0 (model.layers.0.input_layernorm.weight) f32[256]\n[",
        "  layers.0.mul_mat.3 (model.layers.0.self_attn.o_proj.weight): least ",
        "get_rows.0 was passed already",
        "there is nothing before it",
        "logits f32[",
        "the answer has no token 4",
    ] {
        assert!(said.contains(wanted), "no {wanted:?} in:\n{said}");
    }
    // It went back to the first token, and on to the second one.
    assert_eq!(said.matches("token 1, from position ").count(), 2, "{said}");
    // What was saved is what replay tells of the same token.
    let saved = hotcell_client::tensor::TensorFile::open(std::path::Path::new(file)).unwrap();
    let names: Vec<&str> = saved.names().collect();
    assert!(
        names.contains(&"get_rows.0") && names.contains(&"layers.0.mul_mat.3"),
        "{names:?}"
    );
    let whole = cluster.folder.path().join("whole.hotcell");
    let (code, said) = typed(
        &cluster,
        &["w0"],
        &format!(
            "replay stepped --at 1 -n 1 --values all --reveal -o {}\n",
            whole.display()
        ),
    );
    assert_eq!(code, Some(0), "{said}");
    let whole = hotcell_client::debug::Recording::read(&whole).unwrap();
    let nodes = whole.head.nodes.iter().zip(&whole.tokens[0].nodes);
    let mut same = 0;
    for (node, row) in nodes {
        if let Some(tensor) = saved.get(&node.name).unwrap() {
            assert_eq!(
                tensor.bytes().as_ref(),
                row.data.as_slice(),
                "{}",
                node.name
            );
            same += 1;
        }
    }
    assert_eq!(same, names.len());
}
