//! Elementwise ops, activations among them. `erf` is the CPU backend's: near 0 MLX's is exact to the error of 1 only. Integers divide, shift and take powers on the CPU backend: MLX leaves what
//! happens at 0 and beyond the width to the processor.

use hotcell_graph::{DType, op::Call};
use mlx_rs::{Array, error::Exception, ops};

use super::{Entry, all_are, dtype, has_elements, needs, one, scalar};
use crate::{
    backend::DeviceError,
    mlx::{array, run::Cx},
};

fn floats(call: &Call<'_>) -> bool {
    all_are(call, DType::is_float) && has_elements(call)
}

fn floats_complex(call: &Call<'_>) -> bool {
    all_are(call, |d| d.is_float() || d == DType::C64) && has_elements(call)
}

/// MLX computes these in f32 for f64 as well.
fn up_to_single(call: &Call<'_>) -> bool {
    all_are(call, |d| d.is_float() && d != DType::F64) && has_elements(call)
}

/// Of floats MLX loses the sign of zeros.
fn integers(call: &Call<'_>) -> bool {
    all_are(call, DType::is_integer) && has_elements(call)
}

/// MLX rounds a quotient of halves before it takes the floor.
fn wide_floats(call: &Call<'_>) -> bool {
    all_are(call, |d| matches!(d, DType::F32 | DType::F64)) && has_elements(call)
}

fn numbers(call: &Call<'_>) -> bool {
    all_are(call, |d| d.is_float() || d.is_integer()) && has_elements(call)
}

fn numbers_complex(call: &Call<'_>) -> bool {
    all_are(call, |d| d.is_float() || d.is_integer() || d == DType::C64) && has_elements(call)
}

fn real(call: &Call<'_>) -> bool {
    all_are(call, |d| !d.is_block() && d != DType::C64) && has_elements(call)
}

fn plain(call: &Call<'_>) -> bool {
    all_are(call, |d| !d.is_block()) && has_elements(call)
}

fn bits(call: &Call<'_>) -> bool {
    all_are(call, |d| d.is_integer() || d == DType::Bool) && has_elements(call)
}

fn chosen(call: &Call<'_>) -> bool {
    dtype(call, 1) == dtype(call, 2)
        && dtype(call, 1).is_some_and(|d| !d.is_block())
        && has_elements(call)
}

/// Casts whose meaning MLX has: from floats to integers it leaves to the processor what does not fit, and from f64 to
/// half precision it rounds twice.
fn casts(call: &Call<'_>) -> bool {
    let (Some(from), Ok(to)) = (dtype(call, 0), call.dtype(0)) else {
        return false;
    };
    let half = |d| matches!(d, DType::F16 | DType::BF16);
    let wide = |d: DType| d == DType::F64 || d.is_integer();
    let saturates = from.is_float() && to.is_integer();
    let rounds_twice = wide(from) && half(to);
    !from.is_block()
        && !to.is_block()
        && from != DType::C64
        && !saturates
        && !rounds_twice
        && has_elements(call)
}

fn cast(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let to = array::dtype_of(cx.call().dtype(0)?).ok_or_else(crate::mlx::plan::overflow)?;
    one(cx, cx.array(0)?.as_dtype(to))
}

fn choose(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let (condition, a, b) = (cx.array(0)?, cx.array(1)?, cx.array(2)?);
    one(cx, ops::select(&*condition, &*a, &*b))
}

fn silu(x: &Array) -> Result<Array, Exception> {
    x.multiply(ops::sigmoid(x)?)
}

/// In f32 and rounded once, as the catalogue has it: computed in f32, given back in the dtype of the first input.
fn in_single(
    cx: &Cx<'_>,
    compute: impl FnOnce(&[Array]) -> Result<Array, DeviceError>,
) -> Result<Vec<Array>, DeviceError> {
    let failed = array::failed(cx.op());
    let dtype = cx.call().tensor(0)?.dtype;
    let to = array::dtype_of(dtype).ok_or_else(crate::mlx::plan::overflow)?;
    let work = array::dtype_of(dtype.working()).ok_or_else(crate::mlx::plan::overflow)?;
    let mut inputs = Vec::new();
    for i in 0..cx.inputs() {
        inputs.push(cx.array(i)?.as_dtype(work).map_err(&failed)?);
    }
    let result = compute(&inputs)?;
    Ok(vec![result.as_dtype(to).map_err(failed)?])
}

fn relu(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let x = cx.array(0)?;
    let zero = scalar(0.0, cx.call().tensor(0)?.dtype)?;
    one(cx, ops::maximum(&*x, &zero))
}

fn silu_of(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    in_single(cx, |x| silu(&x[0]).map_err(array::failed("silu")))
}

fn swiglu(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    in_single(cx, |x| {
        let made = silu(&x[0]).and_then(|gate| gate.multiply(&x[1]));
        made.map_err(array::failed("swiglu"))
    })
}

fn gelu_tanh_of(x: &Array, work: DType) -> Result<Array, DeviceError> {
    let n = |v: f64| scalar(v, work);
    let failed = array::failed("gelu_tanh");
    let (half, one, c, s) = (
        n(0.5)?,
        n(1.0)?,
        n(0.044715)?,
        n((2.0 / std::f64::consts::PI).sqrt())?,
    );
    let made = || {
        let inner = x
            .square()?
            .multiply(x)?
            .multiply(&c)?
            .add(x)?
            .multiply(&s)?;
        x.multiply(&half)?.multiply(ops::tanh(&inner)?.add(&one)?)
    };
    made().map_err(failed)
}

fn gelu_tanh(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let work = cx.call().tensor(0)?.dtype.working();
    in_single(cx, |x| gelu_tanh_of(&x[0], work))
}

