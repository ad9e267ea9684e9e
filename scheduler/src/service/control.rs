//! Control, as operators call it.

use std::{path::PathBuf, pin::Pin, sync::Arc};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    v1::{
        CrashReport, Device, DrainWorkerRequest, DrainWorkerResponse, Event, GetCrashRequest,
        InspectModelRequest, Inspection, ListCrashesRequest, ListCrashesResponse,
        ListDevicesRequest, ListDevicesResponse, ListModelsRequest, ListModelsResponse,
        ListWorkersRequest, ListWorkersResponse, LoadModelProgress, LoadModelRequest, ModelInfo,
        ReleaseWorkerRequest, ReleaseWorkerResponse, RestartWorkerRequest, RestartWorkerResponse,
        Serving, UnloadModelRequest, UnloadModelResponse, WatchEventsRequest,
        control_server::Control,
    },
};
use tokio::sync::{broadcast::error::RecvError, mpsc};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status};

use super::{Shared, deadline, is_remote, who, within};
use crate::{
    access::{Caller, Role},
    admission::draining,
    audit::Who,
    discover::clip,
    events::missed,
    fleet::{Wanted, checked_patience},
    vault::name_of,
};

/// Events of a load that wait for its client; progress beyond is left out.
const LOAD_BUFFER: usize = 16;

/// Longest path of a model.
const MAX_PATH: usize = 4096;

/// The service.
pub(super) struct Service(pub Shared);

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Name and path of the model that is meant.
fn wanted(
    name: &str,
    path: &str,
    is_remote: bool,
) -> Result<(Option<ModelName>, Option<PathBuf>), Error> {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let name = some(name).map(ModelName::new).transpose()?;
    if path.len() > MAX_PATH {
        return Err(Error::new(
            Reason::LimitExceeded,
            format!("a model's path has at most {MAX_PATH} bytes"),
        ));
    }
    let path = some(path).map(PathBuf::from);
    if path.is_some() && is_remote {
        return Err(Error::new(
            Reason::InvalidArgument,
            "a client over TCP can name configured models only; add the path to `models` in the scheduler's config",
        ));
    }
    if path.as_ref().is_some_and(|p| p.is_relative()) {
        return Err(Error::new(
            Reason::InvalidArgument,
            "the model's path must be absolute: the scheduler has another working directory",
        ));
    }
    Ok((name, path))
}

/// The end of a load.
fn done(model: ModelInfo, stage: &str) -> LoadModelProgress {
    LoadModelProgress {
        name: model.name.clone(),
        bytes_done: model.file_bytes,
        bytes_total: model.file_bytes,
        stage: stage.to_owned(),
        done: true,
        model: Some(model),
        ..LoadModelProgress::default()
    }
}

impl Service {
    /// Makes a model known that its first request loads.
    fn expect(
        &self,
        name: Option<ModelName>,
        path: Option<PathBuf>,
        serving: Option<Wanted>,
    ) -> Result<Response<Boxed<LoadModelProgress>>, Status> {
        let Some(path) = path else {
            let what = "to load a model with its first request, give its path";
            return Err(Error::new(Reason::InvalidArgument, what).into());
        };
        let name = name.map_or_else(|| name_of(&path), Ok)?;
        let fleet = &self.0.fleet;
        let was = fleet.model(name.as_str()).ok().and_then(|m| m.serving);
        let serving = match serving {
            Some(wanted) => wanted.over(was.unwrap_or_default()),
            None => Serving::default(),
        };
        fleet.expect(name.clone(), path, false, &serving)?;
        let told = done(fleet.model(name.as_str())?, "known");
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(told)))))
    }

    /// Who asks something about a model, if they may.
    fn asks<T>(&self, request: &Request<T>, name: Option<&ModelName>) -> Result<Who, Error> {
        if let Some(name) = name.filter(|_| is_remote(request)) {
            self.0.fleet.check_remote(name)?;
        }
        Ok(who(request))
    }
}

#[tonic::async_trait]
impl Control for Service {
    type LoadModelStream = Boxed<LoadModelProgress>;
    type WatchEventsStream = Boxed<Event>;

    async fn list_devices(
        &self,
        _: Request<ListDevicesRequest>,
    ) -> Result<Response<ListDevicesResponse>, Status> {
        let now = |device: Device| Device {
            gauge: self.0.fleet.gauges.of(&device),
            ..device
        };
        let devices = self.0.fleet.devices().into_iter().map(now).collect();
        let confinement = self.0.confinement.to_vec();
        Ok(Response::new(ListDevicesResponse {
            devices,
            confinement,
        }))
    }

    async fn list_workers(
        &self,
        request: Request<ListWorkersRequest>,
    ) -> Result<Response<ListWorkersResponse>, Status> {
        let mut workers = self.0.fleet.workers_and_caches().await;
        if !Caller::of(request.extensions()).roles.has(Role::Debug) {
            let caches = workers.iter_mut().flat_map(|worker| &mut worker.caches);
            caches.for_each(|cache| cache.requests.clear());
        }
        Ok(Response::new(ListWorkersResponse { workers }))
    }

    async fn list_models(
        &self,
        _: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        let models = self.0.fleet.models();
        Ok(Response::new(ListModelsResponse { models }))
    }

