//! Commands that operate a scheduler or ask it something once.

use std::{ffi::OsString, time::Duration};

use clap::{Args, CommandFactory};
use clap_complete::Shell;
use hotcell_proto::v1;
use serde_json::json;

use crate::{
    connect::Address,
    local::{Bundled, Launch},
};

use super::{
    Cli, GlobalFlags,
    exit::Failure,
    flags::{ModelRef, PromptFlags, duration},
    interrupt::Interrupt,
    json::{self, DeviceView, ModelView, WatchView, WorkerView},
    session::Session,
    table::{Table, bytes, count, span, time_of_day},
    ui::{DIM, Ui, one_line},
};

/// `hotcell serve`.
#[derive(Args, Clone, Debug)]
pub struct ServeFlags {
    /// Flags of hotcell-scheduler, passed on as they are; see `hotcell serve -- --help`
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "SCHEDULER FLAGS"
    )]
    pub flags: Vec<OsString>,
}

/// `hotcell load`.
#[derive(Args, Clone, Debug)]
pub struct LoadFlags {
    /// A folder or .gguf file as the scheduler sees it, or the name of a configured model
    #[arg(value_name = "PATH-or-NAME")]
    pub model: String,
    /// The name requests will use [default: the last part of the path without its extension]
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    pub name: String,
    /// Put it in the place of the model that has this name: requests go to it once it is ready, the other one ends with its last
    #[arg(long, requires = "name")]
    pub replace: bool,
    /// Only make it known: its first request loads it
    #[arg(long, conflicts_with = "replace")]
    pub on_request: bool,
    /// Devices that have it, a number or all [default: all]
    #[arg(long, value_name = "N", value_parser = replicas)]
    pub replicas: Option<u32>,
    /// How long it stays in memory after its last request, for example 10m [default: until others need the room]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub keep_alive: Option<Duration>,
    /// Never take it out of memory to make room for others; --pin=false: no more
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", conflicts_with_all = ["keep_alive", "on_request"])]
    pub pin: Option<bool>,
    /// A further name that requests may use; may be given several times. Those it had are gone then
    #[arg(long, value_name = "NAME")]
    pub alias: Vec<String>,
    /// Requests for it that run at once, over all workers; 0: as many as they take, which is the default
    #[arg(long, value_name = "N")]
    pub max_running: Option<u32>,
    /// Tokens of one sequence, prompt and answer together; 0: as many as the model can, which is the default
    #[arg(long, value_name = "N")]
    pub max_context: Option<u32>,
}

impl LoadFlags {
    /// What is said of how it is to be served; the rest stays as it is.
    fn change(&self) -> Option<v1::ServingChange> {
        let keep = self.keep_alive.map(|keep| keep.as_millis());
        let change = v1::ServingChange {
            replicas: self.replicas,
            keep_alive_ms: keep.map(|ms| u64::try_from(ms).unwrap_or(u64::MAX)),
            pinned: self.pin,
            aliases: self.alias.clone(),
            max_running: self.max_running,
            max_context: self.max_context,
        };
        (change != v1::ServingChange::default()).then_some(change)
    }
}

/// A number of devices; 0 for all.
fn replicas(text: &str) -> Result<u32, String> {
    let number = text.parse::<u32>().ok().filter(|n| *n > 0);
    match text {
        "all" => Ok(0),
        _ => number.ok_or_else(|| "neither all nor a number of devices".to_owned()),
    }
}

/// `hotcell unload`.
#[derive(Args, Clone, Debug)]
pub struct UnloadFlags {
    /// The model's name
    pub name: String,
}

/// `hotcell tokenize`.
#[derive(Args, Clone, Debug)]
pub struct TokenizeFlags {
    /// What to tokenise.
    #[command(flatten)]
    pub prompt: PromptFlags,
    /// Name of a loaded model [default: the scheduler's default]
    #[arg(
        short,
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    pub model: String,
    /// Leave out tokens that the model would add by itself
    #[arg(long)]
    pub no_special: bool,
}

/// `hotcell detokenize`.
#[derive(Args, Clone, Debug)]
pub struct DetokenizeFlags {
    /// Token ids, separated by spaces or commas
    #[arg(required = true, value_delimiter = ',')]
    pub ids: Vec<u32>,
    /// Name of a loaded model [default: the scheduler's default]
    #[arg(
        short,
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    pub model: String,
    /// Show special tokens instead of leaving them out
    #[arg(long)]
    pub special: bool,
}

/// `hotcell completions`.
#[derive(Args, Clone, Debug)]
pub struct CompletionsFlags {
    /// The shell
    pub shell: Shell,
}

/// Whether the scheduler's own flags hold this one.
fn says(flags: &[OsString], flag: &str) -> bool {
    flags.iter().any(|given| {
        let given = given.to_string_lossy();
        let rest = given.strip_prefix(flag);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    })
}

