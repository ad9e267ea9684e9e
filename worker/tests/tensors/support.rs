//! A worker's tensor service over a socketpair in this process, and a client that says little.

use bytes::Bytes;
use hotcell_graph::{DType, Graph, GraphBuilder, Shape, TensorSpec, Value, wire};
use hotcell_ipc::{
    socket::stream_pair,
    transport::{Windows, channel_over, incoming_once},
};
use hotcell_kernels::registry::Registry;
use hotcell_proto::{
    error::{Error, Reason},
    ids::Epoch,
    session::{HandleId, SESSION_KEY},
    v1::{self, operand, output_wish, tensors_client::TensorsClient},
};
use hotcell_worker::{
    engine::{Engine, EngineConfig},
    host::Host,
    service::tensors_server,
};
use tonic::{Request, Status, Streaming, transport::Channel};

pub const EPOCH: Epoch = Epoch(7);

/// A worker whose tensors may take this many bytes.
pub fn worker(tensor_memory: u64) -> Host {
    worker_with(tensor_memory, Registry::default())
}

/// The same with other backends.
pub fn worker_with(tensor_memory: u64, registry: Registry) -> Host {
    let engine = Engine::start(EngineConfig {
        device: "cpu:0".to_owned(),
        cores: vec![0],
        cache_dtype: DType::F16,
        model_memory: None,
        max_context: None,
        tensor_memory: Some(tensor_memory),
        blackbox: None,
        follow: false,
        gives_way: false,
        pins: false,
        registry,
    });
    let host = Host::new(engine.unwrap(), hotcell_worker::confine::Report::default());
    host.set_identity("w3", EPOCH);
    host
}

/// A connection to it.
pub async fn connect(host: &Host) -> TensorsClient<Channel> {
    let (ours, theirs) = stream_pair().unwrap();
    let (incoming, _) = incoming_once(theirs);
    let windows = Windows::default();
    let server = windows.server().add_service(tensors_server(host.clone()));
    tokio::spawn(server.serve_with_incoming(incoming));
    let channel = channel_over(ours, windows).await.unwrap();
    TensorsClient::new(channel).max_decoding_message_size(32 << 20)
}

/// A session.
pub struct Client {
    pub raw: TensorsClient<Channel>,
    pub name: String,
    pub events: Streaming<v1::SessionEvent>,
}

pub fn reason<T: std::fmt::Debug>(result: Result<T, Status>) -> Reason {
    Error::typed(&result.unwrap_err()).unwrap().reason()
}

