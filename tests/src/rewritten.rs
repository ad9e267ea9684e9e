//! Golden models whose tensors are stored in another way.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::collections::BTreeMap;

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use tempfile::TempDir;

use crate::cluster::golden;

/// A tensor as a file has it.
pub type Stored = (Dtype, Vec<usize>, Vec<u8>);

/// A golden folder with other tensors.
///
/// # Panics
/// When its file is not there.
pub fn changed(name: &str, change: impl FnOnce(&mut BTreeMap<String, Stored>)) -> TempDir {
    const TENSORS: &str = "model.safetensors";
    let (from, to) = (golden(name), TempDir::new().unwrap());
    for entry in from.read_dir().unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.path().join(path.file_name().unwrap())).unwrap();
    }
    let bytes = std::fs::read(from.join(TENSORS)).unwrap();
    let mut tensors = SafeTensors::deserialize(&bytes)
        .unwrap()
        .iter()
        .map(|(name, t)| {
            let stored = (t.dtype(), t.shape().to_vec(), t.data().to_vec());
            (name.to_owned(), stored)
        })
        .collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        let view = TensorView::new(*dtype, shape.clone(), data).unwrap();
        (name.as_str(), view)
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(to.path().join(TENSORS), bytes).unwrap();
    to
}

/// Experts' matrices one after another, as one tensor.
///
/// # Panics
/// When there are none.
pub fn stack(tensors: &mut BTreeMap<String, Stored>, layer: usize, parts: &[&str], into: &str) {
    stack_of(tensors, layer, parts, ".weight", into);
}

/// The same of tensors whose names end so.
///
/// # Panics
/// When there are none.
pub fn stack_of(
    tensors: &mut BTreeMap<String, Stored>,
    layer: usize,
    parts: &[&str],
    end: &str,
    into: &str,
) {
    let stem = format!("model.layers.{layer}.mlp.experts");
    let (mut all, mut shape, mut experts) = (vec![], vec![], 0);
    let mut kind = None;
    while tensors.contains_key(&format!("{stem}.{experts}.{}{end}", parts[0])) {
        shape = vec![0, 0];
        for part in parts {
            let (dtype, dims, data) = tensors
                .remove(&format!("{stem}.{experts}.{part}{end}"))
                .unwrap();
            assert_eq!(dtype, *kind.get_or_insert(dtype));
            shape = vec![shape[0] + dims[0], dims[1]];
            all.extend(data);
        }
        experts += 1;
    }
    shape.insert(0, experts);
    tensors.insert(format!("{stem}.{into}"), (kind.unwrap(), shape, all));
}

/// The golden model of experts, with their gates and up projections in one tensor, as transformers 5 holds them.
///
/// # Panics
/// When its file is not there.
pub fn fused_experts() -> TempDir {
    changed("qwen3_moe", |tensors| {
        for layer in [0, 2] {
            stack(tensors, layer, &["gate_proj", "up_proj"], "gate_up_proj");
            stack(tensors, layer, &["down_proj"], "down_proj");
        }
        assert!(!tensors.keys().any(|name| name.contains(".experts.0.")));
    })
}
