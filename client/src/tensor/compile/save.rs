//! Compiled functions become models of tensors.

use hotcell_proto::{
    error::{Error, Reason},
    v1,
};

use super::{Compiled, invalid, of_graph, symbolic};
use crate::{connect::Client, graphs::SaveGraph, tensor::Tensor};

impl Compiled {
    /// Has a scheduler keep the function under a name, as it is for arguments like these, whose names are given. What it
    /// captured becomes constant, with the values of now. With `max_rows`, the outermost axis of the first argument, and of
    /// every other one that is as long, takes any size up to that; the function then must not ask for it.
    ///
    /// # Errors
    /// As [`Client::save_graph`] and [`Compiled::call`]; [`Reason::InvalidArgument`] if the names are not as many as the
    /// arguments, or the function needs the size.
    pub async fn save(
        &self,
        client: &Client,
        saving: &SaveGraph,
        arguments: &[(&str, &Tensor)],
        max_rows: Option<usize>,
    ) -> Result<v1::SavedGraph, Error> {
        let specs = arguments.iter().map(|(_, tensor)| tensor.spec().cloned());
        let mut specs = specs.collect::<Result<Vec<_>, _>>()?;
        let mut rows = 0;
        if max_rows.is_some() {
            let first = specs.first().and_then(|spec| spec.shape.dims().first());
            let Some(hotcell_graph::Dim::Fixed(outer)) = first.copied() else {
                return Err(invalid("the first argument has no outermost axis"));
            };
            rows = outer;
            specs = specs.iter().map(|spec| symbolic(spec, outer)).collect();
        }
        let trace = self.make(&specs, rows, max_rows.unwrap_or(0))?;
        let trace = trace.ok_or_else(|| {
            invalid("the function asks for the size of its rows; save it without max_rows")
        })?;
        let (mut graph, _) = trace.program.encode()?;
        let captured = &trace.program.inputs;
        if graph.inputs.len() != arguments.len() + captured.len() {
            let what = "a traced function has other inputs than its arguments and what it captured";
            return Err(Error::new(Reason::Internal, what));
        }
        let (given, rest) = graph.inputs.split_at_mut(arguments.len());
        for (input, (name, _)) in given.iter_mut().zip(arguments) {
            (*name).clone_into(&mut input.name);
        }
        for (index, input) in rest.iter_mut().enumerate() {
            input.name = format!("captured {index}");
            input.constant = true;
        }
        let graph = hotcell_graph::wire::decode(&graph).map_err(|e| of_graph(&e))?;
        let mut constants = Vec::with_capacity(captured.len());
        for tensor in captured {
            constants.push(tensor.fetch().await?.bytes().clone());
        }
        client.save_graph(saving, &graph, constants).await
    }
}
