//! Saved graphs are models of tensors for clients of the Open Inference Protocol, whatever happens to workers and schedulers.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::HashMap,
    fs,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use hotcell_client::{
    Address, Client, Error, Reason, SaveGraph,
    tensor::{DType, HostTensor, Session, SessionOptions, Shape, Tensor, TensorSpec},
    v1,
};
use hotcell_gateways::inference::{
    InferParameter, ModelConfigRequest, ModelInferRequest, ModelInferResponse,
    ModelMetadataRequest, ModelReadyRequest, ModelStatisticsRequest, RepositoryIndexRequest,
    RepositoryModelUnloadRequest, ServerLiveRequest, SystemSharedMemoryRegisterRequest,
    grpc_inference_service_client::GrpcInferenceServiceClient,
    infer_parameter::ParameterChoice,
    model_infer_request::{InferInputTensor, InferRequestedOutputTensor},
};
use hotcell_tests::{
    cluster::{Cluster, binaries, free_address, signal_pid},
    fault::POISON_INPUT,
};
use rustix::process::Signal;
use tonic::{Status, transport::Channel};

type Oip = GrpcInferenceServiceClient<Channel>;

/// Features of each row of the saved layer.
const IN: usize = 8;
const OUT: usize = 5;
const ROWS: usize = 64;

struct Host {
    cluster: Cluster,
    client: Client,
    session: Session,
    oip: Oip,
    listen: String,
}

async fn host(more: &[&str]) -> Host {
    let free = free_address().unwrap();
    let listen = free.to_string();
    let mut arguments = vec!["--listen", &listen, "--restart-backoff", "1ms"];
    arguments.extend(more);
    let cluster = Cluster::start(&arguments).await.unwrap();
    let ready = |workers: &[v1::WorkerInfo]| {
        !workers.is_empty() && workers.iter().all(|w| w.state() == v1::WorkerState::Ready)
    };
    cluster.workers(ready).await.unwrap();
    let address: Address = format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap();
    Host {
        client: cluster.client().await.unwrap(),
        session: Session::open(&address, SessionOptions::default())
            .await
            .unwrap(),
        oip: Oip::connect(format!("http://{free}")).await.unwrap(),
        listen,
        cluster,
    }
}

/// Numbers that are all different, and none of them round.
fn numbers(count: usize, from: f32) -> Vec<f32> {
    (0..count)
        .map(|i| from + (i as f32) * 0.37)
        .map(f32::sin)
        .collect()
}

/// Saves `tanh(x w + b)` for up to [`ROWS`] rows.
async fn save_layer(host: &Host, saving: &SaveGraph) -> Result<v1::SavedGraph, Error> {
    let session = &host.session;
    let weight = session.tensor(&numbers(IN * OUT, 1.0), &[IN, OUT])?;
    let bias = session.tensor(&numbers(OUT, 9.0), &[OUT])?;
    session.eval(&[weight.clone(), bias.clone()]).await?;
    let layer = session.compile_shapeless(move |x| {
        let sum = &x[0].matmul(&weight) + &bias;
        vec![sum.tanh(), sum]
    });
    let example = session.tensor(&numbers(3 * IN, 2.0), &[3, IN])?;
    let arguments = [("x", &example)];
    layer
        .save(&host.client, saving, &arguments, Some(ROWS))
        .await
}

/// The same here, row by row, in the order of the definition and more precisely.
fn layer(x: &[f32]) -> Vec<f64> {
    let (weight, bias) = (numbers(IN * OUT, 1.0), numbers(OUT, 9.0));
    let row = |row: &[f32]| {
        (0..OUT)
            .map(|out| {
                let products = row.iter().enumerate();
                let sum: f64 = products
                    .map(|(i, x)| f64::from(*x) * f64::from(weight[i * OUT + out]))
                    .sum();
                (sum + f64::from(bias[out])).tanh()
            })
            .collect::<Vec<f64>>()
    };
    x.chunks(IN).flat_map(row).collect()
}

