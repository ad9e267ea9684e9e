//! One inference: what a request asks for, and the responses that come of it.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant as Clock},
};

use bytes::Bytes;
use hotcell_gateways::inference::{
    InferParameter, ModelInferRequest, ModelInferResponse,
    infer_parameter::ParameterChoice,
    model_infer_request::{InferInputTensor, InferRequestedOutputTensor},
    model_infer_response::InferOutputTensor,
};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{FinishReason, Finished, GenerateRequest, Prompt, generate_event::Event, prompt::Kind},
};
use tokio::time::Instant;

use super::{
    Oip,
    model::{EXCLUDE_INPUT, INPUTS, Output, SAMPLING, STREAM, TEXT_INPUT, VERSION},
    regions::Place,
    sampling,
    statistics::Took,
    tensor::{Datatype, Tensor, invalid, of_contents, of_strings, short},
};
use crate::{access::Caller, gateway::ask::Branches, service::Shared};

/// Of a tensor that is in shared memory.
const REGION: &str = "shared_memory_region";
const REGION_SIZE: &str = "shared_memory_byte_size";
const REGION_OFFSET: &str = "shared_memory_offset";
/// Whether a stream's request wants to hear its end even if nothing else comes with it.
const EMPTY_FINAL: &str = "triton_enable_empty_final_response";
/// Set on the last response to a stream's request.
pub(super) const FINAL: &str = "triton_final_response";

/// Parameters by their names.
pub(super) type Parameters = HashMap<String, InferParameter>;

/// A parameter of this value.
pub(super) fn parameter(value: ParameterChoice) -> InferParameter {
    InferParameter {
        parameter_choice: Some(value),
    }
}

fn whole(parameters: &Parameters, name: &str) -> Result<Option<u64>, Error> {
    let given = parameters
        .get(name)
        .and_then(|p| p.parameter_choice.as_ref());
    let value = match given {
        None => return Ok(None),
        Some(ParameterChoice::Int64Param(value)) => u64::try_from(*value).ok(),
        Some(ParameterChoice::Uint64Param(value)) => Some(*value),
        Some(_) => None,
    };
    let value = value.ok_or_else(|| invalid(format!("parameter {name} is a number from 0")))?;
    Ok(Some(value))
}

fn truth(parameters: &Parameters, name: &str) -> Result<bool, Error> {
    match parameters
        .get(name)
        .and_then(|p| p.parameter_choice.as_ref())
    {
        None => Ok(false),
        Some(ParameterChoice::BoolParam(value)) => Ok(*value),
        Some(_) => Err(invalid(format!("parameter {name} is true or false"))),
    }
}

pub(super) fn few(what: &str, count: usize, limit: usize) -> Result<(), Error> {
    match count <= limit {
        true => Ok(()),
        false => {
            let what = format!("{count} {what} are more than the limit of {limit}");
            Err(Error::new(Reason::LimitExceeded, what))
        }
    }
}

/// When the answer is wanted no more: by the call's deadline, and by its parameter.
pub(super) fn until(
    parameters: &Parameters,
    deadline: Option<Instant>,
) -> Result<Option<Instant>, Error> {
    let patience = whole(parameters, "timeout")?.filter(|timeout| *timeout > 0);
    let until =
        patience.and_then(|timeout| Instant::now().checked_add(Duration::from_micros(timeout)));
    Ok([deadline, until].into_iter().flatten().min())
}

/// Where a tensor is, if it is in shared memory.
pub(super) fn place(parameters: &Parameters) -> Result<Option<Place>, Error> {
    few("parameters", parameters.len(), limits::MAX_INFER_PARAMETERS)?;
    let region = match parameters
        .get(REGION)
        .and_then(|p| p.parameter_choice.as_ref())
    {
        None => return Ok(None),
        Some(ParameterChoice::StringParam(region)) => region.clone(),
        Some(_) => return Err(invalid(format!("parameter {REGION} is a name"))),
    };
    let size = whole(parameters, REGION_SIZE)?;
    let size =
        size.ok_or_else(|| invalid(format!("a tensor in shared memory has {REGION_SIZE}")))?;
    let offset = whole(parameters, REGION_OFFSET)?.unwrap_or(0);
    Ok(Some(Place {
        region,
        offset,
        size,
    }))
}