    async fn load_model(
        &self,
        request: Request<LoadModelRequest>,
    ) -> Result<Response<Self::LoadModelStream>, Status> {
        let LoadModelRequest {
            name,
            path,
            serving,
            replace,
            on_request,
            change,
        } = request.get_ref();
        let (name, path) = wanted(name, path, is_remote(&request))?;
        let named = name.clone().or_else(|| name_of(path.as_deref()?).ok());
        if let Some(name) = named.filter(|name| self.0.graphs.has(name)) {
            let what = format!("{name} is the name of a saved graph; choose another one");
            return Err(Error::new(Reason::ModelExists, what)
                .with("model", &name)
                .into());
        }
        let who = self.asks(&request, name.as_ref())?;
        if self.0.admission.is_closed() {
            return Err(draining().into());
        }
        let serving = match (serving, change) {
            (Some(serving), None) => Some(Wanted::As(serving.clone())),
            (None, change) => change.clone().map(Wanted::With),
            (Some(_), Some(_)) => {
                let what =
                    "how a model is served and what changes of it are two ways to say one thing";
                return Err(Error::new(Reason::InvalidArgument, what).into());
            }
        };
        if let Some(serving) = &serving {
            serving.names()?;
        }
        if *on_request {
            return self.expect(name, path, serving);
        }
        let replaced = match (*replace, &name, &path) {
            (false, ..) => None,
            (true, Some(name), Some(path)) => Some((name.clone(), path.clone())),
            (true, ..) => {
                let what = "to replace a model, give its name and the path of the new one";
                return Err(Error::new(Reason::InvalidArgument, what).into());
            }
        };
        let (sender, receiver) = mpsc::channel(LOAD_BUFFER);
        let (fleet, abort) = (Arc::clone(&self.0.fleet), self.0.abort.clone());
        tokio::spawn(async move {
            let (progress, mut steps) = mpsc::channel(LOAD_BUFFER);
            let loading = async {
                match replaced {
                    Some((name, path)) => fleet.replace(who, name, path, serving, progress).await,
                    None => fleet.load_as(who, name, path, serving, progress).await,
                }
            };
            let forward = async {
                while let Some(step) = steps.recv().await {
                    let _ = sender.try_send(Ok(step));
                }
            };
            let both = async { tokio::join!(loading, forward).0 };
            let result = tokio::select! {
                result = both => result,
                () = abort.cancelled() => Err(draining()),
            };
            let last = result.map(|model| done(model, "loaded"));
            // An error means that the client left; the load went on without it.
            let _ = sender.send(last.map_err(Status::from)).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn unload_model(
        &self,
        request: Request<UnloadModelRequest>,
    ) -> Result<Response<UnloadModelResponse>, Status> {
        let name = ModelName::new(request.get_ref().name.as_str())?;
        let who = self.asks(&request, Some(&name))?;
        self.0.fleet.unload_for(&who, &name).await?;
        Ok(Response::new(UnloadModelResponse {}))
    }

    async fn inspect_model(
        &self,
        request: Request<InspectModelRequest>,
    ) -> Result<Response<Inspection>, Status> {
        let InspectModelRequest { name, path } = request.get_ref();
        let (name, path) = wanted(name, path, is_remote(&request))?;
        let who = self.asks(&request, name.as_ref())?;
        if self.0.admission.is_closed() {
            return Err(draining().into());
        }
        let deadline = deadline(request.metadata())?;
        let look = within(deadline, self.0.fleet.inspect_named(name, path, &who));
        tokio::select! {
            found = look => Ok(Response::new(found?)),
            () = self.0.abort.cancelled() => Err(draining().into()),
        }
    }

    async fn list_crashes(
        &self,
        _: Request<ListCrashesRequest>,
    ) -> Result<Response<ListCrashesResponse>, Status> {
        let crashes = self.0.fleet.crashes.list();
        Ok(Response::new(ListCrashesResponse { crashes }))
    }

    async fn get_crash(
        &self,
        request: Request<GetCrashRequest>,
    ) -> Result<Response<CrashReport>, Status> {
        let id = &request.get_ref().id;
        let crash = self.0.fleet.crashes.get(id)?;
        let (who, detail) = (who(&request), clip(id));
        self.0
            .fleet
            .audit_debug(&who, "crash", &crash.worker, detail);
        Ok(Response::new(crash))
    }

    async fn release_worker(
        &self,
        request: Request<ReleaseWorkerRequest>,
    ) -> Result<Response<ReleaseWorkerResponse>, Status> {
        self.0.fleet.release(&request.into_inner().worker)?;
        Ok(Response::new(ReleaseWorkerResponse {}))
    }

    async fn restart_worker(
        &self,
        request: Request<RestartWorkerRequest>,
    ) -> Result<Response<RestartWorkerResponse>, Status> {
        self.0
            .fleet
            .restart(&request.get_ref().worker, &who(&request))?;
        Ok(Response::new(RestartWorkerResponse {}))
    }

    async fn drain_worker(
        &self,
        request: Request<DrainWorkerRequest>,
    ) -> Result<Response<DrainWorkerResponse>, Status> {
        let DrainWorkerRequest {
            worker,
            patience_ms,
        } = request.get_ref();
        let patience = checked_patience(*patience_ms)?;
        self.0.fleet.drain(worker, patience, &who(&request))?;
        Ok(Response::new(DrainWorkerResponse {}))
    }

    async fn watch_events(
        &self,
        _: Request<WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let mut events = self.0.fleet.events.watch();
        let abort = self.0.abort.clone();
        // One: what waits for the watcher is in the broadcast, which counts what it misses.
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let event = tokio::select! {
                    () = abort.cancelled() => return,
                    () = sender.closed() => return,
                    event = events.recv() => match event {
                        Ok(event) => event,
                        Err(RecvError::Lagged(count)) => missed(count),
                        Err(RecvError::Closed) => return,
                    },
                };
                tokio::select! {
                    () = abort.cancelled() => return,
                    sent = sender.send(Ok(event)) => if sent.is_err() { return },
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}
