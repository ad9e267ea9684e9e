//! Plans from outside: the same bits on any number of threads, rows and paths, and errors instead of foreign memory.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use hotcell_graph::{CacheSpec, DType, Graph, GraphBuilder, Shape, TensorSpec, Value};
use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError},
    cpu::{CpuDevice, dequant::is_weight_dtype, matmul, pack, path::CpuPath},
    lower::{lower, without},
    plan::{Plan, PlanHints, Slot},
};

use common::{buffer, f32_bytes, numbers, rows, spec};

/// Weights whose scales are finite: random bytes, with every f16 exponent that could be infinite cleared.
fn weights(dtype: DType, n: usize, k: usize) -> Vec<u8> {
    if dtype == DType::F32 {
        return numbers(n * k, 3)
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect();
    }
    let bytes = dtype.row_bytes(k).unwrap() * n;
    numbers(bytes, 5)
        .iter()
        .map(|v| (v * 127.0) as i8 as u8 & 0xbb)
        .collect()
}

#[test]
fn every_weight_type_gives_the_same_bits_for_all_rows_threads_and_paths() {
    // More than are multiplied at a time on any path.
    const MAX_ROWS: usize = 300;
    for dtype in DType::ALL.iter().copied().filter(|d| is_weight_dtype(*d)) {
        let (n, k) = (
            83,
            if dtype.block_len() > 1 {
                2 * dtype.block_len()
            } else {
                77
            },
        );
        let w = weights(dtype, n, k);
        let x = numbers(MAX_ROWS * k, 1);
        let plain = matmul::mul_mat(CpuPath::Portable, dtype, &w, n, &x, MAX_ROWS, k);
        // Products of these are summed in another order there.
        let apart = |path| matmul::sums_by_tiles(path, dtype);
        let mut g = GraphBuilder::new(MAX_ROWS);
        let xv = g.tensor("x", rows(&[k])).unwrap();
        let wv = g.constant("w", spec(dtype, &[n, k])).unwrap();
        let y = g.mul_mat(xv, wv).unwrap();
        let graph = g.finish(&[y]).unwrap();
        for threads in [1, 2, 3] {
            for path in CpuPath::available() {
                let reference = match apart(path) {
                    true => matmul::mul_mat(path, dtype, &w, n, &x, MAX_ROWS, k),
                    false => plain.clone(),
                };
                let device = CpuDevice::with_path(threads, path).unwrap();
                let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
                let out = device.allocate("out", MAX_ROWS * n * 4).unwrap();
                plan.bind(Slot::Input(0), &buffer(&device, &f32_bytes(&x)), 0)
                    .unwrap();
                // One byte in, so that nothing is aligned.
                let shifted: Vec<u8> = std::iter::once(0).chain(w.iter().copied()).collect();
                plan.bind(Slot::Input(1), &buffer(&device, &shifted), 1)
                    .unwrap();
                plan.bind(Slot::Output(0), &out, 0).unwrap();
                for m in [1, 2, 3, 7, 16, 64, 97, 145, 300] {
                    device.stream().execute(plan.as_mut(), m).unwrap();
                    let mut y = vec![0.0; m * n];
                    out.read_f32(0, &mut y).unwrap();
                    let equal = y
                        .iter()
                        .zip(&reference)
                        .all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(equal, "{dtype}: {m} rows, {threads} threads, {path}");
                }
            }
        }
    }
}

#[test]
fn packed_weights_may_come_and_go_and_change_no_bit() {
    // As above.
    const ROWS: usize = 300;
    for dtype in [DType::Q4_0, DType::Q6K, DType::BF16, DType::F8E4M3] {
        let (n, k) = (83, 2 * dtype.block_len().max(32));
        let w = weights(dtype, n, k);
        let x = numbers(ROWS * k, 1);
        let reference = matmul::mul_mat(CpuPath::detect(), dtype, &w, n, &x, ROWS, k);
        let mut g = GraphBuilder::new(ROWS);
        let xv = g.tensor("x", rows(&[k])).unwrap();
        let wv = g.constant("w", spec(dtype, &[n, k])).unwrap();
        let y = g.mul_mat(xv, wv).unwrap();
        let graph = g.finish(&[y]).unwrap();
        let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
        let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
        let out = device.allocate("out", ROWS * n * 4).unwrap();
        let mut packed = vec![0; w.len()];
        pack::pack(dtype, k, &w, &mut packed);
        // One byte in: a packed form is read at any address too.
        packed.insert(0, 0);
        let packed = buffer(&device, &packed);
        plan.bind(Slot::Input(0), &buffer(&device, &f32_bytes(&x)), 0)
            .unwrap();
        plan.bind(Slot::Output(0), &out, 0).unwrap();
        let mut bind = |form: Option<&Buffer>, at| plan.bind_packed(Slot::Input(1), form, at);
        assert!(bind(Some(&packed), 1).unwrap());
        let short = bind(Some(&packed), 2).unwrap_err().to_string();
        assert!(short.contains("packed: needs"), "{short}");
        let error = device.stream().execute(plan.as_mut(), 1).unwrap_err();
        assert!(error.to_string().contains("not bound"), "{error}");
        plan.bind(Slot::Input(1), &buffer(&device, &w), 0).unwrap();
        let forms = [Some(&packed), None, Some(&packed)];
        for form in forms {
            assert!(plan.bind_packed(Slot::Input(1), form, 1).unwrap());
            for m in [1, 3, 8, 40, ROWS] {
                out.write(0, &vec![0; ROWS * n * 4]).unwrap();
                device.stream().execute(plan.as_mut(), m).unwrap();
                let mut y = vec![0.0; m * n];
                out.read_f32(0, &mut y).unwrap();
                let mut pairs = y.iter().zip(&reference);
                let equal = pairs.all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(equal, "{dtype}: {m} rows, packed: {}", form.is_some());
            }
        }
        // It is the packed form that is read.
        plan.bind(Slot::Input(1), &buffer(&device, &vec![0; w.len()]), 0)
            .unwrap();
        device.stream().execute(plan.as_mut(), 1).unwrap();
        let mut y = vec![0.0; n];
        out.read_f32(0, &mut y).unwrap();
        assert_eq!(y, reference[..n]);
        assert!(!plan.bind_packed(Slot::Input(0), Some(&packed), 0).unwrap());
        assert!(!plan.bind_packed(Slot::Output(0), Some(&packed), 0).unwrap());
        plan.release();
    }
}

