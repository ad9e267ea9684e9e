//! Statistics, scans of long rows, and softmax over any axis: against loops in f64, to the same bits on every path and
//! for any number of threads.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use common::{Numbers, Tensor, decode, run_rows};
use hotcell_graph::{DType, GraphBuilder, GraphError, Value};
use hotcell_kernels::{
    backend::Device,
    cpu::{CpuDevice, path::CpuPath},
    plan::{PlanHints, Slot},
};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// What rounding to a dtype once may cost, and some f32 arithmetic before.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        _ => 2e-5,
    }
}

/// A result that is the same on every path and for any number of threads.
fn run(
    x: &Tensor,
    build: impl Fn(&mut GraphBuilder, Value) -> Result<Value, GraphError>,
) -> Tensor {
    let mut g = GraphBuilder::new(0);
    let input = g.tensor("x", x.spec(false)).unwrap();
    let result = build(&mut g, input).unwrap();
    let hotcell_graph::op::ValueSpec::Tensor(spec) = g.spec(result).unwrap().clone() else {
        panic!("no tensor");
    };
    let graph = g.finish(&[result]).unwrap();
    let mut first: Option<Tensor> = None;
    for path in CpuPath::available() {
        for threads in [1, 2, 3] {
            let device = CpuDevice::with_path(threads, path).unwrap();
            let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
            let from = device.allocate("x", x.bytes.len()).unwrap();
            from.write(0, &x.bytes).unwrap();
            plan.bind(Slot::Input(0), &from, 0).unwrap();
            let mut bytes = vec![0; spec.bytes(0).unwrap()];
            let out = device.allocate("y", bytes.len()).unwrap();
            plan.bind(Slot::Output(0), &out, 0).unwrap();
            plan.execute(0).unwrap();
            out.read(0, &mut bytes).unwrap();
            let y = Tensor {
                dtype: spec.dtype,
                dims: spec.shape.dims().iter().map(|d| d.at(0)).collect(),
                bytes,
            };
            let first = first.get_or_insert_with(|| y.clone());
            assert!(
                *first == y,
                "{threads} threads on {path} differ: {:?}",
                x.dims
            );
        }
    }
    first.unwrap()
}

/// Numbers around a middle.
fn around(dtype: DType, dims: &[usize], middle: f64, width: f64) -> Tensor {
    let mut numbers = Numbers::new(dims.iter().product::<usize>() as u64);
    let n: usize = dims.iter().product();
    let mut next = || numbers.below(1 << 20) as f64 / f64::from(1 << 20) - 0.5;
    let values: Vec<f64> = (0..n).map(|_| middle + width * next()).collect();
    Tensor::of(dtype, dims, &values)
}

/// The values of each result of a reduction over one axis of three.
fn lines(x: &Tensor, [outer, n, k]: [usize; 3]) -> Vec<Vec<f64>> {
    let values = x.values();
    let line = |o: usize, c: usize| (0..n).map(|i| values[(o * n + i) * k + c]).collect();
    (0..outer * k).map(|at| line(at / k, at % k)).collect()
}

fn near(got: f64, exact: f64, bound: f64, label: &str) {
    assert!(
        (got - exact).abs() <= bound * exact.abs().max(5e-2),
        "{label}: {got}, not {exact}"
    );
}

const SHAPES: [[usize; 3]; 9] = [
    [1, 70_001, 1],
    [3, 9_001, 1],
    [37, 33, 1],
    [300, 5, 1],
    [1, 1_300, 3],
    [1, 300, 1_100],
    [2, 9, 5_000],
    [5, 300, 7],
    [2, 700, 63],
];