/// What the scheduler is to be told about where to listen, unless its own flags say so.
fn doors(address: Option<&Address>, flags: &[OsString]) -> Vec<OsString> {
    match address {
        Some(Address::Unix(path)) if !says(flags, "--socket") => {
            vec!["--socket".into(), path.into()]
        }
        Some(Address::Tcp(authority) | Address::Tls(authority)) if !says(flags, "--listen") => {
            vec!["--listen".into(), Address::listen_flag(authority).into()]
        }
        _ => Vec::new(),
    }
}

/// All flags of the scheduler: those that ours mean, then its own.
fn scheduler_flags(address: Option<&Address>, json: bool, own: &[OsString]) -> Vec<OsString> {
    let mut flags = doors(address, own);
    if json && !says(own, "--log-json") {
        flags.push("--log-json".into());
    }
    flags.extend(own.iter().cloned());
    flags
}

/// Becomes the scheduler; returns only on failure.
pub(crate) fn serve(global: &GlobalFlags, flags: &ServeFlags, bundled: Bundled) -> Failure {
    let address = match &global.address {
        Some(address) => Ok(address.clone()),
        None => Address::from_environment(),
    };
    let address = match address {
        Ok(address) => address,
        Err(error) => return Failure::Usage(error.message().to_owned()),
    };
    let mut launch = match Launch::beside_this_program() {
        Ok(launch) => launch,
        Err(error) => return error.into(),
    };
    launch.bundled = Some(bundled);
    // The default is the scheduler's own too, and its config file may have another.
    let said = (address != Address::default_socket()).then_some(&address);
    launch.flags = scheduler_flags(said, global.json, &flags.flags);
    launch.become_scheduler().into()
}

pub(crate) async fn load(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &LoadFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let mut session = Session::running(global).await?;
    let model = match ModelRef::parse(&flags.model) {
        ModelRef::Name(_) if !flags.name.is_empty() => {
            return Err(Failure::Usage(format!(
                "--name goes with a path; to load files here, write ./{}",
                flags.model
            )));
        }
        model => model,
    };
    let request = v1::LoadModelRequest {
        name: flags.name.clone(),
        change: flags.change(),
        replace: flags.replace,
        on_request: flags.on_request,
        ..v1::LoadModelRequest::default()
    };
    let info = session.load(ui, interrupt, &model, request, true).await?;
    if ui.manner.json {
        return Ok(());
    }
    if info.state() == v1::ModelState::Asleep {
        return ui.print(&format!(
            "{}: its first request loads it\n",
            one_line(&info.name)
        ));
    }
    let summary = info.summary.unwrap_or_default();
    let line = format!(
        "{}: {} with {} parameters, context {}, {}, {} on {}\n",
        info.name,
        summary.architecture,
        count(summary.parameters),
        summary.context_length,
        summary.weights_dtype,
        bytes(info.file_bytes),
        info.workers.join(", "),
    );
    ui.print(&format!("{}\n", one_line(line.trim_end())))
}

pub(crate) async fn unload(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &UnloadFlags,
) -> Result<(), Failure> {
    let session = Session::running(global).await?;
    session.client.unload(&flags.name).await?;
    if ui.manner.json {
        ui.print_json(&json!({ "unloaded": flags.name }))
    } else {
        ui.print(&format!("unloaded {}\n", flags.name))
    }
}

/// A worker's state as people see it: one that serves may be at work.
pub(super) fn state(worker: &v1::WorkerInfo) -> String {
    match worker.state() {
        v1::WorkerState::Ready if worker.running_requests > 0 => "busy".to_owned(),
        _ => json::worker_state(worker.state),
    }
}

pub(crate) async fn workers(ui: &mut Ui, global: &GlobalFlags) -> Result<(), Failure> {
    let workers = Session::running(global).await?.client.workers().await?;
    if ui.manner.json {
        let views: Vec<_> = workers.iter().map(WorkerView::from).collect();
        return ui.print_json(&json!({ "workers": views }));
    }
    let mut table = Table::new(&[
        "WORKER",
        "DEVICE",
        "PID",
        "STATE",
        "EPOCH",
        "MODELS",
        "RUNNING",
        "OUTSTANDING",
        "DEATHS",
        "RSS",
        "UPTIME",
        "LAST EXIT",
    ]);
    for w in &workers {
        // Without a process there is nothing to measure.
        let alive = |text: String| if w.pid == 0 { String::new() } else { text };
        table.row([
            w.id.clone(),
            w.lease
                .as_ref()
                .map(|l| l.device.clone())
                .unwrap_or_default(),
            alive(w.pid.to_string()),
            state(w),
            w.epoch.to_string(),
            w.models.join(","),
            w.running_requests.to_string(),
            w.outstanding_tokens.to_string(),
            w.deaths.to_string(),
            alive(bytes(w.resident_bytes)),
            alive(span(w.uptime_ms)),
            w.last_exit.clone(),
        ]);
    }
    table.print(ui, "there are no workers")?;
    if ui.manner.verbose {
        for w in &workers {
            ui.note(DIM, &one_line(&format!("{}: {}", w.id, w.confinement)));
            for cache in &w.caches {
                ui.note(DIM, &one_line(&format!("{}: {}", w.id, cache_line(cache))));
                for request in &cache.requests {
                    ui.note(
                        DIM,
                        &one_line(&format!("{}: {}", w.id, memory_line(request))),
                    );
                }
            }
        }
    }
    Ok(())
}

