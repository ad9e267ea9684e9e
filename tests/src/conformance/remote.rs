//! Runs cases on a worker, through the scheduler and gRPC.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use hotcell_client::v1::{
    self, create_request, operand, output, output_wish, session_event,
    tensors_client::TensorsClient, upload_target,
};
use hotcell_graph::{Graph, op::ValueSpec, wire};
use hotcell_proto::{limits, session::SESSION_KEY};
use tokio::runtime::Runtime;
use tonic::{Request, Status, Streaming, metadata::AsciiMetadataValue, transport::Channel};

use super::{Executor, Outcome, RunError};
use crate::cluster::Cluster;

/// A session on a worker of a cluster of its own.
pub struct Remote {
    client: TensorsClient<Channel>,
    session: AsciiMetadataValue,
    /// Its stream is the session's lease.
    _lease: Streaming<v1::SessionEvent>,
    cluster: Cluster,
    runtime: Arc<Runtime>,
    fuse: bool,
}

impl Remote {
    /// Starts a cluster and opens a session over TCP.
    ///
    /// # Errors
    /// When one of them fails.
    pub fn start() -> Result<Self> {
        Self::start_with(&[])
    }

    /// The same, with further arguments for the scheduler.
    ///
    /// # Errors
    /// When one of them fails.
    pub fn start_with(arguments: &[&str]) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let (cluster, client, session, lease) = runtime.block_on(async {
            let listen = free.to_string();
            let arguments = [&["--listen", &listen], arguments].concat();
            let cluster = Cluster::start(&arguments).await?;
            let ready = |workers: &[v1::WorkerInfo]| {
                !workers.is_empty() && workers.iter().all(|w| w.state() == v1::WorkerState::Ready)
            };
            cluster.workers(ready).await?;
            let channel = Channel::from_shared(format!("http://{free}"))?
                .connect()
                .await?;
            let mut client = TensorsClient::new(channel)
                .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
                .max_encoding_message_size(limits::MAX_MESSAGE_BYTES);
            let opened = client
                .open_session(v1::OpenSessionRequest::default())
                .await?;
            let mut lease = opened.into_inner();
            let first = lease.message().await?.and_then(|e| e.event);
            let Some(session_event::Event::Opened(opened)) = first else {
                anyhow::bail!("no session");
            };
            anyhow::Ok((cluster, client, opened.session.parse()?, lease))
        })?;
        Ok(Self {
            client,
            session,
            _lease: lease,
            cluster,
            runtime: Arc::new(runtime),
            fuse: true,
        })
    }

    /// What the scheduler and its workers said.
    pub fn log(&self) -> String {
        self.cluster.scheduler.log()
    }

    /// Ids of the devices that it may be on.
    ///
    /// # Errors
    /// When the scheduler does not answer.
    pub fn devices(&self) -> Result<Vec<String>> {
        let devices = self.runtime.block_on(async {
            let client = self.cluster.client().await?;
            anyhow::Ok(client.devices().await?)
        })?;
        Ok(devices.into_iter().map(|d| d.id).collect())
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request
            .metadata_mut()
            .insert(SESSION_KEY, self.session.clone());
        request
    }

    async fn execute(
        &mut self,
        graph: &Graph,
        rows: usize,
        inputs: &[&[u8]],
    ) -> Result<Outcome, RunError> {
        let run = |status: Status| RunError::Run(status.message().to_owned());
        let broken = |what: &str| RunError::Broken(what.to_owned());
        let request = self.request(v1::CompileRequest {
            graph: Some(wire::encode(graph)),
            no_fusion: !self.fuse,
            ..Default::default()
        });
        let compiled = self.client.compile(request).await;
        let compiled = compiled
            .map_err(|s| RunError::Plan(s.message().to_owned()))?
            .into_inner();
        let plan = compiled.plan.ok_or_else(|| broken("no plan"))?;
        let mut held = vec![plan.clone()];
        let mut caches = Vec::new();
        let mut operands = Vec::new();
        for (input, bytes) in graph.inputs().iter().zip(inputs) {
            let kind = match &input.spec {
                ValueSpec::Cache(_) => {
                    let handle = self.cache(&input.spec, bytes).await.map_err(run)?;
                    held.push(handle.clone());
                    caches.push((handle.clone(), bytes.len()));
                    operand::Kind::Tensor(handle)
                }
                _ => operand::Kind::Data(Bytes::copy_from_slice(bytes)),
            };
            operands.push(v1::Operand { kind: Some(kind) });
        }
        let inline = v1::OutputWish {
            kind: Some(output_wish::Kind::Inline(true)),
        };
        let request = self.request(v1::ExecuteRequest {
            plan: Some(plan),
            rows: rows as u64,
            inputs: operands,
            outputs: vec![inline; graph.outputs().len()],
            ..Default::default()
        });
        let executed = self.client.execute(request).await.map_err(run);
        let mut after = Vec::new();
        if executed.is_ok() {
            for (handle, len) in caches {
                after.push(self.download(handle, len).await.map_err(run)?);
            }
        }
        let request = self.request(v1::FreeRequest { handles: held });
        self.client.free(request).await.map_err(run)?;
        let outputs = executed?
            .into_inner()
            .outputs
            .into_iter()
            .map(|o| match o.kind {
                Some(output::Kind::Data(data)) => Ok(data.to_vec()),
                _ => Err(broken("an output that is not inline")),
            });
        Ok(Outcome {
            outputs: outputs.collect::<Result<_, _>>()?,
            caches: after,
        })
    }

    async fn cache(&mut self, spec: &ValueSpec, bytes: &[u8]) -> Result<v1::Handle, Status> {
        let ValueSpec::Cache(c) = spec else {
            return Err(Status::internal("no cache"));
        };
        let spec = v1::CacheSpec {
            dtype: c.dtype.name().to_owned(),
            blocks: c.blocks as u64,
            block_len: c.block_len as u64,
            kv_heads: c.kv_heads as u64,
            head_dim: c.head_dim as u64,
        };
        let request = self.request(v1::CreateRequest {
            spec: Some(create_request::Spec::Cache(spec)),
            id: vec![],
        });
        let made = self.client.create(request).await?.into_inner();
        let handle = made.handle.ok_or_else(|| Status::internal("no handle"))?;
        let target = v1::UploadTarget {
            kind: Some(upload_target::Kind::Tensor(handle.clone())),
            ..Default::default()
        };
        let chunk = v1::UploadChunk {
            target: Some(target),
            data: Bytes::copy_from_slice(bytes),
        };
        let request = self.request(tokio_stream::once(chunk));
        self.client.upload(request).await?;
        Ok(handle)
    }

    async fn download(&mut self, handle: v1::Handle, len: usize) -> Result<Vec<u8>, Status> {
        let request = self.request(v1::DownloadRequest {
            tensor: Some(handle),
            ..Default::default()
        });
        let mut stream = self.client.download(request).await?.into_inner();
        let mut bytes = Vec::with_capacity(len);
        while let Some(chunk) = stream.message().await? {
            bytes.extend_from_slice(&chunk.data);
        }
        Ok(bytes)
    }

    /// Whether the session holds nothing, as it should between cases.
    ///
    /// # Errors
    /// When it does, or cannot be asked.
    pub fn check_empty(&mut self) -> Result<()> {
        let runtime = Arc::clone(&self.runtime);
        let request = self.request(v1::MemoryRequest::default());
        let memory = runtime
            .block_on(self.client.memory(request))
            .context("no answer")?;
        let memory = memory.into_inner();
        ensure!(
            (memory.active, memory.tensors, memory.plans) == (0, 0, 0),
            "the session still holds {memory:?}"
        );
        Ok(())
    }
}

impl Executor for Remote {
    fn name(&self) -> String {
        "a worker over gRPC".to_owned()
    }

    fn run(&mut self, graph: &Graph, rows: usize, inputs: &[&[u8]]) -> Result<Outcome, RunError> {
        let runtime = Arc::clone(&self.runtime);
        runtime.block_on(self.execute(graph, rows, inputs))
    }

    fn set_fused(&mut self, fused: bool) {
        self.fuse = fused;
    }
}
