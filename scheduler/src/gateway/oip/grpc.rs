//! The service over gRPC.

use std::collections::HashMap;

use hotcell_gateways::inference::{
    CudaSharedMemoryRegisterRequest, CudaSharedMemoryRegisterResponse,
    CudaSharedMemoryStatusRequest, CudaSharedMemoryStatusResponse,
    CudaSharedMemoryUnregisterRequest, CudaSharedMemoryUnregisterResponse, LogSettingsRequest,
    LogSettingsResponse, ModelConfigRequest, ModelConfigResponse, ModelInferRequest,
    ModelInferResponse, ModelMetadataRequest, ModelMetadataResponse, ModelReadyRequest,
    ModelReadyResponse, ModelStatisticsRequest, ModelStatisticsResponse, ModelStreamInferResponse,
    RepositoryIndexRequest, RepositoryIndexResponse, RepositoryModelLoadRequest,
    RepositoryModelLoadResponse, RepositoryModelUnloadRequest, RepositoryModelUnloadResponse,
    ServerLiveRequest, ServerLiveResponse, ServerMetadataRequest, ServerMetadataResponse,
    ServerReadyRequest, ServerReadyResponse, SystemSharedMemoryRegisterRequest,
    SystemSharedMemoryRegisterResponse, SystemSharedMemoryStatusRequest,
    SystemSharedMemoryStatusResponse, SystemSharedMemoryUnregisterRequest,
    SystemSharedMemoryUnregisterResponse, TraceSettingRequest, TraceSettingResponse,
    grpc_inference_service_server::GrpcInferenceService, infer_parameter::ParameterChoice,
    system_shared_memory_status_response::RegionStatus,
};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
};
use tokio::{sync::mpsc, task::JoinSet, time::Instant};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{
    EXTENSIONS, Oip,
    infer::{By, FINAL, Responses, parameter},
    model, peer, repository, settings,
    work::Work,
};
use crate::{
    access::Caller,
    admission::draining,
    service::{Shared, deadline, who},
};

/// Responses of one stream between those who make them and the connection. What comes while its client reads nothing waits
/// in each request's journal, which has the bound.
const AHEAD: usize = 16;

/// The service.
pub(crate) struct Service(pub Shared);

type Answer<T> = Result<Response<T>, Status>;

fn answer<T>(value: T) -> Answer<T> {
    Ok(Response::new(value))
}

/// The model's name where this protocol has it, or where another server of it has it.
fn named<'a>(name: &'a str, first_field: &'a str) -> &'a str {
    match name {
        "" => first_field,
        name => name,
    }
}

/// What a request on a stream is answered if it cannot be served: the stream goes on.
fn failed(id: String, model: String, error: &Error) -> ModelStreamInferResponse {
    let reason = error.reason().name().to_owned();
    let parameters = HashMap::from([
        (
            FINAL.to_owned(),
            parameter(ParameterChoice::BoolParam(true)),
        ),
        (
            "hotcell_reason".to_owned(),
            parameter(ParameterChoice::StringParam(reason)),
        ),
    ]);
    ModelStreamInferResponse {
        error_message: match error.message() {
            // An empty one says that all is well.
            "" => error.reason().name().to_owned(),
            words => words.to_owned(),
        },
        infer_response: Some(ModelInferResponse {
            model_name: model,
            id,
            parameters,
            ..ModelInferResponse::default()
        }),
    }
}

type Sender = mpsc::Sender<Result<ModelStreamInferResponse, Status>>;

/// One client's requests, several at once, and the responses to all of them.
struct Many {
    shared: Shared,
    caller: Caller,
    deadline: Option<Instant>,
    sender: Sender,
}

impl Many {
    async fn serve(self, mut requests: Streaming<ModelInferRequest>) {
        // Dropped with this, which ends what they run.
        let mut running = JoinSet::new();
        let mut is_open = true;
        while is_open || !running.is_empty() {
            let may_ask = is_open && running.len() < limits::MAX_INFERS_IN_FLIGHT;
            tokio::select! {
                () = self.sender.closed() => return,
                // Those that run end by themselves then, each with its reason.
                () = self.shared.abort.cancelled(), if running.is_empty() => {
                    let _ = self.sender.send(Err(draining().into())).await;
                    return;
                }
                _ = running.join_next(), if !running.is_empty() => {}
                next = requests.message(), if may_ask => match next {
                    Ok(Some(asked)) => {
                        running.spawn(one(
                            self.shared.clone(),
                            self.caller.clone(),
                            self.deadline,
                            asked,
                            self.sender.clone(),
                        ));
                    }
                    Ok(None) => is_open = false,
                    Err(status) => {
                        // The client left, or sent what is no request: what it asked before is for nobody.
                        let _ = self.sender.send(Err(status)).await;
                        return;
                    }
                },
            }
        }
    }
}

