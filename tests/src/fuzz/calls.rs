//! Calls of a stranger to a real worker in this process: any method, any bytes, in a session of its own.

use std::{sync::OnceLock, time::Duration};

use anyhow::{Context, Result};
use bytes::{Buf, BufMut, Bytes};
use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec, wire};
use hotcell_ipc::{
    socket::stream_pair,
    transport::{Windows, channel_over, incoming_once},
};
use hotcell_kernels::registry::Registry;
use hotcell_proto::{
    error::{Error, Reason},
    ids::Epoch,
    session::SESSION_KEY,
    v1::{self, tensors_client::TensorsClient},
};
use hotcell_worker::{
    engine::{Engine, EngineConfig},
    host::Host,
    serve::tokens_server,
    service::tensors_server,
};
use tokio::{runtime::Runtime, sync::mpsc};
use tokio_stream::StreamExt;
use tonic::{
    Code, Request, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
    transport::Channel,
};

use crate::{cluster::golden, model};

/// The worker's epoch.
pub const EPOCH: u64 = 7;
/// The model that it has.
pub const MODEL: &str = "m";
/// Sixteen of this are the id of a plan that is there.
pub const PLAN: u8 = 0xee;
/// Calls of one case at most.
const CALLS: usize = 8;
/// How long one call may take; then its deadline ends it.
const LONGEST: Duration = Duration::from_secs(3);
/// Answers of one call that are read.
const ANSWERS: usize = 64;

/// What may be called.
pub const METHODS: &[&str] = &[
    "/hotcell.v1.Tokens/Generate",
    "/hotcell.v1.Tokens/Attach",
    "/hotcell.v1.Tokens/Cancel",
    "/hotcell.v1.Tokens/Tokenize",
    "/hotcell.v1.Tokens/Detokenize",
    "/hotcell.v1.Tokens/Embed",
    "/hotcell.v1.Tensors/Describe",
    "/hotcell.v1.Tensors/OpenSession",
    "/hotcell.v1.Tensors/Create",
    "/hotcell.v1.Tensors/Upload",
    "/hotcell.v1.Tensors/Download",
    "/hotcell.v1.Tensors/Free",
    "/hotcell.v1.Tensors/List",
    "/hotcell.v1.Tensors/Compile",
    "/hotcell.v1.Tensors/Execute",
    "/hotcell.v1.Tensors/ExecuteMany",
    "/hotcell.v1.Tensors/Synchronize",
    "/hotcell.v1.Tensors/Cancel",
    "/hotcell.v1.Tensors/Memory",
    "/hotcell.v1.Tensors/ListWeights",
    "/hotcell.v1.Tensors/GetWeight",
    "/hotcell.v1.Tensors/ImportShared",
];

/// Bytes as they are.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// `a + b`, both 2 x 3.
pub fn sum() -> v1::Graph {
    let make = || {
        let spec = || TensorSpec::new(DType::F32, Shape::fixed(&[2, 3])?);
        let mut graph = GraphBuilder::new(0);
        let (a, b) = (graph.tensor("a", spec()?)?, graph.tensor("b", spec()?)?);
        let sum = graph.add(a, b)?;
        graph.finish(&[sum])
    };
    make().map(|graph| wire::encode(&graph)).unwrap_or_default()
}

struct Worker {
    runtime: Runtime,
    host: Host,
}

impl Worker {
    /// The one of this process.
    fn get() -> &'static Worker {
        static WORKER: OnceLock<Worker> = OnceLock::new();
        WORKER.get_or_init(|| {
            // A panic in a task of the server would end one call only, and nobody would know.
            let say = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                say(info);
                std::process::abort();
            }));
            Self::start().expect("a worker in this process")
        })
    }

    fn start() -> Result<Worker> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let engine = Engine::start(EngineConfig {
            device: "cpu:0".to_owned(),
            cores: vec![0],
            cache_dtype: DType::F16,
            model_memory: None,
            max_context: None,
            tensor_memory: Some(64 << 20),
            blackbox: None,
            follow: false,
            gives_way: false,
            pins: false,
            registry: Registry::default(),
        })?;
        let host = Host::new(engine, hotcell_worker::confine::Report::default());
        host.set_identity("w0", Epoch(EPOCH));
        let files = model::files(&golden("llama3"))?;
        runtime.block_on(host.load(MODEL.to_owned(), files, mpsc::channel(1).0))?;
        Ok(Worker { runtime, host })
    }

    /// A connection of a stranger.
    async fn connect(&self) -> Result<Channel> {
        let (ours, theirs) = stream_pair()?;
        let (incoming, _) = incoming_once(theirs);
        let windows = Windows::default();
        let server = windows
            .server()
            .add_service(tensors_server(self.host.clone()))
            .add_service(tokens_server(self.host.clone()));
        tokio::spawn(server.serve_with_incoming(incoming));
        Ok(channel_over(ours, windows).await?)
    }
}