#[test]
fn variances_are_those_of_two_passes() {
    for dtype in FLOATS {
        for shape in SHAPES {
            // Sixteen-bit floats have few digits to lose.
            let middle = if dtype == DType::F32 { 300.0 } else { 2.0 };
            let x = around(dtype, &shape, middle, 4.0);
            let variance = run(&x, |g, x| g.variance(x, &[1], false, 1));
            let deviation = run(&x, |g, x| g.standard_deviation(x, &[1], true, 0));
            for (i, line) in lines(&x, shape).iter().enumerate() {
                let n = line.len() as f64;
                let mean = line.iter().sum::<f64>() / n;
                let sum: f64 = line.iter().map(|v| (v - mean) * (v - mean)).sum();
                let label = format!("{dtype} {shape:?} {i}");
                near(
                    decode(dtype, variance.at(i)),
                    sum / (n - 1.0),
                    rounding(dtype),
                    &label,
                );
                near(
                    decode(dtype, deviation.at(i)),
                    (sum / n).sqrt(),
                    rounding(dtype),
                    &label,
                );
            }
        }
    }
}

#[test]
fn sums_of_powers_neither_overflow_nor_vanish() {
    for dtype in FLOATS {
        for shape in SHAPES {
            for middle in [-200.0, 0.0, 1000.0] {
                let x = around(dtype, &shape, middle, 30.0);
                let y = run(&x, |g, x| g.logsumexp(x, &[1], false));
                for (i, line) in lines(&x, shape).iter().enumerate() {
                    let most = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = line.iter().map(|v| (v - most).exp()).sum();
                    let label = format!("{dtype} {shape:?} {i}");
                    near(
                        decode(dtype, y.at(i)),
                        most + sum.ln(),
                        rounding(dtype),
                        &label,
                    );
                }
            }
        }
    }
}

#[test]
fn statistics_of_what_is_not_finite_and_of_one() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let rows = [[-inf, -inf], [inf, 1.0], [1.0, nan], [inf, -inf]].concat();
    for k in [1, 2] {
        // As rows and as columns.
        let (dims, axis) = if k == 1 { ([4, 2], 1) } else { ([2, 4], 0) };
        let values: Vec<f64> = match k {
            1 => rows.clone(),
            _ => (0..8).map(|i| rows[i % 4 * 2 + i / 4]).collect(),
        };
        let x = Tensor::of(DType::F32, &dims, &values);
        let y = run(&x, |g, x| g.logsumexp(x, &[axis], false)).values();
        assert_eq!(y[..2], [-inf, inf]);
        assert!(y[2].is_nan());
        assert_eq!(y[3], inf);
        let y = run(&x, |g, x| g.variance(x, &[axis], false, 0)).values();
        assert!(y.iter().all(|v| v.is_nan()), "{y:?}");
    }
    let one = Tensor::of(DType::F32, &[1], &[3.0]);
    let of = |ddof| run(&one, |g, x| g.variance(x, &[], false, ddof)).values()[0];
    assert_eq!(of(0), 0.0);
    assert!(of(1).is_nan());
    let none = Tensor::of(DType::F32, &[0, 2], &[]);
    let y = run(&none, |g, x| g.variance(x, &[0], false, 0)).values();
    assert!(y.iter().all(|v| v.is_nan()));
    let y = run(&none, |g, x| g.logsumexp(x, &[0], false)).values();
    assert_eq!(y, [-inf, -inf]);
}

#[test]
fn infinity_is_the_sum_of_powers_unless_there_is_a_nan() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    for [outer, n, k] in SHAPES {
        let mut values = vec![1.0; outer * n * k];
        for line in 0..outer * k {
            let mut set = |i: usize, v: f64| values[(line / k * n + i) * k + line % k] = v;
            match line % 4 {
                0 => set(n / 2, inf),
                1 => (set(0, inf), set(n - 1, nan)).1,
                2 => (set(0, nan), set(n - 1, inf)).1,
                _ => (0..n).for_each(|i| set(i, -inf)),
            }
        }
        let expected = [inf, nan, nan, -inf];
        for dtype in FLOATS {
            let x = Tensor::of(dtype, &[outer, n, k], &values);
            let y = run(&x, |g, x| g.logsumexp(x, &[1], false)).values();
            for (line, y) in y.iter().enumerate() {
                let expected = expected[line % 4];
                let same = *y == expected || y.is_nan() && expected.is_nan();
                assert!(
                    same,
                    "{dtype} [{outer}, {n}, {k}] {line}: {y}, not {expected}"
                );
            }
        }
    }
}