#[test]
fn packed_experts_change_no_bit() {
    // Whole panels, and not: these have no packed form.
    for (dtype, n) in [(DType::Q4K, 48), (DType::Q8_0, 32), (DType::F16, 24)] {
        let (experts, used, k) = (5, 2, 2 * dtype.block_len().max(32));
        let w = weights(dtype, experts * n, k);
        let x = numbers(8 * k, 1);
        let ids: Vec<u8> = (0..16i32).flat_map(|i| (i * 3 % 5).to_le_bytes()).collect();
        let mut g = GraphBuilder::new(8);
        let xv = g.tensor("x", rows(&[1, k])).unwrap();
        let wv = g.constant("w", spec(dtype, &[experts, n, k])).unwrap();
        let shape = Shape::rows(&[used]).unwrap();
        let idv = g
            .tensor("ids", TensorSpec::new(DType::I32, shape).unwrap())
            .unwrap();
        let y = g.mul_mat_id(wv, xv, idv).unwrap();
        let graph = g.finish(&[y]).unwrap();
        for path in CpuPath::available() {
            let device = CpuDevice::with_path(2, path).unwrap();
            let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
            let out = device.allocate("out", 8 * used * n * 4).unwrap();
            for (i, bytes) in [f32_bytes(&x), w.clone(), ids.clone()].iter().enumerate() {
                plan.bind(Slot::Input(i), &buffer(&device, bytes), 0)
                    .unwrap();
            }
            plan.bind(Slot::Output(0), &out, 0).unwrap();
            let run = |plan: &mut dyn Plan, m: usize| {
                out.write(0, &vec![0; 8 * used * n * 4]).unwrap();
                device.stream().execute(plan, m).unwrap();
                let mut y = vec![0.0; m * used * n];
                out.read_f32(0, &mut y).unwrap();
                y.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
            };
            let stored: Vec<_> = [1, 8].map(|m| run(plan.as_mut(), m)).into();
            assert!(stored[1].iter().any(|bits| *bits != 0));
            let mut packed = vec![0; w.len()];
            pack::pack(dtype, k, &w, &mut packed);
            let form = buffer(&device, &packed);
            let takes = plan.bind_packed(Slot::Input(1), Some(&form), 0).unwrap();
            assert_eq!(takes, n % 16 == 0, "{dtype}");
            // It is the packed form that is read.
            let nothing = buffer(&device, &vec![0; w.len()]);
            if takes {
                plan.bind(Slot::Input(1), &nothing, 0).unwrap();
            }
            let now: Vec<_> = [1, 8].map(|m| run(plan.as_mut(), m)).into();
            assert!(now == stored, "{dtype}, {path}");
        }
    }
}

/// `x + swiglu(silu(x), x)`, with a reshape on the way.
fn elementwise() -> Graph {
    let mut g = GraphBuilder::new(8);
    let x = g.tensor("x", rows(&[48])).unwrap();
    let a = g.silu(x).unwrap();
    let a = g.reshape(a, Shape::rows(&[6, 8]).unwrap()).unwrap();
    let b = g.reshape(x, Shape::rows(&[6, 8]).unwrap()).unwrap();
    let s = g.swiglu(a, b).unwrap();
    let s = g.reshape(s, Shape::rows(&[48]).unwrap()).unwrap();
    let y = g.add(x, s).unwrap();
    g.finish(&[y]).unwrap()
}