pub fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn read_f32s(bytes: &[u8]) -> Vec<f32> {
    let values = bytes.chunks_exact(4);
    values
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

pub fn spec(dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap()
}

pub fn wire_spec(dims: &[usize]) -> v1::TensorSpec {
    wire::encode_tensor_spec(&spec(DType::F32, dims))
}

/// `silu(a) + b` over `[rows, 4]`; at most 1024 rows.
pub fn rows_graph() -> Graph {
    let mut g = GraphBuilder::new(1024);
    let rows = || TensorSpec::new(DType::F32, Shape::rows(&[4]).unwrap()).unwrap();
    let (a, b) = (
        g.tensor("a", rows()).unwrap(),
        g.tensor("b", rows()).unwrap(),
    );
    let c = g.silu(a).unwrap();
    let c = g.add(c, b).unwrap();
    g.finish(&[c]).unwrap()
}

/// `a + b` over `dims`.
pub fn add_graph(dims: &[usize]) -> Graph {
    chain(dims, 1)
}

/// `a + b + b + …`, with so many additions.
pub fn chain(dims: &[usize], additions: usize) -> Graph {
    let mut g = GraphBuilder::new(0);
    let a = g.tensor("a", spec(DType::F32, dims)).unwrap();
    let b = g.tensor("b", spec(DType::F32, dims)).unwrap();
    let mut sum: Value = a;
    for _ in 0..additions {
        sum = g.add(sum, b).unwrap();
    }
    g.finish(&[sum]).unwrap()
}

pub fn tensor(handle: &v1::Handle) -> v1::Operand {
    v1::Operand {
        kind: Some(operand::Kind::Tensor(handle.clone())),
    }
}

pub fn data(bytes: impl Into<Bytes>) -> v1::Operand {
    v1::Operand {
        kind: Some(operand::Kind::Data(bytes.into())),
    }
}

pub fn wish(kind: output_wish::Kind) -> v1::OutputWish {
    v1::OutputWish { kind: Some(kind) }
}

pub fn inline() -> v1::OutputWish {
    wish(output_wish::Kind::Inline(true))
}

pub fn keep(id: HandleId) -> v1::OutputWish {
    wish(output_wish::Kind::Id(id.to_wire()))
}

pub fn kept(response: &v1::ExecuteResponse, i: usize) -> v1::TensorInfo {
    match response.outputs[i].kind.clone() {
        Some(v1::output::Kind::Tensor(info)) => info,
        other => panic!("{other:?}"),
    }
}

pub fn sent(response: &v1::ExecuteResponse, i: usize) -> Vec<u8> {
    match response.outputs[i].kind.clone() {
        Some(v1::output::Kind::Data(bytes)) => bytes.to_vec(),
        other => panic!("{other:?}"),
    }
}

pub fn call(
    plan: &v1::Handle,
    inputs: Vec<v1::Operand>,
    outputs: Vec<v1::OutputWish>,
) -> v1::ExecuteRequest {
    v1::ExecuteRequest {
        plan: Some(plan.clone()),
        inputs,
        outputs,
        ..v1::ExecuteRequest::default()
    }
}

impl Client {
    pub async fn open(host: &Host) -> Client {
        Self::open_with(host, v1::OpenSessionRequest::default()).await
    }

    pub async fn open_with(host: &Host, request: v1::OpenSessionRequest) -> Client {
        Self::open_over(connect(host).await, request).await.unwrap()
    }

    pub async fn open_over(
        raw: TensorsClient<Channel>,
        request: v1::OpenSessionRequest,
    ) -> Result<Client, Status> {
        Ok(Self::open_told(raw, request).await?.0)
    }

    /// The session, and the numerics class that it was told.
    pub async fn open_told(
        mut raw: TensorsClient<Channel>,
        request: v1::OpenSessionRequest,
    ) -> Result<(Client, String), Status> {
        let response = raw.open_session(request).await?;
        let header = response.metadata().get(SESSION_KEY).unwrap();
        let name = header.to_str().unwrap().to_owned();
        let mut events = response.into_inner();
        let first = events.message().await?.unwrap().event.unwrap();
        let v1::session_event::Event::Opened(opened) = first else {
            panic!("{first:?}");
        };
        assert_eq!(opened.session, name);
        assert_eq!(opened.epoch, EPOCH.0);
        let numerics = opened.numerics;
        Ok((Client { raw, name, events }, numerics))
    }

    /// A request of this session.
    pub fn of<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let name = self.name.parse().unwrap();
        request.metadata_mut().insert(SESSION_KEY, name);
        request
    }

    pub async fn try_upload(&self, chunks: Vec<v1::UploadChunk>) -> Result<v1::TensorInfo, Status> {
        let request = self.of(tokio_stream::iter(chunks));
        let response = self.raw.clone().upload(request).await?;
        Ok(response.into_inner().tensor.unwrap())
    }

    pub async fn upload(&self, dims: &[usize], values: &[f32]) -> v1::Handle {
        let chunk = upload_chunk(
            v1::upload_target::Kind::Create(wire_spec(dims)),
            0,
            f32s(values),
        );
        let info = self.try_upload(vec![chunk]).await.unwrap();
        assert_eq!(info.state(), v1::TensorState::Ready);
        info.handle.unwrap()
    }

    pub async fn try_download(
        &self,
        handle: &v1::Handle,
        offset: u64,
        length: u64,
    ) -> Result<(Vec<u8>, Vec<u8>), Status> {
        let request = self.of(v1::DownloadRequest {
            tensor: Some(handle.clone()),
            offset,
            length,
            checksum: true,
        });
        let mut chunks = self.raw.clone().download(request).await?.into_inner();
        let (mut bytes, mut sum) = (Vec::new(), Vec::new());
        while let Some(chunk) = chunks.message().await? {
            bytes.extend_from_slice(&chunk.data);
            sum = chunk.sha256;
        }
        Ok((bytes, sum))
    }

    pub async fn download(&self, handle: &v1::Handle) -> Vec<f32> {
        read_f32s(&self.try_download(handle, 0, 0).await.unwrap().0)
    }

    pub async fn try_compile(&self, graph: v1::Graph) -> Result<v1::CompileResponse, Status> {
        let request = self.of(v1::CompileRequest {
            graph: Some(graph),
            ..v1::CompileRequest::default()
        });
        Ok(self.raw.clone().compile(request).await?.into_inner())
    }

    pub async fn compile(&self, graph: &Graph) -> v1::Handle {
        let made = self.try_compile(wire::encode(graph)).await.unwrap();
        made.plan.unwrap()
    }

    pub async fn execute(
        &self,
        request: v1::ExecuteRequest,
    ) -> Result<v1::ExecuteResponse, Status> {
        let request = self.of(request);
        Ok(self.raw.clone().execute(request).await?.into_inner())
    }

    pub async fn free(&self, handles: &[v1::Handle]) -> Result<(), Status> {
        let request = self.of(v1::FreeRequest {
            handles: handles.to_vec(),
        });
        self.raw.clone().free(request).await.map(|_| ())
    }

    pub async fn memory(&self) -> v1::MemoryResponse {
        self.set_memory(v1::MemoryRequest::default()).await
    }

    pub async fn set_memory(&self, request: v1::MemoryRequest) -> v1::MemoryResponse {
        let request = self.of(request);
        self.raw.clone().memory(request).await.unwrap().into_inner()
    }

    pub async fn list(&self) -> v1::ListResponse {
        let request = self.of(v1::ListRequest {});
        self.raw.clone().list(request).await.unwrap().into_inner()
    }

    pub async fn synchronize(&self, fence: Option<v1::Fence>) -> Result<(), Status> {
        let request = self.of(v1::SynchronizeRequest { fence });
        self.raw.clone().synchronize(request).await.map(|_| ())
    }

    pub async fn cancel(&self, stream: u32, all: bool) -> u32 {
        let request = self.of(v1::CancelRequest { stream, all });
        self.raw
            .clone()
            .cancel(request)
            .await
            .unwrap()
            .into_inner()
            .cancelled
    }
}

pub fn upload_chunk(
    kind: v1::upload_target::Kind,
    offset: u64,
    data: impl Into<Bytes>,
) -> v1::UploadChunk {
    v1::UploadChunk {
        target: Some(v1::UploadTarget {
            kind: Some(kind),
            offset,
            ..v1::UploadTarget::default()
        }),
        data: data.into(),
    }
}
