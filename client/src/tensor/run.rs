//! Graphs that are at hand, computed as they are.

use hotcell_graph::{Graph, graph::Input, op::ValueSpec};
use hotcell_proto::error::{Error, Reason};

use super::{
    array::{invalid, of_graph},
    host::HostTensor,
    program::Program,
    recover::again,
    session::Session,
    stream::Order,
};

impl Session {
    /// Computes a graph without a symbolic axis, of these values for its tensors in their order, and fetches its outputs. Its
    /// caches begin as zeros, and are forgotten.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] for values that are not the tensors', and as [`Session::cache`] and [`Session::eval`].
    pub async fn run(
        &self,
        graph: &Graph,
        inputs: &[HostTensor],
    ) -> Result<Vec<HostTensor>, Error> {
        if graph.max_rows() > 0 {
            return Err(invalid(
                "the graph has a symbolic axis; give all its axes sizes",
            ));
        }
        let is_tensor = |input: &&Input| !matches!(input.spec, ValueSpec::Cache(_));
        let tensors = graph.inputs().iter().filter(is_tensor);
        if inputs.len() != tensors.clone().count() {
            return Err(invalid(format!(
                "the graph reads {} tensors, and {} values are given",
                tensors.count(),
                inputs.len()
            )));
        }
        for (input, value) in tensors.zip(inputs) {
            if !matches!(&input.spec, ValueSpec::Tensor(spec) if spec == value.spec()) {
                return Err(invalid(format!(
                    "the input {} is {}, and its value {}",
                    input.name,
                    input.spec,
                    value.spec()
                )));
            }
        }
        let specs = graph.outputs().iter().map(|output| {
            match graph.spec(*output).map_err(|e| of_graph(&e))? {
                ValueSpec::Tensor(spec) => Ok(spec),
                // No builder ends a graph with one.
                other => Err(Error::new(
                    Reason::Internal,
                    format!("an output is {other}"),
                )),
            }
        });
        let specs = specs.collect::<Result<Vec<_>, Error>>()?;
        let mut values = inputs.iter();
        let mut all = Vec::with_capacity(graph.inputs().len());
        for input in graph.inputs() {
            match input.spec {
                ValueSpec::Cache(spec) => all.push(self.cache(spec).await?.0),
                _ => all.extend(values.next().map(|value| self.host(value.clone()))),
            }
        }
        let program = Program {
            graph: graph.clone(),
            inputs: all,
        };
        let order = Order::default();
        let results = again!(self, at => async {
            let Some(plan) = self.plan(&at, &program).await? else {
                return Ok(Vec::new());
            };
            let call = self.call(&at, &plan, 0, &program.inputs, specs.len(), &order);
            call.await
        })?;
        if results.len() != specs.len() {
            return Err(invalid("the session is a dry run, which computes nothing"));
        }
        let mut all = Vec::with_capacity(results.len());
        for (result, spec) in results.iter().zip(&specs) {
            all.push(self.download(result, spec).await?);
        }
        Ok(all)
    }
}
