//! Runs a mapped case somewhere and says whether the outputs are those expected.

use anyhow::{Context, Result, ensure};
use hotcell_graph::{Graph, TensorSpec, op::ValueSpec};
use hotcell_kernels::{
    backend::{Buffer, Device},
    cpu::{CpuDevice, path::CpuPath},
    plan::{PlanHints, Slot},
};

use super::{
    case::{Case, Tensor},
    compare::compare,
    map::map,
};

/// Where graphs run: in process, or in a worker behind gRPC.
pub trait Executor {
    /// Runs a graph without rows on the inputs' bytes and returns its outputs' bytes.
    ///
    /// # Errors
    /// When it cannot be planned or run.
    fn run(&mut self, graph: &Graph, inputs: &[&[u8]]) -> Result<Vec<Vec<u8>>>;
}

/// The CPU backend in this process.
pub struct InProcess(CpuDevice);

impl InProcess {
    /// With this many threads.
    ///
    /// # Errors
    /// When the device cannot be opened.
    pub fn new(threads: u32) -> Result<Self> {
        Ok(Self(CpuDevice::with_path(threads, CpuPath::detect())?))
    }

    fn buffer(&self, bytes: usize) -> Result<Buffer> {
        Ok(self.0.allocate("test", bytes)?)
    }
}

impl Executor for InProcess {
    fn run(&mut self, graph: &Graph, inputs: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        let mut plan = self.0.plan(graph, &PlanHints::default())?;
        for (i, bytes) in inputs.iter().enumerate() {
            let buffer = self.buffer(bytes.len())?;
            buffer.write(0, bytes)?;
            plan.bind(Slot::Input(i), &buffer, 0)?;
        }
        let mut outputs = Vec::new();
        for (i, spec) in output_specs(graph)?.iter().enumerate() {
            let bytes = spec.bytes(0).context("an output past the limits")?;
            let buffer = self.buffer(bytes)?;
            plan.bind(Slot::Output(i), &buffer, 0)?;
            outputs.push((buffer, vec![0; bytes]));
        }
        self.0.stream().execute(plan.as_mut(), 0)?;
        for (buffer, bytes) in &mut outputs {
            buffer.read(0, bytes)?;
        }
        Ok(outputs.into_iter().map(|(_, bytes)| bytes).collect())
    }
}

fn output_specs(graph: &Graph) -> Result<Vec<TensorSpec>> {
    graph
        .outputs()
        .iter()
        .map(|&v| match graph.spec(v)? {
            ValueSpec::Tensor(t) => Ok(t),
            other => anyhow::bail!("{other} is no tensor"),
        })
        .collect()
}

/// Maps a case, runs it and compares.
///
/// # Errors
/// Says why the case does not pass: no mapping, not runnable, or a difference.
pub fn check(case: &Case, executor: &mut dyn Executor) -> Result<()> {
    let mapped = map(case)?;
    let inputs: Vec<&[u8]> = mapped.inputs.iter().map(|t| t.bytes.as_slice()).collect();
    let results = executor.run(&mapped.graph, &inputs)?;
    let specs = output_specs(&mapped.graph)?;
    ensure!(
        results.len() == case.outputs.len() && specs.len() == results.len(),
        "{} outputs where {} were expected",
        results.len(),
        case.outputs.len()
    );
    for ((bytes, spec), (name, expected)) in results.into_iter().zip(specs).zip(&case.outputs) {
        let actual = Tensor {
            dtype: spec.dtype,
            dims: spec.shape.dims().iter().map(|d| d.at(0)).collect(),
            bytes,
        };
        let expected = expected.as_ref().map_err(|e| anyhow::anyhow!("{e}"))?;
        compare(&actual, expected).with_context(|| name.clone())?;
    }
    Ok(())
}
