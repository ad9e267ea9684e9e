//! Requests and responses as JSON, some tensors of which follow it as bytes.

use std::{collections::BTreeMap, fmt};

use bytes::Bytes;
use hotcell_gateways::inference::{
    InferParameter, ModelConfig, ModelInferRequest, ModelInferResponse, ModelMetadataResponse,
    ModelStatisticsResponse, StatisticDuration,
    infer_parameter::ParameterChoice,
    model_infer_request::{InferInputTensor, InferRequestedOutputTensor},
    model_metadata_response::TensorMetadata,
};
use hotcell_proto::{error::Error, limits::MAX_JSON_ELEMENTS};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, SeqAccess, Visitor},
};
use serde_json::{Map, Value, json};

use super::told::elements;
use crate::gateway::oip::{
    infer::{Parameters, parameter},
    model::{INPUTS, SAMPLING},
    tensor::{Datatype, invalid, numbers, of_strings, short},
};

/// Reads JSON.
///
/// # Errors
/// [`Reason::InvalidArgument`](hotcell_proto::error::Reason), saying what is wrong and where.
pub(super) fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(bytes).map_err(|e| {
        invalid(format!(
            "the request cannot be read: {}",
            short(&e.to_string())
        ))
    })
}

#[derive(Debug, Deserialize)]
struct Request {
    #[serde(default)]
    id: String,
    #[serde(default)]
    parameters: BTreeMap<String, Scalar>,
    inputs: Vec<Input>,
    #[serde(default)]
    outputs: Vec<Output>,
}

#[derive(Debug, Deserialize)]
struct Input {
    name: String,
    shape: Vec<i64>,
    datatype: String,
    #[serde(default)]
    parameters: BTreeMap<String, Scalar>,
    data: Option<Data>,
}

#[derive(Debug, Deserialize)]
struct Output {
    name: String,
    #[serde(default)]
    parameters: BTreeMap<String, Scalar>,
}

/// A value without parts.
#[derive(Clone, Debug, PartialEq)]
enum Scalar {
    Truth(bool),
    Whole(i64),
    Large(u64),
    Number(f64),
    Text(String),
}

/// Elements of a tensor, in however many lists within each other.
#[derive(Debug, Default)]
struct Data(Vec<Scalar>);

struct Scalars;

impl Visitor<'_> for Scalars {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, a text, true or false")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Scalar, E> {
        Ok(Scalar::Truth(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Scalar, E> {
        Ok(Scalar::Whole(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Scalar, E> {
        Ok(i64::try_from(value).map_or(Scalar::Large(value), Scalar::Whole))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(value.to_owned()))
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Scalars)
    }
}

/// Puts what it visits behind what is there already.
struct Elements<'a>(&'a mut Vec<Scalar>);

impl Elements<'_> {
    fn push<E: serde::de::Error>(self, scalar: Result<Scalar, E>) -> Result<(), E> {
        if self.0.len() >= MAX_JSON_ELEMENTS {
            let what = format!("more than {MAX_JSON_ELEMENTS} elements; send their bytes instead");
            return Err(E::custom(what));
        }
        self.0.push(scalar?);
        Ok(())
    }
}

