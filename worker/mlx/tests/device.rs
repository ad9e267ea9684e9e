//! The MLX device as plans and buffers see it: what it refuses, how it pauses and stops.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use hotcell_graph::{
    CacheSpec, DType, Graph, GraphBuilder, Shape, TensorSpec,
    op::{Call, find},
};
use hotcell_kernels::{
    backend::{Backend, Buffer, Device, DeviceError, Trail},
    cpu::CpuBackend,
    mlx::{MlxBackend, error_of},
    plan::{Plan, PlanHints, Slot},
};

fn open() -> Rc<dyn Device> {
    MlxBackend.open("mlx:0", &[]).unwrap()
}

fn spec(dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap()
}

fn rows(inner: &[usize]) -> TensorSpec {
    TensorSpec::new(DType::F32, Shape::rows(inner).unwrap()).unwrap()
}

fn filled(device: &dyn Device, values: &[f32]) -> Buffer {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let buffer = device.allocate("a test", bytes.len().max(1)).unwrap();
    buffer.write(0, &bytes).unwrap();
    buffer
}

fn read(buffer: &Buffer, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    buffer.read_f32(0, &mut values).unwrap();
    values
}

/// `count` times the sine of the one before.
fn sines(count: usize, width: usize) -> Graph {
    let mut g = GraphBuilder::new(4);
    let mut x = g.tensor("x", rows(&[width])).unwrap();
    for _ in 0..count {
        x = g.sin(x).unwrap();
    }
    g.finish(&[x]).unwrap()
}

fn bound(device: &dyn Device, graph: &Graph, width: usize) -> (Box<dyn Plan>, Buffer) {
    let mut plan = device.plan(graph, &PlanHints::default()).unwrap();
    let input = filled(device, &vec![0.5; 4 * width]);
    let output = filled(device, &vec![0.0; 4 * width]);
    plan.bind(Slot::Input(0), &input, 0).unwrap();
    plan.bind(Slot::Output(0), &output, 0).unwrap();
    (plan, output)
}

#[test]
fn the_device_says_what_it_is_and_no_other_opens() {
    let device = open();
    let info = device.info();
    assert_eq!((info.id.as_str(), info.backend), ("mlx:0", "mlx"));
    assert!(device.numerics().starts_with("mlx/") && !device.reproducible());
    assert!(device.is_bound_to_thread());
    for other in ["mlx:1", "cpu:0", "mlx"] {
        let refused = MlxBackend.open(other, &[]);
        assert!(matches!(refused, Err(DeviceError::NoDevice(_))), "{other}");
    }
    let ops = device.ops();
    assert!(ops.iter().all(|op| find(op).is_some()));
    assert!(ops.contains(&"mul_mat"));
}

#[test]
fn an_execution_pauses_between_units_and_goes_on_where_it_was() {
    let device = open();
    let (count, width) = (300, 8);
    let graph = sines(count, width);
    let (mut plan, output) = bound(&*device, &graph, width);
    assert!(plan.memory().steps > 2);
    plan.execute(3).unwrap();
    let whole = read(&output, 3 * width);
    output.write(0, &vec![0; 3 * width * 4]).unwrap();
    let (mut from, mut slices) = (0, 0);
    while let Some(next) = plan.execute_from(3, from, &|| true).unwrap() {
        assert!(next > from);
        (from, slices) = (next, slices + 1);
    }
    assert_eq!(slices + 1, plan.memory().steps);
    assert_eq!(read(&output, 3 * width), whole);
    let mut expected = 0.5f32;
    for _ in 0..count {
        expected = expected.sin();
    }
    assert!(
        (whole[0] - expected).abs() < 1e-5,
        "{} {expected}",
        whole[0]
    );
}

