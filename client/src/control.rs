//! Operating a scheduler: devices, workers, models, events.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    v1,
};
use tokio_stream::{Stream, StreamExt};
use tonic::{Response, Status, Streaming};

use crate::connect::{Client, read_status, schedulers_only};

/// A stream of messages, its failures typed. Dropping it ends the call.
#[derive(Debug)]
pub struct Messages<T> {
    stream: Streaming<T>,
    peer: String,
}

impl<T> Messages<T> {
    /// The next message; `None` when the stream is over.
    pub async fn next(&mut self) -> Option<Result<T, Error>> {
        StreamExt::next(self).await
    }
}

impl<T> Stream for Messages<T> {
    type Item = Result<T, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        Pin::new(&mut this.stream)
            .poll_next(context)
            .map(|item| item.map(|item| item.map_err(|status| read_status(&this.peer, &status))))
    }
}

impl Client {
    /// A call's answer, its failure typed.
    pub(crate) fn answer<T>(&self, result: Result<Response<T>, Status>) -> Result<T, Error> {
        result
            .map(Response::into_inner)
            .map_err(|status| read_status(self.peer(), &status))
    }

    /// As [`Client::answer`], for a call that only schedulers know; `lacks` is what a worker alone is told to.
    pub(crate) fn scheduler_answer<T>(
        &self,
        result: Result<Response<T>, Status>,
        lacks: &str,
    ) -> Result<T, Error> {
        self.answer(result)
            .map_err(|error| schedulers_only(error, lacks))
    }

    pub(crate) fn messages<T>(
        &self,
        result: Result<Response<Streaming<T>>, Status>,
        lacks: &str,
    ) -> Result<Messages<T>, Error> {
        Ok(Messages {
            stream: self.scheduler_answer(result, lacks)?,
            peer: self.peer().to_owned(),
        })
    }

    /// The devices of the scheduler's host.
    ///
    /// # Errors
    /// The server's.
    pub async fn devices(&self) -> Result<Vec<v1::Device>, Error> {
        let mut client = self.control_client();
        let response = client.list_devices(v1::ListDevicesRequest {}).await;
        let lacks = "has no list of devices";
        Ok(self.scheduler_answer(response, lacks)?.devices)
    }

    /// What a process could be confined by on the scheduler's host when it looked for devices; empty if it does not know.
    ///
    /// # Errors
    /// The server's.
    pub async fn host_confinement(&self) -> Result<Vec<v1::ConfinementLayer>, Error> {
        let mut client = self.control_client();
        let response = client.list_devices(v1::ListDevicesRequest {}).await;
        let lacks = "has no list of devices";
        Ok(self.scheduler_answer(response, lacks)?.confinement)
    }

    /// The worker processes, dead ones that will come back included.
    ///
    /// # Errors
    /// The server's.
    pub async fn workers(&self) -> Result<Vec<v1::WorkerInfo>, Error> {
        let mut client = self.control_client();
        let response = client.list_workers(v1::ListWorkersRequest {}).await;
        let lacks = "has no list of workers";
        Ok(self.scheduler_answer(response, lacks)?.workers)
    }

    /// The models that are loaded or configured.
    ///
    /// # Errors
    /// The server's.
    pub async fn models(&self) -> Result<Vec<v1::ModelInfo>, Error> {
        let mut client = self.control_client();
        let response = client.list_models(v1::ListModelsRequest {}).await;
        let lacks = "has no list of models";
        Ok(self.scheduler_answer(response, lacks)?.models)
    }

    /// Loads a model on every worker: a folder or `.gguf` file as the scheduler sees it, or, with an empty
    /// `path`, the configured model of this name. An empty `name` is made from the path.
    ///
    /// # Errors
    /// The server's, where it refuses at once; a later failure comes through the stream.
    pub async fn load_progress(
        &self,
        name: &str,
        path: &str,
    ) -> Result<Messages<v1::LoadModelProgress>, Error> {
        self.load_request(v1::LoadModelRequest {
            name: name.to_owned(),
            path: path.to_owned(),
            ..v1::LoadModelRequest::default()
        })
        .await
    }

    /// The same with all that can be said: how the model is served, whether it takes another one's place, and whether it is
    /// loaded with its first request only.
    ///
    /// # Errors
    /// As [`Client::load_progress`].
    pub async fn load_request(
        &self,
        request: v1::LoadModelRequest,
    ) -> Result<Messages<v1::LoadModelProgress>, Error> {
        let response = self.control_client().load_model(request).await;
        self.messages(response, "keeps the model it was started with")
    }