/// Serves one request of a stream; returns early when nobody hears the answer.
async fn one(
    shared: Shared,
    caller: Caller,
    deadline: Option<Instant>,
    asked: ModelInferRequest,
    sender: Sender,
) {
    let (id, model) = (asked.id.clone(), asked.model_name.clone());
    let by = By {
        caller: &caller,
        deadline,
    };
    let oip = &shared.oip;
    let begun = match Work::read(oip, &shared, &by, asked) {
        Ok(Work::Text(ask)) => Responses::begin(oip, &shared, &caller, *ask, true),
        Ok(Work::Graph(ask)) => {
            let done = tokio::select! {
                () = sender.closed() => return,
                done = ask.run(oip, &shared, true) => done,
            };
            let told = done.map_or_else(
                |error| failed(id, model, &error),
                |response| ModelStreamInferResponse {
                    error_message: String::new(),
                    infer_response: Some(response),
                },
            );
            let _ = sender.send(Ok(told)).await;
            return;
        }
        Err(error) => Err(error),
    };
    let mut responses = match begun {
        Ok(responses) => responses,
        Err(error) => {
            let _ = sender.send(Ok(failed(id, model, &error))).await;
            return;
        }
    };
    while let Some(next) = responses.next().await {
        let (response, is_last) = match next {
            Ok(response) => (
                ModelStreamInferResponse {
                    error_message: String::new(),
                    infer_response: Some(response),
                },
                false,
            ),
            Err(error) => (failed(id.clone(), model.clone(), &error), true),
        };
        if sender.send(Ok(response)).await.is_err() || is_last {
            return;
        }
    }
}

impl Oip {
    /// The one response to a request whose text does not come in pieces.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) async fn infer(
        &self,
        shared: &Shared,
        by: &By<'_>,
        asked: ModelInferRequest,
    ) -> Result<ModelInferResponse, Error> {
        let ask = match Work::read(self, shared, by, asked)? {
            Work::Text(ask) => *ask,
            Work::Graph(ask) => return ask.run(self, shared, false).await,
        };
        if ask.stream {
            let what =
                "a text that comes in pieces needs a stream: ModelStreamInfer, or generate_stream";
            return Err(Error::new(Reason::InvalidArgument, what));
        }
        let mut responses = Responses::begin(self, shared, by.caller, ask, false)?;
        responses.next().await.unwrap_or_else(|| {
            Err(Error::new(
                Reason::Internal,
                "a request ended without a response",
            ))
        })
    }
}

/// Why nothing is done with memory of a device.
pub(super) fn no_devices_memory() -> Error {
    Error::new(
        Reason::Unimplemented,
        "memory of a device is its worker's alone; share the host's memory, or send the tensors",
    )
}

#[tonic::async_trait]
impl GrpcInferenceService for Service {
    type ModelStreamInferStream = ReceiverStream<Result<ModelStreamInferResponse, Status>>;

    async fn server_live(&self, _: Request<ServerLiveRequest>) -> Answer<ServerLiveResponse> {
        answer(ServerLiveResponse { live: true })
    }

    async fn server_ready(&self, _: Request<ServerReadyRequest>) -> Answer<ServerReadyResponse> {
        let ready = self.0.is_serving();
        answer(ServerReadyResponse { ready })
    }

    async fn model_ready(&self, request: Request<ModelReadyRequest>) -> Answer<ModelReadyResponse> {
        let caller = Caller::of(request.extensions());
        let ModelReadyRequest { name, version } = request.get_ref();
        let found = model::find(&self.0, (name, version), &caller);
        let ready = found.is_ok_and(|found| model::is_ready(&self.0, &found));
        answer(ModelReadyResponse { ready })
    }

    async fn server_metadata(
        &self,
        _: Request<ServerMetadataRequest>,
    ) -> Answer<ServerMetadataResponse> {
        answer(ServerMetadataResponse {
            name: "hotcell".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            extensions: EXTENSIONS.iter().map(|name| (*name).to_owned()).collect(),
        })
    }

    async fn model_metadata(
        &self,
        request: Request<ModelMetadataRequest>,
    ) -> Answer<ModelMetadataResponse> {
        let caller = Caller::of(request.extensions());
        let ModelMetadataRequest { name, version } = request.get_ref();
        answer(model::metadata(&model::find(
            &self.0,
            (name, version),
            &caller,
        )?))
    }

    async fn model_infer(&self, request: Request<ModelInferRequest>) -> Answer<ModelInferResponse> {
        let (metadata, extensions, asked) = request.into_parts();
        let by = By {
            caller: &Caller::of(&extensions),
            deadline: deadline(&metadata)?,
        };
        answer(self.0.oip.infer(&self.0, &by, asked).await?)
    }

    async fn model_stream_infer(
        &self,
        request: Request<Streaming<ModelInferRequest>>,
    ) -> Answer<Self::ModelStreamInferStream> {
        let (metadata, extensions, requests) = request.into_parts();
        let (sender, receiver) = mpsc::channel(AHEAD);
        let many = Many {
            shared: self.0.clone(),
            caller: Caller::of(&extensions),
            deadline: deadline(&metadata)?,
            sender,
        };
        tokio::spawn(many.serve(requests));
        answer(ReceiverStream::new(receiver))
    }

