//! Runs cases on a device of this process.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
};

use hotcell_graph::{Graph, op::ValueSpec};
use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError},
    plan::{PlanHints, Slot},
};

use super::{Executor, Outcome, RunError};

/// Bytes behind every output that must stay as they are.
const GUARD: usize = 64;
/// What outputs and guards hold before.
const UNWRITTEN: u8 = 0xa5;

/// A device of this process.
pub struct Local {
    name: String,
    open: Box<dyn Fn() -> Result<Rc<dyn Device>, DeviceError>>,
    device: Rc<dyn Device>,
    fuse: bool,
}

impl Local {
    /// Opens the device, and again when a kernel has panicked.
    ///
    /// # Errors
    /// What opening says.
    pub fn new(
        name: impl Into<String>,
        open: impl Fn() -> Result<Rc<dyn Device>, DeviceError> + 'static,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            name: name.into(),
            device: open()?,
            open: Box::new(open),
            fuse: true,
        })
    }

    /// The device.
    pub fn device(&self) -> &dyn Device {
        self.device.as_ref()
    }
}

impl Executor for Local {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn run(&mut self, graph: &Graph, rows: usize, inputs: &[&[u8]]) -> Result<Outcome, RunError> {
        let device = self.device.clone();
        let hints = PlanHints {
            fuse: self.fuse,
            ..PlanHints::default()
        };
        let run = || run(&*device, graph, &hints, rows, inputs);
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(result) => result,
            Err(panic) => {
                self.device = (self.open)().map_err(|e| RunError::Broken(e.to_string()))?;
                let what = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                Err(RunError::Broken(format!(
                    "a panic: {}",
                    what.unwrap_or_default()
                )))
            }
        }
    }

    fn set_fused(&mut self, fused: bool) {
        self.fuse = fused;
    }
}

fn run(
    device: &dyn Device,
    graph: &Graph,
    hints: &PlanHints,
    rows: usize,
    inputs: &[&[u8]],
) -> Result<Outcome, RunError> {
    let plan_error = |e: DeviceError| RunError::Plan(e.to_string());
    let broken = |e: DeviceError| RunError::Broken(e.to_string());
    let size = |spec: &ValueSpec, rows: usize| match spec {
        ValueSpec::Tensor(t) => t.bytes(rows).unwrap_or(0),
        ValueSpec::Cache(c) => c.bytes().unwrap_or(0),
        ValueSpec::Absent => 0,
    };
    let spec = |value| {
        graph
            .spec(value)
            .map_err(|e| RunError::Broken(e.to_string()))
    };
    let mut plan = device.plan(graph, hints).map_err(plan_error)?;
    let mut caches: Vec<(Buffer, usize)> = Vec::new();
    for (i, (input, bytes)) in graph.inputs().iter().zip(inputs).enumerate() {
        let most = size(&input.spec, graph.max_rows());
        let buffer = device.allocate("input", most.max(1)).map_err(broken)?;
        // Rows that are not run hold what would be noticed: NaN, or an index outside.
        buffer.write(0, &vec![0xff; most]).map_err(broken)?;
        buffer.write(0, bytes).map_err(broken)?;
        plan.bind(Slot::Input(i), &buffer, 0).map_err(broken)?;
        if matches!(input.spec, ValueSpec::Cache(_)) {
            caches.push((buffer, most));
        }
    }
    let mut outputs = Vec::new();
    for (i, &value) in graph.outputs().iter().enumerate() {
        let spec = spec(value)?;
        let most = size(&spec, graph.max_rows());
        let buffer = device.allocate("output", most + GUARD).map_err(broken)?;
        buffer
            .write(0, &vec![UNWRITTEN; most + GUARD])
            .map_err(broken)?;
        plan.bind(Slot::Output(i), &buffer, 0).map_err(broken)?;
        outputs.push((buffer, size(&spec, rows), most));
    }
    let mut stream = device.stream();
    let executed = stream
        .execute(plan.as_mut(), rows)
        .and_then(|()| stream.synchronize());
    let read = |buffer: &Buffer, at: usize, bytes: usize| {
        let mut data = vec![0; bytes];
        buffer.read(at, &mut data).map_err(broken).map(|()| data)
    };
    for (i, (buffer, _, most)) in outputs.iter().enumerate() {
        if read(buffer, *most, GUARD)?.iter().any(|b| *b != UNWRITTEN) {
            return Err(RunError::Broken(format!(
                "output {i} is written past its end"
            )));
        }
    }
    executed.map_err(|e| RunError::Run(e.to_string()))?;
    Ok(Outcome {
        outputs: outputs
            .iter()
            .map(|(buffer, bytes, _)| read(buffer, 0, *bytes))
            .collect::<Result<_, _>>()?,
        caches: caches
            .iter()
            .map(|(buffer, bytes)| read(buffer, 0, *bytes))
            .collect::<Result<_, _>>()?,
    })
}
