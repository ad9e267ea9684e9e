//! Elementwise ops from outside: every op and dtype against plain Rust, accuracy, broadcasting, and equal bits however
//! they were fused, split over threads, or interrupted.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::cell::Cell;

use half::{bf16, f16};
use hotcell_graph::{
    DType, Graph, GraphBuilder, Shape, TensorSpec, Value,
    op::{Attribute, find},
};
use hotcell_kernels::{
    backend::{Buffer, Device},
    cpu::{CpuDevice, lanes, path::CpuPath},
    plan::{Plan, PlanHints, Slot},
};
use proptest::prelude::*;

fn spec(dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap()
}

fn buffer(device: &dyn Device, bytes: &[u8]) -> Buffer {
    let buffer = device.allocate("test", bytes.len()).unwrap();
    buffer.write(0, bytes).unwrap();
    buffer
}

/// Binds inputs and fresh outputs.
fn bound(
    device: &dyn Device,
    graph: &Graph,
    inputs: &[Vec<u8>],
    fuse: bool,
) -> (Box<dyn Plan>, Vec<(Buffer, usize)>) {
    let hints = PlanHints {
        fuse,
        ..PlanHints::default()
    };
    let mut plan = device.plan(graph, &hints).unwrap();
    for (i, bytes) in inputs.iter().enumerate() {
        plan.bind(Slot::Input(i), &buffer(device, bytes), 0)
            .unwrap();
    }
    let mut outputs = vec![];
    for (i, value) in graph.outputs().iter().enumerate() {
        let hotcell_graph::op::ValueSpec::Tensor(t) = graph.spec(*value).unwrap() else {
            panic!("an output is a tensor");
        };
        let bytes = t.bytes(graph.max_rows()).unwrap();
        let out = device.allocate("out", bytes.max(1)).unwrap();
        plan.bind(Slot::Output(i), &out, 0).unwrap();
        outputs.push((out, bytes));
    }
    (plan, outputs)
}

fn contents(outputs: &[(Buffer, usize)]) -> Vec<Vec<u8>> {
    let read = |(buffer, bytes): &(Buffer, usize)| {
        let mut data = vec![0; *bytes];
        buffer.read(0, &mut data).unwrap();
        data
    };
    outputs.iter().map(read).collect()
}

fn run_on(device: &dyn Device, graph: &Graph, inputs: &[Vec<u8>], fuse: bool) -> Vec<Vec<u8>> {
    let (mut plan, outputs) = bound(device, graph, inputs, fuse);
    plan.execute(graph.max_rows()).unwrap();
    contents(&outputs)
}

fn run(graph: &Graph, inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
    run_on(&device, graph, inputs, true)
}

/// A graph of one op on inputs of these dtypes with `n` elements each.
fn one_op(op: &str, dtypes: &[DType], n: usize, attributes: Vec<Attribute>) -> Option<Graph> {
    let mut g = GraphBuilder::new(0);
    let inputs: Vec<Value> = dtypes
        .iter()
        .enumerate()
        .map(|(i, d)| g.tensor(format!("x{i}"), spec(*d, &[n])).unwrap())
        .collect();
    let y = g.apply(find(op).unwrap(), inputs, attributes).ok()?;
    Some(g.finish(&y).unwrap())
}

fn numbers(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    let of = |c: &[u8; 4]| f32::from_ne_bytes(*c);
    bytes.as_chunks::<4>().0.iter().map(of).collect()
}

fn f64s(bytes: &[u8]) -> Vec<f64> {
    let of = |c: &[u8; 8]| f64::from_ne_bytes(*c);
    bytes.as_chunks::<8>().0.iter().map(of).collect()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

// ---- accuracy

/// Giles' and libm have no inverse of erf in f64: bisection.
fn erfinv(x: f64) -> f64 {
    if x.abs() >= 1.0 || x.is_nan() {
        return match x.abs() {
            1.0 => f64::INFINITY.copysign(x),
            _ => f64::NAN,
        };
    }
    if x.abs() < 1e-9 {
        return x * std::f64::consts::PI.sqrt() / 2.0;
    }
    let (mut low, mut high) = (0.0, 7.0);
    for _ in 0..120 {
        let middle: f64 = (low + high) / 2.0;
        let below = match x.abs() < 0.5 {
            true => libm::erf(middle) < x.abs(),
            false => libm::erfc(middle) > 1.0 - x.abs(),
        };
        if below {
            low = middle;
        } else {
            high = middle;
        }
    }
    low.copysign(x)
}

/// libm's own goes on below 1.
fn acosh(x: f64) -> f64 {
    if x < 1.0 { f64::NAN } else { libm::acosh(x) }
}

type Exact = fn(f64) -> f64;

/// Each f32 function, what it should be, and the ulps it may be off.
const FUNCTIONS: &[(&str, Exact, f64)] = &[
    ("sqrt", libm::sqrt, 0.5001),
    ("rsqrt", |x| 1.0 / libm::sqrt(x), 1.5),
    ("reciprocal", |x| 1.0 / x, 0.5001),
    ("exp", libm::exp, 1.1),
    ("expm1", libm::expm1, 2.0),
    ("log", libm::log, 1.1),
    ("log1p", libm::log1p, 1.5),
    ("log2", libm::log2, 1.5),
    ("sin", libm::sin, 2.0),
    ("cos", libm::cos, 2.0),
    ("tan", libm::tan, 3.0),
    ("asin", libm::asin, 3.0),
    ("acos", libm::acos, 3.0),
    ("atan", libm::atan, 2.0),
    ("sinh", libm::sinh, 2.5),
    ("cosh", libm::cosh, 2.5),
    ("tanh", libm::tanh, 2.0),
    ("asinh", libm::asinh, 3.5),
    ("acosh", acosh, 3.5),
    ("atanh", libm::atanh, 3.0),
    ("erf", libm::erf, 1.5),
    ("erfinv", erfinv, 3.0),
    (
        "sigmoid",
        |x| match x < 0.0 {
            true => libm::exp(x) / (1.0 + libm::exp(x)),
            false => 1.0 / (1.0 + libm::exp(-x)),
        },
        2.5,
    ),
];

/// How many units in the last place of f32 at `exact` lie between.
fn ulps(y: f32, exact: f64) -> f64 {
    if y.is_nan() && exact.is_nan() || y as f64 == exact {
        return 0.0;
    }
    let nearest = exact as f32;
    if nearest.is_infinite() || exact.is_nan() || y.is_nan() || y.is_infinite() {
        // At the edge of overflow both are right.
        let edge = exact.abs() > f32::MAX as f64 * (1.0 - 1e-6);
        return if nearest == y || edge && y.abs() >= f32::MAX * 0.999_999 {
            0.0
        } else {
            f64::INFINITY
        };
    }
    let size = nearest.abs().max(f32::MIN_POSITIVE);
    let ulp = f32::from_bits(size.to_bits() + 1) as f64 - size as f64;
    (y as f64 - exact).abs() / ulp
}

#[test]
fn functions_are_as_accurate_as_they_say_and_equal_on_every_path() {
    let mut xs: Vec<f32> = (0..=u32::MAX).step_by(20_011).map(f32::from_bits).collect();
    let mut next = numbers(7);
    xs.extend((0..40_000).map(|_| (next() >> 40) as f32 / (1 << 22) as f32 - 2.0));
    xs.extend((0..20_000).map(|_| (next() >> 40) as f32 / (1 << 16) as f32 - 128.0));
    xs.extend([
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ]);
    let mut report = vec![];
    for (op, exact, bound) in FUNCTIONS {
        let graph = one_op(op, &[DType::F32], xs.len(), vec![]).unwrap();
        let mut first: Option<Vec<f32>> = None;
        for path in CpuPath::available() {
            let device = CpuDevice::with_path(2, path).unwrap();
            let ys = f32s(&run_on(&device, &graph, &[bytes_of(&xs)], true)[0]);
            let first = first.get_or_insert_with(|| ys.clone());
            for ((x, y), z) in xs.iter().zip(&ys).zip(first.iter()) {
                let same = y.to_bits() == z.to_bits() || y.is_nan() && z.is_nan();
                assert!(same, "{op}({x}) on {path}: {y}, {z}");
            }
        }
        let ys = first.unwrap();
        let worst = xs
            .iter()
            .zip(&ys)
            .map(|(x, y)| (ulps(*y, exact(*x as f64)), *x, *y));
        let worst = worst.fold((0.0, 0.0, 0.0), |w, v| if v.0 > w.0 { v } else { w });
        if worst.0 > *bound {
            report.push(format!(
                "{op}({:e}) = {:e}, not {:e}: {} ulp",
                worst.1,
                worst.2,
                exact(worst.1 as f64),
                worst.0
            ));
        }
    }
    assert!(report.is_empty(), "{}", report.join("\n"));
    // Zeros keep their sign.
    for op in [
        "sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "erf", "expm1", "log1p",
    ] {
        let graph = one_op(op, &[DType::F32], 2, vec![]).unwrap();
        let y = f32s(&run(&graph, &[bytes_of(&[0.0, -0.0])])[0]);
        assert_eq!([y[0].to_bits(), y[1].to_bits()], [0, 1 << 31], "{op}");
    }
}

#[test]
fn functions_of_two_are_accurate() {
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.0,
        -2.0,
        3.0,
        -3.0,
        0.5,
        -0.5,
        1e-45,
        -1e-45,
        1e-40,
        3e38,
        -3e38,
        1e9,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        16_777_216.0,
        16_777_217.0,
        7.5,
        1.000_000_1,
        0.999_999_94,
    ];
    let (mut a, mut b) = (vec![], vec![]);
    for x in special {
        for y in special {
            a.push(x);
            b.push(y);
        }
    }
    let mut next = numbers(3);
    for _ in 0..60_000 {
        a.push(f32::from_bits(next() as u32));
        b.push(f32::from_bits(next() as u32));
        a.push((next() >> 40) as f32 / (1 << 20) as f32);
        b.push((next() >> 40) as f32 / (1 << 18) as f32 - 32.0);
    }
    let logaddexp = |a: f64, b: f64| match a == b {
        true => a + std::f64::consts::LN_2,
        false => a.max(b) + libm::log1p(libm::exp(-(a - b).abs())) + (a - b) * 0.0,
    };
    type Exact2 = fn(f64, f64) -> f64;
    let functions: [(&str, Exact2, f64); 2] =
        [("pow", libm::pow, 0.51), ("atan2", libm::atan2, 3.0)];
    for path in CpuPath::available() {
        let device = CpuDevice::with_path(2, path).unwrap();
        for (op, exact, bound) in functions {
            let graph = one_op(op, &[DType::F32; 2], a.len(), vec![]).unwrap();
            let y = f32s(&run_on(&device, &graph, &[bytes_of(&a), bytes_of(&b)], true)[0]);
            for ((a, b), y) in a.iter().zip(&b).zip(y) {
                let exact = exact(*a as f64, *b as f64);
                let off = ulps(y, exact);
                assert!(
                    off <= bound,
                    "{op}({a:e}, {b:e}) = {y:e}, not {exact:e}: {off} ulp, {path}"
                );
                let signs =
                    y != 0.0 || exact != 0.0 || y.is_sign_negative() == exact.is_sign_negative();
                assert!(signs, "{op}({a:e}, {b:e}) = {y:e}, not {exact:e}");
            }
        }
        let graph = one_op("logaddexp", &[DType::F32; 2], a.len(), vec![]).unwrap();
        let y = f32s(&run_on(&device, &graph, &[bytes_of(&a), bytes_of(&b)], true)[0]);
        for ((a, b), y) in a.iter().zip(&b).zip(y) {
            let exact = if a.is_infinite() || b.is_infinite() {
                if a.is_nan() || b.is_nan() {
                    f64::NAN
                } else {
                    a.max(*b) as f64
                }
            } else {
                logaddexp(*a as f64, *b as f64)
            };
            // Where the sum cancels, what matters is the error of its parts.
            let near = (y as f64 - exact).abs() <= 3e-7;
            assert!(
                near || ulps(y, exact) <= 2.0,
                "logaddexp({a:e}, {b:e}) = {y:e}, not {exact:e}"
            );
        }
    }
}

