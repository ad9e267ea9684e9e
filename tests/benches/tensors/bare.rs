//! Bare tonic: the messages of tensor calls between two processes over a Unix socket, with nothing behind them.

use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll},
};

use anyhow::Result;
use bytes::Bytes;
use hotcell_ipc::transport::Windows;
use hotcell_proto::{
    limits,
    v1::{self, tensors_client::TensorsClient},
};
use hotcell_tests::cluster::Process;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{
    Request, Response, Status, Streaming,
    body::Body,
    codegen::{BoxFuture, BoxStream, Service},
    server::{ClientStreamingService, Grpc, NamedService, ServerStreamingService, UnaryService},
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

/// The argument with which this program is the server.
pub const FLAG: &str = "--bare-server";

/// A server in a process of its own.
pub struct Bare {
    _process: Process,
    folder: tempfile::TempDir,
}

impl Bare {
    /// Starts it.
    pub async fn start() -> Result<Self> {
        let folder = tempfile::TempDir::new()?;
        let socket = socket(folder.path());
        let process = Process::start(
            Command::new(std::env::current_exe()?)
                .arg(FLAG)
                .arg(&socket),
        )?;
        crate::appears(&socket).await?;
        Ok(Self {
            _process: process,
            folder,
        })
    }

    /// A client with the windows that tensor sessions have.
    pub async fn client(&self) -> Result<TensorsClient<Channel>> {
        let path = socket(self.folder.path());
        let connector = tower::service_fn(move |_: http::Uri| {
            let path = path.clone();
            async move {
                UnixStream::connect(path)
                    .await
                    .map(hyper_util::rt::TokioIo::new)
            }
        });
        let endpoint = Windows::default().endpoint(Endpoint::from_static("http://bare.invalid"));
        let channel = endpoint.connect_with_connector(connector).await?;
        Ok(TensorsClient::new(channel)
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES))
    }
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("bare.sock")
}

/// Is the server, on one thread as a worker's is.
pub fn serve(socket: &Path) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let incoming = UnixListenerStream::new(UnixListener::bind(socket)?);
        let service = Tensors {
            bytes: Bytes::from(vec![7u8; crate::transfers::SIZE]),
            kept: Arc::default(),
        };
        let server = Windows::default().server().add_service(service);
        Ok(server.serve_with_incoming(incoming).await?)
    })
}

#[derive(Clone)]
struct Tensors {
    /// What downloads send.
    bytes: Bytes,
    /// Where uploads go, in turn: memory that is there already, as a worker's is that has freed a tensor of the size.
    kept: Arc<Mutex<Vec<u8>>>,
}

impl NamedService for Tensors {
    const NAME: &'static str = "hotcell.v1.Tensors";
}

impl Service<http::Request<Body>> for Tensors {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        const MOST: usize = limits::MAX_MESSAGE_BYTES;
        let Self { bytes, kept } = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/hotcell.v1.Tensors/Upload" => {
                    let grpc = Grpc::new(ProstCodec::default());
                    let mut grpc = grpc.max_decoding_message_size(MOST);
                    grpc.client_streaming(Upload(kept), request).await
                }
                "/hotcell.v1.Tensors/Download" => {
                    let grpc = Grpc::new(ProstCodec::default());
                    let mut grpc = grpc.max_encoding_message_size(MOST);
                    grpc.server_streaming(Download(bytes), request).await
                }
                _ => {
                    Grpc::new(ProstCodec::default())
                        .unary(Execute, request)
                        .await
                }
            })
        })
    }
}

struct Upload(Arc<Mutex<Vec<u8>>>);

impl ClientStreamingService<v1::UploadChunk> for Upload {
    type Response = v1::UploadResponse;
    type Future = BoxFuture<Response<v1::UploadResponse>, Status>;

    /// The target's offset says how many bytes to keep; with 0 they are dropped as they come.
    fn call(&mut self, request: Request<Streaming<v1::UploadChunk>>) -> Self::Future {
        let place = Arc::clone(&self.0);
        Box::pin(async move {
            let mut chunks = request.into_inner();
            let mut kept = std::mem::take(&mut *locked(&place));
            kept.clear();
            let mut keep = 0;
            while let Some(chunk) = chunks.message().await? {
                if let Some(target) = chunk.target {
                    keep = target.offset as usize;
                    kept.reserve_exact(keep);
                }
                if keep > 0 {
                    kept.extend_from_slice(&chunk.data);
                }
            }
            let bytes = kept.len() as u64;
            *locked(&place) = kept;
            Ok(Response::new(v1::UploadResponse {
                tensor: Some(v1::TensorInfo {
                    bytes,
                    ..v1::TensorInfo::default()
                }),
            }))
        })
    }
}

fn locked(place: &Mutex<Vec<u8>>) -> MutexGuard<'_, Vec<u8>> {
    // Nothing panics while it is held.
    place.lock().unwrap_or_else(|e| e.into_inner())
}

struct Download(Bytes);

impl ServerStreamingService<v1::DownloadRequest> for Download {
    type Response = v1::DownloadChunk;
    type ResponseStream = BoxStream<v1::DownloadChunk>;
    type Future = BoxFuture<Response<Self::ResponseStream>, Status>;

    fn call(&mut self, _: Request<v1::DownloadRequest>) -> Self::Future {
        let bytes = self.0.clone();
        let chunks = (0..bytes.len())
            .step_by(limits::TENSOR_CHUNK)
            .map(move |start| {
                let end = bytes.len().min(start + limits::TENSOR_CHUNK);
                Ok(v1::DownloadChunk {
                    data: bytes.slice(start..end),
                    ..v1::DownloadChunk::default()
                })
            });
        let chunks: Self::ResponseStream = Box::pin(tokio_stream::iter(chunks));
        Box::pin(async move { Ok(Response::new(chunks)) })
    }
}

struct Execute;

impl UnaryService<v1::ExecuteRequest> for Execute {
    type Response = v1::ExecuteResponse;
    type Future = BoxFuture<Response<v1::ExecuteResponse>, Status>;

    /// An answer as long as a worker's.
    fn call(&mut self, request: Request<v1::ExecuteRequest>) -> Self::Future {
        Box::pin(async move {
            let request = request.into_inner();
            let info = v1::TensorInfo {
                handle: request.plan,
                bytes: 16,
                ..v1::TensorInfo::default()
            };
            Ok(Response::new(v1::ExecuteResponse {
                outputs: vec![v1::Output {
                    kind: Some(v1::output::Kind::Tensor(info)),
                }],
                fence: Some(v1::Fence {
                    stream: 0,
                    value: 1,
                }),
                compute_ns: 1000,
                ..v1::ExecuteResponse::default()
            }))
        })
    }
}
