//! Ops that make tensors of nothing but their attributes.

use hotcell_proto::limits;

use crate::{
    dtype::{DType, Kind},
    op::{
        Call, Effect, ops,
        rules::{self, Specs},
    },
    shape::Dim,
};

ops! {
    /// A tensor whose elements are in the graph: `data` holds them little-endian in row-major order, `bool` as bytes
    /// 0 and 1, `c64` as two `f32`. For small constants; larger ones are inputs.
    literal(; dtype: DType, shape: Shape, data: Bytes(limits::MAX_LITERAL_BYTES)) -> one
    { shapes: "shape, without rows", dtypes: "dtype, any but a block type", effect: Effect::None, infer: literal_spec, decompose: None }

    /// `start + i · step` for `i` in `0 .. length`, computed in `f64` (the product is rounded, then the sum) and cast
    /// to `dtype` (NumPy's `arange`).
    arange(; start: Float(-1e300, 1e300), step: Float(-1e300, 1e300), length: Int(0, 1 << 40), dtype: DType) -> one
    { shapes: "[length]", dtypes: "dtype, an integer or float", effect: Effect::None, infer: arange_spec, decompose: None }
}

fn literal_spec(call: &Call<'_>) -> Specs {
    let (dtype, shape, data) = (call.dtype(0)?, call.shape(1)?, call.bytes(2)?);
    if dtype.is_block() {
        return Err(rules::dtype_error(call, dtype));
    }
    if shape.is_symbolic() {
        return Err(rules::row_error(call, "an axis of a literal"));
    }
    let bytes = shape.elements(0).and_then(|n| dtype.row_bytes(n));
    if bytes != Some(data.len()) {
        return Err(call.error(format_args!(
            "{} bytes are not those of {dtype}{shape}",
            data.len()
        )));
    }
    if dtype == DType::Bool && data.iter().any(|b| *b > 1) {
        return Err(call.error("a bool is the byte 0 or 1"));
    }
    rules::one_of(call, dtype, shape.clone())
}

fn arange_spec(call: &Call<'_>) -> Specs {
    let (length, dtype) = (rules::size(call, call.int(2)?)?, call.dtype(3)?);
    match dtype.kind() {
        Kind::Unsigned | Kind::Signed | Kind::Float => {
            rules::one(call, dtype, [Dim::Fixed(length)])
        }
        _ => Err(rules::dtype_error(call, dtype)),
    }
}