/// The tensors of a request.
fn tensors(
    oip: &Oip,
    tenant: &str,
    inputs: Vec<InferInputTensor>,
    raw: Vec<Bytes>,
) -> Result<Vec<Tensor>, Error> {
    few("inputs", inputs.len(), limits::MAX_INFER_TENSORS)?;
    let in_bytes = !raw.is_empty();
    let mut raw = raw.into_iter();
    let mut all: Vec<Tensor> = Vec::with_capacity(inputs.len());
    for input in inputs {
        let name = input.name;
        if all.iter().any(|tensor| tensor.name == name) {
            return Err(invalid(format!("there are two inputs {:?}", short(&name))));
        }
        let data = match (place(&input.parameters)?, input.contents) {
            (Some(place), None) => oip.regions.read(tenant, &place)?,
            (None, None) => raw.next().unwrap_or_default(),
            (None, Some(contents)) if !in_bytes => {
                of_contents(Datatype::of(&input.datatype)?, contents)?
            }
            (_, Some(_)) => {
                let what = format!("input {:?} comes in two ways at once", short(&name));
                return Err(invalid(what));
            }
        };
        all.push(Tensor::new(&name, &input.datatype, &input.shape, data)?);
    }
    match raw.next() {
        None => Ok(all),
        Some(_) => Err(invalid(
            "there are more raw_input_contents than inputs for them",
        )),
    }
}

/// What a request asks for.
#[derive(Debug)]
pub(super) struct Ask {
    id: String,
    pub model: String,
    request: GenerateRequest,
    deadline: Option<Instant>,
    /// Whether the text comes piece by piece.
    pub stream: bool,
    /// What the text begins with.
    before: String,
    outputs: Vec<(Output, Option<Place>)>,
    empty_final: bool,
    began: Clock,
}

/// Priorities of this protocol: 1 is the highest, and 0 what is not said.
fn priority(given: u64) -> u32 {
    let most = u64::from(limits::MAX_PRIORITY);
    match given {
        0 => 0,
        given => u32::try_from((most + 1).saturating_sub(given)).unwrap_or(0),
    }
}

/// Who asks, and until when the answer is wanted.
pub(super) struct By<'a> {
    pub caller: &'a Caller,
    pub deadline: Option<Instant>,
}

impl Ask {
    /// Reads a request for text of a model.
    ///
    /// # Errors
    /// Why it makes no sense.
    pub fn read(
        oip: &Oip,
        by: &By<'_>,
        model: String,
        asked: ModelInferRequest,
    ) -> Result<Self, Error> {
        let began = Clock::now();
        let tenant = by.caller.tenant("");
        let inputs = tensors(oip, tenant, asked.inputs, asked.raw_input_contents)?;
        for input in &inputs {
            if !INPUTS.iter().any(|(name, ..)| *name == input.name) {
                let names: Vec<_> = INPUTS.iter().map(|(name, ..)| *name).collect();
                let what = format!(
                    "model {model} has no input {:?}; it has {}",
                    short(&input.name),
                    names.join(", ")
                );
                return Err(invalid(what));
            }
        }
        let of = |name: &str| inputs.iter().find(|input| input.name == name);
        let is_set = |name: &str| of(name).map(Tensor::truth).transpose();
        let text =
            of(TEXT_INPUT).ok_or_else(|| invalid(format!("there is no input {TEXT_INPUT:?}")))?;
        let text = text.text()?.to_owned();
        let stream = is_set(STREAM)?.unwrap_or(false);
        let repeats = !is_set(EXCLUDE_INPUT)?.unwrap_or(stream);
        if repeats && stream {
            return Err(invalid(format!(
                "{EXCLUDE_INPUT} cannot be false with {STREAM}"
            )));
        }
        let mut outputs = outputs(asked.outputs)?;
        for (output, ..) in Output::ALL {
            let (name, _) = output.told();
            let wanted = is_set(&format!("return_{name}"))?.unwrap_or(false);
            if wanted && !outputs.iter().any(|(known, _)| known == output) {
                outputs.push((*output, None));
            }
        }
        for place in outputs.iter().filter_map(|(_, place)| place.as_ref()) {
            if stream {
                return Err(invalid(
                    "a text that comes in pieces has no one place in shared memory",
                ));
            }
            oip.regions.check(tenant, place)?;
        }
        let parameters = match of(SAMPLING) {
            Some(given) => sampling::of_text(given.text()?)?,
            None => sampling::of_parameters(&asked.parameters),
        };
        let deadline = until(&asked.parameters, by.deadline)?;
        let prompt = Prompt {
            kind: Some(Kind::Text(text.clone())),
        };
        let request = GenerateRequest {
            model: model.clone(),
            prompt: Some(prompt),
            priority: priority(whole(&asked.parameters, "priority")?.unwrap_or(0)),
            ..sampling::request(parameters)?
        };
        Ok(Self {
            id: asked.id,
            model,
            request,
            deadline,
            stream,
            before: if repeats { text } else { String::new() },
            outputs,
            empty_final: truth(&asked.parameters, EMPTY_FINAL)?,
            began,
        })
    }
}