fn le(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let each = bytes.as_chunks::<4>().0.iter();
    each.map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn asked(model: &str, inputs: &[(&str, &str, &[i64], Vec<u8>)]) -> ModelInferRequest {
    let tensor = |(name, datatype, shape, _): &(&str, &str, &[i64], Vec<u8>)| InferInputTensor {
        name: (*name).to_owned(),
        datatype: (*datatype).to_owned(),
        shape: shape.to_vec(),
        ..InferInputTensor::default()
    };
    ModelInferRequest {
        model_name: model.to_owned(),
        id: "an id".to_owned(),
        inputs: inputs.iter().map(tensor).collect(),
        raw_input_contents: inputs
            .iter()
            .map(|(.., data)| data.clone().into())
            .collect(),
        ..ModelInferRequest::default()
    }
}

fn rows(count: usize) -> (Vec<f32>, ModelInferRequest) {
    let x = numbers(count * IN, 5.0);
    let shape = [i64::try_from(count).unwrap(), 8];
    let request = asked("layer", &[("x", "FP32", &shape, le(&x))]);
    (x, request)
}

async fn infer(oip: &Oip, request: ModelInferRequest) -> Result<ModelInferResponse, Status> {
    Ok(oip.clone().model_infer(request).await?.into_inner())
}

fn reason(status: &Status) -> Reason {
    Error::from_status(status).reason()
}

fn assert_is_layer(response: &ModelInferResponse, x: &[f32]) {
    let got = floats(&response.raw_output_contents[0]);
    let want = layer(x);
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(&want) {
        assert!((f64::from(*got) - want).abs() < 1e-5, "{got} {want}");
    }
}

#[tokio::test]
async fn a_saved_function_is_a_model_of_tensors() {
    let host = host(&[]).await;
    let saving = SaveGraph {
        outputs: vec!["y".to_owned(), "sum".to_owned()],
        ..SaveGraph::named("layer")
    };
    let saved = save_layer(&host, &saving).await.unwrap();
    assert_eq!((saved.inputs.len(), saved.outputs.len()), (1, 2));
    assert_eq!(saved.max_rows, ROWS as u64);
    // What it is called is taken.
    let again = save_layer(&host, &saving).await.unwrap_err();
    assert_eq!(again.reason(), Reason::ModelExists);

    let mut oip = host.oip.clone();
    let named = |name: &str| ModelMetadataRequest {
        name: name.to_owned(),
        version: String::new(),
    };
    let told = oip
        .model_metadata(named("layer"))
        .await
        .unwrap()
        .into_inner();
    let shapes =
        |tensors: &[hotcell_gateways::inference::model_metadata_response::TensorMetadata]| {
            let each = tensors.iter();
            each.map(|t| (t.name.clone(), t.datatype.clone(), t.shape.clone()))
                .collect::<Vec<_>>()
        };
    let fp32 = |name: &str, axes: [i64; 2]| (name.to_owned(), "FP32".to_owned(), axes.to_vec());
    assert_eq!(shapes(&told.inputs), [fp32("x", [-1, 8])]);
    assert_eq!(
        shapes(&told.outputs),
        [fp32("y", [-1, 5]), fp32("sum", [-1, 5])]
    );
    let config = ModelConfigRequest {
        name: "layer".to_owned(),
        version: String::new(),
    };
    let config = oip.model_config(config).await.unwrap().into_inner();
    assert!(
        !config
            .config
            .unwrap()
            .model_transaction_policy
            .unwrap()
            .decoupled
    );
    let ready = ModelReadyRequest {
        name: "layer".to_owned(),
        version: String::new(),
    };
    assert!(oip.model_ready(ready).await.unwrap().into_inner().ready);
    let index = RepositoryIndexRequest {
        ready: true,
        ..RepositoryIndexRequest::default()
    };
    let index = oip.repository_index(index).await.unwrap().into_inner();
    assert!(
        index
            .models
            .iter()
            .any(|m| m.name == "layer" && m.state == "READY")
    );

    // The rows of one call do not depend on how many come with them.
    let (x, all) = rows(ROWS);
    let all = infer(&host.oip, all).await.unwrap();
    assert_eq!(
        (all.id.as_str(), all.outputs[0].shape.as_slice()),
        ("an id", &[64, 5][..])
    );
    assert_is_layer(&all, &x);
    for count in [1, 7] {
        let (x, request) = rows(count);
        let part = infer(&host.oip, request).await.unwrap();
        assert_is_layer(&part, &x);
        let bytes = count * OUT * 4;
        assert_eq!(
            part.raw_output_contents[0],
            all.raw_output_contents[0][..bytes]
        );
    }
    let (_, mut one) = rows(2);
    one.outputs = vec![InferRequestedOutputTensor {
        name: "sum".to_owned(),
        ..InferRequestedOutputTensor::default()
    }];
    let one = infer(&host.oip, one).await.unwrap();
    assert_eq!(
        (one.outputs.len(), one.outputs[0].name.as_str()),
        (1, "sum")
    );

    let data = || le(&numbers(2 * IN, 0.0));
    for (what, request) in [
        ("too many rows", rows(ROWS + 1).1),
        ("no input", asked("layer", &[])),
        (
            "another type",
            asked("layer", &[("x", "FP64", &[1, 8], data())]),
        ),
        (
            "another axis",
            asked("layer", &[("x", "FP32", &[1, 16], data())]),
        ),
        (
            "fewer axes",
            asked("layer", &[("x", "FP32", &[16], data())]),
        ),
        (
            "a negative axis",
            asked("layer", &[("x", "FP32", &[-2, 8], data())]),
        ),
        (
            "fewer bytes",
            asked("layer", &[("x", "FP32", &[3, 8], data())]),
        ),
        (
            "another name",
            asked("layer", &[("z", "FP32", &[2, 8], data())]),
        ),
        (
            "one twice",
            asked(
                "layer",
                &[
                    ("x", "FP32", &[2, 8], data()),
                    ("x", "FP32", &[2, 8], data()),
                ],
            ),
        ),
    ] {
        let refused = infer(&host.oip, request).await.unwrap_err();
        assert_eq!(
            reason(&refused),
            Reason::InvalidArgument,
            "{what}: {refused}"
        );
    }
    let unknown = infer(&host.oip, asked("none", &[])).await.unwrap_err();
    assert_eq!(reason(&unknown), Reason::ModelNotFound);

    let counted = ModelStatisticsRequest {
        name: "layer".to_owned(),
        version: String::new(),
    };
    let counted = oip.model_statistics(counted).await.unwrap().into_inner();
    assert_eq!(counted.model_stats[0].inference_count, 4);

    // Unloading would lose it; forgetting does, and says so.
    let unload = RepositoryModelUnloadRequest {
        model_name: "layer".to_owned(),
        ..RepositoryModelUnloadRequest::default()
    };
    let refused = oip.repository_model_unload(unload).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::Unimplemented);
    let output = host.cluster.hotcell(&["graphs"]).unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains("x f32[rows, 8]"), "{shown}");
    let output = host
        .cluster
        .hotcell(&["graphs", "forget", "layer"])
        .unwrap();
    assert!(output.status.success());
    let gone = infer(&host.oip, rows(1).1).await.unwrap_err();
    assert_eq!(reason(&gone), Reason::ModelNotFound);
    assert_eq!(host.client.graphs().await.unwrap(), []);
}

