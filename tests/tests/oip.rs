//! The Open Inference Protocol over gRPC, as its definition says it, on the real scheduler.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{collections::HashMap, fs};

use hotcell_client::{Error, Reason};
use hotcell_gateways::inference::{
    InferParameter, ModelInferRequest, ModelInferResponse, ModelReadyRequest,
    ModelStatisticsRequest, ModelStreamInferResponse, RepositoryModelLoadRequest,
    RepositoryModelUnloadRequest, SystemSharedMemoryRegisterRequest,
    grpc_inference_service_client::GrpcInferenceServiceClient,
    infer_parameter::ParameterChoice,
    model_infer_request::{InferInputTensor, InferRequestedOutputTensor},
};
use hotcell_tests::cluster::{Cluster, all_have, free_address, kjv, signal_pid};
use rustix::process::Signal;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming, transport::Channel};

type Oip = GrpcInferenceServiceClient<Channel>;

const PROMPT: &str = "In the beginning";

async fn cluster() -> (Cluster, Oip) {
    let free = free_address().unwrap();
    let arguments = ["--listen", &free.to_string(), "--restart-backoff", "1ms"];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let oip = Oip::connect(format!("http://{free}")).await.unwrap();
    (cluster, oip)
}

fn bytes(text: &str) -> Vec<u8> {
    let length = u32::try_from(text.len()).unwrap().to_le_bytes();
    [&length[..], text.as_bytes()].concat()
}

fn text(bytes: &[u8]) -> String {
    let (length, text) = bytes.split_first_chunk::<4>().unwrap();
    assert_eq!(u32::from_le_bytes(*length) as usize, text.len());
    String::from_utf8(text.to_vec()).unwrap()
}

