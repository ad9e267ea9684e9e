//! MLX's arrays, made from bytes and read as bytes. Only calls that can fail, and none on what was not checked.
//!
//! MLX's shapes are `i32`, and it trusts whoever calls it: a shape that its memory does not have would be read as if it
//! had. So every size comes from a verified spec and is compared with the bytes that are there.

use std::{
    cell::RefCell,
    ffi::{CStr, c_char, c_void},
};

use hotcell_graph::{DType, Shape, TensorSpec};
use mlx_rs::{Array, Dtype, error::Exception};

use super::{NAME, plan::overflow};
use crate::{
    backend::{DeviceError, HostSpan},
    bound::Bound,
};

/// MLX's word for a dtype; block types have none.
pub(super) fn dtype_of(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::Bool => Dtype::Bool,
        DType::U8 => Dtype::Uint8,
        DType::U16 => Dtype::Uint16,
        DType::U32 => Dtype::Uint32,
        DType::U64 => Dtype::Uint64,
        DType::I8 => Dtype::Int8,
        DType::I16 => Dtype::Int16,
        DType::I32 => Dtype::Int32,
        DType::I64 => Dtype::Int64,
        DType::F16 => Dtype::Float16,
        DType::BF16 => Dtype::Bfloat16,
        DType::F32 => Dtype::Float32,
        DType::F64 => Dtype::Float64,
        DType::C64 => Dtype::Complex64,
        _ => return None,
    })
}

/// A failure of MLX in an op: memory that it could not have, what it does not do, or anything else.
///
/// MLX has one exception for all, so its kind stands in the words; they are read here and nowhere else.
pub(super) fn failed(op: &'static str) -> impl Fn(Exception) -> DeviceError {
    move |error| of_words(op, error.what())
}

/// The error that words of MLX's about an op are.
pub fn of_words(op: &'static str, words: &str) -> DeviceError {
    let lower = words.to_ascii_lowercase();
    let says = |any: &[&str]| any.iter().any(|part| lower.contains(part));
    if says(&["allocat", "insufficient memory", "out of memory"]) {
        // "[malloc] Unable to allocate 1024 bytes."
        let bytes = lower.split_whitespace().find_map(|word| word.parse().ok());
        return DeviceError::OutOfMemory {
            what: format!("MLX, in {op},"),
            bytes: bytes.unwrap_or(usize::MAX),
        };
    }
    let why = words.to_owned();
    match says(&["not supported", "unsupported", "not implemented", "nyi"]) {
        true => refused(op, why),
        false => broken(op, why),
    }
}

/// What MLX does not do.
pub(super) fn refused(op: &'static str, why: String) -> DeviceError {
    DeviceError::Unsupported {
        backend: NAME,
        op,
        why,
    }
}

/// What ought not to happen.
fn broken(op: &'static str, why: String) -> DeviceError {
    DeviceError::Failed {
        backend: NAME,
        op,
        why,
    }
}

thread_local! {
    /// What MLX said last on this thread. `mlx-rs` keeps its own copy, which only its wrappers can read.
    static SAID: RefCell<String> = const { RefCell::new(String::new()) };
}

unsafe extern "C" {
    /// Where `mlx-rs` notes what its wrappers give back as errors.
    fn default_mlx_error_handler(message: *const c_char, data: *mut c_void);
}

extern "C" fn note(message: *const c_char, data: *mut c_void) {
    if message.is_null() {
        return;
    }
    // SAFETY: MLX passes a text that ends with a zero byte and lives as long as the call.
    let said = unsafe { CStr::from_ptr(message) }.to_string_lossy();
    // Neither may panic in C++'s frames: what cannot be noted is lost, and the call fails all the same.
    let _ = SAID.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = said.into_owned();
        }
    });
    // SAFETY: a function of the crate that is linked, with what MLX passed.
    unsafe { default_mlx_error_handler(message, data) };
}

/// Has MLX's failures noted here as well. To be called after `mlx-rs` put its own handler in, at its first call.
pub(super) fn listen() {
    // SAFETY: a function of the type that is asked for, and no data.
    unsafe { mlx_sys::mlx_set_error_handler(Some(note), std::ptr::null_mut(), None) };
}

/// What MLX said of a call that it did not wrap.
fn said(status: i32) -> Exception {
    let words = SAID.try_with(|last| last.take()).unwrap_or_default();
    match words.is_empty() {
        true => Exception::custom(format!("MLX ended a call with {status}")),
        false => Exception::custom(words),
    }
}

