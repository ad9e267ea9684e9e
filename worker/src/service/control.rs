//! `hotcell.v1.Worker`: what only the scheduler says.

use std::{pin::Pin, time::Duration};

use hotcell_proto::{
    PROTOCOL_VERSION,
    error::{Error, Reason},
    ids::{Epoch, ModelName},
    limits,
    v1::{self, worker_server::Worker},
};
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use super::blocks;
use crate::{
    host::Host,
    serve::{self, Controls},
};

/// Bytes of one piece of a tokenizer's file.
const PIECE: usize = 256 << 10;

/// The service.
pub struct WorkerService(pub Host, pub Controls);

/// Refuses more files than a model has, or none.
fn check_count(files: usize) -> Result<(), Error> {
    if (1..=limits::MAX_MODEL_FILES).contains(&files) {
        return Ok(());
    }
    let most = limits::MAX_MODEL_FILES;
    let what = format!("a model has 1 to {most} files, not {files}");
    Err(Error::new(Reason::LimitExceeded, what))
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
type Progress = Answers<v1::LoadProgress>;
type Pieces = Answers<v1::PackPiece>;

#[tonic::async_trait]
impl Worker for WorkerService {
    async fn handshake(
        &self,
        request: Request<v1::HandshakeRequest>,
    ) -> Result<Response<v1::HandshakeResponse>, Status> {
        let theirs = request.get_ref().protocol_version;
        if theirs != PROTOCOL_VERSION {
            let what = format!(
                "the scheduler speaks protocol {theirs} and this worker {PROTOCOL_VERSION}; install both from one release"
            );
            return Err(Error::new(Reason::ProtocolMismatch, what).into());
        }
        let request = request.get_ref();
        self.0
            .set_identity(&request.worker_id, Epoch(request.epoch));
        let info = &self.0.engine().opened().info;
        Ok(Response::new(v1::HandshakeResponse {
            protocol_version: PROTOCOL_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            device: Some(v1::Device {
                id: info.id.clone(),
                backend: info.backend.to_owned(),
                description: info.description.clone(),
                memory_bytes: info.memory_bytes,
                cores: info.cores.clone(),
                path: info.path.clone(),
                problem: String::new(),
                program: String::new(),
                pci_id: info.pci_id.clone(),
                integrated: info.integrated,
                driver: info.driver.clone(),
                gauge: None,
                members: vec![],
            }),
            confinement: self.0.confinement().to_string(),
            layers: self.0.confinement().wire(),
            packing: self.0.engine().opened().layout.unwrap_or("").to_owned(),
            keeps_weights: self.0.engine().opened().keeps_weights,
            members: self.0.engine().opened().members as u32,
        }))
    }

    type LoadStream = Progress;

    async fn load(&self, request: Request<v1::LoadRequest>) -> Result<Response<Progress>, Status> {
        let mut request = request.into_inner();
        request.model = ModelName::new(request.model)?.as_str().to_owned();
        check_count(request.files.len())?;
        let (events, stream) = mpsc::channel(limits::STREAM_BUFFER);
        let host = self.0.clone();
        tokio::spawn(async move {
            let (progress, mut reports) = mpsc::channel(limits::STREAM_BUFFER);
            let load = host.load_by_descriptor(request, progress);
            tokio::pin!(load);
            // A sign of life at least this often, also while the load waits for the engine's current step.
            let mut beat = tokio::time::interval(Duration::from_secs(1));
            let mut latest = v1::LoadProgress::default();
            let loaded = loop {
                tokio::select! {
                    loaded = &mut load => break loaded,
                    Some(report) = reports.recv() => latest = report,
                    _ = beat.tick() => {}
                }
                // A caller that went away does not stop the load: the scheduler may ask again.
                let _ = events.try_send(Ok(latest.clone()));
            };
            let last = loaded.map_err(Status::from).map(|model| v1::LoadProgress {
                stage: "loaded".to_owned(),
                loaded: Some(v1::Loaded {
                    summary: Some(model.summary.clone()),
                    numerics: Some(model.numerics.clone()),
                    cache_tokens: model.cache_tokens,
                    packing: model.packing.layout().to_owned(),
                    packing_files: model.packing.files(),
                    packed: model.is_packed(),
                    kept: model.kept.clone(),
                    found: model.found,
                    damaged: model.damaged,
                }),
                ..v1::LoadProgress::default()
            });
            let _ = events.send(last).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn inspect(
        &self,
        request: Request<v1::InspectRequest>,
    ) -> Result<Response<v1::Inspected>, Status> {
        let v1::InspectRequest { tag, files } = request.into_inner();
        check_count(files.len())?;
        Ok(Response::new(self.0.inspect(tag, files).await?))
    }

    type PackStream = Pieces;

    async fn pack(
        &self,
        request: Request<Streaming<v1::PackRequest>>,
    ) -> Result<Response<Pieces>, Status> {
        let mut requests = request.into_inner();
        let first = requests.message().await?.unwrap_or_default();
        let packer = self.0.packer(first).await?;
        let (ask, asked) = mpsc::channel(1);
        let (pieces, stream) = mpsc::channel(1);
        let blackbox = self.0.engine().blackbox();
        packer
            .start(blackbox, asked, pieces)
            .map_err(|e| Error::new(Reason::Internal, format!("no thread to pack: {e}")))?;
        tokio::spawn(async move {
            // The first one asks, too. Whoever hangs up ends it.
            while ask.send(()).await.is_ok() {
                if !matches!(requests.message().await, Ok(Some(_))) {
                    return;
                }
            }
        });
        let stream = ReceiverStream::new(stream).map(|piece| piece.map_err(Status::from));
        Ok(Response::new(Box::pin(stream)))
    }

    async fn use_packed(
        &self,
        request: Request<v1::UsePackedRequest>,
    ) -> Result<Response<v1::UsePackedResponse>, Status> {
        self.0.use_packed(request.into_inner()).await?;
        Ok(Response::new(v1::UsePackedResponse {}))
    }

    async fn unload(
        &self,
        request: Request<v1::UnloadRequest>,
    ) -> Result<Response<v1::UnloadResponse>, Status> {
        self.0.unload(&request.get_ref().model).await?;
        Ok(Response::new(v1::UnloadResponse {}))
    }

    async fn open_tensors(
        &self,
        request: Request<v1::OpenTensorsRequest>,
    ) -> Result<Response<v1::OpenTensorsResponse>, Status> {
        let v1::OpenTensorsRequest { tag, debug } = request.into_inner();
        self.0.open_tensors(tag, debug).await?;
        Ok(Response::new(v1::OpenTensorsResponse {}))
    }

    async fn join(
        &self,
        request: Request<v1::JoinRequest>,
    ) -> Result<Response<v1::JoinResponse>, Status> {
        serve::join(&self.0, &self.1, request.get_ref().tag).await?;
        Ok(Response::new(v1::JoinResponse {}))
    }

    async fn check(
        &self,
        request: Request<v1::CheckRequest>,
    ) -> Result<Response<v1::CheckResponse>, Status> {
        let v1::CheckRequest {
            model,
            steps,
            weights_part,
        } = request.into_inner();
        Ok(Response::new(
            self.0.check(&model, steps, weights_part).await?,
        ))
    }

    async fn status(
        &self,
        _: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusResponse>, Status> {
        let (caches, memory) = self.0.engine().status().await?;
        let weights = self.0.weights_in_use().into_iter();
        Ok(Response::new(v1::StatusResponse {
            caches,
            memory: weights.chain(memory).collect(),
        }))
    }

    type WatchBlocksStream = Answers<v1::BlocksChanged>;

    async fn watch_blocks(
        &self,
        request: Request<v1::WatchBlocksRequest>,
    ) -> Result<Response<Self::WatchBlocksStream>, Status> {
        let model = self.0.model(&request.get_ref().model)?;
        let (to, stream) = mpsc::channel(1);
        let engine = self.0.engine().clone();
        let watching = blocks::watch(engine, model.name.clone(), model.block_tokens, to);
        tokio::spawn(watching);
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    type ReadTokenizerStream = Answers<v1::TokenizerPiece>;

    async fn read_tokenizer(
        &self,
        request: Request<v1::ReadTokenizerRequest>,
    ) -> Result<Response<Self::ReadTokenizerStream>, Status> {
        let model = self.0.model(&request.get_ref().model)?;
        let write = move || model.text.files(&model.summary);
        let files = self.0.text_work(write).await?;
        let (to, stream) = mpsc::channel(1);
        tokio::spawn(async move {
            for (name, file) in files {
                // The empty one is its end.
                for data in file.chunks(PIECE).chain([&[][..]]) {
                    let piece = v1::TokenizerPiece {
                        name: name.to_owned(),
                        data: data.to_vec(),
                    };
                    if to.send(Ok(piece)).await.is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn drain(
        &self,
        _: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        self.0.drain().await?;
        Ok(Response::new(v1::DrainResponse {}))
    }
}