#[test]
fn an_execution_stops_when_it_is_told_to() {
    let device = open();
    let graph = sines(100, 8);
    let (mut plan, _) = bound(&*device, &graph, 8);
    let flag = Arc::new(AtomicBool::new(false));
    plan.stop_when(Arc::clone(&flag));
    plan.execute(4).unwrap();
    flag.store(true, Ordering::Relaxed);
    assert!(matches!(plan.execute(4), Err(DeviceError::Stopped)));
    plan.release();
    assert!(matches!(plan.execute(4), Err(DeviceError::Binding(_))));
}

#[test]
fn what_does_not_fit_is_refused_before_mlx_sees_it() {
    let device = open();
    let graph = sines(2, 8);
    let (mut plan, output) = bound(&*device, &graph, 8);
    let binding =
        |r: Result<(), DeviceError>| assert!(matches!(r, Err(DeviceError::Binding(_))), "{r:?}");
    let small = filled(&*device, &[0.0; 8]);
    binding(plan.bind(Slot::Input(0), &small, 0));
    binding(plan.bind(Slot::Input(1), &output, 0));
    binding(plan.bind(Slot::Input(0), &output, usize::MAX));
    binding(plan.execute(5));
    binding(plan.execute_from(4, 99, &|| false).map(|_| ()));
    // What the graph writes is read by nothing else.
    plan.bind(Slot::Input(0), &output, 0).unwrap();
    binding(plan.execute(4));
    // Without a row there is nothing to compute.
    let (mut plan, _) = bound(&*device, &graph, 8);
    plan.execute(0).unwrap();
}

#[test]
fn a_plan_says_what_it_takes_and_is_refused_if_that_is_too_much() {
    let device = open();
    let graph = sines(3, 1024);
    let dry = PlanHints {
        allocate: false,
        ..PlanHints::default()
    };
    let mut plan = device.plan(&graph, &dry).unwrap();
    let takes = plan.memory().arena;
    assert!(takes >= 4 * 1024 * 4, "{takes}");
    let buffer = filled(&*device, &[0.0; 4 * 1024]);
    let other = filled(&*device, &[0.0; 4 * 1024]);
    plan.bind(Slot::Input(0), &buffer, 0).unwrap();
    plan.bind(Slot::Output(0), &other, 0).unwrap();
    assert!(matches!(plan.execute(1), Err(DeviceError::Binding(_))));
    let most = |most| PlanHints {
        max_bytes: Some(most),
        ..PlanHints::default()
    };
    assert!(device.plan(&graph, &most(takes)).is_ok());
    let refused = device.plan(&graph, &most(takes - 1));
    assert!(matches!(refused, Err(DeviceError::OutOfMemory { .. })));
}

/// Truths come as bytes from whoever sends them, and to C++ only 0 and 1 are such.
#[test]
fn a_truth_is_any_byte_that_is_not_0() {
    let device = open();
    let sent: Vec<u8> = (0..=255).collect();
    let mut g = GraphBuilder::new(0);
    let truths = g.tensor("truths", spec(DType::Bool, &[256])).unwrap();
    let flat = || Shape::fixed(&[256]).unwrap();
    let [yes, no] = [1.0, 2.0].map(|v| g.literal(DType::F32, flat(), &le(&[v; 256])).unwrap());
    let chosen = g.where_(truths, yes, no).unwrap();
    let turned = g.logical_not(truths).unwrap();
    let single = g.cast(truths, DType::F32).unwrap();
    let turned = g.cast(turned, DType::F32).unwrap();
    let row = || Shape::fixed(&[1, 256]).unwrap();
    let parts = [chosen, single, turned].map(|x| g.reshape(x, row()).unwrap());
    let all = g.concat(&parts, 0).unwrap();
    let graph = g.finish(&[all]).unwrap();
    let got = computed(&*device, &graph, &[&sent], 3 * 256);
    let expected = [[2.0, 0.0, 1.0], [1.0, 1.0, 0.0]];
    for (byte, value) in sent.iter().zip(0..) {
        let expected = expected[usize::from(*byte != 0)];
        assert_eq!([0, 1, 2].map(|i| got[i * 256 + value]), expected, "{byte}");
    }
}

