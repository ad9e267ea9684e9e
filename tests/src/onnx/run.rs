//! Runs a mapped case somewhere and says whether the outputs are those expected.

use anyhow::{Context, Result, anyhow, bail, ensure};
use hotcell_graph::{Graph, TensorSpec, op::ValueSpec};

use super::{
    case::{Case, Tensor},
    compare::compare,
    map::map,
};
use crate::conformance::Executor;

fn output_specs(graph: &Graph) -> Result<Vec<TensorSpec>> {
    graph
        .outputs()
        .iter()
        .map(|&v| match graph.spec(v)? {
            ValueSpec::Tensor(t) => Ok(t),
            other => bail!("{other} is no tensor"),
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
    let results = executor
        .run(&mapped.graph, 0, &inputs)
        .map_err(|e| anyhow!("{e}"))?
        .outputs;
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
        let expected = expected.as_ref().map_err(|e| anyhow!("{e}"))?;
        compare(&actual, expected).with_context(|| name.clone())?;
    }
    Ok(())
}
