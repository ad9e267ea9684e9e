//! The MLX device as plans and buffers see it: what it refuses, how it pauses and stops.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hotcell_graph::{DType, Graph, GraphBuilder, Shape, TensorSpec, op::find};
use hotcell_kernels::{
    backend::{Backend, Buffer, Device, DeviceError},
    mlx::MlxBackend,
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