/// What is to come out, and where to.
fn outputs(asked: Vec<InferRequestedOutputTensor>) -> Result<Vec<(Output, Option<Place>)>, Error> {
    few("outputs", asked.len(), limits::MAX_INFER_TENSORS)?;
    if asked.is_empty() {
        return Ok(vec![(Output::Text, None)]);
    }
    let mut all: Vec<(Output, Option<Place>)> = Vec::with_capacity(asked.len());
    for output in asked {
        let which = Output::of(&output.name)?;
        if all.iter().any(|(known, _)| *known == which) {
            let what = format!("output {:?} is asked for twice", short(&output.name));
            return Err(invalid(what));
        }
        all.push((which, place(&output.parameters)?));
    }
    Ok(all)
}

/// vLLM's word for an end.
fn finish_reason(finished: &Finished) -> &'static str {
    match finished.reason() {
        FinishReason::MaxTokens | FinishReason::ContextFull => "length",
        FinishReason::EndToken | FinishReason::StopString | FinishReason::Unspecified => "stop",
    }
}

/// The responses to one request as they come.
pub(super) struct Responses {
    oip: Oip,
    tenant: String,
    ask: Ask,
    branches: Branches,
    /// Whether these are said on a stream with others, where each says whether it is its request's last one.
    marked: bool,
    ready: VecDeque<ModelInferResponse>,
    text: String,
    /// Tokens of the text that was not said yet, and of the prompt.
    tokens: u32,
    prompt: u32,
    took: Took,
    over: bool,
}

impl Responses {
    /// Has a request run. On a stream, its responses are `marked` as such.
    ///
    /// # Errors
    /// Why it may not come in.
    pub fn begin(
        oip: &Oip,
        shared: &Shared,
        caller: &Caller,
        mut ask: Ask,
        marked: bool,
    ) -> Result<Self, Error> {
        let request = std::mem::take(&mut ask.request);
        let begun = Branches::begin(shared, request, 1, ask.deadline, caller);
        let branches =
            begun.inspect_err(|_| oip.statistics.failed(&ask.model, ask.began.elapsed()))?;
        Ok(Self {
            oip: oip.clone(),
            tenant: caller.tenant("").to_owned(),
            text: std::mem::take(&mut ask.before),
            ask,
            branches,
            marked,
            ready: VecDeque::new(),
            tokens: 0,
            prompt: 0,
            took: Took::default(),
            over: false,
        })
    }