#[test]
fn an_index_outside_is_an_error_of_the_execution() {
    let device = open();
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[3])).unwrap();
    let i = g.tensor("i", spec(DType::I32, &[2])).unwrap();
    let y = g.take(x, i, 0).unwrap();
    let graph = g.finish(&[y]).unwrap();
    let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
    let x = filled(&*device, &[1.0, 2.0, 3.0]);
    let i = device.allocate("i", 8).unwrap();
    let y = filled(&*device, &[0.0; 2]);
    plan.bind(Slot::Input(0), &x, 0).unwrap();
    plan.bind(Slot::Input(1), &i, 0).unwrap();
    plan.bind(Slot::Output(0), &y, 0).unwrap();
    i.write_i32(0, &[-1, 0]).unwrap();
    plan.execute(0).unwrap();
    assert_eq!(read(&y, 2), [3.0, 1.0]);
    for bad in [3, -4, i32::MAX, i32::MIN] {
        i.write_i32(0, &[0, bad]).unwrap();
        let outside = plan.execute(0);
        assert!(
            matches!(outside, Err(DeviceError::IndexOutOfRange { index, .. }) if index == i64::from(bad)),
            "{bad}: {outside:?}"
        );
    }
}

/// Numbers in [−1, 1) that look like chance.
fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// What a graph of one result gives on a device.
fn computed(device: &dyn Device, graph: &Graph, inputs: &[&[u8]], elements: usize) -> Vec<f32> {
    let mut plan = device.plan(graph, &PlanHints::default()).unwrap();
    for (i, bytes) in inputs.iter().enumerate() {
        let buffer = device.allocate("an input", bytes.len()).unwrap();
        buffer.write(0, bytes).unwrap();
        plan.bind(Slot::Input(i), &buffer, 0).unwrap();
    }
    let output = filled(device, &vec![f32::NAN; elements]);
    plan.bind(Slot::Output(0), &output, 0).unwrap();
    plan.execute(0).unwrap();
    read(&output, elements)
}

fn le(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn ints(values: impl IntoIterator<Item = usize>) -> Vec<u8> {
    let all = values.into_iter();
    all.flat_map(|v| i32::try_from(v).unwrap().to_le_bytes())
        .collect()
}

fn assert_close(ours: &[f32], theirs: &[f32], what: &str) {
    assert_eq!(ours.len(), theirs.len());
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let most = 1e-4 * (1.0 + b.abs());
        assert!((a - b).abs() <= most, "{what} [{i}]: {a} is not {b}");
    }
}

fn dry() -> PlanHints {
    PlanHints {
        allocate: false,
        ..PlanHints::default()
    }
}

fn at_most(bytes: usize) -> PlanHints {
    PlanHints {
        max_bytes: Some(bytes),
        ..PlanHints::default()
    }
}

/// A convolution over one or two axes of one size.
#[derive(Clone, Copy, Debug)]
struct Conv {
    axes: usize,
    side: usize,
    kernel: usize,
    pad: i64,
    stride: i64,
    dilation: i64,
    groups: usize,
}

/// Over two axes of which nothing is left out.
fn same(side: usize, kernel: usize) -> Conv {
    Conv {
        axes: 2,
        side,
        kernel,
        pad: kernel as i64 / 2,
        stride: 1,
        dilation: 1,
        groups: 1,
    }
}

impl Conv {
    fn graph(&self) -> Graph {
        let mut g = GraphBuilder::new(0);
        let dims = |first: [usize; 2], size| [&first[..], &vec![size; self.axes]].concat();
        let x = spec(DType::F32, &dims([1, self.groups], self.side));
        let w = spec(DType::F32, &dims([2 * self.groups, 1], self.kernel));
        let (x, w) = (g.tensor("x", x).unwrap(), g.tensor("w", w).unwrap());
        let all = |n: i64| vec![n; self.axes];
        let (strides, pads, dilations) = (all(self.stride), all(self.pad), all(self.dilation));
        let groups = self.groups as i64;
        let y = g
            .conv(
                x,
                w,
                None,
                &strides,
                &pads,
                &pads,
                &dilations,
                groups,
                "channels_first",
            )
            .unwrap();
        g.finish(&[y]).unwrap()
    }
}

