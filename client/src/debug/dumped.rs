//! Tensors of somebody else's program as the reference of a capture: a safetensors file whose tensors are named as the
//! nodes are, `layers.0.mul_mat.0` for the first token that was captured, or `5/layers.0.mul_mat.0` for token 5.

use std::path::Path;

use half::{bf16, f16};
use hotcell_graph::DType;
use hotcell_proto::{
    error::{Error, Reason},
    v1::{CaptureHead, CapturedNode, NodeValues},
};
use sha2::{Digest, Sha256};

use super::recording::{Recorded, Recording};
use crate::tensor::{Element, HostTensor, TensorFile};

/// One row as a node would have it.
fn bytes(dtype: DType, values: &[f64]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    for value in values {
        match dtype {
            DType::F32 => (*value as f32).put(&mut bytes),
            DType::F16 => f16::from_f64(*value).put(&mut bytes),
            DType::BF16 => bf16::from_f64(*value).put(&mut bytes),
            _ => return None,
        }
    }
    Some(bytes)
}

/// The row of a tensor that is a node's at this position: the only one, or of a whole prompt's the one there.
///
/// # Errors
/// [`Reason::InvalidArgument`] for a tensor that has no such row.
fn row(tensor: &HostTensor, node: &CapturedNode, position: u64) -> Result<NodeValues, Error> {
    let values = tensor.plain()?;
    let length = node
        .dims
        .iter()
        .try_fold(1u64, |n, dim| n.checked_mul(*dim));
    let length = length.and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
    let at = match values.len() == length {
        true => 0,
        false => usize::try_from(position).unwrap_or(usize::MAX),
    };
    let begin = at.checked_mul(length);
    let found = begin.and_then(|begin| values.get(begin..begin.checked_add(length)?));
    let dtype = DType::from_name(&node.dtype);
    let odd = || {
        let what = format!(
            "the tensor for {} has the shape {:?}, and the node's rows have {:?}: neither one row nor one for each of the prompt's tokens up to position {position}",
            node.name,
            tensor.shape(),
            node.dims
        );
        Error::new(Reason::InvalidArgument, what)
    };
    let found = found.filter(|_| length > 0).ok_or_else(odd)?;
    let found: Vec<f64> = found.iter().map(|value| value.as_f64()).collect();
    let data = dtype
        .and_then(|dtype| bytes(dtype, &found))
        .ok_or_else(odd)?;
    let count = |is: fn(f64) -> bool| found.iter().filter(|value| is(**value)).count() as u64;
    Ok(NodeValues {
        hash: Sha256::digest(&data).to_vec(),
        nan: count(f64::is_nan),
        infinite: count(f64::is_infinite),
        zero: count(|value| value == 0.0),
        data,
        ..NodeValues::default()
    })
}

/// What a file has of a capture's nodes and tokens.
///
/// # Errors
/// Those of [`TensorFile::open`], [`Reason::InvalidArgument`] when it has none of them, or one of another shape.
pub fn dumped(file: &Path, of: &Recording) -> Result<Recording, Error> {
    let file_at = file;
    let file = TensorFile::open(file)?;
    let mut tokens = Vec::new();
    let mut known: Vec<&CapturedNode> = Vec::new();
    for (number, token) in of.tokens.iter().enumerate() {
        let mut nodes = Vec::new();
        for node in &of.head.nodes {
            let named = file.get(&format!("{}/{}", token.index, node.name))?;
            let plain = match number {
                0 => file.get(&node.name)?,
                _ => None,
            };
            if let Some(tensor) = named.or(plain) {
                nodes.push((node, row(&tensor, node, token.position)?));
            }
        }
        if number == 0 {
            known = nodes.iter().map(|(node, _)| *node).collect();
        }
        // Rows stand under their nodes: a token that lacks one cannot be told.
        if !nodes.is_empty()
            && nodes
                .iter()
                .map(|(node, _)| *node)
                .eq(known.iter().copied())
        {
            tokens.push(Recorded {
                index: token.index,
                position: token.position,
                nodes: nodes.into_iter().map(|(_, row)| row).collect(),
                ..Recorded::default()
            });
        }
    }
    if tokens.is_empty() {
        let some: Vec<&str> = file.names().take(3).collect();
        let wanted = of.head.nodes.first().map_or("", |node| node.name.as_str());
        let what = format!(
            "{} has no tensor of the capture's nodes, such as {wanted}; it has {}",
            file_at.display(),
            some.join(", ")
        );
        return Err(Error::new(Reason::InvalidArgument, what));
    }
    Ok(Recording {
        head: CaptureHead {
            nodes: known.into_iter().cloned().collect(),
            model: file_at.display().to_string(),
            ..CaptureHead::default()
        },
        tokens,
        ..Recording::default()
    })
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::{Dtype, TensorView};

    use super::{
        super::{liken, recording::sample as recording},
        *,
    };

    #[test]
    fn a_file_from_elsewhere_is_a_reference_for_what_it_has() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.safetensors");
        let wide = |values: &[f64]| {
            values
                .iter()
                .flat_map(|v| v.to_le_bytes())
                .collect::<Vec<u8>>()
        };
        let write = |name: &str, shape: &[usize], values: &[f64]| {
            let bytes = wide(values);
            let view = TensorView::new(Dtype::F64, shape.to_vec(), &bytes).unwrap();
            safetensors::serialize_to_file([(name, view)], None, &path).unwrap();
        };
        let ours = recording(2);
        // Rows of the whole prompt: the one at the token's position 1 counts.
        write(
            "layers.0.add.0",
            &[2, 4],
            &[7.0, 7.0, 7.0, 7.0, 1.0, -1.0, 2.5, 0.0],
        );
        let reference = dumped(&path, &ours).unwrap();
        let likeness = liken(&ours, &reference, 1.0);
        assert_eq!(
            (likeness.tokens, likeness.rows(), likeness.first),
            (1, 1, None)
        );
        write("1/layers.0.add.0", &[2, 2], &[1.001, -1.001, 2.5, 0.0]);
        assert!(
            dumped(&path, &ours).is_err(),
            "a first token without any row"
        );
        write("0/layers.0.add.0", &[2, 2], &[1.001, -1.001, 2.5, 0.0]);
        let likeness = liken(&ours, &dumped(&path, &ours).unwrap(), 1.0);
        assert_eq!(likeness.first, Some((0, 0)));
        for (name, shape, values) in [
            ("layers.0.add.0", vec![3], vec![0.0; 3]),
            ("something", vec![4], vec![0.0; 4]),
        ] {
            write(name, &shape, &values);
            let error = dumped(&path, &ours).unwrap_err();
            assert!(error.message().contains("layers.0.add.0"), "{error}");
        }
    }
}
