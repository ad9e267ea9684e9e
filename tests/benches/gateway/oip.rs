//! Tensors over the Open Inference Protocol: what is left of the speed of a bare server that answers with the bytes that it
//! got, and of the speed at which memory is copied.
//!
//! The model is a saved graph that turns the signs of its one input, so that as many bytes come back as went in. The bare
//! server is tonic with the same messages and nothing behind it, on a runtime of its own; its clients and Hotcell's come
//! over TCP in the same way. Through shared memory nothing travels but names: the worker reads and writes the bytes where they
//! are, which is compared with one copy in and one out by this process. By turns; what counts is the
//! median of what was measured one after the other.

use std::{
    convert::Infallible,
    fs,
    future::{Ready, ready},
    io,
    net::SocketAddr,
    os::unix::fs::FileExt,
    pin::Pin,
    task::{Context, Poll},
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use hotcell_client::{
    Address, SaveGraph,
    tensor::{Session, SessionOptions, Tensor},
    v1::WorkerState,
};
use hotcell_gateways::inference::{
    InferParameter, ModelInferRequest, ModelInferResponse, SystemSharedMemoryRegisterRequest,
    grpc_inference_service_client::GrpcInferenceServiceClient,
    infer_parameter::ParameterChoice,
    model_infer_request::{InferInputTensor, InferRequestedOutputTensor},
};
use hotcell_proto::limits;
use hotcell_tests::{
    bench::{Goal, median},
    cluster::{Cluster, free_address},
};
use tonic::{
    Request, Response, Status,
    body::Body,
    server::Grpc,
    server::NamedService,
    server::UnaryService,
    transport::{Channel, Server},
};
use tonic_prost::ProstCodec;
use tower::Service;

use crate::Bench;

/// Elements of the tensors that travel: a MiB of them.
const SMALL: usize = 1 << 18;
/// Elements of those in shared memory.
const LARGE: usize = 1 << 24;
/// Pairs of calls.
const PAIRS: usize = 101;
const LARGE_PAIRS: usize = 21;

type Oip = GrpcInferenceServiceClient<Channel>;

/// Answers with what came.
#[derive(Clone)]
struct Echo;

impl UnaryService<ModelInferRequest> for Echo {
    type Response = ModelInferResponse;
    type Future = Ready<Result<Response<ModelInferResponse>, Status>>;

    fn call(&mut self, request: Request<ModelInferRequest>) -> Self::Future {
        ready(Ok(Response::new(ModelInferResponse {
            raw_output_contents: request.into_inner().raw_input_contents,
            ..ModelInferResponse::default()
        })))
    }
}

impl NamedService for Echo {
    const NAME: &'static str = "inference.GRPCInferenceService";
}

type Answer = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

impl Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Answer {
        let limit = Some(limits::MAX_MESSAGE_BYTES);
        Box::pin(async move {
            let mut grpc =
                Grpc::new(ProstCodec::default()).apply_max_message_size_config(limit, limit);
            Ok(grpc.unary(Echo, request).await)
        })
    }
}

/// Serves until this process ends, with as many threads as a scheduler would have.
fn echo(address: SocketAddr) {
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        let served = Server::builder().add_service(Echo).serve(address);
        runtime.block_on(served).map_err(anyhow::Error::from)
    });
}

async fn connect(address: SocketAddr) -> Result<Oip> {
    let began = Instant::now();
    loop {
        match Oip::connect(format!("http://{address}")).await {
            Ok(oip) => {
                return Ok(oip
                    .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
                    .max_encoding_message_size(limits::MAX_MESSAGE_BYTES));
            }
            Err(error) if began.elapsed().as_secs() > 10 => return Err(error.into()),
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
        }
    }
}

async fn save(client: &hotcell_client::Client, session: &Session, elements: usize) -> Result<()> {
    let example = session.tensor(&vec![0f32; elements], &[elements])?;
    let negative = session.compile(|x: &[Tensor]| vec![-&x[0]]);
    let saving = SaveGraph::named(format!("negative-{elements}"));
    negative
        .save(client, &saving, &[("x", &example)], None)
        .await?;
    Ok(())
}

fn asked(elements: usize) -> ModelInferRequest {
    ModelInferRequest {
        model_name: format!("negative-{elements}"),
        inputs: vec![InferInputTensor {
            name: "x".to_owned(),
            datatype: "FP32".to_owned(),
            shape: vec![elements as i64],
            ..InferInputTensor::default()
        }],
        ..ModelInferRequest::default()
    }
}

async fn timed(oip: &mut Oip, request: ModelInferRequest) -> Result<(f64, ModelInferResponse)> {
    let began = Instant::now();
    let response = oip.model_infer(request).await?.into_inner();
    Ok((began.elapsed().as_secs_f64(), response))
}

/// A file of shared memory, gone with this.
struct Memory(String);

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = fs::remove_file(format!("/dev/shm/{}", self.0));
    }
}

fn in_memory(region: &str, bytes: usize) -> std::collections::HashMap<String, InferParameter> {
    let all = [
        (
            "shared_memory_region",
            ParameterChoice::StringParam(region.to_owned()),
        ),
        (
            "shared_memory_byte_size",
            ParameterChoice::Int64Param(bytes as i64),
        ),
    ];
    all.into_iter()
        .map(|(name, choice)| {
            let parameter_choice = Some(choice);
            (name.to_owned(), InferParameter { parameter_choice })
        })
        .collect()
}