/// A vector with room for `count` elements.
pub(super) fn room<T>(what: &'static str, count: usize) -> Result<Vec<T>, DeviceError> {
    let mut all = Vec::new();
    match all.try_reserve_exact(count) {
        Ok(()) => Ok(all),
        Err(_) => Err(DeviceError::OutOfMemory {
            what: what.to_owned(),
            bytes: count.saturating_mul(size_of::<T>()),
        }),
    }
}

/// `count` zeros.
pub(super) fn zeros<T: Clone + Default>(
    what: &'static str,
    count: usize,
) -> Result<Vec<T>, DeviceError> {
    let mut all = room(what, count)?;
    all.resize(count, T::default());
    Ok(all)
}

/// A shape for `rows` rows in MLX's numbers; `None` where one is too large for them.
pub(super) fn dims(shape: &Shape, rows: usize) -> Option<Vec<i32>> {
    let dims = shape.dims().iter();
    dims.map(|d| i32::try_from(d.at(rows)).ok()).collect()
}

/// The same, or why not.
pub(super) fn dims_or(
    op: &'static str,
    shape: &Shape,
    rows: usize,
) -> Result<Vec<i32>, DeviceError> {
    dims(shape, rows).ok_or_else(|| refused(op, format!("{shape} is larger than its sizes")))
}

/// Copies `bytes` bytes at `data` into a new array of this dtype and shape.
///
/// # Safety
/// `data` must lead to `bytes` readable bytes. Others may write them meanwhile: the array then holds either.
pub(super) unsafe fn from_memory(
    data: *const u8,
    bytes: usize,
    dtype: DType,
    shape: &[i32],
) -> Result<Array, DeviceError> {
    let wrong = || refused("an input", format!("{bytes} bytes are no {dtype}{shape:?}"));
    let elements = shape
        .iter()
        .try_fold(1usize, |n, d| n.checked_mul(usize::try_from(*d).ok()?));
    let of_mlx = dtype_of(dtype).ok_or_else(wrong)?;
    if elements.and_then(|n| dtype.row_bytes(n)) != Some(bytes) {
        return Err(wrong());
    }
    // An array without elements reads nothing; a null pointer would still be looked at.
    let nothing = 0u64;
    let truths: Vec<u8>;
    let data = match bytes {
        0 => (&raw const nothing).cast(),
        _ if dtype == DType::Bool => {
            // Whoever sent them may have sent any bytes, and to C++ a `bool` is 0 or 1.
            let mut all = room("truths", bytes)?;
            // SAFETY: so many bytes are there, says the caller; each is read once.
            all.extend((0..bytes).map(|i| u8::from(unsafe { data.add(i).read() } != 0)));
            truths = all;
            truths.as_ptr()
        }
        _ => data,
    };
    // SAFETY: so many bytes of that dtype and shape are there, says the caller, and MLX copies them.
    let array = unsafe { Array::from_raw_data(data.cast(), shape, of_mlx) };
    match array.as_ptr().ctx.is_null() {
        // Nothing else can fail there: the shape was compared with the bytes.
        true => Err(DeviceError::OutOfMemory {
            what: "an array of MLX".to_owned(),
            bytes,
        }),
        false => Ok(array),
    }
}

/// A new array of what is bound, at the rows of an execution.
pub(super) fn of_bound(
    bound: &Bound,
    spec: &TensorSpec,
    rows: usize,
) -> Result<Array, DeviceError> {
    let host = bound.buffer.host().ok_or_else(overflow)?;
    of_host(&host, bound.offset, spec, rows)
}

/// A new array of what lies at `offset` of memory of the host.
pub(super) fn of_host(
    host: &HostSpan,
    offset: usize,
    spec: &TensorSpec,
    rows: usize,
) -> Result<Array, DeviceError> {
    let dims = dims_or("an input", &spec.shape, rows)?;
    let size = spec.bytes(rows).ok_or_else(overflow)?;
    let end = offset.checked_add(size).filter(|end| *end <= host.len);
    end.ok_or_else(overflow)?;
    // SAFETY: compared above with the length; whoever holds the buffer keeps the memory alive. What is shared with
    // another process may change meanwhile, which `from_memory` allows.
    unsafe { from_memory(host.start.add(offset), size, spec.dtype, &dims) }
}

/// A new array of these little-endian elements.
pub(super) fn from_bytes(data: &[u8], dtype: DType, shape: &[i32]) -> Result<Array, DeviceError> {
    // SAFETY: a slice is as long as it says.
    unsafe { from_memory(data.as_ptr(), data.len(), dtype, shape) }
}

/// A new array of indices.
pub(super) fn from_i32(data: &[i32], shape: &[i32]) -> Result<Array, DeviceError> {
    // SAFETY: a slice is as long as it says; an i32 is four bytes without padding.
    unsafe { from_memory(data.as_ptr().cast(), size_of_val(data), DType::I32, shape) }
}

