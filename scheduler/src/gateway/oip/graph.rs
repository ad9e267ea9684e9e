//! Saved graphs as models of tensors.

use std::{
    sync::Arc,
    time::{Duration, Instant as Clock},
};

use bytes::Bytes;
use hotcell_gateways::inference::{
    ModelInferRequest, ModelInferResponse,
    infer_parameter::ParameterChoice,
    model_infer_request::{InferInputTensor, InferRequestedOutputTensor},
    model_infer_response::InferOutputTensor,
};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::Timings,
};

use super::{
    Oip,
    infer::{By, FINAL, Parameters, few, parameter, place, told, until},
    model::VERSION,
    regions::Place,
    statistics::Took,
    tensor::{Datatype, elements, invalid, of_contents, short},
};
use crate::{
    graphs::{Call, Port, Saved, Sink, Source},
    service::Shared,
};

/// How an input or output is told of: its type, and its axes with -1 where the rows are. What has no type here, such as
/// blocks of quantised weights, is told of as its bytes, those of one row after another.
pub(super) fn described(port: &Port) -> (Datatype, Vec<i64>) {
    let size = |size: u64| i64::try_from(size).unwrap_or(i64::MAX);
    match Datatype::of_dtype(&port.spec.dtype) {
        Some(datatype) => {
            let axes = port.axes().map(|axis| axis.map_or(-1, size));
            (datatype, axes.collect())
        }
        None => {
            let rows = (0..port.row_axes).map(|_| -1);
            (Datatype::Uint8, rows.chain([size(port.unit)]).collect())
        }
    }
}

/// A shape with so many rows.
fn at(shape: &[i64], rows: u64) -> Vec<i64> {
    let rows = i64::try_from(rows).unwrap_or(i64::MAX);
    let axis = |axis: &i64| if *axis < 0 { rows } else { *axis };
    shape.iter().map(axis).collect()
}

/// What a request asks for.
pub(super) struct Ask {
    id: String,
    pub saved: Arc<Saved>,
    call: Call,
    /// Which outputs are told, and where they go.
    outputs: Vec<(usize, Option<Place>)>,
    began: Clock,
}

/// One input's bytes.
fn source(
    oip: &Oip,
    tenant: &str,
    input: InferInputTensor,
    datatype: Datatype,
    raw: &mut impl Iterator<Item = Bytes>,
    in_bytes: bool,
) -> Result<Source, Error> {
    Ok(match (place(&input.parameters)?, input.contents) {
        (Some(place), None) => {
            let (spot, fill) = oip.regions.fill(tenant, &place)?;
            Source::Elsewhere(spot, fill)
        }
        (None, None) => Source::Bytes(raw.next().unwrap_or_default()),
        (None, Some(contents)) if !in_bytes => Source::Bytes(of_contents(datatype, contents)?),
        (_, Some(_)) => {
            let what = format!("input {:?} comes in two ways at once", short(&input.name));
            return Err(invalid(what));
        }
    })
}

/// The inputs in the graph's order, and how many rows they have.
fn inputs(
    oip: &Oip,
    tenant: &str,
    saved: &Saved,
    given: Vec<InferInputTensor>,
    raw: Vec<Bytes>,
) -> Result<(Vec<Source>, u64), Error> {
    few("inputs", given.len(), limits::MAX_INFER_TENSORS)?;
    let in_bytes = !raw.is_empty();
    let mut raw = raw.into_iter();
    let mut sources: Vec<Option<Source>> = vec![None; saved.inputs.len()];
    let mut rows = None;
    for input in given {
        let name = short(&input.name);
        let known = saved.inputs.iter().position(|port| port.name == input.name);
        let Some((index, port)) = known.and_then(|at| Some((at, saved.inputs.get(at)?))) else {
            let names: Vec<_> = saved.inputs.iter().map(|port| short(&port.name)).collect();
            let what = format!(
                "model {} has no input {name:?}; it has {}",
                saved.name,
                names.join(", ")
            );
            return Err(invalid(what));
        };
        let (datatype, shape) = described(port);
        let mut fits = input.datatype == datatype.name() && input.shape.len() == shape.len();
        for (axis, given) in shape.iter().zip(&input.shape) {
            match (*axis, u64::try_from(*given)) {
                (_, Err(_)) => fits = false,
                (axis, Ok(given)) if axis < 0 => {
                    fits &= given <= saved.max_rows && *rows.get_or_insert(given) == given;
                }
                (axis, Ok(_)) => fits &= axis == *given,
            }
        }
        if !fits {
            let most = match saved.max_rows {
                0 => String::new(),
                rows => format!(", with one number of at most {rows} for every -1"),
            };
            return Err(invalid(format!(
                "input {name:?} is {} of {shape:?}{most}; it came as {} of {:?}",
                datatype.name(),
                short(&input.datatype),
                input.shape.get(..limits::MAX_RANK).unwrap_or(&input.shape),
            )));
        }
        let count = elements(&input.shape)?;
        let bytes = datatype.bytes(count);
        let source = source(oip, tenant, input, datatype, &mut raw, in_bytes)?;
        if bytes != Some(source.bytes()) {
            return Err(invalid(format!(
                "input {name:?}: {} bytes are not those of {count} elements of {}",
                source.bytes(),
                datatype.name()
            )));
        }
        match sources.get_mut(index) {
            Some(place) if place.is_none() => *place = Some(source),
            _ => return Err(invalid(format!("there are two inputs {name:?}"))),
        }
    }
    if raw.next().is_some() {
        let what = "there are more raw_input_contents than inputs for them";
        return Err(invalid(what));
    }
    let mut all = Vec::with_capacity(sources.len());
    for (source, port) in sources.into_iter().zip(&saved.inputs) {
        all.push(
            source.ok_or_else(|| invalid(format!("there is no input {:?}", short(&port.name))))?,
        );
    }
    // Without an input that says how many, all of them.
    Ok((all, rows.unwrap_or(saved.max_rows)))
}

