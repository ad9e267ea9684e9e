//! The CUDA backend on a driver without a device: the conformance cases of the op catalogue, in this process and over gRPC.
//!
//! `HOTCELL_CASES=text` runs only the cases whose op and note contain the text. With `HOTCELL_GPU` it is this machine's driver and
//! its first device instead (`deploy/gpu-check`).

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod bits;
mod fused;
mod models;
mod remote;
mod together;
mod vault;

use std::{
    collections::BTreeSet,
    rc::Rc,
    sync::OnceLock,
    time::{Duration, Instant},
};

use hotcell_graph::{CacheSpec, DType, Graph, GraphBuilder, Shape, TensorSpec, op::Call};
use hotcell_kernels::{
    backend::{Backend, Buffer, Device, DeviceError},
    cuda::CudaBackend,
    plan::{Plan, PlanHints, Slot},
};
use hotcell_tests::{
    conformance::{Case, Local, Scope, cases, derived, unsteady, zeros},
    fakecuda::FakeDriver,
};

fn is_gpu() -> bool {
    std::env::var_os("HOTCELL_GPU").is_some()
}

/// Has this process find the driver; whether that runs the device's kernels.
fn enter() -> bool {
    static ENTERED: OnceLock<bool> = OnceLock::new();
    *ENTERED.get_or_init(|| {
        if is_gpu() {
            return true;
        }
        let driver = FakeDriver::new("devices = 2\n").unwrap();
        let (driver, has_kernels) = driver.with_kernels().unwrap();
        driver.enter().unwrap();
        has_kernels
    })
}

fn open() -> Rc<dyn Device> {
    enter();
    CudaBackend.open("cuda:0", &[]).unwrap()
}

fn local() -> Local {
    Local::new("cuda", || Ok(open())).unwrap()
}

fn chosen() -> Vec<Case> {
    let text = std::env::var("HOTCELL_CASES").unwrap_or_default();
    let mut cases = cases().unwrap();
    cases.retain(|case| case.to_string().contains(&text));
    cases
}

