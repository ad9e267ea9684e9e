//! Inputs that change while they are computed with: whatever comes out, nothing else is touched.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use std::{
    rc::Rc,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use common::Numbers;
use hotcell_graph::{DType, Graph, GraphBuilder, GraphError, Shape, TensorSpec, Value};
use hotcell_kernels::{
    backend::{Device, DeviceError, SharedRegion},
    cpu::{CpuDevice, path::CpuPath},
    plan::{PlanHints, Slot},
};

/// Bytes behind every output that must stay as they are.
const GUARD: usize = 4096;

/// Executions of each graph, on each path.
const ROUNDS: usize = 40;

/// Memory that another thread writes, as another process would.
#[derive(Clone)]
struct Restless(Rc<[AtomicU64]>, usize);

impl Restless {
    fn new(bytes: usize) -> Self {
        Self(
            (0..bytes.div_ceil(8) as u64).map(AtomicU64::new).collect(),
            bytes,
        )
    }
}

// SAFETY: the words live as long as the value, and only atomics lead there.
unsafe impl SharedRegion for Restless {
    fn span(&self) -> (*mut u8, usize) {
        (self.0.as_ptr() as *mut u8, self.1)
    }
}

fn spec(dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap()
}

/// Runs a graph whose inputs are all changed meanwhile, and says how many executions came to an end.
fn run(graph: &Graph, path: CpuPath) -> usize {
    let device = CpuDevice::with_path(2, path).unwrap();
    let mut plan = device.plan(graph, &PlanHints::default()).unwrap();
    let mut memory = Vec::new();
    for (i, input) in graph.inputs().iter().enumerate() {
        let hotcell_graph::op::ValueSpec::Tensor(spec) = &input.spec else {
            panic!("a tensor is expected");
        };
        assert_eq!(plan.reads_as_index(i), Some(false), "{}", input.name);
        let region = Restless::new(spec.bytes(0).unwrap());
        let buffer = device.import_shared(Rc::new(region.clone())).unwrap();
        plan.bind(Slot::Input(i), &buffer, 0).unwrap();
        memory.push(region.0);
    }
    let mut outputs = Vec::new();
    for (i, &value) in graph.outputs().iter().enumerate() {
        let hotcell_graph::op::ValueSpec::Tensor(spec) = graph.spec(value).unwrap() else {
            panic!("a tensor is expected");
        };
        let bytes = spec.bytes(0).unwrap();
        let buffer = device.allocate("an output", bytes + GUARD).unwrap();
        buffer.write(bytes, &[0xa5; GUARD]).unwrap();
        plan.bind(Slot::Output(i), &buffer, 0).unwrap();
        outputs.push((buffer, bytes));
    }
    let words: Vec<&[AtomicU64]> = memory.iter().map(|m| &m[..]).collect();
    let (over, ended) = (AtomicBool::new(false), std::cell::Cell::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut numbers = Numbers::new(7);
            while !over.load(Ordering::Relaxed) {
                for word in words.iter().copied().flatten() {
                    word.store(numbers.next() << 24 ^ numbers.next(), Ordering::Relaxed);
                }
            }
        });
        for _ in 0..ROUNDS {
            match plan.execute(0) {
                Ok(()) => ended.set(ended.get() + 1),
                Err(DeviceError::IndexOutOfRange { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    for (buffer, bytes) in outputs {
        let mut guard = [0; GUARD];
        buffer.read(bytes, &mut guard).unwrap();
        assert!(guard.iter().all(|b| *b == 0xa5), "written past its end");
    }
    ended.get()
}

type Make = fn(&mut GraphBuilder) -> Result<Vec<Value>, GraphError>;

/// Those whose results depend on order, ties, zeros or tables, which is where a value could lead astray.
const GRAPHS: &[(&str, Make)] = &[
    ("integers divided, of bytes in one pass", |g| {
        let a = g.tensor("a", spec(DType::I32, &[40_000]))?;
        let b = g.tensor("b", spec(DType::I32, &[40_000]))?;
        let (q, r) = (g.floor_divide(a, b)?, g.remainder(a, b)?);
        let p = g.pow(q, r)?;
        let s = g.left_shift(p, b)?;
        Ok(vec![g.cast(s, DType::U8)?])
    }),
    ("truths that are not 0 or 1", |g| {
        let c = g.tensor("c", spec(DType::Bool, &[300, 70]))?;
        let a = g.tensor("a", spec(DType::U8, &[300, 70]))?;
        let x = g.where_(c, a, c)?;
        Ok(vec![x, g.reduce_any(c, &[1], false)?, g.logical_not(c)?])
    }),
    ("greatest elements and orders", |g| {
        let x = g.tensor("x", spec(DType::U8, &[64, 900]))?;
        let y = g.tensor("y", spec(DType::F32, &[64, 900]))?;
        let z = g.tensor("z", spec(DType::I64, &[900, 8]))?;
        let (v, i) = g.topk(y, 17, -1, true)?;
        let out = vec![
            v,
            i,
            g.argmax(x, 1, false)?,
            g.argmax(y, 0, false)?,
            g.argsort(z, 0, true)?,
            g.sort(x, 1, false)?,
            g.sort(y, 0, false)?,
        ];
        Ok(out)
    }),
    ("indices that were made of it privately", |g| {
        let y = g.tensor("y", spec(DType::F32, &[64, 300]))?;
        let places = g.argsort(y, 1, false)?;
        let table = g.arange(0.0, 1.0, 300, DType::F32)?;
        // What leads to an index is copied by who binds; here the places are data of a sum.
        let places = g.cast(places, DType::F32)?;
        Ok(vec![g.add(places, table)?])
    }),
    ("products with blocks", |g| {
        let x = g.tensor("x", spec(DType::F32, &[5, 512]))?;
        let mut all = Vec::new();
        for dtype in [DType::Q4_0, DType::Q8_0, DType::Q4K, DType::Q6K, DType::Q5K] {
            let w = g.tensor("w", spec(dtype, &[48, 512]))?;
            all.push(g.mul_mat(x, w)?);
        }
        Ok(all)
    }),
    ("scans, norms and softmax", |g| {
        let x = g.tensor("x", spec(DType::F32, &[33, 515]))?;
        let w = g.tensor("w", spec(DType::F32, &[515]))?;
        let key = g.tensor("key", spec(DType::U32, &[2]))?;
        let out = vec![
            g.cumsum(x, 1, false, false)?,
            g.rms_norm(x, Some(w), 1e-5)?,
            g.softmax(x, 0)?,
            g.softmax(x, 1)?,
            g.random_categorical(x, key, 1, 3)?,
        ];
        Ok(out)
    }),
    ("windows", |g| {
        let x = g.tensor("x", spec(DType::F32, &[2, 30, 30, 4]))?;
        let w = g.tensor("w", spec(DType::F32, &[8, 3, 3, 4]))?;
        let ones: &[i64] = &[1, 1];
        Ok(vec![g.conv(
            x,
            w,
            None,
            ones,
            ones,
            ones,
            ones,
            1,
            "channels_last",
        )?])
    }),
    ("what is turned by positions", |g| {
        let x = g.tensor("x", spec(DType::F32, &[40, 4, 32]))?;
        let positions = g.tensor("positions", spec(DType::I32, &[40]))?;
        let f = g.tensor("f", spec(DType::F32, &[16]))?;
        Ok(vec![g.rope(x, positions, f, false)?])
    }),
];

#[test]
fn inputs_that_change_meanwhile_change_results_and_nothing_else() {
    for path in CpuPath::available() {
        for (name, make) in GRAPHS {
            let mut g = GraphBuilder::new(0);
            let outputs = make(&mut g).unwrap_or_else(|e| panic!("{name}: {e}"));
            let graph = g.finish(&outputs).unwrap();
            assert_eq!(run(&graph, path), ROUNDS, "{name}");
        }
    }
}

#[test]
fn a_plan_says_what_leads_to_an_index_after_ops_were_replaced() {
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let mut g = GraphBuilder::new(0);
    // Decomposed: the index goes through comparisons and casts before rows are read.
    let table = g.tensor("table", spec(DType::Q4_0, &[8, 64])).unwrap();
    let at = g.tensor("at", spec(DType::I64, &[3])).unwrap();
    let other = g.tensor("other", spec(DType::U8, &[3, 64])).unwrap();
    let rows = g.take(table, at, 0).unwrap();
    let sum = g.add(rows, other).unwrap();
    let graph = g.finish(&[sum]).unwrap();
    let plan = device.plan(&graph, &PlanHints::default()).unwrap();
    let said: Vec<_> = (0..4).map(|i| plan.reads_as_index(i)).collect();
    assert_eq!(said, [Some(false), Some(true), Some(false), None]);
}