/// Reads and writes as many bytes by calls of the system, half of them on each of two threads.
fn by_calls(between: &mut [u8], from: &fs::File, to: &fs::File) -> io::Result<()> {
    let each = between.len().div_ceil(2);
    thread::scope(|scope| {
        let halves = between.chunks_mut(each).enumerate().map(|(i, half)| {
            scope.spawn(move || {
                let at = (i * each) as u64;
                from.read_exact_at(half, at)?;
                to.write_all_at(half, at)
            })
        });
        let halves: Vec<_> = halves.collect();
        halves.into_iter().try_for_each(|half| {
            let end = half.join();
            end.unwrap_or(Err(io::ErrorKind::Other.into()))
        })
    })
}

pub async fn run(bench: &Bench) -> Result<()> {
    let (pairs, large_pairs) = if bench.quick {
        (5, 3)
    } else {
        (PAIRS, LARGE_PAIRS)
    };
    let (listen, bare) = (free_address()?, free_address()?);
    let listen_flag = listen.to_string();
    let flags = ["--listen", listen_flag.as_str(), "--check-interval", "0"];
    let cluster = Cluster::start(&flags).await?;
    cluster
        .workers(|all| !all.is_empty() && all.iter().all(|w| w.state() == WorkerState::Ready))
        .await?;
    let address: Address = format!("unix:{}", cluster.socket.display()).parse()?;
    let client = cluster.client().await?;
    let session = Session::open(&address, SessionOptions::default()).await?;
    save(&client, &session, SMALL).await?;
    save(&client, &session, LARGE).await?;
    echo(bare);
    let (mut ours, mut bare) = (connect(listen).await?, connect(bare).await?);

    let values: Vec<f32> = (0..SMALL).map(|i| i as f32).collect();
    let data: Bytes = values
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect::<Vec<u8>>()
        .into();
    let request = ModelInferRequest {
        raw_input_contents: vec![data.clone()],
        ..asked(SMALL)
    };
    let (mut ratios, mut times) = (Vec::new(), Vec::new());
    for turn in 0..pairs + 3 {
        let (of_bare, echoed) = timed(&mut bare, request.clone()).await?;
        let (of_ours, response) = timed(&mut ours, request.clone()).await?;
        ensure!(
            echoed.raw_output_contents == [data.clone()],
            "the bare server answers otherwise"
        );
        let got = response.raw_output_contents.first().context("no output")?;
        ensure!(
            got.len() == data.len()
                && got
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .zip(&values)
                    .all(|(got, x)| f32::from_le_bytes(*got) == -x),
            "other signs were to be expected"
        );
        if turn >= 3 {
            ratios.push(of_bare / of_ours);
            times.push(of_ours);
        }
    }
    let milliseconds = median(times) * 1e3;
    println!("a tensor of 1 MiB there and back: {milliseconds:.2} ms");
    let unit = "of bare tonic's speed";
    bench.figure("oip_infer_1MiB", median(ratios), unit, Goal::AtLeast(0.6));

    let size = 4 * LARGE;
    let memory = |what: &str| {
        let memory = Memory(format!("hotcell-bench-{}-{what}", std::process::id()));
        fs::write(format!("/dev/shm/{}", memory.0), vec![1; size]).map(|()| memory)
    };
    let (input, output) = (memory("in")?, memory("out")?);
    for (name, memory) in [("in", &input), ("out", &output)] {
        let register = SystemSharedMemoryRegisterRequest {
            name: name.to_owned(),
            key: format!("/{}", memory.0),
            offset: 0,
            byte_size: size as u64,
        };
        ours.system_shared_memory_register(register).await?;
    }
    let mut request = asked(LARGE);
    request.inputs[0].parameters = in_memory("in", size);
    request.outputs = vec![InferRequestedOutputTensor {
        name: "output_0".to_owned(),
        parameters: in_memory("out", size),
    }];
    let (from, mut to) = (vec![1u8; size], vec![2u8; size]);
    // What the system alone takes for it by reading and writing, as whoever may not map the memory does.
    let open = |memory: &Memory| {
        let path = format!("/dev/shm/{}", memory.0);
        fs::File::options().read(true).write(true).open(path)
    };
    let (shared_in, shared_out) = (open(&input)?, open(&output)?);
    let mut between = vec![0u8; size];
    let (mut ratios, mut calls, mut times) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..large_pairs + 2 {
        let began = Instant::now();
        for _ in 0..2 {
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&mut to);
        }
        let of_copies = began.elapsed().as_secs_f64();
        let began = Instant::now();
        by_calls(&mut between, &shared_in, &shared_out)?;
        let of_calls = began.elapsed().as_secs_f64();
        let (of_ours, _) = timed(&mut ours, request.clone()).await?;
        if turn >= 2 {
            ratios.push(of_copies / of_ours);
            calls.push(of_copies / of_calls);
            times.push(of_ours);
        }
    }
    let milliseconds = median(times) * 1e3;
    println!("a tensor of 64 MiB by shared memory there and back: {milliseconds:.2} ms");
    let unit = "of the speed of one copy in and one out";
    // By two threads, and nothing computed: no server that copies by calls of the system is faster.
    bench.figure("oip_calls_64MiB", median(calls), unit, Goal::None);
    bench.figure(
        "oip_infer_shared_64MiB",
        median(ratios),
        unit,
        Goal::AtLeast(0.8),
    );
    Ok(())
}