/// One NaN among ones makes NaN of what is made of it, whatever its sign and its payload.
#[test]
fn no_nan_is_lost() {
    type Op = fn(&mut GraphBuilder, Value, i64) -> Result<Value, GraphError>;
    let ops: [(&str, Op); 9] = [
        ("sum", |g, x, axis| g.reduce_sum(x, &[axis], false)),
        ("product", |g, x, axis| g.reduce_prod(x, &[axis], false)),
        ("largest", |g, x, axis| g.reduce_max(x, &[axis], false)),
        ("smallest", |g, x, axis| g.reduce_min(x, &[axis], false)),
        ("variance", |g, x, axis| g.variance(x, &[axis], false, 0)),
        ("logsumexp", |g, x, axis| g.logsumexp(x, &[axis], false)),
        ("softmax", |g, x, axis| g.softmax(x, axis)),
        ("cumsum", |g, x, axis| g.cumsum(x, axis, false, false)),
        ("logcumsumexp", |g, x, axis| g.logcumsumexp(x, axis, false)),
    ];
    for bits in [0x7fc0_0001, 0xffc0_0005, 0x7fc0_01ff_u32] {
        for n in [1, 5, 64, 600] {
            for at in [0, n - 1] {
                let mut values = vec![1.0; n];
                values[at] = f64::from(f32::from_bits(bits));
                for (dims, axis) in [([1, n], 1), ([n, 1], 0)] {
                    let x = Tensor::of(DType::F32, &dims, &values);
                    for (name, op) in ops {
                        let y = run(&x, |g, x| op(g, x, axis)).values();
                        let last = y.last().unwrap();
                        assert!(last.is_nan(), "{name} of {bits:x} at {at} of {n}: {last}");
                    }
                }
            }
        }
    }
}

#[test]
fn long_rows_are_scanned_by_any_number_of_threads() {
    let n = 70_001;
    for rows in [1, 2, 13] {
        for (reverse, exclusive) in [(false, false), (true, false), (false, true), (true, true)] {
            let x = around(DType::F32, &[rows, n], 0.6, 1.0);
            let y = run(&x, |g, x| g.cumsum(x, 1, exclusive, reverse)).values();
            let whole = Tensor::random(DType::I16, &[rows, n], 3);
            let z = run(&whole, |g, x| g.cumsum(x, -1, exclusive, reverse)).values();
            let (x, whole) = (x.values(), whole.values());
            for row in 0..rows {
                let (mut sum, mut wrapping) = (0.0, 0i64);
                for i in 0..n {
                    let i = row * n + if reverse { n - 1 - i } else { i };
                    let next = (sum + x[i], wrapping + whole[i] as i64);
                    let expected = if exclusive { (sum, wrapping) } else { next };
                    near(y[i], expected.0, 1e-4, "sum");
                    assert_eq!(z[i], f64::from(expected.1 as i16));
                    (sum, wrapping) = next;
                }
            }
        }
    }
}

#[test]
fn which_nan_a_long_row_hands_on_does_not_depend_on_threads() {
    // Each chunk's product and sum is a NaN of its own: two that were given, and what a processor makes of 0 and ∞.
    let n = 3 * (16 << 10) + 100;
    let mut values = vec![1.0f32; n];
    values[7] = f32::from_bits(0x7fc1_2345);
    values[20_000] = f32::from_bits(0xffc5_4321);
    (values[40_000], values[40_001]) = (0.0, f32::INFINITY);
    (values[40_002], values[40_003]) = (f32::NEG_INFINITY, 2.0);
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
    let x = Tensor {
        dtype: DType::F32,
        dims: vec![n],
        bytes,
    };
    for reverse in [false, true] {
        for product in [false, true] {
            let mut g = GraphBuilder::new(0);
            let input = g.tensor("x", x.spec(false)).unwrap();
            let result = match product {
                true => g.cumprod(input, 0, true, reverse),
                false => g.cumsum(input, 0, true, reverse),
            };
            let graph = g.finish(&[result.unwrap()]).unwrap();
            for path in CpuPath::available() {
                let on = |threads| {
                    let device = CpuDevice::with_path(threads, path).unwrap();
                    let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
                    let from = device.allocate("x", x.bytes.len()).unwrap();
                    from.write(0, &x.bytes).unwrap();
                    plan.bind(Slot::Input(0), &from, 0).unwrap();
                    let mut bytes = vec![0; x.bytes.len()];
                    let out = device.allocate("y", bytes.len()).unwrap();
                    plan.bind(Slot::Output(0), &out, 0).unwrap();
                    plan.execute(0).unwrap();
                    out.read(0, &mut bytes).unwrap();
                    bytes
                };
                let one = on(1);
                assert!(one == on(2) && one == on(4), "{path}, product: {product}");
            }
        }
    }
}