#[test]
fn powers_are_accurate_at_all_sizes_and_equal_beside_any_neighbour() {
    // Results of all sizes, some beyond either end of the range; bases near 1 with large exponents among them.
    let mut next = numbers(23);
    let (mut a, mut b) = (vec![], vec![]);
    for i in 0..100_000 {
        let x = match i % 4 {
            0 => 1.0 + ((next() >> 40) as f32 / (1 << 24) as f32 - 0.5) / 64.0,
            1 => (next() >> 40) as f32 / (1 << 20) as f32 + 1e-4,
            _ => f32::from_bits((next() >> 33) as u32 % f32::INFINITY.to_bits()).max(1e-45),
        };
        let size = (next() >> 40) as f64 / (1 << 24) as f64 * 310.0 - 155.0;
        let y = size / libm::log2(x as f64);
        a.push(x);
        b.push(if y.is_finite() { y as f32 } else { 3.0 });
    }
    let graph = one_op("pow", &[DType::F32; 2], a.len(), vec![]).unwrap();
    let mut first: Option<Vec<f32>> = None;
    for path in CpuPath::available() {
        let device = CpuDevice::with_path(2, path).unwrap();
        let run = |a: &[f32], b: &[f32]| {
            f32s(&run_on(&device, &graph, &[bytes_of(a), bytes_of(b)], true)[0])
        };
        let y = run(&a, &b);
        for ((a, b), y) in a.iter().zip(&b).zip(&y) {
            let exact = libm::pow(*a as f64, *b as f64);
            let off = ulps(*y, exact);
            assert!(
                off <= 0.51,
                "pow({a:e}, {b:e}) = {y:e}, not {exact:e}: {off} ulp, {path}"
            );
        }
        let first = first.get_or_insert_with(|| y.clone());
        assert!(
            y.iter()
                .zip(first.iter())
                .all(|(y, z)| y.to_bits() == z.to_bits()),
            "{path}"
        );
        // What is special takes another road, and its neighbours with it.
        let (mut c, mut d) = (a.clone(), b.clone());
        for i in (0..c.len()).step_by(48) {
            (c[i], d[i]) = match i / 48 % 4 {
                0 => (-2.0, 3.0),
                1 => (0.0, 2.0),
                2 => (f32::NAN, 1.0),
                _ => (3.0, f32::INFINITY),
            };
        }
        for (i, (y, z)) in y.iter().zip(run(&c, &d)).enumerate() {
            assert!(i % 48 == 0 || y.to_bits() == z.to_bits(), "{path}, {i}");
        }
    }
}

#[test]
fn f64_and_half_types_follow_libm() {
    let mut next = numbers(11);
    let mut xs: Vec<f64> = (0..4_000)
        .map(|_| (next() >> 12) as f64 / (1u64 << 50) as f64 - 2.0)
        .collect();
    xs.extend((0..2_000).map(|_| f64::from_bits(next())));
    let x_bytes: Vec<u8> = xs.iter().flat_map(|v| v.to_ne_bytes()).collect();
    for (op, exact, bound) in FUNCTIONS {
        let graph = one_op(op, &[DType::F64], xs.len(), vec![]).unwrap();
        for (x, y) in xs
            .iter()
            .zip(f64s(&run(&graph, std::slice::from_ref(&x_bytes))[0]))
        {
            let exact = exact(*x);
            let equal = y == exact || y.is_nan() && exact.is_nan();
            let near = (y - exact).abs() <= exact.abs() * 4e-15;
            // The oracle's own bisection is good to some 1e-13 in the tails.
            let near = near || *op == "erfinv" && (y - exact).abs() <= exact.abs() * 1e-9;
            assert!(equal || near, "{op}({x:e}) = {y:e}, not {exact:e}");
        }
        // Every f16 number: computed in f32, rounded once.
        let graph = one_op(op, &[DType::F16], 1 << 16, vec![]).unwrap();
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
        let out = run(&graph, &[all]);
        for (bits, y) in out[0].as_chunks::<2>().0.iter().enumerate() {
            let x = f16::from_bits(bits as u16).to_f64();
            let y = f16::from_ne_bytes(*y);
            let exact = exact(x);
            let nearest = f16::from_f64(exact);
            let slack = f16::from_bits(2)
                .to_f64()
                .max(exact.abs() * 0.001 * bound.max(1.0));
            let same = y == nearest || y.is_nan() && nearest.is_nan();
            assert!(
                same || (y.to_f64() - exact).abs() <= slack,
                "{op}({x}) = {y}, not {exact}"
            );
        }
    }
}

// ---- every op on every dtype

const INTS: &[DType] = &[
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
];

