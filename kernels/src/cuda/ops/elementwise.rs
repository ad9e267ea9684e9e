//! Ops on each element by itself, casts and choices.

use hotcell_graph::{DType, Shape, op::Call};

use super::{
    Cx, Entry, Kernel, Made, Wanted, blocks_of,
    layout::{Layout, broadcast, code, contiguous, dims_at, grid},
    wanted::Numbers,
};
use crate::{
    backend::DeviceError,
    cuda::gpu::{Arguments, Grid},
    part::overflow,
};

/// The ops in the order of `Op` in `operations.cuh`.
const OPS: &[&str] = &[
    "neg",
    "abs",
    "sign",
    "square",
    "floor",
    "ceil",
    "round",
    "trunc",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "bitwise_not",
    // of two
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "floor_divide",
    "remainder",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "left_shift",
    "right_shift",
    // bytes, of one and of two
    "logical_not",
    "is_nan",
    "is_inf",
    "is_finite",
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "logical_and",
    "logical_or",
    "logical_xor",
];

/// The elementary functions in the order of `Function` in `functions.cuh`.
const FUNCTIONS: &[&str] = &[
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfinv",
    "sigmoid",
    "silu",
    // of two
    "pow",
    "atan2",
    "logaddexp",
];

macro_rules! entries {
    ($($name:literal)*) => { [$(Entry { op: $name, make: elementwise }),*] };
}

/// One row for each of [`OPS`].
pub(super) static ENTRIES: [Entry; 38] = entries!(
    "neg" "abs" "sign" "square" "floor" "ceil" "round" "trunc" "sqrt" "rsqrt" "reciprocal" "bitwise_not"
    "add" "sub" "mul" "div" "maximum" "minimum" "floor_divide" "remainder" "bitwise_and" "bitwise_or" "bitwise_xor"
    "left_shift" "right_shift" "logical_not" "is_nan" "is_inf" "is_finite" "equal" "not_equal" "less" "less_equal"
    "greater" "greater_equal" "logical_and" "logical_or" "logical_xor"
);

/// One row for each of [`FUNCTIONS`].
pub(super) static FUNCTION_ENTRIES: [Entry; 24] = entries!(
    "exp" "expm1" "log" "log1p" "log2" "sin" "cos" "tan" "asin" "acos" "atan" "sinh" "cosh" "tanh" "asinh" "acosh"
    "atanh" "erf" "erfinv" "sigmoid" "silu" "pow" "atan2" "logaddexp"
);

pub(super) static OTHERS: &[Entry] = &[
    Entry {
        op: "cast",
        make: cast,
    },
    Entry {
        op: "where",
        make: choose,
    },
    Entry {
        op: "swiglu",
        make: swiglu,
    },
    Entry {
        op: "geglu",
        make: geglu,
    },
];

/// The kernel of a dtype, from a family with one for each plain one.
macro_rules! of_dtype {
    ($dtype:expr, $family:literal) => {
        match $dtype {
            DType::Bool => Some(concat!($family, "_bool")),
            DType::U8 => Some(concat!($family, "_u8")),
            DType::U16 => Some(concat!($family, "_u16")),
            DType::U32 => Some(concat!($family, "_u32")),
            DType::U64 => Some(concat!($family, "_u64")),
            DType::I8 => Some(concat!($family, "_i8")),
            DType::I16 => Some(concat!($family, "_i16")),
            DType::I32 => Some(concat!($family, "_i32")),
            DType::I64 => Some(concat!($family, "_i64")),
            DType::F16 => Some(concat!($family, "_f16")),
            DType::BF16 => Some(concat!($family, "_bf16")),
            DType::F32 => Some(concat!($family, "_f32")),
            DType::F64 => Some(concat!($family, "_f64")),
            _ => None,
        }
    };
}

/// The kernel of elementary functions: f64 has others, of more digits, which run on the processor.
fn function(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F16 => Some("function_f16"),
        DType::BF16 => Some("function_bf16"),
        DType::F32 => Some("function_f32"),
        _ => None,
    }
}

/// Whether the kernel of a dtype has an op: floats have no bits, what has no bits has roots.
fn has(op: &str, dtype: DType) -> bool {
    let of_floats = ["sqrt", "rsqrt", "reciprocal", "div"];
    let of_integers = [
        "bitwise_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "left_shift",
        "right_shift",
        "remainder",
    ];
    let of_numbers = [
        "neg",
        "abs",
        "sign",
        "square",
        "floor",
        "ceil",
        "round",
        "trunc",
        "add",
        "sub",
        "mul",
        "floor_divide",
    ];
    match op {
        _ if of_floats.contains(&op) => dtype.is_float(),
        _ if of_numbers.contains(&op) => dtype.is_float() || dtype.is_integer(),
        "left_shift" | "right_shift" | "remainder" => dtype.is_integer(),
        _ if of_integers.contains(&op) => dtype.is_integer() || dtype == DType::Bool,
        _ => true,
    }
}