fn request(id: &str, stream: bool, tokens: u32) -> ModelInferRequest {
    let sampling = format!(r#"{{"temperature": 0, "max_tokens": {tokens}, "ignore_eos": true}}"#);
    let tensors = [
        ("text_input", "BYTES", bytes(PROMPT)),
        ("sampling_parameters", "BYTES", bytes(&sampling)),
        ("stream", "BOOL", vec![u8::from(stream)]),
        ("exclude_input_in_output", "BOOL", vec![1]),
    ];
    let input = |name: &str, datatype: &str| InferInputTensor {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape: vec![1],
        ..InferInputTensor::default()
    };
    ModelInferRequest {
        model_name: "kjv".to_owned(),
        id: id.to_owned(),
        inputs: tensors
            .iter()
            .map(|(name, datatype, _)| input(name, datatype))
            .collect(),
        raw_input_contents: tensors.into_iter().map(|(.., data)| data.into()).collect(),
        ..ModelInferRequest::default()
    }
}

fn string(value: &str) -> InferParameter {
    InferParameter {
        parameter_choice: Some(ParameterChoice::StringParam(value.to_owned())),
    }
}

fn number(value: i64) -> InferParameter {
    InferParameter {
        parameter_choice: Some(ParameterChoice::Int64Param(value)),
    }
}

fn is_last(response: &ModelInferResponse) -> bool {
    let last = &response.parameters["triton_final_response"];
    last.parameter_choice == Some(ParameterChoice::BoolParam(true))
}

fn reason(status: &Status) -> Reason {
    Error::from_status(status).reason()
}

async fn infer(oip: &mut Oip, request: ModelInferRequest) -> Result<ModelInferResponse, Status> {
    Ok(oip.model_infer(request).await?.into_inner())
}

/// A stream of requests, and the responses to them.
async fn stream(
    oip: &mut Oip,
) -> (
    mpsc::Sender<ModelInferRequest>,
    Streaming<ModelStreamInferResponse>,
) {
    let (sender, receiver) = mpsc::channel(8);
    let responses = oip.model_stream_infer(ReceiverStream::new(receiver)).await;
    (sender, responses.unwrap().into_inner())
}

#[tokio::test]
async fn one_response_or_many_make_the_same_text() {
    let (_cluster, mut oip) = cluster().await;
    let whole = infer(&mut oip, request("a", false, 24)).await.unwrap();
    assert_eq!(
        (whole.id.as_str(), whole.model_version.as_str()),
        ("a", "1")
    );
    let whole = text(&whole.raw_output_contents[0]);
    let (ask, mut responses) = stream(&mut oip).await;
    for id in ["a", "b", "c"] {
        ask.send(request(id, true, 24)).await.unwrap();
    }
    let mut said: HashMap<String, String> = HashMap::new();
    let mut over = 0;
    while over < 3 {
        let response = responses.message().await.unwrap().unwrap();
        assert_eq!(response.error_message, "");
        let response = response.infer_response.unwrap();
        over += u32::from(is_last(&response));
        let so_far = said.entry(response.id).or_default();
        so_far.push_str(&text(&response.raw_output_contents[0]));
    }
    assert_eq!(said.len(), 3);
    assert!(
        said.values().all(|text| *text == whole),
        "{whole:?} {said:?}"
    );
    drop(ask);
    assert!(responses.message().await.unwrap().is_none());
    let asked = ModelStatisticsRequest::default();
    let told = oip.model_statistics(asked).await.unwrap().into_inner();
    assert_eq!(told.model_stats[0].inference_count, 4);
}

#[tokio::test]
async fn errors_are_typed_and_leave_a_stream_open() {
    let (_cluster, mut oip) = cluster().await;
    let mut wrong = vec![(request("a", true, 1), Reason::InvalidArgument)];
    wrong.push((
        ModelInferRequest {
            model_name: "nobody".to_owned(),
            ..request("a", false, 1)
        },
        Reason::ModelNotFound,
    ));
    let mut short = request("a", false, 1);
    short.raw_input_contents.pop();
    wrong.push((short, Reason::InvalidArgument));
    let mut shape = request("a", false, 1);
    shape.inputs[0].shape = vec![i64::MAX, 2];
    wrong.push((shape, Reason::InvalidArgument));
    let mut late = request("a", false, 1000);
    late.parameters.insert("timeout".to_owned(), number(20_000));
    wrong.push((late, Reason::DeadlineExceeded));
    for (request, expected) in wrong {
        let status = infer(&mut oip, request).await.unwrap_err();
        assert_eq!(reason(&status), expected, "{status}");
    }
    let (ask, mut responses) = stream(&mut oip).await;
    ask.send(ModelInferRequest {
        model_name: "nobody".to_owned(),
        ..request("bad", true, 1)
    })
    .await
    .unwrap();
    let response = responses.message().await.unwrap().unwrap();
    assert!(response.error_message.contains("nobody"), "{response:?}");
    assert_eq!(response.infer_response.unwrap().id, "bad");
    ask.send(request("good", true, 2)).await.unwrap();
    let response = responses.message().await.unwrap().unwrap();
    assert_eq!(response.infer_response.unwrap().id, "good");
}

#[tokio::test]
async fn a_worker_that_dies_under_a_stream_is_not_noticed() {
    let (cluster, mut oip) = cluster().await;
    let whole = infer(&mut oip, request("a", false, 200)).await.unwrap();
    let whole = text(&whole.raw_output_contents[0]);
    let (ask, mut responses) = stream(&mut oip).await;
    ask.send(request("a", true, 200)).await.unwrap();
    let mut said = String::new();
    let mut killed = false;
    loop {
        let response = responses.message().await.unwrap().unwrap();
        assert_eq!(response.error_message, "");
        let response = response.infer_response.unwrap();
        said.push_str(&text(&response.raw_output_contents[0]));
        if is_last(&response) {
            let survived = &response.parameters["hotcell_deaths_survived"];
            assert_eq!(
                survived.parameter_choice,
                Some(ParameterChoice::Int64Param(1))
            );
            break;
        }
        if !killed {
            let workers = cluster.client().await.unwrap().workers().await.unwrap();
            signal_pid(workers[0].pid, Signal::KILL).unwrap();
            killed = true;
        }
    }
    assert_eq!(said, whole);
}

#[tokio::test]
async fn models_are_loaded_and_unloaded_by_either_servers_form() {
    let (_cluster, mut oip) = cluster().await;
    let asked = RepositoryModelUnloadRequest {
        model_name: "bundled-is-not-a-name".to_owned(),
        ..RepositoryModelUnloadRequest::default()
    };
    let status = oip.repository_model_unload(asked).await.unwrap_err();
    assert_eq!(reason(&status), Reason::ModelNotFound);
    // As kserve's clients write it.
    let asked = RepositoryModelLoadRequest {
        repository_name: "kjv".to_owned(),
        ..RepositoryModelLoadRequest::default()
    };
    let loaded = oip.repository_model_load(asked).await.unwrap().into_inner();
    assert!(loaded.is_loaded && loaded.model_name == "kjv");
    let asked = RepositoryModelUnloadRequest {
        model_name: "kjv".to_owned(),
        ..RepositoryModelUnloadRequest::default()
    };
    oip.repository_model_unload(asked).await.unwrap();
    let asked = ModelReadyRequest {
        name: "kjv".to_owned(),
        ..ModelReadyRequest::default()
    };
    assert!(!oip.model_ready(asked).await.unwrap().into_inner().ready);
}

/// A file of `/dev/shm`, gone at the end.
struct Shared(String);

impl Shared {
    fn new(what: &str) -> Self {
        let shared = Self(format!("hotcell-test-{}-{what}", std::process::id()));
        fs::write(shared.path(), [0; 4096]).unwrap();
        shared
    }

    fn path(&self) -> String {
        format!("/dev/shm/{}", self.0)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.path());
    }
}