impl<'de> Visitor<'de> for Elements<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tensor's elements")
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        self.push(Scalars.visit_bool(value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        self.push(Scalars.visit_i64(value))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        self.push(Scalars.visit_u64(value))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        self.push(Scalars.visit_f64(value))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<(), E> {
        self.push(Scalars.visit_str(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(Elements(&mut *self.0))?.is_some() {}
        Ok(())
    }
}

impl<'de> serde::de::DeserializeSeed<'de> for Elements<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut all = Vec::new();
        from.deserialize_any(Elements(&mut all))?;
        Ok(Self(all))
    }
}

impl Scalar {
    fn parameter(self) -> InferParameter {
        parameter(match self {
            Self::Truth(value) => ParameterChoice::BoolParam(value),
            Self::Whole(value) => ParameterChoice::Int64Param(value),
            Self::Large(value) => ParameterChoice::Uint64Param(value),
            Self::Number(value) => ParameterChoice::DoubleParam(value),
            Self::Text(value) => ParameterChoice::StringParam(value),
        })
    }

    fn whole(self) -> Option<i128> {
        match self {
            Self::Whole(value) => Some(value.into()),
            Self::Large(value) => Some(value.into()),
            _ => None,
        }
    }

    fn number(self) -> Option<f64> {
        match self {
            Self::Whole(value) => Some(value as f64),
            Self::Large(value) => Some(value as f64),
            Self::Number(value) => Some(value),
            _ => None,
        }
    }
}

fn parameters(all: BTreeMap<String, Scalar>) -> Parameters {
    let all = all.into_iter();
    all.map(|(name, value)| (name, value.parameter())).collect()
}

/// Elements as they would be as bytes.
fn bytes_of(datatype: Datatype, data: Data) -> Result<Bytes, Error> {
    let odd = || invalid(format!("an element is no {}", datatype.name()));
    let whole = || data.0.iter().cloned().map(|s| s.whole().ok_or_else(odd));
    let wholes = || whole().collect::<Result<Vec<i128>, Error>>();
    let reals = || {
        let all = data.0.iter().cloned().map(|s| s.number().ok_or_else(odd));
        all.collect::<Result<Vec<f64>, Error>>()
    };
    Ok(match datatype {
        Datatype::Bool => {
            let all = data.0.iter().map(|scalar| match scalar {
                Scalar::Truth(value) => Ok(u8::from(*value)),
                _ => Err(odd()),
            });
            all.collect::<Result<Vec<u8>, Error>>()?.into()
        }
        Datatype::Int8 => numbers!(wholes()?, i8),
        Datatype::Int16 => numbers!(wholes()?, i16),
        Datatype::Int32 => numbers!(wholes()?, i32),
        Datatype::Int64 => numbers!(wholes()?, i64),
        Datatype::Uint8 => numbers!(wholes()?, u8),
        Datatype::Uint16 => numbers!(wholes()?, u16),
        Datatype::Uint32 => numbers!(wholes()?, u32),
        Datatype::Uint64 => numbers!(wholes()?, u64),
        Datatype::Fp32 => {
            let all = reals()?.into_iter();
            all.flat_map(|value| (value as f32).to_le_bytes()).collect()
        }
        Datatype::Fp64 => reals()?.into_iter().flat_map(f64::to_le_bytes).collect(),
        Datatype::Bytes => {
            let all = data.0.iter().map(|scalar| match scalar {
                Scalar::Text(text) => Ok(text.as_str()),
                _ => Err(odd()),
            });
            of_strings(&all.collect::<Result<Vec<_>, Error>>()?)?
        }
        Datatype::Fp16 | Datatype::Bf16 => {
            let what = format!(
                "elements of {} are not written as JSON; send their bytes",
                datatype.name()
            );
            return Err(invalid(what));
        }
    })
}

/// Which outputs are sent as bytes behind the JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Binary {
    otherwise: bool,
    named: BTreeMap<String, bool>,
}

/// Reads a request: JSON of so many bytes, and tensors' bytes behind it.
///
/// # Errors
/// [`Reason::InvalidArgument`](hotcell_proto::error::Reason).
pub(super) fn request(whole: &Bytes, length: usize) -> Result<(ModelInferRequest, Binary), Error> {
    let json = whole.get(..length).unwrap_or_default();
    let mut rest = whole.slice(whole.len().min(length)..);
    let mut asked: Request = read(json)?;
    let is_true = |scalar: Option<Scalar>| scalar == Some(Scalar::Truth(true));
    let mut binary = Binary {
        otherwise: is_true(asked.parameters.remove("binary_data_output")),
        ..Binary::default()
    };
    let (mut inputs, mut raw) = (Vec::new(), Vec::new());
    for mut input in asked.inputs {
        let size = input.parameters.remove("binary_data_size");
        let named = input.parameters.contains_key("shared_memory_region");
        match (input.data, size) {
            (None, None) if named => {}
            (Some(data), None) => raw.push(bytes_of(Datatype::of(&input.datatype)?, data)?),
            (None, Some(size)) => {
                let size = size.whole().and_then(|size| usize::try_from(size).ok());
                let size = size.filter(|size| *size <= rest.len());
                let size = size.ok_or_else(|| {
                    let name = short(&input.name);
                    invalid(format!(
                        "input {name:?}: binary_data_size is not within the body"
                    ))
                })?;
                raw.push(rest.split_to(size));
            }
            _ => {
                let name = short(&input.name);
                return Err(invalid(format!(
                    "input {name:?} comes in no way, or in two"
                )));
            }
        }
        inputs.push(InferInputTensor {
            name: input.name,
            datatype: input.datatype,
            shape: input.shape,
            parameters: parameters(input.parameters),
            contents: None,
        });
    }
    if !rest.is_empty() {
        return Err(invalid(format!(
            "{} bytes of the body belong to no input",
            rest.len()
        )));
    }
    let mut outputs = Vec::new();
    for mut output in asked.outputs {
        if let Some(Scalar::Truth(value)) = output.parameters.remove("binary_data") {
            binary.named.insert(output.name.clone(), value);
        }
        outputs.push(InferRequestedOutputTensor {
            name: output.name,
            parameters: parameters(output.parameters),
        });
    }
    let asked = ModelInferRequest {
        id: asked.id,
        parameters: parameters(asked.parameters),
        inputs,
        outputs,
        raw_input_contents: raw,
        ..ModelInferRequest::default()
    };
    Ok((asked, binary))
}

