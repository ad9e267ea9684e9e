//! `hotcell-scheduler`: parses flags, sets up logging, runs the library.

use std::{io::IsTerminal, process::ExitCode};

use clap::Parser;
use hotcell_ipc::{spawn::Spawner, turns};
use hotcell_scheduler::{
    config::{Cli, Config, Surroundings},
    exit::{Exit, Failure},
    inherit::Inherited,
    run::run,
    takeover::{self, Left},
};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let ended = match takeover::asked() {
        Some(asked) => asked,
        // On this thread processes are started, so that they live on when this becomes another program.
        None => Spawner::host(start).unwrap_or_else(|e| {
            let why = format!("cannot start the scheduler's thread: {e}");
            Err(Failure::new(Exit::Internal, why))
        }),
    };
    match ended {
        Ok(()) => Exit::Ok.into(),
        Err(failure) => {
            eprintln!("error: {failure}");
            failure.exit.into()
        }
    }
}

fn start() -> Result<(), Failure> {
    // Before anything else is opened.
    let left = Left::take();
    let config = Config::load(Cli::parse(), &Surroundings::here())?;
    let inherited = Inherited::take(&config)?;
    log(&config)?;
    let left = left.unwrap_or_else(|why| {
        tracing::error!(
            why,
            "what the scheduler before this one left cannot be used; starting anew"
        );
        None
    });
    raise_file_limit();
    if let Err(error) = turns::take(turns::SHORT) {
        tracing::debug!(%error, "messages wait for the turns of those who compute");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads())
        .enable_all()
        .build()
        .map_err(|e| Failure::new(Exit::Internal, format!("cannot start the runtime: {e}")))?;
    let outcome = runtime.block_on(run(config, inherited, left));
    // Tasks that still run are of no use to anyone now.
    runtime.shutdown_background();
    outcome
}

/// Threads that move messages. Computing needs the cores more; and to pass a message on wakes several tasks in turn,
/// which costs little on one thread and a call of the system each where another is idle.
fn threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    (cores / 2).clamp(1, 16)
}

fn log(config: &Config) -> Result<(), Failure> {
    // HTTP/2's own talk drowns everything else and is of use to those who ask for it by name.
    let filter = format!("h2=warn,hyper=warn,tower=warn,{}", config.log);
    let filter = EnvFilter::try_new(&filter)
        .map_err(|e| Failure::new(Exit::Usage, format!("log filter {:?}: {e}", config.log)))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    if config.log_json {
        log.json().init();
    } else {
        log.with_ansi(std::io::stderr().is_terminal()).init();
    }
    Ok(())
}

/// Models' files, workers' sockets and clients' connections are many; the soft limit is often 1024.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
}