    /// The next response. None once all were said; nothing comes after an error.
    ///
    /// # Errors
    /// Why the request cannot go on.
    pub async fn next(&mut self) -> Option<Result<ModelInferResponse, Error>> {
        loop {
            if let Some(response) = self.ready.pop_front() {
                return Some(Ok(response));
            }
            if self.over {
                return None;
            }
            let event = match self.branches.next().await? {
                Ok((_, event)) => event,
                Err(error) => return Some(Err(self.fail(error))),
            };
            let began = Clock::now();
            let heard = self.hear(event);
            self.took.output += began.elapsed();
            if let Err(error) = heard {
                return Some(Err(self.fail(error)));
            }
        }
    }

    fn fail(&mut self, error: Error) -> Error {
        self.over = true;
        self.ready.clear();
        let after = self.ask.began.elapsed();
        self.oip.statistics.failed(&self.ask.model, after);
        error
    }

    fn hear(&mut self, event: Event) -> Result<(), Error> {
        match event {
            Event::Accepted(accepted) => {
                self.took.input = self.ask.began.elapsed();
                self.prompt = u32::try_from(accepted.prompt_ids.len()).unwrap_or(u32::MAX);
            }
            Event::Delta(delta) => {
                self.text.push_str(&delta.text);
                let tokens = u32::try_from(delta.token_ids.len()).unwrap_or(u32::MAX);
                self.tokens = self.tokens.saturating_add(tokens);
                if self.ask.stream && !self.text.is_empty() {
                    let response = self.response(None, false)?;
                    self.ready.push_back(response);
                }
            }
            Event::Finished(finished) => {
                let extra = self.ask.empty_final && self.ask.stream && self.marked;
                let asked = self
                    .ask
                    .outputs
                    .iter()
                    .any(|(output, _)| *output != Output::Text);
                if !extra || asked || !self.text.is_empty() {
                    let response = self.response(Some(&finished), !extra)?;
                    self.ready.push_back(response);
                }
                if extra {
                    let mut response = self.head(true);
                    tell(&mut response.parameters, &finished);
                    self.ready.push_back(response);
                }
                self.over = true;
                self.took.all = self.ask.began.elapsed();
                self.took.worker = finished.timings.unwrap_or_default();
                self.oip.statistics.served(&self.ask.model, self.took);
            }
        }
        Ok(())
    }

    /// A response without tensors.
    fn head(&self, last: bool) -> ModelInferResponse {
        let mut parameters = Parameters::new();
        if self.marked {
            parameters.insert(
                FINAL.to_owned(),
                parameter(ParameterChoice::BoolParam(last)),
            );
        }
        ModelInferResponse {
            model_name: self.ask.model.clone(),
            model_version: VERSION.to_owned(),
            id: self.ask.id.clone(),
            parameters,
            ..ModelInferResponse::default()
        }
    }

    /// A response with what was not said yet.
    fn response(
        &mut self,
        finished: Option<&Finished>,
        last: bool,
    ) -> Result<ModelInferResponse, Error> {
        let mut response = self.head(last);
        if let Some(finished) = finished {
            tell(&mut response.parameters, finished);
        }
        let text = std::mem::take(&mut self.text);
        let tokens = std::mem::take(&mut self.tokens);
        for (output, place) in &self.ask.outputs {
            let data = match output {
                Output::Text => of_strings(&[&text])?,
                // As vLLM's models say it of a text that goes on.
                Output::FinishReason => of_strings(&[finished.map_or("None", finish_reason)])?,
                Output::InputTokens => Bytes::copy_from_slice(&self.prompt.to_le_bytes()),
                Output::Generated => Bytes::copy_from_slice(&tokens.to_le_bytes()),
            };
            let (name, datatype) = output.told();
            let mut tensor = InferOutputTensor {
                name: name.to_owned(),
                datatype: datatype.name().to_owned(),
                shape: vec![1],
                ..InferOutputTensor::default()
            };
            // Every output has its raw contents, so that the next one's are found; these are elsewhere.
            let data = match place {
                None => data,
                Some(place) => {
                    let size = self.oip.regions.write(&self.tenant, place, &data)?;
                    tensor.parameters = told(place, size);
                    Bytes::new()
                }
            };
            response.outputs.push(tensor);
            response.raw_output_contents.push(data);
        }
        Ok(response)
    }
}

