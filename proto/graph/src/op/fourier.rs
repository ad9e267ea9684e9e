//! Fourier transforms.

use crate::{
    dtype::DType,
    op::{
        Call, Effect, ops,
        rules::{Specs, axis_of, size_of},
    },
};

/// The longest axis: tables are as long, and beside it memory.
const LONGEST: usize = 1 << 20;

ops! {
    /// `Σⱼ xⱼ · e^(−2πi·jk/n)` along `axis` (NumPy's `fft`); if `inverse`, with the other sign and divided by `n`. The axis has
    /// between 1 and 2²⁰ elements.
    fft(x; axis: Int(-8, 7), inverse: Bool) -> one { shapes: "x; axis not the row dimension", dtypes: "c64", effect: Effect::None, infer: fft_spec, decompose: None }
}

fn fft_spec(call: &Call<'_>) -> Specs {
    let x = call.tensor_of(0, DType::C64)?;
    let axis = axis_of(call, call.int(0)?, x.shape.rank())?;
    let n = x.shape.dims().get(axis).copied();
    let n = size_of(call, n.unwrap_or(0.into()), "transformed")?;
    match (1..=LONGEST).contains(&n) {
        true => Ok(vec![x.clone()]),
        false => Err(call.error(format_args!(
            "axis {axis} of {} must have between 1 and {LONGEST} elements",
            x.shape
        ))),
    }
}
