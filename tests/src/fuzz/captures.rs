//! Files that a debugger opens, which may be anybody's: captures, and what was reduced of them.

use std::{fs, path::PathBuf};

use hotcell_client::{
    debug::{Case, Fault, Origin, Recorded, Recording, Reduced, compare, liken},
    tensor::HostTensor,
    v1,
};
use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec, wire};
use prost::Message;
use tempfile::TempDir;

/// A folder for one file.
fn place() -> Option<(TempDir, PathBuf)> {
    let folder = tempfile::tempdir().ok()?;
    let file = folder.path().join("case");
    Some((folder, file))
}

/// Opens a capture as all commands do that take one, and writes it again.
///
/// # Panics
/// When what was accepted cannot be written, or is another one then.
pub fn capture(bytes: &[u8]) -> bool {
    let Ok(read) = Recording::parse(bytes) else {
        return false;
    };
    let compared = compare(&read, &read);
    assert!(compared.first.is_none(), "it differs from itself");
    assert_eq!(compared.tokens, read.tokens.len());
    let likeness = liken(&read, &read, 1.0);
    assert!(likeness.first_beyond().is_none(), "it is unlike itself");
    for token in &read.tokens {
        for (at, row) in token.nodes.iter().enumerate() {
            let is_whole = read.is_whole(at, row);
            assert!(is_whole || read.tensor(at, row).is_none());
        }
    }
    let Some((_folder, file)) = place() else {
        return true;
    };
    let written = read.write(&file);
    written.unwrap_or_else(|e| panic!("what was read cannot be written: {e}"));
    let again = Recording::read(&file);
    let again = again.unwrap_or_else(|e| panic!("what was written cannot be read: {e}"));
    assert!(again == read, "it is another one when it is written");
    true
}

/// Opens what was reduced, tells it and its test, and writes it again.
///
/// # Panics
/// As [`capture`].
pub fn reduced(bytes: &[u8]) -> bool {
    let Some((_folder, file)) = place() else {
        return false;
    };
    if fs::write(&file, bytes).is_err() {
        return false;
    }
    let Ok(read) = Reduced::read(&file) else {
        return false;
    };
    let words = (read.words(), read.test().ok());
    let written = read.write(&file);
    written.unwrap_or_else(|e| panic!("what was read cannot be written: {e}"));
    let again = Reduced::read(&file);
    let again = again.unwrap_or_else(|e| panic!("what was written cannot be read: {e}"));
    assert!(words == (again.words(), again.test().ok()), "{}", words.0);
    true
}

fn node(name: &str, op: &str, dtype: &str, dims: &[u64]) -> v1::CapturedNode {
    v1::CapturedNode {
        name: name.to_owned(),
        op: op.to_owned(),
        layer: Some(0),
        dtype: dtype.to_owned(),
        dims: dims.to_vec(),
        place: Some(0),
        ..v1::CapturedNode::default()
    }
}

fn row(node: u32, data: &[u8]) -> v1::NodeValues {
    v1::NodeValues {
        node,
        hash: vec![node as u8 + 1; 32],
        least: -1.0,
        greatest: 2.5,
        mean: 0.5,
        rms: 1.25,
        zero: 1,
        data: data.to_vec(),
        ..v1::NodeValues::default()
    }
}

fn product() -> Option<hotcell_graph::Graph> {
    let spec = |dtype, dims: &[usize]| TensorSpec::new(dtype, Shape::fixed(dims).ok()?).ok();
    let mut graph = GraphBuilder::new(0);
    let x = graph.tensor("x", spec(DType::F32, &[2, 32])?).ok()?;
    let w = graph.constant("w", spec(DType::Q4_0, &[3, 32])?).ok()?;
    let y = graph.mul_mat(x, w).ok()?;
    graph.finish(&[y]).ok()
}

