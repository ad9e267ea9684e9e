//! A tensor or cache under its handle, and how it is described on the wire.

use std::rc::Rc;

use hotcell_graph::{
    CacheSpec, DType, Shape, TensorSpec,
    dtype::Kind,
    op::ValueSpec,
    shape::Dim,
    wire::{decode_tensor_spec, encode_tensor_spec},
};
use hotcell_proto::{
    error::{Error, Reason},
    ids::Epoch,
    session::HandleId,
    v1,
};

use super::{
    invalid,
    shared::SharedPlace,
    value::{State, Value, wire_state},
};
use crate::error::of_graph;

/// What a handle leads to.
#[derive(Clone)]
pub struct Tensor {
    /// What it is. No axis is symbolic.
    pub spec: ValueSpec,
    /// Its size.
    pub bytes: usize,
    /// Its bytes.
    pub value: Rc<Value>,
    /// Of a weight: model and name.
    pub weight: Option<Rc<(String, String)>>,
    /// Where its values lie in another process's memory, if it is a tensor of such.
    pub shared: Option<Rc<SharedPlace>>,
}

impl Tensor {
    /// How the wire describes it.
    pub fn info(&self, id: HandleId, epoch: Epoch) -> v1::TensorInfo {
        let state = self.value.state();
        let (model, name) = match &self.weight {
            Some(weight) => (*weight).as_ref().clone(),
            None => Default::default(),
        };
        v1::TensorInfo {
            handle: Some(id.handle(epoch)),
            spec: wire_spec(&self.spec),
            bytes: self.bytes as u64,
            state: wire_state(&state).into(),
            uploaded: match &*state {
                State::Uploading(upload) => upload.uploaded() as u64,
                _ => 0,
            },
            model,
            name,
        }
    }
}

/// A spec as the wire writes it.
pub fn wire_spec(spec: &ValueSpec) -> Option<v1::tensor_info::Spec> {
    match spec {
        ValueSpec::Tensor(t) => Some(v1::tensor_info::Spec::Tensor(encode_tensor_spec(t))),
        ValueSpec::Cache(c) => Some(v1::tensor_info::Spec::Cache(v1::CacheSpec {
            dtype: c.dtype.name().to_owned(),
            blocks: c.blocks as u64,
            block_len: c.block_len as u64,
            kv_heads: c.kv_heads as u64,
            head_dim: c.head_dim as u64,
        })),
        ValueSpec::Absent => None,
    }
}

/// A tensor's spec that arrived, and its size.
///
/// # Errors
/// [`Reason::GraphInvalid`] for an unknown dtype, a shape that cannot be, or one with rows.
pub fn read_tensor_spec(spec: Option<&v1::TensorSpec>) -> Result<(TensorSpec, usize), Error> {
    let spec = spec.ok_or_else(|| invalid("the tensor has no spec"))?;
    let spec = decode_tensor_spec(spec).map_err(|e| of_graph(&e))?;
    if spec.shape.is_symbolic() {
        let what = format!("a tensor has no symbolic rows, as {spec} has; give their number");
        return Err(Error::new(Reason::GraphInvalid, what));
    }
    let bytes = spec.bytes(0).ok_or_else(|| {
        Error::new(
            Reason::GraphInvalid,
            format!("{spec} is too large for a tensor"),
        )
    })?;
    Ok((spec, bytes))
}

/// A cache's spec that arrived, and its size.
///
/// # Errors
/// [`Reason::GraphInvalid`] for a dtype or a size that cannot be.
pub fn read_cache_spec(spec: &v1::CacheSpec) -> Result<(CacheSpec, usize), Error> {
    let wrong = |what: &str| Error::new(Reason::GraphInvalid, format!("the cache {what}"));
    let size = |n: u64| {
        usize::try_from(n)
            .ok()
            .filter(|n| *n > 0)
            .ok_or_else(|| wrong("has an axis of 0, or one that is too large"))
    };
    let spec = CacheSpec {
        dtype: DType::from_name(&spec.dtype).ok_or_else(|| wrong("has an unknown dtype"))?,
        blocks: size(spec.blocks)?,
        block_len: size(spec.block_len)?,
        kv_heads: size(spec.kv_heads)?,
        head_dim: size(spec.head_dim)?,
    };
    let bytes = spec.bytes().ok_or_else(|| {
        wrong("is too large, or not of f32, f16, bf16, or q8_0 with heads of whole blocks")
    })?;
    Ok((spec, bytes))
}

/// The spec that a graph's tensor has for this many rows.
///
/// # Errors
/// [`Reason::GraphInvalid`] when it is too large.
pub fn at_rows(spec: &TensorSpec, rows: usize) -> Result<(TensorSpec, usize), Error> {
    let dims = spec.shape.dims().iter().map(|d| Dim::Fixed(d.at(rows)));
    let shape = Shape::new(dims).map_err(|e| of_graph(&e))?;
    let spec = TensorSpec::new(spec.dtype, shape).map_err(|e| of_graph(&e))?;
    let bytes = spec.bytes(0);
    let bytes =
        bytes.ok_or_else(|| Error::new(Reason::GraphInvalid, format!("{spec} is too large")))?;
    Ok((spec, bytes))
}

/// Whether elements could be indices by their dtype, for a device that cannot tell what its plans read as such.
pub fn may_hold_indices(spec: &ValueSpec) -> bool {
    let kind = |t: &TensorSpec| t.dtype.kind();
    matches!(spec, ValueSpec::Tensor(t) if matches!(kind(t), Kind::Signed | Kind::Unsigned | Kind::Bool))
}