fn is_signed(dtype: DType) -> bool {
    matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

/// The number of these low bits.
fn wrap(v: i128, dtype: DType) -> i128 {
    let bits = 8 * dtype.block_bytes() as u32;
    let low = v & ((1i128 << bits) - 1);
    match is_signed(dtype) && low >> (bits - 1) != 0 {
        true => low - (1i128 << bits),
        false => low,
    }
}

fn int_bytes(v: i128, dtype: DType) -> Vec<u8> {
    v.to_le_bytes()[..dtype.block_bytes()].to_vec()
}

/// Numbers worth trying: all of them for small types.
fn int_samples(dtype: DType) -> Vec<(i128, i128)> {
    let bits = 8 * dtype.block_bytes() as u32;
    let mut pairs = vec![];
    if bits == 8 {
        for a in 0..256 {
            for b in 0..256 {
                pairs.push((wrap(a, dtype), wrap(b, dtype)));
            }
        }
        return pairs;
    }
    let mut edges: Vec<i128> = (-5..=5).collect();
    for e in [bits - 1, bits, bits / 2, 7, 8] {
        edges.extend([-1, 0, 1].map(|d| (1i128 << e) + d));
        edges.extend([-1, 0, 1].map(|d| -(1i128 << e) + d));
    }
    edges.extend([bits as i128, bits as i128 - 1, bits as i128 + 1]);
    for a in &edges {
        pairs.extend(edges.iter().map(|b| (wrap(*a, dtype), wrap(*b, dtype))));
    }
    let mut next = numbers(bits as u64);
    for _ in 0..2000 {
        let (a, b) = (next() as i128, next() as i128 >> (next() % 64));
        pairs.push((wrap(a, dtype), wrap(b, dtype)));
    }
    pairs
}

fn floor_div(a: i128, b: i128) -> i128 {
    let q = a / b;
    if a % b != 0 && (a < 0) != (b < 0) {
        q - 1
    } else {
        q
    }
}

/// What an op gives for integers, as a number or a truth. `None`: it has none of them.
fn int_oracle(op: &str, a: i128, b: i128, dtype: DType) -> Option<Result<i128, bool>> {
    let bits = 8 * dtype.block_bytes() as i128;
    let inside = (0..bits).contains(&b);
    Some(match op {
        "neg" => Ok(-a),
        "abs" => Ok(a.abs()),
        "sign" => Ok(a.signum()),
        "square" => Ok(a.wrapping_mul(a)),
        "floor" | "ceil" | "round" | "trunc" => Ok(a),
        "bitwise_not" => Ok(!a),
        "logical_not" => Err(a == 0),
        "is_nan" | "is_inf" => Err(false),
        "is_finite" => Err(true),
        "add" => Ok(a + b),
        "sub" => Ok(a - b),
        "mul" => Ok(a.wrapping_mul(b)),
        "maximum" => Ok(a.max(b)),
        "minimum" => Ok(a.min(b)),
        "floor_divide" => Ok(if b == 0 { 0 } else { floor_div(a, b) }),
        "remainder" => Ok(if b == 0 { 0 } else { a - b * floor_div(a, b) }),
        "pow" if b < 0 => Ok(0),
        "pow" => {
            let (mut result, mut base, mut e) = (1i128, a, b);
            while e > 0 {
                if e % 2 == 1 {
                    result = wrap(result.wrapping_mul(base), dtype);
                }
                base = wrap(base.wrapping_mul(base), dtype);
                e /= 2;
            }
            Ok(result)
        }
        "equal" => Err(a == b),
        "not_equal" => Err(a != b),
        "less" => Err(a < b),
        "less_equal" => Err(a <= b),
        "greater" => Err(a > b),
        "greater_equal" => Err(a >= b),
        "logical_and" => Err(a != 0 && b != 0),
        "logical_or" => Err(a != 0 || b != 0),
        "logical_xor" => Err((a != 0) != (b != 0)),
        "bitwise_and" => Ok(a & b),
        "bitwise_or" => Ok(a | b),
        "bitwise_xor" => Ok(a ^ b),
        "left_shift" => Ok(if inside { a << b } else { 0 }),
        "right_shift" => Ok(match inside {
            true => a >> b,
            false => {
                if a < 0 {
                    -1
                } else {
                    0
                }
            }
        }),
        _ => return None,
    })
}

const UNARY: &[&str] = &[
    "neg",
    "abs",
    "sign",
    "square",
    "floor",
    "ceil",
    "round",
    "trunc",
    "bitwise_not",
    "logical_not",
    "is_nan",
    "is_inf",
    "is_finite",
];

const BINARY: &[&str] = &[
    "add",
    "sub",
    "mul",
    "maximum",
    "minimum",
    "floor_divide",
    "remainder",
    "pow",
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "logical_and",
    "logical_or",
    "logical_xor",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "left_shift",
    "right_shift",
    "div",
];

#[test]
fn integers_wrap_and_floor_as_the_contract_says() {
    for &dtype in INTS {
        let pairs = int_samples(dtype);
        let column = |f: fn(&(i128, i128)) -> i128| -> Vec<u8> {
            pairs.iter().flat_map(|p| int_bytes(f(p), dtype)).collect()
        };
        let columns = [column(|p| p.0), column(|p| p.1)];
        for (ops, arity) in [(UNARY, 1), (BINARY, 2)] {
            for op in ops {
                let graph = one_op(op, &vec![dtype; arity], pairs.len(), vec![]).unwrap();
                let out = run(&graph, &columns[..arity]);
                let width = out[0].len() / pairs.len();
                for ((a, b), got) in pairs.iter().zip(out[0].chunks(width)) {
                    let expected = match int_oracle(op, *a, *b, dtype) {
                        Some(Ok(v)) => int_bytes(wrap(v, dtype), dtype),
                        Some(Err(truth)) => vec![truth as u8],
                        None => (*a as f32 / *b as f32).to_ne_bytes().to_vec(), // div
                    };
                    let nan = *op == "div" && *a == 0 && *b == 0;
                    assert!(got == expected || nan, "{op}({a}, {b}) of {dtype}: {got:?}");
                }
            }
        }
    }
}

#[test]
fn bools_are_zero_or_one() {
    let columns = [vec![0, 0, 1, 1], vec![0, 1, 0, 1]];
    for (op, expected) in [
        ("maximum", [0, 1, 1, 1]),
        ("minimum", [0, 0, 0, 1]),
        ("equal", [1, 0, 0, 1]),
        ("not_equal", [0, 1, 1, 0]),
        ("less", [0, 1, 0, 0]),
        ("less_equal", [1, 1, 0, 1]),
        ("greater", [0, 0, 1, 0]),
        ("greater_equal", [1, 0, 1, 1]),
        ("logical_and", [0, 0, 0, 1]),
        ("logical_or", [0, 1, 1, 1]),
        ("logical_xor", [0, 1, 1, 0]),
        ("bitwise_and", [0, 0, 0, 1]),
        ("bitwise_or", [0, 1, 1, 1]),
        ("bitwise_xor", [0, 1, 1, 0]),
    ] {
        let graph = one_op(op, &[DType::Bool; 2], 4, vec![]).unwrap();
        assert_eq!(run(&graph, &columns)[0], expected, "{op}");
    }
    for (op, expected) in [
        ("logical_not", [1, 1, 0, 0]),
        ("bitwise_not", [1, 1, 0, 0]),
        ("is_finite", [1; 4]),
    ] {
        let graph = one_op(op, &[DType::Bool], 4, vec![]).unwrap();
        assert_eq!(run(&graph, &columns[..1])[0], expected, "{op}");
    }
}

/// What an op gives for floats of any width, computed in that width. `Err` is a truth.
macro_rules! float_oracle {
    ($t:ident) => {
        |op: &str, a: $t, b: $t| -> Option<Result<$t, bool>> {
            Some(match op {
                "neg" => Ok(-a),
                "abs" => Ok(a.abs()),
                "sign" if a.is_nan() || a == 0.0 => Ok(a),
                "sign" => Ok($t::signum(a)),
                "square" => Ok(a * a),
                "floor" => Ok(a.floor()),
                "ceil" => Ok(a.ceil()),
                "round" => Ok(a.round_ties_even()),
                "trunc" => Ok(a.trunc()),
                "logical_not" => Err(a == 0.0),
                "is_nan" => Err(a.is_nan()),
                "is_inf" => Err(a.is_infinite()),
                "is_finite" => Err(a.is_finite()),
                "add" => Ok(a + b),
                "sub" => Ok(a - b),
                "mul" => Ok(a * b),
                "div" => Ok(a / b),
                "maximum" | "minimum" if a.is_nan() || b.is_nan() => Ok($t::NAN),
                "maximum" => Ok(if a > b { a } else { b }),
                "minimum" => Ok(if a < b { a } else { b }),
                "floor_divide" => Ok((a / b).floor()),
                "remainder" => {
                    let r = a % b;
                    Ok(if r == 0.0 {
                        (0.0 as $t).copysign(b)
                    } else if (r < 0.0) != (b < 0.0) {
                        r + b
                    } else {
                        r
                    })
                }
                "equal" => Err(a == b),
                "not_equal" => Err(a != b),
                "less" => Err(a < b),
                "less_equal" => Err(a <= b),
                "greater" => Err(a > b),
                "greater_equal" => Err(a >= b),
                "logical_and" => Err(a != 0.0 && b != 0.0),
                "logical_or" => Err(a != 0.0 || b != 0.0),
                "logical_xor" => Err((a != 0.0) != (b != 0.0)),
                _ => return None,
            })
        }
    };
}

#[test]
fn floats_of_every_width_round_once_per_op() {
    let specials: &[f64] = &[
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        1.5,
        2.5,
        -2.5,
        3.0,
        -3.0,
        7.25,
        1e-7,
        6e-8,
        65_504.0,
        -65_504.0,
        1e30,
        -1e30,
        1e-40,
        5e-324,
        1e300,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
    ];
    let mut next = numbers(5);
    let mut pairs: Vec<(f64, f64)> = vec![];
    for a in specials {
        pairs.extend(specials.iter().map(|b| (*a, *b)));
    }
    for _ in 0..3000 {
        let mut number = || (next() >> 11) as f64 / (1u64 << 49) as f64 - 8.0;
        pairs.push((number(), number()));
    }
    let (of_f32, of_f64) = (float_oracle!(f32), float_oracle!(f64));
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        let encode = |v: f64| match dtype {
            DType::F16 => f16::from_f64(v).to_ne_bytes().to_vec(),
            DType::BF16 => bf16::from_f64(v).to_ne_bytes().to_vec(),
            DType::F32 => (v as f32).to_ne_bytes().to_vec(),
            _ => v.to_ne_bytes().to_vec(),
        };
        let decode = |b: &[u8]| match dtype {
            DType::F16 => f16::from_ne_bytes(b.try_into().unwrap()).to_f64(),
            DType::BF16 => bf16::from_ne_bytes(b.try_into().unwrap()).to_f64(),
            DType::F32 => f32::from_ne_bytes(b.try_into().unwrap()) as f64,
            _ => f64::from_ne_bytes(b.try_into().unwrap()),
        };
        let oracle = |op: &str, a: f64, b: f64| match dtype {
            DType::F64 => of_f64(op, a, b).map(|r| r.map(encode)),
            _ => of_f32(op, a as f32, b as f32).map(|r| {
                r.map(|v| match dtype {
                    DType::F16 => f16::from_f32(v).to_ne_bytes().to_vec(),
                    DType::BF16 => bf16::from_f32(v).to_ne_bytes().to_vec(),
                    _ => v.to_ne_bytes().to_vec(),
                })
            }),
        };
        let columns = [
            pairs.iter().flat_map(|p| encode(p.0)).collect::<Vec<u8>>(),
            pairs.iter().flat_map(|p| encode(p.1)).collect(),
        ];
        for (ops, arity) in [(UNARY, 1), (BINARY, 2)] {
            for op in ops {
                let Some(graph) = one_op(op, &vec![dtype; arity], pairs.len(), vec![]) else {
                    assert!(
                        op.starts_with("bitwise") || op.ends_with("shift"),
                        "{op} of {dtype}"
                    );
                    continue;
                };
                let out = run(&graph, &columns[..arity]);
                let width = out[0].len() / pairs.len();
                for (i, got) in out[0].chunks(width).enumerate() {
                    let at =
                        |c: &Vec<u8>| decode(&c[i * dtype.block_bytes()..][..dtype.block_bytes()]);
                    let (a, b) = (at(&columns[0]), at(&columns[1]));
                    let Some(expected) = oracle(op, a, b) else {
                        continue;
                    };
                    match expected {
                        Err(truth) => assert_eq!(got, [truth as u8], "{op}({a}, {b}) of {dtype}"),
                        Ok(bytes) => assert!(
                            got == bytes || decode(got).is_nan() && decode(&bytes).is_nan(),
                            "{op}({a:e}, {b:e}) of {dtype}: {:e}, not {:e}",
                            decode(got),
                            decode(&bytes)
                        ),
                    }
                }
            }
        }
    }
}