fn told_parameter(parameter: InferParameter) -> Value {
    match parameter.parameter_choice {
        None => Value::Null,
        Some(ParameterChoice::BoolParam(value)) => value.into(),
        Some(ParameterChoice::Int64Param(value)) => value.into(),
        Some(ParameterChoice::Uint64Param(value)) => value.into(),
        Some(ParameterChoice::DoubleParam(value)) => value.into(),
        Some(ParameterChoice::StringParam(value)) => value.into(),
    }
}

fn told_parameters(all: Parameters) -> Map<String, Value> {
    let all = all.into_iter();
    all.map(|(name, value)| (name, told_parameter(value)))
        .collect()
}

/// A response as JSON, and the tensors that follow it as bytes.
pub(super) fn response(response: ModelInferResponse, binary: &Binary) -> (Value, Vec<Bytes>) {
    let mut behind = Vec::new();
    let outputs = response
        .outputs
        .into_iter()
        .zip(response.raw_output_contents);
    let outputs = outputs.map(|(output, data)| {
        let is_elsewhere = output.parameters.contains_key("shared_memory_region");
        let as_bytes = binary
            .named
            .get(&output.name)
            .copied()
            .unwrap_or(binary.otherwise);
        let mut parameters = told_parameters(output.parameters);
        let mut told = json!({
            "name": output.name,
            "datatype": output.datatype,
            "shape": output.shape,
        });
        if !is_elsewhere && as_bytes {
            parameters.insert("binary_data_size".to_owned(), data.len().into());
            behind.push(data);
        } else if !is_elsewhere {
            told["data"] = elements(&output.datatype, &data).into();
        }
        if !parameters.is_empty() {
            told["parameters"] = parameters.into();
        }
        told
    });
    let outputs: Vec<_> = outputs.collect();
    let mut told = json!({
        "model_name": response.model_name,
        "model_version": response.model_version,
        "parameters": told_parameters(response.parameters),
        "outputs": outputs,
    });
    if !response.id.is_empty() {
        told["id"] = response.id.into();
    }
    (told, behind)
}