#[tokio::test]
async fn tensors_of_every_dtype_come_and_go_as_they_are() {
    let host = host(&[]).await;
    for dtype in DType::ALL {
        let plain = [
            (DType::Bool, "BOOL"),
            (DType::U8, "UINT8"),
            (DType::U16, "UINT16"),
            (DType::U32, "UINT32"),
            (DType::U64, "UINT64"),
            (DType::I8, "INT8"),
            (DType::I16, "INT16"),
            (DType::I32, "INT32"),
            (DType::I64, "INT64"),
            (DType::F16, "FP16"),
            (DType::BF16, "BF16"),
            (DType::F32, "FP32"),
            (DType::F64, "FP64"),
        ];
        let known = plain.iter().find(|(known, _)| known == dtype);
        if known.is_none() && *dtype != DType::C64 {
            // Blocks of quantised weights can be inputs, but nothing computes them.
            continue;
        }
        let spec = TensorSpec::new(*dtype, Shape::fixed(&[2, 3]).unwrap()).unwrap();
        let size = spec.bytes(0).unwrap();
        // Of booleans only these two are any; of others every byte is.
        let bytes: Vec<u8> = (0..size as u8)
            .map(|i| if *dtype == DType::Bool { i % 2 } else { 3 * i })
            .collect();
        let example = HostTensor::new(spec, bytes.clone()).unwrap();
        let example = host.session.upload(&example).await.unwrap();
        let turned = host
            .session
            .compile(|x: &[Tensor]| vec![x[0].transpose(&[1, 0])]);
        let name = format!("turn-{dtype}");
        turned
            .save(
                &host.client,
                &SaveGraph::named(&name),
                &[("x", &example)],
                None,
            )
            .await
            .unwrap();
        let (datatype, shape, back): (&str, &[i64], &[i64]) = match known {
            Some((_, datatype)) => (datatype, &[2, 3], &[3, 2]),
            None => ("UINT8", &[48], &[48]),
        };
        let request = asked(&name, &[("x", datatype, shape, bytes.clone())]);
        let response = infer(&host.oip, request).await.unwrap();
        assert_eq!(response.outputs[0].datatype, datatype);
        assert_eq!(response.outputs[0].shape, back);
        let element = size / 6;
        let want: Vec<u8> = (0..3)
            .flat_map(|column| (0..2).map(move |row| 3 * row + column))
            .flat_map(|at| bytes[at * element..(at + 1) * element].to_vec())
            .collect();
        assert_eq!(response.raw_output_contents[0], want, "{dtype}");
    }
}

