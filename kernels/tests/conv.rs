//! Convolution and pooling against loops that follow the definition.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use half::{bf16, f16};
use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec, Value, op::ValueSpec};
use hotcell_kernels::{
    backend::Device,
    cpu::{CpuDevice, path::CpuPath},
    plan::{PlanHints, Slot},
};
use proptest::prelude::*;

/// Numbers in [−1, 1) from a fixed sequence.
fn numbers(n: usize, seed: u32) -> Vec<f64> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state >> 8) / f64::from(1 << 23) - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let one = |v: &f64| match dtype {
        DType::F64 => v.to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f64(*v).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from_f64(*v).to_ne_bytes().to_vec(),
        DType::I8 => (*v as i8).to_ne_bytes().to_vec(),
        DType::U16 => (*v as u16).to_ne_bytes().to_vec(),
        _ => (*v as f32).to_ne_bytes().to_vec(),
    };
    values.iter().flat_map(one).collect()
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let one = |b: &[u8]| match dtype {
        DType::F64 => f64::from_ne_bytes(b.try_into().unwrap()),
        DType::F16 => f16::from_ne_bytes(b.try_into().unwrap()).to_f64(),
        DType::BF16 => bf16::from_ne_bytes(b.try_into().unwrap()).to_f64(),
        DType::I8 => i8::from_ne_bytes(b.try_into().unwrap()).into(),
        DType::U16 => u16::from_ne_bytes(b.try_into().unwrap()).into(),
        _ => f32::from_ne_bytes(b.try_into().unwrap()).into(),
    };
    bytes.chunks_exact(dtype.block_bytes()).map(one).collect()
}

/// Runs an op on fixed inputs.
fn run(
    threads: u32,
    path: CpuPath,
    dtype: DType,
    inputs: &[(&[f64], &[usize])],
    op: impl Fn(&mut GraphBuilder, &[Value]) -> Value,
) -> Vec<u8> {
    let device = CpuDevice::with_path(threads, path).unwrap();
    let mut g = GraphBuilder::new(1);
    let values: Vec<Value> = inputs
        .iter()
        .enumerate()
        .map(|(i, (_, dims))| {
            let spec = TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap();
            g.tensor(format!("x{i}"), spec).unwrap()
        })
        .collect();
    let y = op(&mut g, &values);
    let ValueSpec::Tensor(spec) = g.spec(y).unwrap() else {
        panic!("no tensor")
    };
    let graph = g.finish(&[y]).unwrap();
    let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
    for (i, (values, _)) in inputs.iter().enumerate() {
        let bytes = encode(dtype, values);
        let buffer = device.allocate("x", bytes.len().max(1)).unwrap();
        buffer.write(0, &bytes).unwrap();
        plan.bind(Slot::Input(i), &buffer, 0).unwrap();
    }
    let mut bytes = vec![0; spec.bytes(1).unwrap()];
    let out = device.allocate("y", bytes.len().max(1)).unwrap();
    plan.bind(Slot::Output(0), &out, 0).unwrap();
    plan.execute(1).unwrap();
    out.read(0, &mut bytes).unwrap();
    bytes
}

/// One spatial axis.
#[derive(Clone, Copy, Debug)]
struct Axis {
    size: usize,
    window: usize,
    stride: usize,
    low: usize,
    high: usize,
    dilation: usize,
}

impl Axis {
    fn out(&self) -> usize {
        let span = self.dilation * (self.window - 1) + 1;
        (self.size + self.low + self.high - span) / self.stride + 1
    }

    /// Where tap `t` of result `o` lies, if not in the padding.
    fn at(&self, o: usize, t: usize) -> Option<usize> {
        let at = o * self.stride + t * self.dilation;
        at.checked_sub(self.low).filter(|at| *at < self.size)
    }
}

#[derive(Clone, Debug)]
struct Case {
    batch: usize,
    groups: usize,
    ins: usize,
    outs: usize,
    axes: Vec<Axis>,
    seed: u32,
}

fn axis() -> impl Strategy<Value = Axis> {
    (
        1..14usize,
        1..4usize,
        1..4usize,
        0..4usize,
        0..4usize,
        1..4usize,
    )
        .prop_map(|(size, window, stride, low, high, dilation)| Axis {
            size,
            window,
            stride,
            low,
            high,
            dilation,
        })
        .prop_filter("the window fits", |a| {
            a.dilation * (a.window - 1) < a.size + a.low + a.high
        })
}

fn case() -> impl Strategy<Value = Case> {
    let axes = prop::collection::vec(axis(), 1..=3);
    (
        1..3usize,
        1..4usize,
        1..4usize,
        1..5usize,
        axes,
        any::<u32>(),
    )
        .prop_map(|(batch, groups, ins, outs, axes, seed)| Case {
            batch,
            groups,
            ins,
            outs,
            axes,
            seed,
        })
}