/// Reads a request of Triton's `generate`: inputs by their names, and parameters.
///
/// # Errors
/// [`Reason::InvalidArgument`](hotcell_proto::error::Reason).
pub(super) fn generate(
    body: &[u8],
    (name, version): (&str, &str),
) -> Result<ModelInferRequest, Error> {
    let mut asked: Map<String, Value> = read(body)?;
    let mut request = ModelInferRequest {
        model_name: name.to_owned(),
        model_version: version.to_owned(),
        ..ModelInferRequest::default()
    };
    if let Some(Value::String(id)) = asked.remove("id") {
        request.id = id;
    }
    let mut parameters = match asked.remove("parameters") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(parameters)) => parameters,
        Some(_) => return Err(invalid("parameters is no JSON object")),
    };
    let odd = |name: &str, datatype: Datatype| {
        invalid(format!(
            "input {name:?} is one element of {}",
            datatype.name()
        ))
    };
    for (name, datatype, _) in INPUTS {
        let data = match (asked.remove(*name), datatype) {
            (None | Some(Value::Null), _) => continue,
            (Some(Value::Bool(value)), Datatype::Bool) => Bytes::from(vec![u8::from(value)]),
            (Some(Value::String(text)), Datatype::Bytes) => of_strings(&[text])?,
            (Some(value @ Value::Object(_)), Datatype::Bytes) if *name == SAMPLING => {
                of_strings(&[value.to_string()])?
            }
            _ => return Err(odd(name, *datatype)),
        };
        input(&mut request, name, *datatype, data);
    }
    // What is no input is a parameter, too.
    parameters.append(&mut asked);
    for name in ["stream", "exclude_input_in_output"] {
        if let Some(Value::Bool(value)) = parameters.remove(name)
            && !request.inputs.iter().any(|input| input.name == name)
        {
            let data = Bytes::from(vec![u8::from(value)]);
            input(&mut request, name, Datatype::Bool, data);
        }
    }
    let mut sampling = Map::new();
    for (name, value) in parameters {
        if crate::gateway::oip::sampling::is_known(&name) {
            sampling.insert(name, value);
        } else if let Ok(scalar) = serde_json::from_value::<Scalar>(value) {
            request.parameters.insert(name, scalar.parameter());
        }
    }
    let is_said = request.inputs.iter().any(|input| input.name == SAMPLING);
    if !sampling.is_empty() && !is_said {
        let data = of_strings(&[Value::Object(sampling).to_string()])?;
        input(&mut request, SAMPLING, Datatype::Bytes, data);
    }
    Ok(request)
}

fn input(request: &mut ModelInferRequest, name: &str, datatype: Datatype, data: Bytes) {
    request.inputs.push(InferInputTensor {
        name: name.to_owned(),
        datatype: datatype.name().to_owned(),
        shape: vec![1],
        ..InferInputTensor::default()
    });
    request.raw_input_contents.push(data);
}

/// A response of Triton's `generate`: outputs by their names.
pub(super) fn generated(response: &ModelInferResponse) -> Value {
    let mut told = json!({
        "model_name": response.model_name,
        "model_version": response.model_version,
    });
    if !response.id.is_empty() {
        told["id"] = response.id.clone().into();
    }
    for (output, data) in response.outputs.iter().zip(&response.raw_output_contents) {
        let mut all = elements(&output.datatype, data);
        told[&output.name] = match all.len() {
            1 => all.swap_remove(0),
            _ => all.into(),
        };
    }
    told
}

/// A model's inputs and outputs.
pub(super) fn metadata(model: ModelMetadataResponse) -> Value {
    let tensors = |all: Vec<TensorMetadata>| {
        let all = all.into_iter();
        all.map(|t| json!({"name": t.name, "datatype": t.datatype, "shape": t.shape}))
            .collect::<Value>()
    };
    json!({
        "name": model.name,
        "versions": model.versions,
        "platform": model.platform,
        "inputs": tensors(model.inputs),
        "outputs": tensors(model.outputs),
    })
}

/// A model's configuration.
pub(super) fn config(model: ModelConfig) -> Value {
    let inputs = model.input.iter().map(|t| {
        json!({
            "name": t.name,
            "data_type": t.data_type().as_str_name(),
            "dims": t.dims,
            "optional": t.optional,
        })
    });
    let outputs = model
        .output
        .iter()
        .map(|t| json!({"name": t.name, "data_type": t.data_type().as_str_name(), "dims": t.dims}));
    let decoupled = model.model_transaction_policy.is_some_and(|p| p.decoupled);
    json!({
        "name": model.name,
        "platform": model.platform,
        "backend": model.backend,
        "max_batch_size": model.max_batch_size,
        "input": inputs.collect::<Value>(),
        "output": outputs.collect::<Value>(),
        "model_transaction_policy": {"decoupled": decoupled},
    })
}

