//! One model in two dtypes of weights: how far they are apart, node by node, and where they part.

use std::path::{Path, PathBuf};

use hotcell_graph::DType;
use hotcell_kernels::cpu::lanes::{f16_to_f32, f32_to_f16};
use hotcell_tests::{
    cluster::{Cluster, all_have, hotcell},
    synthetic::{
        Measures,
        gguf::{Weights, small},
    },
};
use serde_json::Value;

use super::comparing::{captured, compare};

const SMALL: Measures = Measures {
    hidden: 64,
    layers: 3,
    heads: 4,
    kv_heads: 2,
    inner: 128,
    vocab: 4096,
    context: 256,
    tied: true,
};

/// Layers from this one on have their matrices in blocks in one of the files; what comes before is the same in both.
const FIRST: u32 = 1;

const TOKENS: u32 = 4;

/// F32 rounded to Q4_0, as ggml does (`quantize_row_q4_0_ref` in ggml-quants.c): the number that is greatest in size is -8
/// times the block's scale.
fn q4_0(values: &[u8]) -> Vec<u8> {
    let values = values.chunks_exact(4);
    let values: Vec<f32> = values
        .map(|value| f32::from_le_bytes(value.try_into().unwrap()))
        .collect();
    let block = |block: &[f32]| {
        let greatest = block
            .iter()
            .copied()
            .max_by(|a, b| a.abs().total_cmp(&b.abs()));
        let scale = f32_to_f16(greatest.unwrap() / -8.0);
        let step = f16_to_f32(scale);
        let code = |value: f32| (value / step + 8.5).clamp(0.0, 15.0) as u8;
        let (low, high) = block.split_at(16);
        let pairs = low.iter().zip(high);
        let pairs = pairs.map(|(low, high)| code(*low) | code(*high) << 4);
        scale
            .to_le_bytes()
            .into_iter()
            .chain(pairs)
            .collect::<Vec<u8>>()
    };
    values.chunks_exact(32).flat_map(block).collect()
}

/// The model in F32, and with matrices in Q4_0.
fn models(folder: &Path) -> [PathBuf; 2] {
    let mut writer = small("small", &SMALL, Weights::Pure(DType::F32)).unwrap();
    let exact = folder.join("f32.gguf");
    std::fs::write(&exact, writer.write()).unwrap();
    let mut rounded = 0;
    for tensor in &mut writer.tensors {
        let mut parts = tensor.name.split('.');
        let layer = parts.nth(1).and_then(|layer| layer.parse::<u32>().ok());
        if tensor.dims.len() == 2 && layer.is_some_and(|layer| layer >= FIRST) {
            tensor.data = q4_0(&tensor.data);
            tensor.kind = DType::Q4_0.gguf_id().unwrap();
            rounded += 1;
        }
    }
    // Queries, keys, values, what attention gives, and three of what comes after it.
    assert_eq!(rounded, 7 * (SMALL.layers - FIRST as usize));
    let blocks = folder.join("q4_0.gguf");
    std::fs::write(&blocks, writer.write()).unwrap();
    [exact, blocks]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_in_two_dtypes_parts_at_the_first_product_with_what_was_rounded() {
    let folder = tempfile::tempdir().unwrap();
    let paths = models(folder.path());
    let cluster = Cluster::with_model("small", &paths[0], &["--devices", "cpu:1"]).await;
    let cluster = cluster.unwrap();
    cluster.workers(all_have("small")).await.unwrap();
    let file = folder.path().join("one.hotcell");
    captured(&cluster, &file, TOKENS).await;
    let file = file.to_str().unwrap();
    let [exact, blocks] = paths.each_ref().map(|path| path.to_str().unwrap());
    let sides = |one, other| {
        let one = ["--model-path", one, "--model-path", other];
        [&[file, "--backend", "cpu"], &one[..]].concat()
    };

    // The same file has the same bits, whatever it is, and the capture's own has those of the capture.
    for path in [exact, blocks] {
        let (code, said) = compare(folder.path(), &sides(path, path));
        let found = &said[0];
        assert_eq!((code, &found["equal"]), (Some(0), &true.into()), "{found}");
        assert_eq!(found["tokens"], TOKENS, "{found}");
        let rows = found["rows"].as_u64().unwrap();
        assert!(
            found["same"] == rows && rows > 50 * u64::from(TOKENS),
            "{found}"
        );
        assert!(found["first"].is_null(), "{found}");
    }
    let one = [file, "--backend", "cpu", "--model-path", exact];
    let (code, said) = compare(folder.path(), &one);
    let captured = &said[0];
    assert_eq!(
        (code, &captured["equal"]),
        (Some(0), &true.into()),
        "{captured}"
    );

    let (code, said) = compare(folder.path(), &sides(blocks, exact));
    assert_eq!(code, Some(9), "{said:?}");
    let found = &said[0];
    assert_eq!(found["sides"][0], format!("cpu {blocks}"), "{found}");
    assert_eq!(found["first"]["token"], 0, "{found}");
    let weight = found["first"]["weight"].as_str().unwrap();
    assert!(weight.starts_with(&format!("blk.{FIRST}.")), "{weight}");
    let nodes = found["nodes"].as_array().unwrap();
    let parted = &found["first"]["node"];
    let at = nodes
        .iter()
        .position(|node| node["node"] == *parted)
        .unwrap();
    assert!(nodes[at]["op"] == "mul_mat" && nodes[at]["layer"] == FIRST);
    // All before it is the same to the bit, and nothing that is computed of it is.
    let same = |node: &&Value| node["same"] == node["rows"] && node["worst"].is_null();
    assert!(nodes[..at].iter().all(|node| same(&node)), "{found}");
    assert!(
        at > 10 && nodes[at..].iter().all(|node| !same(&node)),
        "{found}"
    );
    let number = |of: &Value, name: &str| of["worst"][name].as_f64().unwrap();
    for node in &nodes[at..] {
        let (cosine, nmse) = (number(node, "cosine"), number(node, "nmse"));
        // Alike, as four bits a weight have it, and no more than that.
        assert!((0.5..0.99999).contains(&cosine), "{node}");
        assert!(nmse > 1e-5 && node["beyond"].as_u64() > Some(0), "{node}");
        assert!(number(node, "max_abs") > 0.0 && number(node, "max_rel") > 0.0);
        assert_eq!(node["worst"]["mismatched"], 0, "{node}");
    }
    // A product with four bits a weight is off by this much, more or less.
    let nmse = number(&nodes[at], "nmse");
    assert!((1e-3..3e-2).contains(&nmse), "{nmse}");
    assert_eq!(said[1]["error"]["metadata"]["node"], *parted, "{}", said[1]);

    // In words, too: a table, and the node's name.
    let mut command = hotcell(folder.path()).unwrap();
    let command = command
        .args(["debug", "compare"])
        .args(sides(blocks, exact));
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(9), "{output:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    let heading: Vec<&str> = table.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(heading[..4], ["NODE", "ROWS", "SAME", "COSINE"], "{table}");
    let first = table.lines().nth(1).unwrap();
    let parted = parted.as_str().unwrap();
    assert!(
        first.starts_with(&format!("{parted} ({weight})")),
        "{table}"
    );
    let said = String::from_utf8(output.stderr).unwrap();
    let named = format!("token 0, node {parted} ({weight}) is the first beyond its bound");
    assert!(said.contains(&named), "{said}");
}