impl Case {
    fn list(&self, of: impl Fn(&Axis) -> usize) -> Vec<i64> {
        self.axes.iter().map(|a| of(a) as i64).collect()
    }

    fn sizes(&self, of: impl Fn(&Axis) -> usize) -> Vec<usize> {
        self.axes.iter().map(of).collect()
    }

    /// Every place of a grid, in order.
    fn places(sizes: &[usize]) -> Vec<Vec<usize>> {
        sizes.iter().fold(vec![vec![]], |places, &n| {
            let longer = |p: Vec<usize>| (0..n).map(move |i| [&p[..], &[i]].concat());
            places.into_iter().flat_map(longer).collect()
        })
    }

    /// The elements under each tap of the window of a result: `None` in the padding.
    fn under(&self, out: &[usize]) -> Vec<Option<usize>> {
        let taps = Self::places(&self.sizes(|a| a.window));
        let tap = |tap: &Vec<usize>| {
            self.axes.iter().enumerate().try_fold(0, |at, (i, axis)| {
                Some(at * axis.size + axis.at(out[i], tap[i])?)
            })
        };
        taps.iter().map(tap).collect()
    }

    fn plane(&self) -> usize {
        self.axes.iter().map(|a| a.size).product()
    }

    fn x_dims(&self) -> Vec<usize> {
        [
            &[self.batch, self.groups * self.ins],
            &self.sizes(|a| a.size)[..],
        ]
        .concat()
    }

    fn convolve(&self, x: &[f64], w: &[f64]) -> Vec<f64> {
        let taps: usize = self.axes.iter().map(|a| a.window).product();
        let outs = Self::places(&self.sizes(Axis::out));
        let under: Vec<_> = outs.iter().map(|o| self.under(o)).collect();
        let mut result = Vec::new();
        for image in 0..self.batch {
            for filter in 0..self.groups * self.outs {
                let group = filter / self.outs;
                for under in &under {
                    let mut sum = 0.0;
                    for c in 0..self.ins {
                        let plane = (image * self.groups + group) * self.ins + c;
                        for (t, at) in under.iter().enumerate() {
                            if let Some(at) = at {
                                sum += x[plane * self.plane() + at]
                                    * w[(filter * self.ins + c) * taps + t];
                            }
                        }
                    }
                    result.push(sum);
                }
            }
        }
        result
    }
}

fn nmse(ours: &[f64], exact: &[f64]) -> f64 {
    let error: f64 = ours.iter().zip(exact).map(|(a, b)| (a - b).powi(2)).sum();
    let power: f64 = exact.iter().map(|v| v * v).sum();
    if power == 0.0 { error } else { error / power }
}

fn check_conv(case: &Case, dtype: DType, bound: f64) {
    let taps: usize = case.axes.iter().map(|a| a.window).product();
    let filters = case.groups * case.outs;
    let w_dims = [&[filters, case.ins], &case.sizes(|a| a.window)[..]].concat();
    let x = numbers(
        case.batch * case.groups * case.ins * case.plane(),
        case.seed,
    );
    let w = numbers(filters * case.ins * taps, case.seed ^ 1);
    // What the op sees, rounded to the dtype.
    let (x, w) = (
        decode(dtype, &encode(dtype, &x)),
        decode(dtype, &encode(dtype, &w)),
    );
    let op = |g: &mut GraphBuilder, v: &[Value]| {
        g.conv(
            v[0],
            v[1],
            None,
            &case.list(|a| a.stride),
            &case.list(|a| a.low),
            &case.list(|a| a.high),
            &case.list(|a| a.dilation),
            case.groups as i64,
            "channels_first",
        )
        .unwrap()
    };
    let exact = case.convolve(&x, &w);
    let inputs: [(&[f64], &[usize]); 2] = [(&x, &case.x_dims()), (&w, &w_dims)];
    let first = run(1, CpuPath::detect(), dtype, &inputs, op);
    let ours = decode(dtype, &first);
    assert_eq!(ours.len(), exact.len());
    assert!(
        nmse(&ours, &exact) < bound,
        "{case:?}: {}",
        nmse(&ours, &exact)
    );
    for path in CpuPath::available() {
        let other = run(2, path, dtype, &inputs, op);
        assert!(first == other, "{case:?} on {path}");
    }
}