#[test]
fn every_case_of_the_catalogue_gives_the_reference_values() {
    let mut local = local();
    let mut wrong = Vec::new();
    let cases = chosen();
    for case in &cases {
        if let Err(error) = case.check(&mut local) {
            wrong.push(format!("{case}: {error:#}"));
        }
    }
    println!("{} cases", cases.len());
    assert!(
        wrong.is_empty(),
        "{} of {} cases:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}

#[test]
fn what_the_table_has_is_in_the_image() {
    if !enter() {
        return;
    }
    let device = CudaBackend::open_device("cuda:0", &[]).unwrap();
    let mut seen = BTreeSet::new();
    for graph in chosen().iter().filter_map(|case| case.graph().ok()) {
        for node in graph.nodes() {
            let inputs = graph.input_specs(node).unwrap();
            let call = Call {
                op: node.op,
                inputs: &inputs,
                attributes: &node.attributes,
            };
            let has = CudaBackend::has_kernel(&call);
            assert_eq!(
                has,
                device.is_native(&call),
                "{} of {inputs:?}",
                node.op.name
            );
            if has {
                seen.insert(node.op.name);
            }
        }
    }
    assert!(seen.len() > 80, "{}", seen.len());
}

#[test]
fn derived_classes_give_the_same() {
    let mut local = local();
    let mut cases = chosen();
    cases.retain(|case| case.reads_only(&[DType::Bool, DType::I32, DType::BF16, DType::F32]));
    let scope = Scope {
        every_note: false,
        ..Scope::ALL
    };
    let sizes = [DType::Bool, DType::BF16, DType::F32, DType::C64];
    derived(&cases, &mut [&mut local], scope, &sizes).unwrap();
}

#[test]
fn of_zeros_of_both_signs_the_greatest_is_positive_and_the_least_negative() {
    zeros(&mut local()).unwrap();
}

#[test]
fn inputs_that_change_while_they_are_read_touch_nothing_but_results() {
    unsteady(open()).unwrap();
}

#[test]
fn devices_say_what_they_are() {
    open();
    let devices = CudaBackend.devices();
    if is_gpu() {
        println!("{devices:#?}");
        return;
    }
    assert_eq!(devices.len(), 2);
    let [first, second] = &devices[..] else {
        panic!("{devices:?}")
    };
    assert_eq!(
        (first.id.as_str(), second.id.as_str()),
        ("cuda:0", "cuda:1")
    );
    assert_eq!(first.path, "sm_90");
    assert_eq!(first.memory_bytes, 1 << 30);
    assert!(first.description.contains("0000:01:00.0"), "{first:?}");
    assert!(CudaBackend.open("cuda:2", &[]).is_err());
    assert!(CudaBackend.open("cuda:x", &[]).is_err());
}

/// `rms_norm(rows of table at ids) @ wᵀ + 1`, cut to its first 8 columns and turned.
fn chain() -> Graph {
    let mut g = GraphBuilder::new(6);
    let spec = |dtype, dims: &[usize]| TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap();
    let ids = TensorSpec::new(DType::I32, Shape::rows(&[]).unwrap()).unwrap();
    let ids = g.tensor("ids", ids).unwrap();
    let table = g.constant("table", spec(DType::F32, &[5, 64])).unwrap();
    let w = g.constant("w", spec(DType::Q8_0, &[16, 64])).unwrap();
    let x = g.get_rows(table, ids).unwrap();
    let x = g.rms_norm(x, None, 1e-5).unwrap();
    let y = g.mul_mat(x, w).unwrap();
    let one = g.literal(DType::F32, Shape::default(), &1f32.to_le_bytes());
    let y = g.add(y, one.unwrap()).unwrap();
    let y = g.slice(y, &[0, 0], &[i64::MAX, 8], &[1, 1]).unwrap();
    g.finish(&[y]).unwrap()
}

/// Its plan with everything bound: `ids`, and the result.
fn bound(device: &dyn Device) -> (Box<dyn Plan>, Buffer, Buffer) {
    let mut plan = device.plan(&chain(), &PlanHints::default()).unwrap();
    let buffer = |bytes| device.allocate("a test", bytes).unwrap();
    let (ids, table, w, out) = (buffer(24), buffer(5 * 256), buffer(16 * 68), buffer(6 * 32));
    let numbers = (0..5 * 64).flat_map(|i: i32| ((i * 37 % 101) as f32 - 50.0).to_le_bytes());
    table.write(0, &numbers.collect::<Vec<u8>>()).unwrap();
    let blocks = (0..32).flat_map(|b: u8| {
        [0, 0x2c + b % 4]
            .into_iter()
            .chain((0..32).map(move |i| i * 7 + b))
    });
    w.write(0, &blocks.collect::<Vec<u8>>()).unwrap();
    for (i, input) in [&ids, &table, &w].into_iter().enumerate() {
        plan.bind(Slot::Input(i), input, 0).unwrap();
    }
    plan.bind(Slot::Output(0), &out, 0).unwrap();
    (plan, ids, out)
}

#[test]
fn a_plan_that_is_recorded_gives_what_it_gave_step_by_step() {
    let has_kernels = enter();
    let device = open();
    let cpu = hotcell_kernels::cpu::CpuDevice::beside(&[]).unwrap();
    let (mut plan, ids, out) = bound(&*device);
    let (mut reference, cpu_ids, cpu_out) = bound(&*cpu);
    // No part of it is the processor's, so that it is recorded.
    let steps = plan.memory();
    assert!(!has_kernels || steps.barriers == 0, "{steps:?}");
    for round in 0..6 {
        let rows = [5, 3][round % 2];
        let now: Vec<i32> = (0..rows as i32)
            .map(|i| (i * 3 + round as i32) % 5)
            .collect();
        ids.write_i32(0, &now).unwrap();
        cpu_ids.write_i32(0, &now).unwrap();
        plan.execute(rows).unwrap();
        reference.execute(rows).unwrap();
        let (mut ours, mut theirs) = (vec![0f32; rows * 8], vec![0f32; rows * 8]);
        out.read_f32(0, &mut ours).unwrap();
        cpu_out.read_f32(0, &mut theirs).unwrap();
        for (a, b) in ours.iter().zip(&theirs) {
            assert!(
                (a - b).abs() <= 1e-4 * b.abs().max(1.0),
                "{ours:?} {theirs:?}"
            );
        }
    }
    // An index that is wrong is told by its number, also out of a recording, and the next execution is right again.
    ids.write_i32(1, &[5]).unwrap();
    let error = plan.execute(3).unwrap_err();
    assert!(
        matches!(
            error,
            DeviceError::IndexOutOfRange {
                op: "get_rows",
                index: 5,
                bound: 5
            }
        ),
        "{error:?}"
    );
    ids.write_i32(1, &[4]).unwrap();
    plan.execute(3).unwrap();
}

#[test]
fn the_device_says_when_each_step_ran() {
    let has_kernels = enter();
    let (mut plan, ids, out) = bound(&*open());
    let result = || {
        let mut values = vec![0f32; 5 * 8];
        out.read_f32(0, &mut values).unwrap();
        out.write(0, &[0; 5 * 32]).unwrap();
        values
    };
    ids.write_i32(0, &[3, 1, 4, 1, 0]).unwrap();
    plan.execute(5).unwrap();
    let expected = result();
    // The clocks of host and device are brought together once, and then by what events round to.
    let slack = Duration::from_millis(1);
    for _ in 0..4 {
        let begun = Instant::now();
        let steps = plan.execute_timed(5).unwrap().unwrap();
        let ended = Instant::now();
        assert_eq!(result(), expected);
        assert_eq!(steps.len(), plan.memory().steps);
        assert!(steps.len() > 3 || !has_kernels, "{steps:?}");
        let ends = steps.iter().map(|step| step.begun + step.took);
        for (before, next) in ends.clone().zip(&steps[1..]) {
            assert!(before <= next.begun + slack, "{steps:?}");
        }
        let end = ends.max().unwrap();
        assert!(steps[0].begun + slack >= begun && end <= ended + slack);
        // Recordings are made and used beside it.
        plan.execute(5).unwrap();
        assert_eq!(result(), expected);
    }
    ids.write_i32(1, &[7]).unwrap();
    let error = plan.execute_timed(3).unwrap_err();
    assert!(
        matches!(error, DeviceError::IndexOutOfRange { index: 7, .. }),
        "{error:?}"
    );
}

#[test]
fn no_step_of_a_dense_models_layer_is_the_processors() {
    let has_kernels = enter();
    let device = open();
    let (heads, d) = (4, 32);
    let mut g = GraphBuilder::new(16);
    let spec = |dtype, dims: &[usize]| TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap();
    let rows = |dtype, dims: &[usize]| TensorSpec::new(dtype, Shape::rows(dims).unwrap()).unwrap();
    let ids = |g: &mut GraphBuilder, name: &str| g.tensor(name, rows(DType::I32, &[])).unwrap();
    let (positions, sequences) = (ids(&mut g, "positions"), ids(&mut g, "sequences"));
    let (slots, tokens) = (ids(&mut g, "slots"), ids(&mut g, "tokens"));
    let tables = g.tensor("tables", spec(DType::I32, &[2, 64])).unwrap();
    let frequencies = g.tensor("f", spec(DType::F32, &[d / 2])).unwrap();
    let cache = CacheSpec {
        dtype: DType::F16,
        blocks: 128,
        block_len: 16,
        kv_heads: heads,
        head_dim: d,
    };
    let cache = g.cache("cache", cache).unwrap();
    let constant = |g: &mut GraphBuilder, name: &str, dtype, dims: &[usize]| {
        g.constant(name, spec(dtype, dims)).unwrap()
    };
    let table = constant(&mut g, "table", DType::BF16, &[50, heads * d]);
    let norm = constant(&mut g, "norm", DType::F32, &[heads * d]);
    let w = constant(&mut g, "w", DType::BF16, &[heads * d, heads * d]);
    let x = g.get_rows(table, tokens).unwrap();
    let y = g.rms_norm(x, Some(norm), 1e-5).unwrap();
    let y = g.mul_mat(y, w).unwrap();
    let y = g.reshape(y, Shape::rows(&[heads, d]).unwrap()).unwrap();
    let q = g.rope(y, positions, frequencies, false).unwrap();
    g.cache_write(cache, q, y, slots).unwrap();
    // After what has no result.
    let q = g.reshape(q, Shape::rows(&[1, heads * d]).unwrap()).unwrap();
    let q = g.reshape(q, Shape::rows(&[heads, d]).unwrap()).unwrap();
    let y = g.paged_attention(q, cache, tables, sequences, positions, 0.2, 0, 0.0);
    let y = g
        .reshape(y.unwrap(), Shape::rows(&[heads * d]).unwrap())
        .unwrap();
    let y = g.swiglu(y, x).unwrap();
    let y = g.add(y, x).unwrap();
    let graph = g.finish(&[y]).unwrap();
    let hints = PlanHints {
        allocate: false,
        ..PlanHints::default()
    };
    let memory = device.plan(&graph, &hints).unwrap().memory();
    assert!(!has_kernels || memory.barriers == 0, "{memory:?}");
    // What only has another shape is no step; cosines and sines are one.
    let ops = graph.nodes().iter().map(|node| node.op.name);
    let computed = ops.filter(|op| *op != "reshape").count() + 1;
    assert!(!has_kernels || memory.steps == computed, "{memory:?}");
}

#[test]
fn what_has_another_shape_stays_where_it_is_unless_it_is_wanted_or_changed() {
    let has_kernels = enter();
    let device = open();
    let spec = |dims: &[usize]| TensorSpec::new(DType::F32, Shape::fixed(dims).unwrap()).unwrap();
    let shape = |dims: &[usize]| Shape::fixed(dims).unwrap();
    let mut g = GraphBuilder::new(0);
    let x = g.tensor("x", spec(&[2, 6])).unwrap();
    // A view of a view of an input, one of what is computed and is a result itself, and one that is a result.
    let a = g.reshape(x, shape(&[3, 4])).unwrap();
    let a = g.reshape(a, shape(&[12])).unwrap();
    let sum = g.add(a, a).unwrap();
    let b = g.reshape(sum, shape(&[4, 3])).unwrap();
    let product = g.mul(b, b).unwrap();
    let last = g.reshape(product, shape(&[2, 6])).unwrap();
    let other = g.reshape(sum, shape(&[6, 2])).unwrap();
    let graph = g.finish(&[sum, last, other]).unwrap();
    let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
    let numbers: Vec<u8> = (0..12).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let input = device.allocate("a test", 48).unwrap();
    input.write(0, &numbers).unwrap();
    plan.bind(Slot::Input(0), &input, 0).unwrap();
    let outs: Vec<Buffer> = (0..3)
        .map(|_| device.allocate("a test", 48).unwrap())
        .collect();
    for (o, out) in outs.iter().enumerate() {
        plan.bind(Slot::Output(o), out, 0).unwrap();
    }
    let read = |buffer: &Buffer| {
        let mut values = vec![0f32; 12];
        buffer.read_f32(0, &mut values).unwrap();
        values
    };
    let doubled: Vec<f32> = (0..12).map(|i| 2.0 * i as f32).collect();
    let squared: Vec<f32> = doubled.iter().map(|v| v * v).collect();
    // Step by step, and recorded.
    for _ in 0..4 {
        plan.execute(0).unwrap();
        let all = outs.iter().map(read).collect::<Vec<_>>();
        assert_eq!(all, [doubled.clone(), squared.clone(), doubled.clone()]);
    }
    assert_eq!(read(&input), (0..12).map(|i| i as f32).collect::<Vec<_>>());
    // Two that compute, and the copies that are wanted.
    let steps = plan.memory().steps;
    assert!(!has_kernels || steps == 4, "{steps}");
}

#[test]
fn memory_is_zeroed_whoever_had_it_before() {
    let device = open();
    for bytes in [1, 1000, 5 << 20] {
        let dirty = device.allocate("a test", bytes).unwrap();
        dirty.write(0, &vec![7; bytes]).unwrap();
        drop(dirty);
        let mut read = vec![1; bytes];
        let clean = device.allocate("a test", bytes).unwrap();
        clean.read(0, &mut read).unwrap();
        assert!(read.iter().all(|b| *b == 0));
        assert!(clean.write(1, &read).is_err());
        assert!(clean.host().is_none());
    }
}