#[test]
fn a_running_value_does_not_depend_on_what_follows() {
    let x = around(DType::F32, &[40_000], 1.0, 0.01);
    for product in [false, true] {
        let scan = |x: &Tensor| {
            run(x, |g, x| match product {
                true => g.cumprod(x, 0, false, false),
                false => g.cumsum(x, 0, false, false),
            })
        };
        let whole = scan(&x);
        for n in [1, 15, 16, 17, 300, 16_384, 16_385, 33_000] {
            assert!(scan(&x.prefix(n)) == whole.prefix(n), "{n}");
        }
    }
}

#[test]
fn running_values_of_every_float_have_the_same_bits_on_every_path() {
    for dtype in FLOATS {
        for dims in [[5, 67], [2, 16], [1, 20_000]] {
            let x = around(dtype, &dims, 1.0, 0.02);
            for (reverse, exclusive) in [(false, false), (true, false), (false, true), (true, true)]
            {
                let sums = run(&x, |g, x| g.cumsum(x, 1, exclusive, reverse));
                let products = run(&x, |g, x| g.cumprod(x, 1, exclusive, reverse));
                let (x, sums, products) = (x.values(), sums.values(), products.values());
                for row in 0..dims[0] {
                    let (mut sum, mut product) = (0.0, 1.0);
                    for i in 0..dims[1] {
                        let i = row * dims[1] + if reverse { dims[1] - 1 - i } else { i };
                        let next = (sum + x[i], product * x[i]);
                        let expected = if exclusive { (sum, product) } else { next };
                        // Sums beyond what f16 can hold are infinite.
                        if dtype != DType::F16 || expected.0 < 65_000.0 {
                            near(sums[i], expected.0, rounding(dtype).max(1e-4), "sum");
                        }
                        near(
                            products[i],
                            expected.1,
                            rounding(dtype).max(1e-4),
                            "product",
                        );
                        (sum, product) = next;
                    }
                }
            }
        }
    }
}

#[test]
fn running_products_leave_their_range_only_where_they_do() {
    // Down to 1e-30, up by 1e42 in all, down again: no product from the start is out of range, many in between are.
    let steps = [(30, 0.1), (42, 10.0), (20, 0.1), (40, 1.0)];
    let repeated = |&(n, v): &(usize, f64)| std::iter::repeat_n(v, n);
    let values: Vec<f64> = steps.iter().flat_map(repeated).collect();
    let n = values.len();
    for (dims, axis) in [([1, n], 1), ([n, 1], 0)] {
        let x = Tensor::of(DType::F32, &dims, &values);
        let y = run(&x, |g, x| g.cumprod(x, axis, false, false)).values();
        let mut exact = 1.0;
        for (v, y) in x.values().iter().zip(y) {
            exact *= v;
            assert!((y / exact - 1.0).abs() < 1e-5, "{y}, not {exact}");
        }
    }
}

#[test]
fn softmax_works_along_any_axis() {
    for dtype in FLOATS {
        for shape in SHAPES {
            if shape[0] * shape[1] * shape[2] > 100_000 {
                continue;
            }
            let x = around(dtype, &shape, 5.0, 20.0);
            let y = run(&x, |g, x| g.softmax(x, 1));
            let log = run(&x, |g, x| g.log_softmax(x, 1));
            let results = lines(&y, shape).into_iter().zip(lines(&log, shape));
            for (line, (y, log)) in lines(&x, shape).iter().zip(results) {
                let most = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = line.iter().map(|v| (v - most).exp()).sum();
                for (v, (y, log)) in line.iter().zip(y.iter().zip(log)) {
                    let label = format!("{dtype} {shape:?}");
                    near(*y, (v - most).exp() / sum, rounding(dtype), &label);
                    near(log, v - most - sum.ln(), rounding(dtype), &label);
                }
            }
        }
    }
}