/// What was served.
pub(super) fn statistics(all: ModelStatisticsResponse) -> Value {
    let told = |total: Option<StatisticDuration>| {
        let StatisticDuration { count, ns } = total.unwrap_or_default();
        json!({"count": count, "ns": ns})
    };
    let all = all.model_stats.into_iter().map(|model| {
        let stats = model.inference_stats.unwrap_or_default();
        let batches = model.batch_stats.into_iter().map(|batch| {
            json!({
                "batch_size": batch.batch_size,
                "compute_input": told(batch.compute_input),
                "compute_infer": told(batch.compute_infer),
                "compute_output": told(batch.compute_output),
            })
        });
        json!({
            "name": model.name,
            "version": model.version,
            "last_inference": model.last_inference,
            "inference_count": model.inference_count,
            "execution_count": model.execution_count,
            "inference_stats": {
                "success": told(stats.success),
                "fail": told(stats.fail),
                "queue": told(stats.queue),
                "compute_input": told(stats.compute_input),
                "compute_infer": told(stats.compute_infer),
                "compute_output": told(stats.compute_output),
                "cache_hit": told(stats.cache_hit),
                "cache_miss": told(stats.cache_miss),
            },
            "batch_stats": batches.collect::<Value>(),
        })
    });
    json!({"model_stats": all.collect::<Value>()})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::oip::tensor::each_string;

    fn parse(json: &str, behind: &[u8]) -> Result<(ModelInferRequest, Binary), Error> {
        let whole = Bytes::from([json.as_bytes(), behind].concat());
        request(&whole, json.len())
    }

    #[test]
    fn tensors_come_as_json_or_behind_it() {
        let json = r#"{"id": "a", "parameters": {"timeout": 5}, "inputs": [
            {"name": "x", "shape": [2, 1], "datatype": "INT16", "data": [[1], [-1]]},
            {"name": "y", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}],
            "outputs": [{"name": "z", "parameters": {"binary_data": true}}]}"#;
        let (asked, binary) = parse(json, b"\x01\0\0\0b").unwrap();
        assert_eq!(
            asked.raw_input_contents,
            [&b"\x01\0\xff\xff"[..], b"\x01\0\0\0b"]
        );
        assert!(asked.inputs[1].parameters.is_empty() && asked.id == "a");
        assert!(binary.named["z"] && !binary.otherwise);
    }

    #[test]
    fn what_does_not_add_up_is_refused() {
        let input = |more: &str| {
            format!(r#"{{"inputs": [{{"name": "x", "shape": [1], "datatype": "BYTES"{more}}}]}}"#)
        };
        let many = format!(r#", "data": [{}0]"#, "0,".repeat(MAX_JSON_ELEMENTS));
        let deep = format!(r#", "data": {}{}"#, "[".repeat(10_000), "]".repeat(10_000));
        for (json, behind) in [
            (input(""), ""),
            (input(r#", "data": ["a"]"#), "left over"),
            (input(r#", "data": [1]"#), ""),
            (input(r#", "data": [{}]"#), ""),
            (
                input(r#", "data": ["a"], "parameters": {"binary_data_size": 1}"#),
                "a",
            ),
            (input(r#", "parameters": {"binary_data_size": 2}"#), "a"),
            (input(r#", "parameters": {"binary_data_size": -1}"#), "a"),
            (input(r#", "parameters": {"a": {"b": 1}}"#), ""),
            (input(&many), ""),
            (input(&deep), ""),
            ("{}".to_owned(), ""),
            ("\u{fffd}".to_owned(), ""),
        ] {
            assert!(parse(&json, behind.as_bytes()).is_err(), "{}", short(&json));
        }
    }

    #[test]
    fn what_generate_is_told_is_an_input_or_a_parameter() {
        let body = br#"{"text_input": "a", "stream": true, "max_tokens": 3, "mine": 1,
            "parameters": {"temperature": 0, "timeout": 7, "stop": ["x"]}}"#;
        let asked = generate(body, ("m", "")).unwrap();
        let names: Vec<_> = asked
            .inputs
            .iter()
            .map(|input| input.name.as_str())
            .collect();
        assert_eq!(names, ["text_input", "stream", SAMPLING]);
        let said = each_string(&asked.raw_input_contents[2]).next().unwrap();
        let said: Value = serde_json::from_slice(said).unwrap();
        assert_eq!(
            said,
            json!({"max_tokens": 3, "temperature": 0, "stop": ["x"]})
        );
        assert!(asked.parameters.contains_key("timeout") && asked.parameters.contains_key("mine"));
        assert!(generate(br#"{"text_input": 1}"#, ("m", "")).is_err());
        assert!(generate(br#"{"text_input": "a", "parameters": []}"#, ("m", "")).is_err());
        assert!(generate(b"[]", ("m", "")).is_err());
    }
}