/// What is in one model's cache.
fn cache_line(cache: &v1::CacheStatus) -> String {
    format!(
        "{} has {} of {} cache blocks ({}), {} more are kept; {} of {} prompt tokens were there already",
        cache.model,
        cache.used_blocks,
        cache.blocks,
        bytes(cache.bytes),
        cache.kept_blocks,
        cache.cached_tokens,
        cache.prompt_tokens,
    )
}

/// What one request has of a cache.
fn memory_line(request: &v1::RequestMemory) -> String {
    let name = match request.request_id.as_str() {
        "" => "an embedding",
        id => id,
    };
    format!(
        "{name} has {} blocks ({}) for {} tokens",
        request.blocks,
        bytes(request.bytes),
        request.tokens,
    )
}

pub(crate) async fn devices(ui: &mut Ui, global: &GlobalFlags) -> Result<(), Failure> {
    let devices = Session::running(global).await?.client.devices().await?;
    if ui.manner.json {
        let views: Vec<_> = devices.iter().map(DeviceView::from).collect();
        return ui.print_json(&json!({ "devices": views }));
    }
    let mut heading = vec![
        "DEVICE",
        "BACKEND",
        "PATH",
        "CORES",
        "MEMORY",
        "DESCRIPTION",
        "PROBLEM",
    ];
    let told = devices.iter().any(|d| d.gauge.is_some());
    if told {
        heading.push("NOW");
    }
    let mut table = Table::new(&heading);
    for d in &devices {
        let mut cells = vec![
            d.id.clone(),
            d.backend.clone(),
            d.path.clone(),
            d.cores.len().to_string(),
            bytes(d.memory_bytes),
            DeviceView::described(d, &devices),
            d.problem.clone(),
        ];
        if told {
            cells.push(d.gauge.as_ref().map(now).unwrap_or_default());
        }
        table.row(cells);
    }
    table.print(ui, "there are no devices")
}