/// A session with a plan: its name, and the plan's id.
async fn session(
    channel: &Channel,
) -> Result<(String, Vec<u8>, tonic::Streaming<v1::SessionEvent>)> {
    let mut client = TensorsClient::new(channel.clone());
    let response = client
        .open_session(v1::OpenSessionRequest::default())
        .await?;
    let name = response.metadata().get(SESSION_KEY).context("a session")?;
    let name = name.to_str()?.to_owned();
    let mut request = Request::new(v1::CompileRequest {
        graph: Some(sum()),
        ..v1::CompileRequest::default()
    });
    request.metadata_mut().insert(SESSION_KEY, name.parse()?);
    let plan = client.compile(request).await?.into_inner().plan;
    Ok((name, plan.context("a plan")?.id, response.into_inner()))
}

/// The calls of a case: methods and messages.
fn parts(mut bytes: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let mut all = Vec::new();
    while let [method, low, high, rest @ ..] = bytes
        && all.len() < CALLS
    {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
        let (message, after) = rest.split_at(length);
        let method = METHODS[usize::from(*method) % METHODS.len()];
        all.push((method, message.to_vec()));
        bytes = after;
    }
    all
}

/// The message with the plan's id where it stands for it.
fn with_plan(message: &[u8], plan: &[u8]) -> Bytes {
    let mut message = message.to_vec();
    let stands = [PLAN; 16];
    for at in 0..message.len().saturating_sub(15) {
        if message[at..at + 16] == stands {
            message[at..at + 16].copy_from_slice(plan);
        }
    }
    message.into()
}

/// Whether a refusal is one of ours, or the transport's for bytes that are no message.
fn judge(method: &str, status: &Status) {
    match Error::typed(status) {
        Some(error) => assert_ne!(error.reason(), Reason::Internal, "{method}: {error}"),
        None => {
            let undecodable = status.message().contains("decode");
            let known = matches!(
                status.code(),
                Code::OutOfRange | Code::ResourceExhausted | Code::Cancelled | Code::Unimplemented
            );
            assert!(undecodable || known, "{method}: {status:?}");
        }
    }
}

async fn call(channel: &Channel, name: &str, method: &'static str, message: Bytes) -> Result<bool> {
    let mut grpc = Grpc::new(channel.clone());
    grpc.ready().await?;
    let mut request = Request::new(tokio_stream::once(message));
    request.metadata_mut().insert(SESSION_KEY, name.parse()?);
    // A fence may be one that nobody ever passes.
    request.set_timeout(LONGEST);
    let path = PathAndQuery::from_static(method);
    let mut answers = match grpc.streaming(request, path, Raw).await {
        Ok(response) => response.into_inner().take(ANSWERS),
        Err(status) => {
            judge(method, &status);
            return Ok(false);
        }
    };
    // A session's events go on for as long as it lives.
    if method.ends_with("/OpenSession") {
        return Ok(true);
    }
    while let Some(answer) = answers.next().await {
        if let Err(status) = answer {
            judge(method, &status);
            return Ok(false);
        }
    }
    Ok(true)
}

/// Makes the calls of a case; whether one of them was answered.
pub fn run(bytes: &[u8]) -> bool {
    let worker = Worker::get();
    let all = async {
        let channel = worker.connect().await?;
        let (name, plan, _events) = session(&channel).await?;
        let mut answered = false;
        for (method, message) in parts(bytes) {
            answered |= call(&channel, &name, method, with_plan(&message, &plan)).await?;
        }
        Ok::<_, anyhow::Error>(answered)
    };
    worker.runtime.block_on(all).expect("the worker went away")
}