/// Where functions begin among the ops of a group (`FUNCTIONS` in `generic_group.cu`).
pub(super) const FUNCTIONS_FROM: u64 = 64;

/// How a group of ops names one whose operands and result are floats of 16 or 32 bits; functions come after the other ops.
pub(super) fn number_in_group(call: &Call<'_>) -> Option<u64> {
    let dtype = call.tensor(0).ok()?.dtype;
    let is_float = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let results = (call.op.infer)(call).ok()?;
    let same = results.first()?.dtype == dtype;
    // Which says that it can be done, too.
    let kernel = elementwise_of(call).filter(|_| is_float && same)?;
    let from = match FUNCTIONS.contains(&call.op.name) {
        false => 0,
        true => FUNCTIONS_FROM,
    };
    Some(from + u64::from(kernel.code))
}

struct Elementwise {
    name: &'static str,
    code: u32,
    inputs: Vec<Shape>,
    result: Shape,
}

fn elementwise_of(call: &Call<'_>) -> Option<Elementwise> {
    let first = call.tensor(0).ok()?;
    let mut inputs = Vec::new();
    for i in 0..call.inputs.len() {
        let t = call.tensor(i).ok()?;
        // What is promoted decomposes into casts and itself.
        if t.dtype != first.dtype {
            return None;
        }
        inputs.push(t.shape.clone());
    }
    let (name, ops) = match FUNCTIONS.contains(&call.op.name) {
        false => (of_dtype!(first.dtype, "elementwise")?, OPS),
        true => (function(first.dtype)?, FUNCTIONS),
    };
    let place = ops.iter().position(|op| *op == call.op.name)?;
    let results = (call.op.infer)(call).ok()?;
    let result = results.first()?;
    let same = result.dtype == first.dtype || result.dtype == DType::Bool;
    if !same || !has(call.op.name, first.dtype) {
        return None;
    }
    Some(Elementwise {
        name,
        code: u32::try_from(place).ok()?,
        inputs,
        result: result.shape.clone(),
    })
}

fn elementwise(call: &Call<'_>) -> Option<Made> {
    let kernel = elementwise_of(call)?;
    let names = vec![kernel.name];
    Some((Box::new(kernel), names))
}

impl Kernel for Elementwise {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let dims = dims_at(&self.result, cx.rows);
        let strides = |shape: &Shape| broadcast(&dims_at(shape, cx.rows), &dims);
        let strides: Vec<Vec<i64>> = self.inputs.iter().map(strides).collect();
        let layout = Layout::new(&dims, &strides).ok_or_else(overflow)?;
        let a = cx.input(0)?;
        let b = if strides.len() > 1 { cx.input(1)? } else { a };
        let arguments = Arguments::default()
            .int(self.code)
            .word(cx.output(0)?)
            .word(a)
            .word(b)
            .block(&layout.words());
        // SAFETY: the kernel's arguments, of tensors of these shapes.
        unsafe {
            cx.gpu
                .launch(self.name, grid(layout.elements()), &arguments)
        }
    }
}

struct Cast {
    name: &'static str,
    to: u32,
    shape: Shape,
}

fn cast(call: &Call<'_>) -> Option<Made> {
    let (x, to) = (call.tensor(0).ok()?, call.dtype(0).ok()?);
    let name = of_dtype!(x.dtype, "cast")?;
    let kernel = Cast {
        name,
        to: code(to)?,
        shape: x.shape.clone(),
    };
    Some((Box::new(kernel), vec![name]))
}

impl Kernel for Cast {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let n = self.shape.elements(cx.rows).ok_or_else(overflow)? as u64;
        let arguments = Arguments::default()
            .int(self.to)
            .word(cx.output(0)?)
            .word(cx.input(0)?)
            .word(n);
        // SAFETY: the kernel's arguments, of tensors of so many elements.
        unsafe { cx.gpu.launch(self.name, grid(n), &arguments) }
    }
}

struct Choose {
    name: &'static str,
    inputs: [Shape; 3],
    result: Shape,
}

fn choose(call: &Call<'_>) -> Option<Made> {
    let t = |i| call.tensor(i).ok();
    let (condition, a, b) = (t(0)?, t(1)?, t(2)?);
    if a.dtype != b.dtype || a.dtype.is_block() {
        return None;
    }
    let name = match a.dtype.block_bytes() {
        1 => "where_1",
        2 => "where_2",
        4 => "where_4",
        8 => "where_8",
        _ => return None,
    };
    let results = (call.op.infer)(call).ok()?;
    let kernel = Choose {
        name,
        inputs: [condition, a, b].map(|t| t.shape.clone()),
        result: results.first()?.shape.clone(),
    };
    Some((Box::new(kernel), vec![name]))
}