#[test]
fn casts_truncate_saturate_wrap_and_round_once() {
    let numbers: Vec<f64> = vec![
        0.0,
        -0.0,
        0.4,
        0.6,
        -0.6,
        1.0,
        -1.0,
        1.5,
        127.0,
        128.0,
        255.0,
        256.0,
        -128.0,
        -129.0,
        300.7,
        -300.7,
        65_535.0,
        65_536.0,
        2_147_483_648.0,
        -2_147_483_648.0,
        4_294_967_296.0,
        9.3e18,
        1.9e19,
        -1e19,
        1e300,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        1.000_488_281_25,
        1.000_488_281_250_001,
        1.000_488_281_249_999,
        2049.0,
        65_519.999,
        65_520.0,
        1e-8,
        1.003_906_25,
        1.003_906_250_000_01,
        3e-8,
    ];
    let ints: Vec<i64> = vec![
        0,
        1,
        -1,
        2,
        127,
        128,
        255,
        256,
        -128,
        -129,
        32_767,
        65_535,
        65_536,
        i64::MAX,
        i64::MIN,
        i32::MAX as i64,
        i32::MIN as i64,
        2049,
        2051,
        16_777_217,
        8_388_609,
        4_611_967_493_404_098_561,
        36_170_086_419_038_209,
        257,
        259,
    ];
    let cast = |from: DType, to: DType, bytes: Vec<u8>| {
        let n = bytes.len() / from.block_bytes();
        let graph = one_op("cast", &[from], n, vec![Attribute::DType(to)]).unwrap();
        run(&graph, &[bytes]).remove(0)
    };
    let from_f64: Vec<u8> = numbers.iter().flat_map(|v| v.to_ne_bytes()).collect();
    let from_f32: Vec<u8> = numbers
        .iter()
        .flat_map(|v| (*v as f32).to_ne_bytes())
        .collect();
    macro_rules! to_int {
        ($($t:ident $d:ident)*) => {$(
            let of64: Vec<u8> = numbers.iter().flat_map(|v| (*v as $t).to_ne_bytes()).collect();
            assert_eq!(cast(DType::F64, DType::$d, from_f64.clone()), of64, "f64 to {}", DType::$d);
            let of32: Vec<u8> = numbers.iter().flat_map(|v| (*v as f32 as $t).to_ne_bytes()).collect();
            assert_eq!(cast(DType::F32, DType::$d, from_f32.clone()), of32, "f32 to {}", DType::$d);
            let own: Vec<$t> = ints.iter().map(|v| *v as $t).collect();
            let bytes: Vec<u8> = own.iter().flat_map(|v| v.to_ne_bytes()).collect();
            for &to in INTS {
                let expected: Vec<u8> = own.iter().flat_map(|v| int_bytes(*v as i128, to)).collect();
                assert_eq!(cast(DType::$d, to, bytes.clone()), expected, "{} to {to}", DType::$d);
            }
            let f: Vec<u8> = own.iter().flat_map(|v| (*v as f32).to_ne_bytes()).collect();
            assert_eq!(cast(DType::$d, DType::F32, bytes.clone()), f);
            let f: Vec<u8> = own.iter().flat_map(|v| (*v as f64).to_ne_bytes()).collect();
            assert_eq!(cast(DType::$d, DType::F64, bytes.clone()), f);
            let truth: Vec<u8> = own.iter().map(|v| (*v != 0) as u8).collect();
            assert_eq!(cast(DType::$d, DType::Bool, bytes.clone()), truth);
            for to in [DType::F16, DType::BF16] {
                let got = cast(DType::$d, to, bytes.clone());
                for (v, got) in own.iter().zip(got.as_chunks::<2>().0) {
                    // The nearest of the two halves around, exactly.
                    let value = |bits: u16| match to {
                        DType::F16 => f16::from_bits(bits).to_f64(),
                        _ => bf16::from_bits(bits).to_f64(),
                    };
                    let bits = u16::from_ne_bytes(*got);
                    if value(bits).is_infinite() {
                        assert!((*v as f64).abs() >= 65_520.0, "{v} to {to}");
                        continue;
                    }
                    let off = |bits: u16| (value(bits) as i128 - *v as i128).abs();
                    for other in [bits.wrapping_sub(1), bits.wrapping_add(1)] {
                        if value(other).is_finite() && *v != 0 {
                            let tie = off(other) == off(bits) && bits % 2 == 0;
                            assert!(off(bits) < off(other) || tie, "{v} to {to}: {}", value(bits));
                        }
                    }
                }
            }
        )*};
    }
    to_int!(u8 U8 u16 U16 u32 U32 u64 U64 i8 I8 i16 I16 i32 I32 i64 I64);
    for to in [DType::F16, DType::BF16] {
        let got = cast(DType::F64, to, from_f64.clone());
        let value = |bits: u16| match to {
            DType::F16 => f16::from_bits(bits).to_f64(),
            _ => bf16::from_bits(bits).to_f64(),
        };
        let overflows = if to == DType::F16 { 65_520.0 } else { 3.396e38 };
        for (v, got) in numbers.iter().zip(got.as_chunks::<2>().0) {
            let bits = u16::from_ne_bytes(*got);
            let got = value(bits);
            if v.is_nan() || v.abs() >= overflows {
                assert!(
                    got.is_nan() && v.is_nan() || got == f64::INFINITY.copysign(*v),
                    "{v:e} to {to}"
                );
                continue;
            }
            assert_eq!(
                got.is_sign_negative(),
                v.is_sign_negative(),
                "{v:e} to {to}"
            );
            let off = |bits: u16| (value(bits) - v).abs();
            for other in [bits.wrapping_sub(1), bits.wrapping_add(1)] {
                let tie = off(other) == off(bits) && bits % 2 == 0;
                let near = off(bits) < off(other) || tie || !value(other).is_finite();
                assert!(near, "{v:e} to {to}: {got:e}");
            }
        }
    }
    let truth: Vec<u8> = numbers.iter().map(|v| (*v != 0.0) as u8).collect();
    assert_eq!(cast(DType::F64, DType::Bool, from_f64.clone()), truth);
    // Complex numbers: the real part, or whether there is anything.
    let c64 = bytes_of(&[1.5, 9.0, 0.0, 2.0, -0.0, 0.0]);
    assert_eq!(
        cast(DType::C64, DType::F32, c64.clone()),
        bytes_of(&[1.5, 0.0, -0.0])
    );
    assert_eq!(cast(DType::C64, DType::I8, c64.clone()), [1, 0, 0]);
    assert_eq!(cast(DType::C64, DType::Bool, c64), [1, 1, 0]);
    assert_eq!(
        cast(DType::Bool, DType::C64, vec![0, 1]),
        bytes_of(&[0.0, 0.0, 1.0, 0.0])
    );
    assert_eq!(
        cast(DType::Bool, DType::I64, vec![0, 1])[8..],
        [1, 0, 0, 0, 0, 0, 0, 0]
    );
}

