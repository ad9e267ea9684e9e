//! Matrix products. Weights are read in a form that is made once; products of f32 are f32, as MLX has them.

use hotcell_graph::{DType, Dim, op::Call};
use mlx_rs::{Array, Dtype, error::Exception, ops};
use mlx_sys::{mlx_array, mlx_optional_int};

use super::{
    Entry, all_are, has_elements,
    needs::{Needs, array_of, checked, elements, product, sum},
    one,
};
use crate::{
    backend::DeviceError,
    mlx::{
        array,
        plan::overflow,
        run::Cx,
        weights::{Form, Packing, Prepared},
    },
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "mul_mat",
        supports: weights,
        needs: needed,
        launch: mul_mat,
    },
    Entry {
        op: "matmul",
        supports: matrices,
        needs: needed,
        launch: matmul,
    },
    Entry {
        op: "addmm",
        supports: added,
        needs: needed,
        launch: addmm,
    },
    Entry {
        op: "mul_mat_id",
        supports: experts,
        needs: needed,
        launch: mul_mat_id,
    },
];

/// `x` f32 and weights of two axes; more of them decompose.
fn weights(call: &Call<'_>) -> bool {
    let (Ok(x), Ok(w)) = (call.tensor(0), call.tensor(1)) else {
        return false;
    };
    x.dtype == DType::F32 && w.shape.rank() == 2 && w.dtype != DType::F64 && has_elements(call)
}

/// In which form an entry wants input `i`; `None` where it reads what it needs in place.
pub(in crate::mlx) fn form_at(call: &Call<'_>, i: usize) -> Option<Form> {
    match (call.op.name, i) {
        ("mul_mat", 1) | ("mul_mat_id", 0) => {
            call.tensor(i).ok().map(|w| Form::to_multiply(w.dtype))
        }
        ("take", 0) if super::index::is_of_rows(call) => None,
        _ => Some(Form::Stored),
    }
}

/// Rows are copied where they do not follow one another, weights never.
fn needed(call: &Call<'_>, rows: usize) -> Option<Needs> {
    let results = (call.op.infer)(call).ok()?;
    let result = elements(results.first()?, rows)?;
    // Of two products the left factor is the first, and of `c + a·b` the second.
    let (left, right) = match call.op.name {
        "addmm" => (1, Some(2)),
        "mul_mat_id" => (1, None),
        "mul_mat" => (0, None),
        _ => (0, Some(1)),
    };
    let x = call.tensor(left).ok()?;
    let depth = x.shape.dims().last()?.at(rows);
    let copied = match right {
        Some(right) => sum(&[
            elements(x, rows)?,
            elements(call.tensor(right).ok()?, rows)?,
        ])?,
        None => elements(x, rows)?,
    };
    // One row for each expert that it goes to, and which one.
    let (spread, ids) = match call.op.name {
        "mul_mat_id" => {
            let ids = elements(call.tensor(2).ok()?, rows)?;
            (array_of(&[ids, depth])?, checked(ids)?)
        }
        _ => (0, 0),
    };
    let floats = product(&[sum(&[copied, spread, result])?, size_of::<f32>()])?;
    Some(Needs {
        bytes: sum(&[floats, ids])?,
        products: product(&[result, depth])?,
    })
}

fn mul_mat(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let call = cx.call();
    let x = cx.array(0)?;
    let w = cx.weights(1, Form::to_multiply(call.tensor(1)?.dtype))?;
    if let Some(packed) = Packed::of(&w) {
        return one(cx, packed.product(&x));
    }
    let [w] = w.arrays.as_slice() else {
        return Err(overflow());
    };
    let turned = w.transpose().map_err(array::failed(cx.op()))?;
    one(cx, x.matmul(&turned))
}

/// Weights in one of MLX's modes, as its functions want them: `mlx-rs` wraps them for the affine mode only.
struct Packed<'a> {
    numbers: &'a Array,
    scales: &'a Array,
    biases: Option<&'a Array>,
    packing: Packing,
    group: mlx_optional_int,
    bits: mlx_optional_int,
}

impl<'a> Packed<'a> {
    fn of(w: &'a Prepared) -> Option<Self> {
        let packing = w.packing?;
        let (numbers, scales, biases) = match w.arrays.as_slice() {
            [numbers, scales] => (numbers, scales, None),
            [numbers, scales, biases] => (numbers, scales, Some(&**biases)),
            _ => return None,
        };
        let int = |value: usize| {
            i32::try_from(value).ok().map(|value| mlx_optional_int {
                value,
                has_value: true,
            })
        };
        let (group, bits) = (int(packing.group)?, int(packing.bits)?);
        Some(Packed {
            numbers,
            scales,
            biases,
            packing,
            group,
            bits,
        })
    }