fn recording() -> Option<Recording> {
    let ids = v1::TokenIds { ids: vec![1, 2] };
    let token = |index: u64| {
        let half: Vec<u8> = [0x3c00u16, 0xfc00]
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect();
        let whole: Vec<u8> = [0.5f32, -1.0, 2.5]
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect();
        Recorded {
            index,
            position: index + 1,
            token: Some(7),
            as_expected: Some(index != 1),
            missed: index / 2,
            nodes: vec![row(0, &whole), row(1, &half), row(2, &whole[..4])],
            ..Recorded::default()
        }
    };
    Some(Recording {
        head: v1::CaptureHead {
            worker: "w0".to_owned(),
            epoch: 3,
            model: "m".to_owned(),
            nodes: vec![
                node("layers.0.mul_mat.0", "mul_mat", "f32", &[3]),
                node("layers.0.add.0", "add", "f16", &[1, 2]),
                node("logits", "logits", "f32", &[3]),
            ],
            request: Some(v1::GenerateRequest {
                seed: Some(u64::MAX),
                prompt: Some(v1::Prompt {
                    kind: Some(v1::prompt::Kind::Ids(ids)),
                }),
                ..v1::GenerateRequest::default()
            }),
            revealed: true,
            graph: wire::encode(&product()?).encode_to_vec(),
            ..v1::CaptureHead::default()
        },
        tokens: (0..3).map(token).collect(),
        end: Some(v1::CaptureEnd {
            tokens: 3,
            differs_at: Some(1),
            ..v1::CaptureEnd::default()
        }),
        ..Recording::default()
    })
}

fn reductions() -> Option<Vec<Reduced>> {
    let graph = product()?;
    let values: Vec<f32> = (0..64).map(|n| n as f32 / 8.0 - 4.0).collect();
    let spec = |dtype, dims: &[usize]| TensorSpec::new(dtype, Shape::fixed(dims).ok()?).ok();
    let weights: Vec<u8> = (0..54u8).map(|n| n.wrapping_mul(37)).collect();
    let inputs = vec![
        HostTensor::from_slice(&values, &[2, 32]).ok()?,
        HostTensor::new(spec(DType::Q4_0, &[3, 32])?, weights).ok()?,
    ];
    let expected = HostTensor::from_slice(&[1.0f32, f32::NAN, 0.0, -0.0, 3.5, 1e-40], &[2, 3]);
    let expected = expected.ok()?;
    let faults = [
        (Fault::Differs { nmse: 5e-4 }, Some(expected)),
        (Fault::Above { value: 2.0 }, None),
        (Fault::Dies, None),
    ];
    let of = |(fault, expected)| {
        Some(Reduced {
            case: Case::new(graph.clone(), inputs.clone()).ok()?,
            fault,
            expected,
            origin: Origin {
                model: "m".to_owned(),
                node: "layers.0.mul_mat.0".to_owned(),
                weight: "w".to_owned(),
                token: 5,
                failed_on: "cuda/sm_90".to_owned(),
                expected_from: "cpu".to_owned(),
                version: "0.1.0".to_owned(),
            },
        })
    };
    faults.into_iter().map(of).collect()
}

/// What a writer leaves in a file.
fn written<E>(write: impl FnOnce(&std::path::Path) -> Result<(), E>) -> Option<Vec<u8>> {
    let (_folder, file) = place()?;
    write(&file).ok()?;
    fs::read(file).ok()
}

pub fn capture_seeds() -> Vec<Vec<u8>> {
    let Some(whole) = recording() else {
        return Vec::new();
    };
    let broken_off = Recording {
        end: None,
        tokens: whole.tokens.first().cloned().into_iter().collect(),
        ..whole.clone()
    };
    let all = [whole, broken_off];
    let bytes = |one: &Recording| written(|file| one.write(file).map(|_| ()));
    all.iter().filter_map(bytes).collect()
}

pub fn reduced_seeds() -> Vec<Vec<u8>> {
    let all = reductions().unwrap_or_default();
    let bytes = |one: &Reduced| written(|file| one.write(file));
    all.iter().filter_map(bytes).collect()
}