/// A file of shared memory, gone with this.
struct Memory(String);

impl Memory {
    fn new(what: &str, bytes: &[u8]) -> Self {
        let key = format!("hotcell-test-{}-{what}", std::process::id());
        let memory = Self(key);
        fs::write(memory.path(), bytes).unwrap();
        memory
    }

    fn path(&self) -> String {
        format!("/dev/shm/{}", self.0)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.path());
    }
}

fn place(region: &str, offset: usize, size: usize) -> HashMap<String, InferParameter> {
    let number = |n: usize| ParameterChoice::Int64Param(i64::try_from(n).unwrap());
    let all = [
        (
            "shared_memory_region",
            ParameterChoice::StringParam(region.to_owned()),
        ),
        ("shared_memory_offset", number(offset)),
        ("shared_memory_byte_size", number(size)),
    ];
    let parameter = |choice| InferParameter {
        parameter_choice: Some(choice),
    };
    all.into_iter()
        .map(|(name, choice)| (name.to_owned(), parameter(choice)))
        .collect()
}

#[tokio::test]
async fn large_tensors_go_through_shared_memory_and_not_beyond_it() {
    const COUNT: usize = 6 << 20;
    const SIZE: usize = 4 * COUNT;
    let mut host = host(&[]).await;
    let shape = [COUNT];
    let example = host.session.tensor(&vec![0f32; COUNT], &shape).unwrap();
    let negative = host.session.compile(|x: &[Tensor]| vec![-&x[0]]);
    let saving = SaveGraph::named("negative");
    let arguments = [("x", &example)];
    let saved = negative.save(&host.client, &saving, &arguments, None);
    saved.await.unwrap();
    let x: Vec<f32> = (0..COUNT).map(|i| i as f32).collect();
    // More than a message may have, and too much to come back in one.
    let input = Memory::new("graphs-in", &le(&x));
    let output = Memory::new("graphs-out", &vec![7; SIZE + 8]);
    for (name, memory, size) in [("in", &input, SIZE), ("out", &output, SIZE + 8)] {
        let register = SystemSharedMemoryRegisterRequest {
            name: name.to_owned(),
            key: format!("/{}", memory.0),
            offset: 0,
            byte_size: size as u64,
        };
        host.oip
            .system_shared_memory_register(register)
            .await
            .unwrap();
    }
    let request = |to: Option<(usize, usize)>| {
        let mut request = asked("negative", &[("x", "FP32", &[COUNT as i64], Vec::new())]);
        request.inputs[0].parameters = place("in", 0, SIZE);
        request.raw_input_contents.clear();
        let parameters = to.map(|(offset, size)| place("out", offset, size));
        request.outputs = vec![InferRequestedOutputTensor {
            name: "output_0".to_owned(),
            parameters: parameters.unwrap_or_default(),
        }];
        request
    };
    for _ in 0..3 {
        fs::write(output.path(), vec![7; SIZE + 8]).unwrap();
        let response = infer(&host.oip, request(Some((4, SIZE)))).await.unwrap();
        assert!(
            response
                .raw_output_contents
                .iter()
                .all(|raw| raw.is_empty())
        );
        let now = fs::read(output.path()).unwrap();
        assert_eq!((&now[..4], &now[SIZE + 4..]), (&[7; 4][..], &[7; 4][..]));
        let got = floats(&now[4..SIZE + 4]);
        assert!(got.iter().zip(&x).all(|(got, x)| *got == -x));
    }
    for (what, to, why) in [
        ("no place", None, Reason::LimitExceeded),
        ("too small", Some((0, SIZE - 4)), Reason::InvalidArgument),
        ("beyond", Some((12, SIZE)), Reason::InvalidArgument),
    ] {
        let refused = infer(&host.oip, request(to)).await.unwrap_err();
        assert_eq!(reason(&refused), why, "{what}: {refused}");
    }
    // It shrinks after it was registered.
    let file = fs::OpenOptions::new()
        .write(true)
        .open(input.path())
        .unwrap();
    file.set_len(SIZE as u64 - 1).unwrap();
    let refused = infer(&host.oip, request(Some((0, SIZE))))
        .await
        .unwrap_err();
    assert_eq!(reason(&refused), Reason::RegionChanged);
    file.set_len(SIZE as u64).unwrap();
    infer(&host.oip, request(Some((0, SIZE)))).await.unwrap();
}