    /// The biases, or MLX's word for there being none.
    fn biases(&self) -> mlx_array {
        self.biases.map_or_else(nothing, Array::as_ptr)
    }

    /// `x [m, k]` times the weights `[n, k]`.
    fn product(&self, x: &Array) -> Result<Array, Exception> {
        // SAFETY: the arrays are alive, or none where there may be none; the mode ends with a zero byte.
        array::made(|to, stream| unsafe {
            mlx_sys::mlx_quantized_matmul(
                to,
                x.as_ptr(),
                self.numbers.as_ptr(),
                self.scales.as_ptr(),
                self.biases(),
                true,
                self.group,
                self.bits,
                self.packing.mode.as_ptr(),
                stream,
            )
        })
    }

    /// `x […, 1, k]` times the matrices of weights `[e, n, k]` that `ids […]` name, which are there.
    fn products(&self, x: &Array, ids: &Array) -> Result<Array, Exception> {
        // SAFETY: as for `product`.
        array::made(|to, stream| unsafe {
            mlx_sys::mlx_gather_qmm(
                to,
                x.as_ptr(),
                self.numbers.as_ptr(),
                self.scales.as_ptr(),
                self.biases(),
                nothing(),
                ids.as_ptr(),
                true,
                self.group,
                self.bits,
                self.packing.mode.as_ptr(),
                false,
                stream,
            )
        })
    }
}

/// No array.
fn nothing() -> mlx_array {
    mlx_array {
        ctx: std::ptr::null_mut(),
    }
}

/// f32, of which nothing is rounded twice; matrices, not vectors, and f64 on the CPU backend.
fn matrices(call: &Call<'_>) -> bool {
    let rank = |i| call.tensor(i).map_or(0, |t| t.shape.rank());
    all_are(call, |d| d == DType::F32) && rank(0) >= 2 && rank(1) >= 2 && has_elements(call)
}

fn matmul(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let (a, b) = (cx.array(0)?, cx.array(1)?);
    one(cx, a.matmul(&*b))
}

fn added(call: &Call<'_>) -> bool {
    let rank = |i| call.tensor(i).map_or(0, |t| t.shape.rank());
    all_are(call, |d| d == DType::F32) && rank(1) >= 2 && rank(2) >= 2 && has_elements(call)
}

fn addmm(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let (c, a, b) = (cx.array(0)?, cx.array(1)?, cx.array(2)?);
    let (alpha, beta) = (cx.call().float(0)? as f32, cx.call().float(1)? as f32);
    one(cx, ops::addmm(&*c, &*a, &*b, alpha, beta))
}

fn experts(call: &Call<'_>) -> bool {
    let (Ok(w), Ok(ids)) = (call.tensor(0), call.tensor(2)) else {
        return false;
    };
    w.dtype != DType::F64 && ids.dtype.is_integer() && has_elements(call)
}

/// `x [t, u or 1, k]` with the experts `[e, n, k]` that `ids [t, u]` name: each a row times a matrix.
fn mul_mat_id(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let failed = array::failed(cx.op());
    let call = cx.call();
    let &[Dim::Fixed(count), ..] = call.tensor(0)?.shape.dims() else {
        return Err(overflow());
    };
    let ids = array::from_i32(&cx.indices(2, count)?, &cx.dims(2)?)?;
    let ids = ids.as_dtype(Dtype::Uint32).map_err(&failed)?;
    let w = cx.weights(0, Form::to_multiply(call.tensor(0)?.dtype))?;
    // [t, u, 1, k] @ [e, k, n] → [t, u, 1, n]; which row it is, and which expert, for each of [t, u].
    let result = cx.result_dims(0)?;
    let (&[t, u, n], &[_, given, k]) = (result.as_slice(), cx.dims(1)?.as_slice()) else {
        return Err(overflow());
    };
    let x = cx_rows(&*cx.array(1)?, [t, u, given, k])?;
    let product = by_experts(&x, &w, &ids).map_err(&failed)?;
    one(cx, product.reshape(&[t, u, n]))
}

fn by_experts(x: &Array, w: &Prepared, ids: &Array) -> Result<Array, Exception> {
    if let Some(packed) = Packed::of(w) {
        return packed.products(x, ids);
    }
    match w.arrays.as_slice() {
        [w] => ops::gather_mm(x, w.swap_axes(-1, -2)?, None, ids, false),
        _ => Err(Exception::custom("weights in no form to multiply with")),
    }
}

/// Rows `[t, u, 1, k]` of `[t, u or 1, k]`.
fn cx_rows(x: &Array, [t, u, given, k]: [i32; 4]) -> Result<Array, DeviceError> {
    let failed = array::failed("mul_mat_id");
    let x = x.reshape(&[t, given, 1, k]).map_err(&failed)?;
    ops::broadcast_to(&x, &[t, u, 1, k]).map_err(failed)
}
