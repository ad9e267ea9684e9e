//! Where a capture's request is run again to be compared: on a running scheduler's workers, or on a private one's.

use std::{
    ffi::OsString,
    path::PathBuf,
    time::{Duration, Instant},
};

use clap::Args;
use hotcell_proto::{
    error::{Error, Reason},
    v1::{
        CaptureOptions, GenerateRequest, ReplayRequest, WorkerInfo, WorkerState,
        replay_request::Which,
    },
};

use super::told::follow;
use crate::{
    cli::{
        GlobalFlags, exit::Failure, flags::ModelRef, interrupt::Interrupt, session::Session, ui::Ui,
    },
    connect::Client,
    debug::Recording,
    local::Bundled,
    tensor::{self, SessionOptions},
};

/// How long a worker of a scheduler of its own may take to be ready, and how often it is looked at.
const READY: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);

/// What differs between the sides: each may be given twice.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "What is compared")]
pub struct SideFlags {
    /// Run it again on a device of this backend, as `hotcell devices` shows it
    #[arg(long = "backend", value_name = "NAME", num_args = 1)]
    pub backends: Vec<String>,
    /// Run it again on the device of this worker
    #[arg(short, long = "worker", value_name = "NAME", num_args = 1)]
    pub workers: Vec<String>,
    /// Run it again with this worker's program, under a scheduler of its own
    #[arg(long = "program", value_name = "PATH", num_args = 1)]
    pub programs: Vec<PathBuf>,
    /// Run it again with this model, a folder or a .gguf file, under a scheduler of its own
    #[arg(long = "model-path", value_name = "PATH", num_args = 1)]
    pub models: Vec<String>,
    /// Run it again with a cache of this dtype, under a scheduler of its own
    #[arg(long = "kv-cache", value_name = "DTYPE", num_args = 1)]
    pub caches: Vec<String>,
}

/// One side's flags.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Wanted {
    backend: Option<String>,
    worker: Option<String>,
    program: Option<PathBuf>,
    model: Option<String>,
    cache: Option<String>,
}

impl SideFlags {
    /// How many sides they are: none, one or two.
    pub(super) fn count(&self) -> usize {
        let counts = [
            self.backends.len(),
            self.workers.len(),
            self.programs.len(),
            self.models.len(),
            self.caches.len(),
        ];
        counts.into_iter().max().unwrap_or(0)
    }

    /// Whether a side has a scheduler of its own, so that nobody else is served by its workers.
    pub(super) fn is_private(&self, side: usize) -> bool {
        self.wanted(side).is_private()
    }

    /// What is given once holds for both.
    fn wanted(&self, side: usize) -> Wanted {
        fn of<T: Clone>(all: &[T], side: usize) -> Option<T> {
            all.get(side).or_else(|| all.first()).cloned()
        }
        Wanted {
            backend: of(&self.backends, side),
            worker: of(&self.workers, side),
            program: of(&self.programs, side),
            model: of(&self.models, side),
            cache: of(&self.caches, side),
        }
    }
}

/// A side that is ready.
#[derive(Debug)]
pub(super) struct Side {
    /// What it is, in words.
    pub(super) label: String,
    session: Session,
    worker: String,
    /// The model's name there.
    model: String,
}

impl Wanted {
    fn label(&self) -> String {
        let program = self.program.as_ref().map(|p| p.display().to_string());
        let parts = [
            &self.backend,
            &self.worker,
            &program,
            &self.model,
            &self.cache,
        ];
        let parts: Vec<&str> = parts.into_iter().flatten().map(String::as_str).collect();
        parts.join(" ")
    }

    fn is_private(&self) -> bool {
        self.program.is_some() || self.model.is_some() || self.cache.is_some()
    }

    async fn session(
        &self,
        ui: &mut Ui,
        global: &GlobalFlags,
        name: Option<&str>,
        bundled: Bundled,
    ) -> Result<Session, Failure> {
        if !self.is_private() {
            return Session::running(global).await;
        }
        let mut flags: Vec<OsString> = Vec::new();
        if let Some(program) = &self.program {
            let path = std::path::absolute(program).unwrap_or_else(|_| program.clone());
            flags.extend(["--worker-binary".into(), path.into()]);
        }
        if let Some(cache) = &self.cache {
            flags.extend(["--kv-cache".into(), cache.into()]);
        }
        if self.backend.as_deref() == Some("cpu") {
            flags.extend(["--devices".into(), "cpu:1".into()]);
        }
        let is_bundled = self.model.is_none() && name == Some(bundled.model);
        let session = Session::private(ui, flags, is_bundled.then_some(bundled)).await?;
        let Some(name) = name else {
            // A load waits for its worker; others are told that there is none yet.
            any_ready(&session).await?;
            return Ok(session);
        };
        match &self.model {
            Some(path) => {
                let path = ModelRef::absolute(path)?;
                session.client.load(name, &path).await?;
            }
            None if is_bundled => {
                session.client.load(name, "").await?;
            }
            None => {
                let what = format!(
                    "the capture is of the model {name}, which a scheduler of its own does not have; say where it is with --model-path"
                );
                return Err(Failure::Usage(what));
            }
        }
        Ok(session)
    }