/// What is to come out, and where to.
fn outputs(
    saved: &Saved,
    asked: Vec<InferRequestedOutputTensor>,
) -> Result<Vec<(usize, Option<Place>)>, Error> {
    few("outputs", asked.len(), limits::MAX_INFER_TENSORS)?;
    if asked.is_empty() {
        return Ok((0..saved.outputs.len())
            .map(|index| (index, None))
            .collect());
    }
    let mut all: Vec<(usize, Option<Place>)> = Vec::with_capacity(asked.len());
    for output in asked {
        let name = short(&output.name);
        let known = saved
            .outputs
            .iter()
            .position(|port| port.name == output.name);
        let index = known.ok_or_else(|| {
            let names: Vec<_> = saved.outputs.iter().map(|port| short(&port.name)).collect();
            invalid(format!(
                "{name:?} does not come out; there is {}",
                names.join(", ")
            ))
        })?;
        if all.iter().any(|(known, _)| *known == index) {
            return Err(invalid(format!("output {name:?} is asked for twice")));
        }
        all.push((index, place(&output.parameters)?));
    }
    Ok(all)
}

impl Ask {
    /// Reads a request to a graph.
    ///
    /// # Errors
    /// Why it makes no sense.
    pub(super) fn read(
        oip: &Oip,
        by: &By<'_>,
        saved: Arc<Saved>,
        asked: ModelInferRequest,
    ) -> Result<Self, Error> {
        let began = Clock::now();
        let tenant = by.caller.tenant("");
        let deadline = until(&asked.parameters, by.deadline)?;
        let outputs = outputs(&saved, asked.outputs)?;
        let (inputs, rows) = inputs(oip, tenant, &saved, asked.inputs, asked.raw_input_contents)?;
        let mut sinks = vec![Sink::Nothing; saved.outputs.len()];
        let mut inline = 0u64;
        for (index, place) in &outputs {
            let Some((port, sink)) = saved.outputs.get(*index).zip(sinks.get_mut(*index)) else {
                continue;
            };
            let bytes = port.bytes(rows).unwrap_or(u64::MAX);
            match place {
                None => {
                    inline = inline.saturating_add(bytes);
                    *sink = Sink::Bytes;
                }
                Some(place) => {
                    let (spot, empty) = oip.regions.empty(tenant, place, bytes)?;
                    *sink = Sink::Elsewhere(spot, empty);
                }
            }
        }
        // With some room for names and shapes.
        let limit = (limits::MAX_MESSAGE_BYTES - (64 << 10)) as u64;
        if inline > limit {
            let what = format!(
                "{inline} bytes of outputs are more than an answer holds ({limit}); have them put into shared memory, or ask for fewer"
            );
            return Err(Error::new(Reason::LimitExceeded, what).with("limit", limit));
        }
        Ok(Self {
            id: asked.id,
            saved,
            call: Call {
                rows,
                inputs,
                outputs: sinks,
                deadline,
                tenant: tenant.to_owned(),
            },
            outputs,
            began,
        })
    }

    /// The response. On a stream, it says that it is its request's last one (`marked`).
    ///
    /// # Errors
    /// What the worker says, and why there is none.
    pub(super) async fn run(
        self,
        oip: &Oip,
        shared: &Shared,
        marked: bool,
    ) -> Result<ModelInferResponse, Error> {
        let input = self.began.elapsed();
        let name = self.saved.name.to_string();
        let counted = Counted {
            oip,
            name: &name,
            began: self.began,
            over: false,
        };
        let done = shared.graphs.run(shared, &self.saved, &self.call).await?;
        let computed = self.began.elapsed();
        let mut parameters = Parameters::new();
        if marked {
            let last = parameter(ParameterChoice::BoolParam(true));
            parameters.insert(FINAL.to_owned(), last);
        }
        let mut response = ModelInferResponse {
            model_name: name.clone(),
            model_version: VERSION.to_owned(),
            id: self.id,
            parameters,
            ..ModelInferResponse::default()
        };
        for (index, place) in &self.outputs {
            let Some(port) = self.saved.outputs.get(*index) else {
                continue;
            };
            let (datatype, shape) = described(port);
            let bytes = port.bytes(self.call.rows).unwrap_or_default();
            response.outputs.push(InferOutputTensor {
                name: port.name.clone(),
                datatype: datatype.name().to_owned(),
                shape: at(&shape, self.call.rows),
                parameters: place
                    .as_ref()
                    .map(|place| told(place, bytes))
                    .unwrap_or_default(),
                ..InferOutputTensor::default()
            });
            // Every output has its raw contents, so that the next one's are found.
            let data = done.outputs.get(*index).cloned().unwrap_or_default();
            response.raw_output_contents.push(data);
        }
        counted.served(input, done.compute, computed);
        Ok(response)
    }
}

/// Counts a request as failed unless it was served.
struct Counted<'a> {
    oip: &'a Oip,
    name: &'a str,
    began: Clock,
    over: bool,
}

impl Counted<'_> {
    fn served(mut self, input: Duration, compute: Duration, computed: Duration) {
        self.over = true;
        let all = self.began.elapsed();
        let took = Took {
            all,
            input,
            output: all.saturating_sub(computed),
            worker: Timings {
                decode_ms: compute.as_secs_f64() * 1e3,
                ..Timings::default()
            },
        };
        self.oip.statistics.served(self.name, took);
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if !self.over {
            self.oip.statistics.failed(self.name, self.began.elapsed());
        }
    }
}