#[test]
fn what_an_op_takes_on_its_way_is_counted_and_refused_by_its_name() {
    let device = open();
    // Eight thousand queries and keys: a GiB of scores for four heads, of inputs and results of half a MiB each.
    let mut g = GraphBuilder::new(0);
    let shape = spec(DType::F32, &[1, 4, 8192, 4]);
    let [q, k, v] = ["q", "k", "v"].map(|name| g.tensor(name, shape.clone()).unwrap());
    let y = g
        .scaled_dot_product_attention(q, k, v, None, None, 0.5, false, 0, 0.0)
        .unwrap();
    let attention = g.finish(&[y]).unwrap();
    // A window of 15 × 15 around each of a million places.
    let convolved = same(1024, 15).graph();
    for (graph, op, least) in [
        (attention, "scaled_dot_product_attention", 1 << 30),
        (convolved, "conv", 1024 * 1024 * 225 * 4),
    ] {
        let takes = device.plan(&graph, &dry()).unwrap().memory().arena;
        assert!(takes >= least, "{op}: {takes}");
        let refused = device.plan(&graph, &at_most(least / 2)).err();
        let Some(DeviceError::OutOfMemory { what, bytes }) = refused else {
            panic!("{op}: {refused:?}");
        };
        assert!(what.contains(op) && bytes == takes, "{what}: {bytes}");
    }
}

#[test]
fn what_has_more_elements_than_mlx_can_count_goes_another_way() {
    let device = MlxBackend::open_device("mlx:0", &[]).unwrap();
    let native = |graph: &Graph| {
        let node = &graph.nodes()[0];
        let specs = graph.input_specs(node).unwrap();
        device.is_native(&Call {
            op: node.op,
            inputs: &specs,
            attributes: &node.attributes,
        })
    };
    // MLX has such convolutions, but no array for the windows of this one.
    let large = same(4096, 15).graph();
    assert!(native(&large));
    let takes = device.plan(&large, &dry()).unwrap().memory().arena;
    assert!(takes < 4096 * 4096 * 225, "{takes}");
}

#[test]
fn a_plan_needs_no_more_than_the_machine_has() {
    let device = open();
    let memory = usize::try_from(device.info().memory_bytes).unwrap();
    // Rows of a MiB, as many as the machine has and a few more, twice.
    let rows = memory / (1 << 20) + 16;
    let mut g = GraphBuilder::new(0);
    let mut parts = Vec::new();
    for i in 0..rows.div_ceil(1024) {
        let x = g.tensor(format!("x{i}"), spec(DType::F32, &[1024, 1 << 18]));
        let x = x.unwrap();
        let y = g.sin(x).unwrap();
        parts.push(g.cos(y).unwrap());
    }
    let graph = g.finish(&parts).unwrap();
    let refused = device.plan(&graph, &PlanHints::default()).err();
    assert!(
        matches!(refused, Some(DeviceError::OutOfMemory { bytes, .. }) if bytes > memory),
        "{refused:?}"
    );
}