#[tokio::test]
async fn calls_that_are_given_up_leave_nothing_behind() {
    const COUNT: usize = 1 << 18;
    let host = host(&[]).await;
    let example = host.session.tensor(&vec![0f32; COUNT], &[COUNT]).unwrap();
    let negative = host.session.compile(|x: &[Tensor]| vec![-&x[0]]);
    let arguments = [("x", &example)];
    let saving = SaveGraph::named("negative");
    let saved = negative.save(&host.client, &saving, &arguments, None);
    saved.await.unwrap();
    let x: Vec<f32> = (0..COUNT).map(|i| i as f32).collect();
    let shape = [i64::try_from(COUNT).unwrap()];
    let request = asked("negative", &[("x", "FP32", &shape, le(&x))]);
    // At every point of a call: more of them than a session may share pieces of memory.
    let mut given_up = 0;
    for turn in 0..150u64 {
        let mut timed = tonic::Request::new(request.clone());
        timed.set_timeout(Duration::from_micros(500 + 100 * turn));
        given_up += usize::from(host.oip.clone().model_infer(timed).await.is_err());
    }
    assert!(given_up > 0);
    let at_once = (0..8).map(|_| {
        let (oip, request) = (host.oip.clone(), request.clone());
        tokio::spawn(async move { infer(&oip, request).await })
    });
    for call in at_once.collect::<Vec<_>>() {
        let response = call.await.unwrap().unwrap();
        let got = floats(&response.raw_output_contents[0]);
        assert!(got.iter().zip(&x).all(|(got, x)| *got == -x));
    }
}