fn place(offset: i64, size: i64) -> HashMap<String, InferParameter> {
    HashMap::from([
        ("shared_memory_region".to_owned(), string("r")),
        ("shared_memory_offset".to_owned(), number(offset)),
        ("shared_memory_byte_size".to_owned(), number(size)),
    ])
}

#[tokio::test]
async fn shared_memory_is_used_within_its_bounds_while_it_is_what_was_registered() {
    let (_cluster, mut oip) = cluster().await;
    let memory = Shared::new("oip");
    let input = bytes(PROMPT);
    let fill = || {
        let mut all = vec![0; 4096];
        all[100..100 + input.len()].copy_from_slice(&input);
        fs::write(memory.path(), all).unwrap();
    };
    fill();
    let register = |byte_size: u64| SystemSharedMemoryRegisterRequest {
        name: "r".to_owned(),
        key: format!("/{}", memory.0),
        offset: 0,
        byte_size,
    };
    let too_large = oip.system_shared_memory_register(register(4097)).await;
    assert_eq!(reason(&too_large.unwrap_err()), Reason::InvalidArgument);
    oip.system_shared_memory_register(register(4096))
        .await
        .unwrap();

    let size = i64::try_from(input.len()).unwrap();
    let ask = |inside: (i64, i64), outside: (i64, i64)| {
        let mut asked = request("a", false, 8);
        asked.inputs[0].parameters = place(inside.0, inside.1);
        asked.raw_input_contents.remove(0);
        asked.outputs = vec![InferRequestedOutputTensor {
            name: "text_output".to_owned(),
            parameters: place(outside.0, outside.1),
        }];
        asked
    };
    let there = infer(&mut oip, ask((100, size), (2048, 1024)))
        .await
        .unwrap();
    let Some(ParameterChoice::Int64Param(length)) =
        there.outputs[0].parameters["shared_memory_byte_size"].parameter_choice
    else {
        panic!("{there:?}")
    };
    let now = fs::read(memory.path()).unwrap();
    let length = usize::try_from(length).unwrap();
    let direct = infer(&mut oip, request("a", false, 8)).await.unwrap();
    assert_eq!(
        text(&now[2048..2048 + length]),
        text(&direct.raw_output_contents[0])
    );
    assert!(now[2048 + length..].iter().all(|byte| *byte == 0));

    for (inside, outside) in [
        ((4096 - size + 1, size), (2048, 1024)),
        ((i64::MAX, size), (2048, 1024)),
        ((-1, size), (2048, 1024)),
        ((100, size), (4096, 1)),
        ((100, size), (2048, 4)),
        ((100, size - 1), (2048, 1024)),
    ] {
        let status = infer(&mut oip, ask(inside, outside)).await.unwrap_err();
        assert_eq!(reason(&status), Reason::InvalidArgument, "{status}");
    }
    let file = fs::OpenOptions::new()
        .write(true)
        .open(memory.path())
        .unwrap();
    file.set_len(4095).unwrap();
    let status = infer(&mut oip, ask((100, size), (2048, 1024)))
        .await
        .unwrap_err();
    assert_eq!(reason(&status), Reason::RegionChanged, "{status}");
    file.set_len(4096).unwrap();
    fs::remove_file(memory.path()).unwrap();
    fill();
    let status = infer(&mut oip, ask((100, size), (2048, 1024)))
        .await
        .unwrap_err();
    assert_eq!(reason(&status), Reason::RegionChanged, "{status}");
}
