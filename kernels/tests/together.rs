//! Devices that execute one graph together, each its part: here on threads, as processes do.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    sync::{Arc, atomic::AtomicU64},
    thread,
};

use hotcell_graph::{DType, Graph, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::{
    backend::{Device, DeviceError, SharedRegion},
    communicator::{Communicator, Share},
    cpu::{CpuDevice, path::CpuPath},
    plan::{PlanHints, Slot},
};

/// The memory that they share, from a cache line on.
#[derive(Clone)]
struct Shared(Arc<Vec<AtomicU64>>);

impl Shared {
    fn new(members: usize) -> Self {
        let words = (Communicator::bytes(members) + 64).div_ceil(8);
        Self(Arc::new((0..words).map(|_| AtomicU64::new(0)).collect()))
    }
}

// SAFETY: the words live as long as the value, and nobody else leads there.
unsafe impl SharedRegion for Shared {
    fn span(&self) -> (*mut u8, usize) {
        let start = self.0.as_ptr().cast::<u8>().cast_mut();
        let skip = start.align_offset(64);
        (start.wrapping_add(skip), size_of_val(&self.0[..]) - skip)
    }
}

const WIDTH: usize = 48;
const ROWS: usize = 37;

/// `x` times a part of a matrix, what all have of that, and the same once more.
fn graph(members: usize) -> Graph {
    let mut graph = GraphBuilder::new(ROWS);
    let rows = TensorSpec::new(DType::F32, Shape::rows(&[WIDTH]).unwrap()).unwrap();
    let mut x = graph.tensor("x", rows).unwrap();
    for name in ["first", "second"] {
        let shape = Shape::fixed(&[WIDTH / members, WIDTH]).unwrap();
        let part = TensorSpec::new(DType::F32, shape).unwrap();
        let w = graph.constant(name, part).unwrap();
        let y = graph.mul_mat(x, w).unwrap();
        x = graph.all_gather(y, members as i64).unwrap();
    }
    graph.finish(&[x]).unwrap()
}

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    let number = |i: usize| ((i * 37 + seed * 101) % 41) as f32 / 41.0 - 0.5;
    (0..count).map(number).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

/// The result of a member, for this many rows.
fn member(device: &CpuDevice, share: Share, rows: &[usize]) -> Vec<Vec<f32>> {
    let hints = PlanHints {
        together: true,
        ..PlanHints::default()
    };
    let mut plan = device.plan(&graph(share.members), &hints).unwrap();
    let buffer = |values: &[f32]| {
        let buffer = device.allocate("a test", size_of_val(values)).unwrap();
        buffer.write(0, &bytes(values)).unwrap();
        buffer
    };
    let own = share.range(WIDTH);
    let own = own.start * WIDTH..own.end * WIDTH;
    let inputs = [
        buffer(&numbers(ROWS * WIDTH, 1)),
        buffer(&numbers(WIDTH * WIDTH, 2)[own.clone()]),
        buffer(&numbers(WIDTH * WIDTH, 3)[own]),
    ];
    for (i, input) in inputs.iter().enumerate() {
        plan.bind(Slot::Input(i), input, 0).unwrap();
    }
    let out = device.allocate("a test", ROWS * WIDTH * 4).unwrap();
    plan.bind(Slot::Output(0), &out, 0).unwrap();
    let mut all = Vec::new();
    for &rows in rows {
        plan.execute(rows).unwrap();
        let mut values = vec![0.0; rows * WIDTH];
        out.read_f32(0, &mut values).unwrap();
        all.push(values);
    }
    all
}

#[test]
fn members_have_the_bits_of_one_device() {
    let rows = [ROWS, 1, 0, 5, ROWS];
    let mut alone = None;
    for members in [1, 2, 3] {
        let memory = Shared::new(members);
        let found = thread::scope(|scope| {
            let each = |rank| {
                let memory = memory.clone();
                scope.spawn(move || {
                    let share = Share { rank, members };
                    // Several threads each, of which one meets the others.
                    let device = CpuDevice::with_path(2, CpuPath::detect()).unwrap();
                    let joined = Communicator::new(share, Box::new(memory), || true).unwrap();
                    device.join(joined).unwrap();
                    member(&device, share, &rows)
                })
            };
            let all: Vec<_> = (0..members).map(each).collect();
            let done = all.into_iter().map(|each| each.join().unwrap());
            done.collect::<Vec<_>>()
        });
        let alone: &Vec<Vec<f32>> = alone.get_or_insert_with(|| found[0].clone());
        for (rank, found) in found.iter().enumerate() {
            for (a, b) in found.iter().flatten().zip(alone.iter().flatten()) {
                assert_eq!(a.to_bits(), b.to_bits(), "member {rank} of {members}");
            }
        }
    }
}

#[test]
fn who_is_in_no_communicator_of_so_many_or_plans_for_itself_is_refused() {
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let refused = |members: usize, together: bool| {
        let hints = PlanHints {
            together,
            ..PlanHints::default()
        };
        match device.plan(&graph(members), &hints).err() {
            Some(DeviceError::Unsupported { op, .. }) => assert_eq!(op, "all_gather"),
            other => panic!("{members}, {together}: {other:?}"),
        }
    };
    refused(2, true);
    let share = Share {
        rank: 0,
        members: 2,
    };
    let joined = Communicator::new(share, Box::new(Shared::new(2)), || true).unwrap();
    device.join(joined).unwrap();
    refused(2, false);
    refused(3, true);
}
