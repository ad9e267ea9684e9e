//! Runs cases while their inputs change: nothing but their results is touched, and once the inputs hold still the results are
//! right.

use std::{
    rc::Rc,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use anyhow::{Result, ensure};
use hotcell_graph::{Graph, op::ValueSpec};
use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError, SharedRegion},
    plan::{PlanHints, Slot},
};

use super::{Executor, Outcome, RunError, cases};

/// Bytes behind every output that must stay as they are.
const GUARD: usize = 4096;
const UNWRITTEN: u8 = 0xa5;

/// Executions of each case while its inputs change.
const ROUNDS: usize = 3;

/// Memory that another thread writes, as another process would.
#[derive(Clone)]
struct Restless(Rc<[AtomicU64]>, usize);

impl Restless {
    fn new(bytes: usize) -> Self {
        let words = bytes.div_ceil(8).max(1) as u64;
        Self((0..words).map(AtomicU64::new).collect(), bytes.max(1))
    }

    /// Nobody else writes now.
    fn fill(&self, bytes: &[u8], rest: u8) {
        let mut at = bytes.iter().copied().chain(std::iter::repeat(rest));
        for word in self.0.iter() {
            let next = std::array::from_fn(|_| at.next().unwrap_or(rest));
            word.store(u64::from_ne_bytes(next), Ordering::Relaxed);
        }
    }
}

// SAFETY: the words live as long as the value, and only atomics lead there.
unsafe impl SharedRegion for Restless {
    fn span(&self) -> (*mut u8, usize) {
        (self.0.as_ptr() as *mut u8, self.1)
    }
}

/// Runs a case while its inputs change, all but those that lead to an index, and then as it is.
struct Unsteady {
    device: Rc<dyn Device>,
    fuse: bool,
    /// Inputs that were shared, and those that lead to an index.
    shared: usize,
    copied: usize,
}

impl Unsteady {
    /// On a device of this process.
    fn new(device: Rc<dyn Device>) -> Self {
        Self {
            device,
            fuse: true,
            shared: 0,
            copied: 0,
        }
    }
}

/// Runs every golden case on a device of this process while its inputs change.
///
/// # Errors
/// The cases that went wrong, or when hardly any had inputs that lead to an index, or others.
pub fn unsteady(device: Rc<dyn Device>) -> Result<()> {
    let mut unsteady = Unsteady::new(device);
    let mut wrong = Vec::new();
    for case in cases()? {
        if let Err(error) = case.check(&mut unsteady) {
            wrong.push(format!("{case}: {error:#}"));
        }
    }
    ensure!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
    let Unsteady { shared, copied, .. } = unsteady;
    ensure!(shared > 1000 && copied > 100, "{shared} and {copied}");
    Ok(())
}

fn size(spec: &ValueSpec, rows: usize) -> usize {
    match spec {
        ValueSpec::Tensor(t) => t.bytes(rows).unwrap_or(0),
        ValueSpec::Cache(c) => c.bytes().unwrap_or(0),
        ValueSpec::Absent => 0,
    }
}

fn broken(error: DeviceError) -> RunError {
    RunError::Broken(error.to_string())
}

impl Executor for Unsteady {
    fn name(&self) -> String {
        "memory that changes".to_owned()
    }

    fn run(&mut self, graph: &Graph, rows: usize, inputs: &[&[u8]]) -> Result<Outcome, RunError> {
        let device = &self.device;
        let hints = PlanHints {
            fuse: self.fuse,
            ..PlanHints::default()
        };
        let mut plan = device
            .plan(graph, &hints)
            .map_err(|e| RunError::Plan(e.to_string()))?;
        let (mut shared, mut caches) = (Vec::new(), Vec::new());
        for (i, (input, bytes)) in graph.inputs().iter().zip(inputs).enumerate() {
            let most = size(&input.spec, graph.max_rows());
            let is_tensor = matches!(input.spec, ValueSpec::Tensor(_));
            let buffer = if is_tensor && plan.reads_as_index(i) == Some(false) {
                let region = Restless::new(most);
                region.fill(bytes, 0xff);
                shared.push((region.clone(), bytes.to_vec()));
                device.import_shared(Rc::new(region)).map_err(broken)?
            } else {
                self.copied += usize::from(is_tensor);
                let buffer = device.allocate("input", most.max(1)).map_err(broken)?;
                buffer.write(0, &vec![0xff; most]).map_err(broken)?;
                buffer.write(0, bytes).map_err(broken)?;
                buffer
            };
            plan.bind(Slot::Input(i), &buffer, 0).map_err(broken)?;
            if !is_tensor {
                caches.push((buffer, bytes.to_vec(), most));
            }
        }
        self.shared += shared.len();
        let mut outputs: Vec<(Buffer, usize, usize)> = Vec::new();
        for (i, &value) in graph.outputs().iter().enumerate() {
            let spec = graph
                .spec(value)
                .map_err(|e| RunError::Broken(e.to_string()))?;
            let most = size(&spec, graph.max_rows());
            let buffer = device.allocate("output", most + GUARD).map_err(broken)?;
            let marked = vec![UNWRITTEN; most + GUARD];
            buffer.write(0, &marked).map_err(broken)?;
            plan.bind(Slot::Output(i), &buffer, 0).map_err(broken)?;
            outputs.push((buffer, size(&spec, rows), most));
        }
        let words: Vec<&[AtomicU64]> = shared.iter().map(|(region, _)| &region.0[..]).collect();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut number = 0x9e37_79b9_7f4a_7c15u64;
                while !over.load(Ordering::Relaxed) {
                    for word in words.iter().copied().flatten() {
                        number ^= number << 13;
                        number ^= number >> 7;
                        number ^= number << 17;
                        word.store(number, Ordering::Relaxed);
                    }
                }
            });
            for _ in 0..ROUNDS {
                // Whatever it says: the case below says what is right.
                let _ = plan.execute(rows);
            }
            over.store(true, Ordering::Relaxed);
        });
        shared
            .iter()
            .for_each(|(region, bytes)| region.fill(bytes, 0xff));
        for (buffer, before, most) in &caches {
            buffer.write(0, &vec![0xff; *most]).map_err(broken)?;
            buffer.write(0, before).map_err(broken)?;
        }
        let executed = plan.execute(rows);
        let read = |buffer: &Buffer, at: usize, bytes: usize| {
            let mut data = vec![0; bytes];
            buffer.read(at, &mut data).map_err(broken).map(|()| data)
        };
        for (buffer, _, most) in &outputs {
            if read(buffer, *most, GUARD)?.iter().any(|b| *b != UNWRITTEN) {
                return Err(RunError::Broken(
                    "an output is written past its end".to_owned(),
                ));
            }
        }
        executed.map_err(|e| RunError::Run(e.to_string()))?;
        let results = outputs
            .iter()
            .map(|(buffer, used, _)| read(buffer, 0, *used));
        let left = caches
            .iter()
            .map(|(buffer, _, most)| read(buffer, 0, *most));
        Ok(Outcome {
            outputs: results.collect::<Result<_, _>>()?,
            caches: left.collect::<Result<_, _>>()?,
        })
    }

    fn set_fused(&mut self, fused: bool) {
        self.fuse = fused;
    }
}