/// With what the request can be run again, and the answer compared.
fn tell(parameters: &mut Parameters, finished: &Finished) {
    let class = finished.numerics.as_ref().map(|class| class.id.clone());
    for (name, value) in [
        ("hotcell_seed", ParameterChoice::Uint64Param(finished.seed)),
        (
            "hotcell_numerics",
            ParameterChoice::StringParam(class.unwrap_or_default()),
        ),
        (
            "hotcell_deaths_survived",
            ParameterChoice::Int64Param(i64::from(finished.deaths_survived)),
        ),
    ] {
        parameters.insert(name.to_owned(), parameter(value));
    }
}

/// Says where an output was put, and how many bytes of it there are.
pub(super) fn told(place: &Place, size: u64) -> Parameters {
    let number = |value: u64| ParameterChoice::Int64Param(i64::try_from(value).unwrap_or(i64::MAX));
    let all = [
        (REGION, ParameterChoice::StringParam(place.region.clone())),
        (REGION_SIZE, number(size)),
        (REGION_OFFSET, number(place.offset)),
    ];
    let all = all
        .into_iter()
        .map(|(name, value)| (name.to_owned(), parameter(value)));
    all.collect()
}

impl Drop for Responses {
    fn drop(&mut self) {
        if !self.over {
            // Its client left.
            self.fail(Error::new(Reason::Cancelled, "the client left"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_priority_is_the_highest_and_none_is_ordinary() {
        assert_eq!([0, 1, 2, 7, 8, u64::MAX].map(priority), [0, 7, 6, 1, 0, 0]);
    }

    #[test]
    fn a_place_in_shared_memory_has_a_size() {
        let string = |text: &str| parameter(ParameterChoice::StringParam(text.into()));
        let number = |value| parameter(ParameterChoice::Int64Param(value));
        let of = |all: &[(&str, InferParameter)]| {
            place(
                &all.iter()
                    .map(|(name, p)| ((*name).to_owned(), p.clone()))
                    .collect(),
            )
        };
        assert_eq!(of(&[]).unwrap(), None);
        let found = of(&[(REGION, string("r")), (REGION_SIZE, number(8))]).unwrap();
        assert_eq!(found.unwrap().offset, 0);
        assert!(of(&[(REGION, string("r"))]).is_err());
        assert!(of(&[(REGION, number(1)), (REGION_SIZE, number(8))]).is_err());
        assert!(of(&[(REGION, string("r")), (REGION_SIZE, number(-1))]).is_err());
    }

    #[test]
    fn inputs_come_in_one_way_each_and_none_is_left_over() {
        let input = |name: &str, contents: Option<&str>| InferInputTensor {
            name: name.to_owned(),
            datatype: "BYTES".to_owned(),
            shape: vec![1],
            contents: contents.map(|text| hotcell_gateways::inference::InferTensorContents {
                bytes_contents: vec![Bytes::copy_from_slice(text.as_bytes())],
                ..Default::default()
            }),
            ..InferInputTensor::default()
        };
        let raw = || of_strings(&["x"]).unwrap();
        let of = |inputs, raw| tensors(&Oip::default(), "", inputs, raw);
        assert_eq!(
            of(vec![input("a", Some("x"))], vec![]).unwrap(),
            of(vec![input("a", None)], vec![raw()]).unwrap()
        );
        for (inputs, raw) in [
            (vec![input("a", Some("x"))], vec![raw()]),
            (vec![input("a", None)], vec![]),
            (vec![input("a", None)], vec![raw(), raw()]),
            (vec![input("a", None), input("a", None)], vec![raw(), raw()]),
            (vec![], vec![raw()]),
            (
                vec![input("a", None); limits::MAX_INFER_TENSORS + 1],
                vec![],
            ),
        ] {
            assert!(of(inputs, raw).is_err());
        }
    }
}