#[test]
fn softmax_of_columns_that_have_none_is_nan() {
    let (inf, nan) = (f64::NEG_INFINITY, f64::NAN);
    let x = Tensor::of(
        DType::F32,
        &[2, 4],
        &[inf, 1.0, inf, 0.0, inf, nan, 0.0, 0.0],
    );
    let y = run(&x, |g, x| g.softmax(x, 0)).values();
    assert!(y[0].is_nan() && y[4].is_nan() && y[1].is_nan() && y[5].is_nan());
    assert_eq!([y[2], y[6], y[3], y[7]], [0.0, 1.0, 0.5, 0.5]);
}

#[test]
fn softmax_over_no_rows_is_empty() {
    let x = around(DType::F32, &[6, 3], 0.0, 4.0);
    for dtype in FLOATS {
        let x = Tensor::of(dtype, &x.dims, &x.values());
        for axis in [0, 1] {
            let build = |g: &mut GraphBuilder, v: &[Value]| {
                Ok(vec![g.softmax(v[0], axis)?, g.log_softmax(v[0], axis)?])
            };
            let results = run_rows(&[(&x, true)], 6, &[0, 1, 6], build).unwrap();
            assert!(results[0].iter().all(|t| t.bytes.is_empty()));
            let sums = results[2][0].values().iter().sum::<f64>();
            assert!((sums - if axis == 0 { 3.0 } else { 6.0 }).abs() < 0.02);
        }
    }
}

/// Shapes and axes: many short rows, few long ones, narrow and wide columns, and nothing.
const RUNS: [(&[usize], usize); 10] = [
    (&[300, 70], 1),
    (&[3, 40_001], 1),
    (&[1, 5000], 1),
    (&[70, 300], 0),
    (&[5, 33, 17], 1),
    (&[150, 9, 3], 1),
    (&[2, 700, 130], 1),
    (&[4, 1], 1),
    (&[0, 7], 1),
    (&[6], 0),
];

/// The elements of each sequence along an axis, in their order.
fn sequences(dims: &[usize], axis: usize) -> Vec<Vec<usize>> {
    let product = |dims: &[usize]| dims.iter().product::<usize>();
    let (outer, n, k) = (
        product(&dims[..axis]),
        dims[axis],
        product(&dims[axis + 1..]),
    );
    let sequence = |o: usize, c: usize| (0..n).map(|i| (o * n + i) * k + c).collect();
    let all = (0..outer).flat_map(|o| (0..k).map(move |c| (o, c)));
    all.map(|(o, c)| sequence(o, c)).collect()
}

#[test]
fn running_logs_are_those_of_f64() {
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64, DType::I32] {
        for (dims, axis) in RUNS {
            for (reverse, width) in [(false, 6.0), (true, 300.0)] {
                let x = around(dtype, dims, 1.0, width);
                let y = run(&x, |g, x| g.logcumsumexp(x, axis as i64, reverse));
                assert_eq!(y.dtype, y_dtype(dtype));
                let (x, y) = (x.values(), y.values());
                for mut sequence in sequences(dims, axis) {
                    if reverse {
                        sequence.reverse();
                    }
                    let (mut most, mut sum) = (f64::NEG_INFINITY, 0.0);
                    for i in sequence {
                        let high = f64::max(most, x[i]);
                        sum = sum * (most - high).exp() + (x[i] - high).exp();
                        most = high;
                        let want = most + sum.ln();
                        let bound = rounding(y_dtype(dtype)) * (1.0 + want.abs());
                        assert!(
                            (y[i] - want).abs() <= bound,
                            "{dtype} {dims:?}: {} not {want}",
                            y[i]
                        );
                    }
                }
            }
        }
    }
}

fn y_dtype(dtype: DType) -> DType {
    match dtype {
        DType::I32 => DType::F32,
        dtype => dtype,
    }
}