fn run(graph: &Graph, x: &[f32], m: usize) -> Vec<u32> {
    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
    let mut plan = device.plan(graph, &PlanHints::default()).unwrap();
    let out = device.allocate("out", 8 * 48 * 4).unwrap();
    plan.bind(Slot::Input(0), &buffer(&device, &f32_bytes(x)), 0)
        .unwrap();
    plan.bind(Slot::Output(0), &out, 0).unwrap();
    plan.execute(m).unwrap();
    let mut y = vec![0.0; m * 48];
    out.read_f32(0, &mut y).unwrap();
    y.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn a_composite_op_and_its_decomposition_give_the_same_bits() {
    let graph = elementwise();
    let lowered = lower(&graph, "test", &|call| call.op.name != "swiglu").unwrap();
    let parts = lowered.graph;
    assert!(parts.nodes().iter().all(|n| n.op.name != "swiglu"));
    assert_eq!(parts.nodes().len(), graph.nodes().len() + 1);
    assert_eq!(lowered.origins, [0, 1, 2, 3, 3, 4, 5], "two are of one");
    let x = numbers(8 * 48, 9);
    assert_eq!(run(&graph, &x, 8), run(&parts, &x, 8));
    let primitive = lower(&graph, "test", &|call| call.op.name != "silu").unwrap_err();
    assert!(
        matches!(primitive, DeviceError::Unsupported { op: "silu", .. }),
        "{primitive}"
    );
}

#[test]
fn parts_of_parts_are_of_the_node_that_was_lowered() {
    let mut g = GraphBuilder::new(8);
    let x = g.tensor("x", rows(&[48])).unwrap();
    let a = g.silu(x).unwrap();
    let b = g.standard_deviation(a, &[-1], true, 0).unwrap();
    let c = g.exp(b).unwrap();
    let graph = g.finish(&[c]).unwrap();
    // A deviation is made of means, and these of `reduce_sum`.
    let lacks = ["standard_deviation", "mean"];
    let lowered = lower(&graph, "test", &|call| !lacks.contains(&call.op.name)).unwrap();
    let ops: Vec<_> = lowered.graph.nodes().iter().map(|n| n.op.name).collect();
    assert_eq!(
        ops.iter().filter(|op| **op == "reduce_sum").count(),
        2,
        "{ops:?}"
    );
    let mut expected = vec![1; ops.len()];
    (expected[0], expected[ops.len() - 1]) = (0, 2);
    assert_eq!(lowered.origins, expected, "{ops:?}");
}

#[test]
fn silu_is_what_it_says() {
    let mut g = GraphBuilder::new(8);
    let x = g.tensor("x", rows(&[48])).unwrap();
    let y = g.silu(x).unwrap();
    let x: Vec<f32> = numbers(8 * 48, 2).iter().map(|v| v * 20.0).collect();
    let y = run(&g.finish(&[y]).unwrap(), &x, 8);
    for (x, y) in x.iter().zip(y) {
        let exact = f64::from(*x) / (1.0 + (-f64::from(*x)).exp());
        assert!(
            (f64::from(f32::from_bits(y)) - exact).abs() <= exact.abs() * 3e-7 + 1e-30,
            "silu({x})"
        );
    }
}

#[test]
fn a_plan_runs_only_when_everything_is_bound_and_fits() {
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let mut plan = device.plan(&elementwise(), &PlanHints::default()).unwrap();
    let size = 8 * 48 * 4;
    let refused =
        |r: Result<(), DeviceError>| assert!(matches!(r, Err(DeviceError::Binding(_))), "{r:?}");
    refused(plan.execute(1));
    let (x, y) = (
        device.allocate("x", size).unwrap(),
        device.allocate("y", size + 64).unwrap(),
    );
    refused(plan.bind(Slot::Input(7), &x, 0));
    refused(plan.bind(Slot::Input(0), &x, 4));
    refused(plan.bind(Slot::Input(0), &y, 2));
    refused(plan.bind(Slot::Input(0), &x, usize::MAX));
    plan.bind(Slot::Input(0), &x, 0).unwrap();
    refused(plan.execute(1));
    // An output over an input would change what is still to be read.
    plan.bind(Slot::Output(0), &x, 0).unwrap();
    refused(plan.execute(8));
    refused(plan.execute(8));
    plan.bind(Slot::Output(0), &y, 64).unwrap();
    plan.execute(8).unwrap();
    plan.execute(0).unwrap();
    refused(plan.execute(9));
    refused(x.write(size - 1, &[0, 0]));
    refused(x.read(usize::MAX, &mut [0]));

    let mut dry = device
        .plan(
            &elementwise(),
            &PlanHints {
                allocate: false,
                ..PlanHints::default()
            },
        )
        .unwrap();
    assert_eq!(dry.memory(), plan.memory());
    assert!(dry.memory().arena > 0 && dry.memory().arena <= dry.memory().unshared);
    dry.bind(Slot::Input(0), &x, 0).unwrap();
    dry.bind(Slot::Output(0), &y, 64).unwrap();
    refused(dry.execute(1));
}

fn i32s(device: &dyn Device, values: &[i32]) -> Buffer {
    let buffer = device.allocate("indices", values.len() * 4).unwrap();
    buffer.write_i32(0, values).unwrap();
    buffer
}

#[test]
fn an_index_outside_is_an_error_and_the_plan_lives_on() {
    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
    let mut g = GraphBuilder::new(4);
    let table = g.constant("table", spec(DType::F32, &[10, 8])).unwrap();
    let at = g
        .tensor(
            "at",
            TensorSpec::new(DType::I32, Shape::rows(&[]).unwrap()).unwrap(),
        )
        .unwrap();
    let y = g.get_rows(table, at).unwrap();
    let mut plan = device
        .plan(&g.finish(&[y]).unwrap(), &PlanHints::default())
        .unwrap();
    let (out, values) = (device.allocate("out", 4 * 8 * 4).unwrap(), numbers(80, 4));
    plan.bind(Slot::Input(0), &buffer(&device, &f32_bytes(&values)), 0)
        .unwrap();
    plan.bind(Slot::Output(0), &out, 0).unwrap();
    for bad in [-1, 10, i32::MAX, i32::MIN] {
        plan.bind(Slot::Input(1), &i32s(&device, &[0, 9, bad, 1]), 0)
            .unwrap();
        let error = plan.execute(4).unwrap_err();
        assert!(
            matches!(
                error,
                DeviceError::IndexOutOfRange {
                    op: "get_rows",
                    bound: 10,
                    ..
                }
            ),
            "{error}"
        );
        plan.execute(2).unwrap();
    }
    let mut row = vec![0.0; 8];
    out.read_f32(8, &mut row).unwrap();
    assert_eq!(row, values[72..80]);
}

#[test]
fn cache_slots_tables_and_positions_are_checked() {
    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
    let cache = CacheSpec {
        dtype: DType::F16,
        blocks: 4,
        block_len: 16,
        kv_heads: 2,
        head_dim: 8,
    };
    let per_row = || TensorSpec::new(DType::I32, Shape::rows(&[]).unwrap()).unwrap();
    let mut g = GraphBuilder::new(2);
    let x = g.tensor("x", rows(&[2, 8])).unwrap();
    let c = g.cache("cache", cache).unwrap();
    let v: Vec<Value> = ["slots", "sequences", "positions"]
        .iter()
        .map(|n| g.tensor(*n, per_row()).unwrap())
        .collect();
    let tables = g.tensor("tables", spec(DType::I32, &[2, 3])).unwrap();
    g.cache_write(c, x, x, v[0]).unwrap();
    let y = g
        .paged_attention(x, c, tables, v[1], v[2], 0.5, 0, 0.0)
        .unwrap();
    let mut plan = device
        .plan(&g.finish(&[y]).unwrap(), &PlanHints::default())
        .unwrap();
    let (x, out) = (
        numbers(2 * 16, 8),
        device.allocate("out", 2 * 16 * 4).unwrap(),
    );
    plan.bind(Slot::Input(0), &buffer(&device, &f32_bytes(&x)), 0)
        .unwrap();
    plan.bind(
        Slot::Input(1),
        &device.allocate("cache", cache.bytes().unwrap()).unwrap(),
        0,
    )
    .unwrap();
    plan.bind(Slot::Output(0), &out, 0).unwrap();
    let mut run = |slots: [i32; 2], sequences: [i32; 2], positions: [i32; 2], tables: [i32; 6]| {
        plan.bind(Slot::Input(2), &i32s(&device, &slots), 0)
            .unwrap();
        plan.bind(Slot::Input(3), &i32s(&device, &sequences), 0)
            .unwrap();
        plan.bind(Slot::Input(4), &i32s(&device, &positions), 0)
            .unwrap();
        plan.bind(Slot::Input(5), &i32s(&device, &tables), 0)
            .unwrap();
        plan.execute(2)
    };
    let good = [0, 1, 2, 3, 0, 0];
    run([0, 48], [0, 1], [0, 0], good).unwrap();
    // Alone in its sequence, a token attends to itself: the value as the cache rounded it.
    let mut y = vec![0.0; 32];
    out.read_f32(0, &mut y).unwrap();
    for (x, y) in x.iter().zip(&y) {
        assert_eq!(half::f16::from_f32(*x).to_f32(), *y);
    }
    run([-1, 0], [0, 0], [0, 0], good).unwrap();
    for (slots, sequences, positions, tables) in [
        ([64, 0], [0, 0], [0, 0], good),
        ([-2, 0], [0, 0], [0, 0], good),
        ([0, 1], [2, 0], [0, 0], good),
        ([0, 1], [-1, 0], [0, 0], good),
        ([0, 1], [0, 0], [48, 0], good),
        ([0, 1], [0, 0], [-1, 0], good),
        ([0, 1], [0, 0], [20, 0], [0, 4, 0, 0, 0, 0]),
        ([0, 1], [0, 0], [20, 0], [0, -1, 0, 0, 0, 0]),
    ] {
        let error = run(slots, sequences, positions, tables).unwrap_err();
        assert!(
            matches!(error, DeviceError::IndexOutOfRange { .. }),
            "{error}"
        );
    }
}

#[test]
fn a_plan_may_be_bound_for_fewer_rows_and_forgets_what_it_was_bound_to() {
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let mut plan = device.plan(&elementwise(), &PlanHints::default()).unwrap();
    let refused =
        |r: Result<(), DeviceError>| assert!(matches!(r, Err(DeviceError::Binding(_))), "{r:?}");
    let size = 3 * 48 * 4;
    let (x, y) = (
        device.allocate("x", size).unwrap(),
        device.allocate("y", size).unwrap(),
    );
    refused(plan.bind(Slot::Input(0), &x, 0));
    refused(plan.bind_for(4, Slot::Input(0), &x, 0));
    plan.bind_for(3, Slot::Input(0), &x, 0).unwrap();
    plan.bind_for(3, Slot::Output(0), &y, 0).unwrap();
    plan.execute(3).unwrap();
    plan.execute(2).unwrap();
    refused(plan.execute(4));
    plan.release();
    refused(plan.execute(1));

    let tight = PlanHints {
        max_bytes: Some(plan.memory().arena - 1),
        ..PlanHints::default()
    };
    let error = device.plan(&elementwise(), &tight).err();
    assert!(
        matches!(error, Some(DeviceError::OutOfMemory { bytes, .. }) if bytes == plan.memory().arena)
    );
}

#[test]
fn only_memory_that_is_read_may_be_bound_twice_and_many_slots_are_compared_soon() {
    const MANY: usize = 30_000;
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let mut g = GraphBuilder::new(1);
    let x = g.tensor("x", spec(DType::F32, &[4])).unwrap();
    let z = g.tensor("z", spec(DType::F32, &[4])).unwrap();
    let y = g.add(x, z).unwrap();
    let graph = g.finish(&vec![y; MANY]).unwrap();
    let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
    let read = buffer(&device, &f32_bytes(&[1.0, 2.0, 3.0, 4.0, 5.0]));
    let all = device.allocate("all", MANY * 16).unwrap();
    let refused =
        |r: Result<(), DeviceError>| assert!(matches!(r, Err(DeviceError::Binding(_))), "{r:?}");
    plan.bind(Slot::Input(0), &read, 0).unwrap();
    plan.bind(Slot::Input(1), &read, 4).unwrap();
    for i in 0..MANY {
        plan.bind(Slot::Output(i), &all, i * 16).unwrap();
    }
    plan.execute(1).unwrap();
    let mut last = [0.0; 4];
    all.read_f32((MANY - 1) * 4, &mut last).unwrap();
    assert_eq!(last, [3.0, 5.0, 7.0, 9.0]);
    // Two outputs, in either order, and an input over an output.
    plan.bind(Slot::Output(7), &all, 8 * 16 + 8).unwrap();
    refused(plan.execute(1));
    plan.bind(Slot::Output(7), &all, 6 * 16 + 8).unwrap();
    refused(plan.execute(1));
    plan.bind(Slot::Output(7), &all, 7 * 16).unwrap();
    plan.execute(1).unwrap();
    plan.bind(Slot::Input(1), &all, 12).unwrap();
    refused(plan.execute(1));
    plan.bind(Slot::Input(1), &read, 0).unwrap();
    plan.execute(1).unwrap();
}

#[test]
fn results_without_elements_take_no_time_whatever_their_other_axes() {
    // More steps along any of these axes than a computer does in a year.
    let build: [fn(&mut GraphBuilder) -> Value; 6] = [
        |g| {
            let x = g.tensor("x", spec(DType::F32, &[1 << 38, 2, 0])).unwrap();
            g.reduce_sum(x, &[1], false).unwrap()
        },
        |g| {
            let x = g
                .tensor("x", spec(DType::F32, &[1 << 20, 1 << 19, 0]))
                .unwrap();
            g.sort(x, 0, false).unwrap()
        },
        |g| {
            let a = g
                .tensor("a", spec(DType::F32, &[1 << 20, 1 << 18, 0, 1]))
                .unwrap();
            let b = g
                .tensor("b", spec(DType::F32, &[1 << 20, 1 << 18, 1, 0]))
                .unwrap();
            g.matmul(a, b).unwrap()
        },
        |g| {
            let x = g.tensor("x", spec(DType::F32, &[1 << 38, 0, 1])).unwrap();
            let w = g.tensor("w", spec(DType::F32, &[0, 0, 1])).unwrap();
            g.conv(x, w, None, &[1], &[0], &[0], &[1], 1, "channels_first")
                .unwrap()
        },
        |g| {
            let x = g.tensor("x", spec(DType::F32, &[1, 0])).unwrap();
            g.pad(x, None, &[1 << 29, 0], &[1 << 29, 0], "wrap")
                .unwrap()
        },
        |g| {
            let x = g.tensor("x", spec(DType::F32, &[1 << 38, 0])).unwrap();
            let y = g.exp(x).unwrap();
            let y = g.neg(y).unwrap();
            g.softmax(y, 0).unwrap()
        },
    ];
    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
    let nothing = device.allocate("nothing", 4).unwrap();
    for build in build {
        let mut g = GraphBuilder::new(1);
        let y = build(&mut g);
        let graph = g.finish(&[y]).unwrap();
        let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
        for i in 0..graph.inputs().len() {
            plan.bind(Slot::Input(i), &nothing, 0).unwrap();
        }
        plan.bind(Slot::Output(0), &nothing, 0).unwrap();
        plan.execute(1).unwrap();
    }
}

#[test]
fn rows_without_elements_take_no_time_either() {
    // Sorted along the rows, of which there are none: so many empty lines.
    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
    let mut g = GraphBuilder::new(1);
    let x = g.tensor("x", rows(&[1 << 26])).unwrap();
    let y = g.sort(x, 0, false).unwrap();
    let graph = g.finish(&[y]).unwrap();
    let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
    let nothing = device.allocate("nothing", 4).unwrap();
    plan.bind_for(0, Slot::Input(0), &nothing, 0).unwrap();
    plan.bind_for(0, Slot::Output(0), &nothing, 0).unwrap();
    let begin = std::time::Instant::now();
    plan.execute(0).unwrap();
    assert!(begin.elapsed().as_millis() < 100);
}

#[test]
fn nothing_may_lie_at_any_address() {
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let mut g = GraphBuilder::new(1);
    let x = g.tensor("x", spec(DType::F32, &[0])).unwrap();
    let sum = g.reduce_sum(x, &[], false).unwrap();
    let graph = g.finish(&[sum]).unwrap();
    let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
    let out = buffer(&device, &f32_bytes(&[1.0, 1.0]));
    plan.bind(Slot::Input(0), &out, 7).unwrap();
    plan.bind(Slot::Output(0), &out, 4).unwrap();
    plan.execute(1).unwrap();
    let mut y = [1.0; 2];
    out.read_f32(0, &mut y).unwrap();
    assert_eq!(y, [1.0, 0.0]);
}

#[test]
fn rows_that_u32_does_not_count_cannot_be_sorted() {
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let dry = PlanHints {
        allocate: false,
        ..PlanHints::default()
    };
    let ops: [fn(&mut GraphBuilder, Value) -> Value; 3] = [
        |g, x| g.sort(x, 0, false).unwrap(),
        |g, x| g.argsort(x, 0, false).unwrap(),
        |g, x| g.argmax(x, 0, false).unwrap(),
    ];
    for op in ops {
        for (most, fits) in [((1 << 32) - 1, true), (1 << 32, false)] {
            let mut g = GraphBuilder::new(most);
            let x = g.tensor("x", rows(&[])).unwrap();
            let y = op(&mut g, x);
            let graph = g.finish(&[y]).unwrap();
            let plan = device.plan(&graph, &dry);
            let ok = matches!(plan.as_ref().err(), Some(DeviceError::Unsupported { .. }));
            assert_eq!(ok, !fits, "{:?}", plan.err());
        }
    }
}

#[test]
fn the_last_of_two_rows_with_one_slot_is_in_the_cache() {
    let cache = CacheSpec {
        dtype: DType::F32,
        blocks: 1,
        block_len: 4,
        kv_heads: 3,
        head_dim: 500,
    };
    let width = cache.kv_heads * cache.head_dim;
    let (k, v) = (numbers(8 * width, 1), numbers(8 * width, 2));
    for threads in [1, 2, 3, 16] {
        let device = CpuDevice::with_path(threads, CpuPath::detect()).unwrap();
        let mut g = GraphBuilder::new(8);
        let keys = g.tensor("k", rows(&[3, 500])).unwrap();
        let values = g.tensor("v", rows(&[3, 500])).unwrap();
        let slots = TensorSpec::new(DType::I32, Shape::rows(&[]).unwrap()).unwrap();
        let slots = g.tensor("slots", slots).unwrap();
        let c = g.cache("cache", cache).unwrap();
        g.cache_write(c, keys, values, slots).unwrap();
        let graph = g.finish(&[]).unwrap();
        let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
        let memory = device.allocate("cache", cache.bytes().unwrap()).unwrap();
        let inputs = [
            buffer(&device, &f32_bytes(&k)),
            buffer(&device, &f32_bytes(&v)),
            i32s(&device, &[2, 0, 2, -1, 0, 2, 1, 0]),
            memory.clone(),
        ];
        for (i, input) in inputs.iter().enumerate() {
            plan.bind(Slot::Input(i), input, 0).unwrap();
        }
        plan.execute(8).unwrap();
        let mut all = vec![0.0; 2 * 4 * width];
        memory.read_f32(0, &mut all).unwrap();
        // [keys and values, heads, places, head]
        for (half, source) in all.chunks(4 * width).zip([&k, &v]) {
            for (slot, row) in [(0, 7), (1, 6), (2, 5)] {
                for head in 0..3 {
                    let ours = &half[(head * 4 + slot) * 500..][..500];
                    assert_eq!(ours, &source[row * width + head * 500..][..500]);
                }
            }
        }
    }
}

#[test]
fn a_row_cannot_see_more_keys_than_the_cache_has() {
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let cache = CacheSpec {
        dtype: DType::F32,
        blocks: 1,
        block_len: 16,
        kv_heads: 1,
        head_dim: 4,
    };
    for (window, position, fits) in [(0, 15, true), (0, 16, false), (16, 40, true)] {
        let per_row = || TensorSpec::new(DType::I32, Shape::rows(&[]).unwrap()).unwrap();
        let mut g = GraphBuilder::new(1);
        let x = g.tensor("x", rows(&[1, 4])).unwrap();
        let c = g.cache("cache", cache).unwrap();
        let tables = g.tensor("tables", spec(DType::I32, &[1, 3])).unwrap();
        let sequences = g.tensor("sequences", per_row()).unwrap();
        let positions = g.tensor("positions", per_row()).unwrap();
        let y = g
            .paged_attention(x, c, tables, sequences, positions, 0.5, window, 0.0)
            .unwrap();
        let graph = g.finish(&[y]).unwrap();
        let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
        let inputs = [
            buffer(&device, &f32_bytes(&[1.0; 4])),
            buffer(&device, &f32_bytes(&[3.0; 128])),
            i32s(&device, &[0, 0, 0]),
            i32s(&device, &[0]),
            i32s(&device, &[position]),
        ];
        for (i, input) in inputs.iter().enumerate() {
            plan.bind(Slot::Input(i), input, 0).unwrap();
        }
        let out = device.allocate("out", 16).unwrap();
        plan.bind(Slot::Output(0), &out, 0).unwrap();
        let done = plan.execute(1);
        if !fits {
            assert!(matches!(done, Err(DeviceError::IndexOutOfRange { .. })));
            continue;
        }
        done.unwrap();
        let mut y = [0.0; 4];
        out.read_f32(0, &mut y).unwrap();
        assert_eq!(y, [3.0; 4]);
    }
}

#[test]
fn every_byte_but_zero_is_true() {
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let mut g = GraphBuilder::new(1);
    let a = g.tensor("a", spec(DType::Bool, &[4])).unwrap();
    let b = g.tensor("b", spec(DType::Bool, &[4])).unwrap();
    let ys = [
        g.bitwise_and(a, b).unwrap(),
        g.bitwise_or(a, b).unwrap(),
        g.bitwise_xor(a, b).unwrap(),
        g.maximum(a, b).unwrap(),
        g.minimum(a, b).unwrap(),
        g.equal(a, b).unwrap(),
        g.not_equal(a, b).unwrap(),
        g.less(a, b).unwrap(),
        g.less_equal(a, b).unwrap(),
        g.greater(a, b).unwrap(),
        g.greater_equal(a, b).unwrap(),
        g.reduce_sum(a, &[], false).unwrap(),
        g.reduce_prod(a, &[], false).unwrap(),
        g.reduce_max(a, &[], false).unwrap(),
        g.reduce_min(b, &[], false).unwrap(),
        g.argmax(b, 0, false).unwrap(),
        g.argsort(b, 0, false).unwrap(),
    ];
    let graph = g.finish(&ys).unwrap();
    let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
    plan.bind(Slot::Input(0), &buffer(&device, &[2, 3, 0, 0]), 0)
        .unwrap();
    plan.bind(Slot::Input(1), &buffer(&device, &[1, 0, 255, 0]), 0)
        .unwrap();
    // As for [1, 1, 0, 0] and [1, 0, 1, 0]; sums, places and products are of four bytes.
    let expected: [&[u8]; 17] = [
        &[1, 0, 0, 0],
        &[1, 1, 1, 0],
        &[0, 1, 1, 0],
        &[1, 1, 1, 0],
        &[1, 0, 0, 0],
        &[1, 0, 0, 1],
        &[0, 1, 1, 0],
        &[0, 0, 1, 0],
        &[1, 0, 1, 1],
        &[0, 1, 0, 0],
        &[1, 1, 0, 1],
        &[2, 0, 0, 0],
        &[0, 0, 0, 0],
        &[1],
        &[0],
        &[0, 0, 0, 0],
        &[1, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0],
    ];
    let outs: Vec<Buffer> = expected
        .iter()
        .enumerate()
        .map(|(i, bytes)| {
            let out = device.allocate("out", bytes.len()).unwrap();
            plan.bind(Slot::Output(i), &out, 0).unwrap();
            out
        })
        .collect();
    plan.execute(1).unwrap();
    for (i, (out, expected)) in outs.iter().zip(expected).enumerate() {
        let mut bytes = vec![7; expected.len()];
        out.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, expected, "output {i}");
    }
}