fn geglu(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let work = cx.call().tensor(0)?.dtype.working();
    in_single(cx, |x| {
        let gate = gelu_tanh_of(&x[0], work)?;
        gate.multiply(&x[1]).map_err(array::failed("geglu"))
    })
}

macro_rules! unary {
    ($($name:literal, $fits:path, $f:path;)*) => {
        [$(Entry { op: $name, supports: $fits, needs: needs::one_more, launch: |cx| { let x = cx.array(0)?; one(cx, array::unary($f, &x)) } },)*]
    };
}

macro_rules! binary {
    ($($name:literal, $fits:path, $f:path;)*) => {
        [$(Entry { op: $name, supports: $fits, needs: needs::one_more, launch: |cx| { let (a, b) = (cx.array(0)?, cx.array(1)?); one(cx, array::binary($f, &a, &b)) } },)*]
    };
}

pub(super) static UNARY: [Entry; 34] = unary! {
    "neg", numbers_complex, mlx_sys::mlx_negative;
    "abs", numbers_complex, mlx_sys::mlx_abs;
    "sign", integers, mlx_sys::mlx_sign;
    "square", numbers_complex, mlx_sys::mlx_square;
    "floor", numbers, mlx_sys::mlx_floor;
    "ceil", numbers, mlx_sys::mlx_ceil;
    "trunc", floats, mlx_sys::mlx_trunc;
    "reciprocal", floats_complex, mlx_sys::mlx_reciprocal;
    "sqrt", floats, mlx_sys::mlx_sqrt;
    "rsqrt", floats, mlx_sys::mlx_rsqrt;
    "exp", up_to_single, mlx_sys::mlx_exp;
    "expm1", floats, mlx_sys::mlx_expm1;
    "log", floats, mlx_sys::mlx_log;
    "log1p", floats, mlx_sys::mlx_log1p;
    "log2", floats, mlx_sys::mlx_log2;
    "sin", up_to_single, mlx_sys::mlx_sin;
    "cos", up_to_single, mlx_sys::mlx_cos;
    "tan", floats, mlx_sys::mlx_tan;
    "asin", floats, mlx_sys::mlx_arcsin;
    "acos", floats, mlx_sys::mlx_arccos;
    "atan", floats, mlx_sys::mlx_arctan;
    "sinh", floats, mlx_sys::mlx_sinh;
    "cosh", floats, mlx_sys::mlx_cosh;
    "tanh", floats, mlx_sys::mlx_tanh;
    "asinh", floats, mlx_sys::mlx_arcsinh;
    "acosh", floats, mlx_sys::mlx_arccosh;
    "atanh", floats, mlx_sys::mlx_arctanh;
    "erfinv", up_to_single, mlx_sys::mlx_erfinv;
    "sigmoid", up_to_single, mlx_sys::mlx_sigmoid;
    "logical_not", real, mlx_sys::mlx_logical_not;
    "is_nan", real, mlx_sys::mlx_isnan;
    "is_inf", real, mlx_sys::mlx_isinf;
    "is_finite", real, mlx_sys::mlx_isfinite;
    "bitwise_not", bits, mlx_sys::mlx_bitwise_invert;
};

pub(super) static BINARY: [Entry; 22] = binary! {
    "add", numbers_complex, mlx_sys::mlx_add;
    "sub", numbers_complex, mlx_sys::mlx_subtract;
    "mul", numbers_complex, mlx_sys::mlx_multiply;
    "maximum", real, mlx_sys::mlx_maximum;
    "minimum", real, mlx_sys::mlx_minimum;
    "floor_divide", wide_floats, mlx_sys::mlx_floor_divide;
    "remainder", floats, mlx_sys::mlx_remainder;
    "pow", floats, mlx_sys::mlx_power;
    "div", floats_complex, mlx_sys::mlx_divide;
    "atan2", floats, mlx_sys::mlx_arctan2;
    "logaddexp", up_to_single, mlx_sys::mlx_logaddexp;
    "equal", plain, mlx_sys::mlx_equal;
    "not_equal", plain, mlx_sys::mlx_not_equal;
    "less", real, mlx_sys::mlx_less;
    "less_equal", real, mlx_sys::mlx_less_equal;
    "greater", real, mlx_sys::mlx_greater;
    "greater_equal", real, mlx_sys::mlx_greater_equal;
    "logical_and", real, mlx_sys::mlx_logical_and;
    "logical_or", real, mlx_sys::mlx_logical_or;
    "bitwise_and", bits, mlx_sys::mlx_bitwise_and;
    "bitwise_or", bits, mlx_sys::mlx_bitwise_or;
    "bitwise_xor", bits, mlx_sys::mlx_bitwise_xor;
};

pub(super) static OTHERS: [Entry; 8] = [
    Entry {
        op: "round",
        supports: floats,
        needs: needs::several,
        launch: |cx| {
            let x = cx.array(0)?;
            one(cx, ops::round(&*x, 0))
        },
    },
    Entry {
        op: "cast",
        supports: casts,
        needs: needs::nothing,
        launch: cast,
    },
    Entry {
        op: "where",
        supports: chosen,
        needs: needs::nothing,
        launch: choose,
    },
    Entry {
        op: "relu",
        supports: numbers,
        needs: needs::several,
        launch: relu,
    },
    Entry {
        op: "silu",
        supports: up_to_single,
        needs: needs::several,
        launch: silu_of,
    },
    Entry {
        op: "swiglu",
        supports: up_to_single,
        needs: needs::several,
        launch: swiglu,
    },
    Entry {
        op: "gelu_tanh",
        supports: up_to_single,
        needs: needs::several,
        launch: gelu_tanh,
    },
    Entry {
        op: "geglu",
        supports: up_to_single,
        needs: needs::several,
        launch: geglu,
    },
];
