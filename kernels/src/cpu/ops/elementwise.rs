//! Elementwise ops: the rows of the table. The kernels are the engine's ([`crate::cpu::elementwise`]), which the
//! plan hands whole groups of nodes; a call by itself is a group of one.

use hotcell_graph::op::Call;

use super::{Entry, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        elementwise::{Builder, Extent, Pattern, supports},
        plan::{Launcher, Reg},
    },
};

macro_rules! entries {
    ($($name:literal)*) => {
        &[$(Entry { op: $name, supports, launch }),*]
    };
}

/// What this file has kernels for.
#[rustfmt::skip]
pub(super) static ENTRIES: &[Entry] = entries!(
    // of one operand
    "neg" "abs" "sign" "square" "floor" "ceil" "round" "trunc" "reciprocal" "sqrt" "rsqrt"
    "exp" "expm1" "log" "log1p" "log2" "sin" "cos" "tan" "asin" "acos" "atan"
    "sinh" "cosh" "tanh" "asinh" "acosh" "atanh" "erf" "erfinv" "sigmoid" "silu"
    "logical_not" "is_nan" "is_inf" "is_finite" "bitwise_not" "cast"
    // of two
    "add" "sub" "mul" "div" "maximum" "minimum" "floor_divide" "remainder" "pow" "atan2" "logaddexp"
    "equal" "not_equal" "less" "less_equal" "greater" "greater_equal"
    "logical_and" "logical_or" "logical_xor" "bitwise_and" "bitwise_or" "bitwise_xor"
    "left_shift" "right_shift"
    // of three
    "where"
    // composite ops in one instruction
    "gelu" "gelu_tanh" "gelu_quick" "softplus" "swiglu" "geglu" "swiglu_limit" "clamp" "is_close"
);

fn launch(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let result = (call.op.infer)(call)?;
    let (Some(result), Some(&out)) = (result.first(), outs.first()) else {
        return Err(unsupported(call));
    };
    let mut builder = Builder::new(Extent::of(&result.shape), launcher.path);
    let mut args = Vec::with_capacity(ins.len());
    for (i, &reg) in ins.iter().enumerate() {
        let t = call.tensor(i)?;
        let pattern = Pattern::new(&t.shape, &result.shape);
        let id = builder.operand(reg, t.dtype, pattern);
        args.push(id.ok_or_else(|| unsupported(call))?);
    }
    let id = builder
        .apply(call.op.name, &args, call.attributes, result.dtype)
        .ok_or_else(|| unsupported(call))?;
    builder.store(id, out, result.dtype);
    builder.finish(launcher).ok_or_else(|| unsupported(call))
}