    /// The worker whose device is meant; empty: any.
    async fn worker(&self, session: &Session) -> Result<String, Failure> {
        let named = self.worker.as_deref();
        match &self.backend {
            Some(backend) => worker_of(&session.client, backend, named).await,
            None => Ok(named.unwrap_or_default().to_owned()),
        }
    }
}

/// A worker that is ready on a device of this backend: the one that is named, if one is.
///
/// # Errors
/// [`Reason::NoWorker`] naming the backends that there are.
pub(super) async fn worker_of(
    client: &Client,
    backend: &str,
    named: Option<&str>,
) -> Result<String, Failure> {
    let (devices, workers) = tokio::try_join!(client.devices(), client.workers())?;
    let its = |worker: &&WorkerInfo| {
        let lease = worker.lease.as_ref();
        let device = lease.and_then(|l| devices.iter().find(|d| d.id == l.device));
        device.is_some_and(|device| device.backend == *backend)
            && worker.state() == WorkerState::Ready
            && named.is_none_or(|named| named == worker.id)
    };
    let found = workers.iter().find(its).map(|worker| worker.id.clone());
    found.ok_or_else(|| {
        let mut known: Vec<&str> = devices.iter().map(|d| d.backend.as_str()).collect();
        known.sort_unstable();
        known.dedup();
        let which = named.map_or_else(
            || "no worker".to_owned(),
            |named| format!("no worker {named:?}"),
        );
        let what = format!(
            "{which} is ready on a device of the backend {backend:?}; there are devices of {}",
            known.join(", ")
        );
        Failure::Call(Error::new(Reason::NoWorker, what))
    })
}

/// Waits until one of a scheduler's workers is ready.
async fn any_ready(session: &Session) -> Result<(), Failure> {
    let begun = Instant::now();
    loop {
        let workers = session.client.workers().await?;
        if workers.iter().any(|w| w.state() == WorkerState::Ready) {
            return Ok(());
        }
        if begun.elapsed() > READY {
            let what = format!(
                "no worker of a scheduler of its own is ready after {} s",
                READY.as_secs()
            );
            return Err(Failure::Call(Error::new(Reason::NoWorker, what)));
        }
        tokio::time::sleep(POLL).await;
    }
}

impl Side {
    /// The side of this number, ready to run what a model of this name computed; without a name, ready for graphs.
    pub(super) async fn prepare(
        ui: &mut Ui,
        global: &GlobalFlags,
        (flags, side): (&SideFlags, usize),
        name: Option<&str>,
        bundled: Bundled,
    ) -> Result<Self, Failure> {
        let wanted = flags.wanted(side);
        let session = wanted.session(ui, global, name, bundled).await?;
        Ok(Self {
            label: wanted.label(),
            worker: wanted.worker(&session).await?,
            session,
            model: name.unwrap_or_default().to_owned(),
        })
    }

    /// A session of tensors on its worker.
    pub(super) async fn tensors(&self) -> Result<tensor::Session, Failure> {
        let options = SessionOptions {
            name: "debug".to_owned(),
            worker: Some(self.worker.clone()).filter(|worker| !worker.is_empty()),
            ..SessionOptions::default()
        };
        Ok(tensor::Session::over(&self.session.client, options).await?)
    }

    /// What it computes for a request from this token of its answer on.
    pub(super) async fn replay(
        &mut self,
        (request, at): (&GenerateRequest, u64),
        options: CaptureOptions,
        interrupt: &mut Interrupt,
    ) -> Result<Recording, Failure> {
        let request = ReplayRequest {
            worker: self.worker.clone(),
            at,
            options: Some(options),
            which: Some(Which::Request(GenerateRequest {
                model: self.model.clone(),
                ..request.clone()
            })),
            ..ReplayRequest::default()
        };
        let starting = self.session.client.replay(request);
        let messages = tokio::select! {
            messages = starting => messages,
            () = interrupt.pressed() => return Err(Failure::Interrupted),
        };
        match messages {
            Ok(messages) => follow(messages, interrupt, |_, _| Ok(())).await,
            Err(error) => Err(self.session.explain(error).await.into()),
        }
    }

    /// Ends a scheduler of its own.
    pub(super) async fn end(self) {
        self.session.end().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_once_holds_for_both_sides() {
        let none = SideFlags::default();
        assert_eq!((none.count(), none.wanted(0).is_private()), (0, false));
        let flags = SideFlags {
            backends: vec!["cpu".into(), "mlx".into()],
            models: vec!["m.gguf".into()],
            ..none
        };
        assert_eq!(flags.count(), 2);
        let [one, two] = [0, 1].map(|side| flags.wanted(side));
        assert_eq!(
            (one.label(), two.label()),
            ("cpu m.gguf".into(), "mlx m.gguf".into())
        );
        assert!(one.is_private());
    }
}