fn check_pool(case: &Case, kind: &str) {
    let channels = case.groups * case.ins;
    let mut x = numbers(case.batch * channels * case.plane(), case.seed);
    if case.seed.is_multiple_of(3) {
        x[0] = f64::NAN;
    }
    let x = decode(DType::F32, &encode(DType::F32, &x));
    let op = |g: &mut GraphBuilder, v: &[Value]| {
        g.pool(
            v[0],
            kind,
            &case.list(|a| a.window),
            &case.list(|a| a.stride),
            &case.list(|a| a.low),
            &case.list(|a| a.high),
            &case.list(|a| a.dilation),
            "channels_first",
        )
        .unwrap()
    };
    let outs = Case::places(&case.sizes(Axis::out));
    let under: Vec<_> = outs.iter().map(|o| case.under(o)).collect();
    let mut exact = Vec::new();
    for plane in 0..case.batch * channels {
        for under in &under {
            let values: Vec<f64> = under
                .iter()
                .flatten()
                .map(|at| x[plane * case.plane() + at])
                .collect();
            let max = |a: f64, b: f64| {
                if a.is_nan() || b.is_nan() {
                    f64::NAN
                } else {
                    a.max(b)
                }
            };
            exact.push(match kind {
                "max" => values.iter().copied().fold(f64::NEG_INFINITY, max),
                "average" => values.iter().sum::<f64>() / under.len() as f64,
                _ => values.iter().sum::<f64>() / values.len() as f64,
            });
        }
    }
    let inputs: [(&[f64], &[usize]); 1] = [(&x, &case.x_dims())];
    let ours = decode(
        DType::F32,
        &run(2, CpuPath::detect(), DType::F32, &inputs, op),
    );
    assert_eq!(ours.len(), exact.len());
    for (i, (a, b)) in ours.iter().zip(&exact).enumerate() {
        let close = a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() < 1e-6;
        assert!(close, "{case:?} {kind} at {i}: {a}, not {b}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_convolution_is_the_sum_under_each_window(case in case()) {
        check_conv(&case, DType::F32, 1e-11);
    }

    #[test]
    fn any_pooling_is_the_greatest_or_the_mean_of_each_window(case in case()) {
        for kind in ["max", "average", "average_valid"] {
            check_pool(&case, kind);
        }
    }
}

fn square(size: usize, window: usize, stride: usize, pad: usize) -> Axis {
    Axis {
        size,
        window,
        stride,
        low: pad,
        high: pad,
        dilation: 1,
    }
}

#[test]
fn images_larger_than_tiles_and_every_dtype() {
    let case = |groups, ins, outs, axis| Case {
        batch: 2,
        groups,
        ins,
        outs,
        axes: vec![axis, axis],
        seed: 7,
    };
    for (dtype, bound) in [
        (DType::F32, 1e-11),
        (DType::F64, 1e-27),
        (DType::F16, 1e-6),
        (DType::BF16, 1e-4),
    ] {
        check_conv(&case(1, 20, 30, square(37, 3, 1, 1)), dtype, bound);
        check_conv(&case(1, 50, 14, square(9, 3, 2, 1)), dtype, bound);
        // Windows of one element: a plain product.
        check_conv(&case(2, 16, 24, square(20, 1, 1, 0)), dtype, bound);
        // One filter for each channel.
        check_conv(&case(40, 1, 1, square(15, 3, 1, 1)), dtype, bound);
    }
}

#[test]
fn padding_is_lower_than_every_integer_and_rows_of_halves_are_rounded_once() {
    let pool = |dtype: DType, kind: &'static str, x: &[f64]| {
        let op = |g: &mut GraphBuilder, v: &[Value]| {
            g.pool(v[0], kind, &[2], &[2], &[2], &[1], &[1], "channels_first")
                .unwrap()
        };
        let inputs: [(&[f64], &[usize]); 1] = [(x, &[1, 1, x.len()])];
        decode(dtype, &run(1, CpuPath::detect(), dtype, &inputs, op))
    };
    // Windows: padding only, two elements, one element and padding.
    let x = [-7.0, -3.0, -100.0];
    assert_eq!(pool(DType::I8, "max", &x), [-128.0, -3.0, -100.0]);
    assert_eq!(
        pool(DType::F32, "max", &x),
        [f64::NEG_INFINITY, -3.0, -100.0]
    );
    assert_eq!(pool(DType::U16, "max", &[7.0, 3.0, 9.0]), [0.0, 7.0, 9.0]);
    assert_eq!(pool(DType::F32, "average", &x), [0.0, -5.0, -50.0]);
    let valid = pool(DType::F16, "average_valid", &x);
    assert!(valid[0].is_nan());
    assert_eq!(valid[1..], [-5.0, -100.0]);
}

#[test]
fn a_window_of_a_billion_taps_costs_only_those_on_the_image() {
    let most = 1 << 30;
    let op = |g: &mut GraphBuilder, v: &[Value]| {
        let (ones, sides) = ([1, 1, 1], [most / 2; 3]);
        g.pool(
            v[0],
            "average_valid",
            &[most - 8; 3],
            &[most; 3],
            &sides,
            &sides,
            &ones,
            "channels_first",
        )
        .unwrap()
    };
    let x = numbers(8, 3);
    let inputs: [(&[f64], &[usize]); 1] = [(&x, &[1, 1, 2, 2, 2])];
    let ours = decode(
        DType::F32,
        &run(1, CpuPath::detect(), DType::F32, &inputs, op),
    );
    let mean = x.iter().sum::<f64>() / 8.0;
    assert_eq!(ours.len(), 1);
    assert!((ours[0] - mean).abs() < 1e-6);
}
