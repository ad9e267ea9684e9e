//! Which scheduler a command talks to, and that the model is there.

use std::io::Write;

use hotcell_proto::{
    error::{Error, Reason},
    v1::{LoadModelRequest, ModelInfo, ModelState},
};

use crate::{
    connect::{Address, Client, is_unknown_call, is_unreachable},
    control::unfinished_load,
    local::{Bundled, Launch, PrivateScheduler},
};

use super::{
    GlobalFlags,
    exit::Failure,
    flags::ModelRef,
    interrupt::Interrupt,
    json::LoadView,
    ui::{DIM, Ui, bar_style, one_line},
};

/// A connection, and the scheduler behind it if that is ours.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) client: Client,
    /// Whether paths mean the same there.
    local: bool,
    private: Option<PrivateScheduler>,
}

/// Where to look for a scheduler, and whether somebody said so.
fn address(flags: &GlobalFlags) -> Result<(Address, bool), Failure> {
    match &flags.address {
        Some(address) => Ok((address.clone(), true)),
        None => {
            let address = Address::from_environment();
            let address = address.map_err(|e| Failure::Usage(e.message().to_owned()))?;
            let said = address != Address::default_socket();
            Ok((address, said))
        }
    }
}

impl Session {
    /// A scheduler that runs already.
    pub(crate) async fn running(flags: &GlobalFlags) -> Result<Self, Failure> {
        let (address, _) = address(flags)?;
        Ok(Self {
            client: Client::connect_as(&address, &flags.identity(&address)?).await?,
            local: address.is_local(),
            private: None,
        })
    }

    /// A private scheduler with these flags; with the bundled model if one is given.
    pub(crate) async fn private(
        ui: &mut Ui,
        flags: Vec<std::ffi::OsString>,
        bundled: Option<Bundled>,
    ) -> Result<Self, Failure> {
        let mut launch = Launch::beside_this_program()?;
        (launch.flags, launch.bundled) = (flags, bundled);
        Self::started(ui, launch).await
    }

    async fn started(ui: &mut Ui, launch: Launch) -> Result<Self, Failure> {
        let bar = ui.progress("starting a private scheduler");
        let verbose = ui.manner.verbose;
        let show_line = move |line: &str| {
            if verbose {
                let _ = writeln!(std::io::stderr(), "scheduler: {line}");
            }
        };
        let started = PrivateScheduler::start(launch, show_line).await;
        bar.finish_and_clear();
        let (scheduler, client) = started?;
        Ok(Self {
            client,
            local: true,
            private: Some(scheduler),
        })
    }

    /// A scheduler that runs already, else a private one. One that was named must run, and have the bundled
    /// model if that is the one to use; another that lacks it is passed over.
    pub(crate) async fn running_or_private(
        ui: &mut Ui,
        flags: &GlobalFlags,
        private: bool,
        model: &ModelRef,
        bundled: Bundled,
    ) -> Result<Self, Failure> {
        if !private {
            let (address, said) = address(flags)?;
            match Self::running(flags).await {
                Err(Failure::Call(error)) if !said && is_unreachable(&error) => {}
                Ok(session) => match session.lacks(bundled.model, model).await {
                    None => return Ok(session),
                    Some(others) if said => {
                        return Err(not_there(&address, bundled.model, &others).into());
                    }
                    Some(_) if ui.manner.verbose => ui.note(
                        DIM,
                        &format!(
                            "the scheduler at {address} does not have the bundled model {}; using a private one",
                            bundled.model
                        ),
                    ),
                    Some(_) => {}
                },
                result => return result,
            }
        }
        let mut launch = Launch::beside_this_program()?;
        // Nobody else will ask this scheduler for anything but this model.
        launch.bundled = matches!(model, ModelRef::Name(_)).then_some(bundled);
        Self::started(ui, launch).await
    }

    /// The models this scheduler has, if `wanted` is the bundled one and not among them.
    async fn lacks(&self, bundled: &str, wanted: &ModelRef) -> Option<Vec<String>> {
        if !matches!(wanted, ModelRef::Name(name) if name == bundled) {
            return None;
        }
        // Whoever cannot list them is asked for the text anyway, and says itself what is wrong.
        let models = self.client.models().await.ok()?;
        let names: Vec<_> = models.into_iter().map(|m| m.name).collect();
        (!names.iter().any(|name| name == bundled)).then_some(names)
    }

    /// A path as this scheduler is to read it.
    ///
    /// # Errors
    /// As [`ModelRef::absolute`].
    pub(crate) fn path(&self, path: &str) -> Result<String, Failure> {
        match self.local {
            true => Ok(ModelRef::absolute(path)?),
            // Somewhere else, only that scheduler can tell what is there.
            false => Ok(path.to_owned()),
        }
    }

    /// What became of a private scheduler, if `error` is that it cannot be reached.
    pub(crate) async fn explain(&mut self, error: Error) -> Error {
        match &mut self.private {
            Some(scheduler) => scheduler.explain(error).await,
            None => error,
        }
    }