/// How a device is, in a line.
fn now(gauge: &v1::DeviceGauge) -> String {
    let faults = gauge.faults.last().map(|fault| match fault.what.as_str() {
        "" => format!("fault {}", fault.code),
        what => what.to_owned(),
    });
    let errors = gauge.ecc_uncorrected.filter(|n| *n > 0);
    let parts = [
        gauge.utilization.map(|n| format!("{:.0} %", n * 100.0)),
        (gauge.memory_used_bytes).map(|n| format!("{} used", bytes(n))),
        gauge.temperature.map(|n| format!("{n:.0} °C")),
        gauge.power_watts.map(|n| format!("{n:.0} W")),
        errors.map(|n| format!("{n} memory errors")),
        faults,
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

pub(crate) async fn models(ui: &mut Ui, global: &GlobalFlags) -> Result<(), Failure> {
    let models = Session::running(global).await?.client.models().await?;
    if ui.manner.json {
        let views: Vec<_> = models.iter().map(ModelView::from).collect();
        return ui.print_json(&json!({ "models": views }));
    }
    let mut table = Table::new(&[
        "MODEL",
        "STATE",
        "SERVED",
        "ARCHITECTURE",
        "PARAMETERS",
        "CONTEXT",
        "DTYPE",
        "SIZE",
        "WORKERS",
        "DOMAIN",
        "SOURCE",
        "PROBLEM",
    ]);
    for m in &models {
        let summary = m.summary.clone().unwrap_or_default();
        let mark = if m.is_default { " (default)" } else { "" };
        table.row([
            format!("{}{mark}", m.name),
            json::model_state(m.state),
            served(m),
            summary.architecture,
            count(summary.parameters),
            count_or_nothing(summary.context_length),
            summary.weights_dtype,
            bytes(m.file_bytes),
            m.workers.join(","),
            m.trust_domain.clone(),
            m.source.clone(),
            problem(m),
        ]);
    }
    table.print(ui, "there are no models; load one with `hotcell load PATH`")
}

/// How it is served, where that is not as usual.
fn served(model: &v1::ModelInfo) -> String {
    let Some(serving) = &model.serving else {
        return String::new();
    };
    let mut words = Vec::new();
    let mut say = |said: bool, word: String| words.extend(said.then_some(word));
    say(serving.replicas > 0, format!("on {}", serving.replicas));
    say(serving.pinned, "pinned".to_owned());
    let keep = span(serving.keep_alive_ms.unwrap_or(0));
    say(serving.keep_alive_ms.is_some(), format!("for {keep}"));
    say(
        serving.max_running > 0,
        format!("{} at once", serving.max_running),
    );
    say(
        serving.max_context > 0,
        format!("{} tokens", serving.max_context),
    );
    say(
        !serving.aliases.is_empty(),
        format!("as {}", serving.aliases.join(",")),
    );
    words.join("; ")
}

/// Why it could not be loaded, or why it is computed from as it is.
fn problem(model: &v1::ModelInfo) -> String {
    let failed = |p: &&v1::PackedInfo| p.state() == v1::PackedState::Failed;
    match model.packed.iter().find(failed) {
        Some(packed) if model.problem.is_empty() => format!("unpacked: {}", packed.problem),
        _ => model.problem.clone(),
    }
}

fn count_or_nothing(n: u32) -> String {
    if n == 0 { String::new() } else { n.to_string() }
}

pub(crate) async fn watch(
    ui: &mut Ui,
    global: &GlobalFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let session = Session::running(global).await?;
    let mut events = session.client.watch().await?;
    loop {
        let event = tokio::select! {
            event = events.next() => event.transpose()?,
            () = interrupt.pressed() => return Err(Failure::Interrupted),
        };
        let Some(event) = event else {
            return Ok(());
        };
        if ui.manner.json {
            ui.print_json(&WatchView::from(&event))?;
        } else {
            ui.print(&format!("{}\n", one_line(&event_line(&event))))?;
        }
    }
}

pub(super) fn event_line(event: &v1::Event) -> String {
    let mut line = format!(
        "{}  {}",
        time_of_day(event.time_ms),
        json::event_kind(event.kind)
    );
    if !event.worker.is_empty() {
        line.push_str(&format!("  {} epoch {}", event.worker, event.epoch));
    }
    for part in [&event.model, &event.message] {
        if !part.is_empty() {
            line.push_str("  ");
            line.push_str(part);
        }
    }
    line
}

pub(crate) async fn tokenize(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &TokenizeFlags,
) -> Result<(), Failure> {
    let prompt = flags.prompt.read(ui)?;
    let session = Session::running(global).await?;
    let answer = session
        .client
        .tokenize(&flags.model, prompt, flags.no_special)
        .await?;
    if ui.manner.json {
        return ui.print_json(&json!({
            "model": answer.model,
            "ids": answer.ids,
            "text": answer.text,
        }));
    }
    let ids: Vec<String> = answer.ids.iter().map(u32::to_string).collect();
    ui.print(&format!("{}\n", ids.join(" ")))
}

pub(crate) async fn detokenize(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &DetokenizeFlags,
) -> Result<(), Failure> {
    let session = Session::running(global).await?;
    let ids = flags.ids.clone();
    let text = session
        .client
        .detokenize(&flags.model, ids, flags.special)
        .await?;
    if ui.manner.json {
        return ui.print_json(&json!({ "text": text }));
    }
    ui.print_text(&text)?;
    ui.print("\n")
}

pub(crate) fn completions(ui: &mut Ui, flags: &CompletionsFlags) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(flags.shell, &mut Cli::command(), "hotcell", &mut script);
    ui.print_bytes(&script)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_becomes_the_door_unless_flags_name_one() {
        let unix: Address = "unix:/run/h.sock".parse().unwrap();
        let tcp: Address = "127.0.0.1:4100".parse().unwrap();
        assert_eq!(doors(Some(&unix), &[]), ["--socket", "/run/h.sock"]);
        assert_eq!(
            doors(Some(&tcp), &["--devices".into()]),
            ["--listen", "127.0.0.1:4100"]
        );
        assert!(doors(Some(&unix), &["--socket=/x".into()]).is_empty());
        assert!(doors(Some(&tcp), &["--listen".into(), "[::1]:1".into()]).is_empty());
        assert!(doors(None, &[]).is_empty());
        let name: Address = "localhost:4100".parse().unwrap();
        assert_eq!(doors(Some(&name), &[]), ["--listen", "127.0.0.1:4100"]);
    }

    #[test]
    fn json_asks_for_a_json_log_once() {
        let own = ["--devices".into(), "cpu:2".into()];
        assert_eq!(
            scheduler_flags(None, true, &own),
            ["--log-json", "--devices", "cpu:2"]
        );
        assert_eq!(scheduler_flags(None, false, &own), own);
        let own = ["--log-json=false".into()];
        assert_eq!(scheduler_flags(None, true, &own), own);
    }
}
