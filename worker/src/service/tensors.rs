//! `hotcell.v1.Tensors`: what clients hold on the device and do with it.

mod compile;
mod lease;
mod pipeline;
mod transfer;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use hotcell_graph::{Shape, TensorSpec};
use hotcell_graph::{op::ValueSpec, wire::encode_tensor_spec};
use hotcell_proto::{
    error::{Error, Reason},
    ids::Epoch,
    limits,
    session::{HandleId, SessionId},
    v1::{self, tensors_server::Tensors},
};
use tokio::sync::oneshot;
use tonic::{Request, Response, Status, Streaming};

pub use compile::server;
use lease::Lease;
use pipeline::Answers;
use transfer::Chunks;

use crate::{
    engine::Engine,
    host::Host,
    session::{
        call::{Answer, CallRequest, Submitted},
        plane::session_gone,
        state::Session,
        tensor::{read_cache_spec, read_tensor_spec},
    },
};

/// The service.
#[derive(Clone)]
pub struct TensorsService {
    host: Host,
}

/// Cancels calls when it is dropped before their answers came.
struct Wanted {
    cancelled: Arc<AtomicBool>,
    engine: Option<Engine>,
}

impl Wanted {
    fn new(engine: &Engine) -> Self {
        Self {
            cancelled: Arc::default(),
            engine: Some(engine.clone()),
        }
    }

    fn answered(mut self) {
        self.engine = None;
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        if let Some(engine) = &self.engine {
            self.cancelled.store(true, Ordering::Release);
            engine.wake();
        }
    }
}

fn ids(handles: &[v1::Handle], epoch: Epoch) -> Result<Vec<HandleId>, Error> {
    if handles.len() > limits::MAX_CALL_HANDLES {
        let limit = limits::MAX_CALL_HANDLES;
        let what = format!("{} handles in one call, {limit} are allowed", handles.len());
        return Err(Error::new(Reason::LimitExceeded, what).with("limit", limit));
    }
    handles
        .iter()
        .map(|h| HandleId::of(Some(h), epoch))
        .collect()
}

fn chosen(id: &[u8]) -> Result<Option<HandleId>, Error> {
    match id {
        [] => Ok(None),
        id => HandleId::from_wire(id).map(Some),
    }
}

fn response(answer: Answer, tag: u64) -> v1::ExecuteResponse {
    v1::ExecuteResponse {
        tag,
        outputs: answer.outputs,
        fence: Some(answer.fence),
        compute_ns: answer.compute_ns,
        error: None,
    }
}

fn failed(error: &Error, tag: u64) -> v1::ExecuteResponse {
    v1::ExecuteResponse {
        tag,
        error: Some(v1::CallError {
            reason: error.reason().name().to_owned(),
            message: error.message().to_owned(),
            metadata: error
                .metadata()
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .collect(),
        }),
        ..v1::ExecuteResponse::default()
    }
}

/// Queues a call. A short one is run here at once if the engine has nothing to do.
async fn submit(
    engine: &Engine,
    session: SessionId,
    submitted: Submitted,
) -> Result<Answer, Error> {
    // Still there, if the engine is busy or the call is not short.
    let mut submitted = Some(submitted);
    let at_once = engine
        .tensors_at_once(|plane, asked| plane.submit_if_short(&session, &mut submitted, asked));
    match (at_once.flatten(), submitted) {
        (Some(answer), _) => answer,
        (None, Some(submitted)) => {
            let submit = engine.tensors(move |plane| plane.submit(&session, submitted));
            submit.await
        }
        (None, None) => Err(Error::new(Reason::Internal, "a call was lost")),
    }
}

impl TensorsService {
    /// Serves what `host` has.
    pub fn new(host: Host) -> Self {
        Self { host }
    }

    fn epoch(&self) -> Epoch {
        self.host.identity().1
    }

    /// Does something with a session on the engine's thread.
    async fn with<T: Send + 'static>(
        &self,
        session: SessionId,
        work: impl FnOnce(&mut Session) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let engine = self.host.engine();
        engine
            .tensors(move |plane| work(plane.session(&session)?))
            .await
    }

    /// Queues a call and, unless it is detached, waits for its end.
    async fn call(&self, session: SessionId, request: CallRequest) -> Result<Answer, Error> {
        let engine = self.host.engine();
        let detached = request.detached;
        let wanted = Wanted::new(engine);
        let cancelled = Arc::clone(&wanted.cancelled);
        let (reply, answer) = oneshot::channel();
        let submitted = Submitted {
            request,
            reply: (!detached).then(|| Box::new(move |result| reply.send(result).is_ok()) as _),
            cancelled,
        };
        let result = match submit(engine, session, submitted).await {
            Ok(at_once) if detached => Ok(at_once),
            Ok(_) => answer.await.unwrap_or_else(|_| Err(session_gone())),
            Err(error) => Err(error),
        };
        wanted.answered();
        result
    }
}