    async fn model_config(
        &self,
        request: Request<ModelConfigRequest>,
    ) -> Answer<ModelConfigResponse> {
        let caller = Caller::of(request.extensions());
        let ModelConfigRequest { name, version } = request.get_ref();
        let config = model::config(&model::find(&self.0, (name, version), &caller)?);
        answer(ModelConfigResponse {
            config: Some(config),
        })
    }

    async fn model_statistics(
        &self,
        request: Request<ModelStatisticsRequest>,
    ) -> Answer<ModelStatisticsResponse> {
        let caller = Caller::of(request.extensions());
        let ModelStatisticsRequest { name, version } = request.get_ref();
        answer(model::statistics(&self.0, (name, version), &caller)?)
    }

    async fn repository_index(
        &self,
        request: Request<RepositoryIndexRequest>,
    ) -> Answer<RepositoryIndexResponse> {
        let caller = Caller::of(request.extensions());
        answer(model::index(&self.0, request.get_ref().ready, &caller))
    }

    async fn repository_model_load(
        &self,
        request: Request<RepositoryModelLoadRequest>,
    ) -> Answer<RepositoryModelLoadResponse> {
        let caller = Caller::of(request.extensions());
        let asked = request.get_ref();
        repository::check_parameters(asked.parameters.keys().map(String::as_str))?;
        let name = named(&asked.model_name, &asked.repository_name);
        repository::load(&self.0, &caller, who(&request), name).await?;
        answer(RepositoryModelLoadResponse {
            model_name: name.to_owned(),
            is_loaded: true,
        })
    }

    async fn repository_model_unload(
        &self,
        request: Request<RepositoryModelUnloadRequest>,
    ) -> Answer<RepositoryModelUnloadResponse> {
        let caller = Caller::of(request.extensions());
        let asked = request.get_ref();
        repository::check_parameters(asked.parameters.keys().map(String::as_str))?;
        let name = named(&asked.model_name, &asked.repository_name);
        repository::unload(&self.0, &caller, &who(&request), name).await?;
        answer(RepositoryModelUnloadResponse {
            model_name: name.to_owned(),
            is_unloaded: true,
        })
    }

    async fn system_shared_memory_status(
        &self,
        request: Request<SystemSharedMemoryStatusRequest>,
    ) -> Answer<SystemSharedMemoryStatusResponse> {
        let caller = Caller::of(request.extensions());
        let regions = &self.0.oip.regions;
        let found = regions.status(caller.tenant(""), &request.get_ref().name)?;
        let regions = found.into_iter().map(|(name, region)| {
            let status = RegionStatus {
                name: name.clone(),
                key: region.key.clone(),
                offset: region.offset,
                byte_size: region.size,
            };
            (name, status)
        });
        answer(SystemSharedMemoryStatusResponse {
            regions: regions.collect(),
        })
    }

    async fn system_shared_memory_register(
        &self,
        request: Request<SystemSharedMemoryRegisterRequest>,
    ) -> Answer<SystemSharedMemoryRegisterResponse> {
        let caller = Caller::of(request.extensions());
        let user = peer::user(request.extensions()).await?;
        let asked = request.get_ref();
        let name = (caller.tenant(""), asked.name.as_str());
        let within = (asked.offset, asked.byte_size);
        self.0
            .oip
            .regions
            .register(name, &asked.key, within, user)?;
        answer(SystemSharedMemoryRegisterResponse {})
    }

    async fn system_shared_memory_unregister(
        &self,
        request: Request<SystemSharedMemoryUnregisterRequest>,
    ) -> Answer<SystemSharedMemoryUnregisterResponse> {
        let caller = Caller::of(request.extensions());
        let name = &request.get_ref().name;
        self.0.oip.regions.unregister(caller.tenant(""), name);
        answer(SystemSharedMemoryUnregisterResponse {})
    }

    async fn cuda_shared_memory_status(
        &self,
        _: Request<CudaSharedMemoryStatusRequest>,
    ) -> Answer<CudaSharedMemoryStatusResponse> {
        // None can be registered.
        answer(CudaSharedMemoryStatusResponse::default())
    }

    async fn cuda_shared_memory_register(
        &self,
        _: Request<CudaSharedMemoryRegisterRequest>,
    ) -> Answer<CudaSharedMemoryRegisterResponse> {
        Err(no_devices_memory().into())
    }

    async fn cuda_shared_memory_unregister(
        &self,
        _: Request<CudaSharedMemoryUnregisterRequest>,
    ) -> Answer<CudaSharedMemoryUnregisterResponse> {
        // Clients ask for this before they register; nothing is registered, so nothing is to be done.
        answer(CudaSharedMemoryUnregisterResponse {})
    }

    async fn trace_setting(
        &self,
        request: Request<TraceSettingRequest>,
    ) -> Answer<TraceSettingResponse> {
        settings::unchanged(request.get_ref().settings.len())?;
        answer(settings::traces())
    }

    async fn log_settings(
        &self,
        request: Request<LogSettingsRequest>,
    ) -> Answer<LogSettingsResponse> {
        settings::unchanged(request.get_ref().settings.len())?;
        answer(settings::logs())
    }
}
