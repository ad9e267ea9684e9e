//! Two devices that execute one graph, each its part, on threads as processes do: their parts go from device to device.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Barrier, Mutex, atomic::AtomicU64},
    thread,
};

use hotcell_graph::{DType, Graph, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::{
    backend::{Backend, Device, SharedRegion},
    communicator::{Communicator, Share},
    cuda::CudaBackend,
    plan::{PlanHints, Slot},
};

use super::enter;

const MEMBERS: usize = 2;

/// More rows of the widest than are given at a time.
const ROWS: usize = 700;

#[derive(Clone)]
struct Shared(Arc<Vec<AtomicU64>>);

// SAFETY: the words live as long as the value, and nobody else leads there.
unsafe impl SharedRegion for Shared {
    fn span(&self) -> (*mut u8, usize) {
        let start = self.0.as_ptr().cast::<u8>().cast_mut();
        let skip = start.align_offset(64);
        (start.wrapping_add(skip), size_of_val(&self.0[..]) - skip)
    }
}

fn graph(dtype: DType, width: usize) -> Graph {
    let mut graph = GraphBuilder::new(ROWS);
    let rows = TensorSpec::new(dtype, Shape::rows(&[width]).unwrap()).unwrap();
    let x = graph.tensor("x", rows).unwrap();
    let all = graph.all_gather(x, MEMBERS as i64).unwrap();
    graph.finish(&[all]).unwrap()
}

fn byte(rank: usize, at: usize) -> u8 {
    (rank * 97 + at * 7 + at / 251) as u8
}

/// What a member does: it shows the other one its memory, and gathers from what both showed.
fn member(
    rank: usize,
    communicator: Communicator,
    doors: &Mutex<[Vec<OwnedFd>; MEMBERS]>,
    all_there: &Barrier,
) {
    let device = CudaBackend::open_device(&format!("cuda:{rank}"), &[]).unwrap();
    device.join(communicator).unwrap();
    let together = PlanHints {
        together: true,
        ..PlanHints::default()
    };
    // Before they reach each other, and where they are not to, the processor does it.
    let small = graph(DType::F32, 8);
    let elsewhere = |hints| device.elsewhere_with(&small, hints);
    assert_eq!(elsewhere(&together).unwrap(), ["all_gather"]);
    doors.lock().unwrap()[rank] = device.door().unwrap();
    all_there.wait();
    let reach = || {
        let doors = doors.lock().unwrap();
        let doors: Vec<Vec<_>> = (doors.iter())
            .map(|door| door.iter().map(AsFd::as_fd).collect())
            .collect();
        device.reach(&doors).unwrap();
    };
    // One that has written nothing yet is missed.
    if rank == 0 {
        reach();
        let error = device.met().unwrap_err().to_string();
        assert!(error.contains("what member 1 wrote"), "{error}");
    }
    all_there.wait();
    if rank == 1 {
        reach();
    }
    all_there.wait();
    device.met().unwrap();
    assert!(elsewhere(&together).unwrap().is_empty());
    let apart = PlanHints::default();
    assert!(elsewhere(&apart).is_err());
    for (dtype, width) in [
        (DType::F32, 8),
        (DType::U8, 3),
        (DType::F16, 5),
        (DType::BF16, 64),
        (DType::F32, 2050),
    ] {
        let graph = graph(dtype, width);
        let mut plan = device.plan(&graph, &together).unwrap();
        let row = dtype.row_bytes(width).unwrap();
        let x = device.allocate("a test", ROWS * row).unwrap();
        let all = device.allocate("a test", ROWS * row * MEMBERS).unwrap();
        let mine: Vec<u8> = (0..ROWS * row).map(|i| byte(rank, i)).collect();
        x.write(0, &mine).unwrap();
        plan.bind(Slot::Input(0), &x, 0).unwrap();
        plan.bind(Slot::Output(0), &all, 0).unwrap();
        // The third time it is recorded, and then replayed.
        for rows in [1, 0, ROWS, ROWS, ROWS, ROWS, ROWS, 2] {
            plan.execute(rows).unwrap();
            let mut found = vec![0; rows * row * MEMBERS];
            all.read(0, &mut found).unwrap();
            let expected = (0..found.len()).map(|i| {
                let (line, of, column) = (i / row / MEMBERS, i / row % MEMBERS, i % row);
                byte(of, line * row + column)
            });
            assert!(
                found.into_iter().eq(expected),
                "{rows} rows of {width} {dtype}"
            );
            all.write(0, &vec![0; ROWS * row * MEMBERS]).unwrap();
        }
    }
    // Where one does not reach the other, both go through the host's memory again.
    device.reach(&[]).unwrap();
    assert_eq!(elsewhere(&together).unwrap(), ["all_gather"]);
}

/// Ends the process where its thread fails: the others would wait for it for ever.
struct EndsAll;

impl Drop for EndsAll {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::exit(101);
        }
    }
}

#[test]
fn parts_go_from_device_to_device() {
    if !enter() {
        return;
    }
    if CudaBackend.devices().len() < MEMBERS {
        println!("skipped: there is one device");
        return;
    }
    let words = (Communicator::bytes(MEMBERS) + 64).div_ceil(8);
    let memory = Shared(Arc::new((0..words).map(|_| AtomicU64::new(0)).collect()));
    let (doors, all_there) = (Mutex::default(), Barrier::new(MEMBERS));
    thread::scope(|scope| {
        for rank in 0..MEMBERS {
            let share = Share {
                rank,
                members: MEMBERS,
            };
            let communicator = Communicator::new(share, Box::new(memory.clone()), || true).unwrap();
            let (doors, all_there) = (&doors, &all_there);
            scope.spawn(move || {
                let _ends_all = EndsAll;
                member(rank, communicator, doors, all_there);
            });
        }
    });
}