#[tonic::async_trait]
impl Tensors for TensorsService {
    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        let opened = self.host.engine().opened();
        let (worker, epoch) = self.host.identity();
        let types = opened.buffer_types.iter().map(|t| v1::BufferType {
            name: t.name.to_owned(),
            alignment: t.alignment as u64,
            max_bytes: t.max_bytes as u64,
            is_host: t.is_host,
        });
        Ok(Response::new(v1::DescribeResponse {
            worker,
            epoch: epoch.0,
            device: opened.info.id.clone(),
            backend: opened.info.backend.to_owned(),
            numerics: opened.numerics.clone(),
            reproducible: opened.reproducible,
            memory_bytes: opened.info.memory_bytes,
            threads: opened.info.cores.len() as u32,
            buffer_types: types.collect(),
            ops: opened.ops.iter().map(|&op| op.to_owned()).collect(),
            models: self.host.models(),
        }))
    }

    type OpenSessionStream = Lease;

    async fn open_session(
        &self,
        request: Request<v1::OpenSessionRequest>,
    ) -> Result<Response<Lease>, Status> {
        self.host.accepting()?;
        Ok(lease::open(&self.host, request).await?)
    }

    async fn create(
        &self,
        request: Request<v1::CreateRequest>,
    ) -> Result<Response<v1::TensorInfo>, Status> {
        let session = SessionId::of(request.metadata())?;
        let request = request.into_inner();
        let id = chosen(&request.id)?;
        let (spec, bytes) = match &request.spec {
            Some(v1::create_request::Spec::Cache(cache)) => {
                let (spec, bytes) = read_cache_spec(cache)?;
                (ValueSpec::Cache(spec), bytes)
            }
            Some(v1::create_request::Spec::Tensor(tensor)) => {
                let (spec, bytes) = read_tensor_spec(Some(tensor))?;
                (ValueSpec::Tensor(spec), bytes)
            }
            None => return Err(crate::session::invalid("the tensor has no spec").into()),
        };
        let info = self
            .with(session, move |s| s.create(id, spec, bytes))
            .await?;
        Ok(Response::new(info))
    }

    async fn upload(
        &self,
        request: Request<Streaming<v1::UploadChunk>>,
    ) -> Result<Response<v1::UploadResponse>, Status> {
        let session = SessionId::of(request.metadata())?;
        let tensor = self.receive(session, request.into_inner()).await?;
        Ok(Response::new(v1::UploadResponse {
            tensor: Some(tensor),
        }))
    }

    type DownloadStream = Chunks;

    async fn download(
        &self,
        request: Request<v1::DownloadRequest>,
    ) -> Result<Response<Chunks>, Status> {
        let session = SessionId::of(request.metadata())?;
        let chunks = self.send(session, request.into_inner()).await?;
        Ok(Response::new(chunks))
    }

    async fn free(
        &self,
        request: Request<v1::FreeRequest>,
    ) -> Result<Response<v1::FreeResponse>, Status> {
        let session = SessionId::of(request.metadata())?;
        let ids = ids(&request.get_ref().handles, self.epoch())?;
        // Beside the call: what a caller frees while it leaves is freed.
        let service = self.clone();
        let free = tokio::spawn(async move { service.with(session, move |s| s.free(&ids)).await });
        free.await
            .map_err(|e| Error::new(Reason::Internal, format!("freeing failed: {e}")))??;
        Ok(Response::new(v1::FreeResponse {}))
    }

    async fn list(
        &self,
        request: Request<v1::ListRequest>,
    ) -> Result<Response<v1::ListResponse>, Status> {
        let session = SessionId::of(request.metadata())?;
        let list = self.with(session, |s| Ok(s.list())).await?;
        Ok(Response::new(list))
    }

    async fn compile(
        &self,
        request: Request<v1::CompileRequest>,
    ) -> Result<Response<v1::CompileResponse>, Status> {
        let session = SessionId::of(request.metadata())?;
        let made = self.plan(session, request.into_inner()).await?;
        Ok(Response::new(made))
    }

    async fn execute(
        &self,
        request: Request<v1::ExecuteRequest>,
    ) -> Result<Response<v1::ExecuteResponse>, Status> {
        let session = SessionId::of(request.metadata())?;
        let request = request.into_inner();
        let tag = request.tag;
        let call = CallRequest::read(request, self.epoch())?;
        let answer = self.call(session, call).await?;
        Ok(Response::new(response(answer, tag)))
    }

    type ExecuteManyStream = Answers;

    async fn execute_many(
        &self,
        request: Request<Streaming<v1::ExecuteRequest>>,
    ) -> Result<Response<Self::ExecuteManyStream>, Status> {
        let session = SessionId::of(request.metadata())?;
        Ok(Response::new(self.pipeline(session, request.into_inner())))
    }

    async fn synchronize(
        &self,
        request: Request<v1::SynchronizeRequest>,
    ) -> Result<Response<v1::SynchronizeResponse>, Status> {
        let session = SessionId::of(request.metadata())?;
        let fence = request.get_ref().fence.map(|f| (f.stream, f.value));
        let (reply, passed) = oneshot::channel();
        self.with(session, move |s| s.synchronize(fence, reply))
            .await?;
        passed.await.map_err(|_| session_gone())?;
        Ok(Response::new(v1::SynchronizeResponse {}))
    }

    async fn cancel(
        &self,
        request: Request<v1::CancelRequest>,
    ) -> Result<Response<v1::CancelResponse>, Status> {
        let session = SessionId::of(request.metadata())?;
        let request = request.into_inner();
        let stream = (!request.all).then_some(request.stream);
        let count = self.with(session, move |s| Ok(s.cancel(stream))).await?;
        Ok(Response::new(v1::CancelResponse {
            cancelled: u32::try_from(count).unwrap_or(u32::MAX),
        }))
    }

    async fn memory(
        &self,
        request: Request<v1::MemoryRequest>,
    ) -> Result<Response<v1::MemoryResponse>, Status> {
        let session = SessionId::of(request.metadata())?;
        let request = request.into_inner();
        let memory = self.with(session, move |s| Ok(s.memory(&request))).await?;
        Ok(Response::new(memory))
    }

    async fn list_weights(
        &self,
        request: Request<v1::ListWeightsRequest>,
    ) -> Result<Response<v1::ListWeightsResponse>, Status> {
        // Only who has a session may look.
        let session = SessionId::of(request.metadata())?;
        self.with(session, |_| Ok(())).await?;
        let model = self.host.model(&request.get_ref().model)?;
        let weights = model.weights.iter().map(|(name, weight)| {
            let spec = weight_spec(&weight.shape, weight.dtype)?;
            Ok(v1::WeightInfo {
                name: name.to_owned(),
                spec: Some(encode_tensor_spec(&spec)),
                bytes: weight.bytes().len() as u64,
            })
        });
        let weights = weights.collect::<Result<_, Error>>()?;
        Ok(Response::new(v1::ListWeightsResponse { weights }))
    }

    async fn get_weight(
        &self,
        request: Request<v1::GetWeightRequest>,
    ) -> Result<Response<v1::TensorInfo>, Status> {
        let session = SessionId::of(request.metadata())?;
        let v1::GetWeightRequest { model, name } = request.into_inner();
        let model = self.host.model(&model)?;
        let weight = model.weights.get(&name).map_err(|error| {
            let reason = crate::error::of_model(&error).reason();
            let reason = match reason {
                Reason::ModelUnsupported => reason,
                _ => Reason::HandleNotFound,
            };
            Error::new(reason, error.to_string())
        })?;
        if let Some(file) = model.weights.changed_file() {
            let what = format!("{file} was changed after the model was loaded; load it again");
            return Err(Error::new(Reason::ModelChanged, what).into());
        }
        let (weight, spec) = (weight.clone(), weight_spec(&weight.shape, weight.dtype)?);
        let model = model.name.clone();
        let info = self
            .with(session, move |s| s.weight(model, name, spec, weight))
            .await?;
        Ok(Response::new(info))
    }

    async fn import_shared(
        &self,
        request: Request<v1::ImportSharedRequest>,
    ) -> Result<Response<v1::TensorInfo>, Status> {
        let session = SessionId::of(request.metadata())?;
        let request = request.into_inner();
        let (spec, bytes) = read_tensor_spec(request.spec.as_ref())?;
        // Before waiting for a descriptor: is there such a session?
        self.with(session.clone(), |_| Ok(())).await?;
        let offset = request.offset;
        let mapping = self.host.shared_memory(request.tag, offset, bytes).await?;
        let info = self
            .with(session, move |s| {
                s.import_shared(mapping, spec, bytes, offset)
            })
            .await?;
        Ok(Response::new(info))
    }
}

fn weight_spec(shape: &[usize], dtype: hotcell_graph::DType) -> Result<TensorSpec, Error> {
    let spec = Shape::fixed(shape).and_then(|shape| TensorSpec::new(dtype, shape));
    spec.map_err(|e| crate::error::of_graph(&e))
}