#[test]
fn complex_numbers_have_the_field_ops() {
    let (a, b) = (
        bytes_of(&[1.0, 2.0, 0.0, 0.0, 3.0, -4.0]),
        bytes_of(&[3.0, -1.0, 0.0, 0.0, 0.0, 2.0]),
    );
    for (op, expected) in [
        ("add", [4.0, 1.0, 0.0, 0.0, 3.0, -2.0]),
        ("sub", [-2.0, 3.0, 0.0, 0.0, 3.0, -6.0]),
        ("mul", [5.0, 5.0, 0.0, 0.0, 8.0, 6.0]),
        ("div", [0.1, 0.7, f32::NAN, f32::NAN, -2.0, -1.5]),
    ] {
        let graph = one_op(op, &[DType::C64; 2], 3, vec![]).unwrap();
        let y = f32s(&run(&graph, &[a.clone(), b.clone()])[0]);
        let same = |(y, e): (&f32, &f32)| y == e || y.is_nan() && e.is_nan();
        assert!(y.iter().zip(&expected).all(same), "{op}: {y:?}");
    }
    for (op, expected) in [("equal", [0, 1, 0]), ("not_equal", [1, 0, 1])] {
        let graph = one_op(op, &[DType::C64; 2], 3, vec![]).unwrap();
        assert_eq!(run(&graph, &[a.clone(), b.clone()])[0], expected, "{op}");
    }
    for (op, expected) in [
        ("neg", vec![-1.0, -2.0, -0.0, -0.0, -3.0, 4.0]),
        ("square", vec![-3.0, 4.0, 0.0, 0.0, -7.0, -24.0]),
        ("abs", vec![5f32.sqrt(), 0.0, 5.0]),
    ] {
        let graph = one_op(op, &[DType::C64], 3, vec![]).unwrap();
        assert_eq!(
            f32s(&run(&graph, std::slice::from_ref(&a))[0]),
            expected,
            "{op}"
        );
    }
    let graph = one_op("reciprocal", &[DType::C64], 1, vec![]).unwrap();
    assert_eq!(f32s(&run(&graph, &[bytes_of(&[0.0, 2.0])])[0]), [0.0, -0.5]);
}

#[test]
fn silu_and_swiglu_keep_their_bits() {
    let mut next = numbers(2);
    let x: Vec<f32> = (0..5000)
        .map(|_| (next() >> 40) as f32 / (1 << 18) as f32 - 32.0)
        .collect();
    let silu = |x: f32| x / (1.0 + lanes::exp(-x));
    let graph = one_op("silu", &[DType::F32], x.len(), vec![]).unwrap();
    let expected: Vec<f32> = x.iter().map(|x| silu(*x)).collect();
    assert_eq!(run(&graph, &[bytes_of(&x)])[0], bytes_of(&expected));
    let graph = one_op("swiglu", &[DType::F32; 2], x.len(), vec![]).unwrap();
    let up: Vec<f32> = x.iter().rev().copied().collect();
    let expected: Vec<f32> = x.iter().zip(&up).map(|(x, u)| silu(*x) * u).collect();
    assert_eq!(
        run(&graph, &[bytes_of(&x), bytes_of(&up)])[0],
        bytes_of(&expected)
    );
}