    /// Ends a private scheduler.
    pub(crate) async fn end(self) {
        drop(self.client);
        if let Some(scheduler) = self.private {
            scheduler.stop().await;
        }
    }

    /// Sees to it that `model` is loaded, and tells its name for requests. A worker run alone has its own model:
    /// it is asked for that unless `said` a name.
    pub(crate) async fn prepare(
        &mut self,
        ui: &mut Ui,
        interrupt: &mut Interrupt,
        model: &ModelRef,
        said: bool,
    ) -> Result<String, Failure> {
        let name = match model {
            ModelRef::Path(_) => {
                let request = LoadModelRequest::default();
                return Ok(self.load(ui, interrupt, model, request, false).await?.name);
            }
            ModelRef::Name(name) => name,
        };
        let models = match self.client.models().await {
            Ok(models) => models,
            Err(error) if is_unknown_call(&error) => {
                return Ok(if said { name.clone() } else { String::new() });
            }
            Err(error) => return Err(self.explain(error).await.into()),
        };
        let is_it = |m: &&ModelInfo| {
            let served = m.serving.as_ref();
            m.name == *name || served.is_some_and(|s| s.aliases.contains(name))
        };
        let found = models.iter().find(is_it);
        // One that sleeps the request itself wakes.
        let loaded =
            found.is_none_or(|m| matches!(m.state(), ModelState::Loaded | ModelState::Asleep));
        if !name.is_empty() && !loaded {
            self.load(ui, interrupt, model, LoadModelRequest::default(), false)
                .await?;
        }
        // A name nobody knows is the server's to refuse, with its list of what there is.
        Ok(name.clone())
    }

    /// Loads a model with a progress bar, or with a JSON line per step if `lines`.
    pub(crate) async fn load(
        &mut self,
        ui: &mut Ui,
        interrupt: &mut Interrupt,
        model: &ModelRef,
        request: LoadModelRequest,
        lines: bool,
    ) -> Result<ModelInfo, Failure> {
        let result = self.follow_load(ui, interrupt, model, request, lines).await;
        match result {
            Err(Failure::Call(error)) => Err(self.explain(error).await.into()),
            result => result,
        }
    }

    async fn follow_load(
        &self,
        ui: &mut Ui,
        interrupt: &mut Interrupt,
        model: &ModelRef,
        mut request: LoadModelRequest,
        lines: bool,
    ) -> Result<ModelInfo, Failure> {
        let label = match model {
            ModelRef::Name(known) => {
                request.name.clone_from(known);
                known
            }
            ModelRef::Path(path) => {
                request.path = self.path(path)?;
                path
            }
        };
        let bar = ui.progress(&format!("loading {label}"));
        bar.set_prefix("waiting for a worker");
        let steps = async {
            let mut progress = self.client.load_request(request).await?;
            while let Some(step) = progress.next().await {
                let step = step?;
                if lines && ui.manner.json {
                    ui.print_json(&LoadView::from(&step))?;
                }
                let stage = one_line(&format!("{} {}", step.stage, step.worker));
                if !stage.trim().is_empty() {
                    bar.set_prefix(stage);
                }
                if step.bytes_total > 0 {
                    if bar.length().is_none() {
                        bar.set_style(bar_style());
                    }
                    bar.set_length(step.bytes_total);
                    bar.set_position(step.bytes_done.min(step.bytes_total));
                }
                bar.tick();
                if step.done {
                    return Ok(step.model.unwrap_or_default());
                }
            }
            Err(Failure::Call(unfinished_load(self.client.peer())))
        };
        let result = tokio::select! {
            result = steps => result,
            () = interrupt.pressed() => Err(Failure::Interrupted),
        };
        bar.finish_and_clear();
        match (result, model) {
            (Err(Failure::Call(error)), ModelRef::Name(name))
                if error.reason() == Reason::ModelNotFound =>
            {
                Err(with_hint(error, name, "to load the files here, write ", "").into())
            }
            (result, _) => result,
        }
    }
}

/// The failure of `run` with the bundled model at a scheduler that was started without it.
fn not_there(address: &Address, model: &str, others: &[String]) -> Error {
    let others = match others {
        [] => String::new(),
        names => format!(" (it has {})", names.join(", ")),
    };
    let message = format!(
        "the scheduler at {address} does not have the bundled model {model}; \
         start it with `hotcell serve`, which hands it over, or name another with --model{others}"
    );
    Error::new(Reason::ModelNotFound, message).with("model", model)
}

/// Reminds of the file that lies here under a name that no model has, between the words that say what to do with its path.
pub(crate) fn with_hint(error: Error, name: &str, before: &str, after: &str) -> Error {
    if name.is_empty() || !std::path::Path::new(name).exists() {
        return error;
    }
    let path = match ModelRef::parse(name) {
        ModelRef::Name(name) => format!("./{name}"),
        ModelRef::Path(path) => path,
    };
    let message = format!("{}; {before}{path}{after}", error.message());
    let entries: Vec<(String, String)> = error
        .metadata()
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .collect();
    entries
        .into_iter()
        .fold(Error::new(error.reason(), message), |e, (k, v)| {
            e.with(k, v)
        })
}