#[test]
fn a_convolution_that_mlx_pads_past_its_result_goes_another_way() {
    let device = MlxBackend::open_device("mlx:0", &[]).unwrap();
    let cpu = CpuBackend.open("cpu:0", &[]).unwrap();
    // Padding beyond the result, which a loop of MLX's follows past the end of its memory in two axes.
    let beyond = Conv {
        pad: 8,
        ..same(4, 2)
    };
    for (case, on_mlx) in [
        (same(6, 3), true),
        (
            Conv {
                groups: 3,
                ..beyond
            },
            false,
        ),
        (
            Conv {
                dilation: 2,
                ..beyond
            },
            false,
        ),
        (
            Conv {
                dilation: 2,
                groups: 3,
                ..beyond
            },
            false,
        ),
        (beyond, true),
        (
            Conv {
                pad: 32,
                stride: 3,
                ..beyond
            },
            true,
        ),
        (Conv { pad: 33, ..beyond }, false),
        (
            Conv {
                axes: 1,
                groups: 3,
                ..beyond
            },
            true,
        ),
        (
            Conv {
                axes: 1,
                dilation: 2,
                pad: 32,
                ..beyond
            },
            true,
        ),
        (
            Conv {
                axes: 1,
                dilation: 2,
                groups: 3,
                stride: 2,
                ..beyond
            },
            true,
        ),
    ] {
        let graph = case.graph();
        let of = |first: usize, size: usize| le(&noise(first * size.pow(case.axes as u32), 1));
        let (x, w) = (of(case.groups, case.side), of(2 * case.groups, case.kernel));
        let elements = graph.nodes()[0].outputs[0].shape.elements(0).unwrap();
        let before = device.ran("conv");
        let ours = computed(&*device, &graph, &[&x, &w], elements);
        let after = device.ran("conv");
        assert_eq!(after.on_mlx > before.on_mlx, on_mlx, "{case:?}");
        let theirs = computed(&*cpu, &graph, &[&x, &w], elements);
        assert_close(&ours, &theirs, &format!("{case:?}"));
    }
}

#[test]
fn attention_over_a_cache_is_computed_sequence_by_sequence_and_in_pieces() {
    let (device, cpu) = (open(), CpuBackend.open("cpu:0", &[]).unwrap());
    let (heads, depth, tokens, block_len) = (64, 4, 400, 16);
    let cache = CacheSpec {
        dtype: DType::F32,
        blocks: 2 * tokens / block_len,
        block_len,
        kv_heads: 2,
        head_dim: depth,
    };
    // 400 rows of 64 heads that see 400 tokens are 41 MB of scores, more than are computed at a time.
    let one: Vec<(usize, usize)> = (0..tokens).map(|p| (0, p)).collect();
    let alternating: Vec<(usize, usize)> = (0..60).map(|r| (r % 2, 340 + r / 2)).collect();
    for (rows, window, cap) in [(one.clone(), 0, 0.0), (one, 50, 2.0), (alternating, 7, 0.0)] {
        let mut g = GraphBuilder::new(0);
        let n = rows.len();
        let queries = g.tensor("q", spec(DType::F32, &[n, heads, depth])).unwrap();
        let memory = g.cache("cache", cache).unwrap();
        let width = tokens / block_len;
        let tables = g.tensor("t", spec(DType::I32, &[2, width])).unwrap();
        let sequences = g.tensor("s", spec(DType::I32, &[n])).unwrap();
        let positions = g.tensor("p", spec(DType::I32, &[n])).unwrap();
        let y = g
            .paged_attention(
                queries, memory, tables, sequences, positions, 0.5, window, cap,
            )
            .unwrap();
        let graph = g.finish(&[y]).unwrap();
        let inputs = [
            le(&noise(n * heads * depth, 3)),
            le(&noise(cache.bytes().unwrap() / 4, 4)),
            ints((0..2 * width).rev()),
            ints(rows.iter().map(|(s, _)| *s)),
            ints(rows.iter().map(|(_, p)| *p)),
        ];
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let on = |device: &dyn Device| computed(device, &graph, &inputs, n * heads * depth);
        assert_close(
            &on(&*device),
            &on(&*cpu),
            &format!("{n} rows, window {window}"),
        );
    }
}

static PROGRESS: AtomicU64 = AtomicU64::new(0);
static NODE: AtomicU64 = AtomicU64::new(0);
static EACH: AtomicBool = AtomicBool::new(false);