/// A new array of numbers.
pub(super) fn from_f32(data: &[f32], shape: &[i32]) -> Result<Array, DeviceError> {
    // SAFETY: as for `from_i32`.
    unsafe { from_memory(data.as_ptr().cast(), size_of_val(data), DType::F32, shape) }
}

/// Whether an array is what the catalogue says that the op gives.
pub(super) fn check(
    op: &'static str,
    array: &Array,
    spec: &TensorSpec,
    rows: usize,
) -> Result<(), DeviceError> {
    let wanted = dims_or(op, &spec.shape, rows)?;
    if array.as_ptr().ctx.is_null() {
        return Err(broken(op, "it gives nothing".to_owned()));
    }
    if Some(array.dtype()) != dtype_of(spec.dtype) || array.shape() != wanted.as_slice() {
        let got = format!("{:?}{:?}", array.dtype(), array.shape());
        return Err(broken(op, format!("it gives {got} instead of {spec}")));
    }
    Ok(())
}

/// Evaluates arrays, all of them at once.
pub(super) fn evaluate<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<(), DeviceError> {
    mlx_rs::transforms::eval(arrays).map_err(failed("an evaluation"))
}

/// An array's bytes in row-major order, evaluated, for as long as `read` runs.
pub(super) fn with_bytes<T>(
    array: &Array,
    read: impl FnOnce(&[u8]) -> T,
) -> Result<T, DeviceError> {
    let what = "reading a result";
    let mut plain = None;
    let mut array = array;
    array.eval().map_err(failed(what))?;
    if !is_row_contiguous(array)? {
        let copy = array.contiguous().map_err(failed(what))?;
        copy.eval().map_err(failed(what))?;
        array = plain.insert(copy);
    }
    let bytes = array.nbytes();
    if bytes == 0 {
        return Ok(read(&[]));
    }
    // SAFETY: the array is evaluated and alive. The pointer's type does not matter: it is used as bytes.
    let data = unsafe { mlx_sys::mlx_array_data_uint8(array.as_ptr()) };
    if data.is_null() {
        return Err(broken(what, "it has no memory".to_owned()));
    }
    // SAFETY: an evaluated array whose rows are contiguous has all of its bytes there; nobody writes them while it lives.
    let result = read(unsafe { std::slice::from_raw_parts(data, bytes) });
    drop(plain);
    Ok(result)
}

fn is_row_contiguous(array: &Array) -> Result<bool, DeviceError> {
    let mut is = false;
    // SAFETY: writes one bool; the array is alive.
    let status = unsafe { mlx_sys::_mlx_array_is_row_contiguous(&mut is, array.as_ptr()) };
    match status {
        0 => Ok(is),
        _ => Err(failed("reading a result")(said(status))),
    }
}

/// One of MLX's functions of an array that `mlx-rs` does not wrap.
type Unary =
    unsafe extern "C" fn(*mut mlx_sys::mlx_array, mlx_sys::mlx_array, mlx_sys::mlx_stream) -> i32;

/// The same of two.
type Binary = unsafe extern "C" fn(
    *mut mlx_sys::mlx_array,
    mlx_sys::mlx_array,
    mlx_sys::mlx_array,
    mlx_sys::mlx_stream,
) -> i32;

/// Calls what fills an array.
pub(super) fn made(
    make: impl FnOnce(*mut mlx_sys::mlx_array, mlx_sys::mlx_stream) -> i32,
) -> Result<Array, Exception> {
    let stream = mlx_rs::Stream::thread_local_or_default();
    // SAFETY: makes an empty array, which frees nothing.
    let mut handle = unsafe { mlx_sys::mlx_array_new() };
    let status = make(&mut handle, stream.as_ptr());
    // SAFETY: the call filled the handle, or left the empty one; from here on the value owns it.
    let array = unsafe { Array::from_ptr(handle) };
    match status {
        0 => Ok(array),
        _ => Err(said(status)),
    }
}

/// A function of an array.
pub(super) fn unary(function: Unary, x: &Array) -> Result<Array, Exception> {
    // SAFETY: the table names functions of MLX with this signature; the arrays are alive.
    made(|to, stream| unsafe { function(to, x.as_ptr(), stream) })
}

/// A function of two arrays.
pub(super) fn binary(function: Binary, a: &Array, b: &Array) -> Result<Array, Exception> {
    // SAFETY: as for `unary`.
    made(|to, stream| unsafe { function(to, a.as_ptr(), b.as_ptr(), stream) })
}