#[test]
fn running_logs_of_infinities_and_nan() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let cases: [(&[f64], &[f64]); 5] = [
        (&[-inf, -inf, 0.0, -inf], &[-inf, -inf, 0.0, 0.0]),
        (&[1.0, inf, 2.0, inf], &[1.0, inf, inf, inf]),
        (&[-inf, inf, -inf, 3.0], &[-inf, inf, inf, inf]),
        (&[0.0, nan, 1.0, inf], &[0.0, nan, nan, nan]),
        // So far apart that one of them is nothing beside the other.
        (&[-3e38, 3e38, -3e38, 0.0], &[-3e38, 3e38, 3e38, 3e38]),
    ];
    for (values, want) in cases {
        // As one row, and as columns that lie side by side.
        for (dims, k) in [([1, 4], 1), ([4, 40], 40)] {
            let all: Vec<f64> = values.iter().flat_map(|v| vec![*v; k]).collect();
            let axis = i64::from(k == 1);
            let y = run(&Tensor::of(DType::F32, &dims, &all), |g, x| {
                g.logcumsumexp(x, axis, false)
            });
            for (i, y) in y.values().into_iter().enumerate() {
                let want = f64::from(want[i / k] as f32);
                assert!(
                    y == want || (y.is_nan() && want.is_nan()),
                    "{values:?}: {y} not {want}"
                );
            }
        }
    }
}

#[test]
fn running_extremes_are_those_of_pairs() {
    for &dtype in &DType::REAL[1..] {
        for (dims, axis) in RUNS {
            // Any bits: NaN of all kinds, infinities, both zeros.
            let mut x = Tensor::random(dtype, dims, 11);
            let size = dtype.block_bytes();
            for (i, element) in x.bytes.chunks_mut(size).enumerate() {
                // Most are numbers, so that not all that follows is NaN.
                let v = (i * 37 % 101) as f64 / 8.0 - 6.0;
                match i % 50 {
                    7 if i % 3 == 0 => {}
                    8 | 9 => element.copy_from_slice(&common::encode(dtype, [0.0, -0.0][i % 2])),
                    _ => element.copy_from_slice(&common::encode(dtype, v)),
                }
            }
            for (least, reverse) in [(false, false), (false, true), (true, false), (true, true)] {
                let y = run(&x, |g, x| match least {
                    false => g.cummax(x, axis as i64, reverse),
                    true => g.cummin(x, axis as i64, reverse),
                });
                // What is known of each pair: the op of two operands says it.
                let (mut a, mut b, mut at) = (Vec::new(), Vec::new(), Vec::new());
                for mut sequence in sequences(dims, axis) {
                    if reverse {
                        sequence.reverse();
                    }
                    for pair in sequence.windows(2) {
                        a.extend(y.at(pair[0]));
                        b.extend(x.at(pair[1]));
                        at.push(pair[1]);
                    }
                    if let Some(&first) = sequence.first() {
                        assert!(same(dtype, y.at(first), x.at(first)), "{dtype} {dims:?}");
                    }
                }
                let n = at.len();
                if n == 0 {
                    continue;
                }
                let pairs = Tensor {
                    dtype,
                    dims: vec![2, n],
                    bytes: [a, b].concat(),
                };
                let want = run(&pairs, |g, x| {
                    let row = |g: &mut GraphBuilder, i: i64| {
                        g.slice(x, &[i, 0], &[i + 1, n as i64], &[1, 1])
                    };
                    let (a, b) = (row(g, 0)?, row(g, 1)?);
                    if least {
                        g.minimum(a, b)
                    } else {
                        g.maximum(a, b)
                    }
                });
                for (i, at) in at.into_iter().enumerate() {
                    assert!(
                        same(dtype, y.at(at), want.at(i)),
                        "{dtype} {dims:?} {least} {at}"
                    );
                }
            }
        }
    }
}

/// Whether two elements have the same bits, or are both NaN, or both zero: of two operands that are equal the second one
/// comes, while a running extreme, as that of all, has -0 below 0.
fn same(dtype: DType, a: &[u8], b: &[u8]) -> bool {
    let (x, y) = (decode(dtype, a), decode(dtype, b));
    a == b || (x.is_nan() && y.is_nan()) || (x == 0.0 && y == 0.0)
}