#[test]
fn heavy_nodes_are_steps_of_their_own_and_every_node_is_progress() {
    let device = open();
    device.leave(Trail {
        progress: &PROGRESS,
        node: &NODE,
        pack: |step, op, _| u64::from(step) << 16 | u64::from(op),
        each: &EACH,
    });
    let (side, count) = (600, 3);
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[side, side])).unwrap();
    let mut y = x;
    for _ in 0..count {
        y = g.matmul(y, x).unwrap();
    }
    let mut plan = device
        .plan(&g.finish(&[y]).unwrap(), &PlanHints::default())
        .unwrap();
    assert_eq!(plan.memory().steps, count);
    let x = filled(&*device, &vec![1.0 / side as f32; side * side]);
    let y = filled(&*device, &vec![0.0; side * side]);
    plan.bind(Slot::Input(0), &x, 0).unwrap();
    plan.bind(Slot::Output(0), &y, 0).unwrap();
    let flag = Arc::new(AtomicBool::new(false));
    plan.stop_when(Arc::clone(&flag));
    // Told to stop while it pauses after its first step, it does not take the second.
    let next = plan.execute_from(0, 0, &|| true).unwrap();
    assert_eq!(next, Some(1));
    let before = PROGRESS.load(Ordering::Relaxed);
    assert!(before >= 2, "{before}");
    flag.store(true, Ordering::Relaxed);
    let stopped = plan.execute_from(0, 1, &|| true);
    assert!(matches!(stopped, Err(DeviceError::Stopped)));
    flag.store(false, Ordering::Relaxed);
    plan.execute(0).unwrap();
    assert!((read(&y, 1)[0] - 1.0 / side as f32).abs() < 1e-6);
    assert!(PROGRESS.load(Ordering::Relaxed) >= before + 2 * count as u64);
}

#[test]
fn what_mlx_says_becomes_an_error_of_its_kind() {
    let of = |words| error_of("conv", words);
    let malloc = of("[malloc] Unable to allocate 4096 bytes. at array.cpp:12");
    assert!(matches!(
        malloc,
        DeviceError::OutOfMemory { bytes: 4096, .. }
    ));
    let metal = of("[METAL] Command buffer execution failed: Insufficient Memory");
    assert!(matches!(metal, DeviceError::OutOfMemory { .. }));
    let lacking = of("[conv] Type not supported on CPU");
    assert!(matches!(
        lacking,
        DeviceError::Unsupported { op: "conv", .. }
    ));
    let shape = of("[matmul] Last dimension of first input must match");
    assert!(matches!(
        shape,
        DeviceError::Failed {
            backend: "mlx",
            op: "conv",
            ..
        }
    ));
}

#[test]
fn limits_are_set_and_say_what_they_were() {
    let device = MlxBackend::open_device("mlx:0", &[]).unwrap();
    let before = device.set_memory_limit(1 << 30).unwrap();
    assert_eq!(device.set_memory_limit(before).unwrap(), 1 << 30);
    let before = device.set_cache_limit(1 << 20).unwrap();
    assert_eq!(device.set_cache_limit(before).unwrap(), 1 << 20);
    if device.info().path == "cpu" {
        let wired = device.set_wired_limit(0);
        assert!(matches!(wired, Err(DeviceError::Unsupported { .. })));
    }
}

#[test]
fn a_call_that_mlx_refuses_comes_back() {
    let device = open();
    // SAFETY: the list has as many numbers as it says; the handles are made here and freed once.
    let status = unsafe {
        let stream = mlx_sys::mlx_default_cpu_stream_new();
        let one = mlx_sys::mlx_array_new_float32(1.0);
        let mut made = mlx_sys::mlx_array_new();
        let (shape, dtype) = ([-1], mlx_sys::mlx_dtype__MLX_FLOAT32);
        let status = mlx_sys::mlx_full(&mut made, shape.as_ptr(), 1, one, dtype, stream);
        mlx_sys::mlx_array_free(made);
        mlx_sys::mlx_array_free(one);
        mlx_sys::mlx_stream_free(stream);
        status
    };
    assert_ne!(status, 0);
    // And the device computes.
    let graph = sines(1, 8);
    let (mut plan, output) = bound(&*device, &graph, 8);
    plan.execute(1).unwrap();
    assert!((read(&output, 1)[0] - 0.5f32.sin()).abs() < 1e-6);
}