impl Kernel for Choose {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let dims = dims_at(&self.result, cx.rows);
        let strides = |shape: &Shape| broadcast(&dims_at(shape, cx.rows), &dims);
        let strides = self.inputs.each_ref().map(strides);
        let layout = Layout::new(&dims, &strides).ok_or_else(overflow)?;
        let arguments = Arguments::default()
            .word(cx.output(0)?)
            .word(cx.input(0)?)
            .word(cx.input(1)?)
            .word(cx.input(2)?)
            .block(&layout.words());
        // SAFETY: the kernel's arguments, of tensors of these shapes.
        unsafe {
            cx.gpu
                .launch(self.name, grid(layout.elements()), &arguments)
        }
    }
}

/// A gate and what it lets through, both f32 of one shape.
struct Gated {
    name: &'static str,
    shape: Shape,
    /// What is made of the result as well.
    numbers: Option<Numbers>,
}

fn gated(call: &Call<'_>, name: &'static str) -> Option<Made> {
    let (a, b) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
    let fits = a == b && a.dtype == DType::F32;
    fits.then(|| {
        let (shape, numbers) = (a.shape.clone(), None);
        let kernel = Gated {
            name,
            shape,
            numbers,
        };
        (Box::new(kernel) as Box<dyn Kernel>, vec![name])
    })
}

const SWIGLU: &str = "swiglu_f32";

fn swiglu(call: &Call<'_>) -> Option<Made> {
    gated(call, SWIGLU)
}

fn geglu(call: &Call<'_>) -> Option<Made> {
    gated(call, "geglu_f32")
}

impl Kernel for Gated {
    fn with(&self, wanted: &Wanted) -> Option<Made> {
        let Wanted::Numbers(numbers) = wanted else {
            return None;
        };
        if self.name != SWIGLU || !numbers.k.is_multiple_of(numbers.blocks.len()) {
            return None;
        }
        let name = numbers.blocks.of("swiglu_q8", "swiglu_q8k");
        let numbers = Some(numbers.clone());
        let shape = self.shape.clone();
        let kernel = Gated {
            name,
            shape,
            numbers,
        };
        Some((Box::new(kernel), vec![name]))
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let n = self.shape.elements(cx.rows).ok_or_else(overflow)?;
        let mut arguments = Arguments::default()
            .word(cx.output(0)?)
            .word(cx.input(0)?)
            .word(cx.input(1)?)
            .word(n as u64);
        let mut grid = grid(n as u64);
        if let Some(numbers) = &self.numbers {
            arguments = numbers.told(arguments, cx.output(1)?, cx.rows)?;
            grid = Grid {
                blocks: [blocks_of(Some(n), 256)?, 1, 1],
                threads: [256, 1, 1],
                shared: 0,
            };
        }
        // SAFETY: the kernel's arguments, of tensors of so many elements; what is made besides has as much memory as it says.
        unsafe { cx.gpu.launch(self.name, grid, &arguments) }
    }
}

/// Copies elements of `bytes` bytes from where `from` says to where `to` does.
pub(super) fn copy(
    cx: &Cx<'_>,
    bytes: usize,
    dims: &[usize],
    (from, from_strides): (u64, Vec<i64>),
    (to, to_strides): (u64, Option<Vec<i64>>),
) -> Result<(), DeviceError> {
    let name = copy_name(bytes).ok_or_else(overflow)?;
    let to_strides = to_strides.unwrap_or_else(|| contiguous(dims));
    let layout = Layout::new(dims, &[from_strides, to_strides]).ok_or_else(overflow)?;
    let arguments = Arguments::default()
        .word(to)
        .word(from)
        .block(&layout.words());
    // SAFETY: the kernel's arguments; the caller's strides stay within its tensors.
    unsafe { cx.gpu.launch(name, grid(layout.elements()), &arguments) }
}

/// The kernel that copies elements of so many bytes.
pub(super) fn copy_name(bytes: usize) -> Option<&'static str> {
    match bytes {
        1 => Some("copy_1"),
        2 => Some("copy_2"),
        4 => Some("copy_4"),
        8 => Some("copy_8"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The list of ops in a source.
    fn listed(source: &str, list: &str) -> Vec<String> {
        let (_, list) = source.split_once(list).unwrap();
        let (list, _) = list.split_once('}').unwrap();
        let names = list.lines().filter(|line| !line.trim().starts_with("//"));
        let names = names.flat_map(|line| line.split(','));
        let names = names.map(|name| name.trim().to_lowercase());
        names.filter(|name| !name.is_empty()).collect()
    }

    #[test]
    fn the_kernels_know_the_ops_by_the_same_numbers() {
        let ops = include_str!("../operations.cuh");
        assert_eq!(listed(ops, "enum Op : unsigned {"), OPS);
        let functions = include_str!("../functions.cuh");
        assert_eq!(listed(functions, "enum Function : unsigned {"), FUNCTIONS);
        let rows = |entries: &[Entry]| entries.iter().map(|e| e.op).collect::<Vec<_>>();
        assert_eq!(rows(&ENTRIES), OPS);
        assert_eq!(rows(&FUNCTION_ENTRIES), FUNCTIONS);
    }
}