/// Numbers of every size, and what is special.
fn all_sizes(seed: u64, count: usize) -> Vec<f32> {
    let mut next = numbers(seed);
    let mut all = vec![
        0.0,
        -0.0,
        1.0,
        -1.0,
        1e-45,
        -1e-40,
        88.4,
        -88.4,
        88.6,
        -88.6,
        88.75,
        -88.75,
        89.1,
        -89.1,
        104.1,
        -104.1,
        1000.0,
        -1000.0,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    while all.len() < count {
        all.push(f32::from_bits(next() as u32));
        all.push((next() >> 40) as f32 / (1 << 20) as f32 - 8.0);
        all.push((next() >> 40) as f32 / (1 << 15) as f32 - 256.0);
    }
    all
}

#[test]
fn silu_has_the_bits_of_the_shared_exponential_everywhere() {
    let x = all_sizes(12, 300_000);
    let graph = one_op("silu", &[DType::F32], x.len(), vec![]).unwrap();
    for path in CpuPath::available() {
        let device = CpuDevice::with_path(2, path).unwrap();
        let y = f32s(&run_on(&device, &graph, &[bytes_of(&x)], true)[0]);
        for (x, y) in x.iter().zip(y) {
            let expected = x / (1.0 + lanes::exp(-x));
            let same = y.to_bits() == expected.to_bits() || y.is_nan() && expected.is_nan();
            assert!(same, "silu({x:e}) = {y:e}, not {expected:e}, {path}");
        }
    }
}

#[test]
fn remainders_are_exact_for_quotients_of_every_size() {
    let mut next = numbers(21);
    let (mut a, mut b) = (all_sizes(22, 3000), all_sizes(23, 3000));
    let specials = all_sizes(0, 0);
    for x in &specials {
        a.extend(specials.iter().map(|_| *x));
        b.extend(&specials);
    }
    for _ in 0..100_000 {
        // Quotients around whole numbers up to 2^26, and around the halves where the nearest one changes.
        let divisor = f32::from_bits((next() as u32 & 0x807f_ffff) | 0x3f80_0000);
        let whole = (next() >> 40) as f32 * [1.0, 1.0 / 4096.0, 4.0][next() as usize % 3];
        let near = divisor * (whole.trunc() + [0.0, 0.5][next() as usize % 2]);
        let near = f32::from_bits(near.to_bits().wrapping_add((next() % 5) as u32));
        a.push(if next().is_multiple_of(2) {
            near
        } else {
            -near
        });
        b.push(divisor);
    }
    let floored = |a: f64, b: f64| {
        let r = libm::fmod(a, b);
        r + if r != 0.0 && (r < 0.0) != (b < 0.0) {
            b
        } else {
            0.0
        }
    };
    for path in CpuPath::available() {
        let device = CpuDevice::with_path(2, path).unwrap();
        let graph = one_op("remainder", &[DType::F32; 2], a.len(), vec![]).unwrap();
        let y = f32s(&run_on(&device, &graph, &[bytes_of(&a), bytes_of(&b)], true)[0]);
        for ((a, b), y) in a.iter().zip(&b).zip(y) {
            // f64 has room for the sum of what two f32 leave, unless one is lost in the other.
            let expected = floored(*a as f64, *b as f64) as f32;
            assert!(
                y == expected || y.is_nan() && expected.is_nan(),
                "{a:e} mod {b:e} = {y:e}, not {expected:e}, {path}"
            );
            let signs = y != 0.0 || y.is_sign_negative() == b.is_sign_negative();
            assert!(signs, "{a:e} mod {b:e} = {y:e}");
        }
        let wide = |v: &[f32], by: f64| -> Vec<u8> {
            let number = |x: &f32| (*x as f64 * by).to_ne_bytes();
            v.iter().flat_map(number).collect()
        };
        let columns = [wide(&a, 1.1e12), wide(&b, 0.9)];
        let graph = one_op("remainder", &[DType::F64; 2], a.len(), vec![]).unwrap();
        let y = f64s(&run_on(&device, &graph, &columns, true)[0]);
        for ((a, b), y) in f64s(&columns[0]).iter().zip(f64s(&columns[1])).zip(y) {
            let expected = floored(*a, b);
            assert!(
                y == expected || y.is_nan() && expected.is_nan(),
                "{a:e} mod {b:e} = {y:e}, not {expected:e}, {path}"
            );
        }
    }
}

#[test]
fn composite_instructions_have_the_bits_of_their_parts() {
    let n = 20_000;
    let columns = [all_sizes(31, n), all_sizes(32, n), all_sizes(33, n)];
    let cases: [(&str, usize, Vec<Attribute>); 9] = [
        ("gelu", 1, vec![]),
        ("gelu_tanh", 1, vec![]),
        ("gelu_quick", 1, vec![]),
        ("softplus", 1, vec![]),
        ("swiglu", 2, vec![]),
        ("geglu", 2, vec![]),
        (
            "swiglu_limit",
            2,
            vec![Attribute::Float(1.702), Attribute::Float(7.0)],
        ),
        ("clamp", 3, vec![]),
        (
            "is_close",
            2,
            vec![
                Attribute::Float(1e-1),
                Attribute::Float(1e-2),
                Attribute::Bool(false),
            ],
        ),
    ];
    for (op, arity, attributes) in cases {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let encode = |v: &f32| match dtype {
                DType::F16 => f16::from_f32(*v).to_ne_bytes().to_vec(),
                DType::BF16 => bf16::from_f32(*v).to_ne_bytes().to_vec(),
                _ => v.to_ne_bytes().to_vec(),
            };
            let column = |v: &Vec<f32>| v[..n].iter().flat_map(encode).collect::<Vec<u8>>();
            let inputs: Vec<Vec<u8>> = columns[..arity].iter().map(column).collect();
            let graph = |parts: bool| {
                let mut g = GraphBuilder::new(0);
                let x: Vec<Value> = (0..arity)
                    .map(|i| g.tensor(format!("x{i}"), spec(dtype, &[n])).unwrap())
                    .collect();
                let row = find(op).unwrap();
                let y = match parts {
                    true => row.decompose.unwrap()(&mut g, &x, &attributes).unwrap(),
                    false => g.apply(row, x, attributes.clone()).unwrap(),
                };
                g.finish(&y).unwrap()
            };
            for path in CpuPath::available() {
                let device = CpuDevice::with_path(2, path).unwrap();
                let whole = run_on(&device, &graph(false), &inputs, true);
                let parts = run_on(&device, &graph(true), &inputs, true);
                let width = whole[0].len() / n;
                let pairs = whole[0].chunks(width).zip(parts[0].chunks(width));
                for (i, (whole, parts)) in pairs.enumerate() {
                    let nan = |bytes: &[u8]| match (dtype, width) {
                        (DType::F32, 4) => f32s(bytes)[0].is_nan(),
                        (DType::F16, 2) => f16::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
                        (DType::BF16, 2) => bf16::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
                        _ => false,
                    };
                    let at: Vec<f32> = columns[..arity].iter().map(|c| c[i]).collect();
                    assert!(
                        whole == parts || nan(whole) && nan(parts),
                        "{op} of {dtype} at {at:?} on {path}: {whole:?}, not {parts:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn half_types_are_f32_rounded_once_at_every_place_of_a_vector() {
    let unary = [
        "neg",
        "abs",
        "square",
        "sqrt",
        "exp",
        "tanh",
        "sigmoid",
        "silu",
        "gelu_tanh",
    ];
    let binary = [
        "add", "sub", "mul", "div", "maximum", "minimum", "swiglu", "geglu",
    ];
    let with_arity = |n: usize, ops: &[&'static str]| -> Vec<(&'static str, usize)> {
        ops.iter().map(|op| (*op, n)).collect()
    };
    let mut next = numbers(41);
    let left: Vec<u16> = (0..=u16::MAX).chain(0..7).collect();
    let right: Vec<u16> = left.iter().map(|_| next() as u16).collect();
    let column = |v: &[u16]| v.iter().flat_map(|b| b.to_ne_bytes()).collect::<Vec<u8>>();
    for dtype in [DType::F16, DType::BF16] {
        let widen = |b: u16| match dtype {
            DType::F16 => f16::from_bits(b).to_f32(),
            _ => bf16::from_bits(b).to_f32(),
        };
        let narrow = |x: f32| match dtype {
            DType::F16 => f16::from_f32(x).to_bits(),
            _ => bf16::from_f32(x).to_bits(),
        };
        for (op, arity) in [with_arity(1, &unary), with_arity(2, &binary)].concat() {
            let columns = [&left, &right];
            let wide: Vec<Vec<u8>> = columns[..arity]
                .iter()
                .map(|c| bytes_of(&c.iter().map(|b| widen(*b)).collect::<Vec<f32>>()))
                .collect();
            let graph = one_op(op, &vec![DType::F32; arity], left.len(), vec![]).unwrap();
            let expected: Vec<u16> = f32s(&run(&graph, &wide)[0])
                .into_iter()
                .map(narrow)
                .collect();
            for path in CpuPath::available() {
                // Parts of one thread, of two, and ends that fill no vector.
                for (threads, from, n) in [(1, 0, left.len()), (2, 0, left.len()), (1, 1003, 37)] {
                    let device = CpuDevice::with_path(threads, path).unwrap();
                    let graph = one_op(op, &vec![dtype; arity], n, vec![]).unwrap();
                    let inputs: Vec<Vec<u8>> = columns[..arity]
                        .iter()
                        .map(|c| column(&c[from..from + n]))
                        .collect();
                    let got = run_on(&device, &graph, &inputs, true);
                    let pairs = got[0].as_chunks::<2>().0.iter().zip(&expected[from..]);
                    for (i, (got, expected)) in pairs.enumerate() {
                        let got = u16::from_ne_bytes(*got);
                        let nan = widen(got).is_nan() && widen(*expected).is_nan();
                        assert!(
                            got == *expected || nan,
                            "{op}({:e}, {:e}) of {dtype} on {path}: {got:#x}, not {expected:#x}",
                            widen(left[from + i]),
                            widen(right[from + i])
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn pairs_of_instructions_round_twice_and_keep_what_is_wanted() {
    let n = 5000;
    let columns = [all_sizes(51, n), all_sizes(52, n), all_sizes(53, n)];
    let inputs: Vec<Vec<u8>> = columns.iter().map(|c| bytes_of(&c[..n])).collect();
    type Second = fn(&mut GraphBuilder, Value, Value) -> Value;
    let seconds: [Second; 7] = [
        |g, t, c| g.add(t, c).unwrap(),
        |g, t, c| g.add(c, t).unwrap(),
        |g, t, c| g.sub(t, c).unwrap(),
        |g, t, c| g.sub(c, t).unwrap(),
        |g, t, c| g.mul(t, c).unwrap(),
        |g, t, _| g.abs(t).unwrap(),
        |g, t, _| g.mul(t, t).unwrap(),
    ];
    for first in ["add", "sub", "mul"] {
        for second in seconds {
            // With the first's result wanted, too, and without.
            for outputs in [1, 2] {
                let mut g = GraphBuilder::new(0);
                let x: Vec<Value> = (0..3)
                    .map(|i| g.tensor(format!("x{i}"), spec(DType::F32, &[n])).unwrap())
                    .collect();
                let t = g
                    .apply(find(first).unwrap(), x[..2].to_vec(), vec![])
                    .unwrap();
                let y = second(&mut g, t[0], x[2]);
                let graph = g.finish(&[y, t[0]][..outputs]).unwrap();
                for path in CpuPath::available() {
                    let device = CpuDevice::with_path(2, path).unwrap();
                    let expected = run_on(&device, &graph, &inputs, false);
                    assert!(
                        run_on(&device, &graph, &inputs, true) == expected,
                        "{first} and another on {path}"
                    );
                }
            }
        }
    }
}

#[test]
fn chains_round_at_every_link() {
    let mut next = numbers(61);
    for round in 0..120 {
        let n = [1, 15, 64, 127, 128, 129, 1000, 5000][round % 8];
        let inputs: Vec<Vec<u8>> = (0..4)
            .map(|i| bytes_of(&all_sizes(71 + i, n)[..n]))
            .collect();
        let mut g = GraphBuilder::new(0);
        let mut values: Vec<Value> = (0..4)
            .map(|i| g.tensor(format!("x{i}"), spec(DType::F32, &[n])).unwrap())
            .collect();
        let mut last = values[0];
        for _ in 0..2 + next() as usize % 12 {
            let op = ["add", "sub", "mul", "div", "abs", "neg", "maximum"][next() as usize % 7];
            // Mostly what was made last, so that chains get long; on either side.
            let other = values[next() as usize % values.len()];
            let operands = match (op, next() % 2) {
                ("abs" | "neg", _) => vec![last],
                (_, 0) => vec![last, other],
                _ => vec![other, last],
            };
            last = g.apply(find(op).unwrap(), operands, vec![]).unwrap()[0];
            values.push(last);
        }
        let some = values[4 + next() as usize % (values.len() - 4)];
        let graph = g.finish(&[last, some]).unwrap();
        for path in CpuPath::available() {
            let device = CpuDevice::with_path(2, path).unwrap();
            // Of two NaNs, which one's bits a sum has is the compiler's choice.
            let bits = |fused| -> Vec<u32> {
                let outputs = run_on(&device, &graph, &inputs, fused);
                let values = outputs.iter().flat_map(|o| f32s(o));
                let quiet = |v: f32| if v.is_nan() { f32::NAN } else { v };
                values.map(|v| quiet(v).to_bits()).collect()
            };
            assert!(
                bits(true) == bits(false),
                "round {round} on {path}: {graph:?}"
            );
        }
    }
}

// ---- broadcasting

/// Element of an operand for element `at` of the result, by NumPy's rule.
fn source(at: usize, result: &[usize], operand: &[usize]) -> usize {
    let (mut rest, mut from, mut stride) = (at, 0, 1);
    for (back, size) in result.iter().rev().enumerate() {
        let place = rest % size;
        rest /= size;
        if let Some(axis) = operand.len().checked_sub(back + 1) {
            from += if operand[axis] == 1 {
                0
            } else {
                place * stride
            };
            stride *= operand[axis];
        }
    }
    from
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn operands_broadcast(
        sizes in prop::collection::vec(1usize..40, 0..4),
        ones in prop::collection::vec(any::<[bool; 3]>(), 4),
        shorter in any::<[bool; 3]>(),
        symbolic in any::<bool>(),
    ) {
        let dims: Vec<Vec<usize>> = (0..3).map(|o| {
            let full: Vec<usize> = sizes.iter().zip(&ones).map(|(n, one)| if one[o] { 1 } else { *n }).collect();
            if shorter[o] && !full.is_empty() { full[1..].to_vec() } else { full }
        }).collect();
        let rank = dims.iter().map(Vec::len).max().unwrap();
        let result: Vec<usize> = (0..rank).map(|axis| {
            dims.iter().map(|d| (axis + d.len()).checked_sub(rank).map_or(1, |i| d[i])).max().unwrap()
        }).collect();
        let n: usize = result.iter().product();
        // Where the outermost axis is real, it may as well be the row dimension.
        let rows = if symbolic && rank > 0 { result[0] } else { 0 };
        let shape = |d: &Vec<usize>| match rows > 1 && d.len() == rank && d[0] == rows {
            true => Shape::rows(&d[1..]).unwrap(),
            false => Shape::fixed(d).unwrap(),
        };
        let mut g = GraphBuilder::new(rows);
        let mut tensor = |name: &str, dtype, d: &Vec<usize>| g.tensor(name, TensorSpec::new(dtype, shape(d)).unwrap()).unwrap();
        let c = tensor("c", DType::Bool, &dims[0]);
        let (a, b) = (tensor("a", DType::I16, &dims[1]), tensor("b", DType::I16, &dims[2]));
        let y = g.where_(c, a, b).unwrap();
        let z = g.sub(b, y).unwrap();
        let graph = g.finish(&[y, z]).unwrap();
        let count = |o: usize| dims[o].iter().product::<usize>();
        let c: Vec<u8> = (0..count(0)).map(|i| (i * 7 % 3 == 0) as u8).collect();
        let a: Vec<i16> = (0..count(1)).map(|i| i as i16).collect();
        let b: Vec<i16> = (0..count(2)).map(|i| -1 - i as i16).collect();
        let bytes = |v: &[i16]| v.iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<u8>>();
        let out = run(&graph, &[c.clone(), bytes(&a), bytes(&b)]);
        let y: Vec<i16> = (0..n).map(|i| {
            let at = |o: usize| source(i, &result, &dims[o]);
            if c[at(0)] != 0 { a[at(1)] } else { b[at(2)] }
        }).collect();
        let z: Vec<i16> = (0..n).map(|i| b[source(i, &result, &dims[2])].wrapping_sub(y[i])).collect();
        prop_assert_eq!(&out[0], &bytes(&y));
        prop_assert_eq!(&out[1], &bytes(&z));
    }
}

#[test]
fn long_rows_and_columns_broadcast() {
    for (rows, columns) in [(3, 5000), (5000, 3), (1, 7000), (200, 1000)] {
        let mut g = GraphBuilder::new(0);
        let x = g.tensor("x", spec(DType::F32, &[rows, columns])).unwrap();
        let r = g.tensor("r", spec(DType::F32, &[columns])).unwrap();
        let c = g.tensor("c", spec(DType::F32, &[rows, 1])).unwrap();
        let s = g.tensor("s", spec(DType::F32, &[])).unwrap();
        let y = g.add(x, r).unwrap();
        let y = g.mul(y, c).unwrap();
        let y = g.sub(s, y).unwrap();
        let graph = g.finish(&[y]).unwrap();
        let values =
            |n: usize, k: usize| (0..n).map(|i| (i * k % 1013) as f32).collect::<Vec<f32>>();
        let (x, r, c) = (
            values(rows * columns, 7),
            values(columns, 3),
            values(rows, 5),
        );
        let out = run(
            &graph,
            &[bytes_of(&x), bytes_of(&r), bytes_of(&c), bytes_of(&[0.5])],
        );
        for (i, y) in f32s(&out[0]).iter().enumerate() {
            let expected = 0.5 - (x[i] + r[i % columns]) * c[i / columns];
            assert_eq!(*y, expected, "{rows}×{columns}, {i}");
        }
    }
}

// ---- fusion, threads, slices, outputs

/// A random graph of ops of several dtypes and shapes, with reshapes, matrix products and many outputs.
fn random_graph(choices: &[(u8, u16, u16)]) -> Graph {
    let mut g = GraphBuilder::new(0);
    let mut floats: Vec<Value> = vec![];
    for (i, dims) in [vec![6usize, 40], vec![40], vec![6, 1], vec![]]
        .iter()
        .enumerate()
    {
        floats.push(g.tensor(format!("x{i}"), spec(DType::F32, dims)).unwrap());
    }
    let w = g.constant("w", spec(DType::F32, &[40, 40])).unwrap();
    let wide = |g: &GraphBuilder, v: Value| matches!(g.spec(v), Ok(s) if s.to_string().ends_with("[6, 40]"));
    let mut outputs = vec![];
    for &(kind, a, b) in choices {
        let number = b;
        let (a, b) = (
            floats[a as usize % floats.len()],
            floats[b as usize % floats.len()],
        );
        let y = match kind % 15 {
            0 => g.add(a, b),
            1 => g.mul(a, b),
            2 => g.maximum(a, b),
            3 => g.tanh(a),
            4 => g.sigmoid(a),
            5 => {
                let less = g.less(a, b).unwrap();
                g.where_(less, a, b)
            }
            6 => {
                let h = g.cast(a, DType::F16).unwrap();
                let h = g.square(h).unwrap();
                let h = g.sin(h).unwrap();
                g.cast(h, DType::F32)
            }
            7 => {
                let i = g.cast(a, DType::I32).unwrap();
                let j = g.cast(b, DType::I32).unwrap();
                let i = g.bitwise_xor(i, j).unwrap();
                g.cast(i, DType::F32)
            }
            8 if wide(&g, a) => g.mul_mat(a, w),
            9 if wide(&g, a) => {
                let r = g.reshape(a, Shape::fixed(&[240]).unwrap()).unwrap();
                let r = g.neg(r).unwrap();
                g.reshape(r, Shape::fixed(&[6, 40]).unwrap())
            }
            10 => {
                outputs.push(a);
                g.sub(a, b)
            }
            11 => {
                let h = g.cast(a, DType::BF16).unwrap();
                let h = g.exp(h).unwrap();
                outputs.push(h);
                g.cast(h, DType::F32)
            }
            12 => {
                let data = (number.min(9) as f32 - 4.5).to_le_bytes();
                let dims = &[1, 1][..number as usize % 3];
                let scalar = Shape::fixed(dims).unwrap();
                let scalar = g.literal(DType::F32, scalar, &data).unwrap();
                if number % 4 == 0 {
                    outputs.push(scalar);
                }
                g.div(a, scalar)
            }
            13 => {
                let wide = g.broadcast_to(a, Shape::fixed(&[6, 40]).unwrap()).unwrap();
                g.add(wide, b)
            }
            _ => g.erf(a),
        };
        floats.push(y.unwrap());
    }
    outputs.push(*floats.last().unwrap());
    outputs.push(floats[0]);
    g.finish(&outputs).unwrap()
}

fn random_inputs() -> Vec<Vec<u8>> {
    let mut next = numbers(1);
    let mut values = |n: usize, scale: f32| -> Vec<u8> {
        let number = |_| ((next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale;
        bytes_of(&(0..n).map(number).collect::<Vec<f32>>())
    };
    vec![
        values(240, 3.0),
        values(40, 3.0),
        values(6, 3.0),
        values(1, 3.0),
        values(1600, 0.2),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn fusion_threads_and_slices_change_no_bit(
        choices in prop::collection::vec(any::<(u8, u16, u16)>(), 1..90),
    ) {
        let (graph, inputs) = (random_graph(&choices), random_inputs());
        let device = |threads| CpuDevice::with_path(threads, CpuPath::detect()).unwrap();
        let expected = run_on(&device(1), &graph, &inputs, false);
        prop_assert_eq!(&run_on(&device(1), &graph, &inputs, true), &expected);
        prop_assert_eq!(&run_on(&device(3), &graph, &inputs, true), &expected);
        let two = device(2);
        let (mut plan, outputs) = bound(&two, &graph, &inputs, true);
        let (mut from, mut slices) = (0, 0);
        while let Some(next) = plan.execute_from(0, from, &|| true).unwrap() {
            prop_assert!(next > from);
            from = next;
            slices += 1;
        }
        prop_assert_eq!(&contents(&outputs), &expected);
        prop_assert!(slices >= plan.memory().barriers);
    }
}

/// Short fused kernels take smaller tiles of operands that no cache holds.
#[test]
fn what_no_cache_holds_has_the_same_bits() {
    let n = (3 << 19) + 81;
    let mut next = numbers(29);
    let x: Vec<u8> = (0..n)
        .flat_map(|_| (next() as i32 >> 20).to_ne_bytes())
        .collect();
    let y: Vec<u8> = (0..n)
        .flat_map(|_| (next() as u16 & 0xbfff).to_ne_bytes())
        .collect();
    let row: Vec<f32> = (0..11).map(|i| i as f32 / 3.0).collect();
    let mut g = GraphBuilder::new(0);
    let long = g.tensor("x", spec(DType::I32, &[n / 11, 11])).unwrap();
    let half = g.tensor("y", spec(DType::BF16, &[n / 11, 11])).unwrap();
    let short = g.tensor("row", spec(DType::F32, &[11])).unwrap();
    let silu = g.silu(long).unwrap();
    let wide = g.cast(half, DType::F32).unwrap();
    let sum = g.add(wide, short).unwrap();
    let graph = g.finish(&[silu, sum]).unwrap();
    let inputs = [x, y, bytes_of(&row)];
    let device = |threads| CpuDevice::with_path(threads, CpuPath::detect()).unwrap();
    let expected = run_on(&device(1), &graph, &inputs, false);
    for threads in [1, 2] {
        let got = run_on(&device(threads), &graph, &inputs, true);
        assert!(got == expected, "{threads} threads");
    }
}

#[test]
fn a_pause_is_asked_for_only_between_steps_and_obeyed() {
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[6, 40])).unwrap();
    let w = g.constant("w", spec(DType::F32, &[40, 40])).unwrap();
    let mut y = x;
    for _ in 0..10 {
        y = g.mul_mat(y, w).unwrap();
        y = g.sub(x, y).unwrap();
    }
    let graph = g.finish(&[y]).unwrap();
    let inputs = random_inputs();
    let inputs = [inputs[0].clone(), inputs[4].clone()];
    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
    let (mut plan, outputs) = bound(&device, &graph, &inputs, true);
    let asked = Cell::new(0);
    let never = || {
        asked.set(asked.get() + 1);
        false
    };
    assert_eq!(plan.execute_from(0, 0, &never).unwrap(), None);
    assert!(asked.get() >= plan.memory().barriers && plan.memory().barriers > 2);
    let expected = contents(&outputs);
    let third = Cell::new(0);
    let at_third = || {
        third.set(third.get() + 1);
        third.get() == 3
    };
    let next = plan.execute_from(0, 0, &at_third).unwrap().unwrap();
    assert_eq!(third.get(), 3);
    assert_eq!(plan.execute_from(0, next, &|| false).unwrap(), None);
    assert_eq!(contents(&outputs), expected);
    let steps = plan.memory().steps;
    assert_eq!(plan.execute_from(0, steps, &|| true).unwrap(), None);
    assert!(plan.execute_from(0, steps + 1, &|| true).is_err());
}

#[test]
fn what_follows_an_index_outside_is_not_run() {
    let mut g = GraphBuilder::new(0);
    let table = g.constant("table", spec(DType::F32, &[3, 4])).unwrap();
    let at = g.tensor("at", spec(DType::I32, &[2])).unwrap();
    let rows = g.get_rows(table, at).unwrap();
    let zeros = zeros_like_a_row(&mut g, table);
    let y = g.sub(rows, zeros).unwrap();
    let graph = g.finish(&[y]).unwrap();
    let table = bytes_of(&[1.0; 12]);
    for (index, expected) in [(1i32, 1.0f32), (3, 7.0)] {
        let indices: Vec<u8> = [0, index].iter().flat_map(|i| i.to_ne_bytes()).collect();
        let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
        let (mut plan, outputs) = bound(&device, &graph, &[table.clone(), indices], true);
        outputs[0].0.write(0, &bytes_of(&[7.0; 8])).unwrap();
        assert_eq!(plan.execute(0).is_err(), index == 3);
        assert_eq!(f32s(&contents(&outputs)[0]), [expected; 8]);
    }
}

/// Zeros as wide as a row of the table.
fn zeros_like_a_row(g: &mut GraphBuilder, table: Value) -> Value {
    let row = g.slice(table, &[0, 0], &[1, 4], &[1, 1]).unwrap();
    g.sub(row, row).unwrap()
}

#[test]
fn outputs_may_be_inputs_aliases_and_the_same_twice() {
    let mut g = GraphBuilder::new(4);
    let rows = |n: &[usize]| Shape::rows(n).unwrap();
    let x = g
        .tensor("x", TensorSpec::new(DType::F16, rows(&[6])).unwrap())
        .unwrap();
    let flat = g.reshape(x, rows(&[2, 3])).unwrap();
    let y = g.neg(x).unwrap();
    let y_flat = g.reshape(y, rows(&[3, 2])).unwrap();
    let graph = g.finish(&[x, flat, y, y_flat, y]).unwrap();
    let values: Vec<f16> = (0..24).map(|i| f16::from_f32(i as f32)).collect();
    let bytes = |negative: bool, n: usize| -> Vec<u8> {
        let sign = if negative { -1.0 } else { 1.0 };
        values[..n]
            .iter()
            .flat_map(|v| f16::from_f32(v.to_f32() * sign).to_ne_bytes())
            .collect()
    };
    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
    let (mut plan, outputs) = bound(&device, &graph, &[bytes(false, 24)], true);
    plan.execute(3).unwrap();
    for (i, out) in contents(&outputs).iter().enumerate() {
        assert_eq!(out[..36], bytes(i > 1, 18), "output {i}");
        assert_eq!(
            out[36..],
            [0; 12],
            "output {i} has rows that were not asked for"
        );
    }
}

#[test]
fn plans_of_many_nodes_are_made_and_right() {
    // Sixteen thousand nodes that know nothing of each other.
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::I32, &[16])).unwrap();
    let mut outputs = vec![];
    for _ in 0..8_000 {
        let y = g.add(x, x).unwrap();
        outputs.push(g.neg(y).unwrap());
    }
    let graph = g.finish(&outputs).unwrap();
    let one: Vec<u8> = (0..16i32).flat_map(i32::to_ne_bytes).collect();
    let expected: Vec<u8> = (0..16i32).flat_map(|i| (-2 * i).to_ne_bytes()).collect();
    assert!(
        run(&graph, std::slice::from_ref(&one))
            .iter()
            .all(|y| *y == expected)
    );
    // And a chain of thirty thousand, with a matrix product now and then.
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[4, 4])).unwrap();
    let mut y = x;
    for i in 0..30_000 {
        y = if i % 100 == 99 {
            g.mul_mat(x, y).unwrap()
        } else {
            g.sub(x, y).unwrap()
        };
    }
    let graph = g.finish(&[y]).unwrap();
    // The unit matrix: x − x = 0, x − 0 = x, and products change neither.
    let unit: Vec<f32> = (0..16).map(|i| (i % 5 == 0) as u8 as f32).collect();
    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
    let inputs = [bytes_of(&unit)];
    let fused = run_on(&device, &graph, &inputs, true);
    let (plan, _) = bound(&device, &graph, &inputs, true);
    assert!(plan.memory().steps < 3_000, "{:?}", plan.memory());
    assert_eq!(fused, run_on(&device, &graph, &inputs, false));
}