    /// Loads a model as [`Client::load_progress`] does, and waits for the end.
    ///
    /// # Errors
    /// The server's, and [`Reason::ProtocolViolation`] for a stream without its last event.
    pub async fn load(&self, name: &str, path: &str) -> Result<v1::ModelInfo, Error> {
        let mut progress = self.load_progress(name, path).await?;
        while let Some(step) = progress.next().await {
            let step = step?;
            if step.done {
                return Ok(step.model.unwrap_or_default());
            }
        }
        Err(unfinished_load(self.peer()))
    }

    /// Has the scheduler look into a model in a throw-away worker: a folder or `.gguf` file as the scheduler sees it, or,
    /// with an empty `path`, the configured model of this name. That it is no model, or kills its worker, is a verdict.
    ///
    /// # Errors
    /// The server's, [`Reason::FileNotFound`] and [`Reason::ModelNotFound`] among them.
    pub async fn inspect(&self, name: &str, path: &str) -> Result<v1::Inspection, Error> {
        let request = v1::InspectModelRequest {
            path: path.to_owned(),
            name: name.to_owned(),
        };
        let response = self.control_client().inspect_model(request).await;
        self.scheduler_answer(response, "looks into no models")
    }

    /// Takes a model from the workers. Its name stays usable if it is configured.
    ///
    /// # Errors
    /// The server's.
    pub async fn unload(&self, name: &str) -> Result<(), Error> {
        let request = v1::UnloadModelRequest {
            name: name.to_owned(),
        };
        let response = self.control_client().unload_model(request).await;
        self.scheduler_answer(response, "keeps the model it was started with")
            .map(|_| ())
    }

    /// Lets a worker out of quarantine.
    ///
    /// # Errors
    /// The server's.
    pub async fn release(&self, worker: &str) -> Result<(), Error> {
        let request = v1::ReleaseWorkerRequest {
            worker: worker.to_owned(),
        };
        let response = self.control_client().release_worker(request).await;
        self.scheduler_answer(response, "has no quarantine")
            .map(|_| ())
    }

    /// Has another process take a worker's place; what it computed goes on there.
    ///
    /// # Errors
    /// The server's.
    pub async fn restart(&self, worker: &str) -> Result<(), Error> {
        let request = v1::RestartWorkerRequest {
            worker: worker.to_owned(),
        };
        let response = self.control_client().restart_worker(request).await;
        self.scheduler_answer(response, "restarts none").map(|_| ())
    }

    /// Gives a worker no new requests until it is released or restarted. What it runs has so long (whole milliseconds) to
    /// end; what still runs then goes on elsewhere.
    ///
    /// # Errors
    /// The server's.
    pub async fn drain(&self, worker: &str, within: Duration) -> Result<(), Error> {
        let request = v1::DrainWorkerRequest {
            worker: worker.to_owned(),
            // None at all would mean as long as the server likes.
            patience_ms: u32::try_from(within.as_millis().max(1)).unwrap_or(u32::MAX),
        };
        let response = self.control_client().drain_worker(request).await;
        self.scheduler_answer(response, "drains none").map(|_| ())
    }

    /// What is known about the workers that died lately, the newest first; [`Client::crash`] tells all of one.
    ///
    /// # Errors
    /// The server's.
    pub async fn crashes(&self) -> Result<Vec<v1::CrashReport>, Error> {
        let mut client = self.control_client();
        let response = client.list_crashes(v1::ListCrashesRequest {}).await;
        let lacks = "keeps no crash reports";
        Ok(self.scheduler_answer(response, lacks)?.crashes)
    }

    /// All that is known about one death.
    ///
    /// # Errors
    /// The server's, [`Reason::CrashNotFound`] among them.
    pub async fn crash(&self, id: &str) -> Result<v1::CrashReport, Error> {
        let request = v1::GetCrashRequest { id: id.to_owned() };
        let response = self.control_client().get_crash(request).await;
        self.scheduler_answer(response, "keeps no crash reports")
    }

    /// What happens from now on.
    ///
    /// # Errors
    /// The server's.
    pub async fn watch(&self) -> Result<Messages<v1::Event>, Error> {
        let mut client = self.control_client();
        let response = client.watch_events(v1::WatchEventsRequest {}).await;
        self.messages(response, "has no list of events")
    }
}

/// The failure of a load whose stream ended without its last event.
pub(crate) fn unfinished_load(peer: &str) -> Error {
    Error::new(
        Reason::ProtocolViolation,
        format!("{peer} stopped loading without saying why; look into its log"),
    )
}