#[tokio::test]
async fn a_worker_that_dies_under_calls_is_not_noticed() {
    let host = host(&["--devices", "cpu:2"]).await;
    save_layer(&host, &SaveGraph::named("layer")).await.unwrap();
    let (x, request) = rows(ROWS);
    let first = infer(&host.oip, request.clone()).await.unwrap();
    assert_is_layer(&first, &x);
    let stop = Arc::new(AtomicBool::new(false));
    let calls = (0..4).map(|_| {
        let (oip, request) = (host.oip.clone(), request.clone());
        let (want, stop) = (first.raw_output_contents.clone(), Arc::clone(&stop));
        tokio::spawn(async move {
            let mut count = 0;
            while !stop.load(Ordering::Relaxed) {
                let response = infer(&oip, request.clone()).await.unwrap();
                assert_eq!(response.raw_output_contents, want);
                count += 1;
            }
            count
        })
    });
    let calls: Vec<_> = calls.collect();
    let mut deaths = 0;
    while deaths < 6 {
        let workers = host.client.workers().await.unwrap();
        // A throw-away worker's death would be held against the graph.
        let ready = workers
            .iter()
            .filter(|w| w.state() == v1::WorkerState::Ready && !w.id.contains('.'));
        let ready: Vec<_> = ready.collect();
        // One that serves is left.
        if let [one, _, ..] = ready[..] {
            signal_pid(one.pid, Signal::KILL).unwrap();
            deaths += 1;
        }
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    stop.store(true, Ordering::Relaxed);
    for call in calls {
        assert!(call.await.unwrap() > 0);
    }
    // And when all are gone.
    for worker in host.client.workers().await.unwrap() {
        if !worker.id.contains('.') {
            let _ = signal_pid(worker.pid, Signal::KILL);
        }
    }
    let after = infer(&host.oip, request).await.unwrap();
    assert_eq!(after.raw_output_contents, first.raw_output_contents);
}

/// Has the next program take this one's place.
fn take_over(host: &Host, config: &std::path::Path, more: &[&str]) {
    let output = Command::new(binaries().unwrap().join("hotcell-scheduler"))
        .env_clear()
        .env("XDG_CONFIG_HOME", config)
        .arg("--takeover")
        .arg("--socket")
        .arg(&host.cluster.socket)
        .args(more)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[tokio::test]
async fn a_saved_graph_that_kills_workers_is_refused_and_others_are_served() {
    let more = [
        "--devices",
        "cpu:2",
        "--worker-binary",
        env!("CARGO_BIN_EXE_hotcell-worker-fault"),
    ];
    let host = host(&more).await;
    save_layer(&host, &SaveGraph::named("layer")).await.unwrap();
    let twice = host.session.compile(|x: &[Tensor]| vec![&x[0] + &x[0]]);
    let example = host.session.tensor(&[1.0f32, 2.0], &[2]).unwrap();
    host.session
        .eval(std::slice::from_ref(&example))
        .await
        .unwrap();
    let save = async |input: &str, replace: bool| {
        let saving = SaveGraph {
            replace,
            ..SaveGraph::named("evil")
        };
        let arguments = [(input, &example)];
        let saved = twice.save(&host.client, &saving, &arguments, None).await;
        saved.unwrap()
    };
    save(POISON_INPUT, false).await;
    let call = |input: &str| asked("evil", &[(input, "FP32", &[2], le(&[1.0, 2.0]))]);
    let deaths = async || {
        let crashes = host.client.crashes().await.unwrap();
        crashes
            .iter()
            .filter(|crash| crash.kind == "signal")
            .count()
    };
    let refused = async |input: &str| {
        let status = infer(&host.oip, call(input)).await.unwrap_err();
        let error = Error::from_status(&status);
        assert_eq!(error.reason(), Reason::GraphPoisoned, "{error}");
        assert_eq!(error.get("graph"), Some("evil"));
        assert!(
            error.message().contains("hotcell graphs clear evil"),
            "{error}"
        );
    };
    let (x, request) = rows(3);
    // Two die among others, two more alone.
    refused(POISON_INPUT).await;
    assert_eq!(deaths().await, 4);
    refused(POISON_INPUT).await;
    assert_eq!(deaths().await, 4);
    assert_is_layer(&infer(&host.oip, request.clone()).await.unwrap(), &x);
    let ready = async |name: &str| {
        let ready = ModelReadyRequest {
            name: name.to_owned(),
            version: String::new(),
        };
        let ready = host.oip.clone().model_ready(ready).await;
        ready.unwrap().into_inner().ready
    };
    assert!(ready("layer").await && !ready("evil").await);
    let shown = || {
        let output = host.cluster.hotcell(&["graphs"]).unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(shown().contains("refused: killed 2 workers"), "{}", shown());
    let config = hotcell_tests::cluster::private_folder().unwrap();
    let mut again = vec!["--listen", &host.listen, "--restart-backoff", "1ms"];
    again.extend(more);
    take_over(&host, config.path(), &again);
    // Its connection ended with the program before; the next call opens another.
    let _ = host.oip.clone().server_live(ServerLiveRequest {}).await;
    refused(POISON_INPUT).await;
    let cleared = host.cluster.hotcell(&["graphs", "clear", "evil"]).unwrap();
    assert!(cleared.status.success(), "{cleared:?}");
    assert!(!shown().contains("refused"), "{}", shown());
    refused(POISON_INPUT).await;
    assert_eq!(deaths().await, 8);
    // Under its name is another graph now.
    save("x", true).await;
    let answer = infer(&host.oip, call("x")).await.unwrap();
    assert_eq!(floats(&answer.raw_output_contents[0]), [2.0, 4.0]);
    assert_is_layer(&infer(&host.oip, request).await.unwrap(), &x);
}

#[tokio::test]
async fn saved_graphs_outlive_schedulers() {
    let folder = hotcell_tests::cluster::private_folder().unwrap();
    let kept = folder.path().join("graphs");
    let kept = kept.to_str().unwrap();
    let (x, request) = rows(3);
    let saved = {
        let host = host(&["--graphs", kept]).await;
        let saved = save_layer(&host, &SaveGraph::named("layer")).await.unwrap();
        save_layer(&host, &SaveGraph::named("other")).await.unwrap();
        host.client.forget_graph("other").await.unwrap();
        // The next program has it from this one, which need not have kept it.
        take_over(&host, folder.path(), &[]);
        let client = host.cluster.client().await.unwrap();
        assert_eq!(client.graphs().await.unwrap(), std::slice::from_ref(&saved));
        saved
    };
    let files = || {
        fs::read_dir(kept)
            .unwrap()
            .map(|entry| entry.unwrap().path())
    };
    assert_eq!(files().count(), 1);
    {
        let host = host(&["--graphs", kept]).await;
        assert_eq!(host.client.graphs().await.unwrap(), [saved]);
        assert_is_layer(&infer(&host.oip, request).await.unwrap(), &x);
    }
    // One that was changed is left out, and costs nothing else.
    let path = files().next().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes[0] ^= 1;
    fs::write(&path, bytes).unwrap();
    let host = host(&["--graphs", kept]).await;
    assert_eq!(host.client.graphs().await.unwrap(), []);
    save_layer(&host, &SaveGraph::named("layer")).await.unwrap();
}