#[test]
fn a_long_step_stops_soon_and_the_plan_lives_on() {
    // 2^35 elements seen by windows: minutes. The flag is set by another thread, or before.
    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
    let mut g = GraphBuilder::new(1);
    let n = 1 << 17;
    let x = g.tensor("x", spec(DType::F32, &[1, 1, n])).unwrap();
    let (window, pad) = ([1 << 18], [1 << 17]);
    let y = g
        .pool(
            x,
            "max",
            &window,
            &[1],
            &pad,
            &[(1 << 18) - 1],
            &[1],
            "channels_first",
        )
        .unwrap();
    let graph = g.finish(&[y]).unwrap();
    let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
    let x = device.allocate("x", n * 4).unwrap();
    let out = device.allocate("out", (1 << 18) * 4).unwrap();
    for late in [true, false] {
        plan.bind(Slot::Input(0), &x, 0).unwrap();
        plan.bind(Slot::Output(0), &out, 0).unwrap();
        let flag = Arc::new(AtomicBool::new(!late));
        plan.stop_when(Arc::clone(&flag));
        let begin = Instant::now();
        let setter = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            flag.store(true, Ordering::Relaxed);
        });
        assert!(matches!(plan.execute(1), Err(DeviceError::Stopped)));
        assert!(begin.elapsed() < Duration::from_secs(5));
        setter.join().unwrap();
        plan.release();
    }
    let mut g = GraphBuilder::new(1);
    let x = g.tensor("x", spec(DType::F32, &[3])).unwrap();
    let y = g.sort(x, 0, false).unwrap();
    let graph = g.finish(&[y]).unwrap();
    let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
    let x = buffer(&device, &f32_bytes(&[2.0, 3.0, 1.0]));
    let mut bind_and_run = |flag: Option<Arc<AtomicBool>>| {
        plan.bind(Slot::Input(0), &x, 0).unwrap();
        plan.bind(Slot::Output(0), &out, 0).unwrap();
        flag.into_iter().for_each(|flag| plan.stop_when(flag));
        let done = plan.execute(1);
        plan.release();
        done
    };
    let set = Some(Arc::new(AtomicBool::new(true)));
    assert!(matches!(bind_and_run(set), Err(DeviceError::Stopped)));
    bind_and_run(None).unwrap();
    let mut y = [0.0; 3];
    out.read_f32(0, &mut y).unwrap();
    assert_eq!(y, [1.0, 2.0, 3.0]);
}

#[test]
fn a_plan_prepared_on_another_thread_is_the_same() {
    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(DType::F32, &[300, 40])).unwrap();
    let y = g.softmax(x, 1).unwrap();
    let t = g.transpose(x, &[1, 0]).unwrap();
    let z = g.matmul(y, t).unwrap();
    let graph = g.finish(&[z]).unwrap();
    let hints = PlanHints::default();
    let planner = device.planner().unwrap();
    let prepare = || planner.prepare(&graph, &hints).unwrap();
    let prepared = std::thread::scope(|s| s.spawn(prepare).join().unwrap());
    let mut at_once = device.plan(&graph, &hints).unwrap();
    assert_eq!(prepared.memory(), at_once.memory());
    // What is too large comes back and can be tried again.
    let little = PlanHints {
        max_bytes: Some(prepared.memory().arena - 1),
        ..hints
    };
    let refused = device.finish(prepared, &little).err().unwrap();
    assert!(matches!(refused.error, DeviceError::OutOfMemory { .. }));
    let mut there = device
        .finish(refused.prepared.unwrap(), &hints)
        .map_err(|e| e.error)
        .unwrap();
    let x = buffer(&device, &f32_bytes(&numbers(300 * 40, 9)));
    let results = [&mut at_once, &mut there].map(|plan| {
        let out = device.allocate("out", 300 * 300 * 4).unwrap();
        plan.bind(Slot::Input(0), &x, 0).unwrap();
        plan.bind(Slot::Output(0), &out, 0).unwrap();
        plan.execute(0).unwrap();
        let mut bytes = vec![0; 300 * 300 * 4];
        out.read(0, &mut bytes).unwrap();
        bytes
    });
    assert!(results[0] == results[1]);
    // With fewer threads some parts of it would never run.
    let alone = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let refused = alone.finish(prepare(), &hints).err().unwrap();
    assert!(matches!(refused.error, DeviceError::Binding(_)));
}

#[test]
fn an_op_can_be_taken_apart_though_a_backend_has_it() {
    let mut g = GraphBuilder::new(0);
    let q = g.tensor("q", spec(DType::F32, &[1, 4, 3, 8])).unwrap();
    let k = g.tensor("k", spec(DType::F32, &[1, 2, 5, 8])).unwrap();
    let y = g
        .scaled_dot_product_attention(q, k, k, None, None, 0.5, true, 0, 0.0)
        .unwrap();
    let y = g.softmax(y, -1).unwrap();
    let graph = g.finish(&[y]).unwrap();
    let apart = without(&graph, "scaled_dot_product_attention").unwrap();
    let names = |g: &Graph| -> Vec<_> { g.nodes().iter().map(|n| n.op.name).collect() };
    assert!(names(&graph).contains(&"scaled_dot_product_attention"));
    let names = names(&apart);
    assert!(!names.contains(&"scaled_dot_product_attention"));
    assert!(names.contains(&"matmul") && names.contains(&"softmax"));
    let out = |g: &Graph| g.spec(g.outputs()[0]).unwrap();
    assert_eq!(out(&graph), out(&apart));
    assert_eq!(apart.inputs(), graph.inputs());
}
