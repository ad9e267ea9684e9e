//! The `hotcell` command.
//!
//! [`main`] is the whole program but the bundled model's bytes; [`run`] is one command with its input and output
//! given, for tests.

mod bench;
mod chat;
mod crashes;
mod debug;
mod doctor;
mod embed;
mod exit;
mod flags;
mod generate;
mod graphs;
mod inspect;
mod interrupt;
mod json;
mod operate;
mod receipt;
mod session;
mod several;
mod stream;
mod table;
mod token;
mod top;
mod ui;
mod worker;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{Args, CommandFactory, Parser, Subcommand};

use hotcell_proto::error::Error;

use crate::{
    connect::{Address, Identity, read_token},
    local::Bundled,
};

pub use bench::BenchFlags;
pub use chat::ChatFlags;
pub use crashes::{CrashReplayFlags, CrashesFlags, What};
pub use debug::{
    CaptureFlags, CompareFlags, DebugCommand, DebugFlags, DebugWatchFlags, DumpFlags, DumpStyle,
    FaultFlags, GuardFlags, Layers, LookFlags, MemoryFlags, ReduceFlags, ReplayFlags, RerunFlags,
    TraceFlags, When,
};
pub use embed::EmbedFlags;
pub use exit::{Exit, Failure, REASONS};
pub use flags::{ModelRef, PromptFlags, SamplingFlags};
pub use generate::{GenerateFlags, RunFlags};
pub use graphs::{GraphsCommand, GraphsFlags};
pub use inspect::InspectFlags;
pub use interrupt::{Interrupt, Trigger};
pub use operate::{
    CompletionsFlags, DetokenizeFlags, LoadFlags, ServeFlags, TokenizeFlags, UnloadFlags,
};
pub use receipt::VerifyFlags;
pub use token::{NewTokenFlags, TokenCommand, TokenFlags, TokenRole};
pub use top::TopFlags;
pub use ui::{Captured, Color, Manner, Ui};
pub use worker::{DrainFlags, ReleaseFlags};

/// Runs language models in disposable worker processes.
///
/// A scheduler finds the devices of this host and runs one confined worker process on each. A worker that
/// crashes or hangs is replaced, and the streams it served go on. This command starts a scheduler, asks it for
/// text and operates it.
#[derive(Clone, Debug, Parser)]
#[command(name = "hotcell", version, after_help = START, after_long_help = long_help())]
pub struct Cli {
    /// Flags of every command.
    #[command(flatten)]
    pub global: GlobalFlags,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const START: &str = "\
Examples:
  hotcell run \"In the beginning\"      text from the bundled model, nothing to set up
  hotcell serve                       start a scheduler that stays
  hotcell load ./my-model             load a Hugging Face folder or a .gguf file
  hotcell chat --model my-model       talk to it

`hotcell --help` also lists the exit codes.";

const SERVE: &str = "\
Examples:
  hotcell serve
  hotcell serve --devices cpu:2 --models llama=/models/llama
  hotcell serve --listen 127.0.0.1:4100
  hotcell serve -- --help               all flags of the scheduler";

fn long_help() -> String {
    format!(
        "{START}\n\n{}\n{}\n\
         With --json, standard output holds one JSON document (lists) or one per line (streams, loading,\n\
         watch). A failure is then its last line: {{\"error\":{{\"reason\",\"message\",\"metadata\",\"exit_code\"}}}}.\n\
         Without --json it is one line on standard error. A wrong command line is always told there.",
        exit::help(),
        exit::SERVE,
    )
}

/// Flags of every command.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Global options")]
pub struct GlobalFlags {
    /// Where the scheduler listens: unix:/path, /path, host:port, or https://host:port for TLS
    ///
    /// [env: HOTCELL_ADDRESS, else HOTCELL_SOCKET, a path] [default: $XDG_RUNTIME_DIR/hotcell/hotcell.sock, else /tmp/hotcell-UID/hotcell.sock]
    #[arg(long, global = true, value_name = "ADDRESS")]
    pub address: Option<Address>,
    /// File with the bearer token for a scheduler over TCP [env: HOTCELL_TOKEN, the token itself, else HOTCELL_TOKEN_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Authority of the scheduler's certificate, in PEM [env: HOTCELL_CA] [default: those that this host believes]
    #[arg(long, global = true, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Certificate to show to a scheduler that asks for one, in PEM [env: HOTCELL_CLIENT_CERT]
    #[arg(long, global = true, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Its key, in PEM [env: HOTCELL_CLIENT_KEY]
    #[arg(long, global = true, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Print JSON instead of words
    #[arg(long, global = true)]
    pub json: bool,
    /// When to use colours
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t)]
    pub color: Color,
    /// Say more: timings, seed, numerics class, a private scheduler's log
    #[arg(short, long, global = true)]
    pub verbose: bool,
}

impl GlobalFlags {
    /// What to show the scheduler at `address`.
    ///
    /// # Errors
    /// For a token's file that cannot be read.
    pub(crate) fn identity(&self, address: &Address) -> Result<Identity, Error> {
        if address.is_local() {
            return Ok(Identity::default());
        }
        let said = match &self.token_file {
            // The environment's token may be of a file that is not there.
            Some(file) => Identity {
                token: Some(read_token(file)?),
                ..Identity::paths_of_environment()
            },
            None => Identity::from_environment()?,
        };
        Ok(Identity {
            ca: self.tls_ca.clone().or(said.ca),
            cert: self.tls_cert.clone().or(said.cert),
            key: self.tls_key.clone().or(said.key),
            token: said.token,
        })
    }

    /// How to speak.
    pub fn manner(&self) -> Manner {
        Manner {
            json: self.json,
            verbose: self.verbose,
            color: self.color,
        }
    }
}

/// The commands.
#[derive(Clone, Debug, Subcommand)]
#[non_exhaustive]
pub enum Command {
    /// Continue a text with the bundled model or another
    ///
    /// Uses the scheduler that runs already; where none does, or it lacks the bundled model that is asked for, a
    /// private one that ends with this command. A model given as a path is loaded first. On a terminal the prompt
    /// is shown before its continuation. A line with tokens, time to the first token and tokens per second goes
    /// to standard error after it if that is a terminal, or with --verbose; with --json the last line has them
    /// under `usage` and `timings`.
    #[command(after_help = "\
Examples:
  hotcell run \"In the beginning\"
  hotcell run \"And God said\" --temperature 0.8 --seed 7 -n 64
  hotcell run \"Once upon a time\" --model ./llama.gguf
  echo \"In the beginning\" | hotcell run --json | jq -r 'select(.event==\"delta\").text'")]
    Run(RunFlags),
    /// Ask a running scheduler for a continuation, with all options
    #[command(after_help = "\
Examples:
  hotcell generate \"In the beginning\" -n 32 --stop .
  hotcell generate --ids 0,312,17 --json --top-logprobs 5
  hotcell generate --chat-file talk.json --model my-model --deadline 30s
  hotcell generate \"And God said\" --temperature 0.8 --receipt answer.json")]
    Generate(Box<GenerateFlags>),
    /// Run a request again and compare: every token must be the same
    ///
    /// Reads what `hotcell generate --receipt FILE` wrote. Says which token is the first that differs, or that the
    /// worker here is of another numerics class, in which results may differ.
    #[command(after_help = "Example:\n  hotcell verify answer.json")]
    Verify(VerifyFlags),
    /// Talk to a model
    ///
    /// Each line is a message; the conversation so far goes along with it. Works with piped input as well: a
    /// message per line, an answer per message.
    #[command(after_help = "\
Examples:
  hotcell chat --model my-model --system \"Answer briefly.\"
  hotcell chat --temperature 0.7

While talking: /reset forgets, /help lists, /exit or Ctrl-D leaves, Ctrl-C stops an answer.")]
    Chat(ChatFlags),
    /// Measure how fast a model is: tokens per second, times to the first token and between tokens
    ///
    /// Every prompt length with every answer length at every concurrency is a row. Each stream begins a request when
    /// its last one ended; prompts are random. GOOD/S counts requests that kept within --within and --apart. Uses the
    /// scheduler that runs already, else a private one, as `hotcell run` does.
    #[command(after_help = "\
Examples:
  hotcell bench
  hotcell bench -c 1,8,32 -p 128,1024 -n 128 --model ./llama.gguf
  hotcell bench -c 1,2,4,8 --within 200ms --apart 50ms --svg bench.svg
  hotcell bench --json | jq .row.tokens_per_second")]
    Bench(BenchFlags),
    /// Start a scheduler here that stays until it is stopped
    ///
    /// Becomes the program hotcell-scheduler, with the bundled model handed over and all flags passed on, and ends
    /// with that program's exit codes. Before the scheduler's own flags, --address makes it listen there (an IP
    /// address or localhost) and --json adds --log-json.
    #[command(after_help = SERVE, after_long_help = format!("{SERVE}\n\n{}", exit::SERVE))]
    Serve(ServeFlags),
    /// Load a model
    #[command(after_help = "\
Examples:
  hotcell load ./TinyLlama-1.1B         a Hugging Face folder
  hotcell load /models/q4.gguf --name small
  hotcell load kjv                      a configured model, by name

A bare word is a name; a path begins with / or ./, ends in .gguf, or holds a / and exists.")]
    Load(LoadFlags),
    /// Look into a model that nobody knows, and say whether it can be trusted to load
    ///
    /// A confined worker of its own reads it, loads it and computes a token, and is thrown away; nothing of it runs
    /// elsewhere. Uses the scheduler that runs already, else a private one, as `hotcell run` does. Exit codes: 0 fine,
    /// 11 suspicious, 6 refused or the worker died of it.
    #[command(after_help = "\
Examples:
  hotcell inspect ./download.gguf
  hotcell inspect ./some-model --json | jq '.verdict, .findings'
  hotcell inspect kjv                   a configured model, by name")]
    Inspect(InspectFlags),
    /// Take a model from the workers
    #[command(after_help = "Example:\n  hotcell unload small")]
    Unload(UnloadFlags),
    /// List the saved graphs, which are served as models of tensors
    #[command(after_help = "\
Examples:
  hotcell graphs
  hotcell graphs forget scale")]
    Graphs(GraphsFlags),
    /// Let a worker out of quarantine, or give one that was drained requests again
    #[command(after_help = "Example:\n  hotcell release w0")]
    Release(ReleaseFlags),
    /// Have another process take a worker's place; what it computed goes on there
    #[command(after_help = "Example:\n  hotcell restart w0")]
    Restart(ReleaseFlags),
    /// Give a worker no new requests, until `hotcell release` or `hotcell restart`
    ///
    /// Requests that it has run on. Those that still do after --within go on elsewhere; where no other worker can take
    /// them, in another process in its place.
    #[command(after_help = "Example:\n  hotcell drain w0 --within 10s")]
    Drain(DrainFlags),
    /// List the worker processes
    #[command(after_help = "\
Examples:
  hotcell ps
  hotcell ps --json | jq '.workers[].pid'

OUTSTANDING: tokens still to compute. DEATHS: of this worker so far, LAST EXIT: why the last one died.
--verbose adds what confines each worker, as `hotcell doctor` shows it layer by layer.")]
    Ps,
    /// List the devices
    #[command(
        after_help = "Examples:\n  hotcell devices\n  hotcell devices --json | jq '.devices[].id'"
    )]
    Devices,
    /// Show what confines the workers, layer by layer, and what the kernel lacks for it
    ///
    /// `host` is what the kernel enforced on the process that looked for devices; each worker says what is in force of it
    /// once it has confined itself. Asks the scheduler that runs already, else a private one.
    #[command(
        after_help = "Examples:\n  hotcell doctor\n  hotcell doctor --json | jq '.workers[].layers[] | select(.state==\"missing\")'"
    )]
    Doctor,
    /// List the models
    #[command(
        after_help = "Examples:\n  hotcell models\n  hotcell models --json | jq '.models[].name'"
    )]
    Models,
    /// Show what happens, as it happens
    #[command(
        after_help = "Examples:\n  hotcell watch\n  hotcell watch --json | jq 'select(.event==\"worker_died\")'\n\nTimes are UTC. Ctrl-C ends it."
    )]
    Watch,
    /// Workers, models, requests and what happens, on a screen that stays
    ///
    /// Keys choose a worker, show the report of its last death, trace it, capture what it computes for the next request, or
    /// let it out of quarantine; `?` lists them. Files go into the folder that it was started in. Works over a remote
    /// address; requests, tokens and steps are seen with the role debug only. The terminal is left as it was.
    #[command(
        after_help = "Examples:\n  hotcell top\n  hotcell --address https://gpu-box:4100 --token-file me.token top --every 500ms"
    )]
    Top(TopFlags),
    /// Show what is known about workers that died
    #[command(after_help = "\
Examples:
  hotcell crashes list
  hotcell crashes show w0.3             what ran, where it was struck, what became of its requests
  hotcell crashes show w0.3 --json | jq .blackbox
  hotcell crashes replay w0.3           the same requests again, each in a throw-away worker

What a report says of the black box and the log are the dead worker's own words. Its backtrace has names and lines
if the worker's program is the one that died.")]
    Crashes(CrashesFlags),
    /// Look into a worker while it serves
    #[command(after_help = "\
Examples:
  hotcell debug watch                   a line each second: steps, tokens, cache, where the time goes
  hotcell debug watch w0 --every 200ms --json | jq .steps
  hotcell debug capture --next -o a.hotcell --reveal     what is computed for the next request
  hotcell debug replay a.hotcell        the same bits again? else the first node that differs
  hotcell debug replay my-request --at 12 --until layers.3.mul_mat.0
  hotcell debug reduce a.hotcell --program ./new --program ./old -o small.safetensors
  hotcell debug guard --nan --inf --end                  a watchpoint at every node
  hotcell debug trace --for 2s --nodes -o w0.pftrace     a timeline for https://ui.perfetto.dev
  hotcell debug w0                      a prompt for all of these, with completion and help

Needs the role debug, and over TCP a token that has it. Every call is noted in the audit log.")]
    Debug(DebugFlags),
    /// Show a prompt's token ids
    #[command(
        after_help = "Examples:\n  hotcell tokenize \"In the beginning\"\n  hotcell tokenize --chat-file talk.json --json   the rendered chat too"
    )]
    Tokenize(TokenizeFlags),
    /// Show the text of token ids
    #[command(
        after_help = "Examples:\n  hotcell detokenize 312 17 9\n  hotcell detokenize 0,312,17 --special"
    )]
    Detokenize(DetokenizeFlags),
    /// Turn texts into vectors: a model's last hidden states, pooled
    #[command(after_help = "\
Examples:
  hotcell embed \"In the beginning\" \"And God said\"     a line of numbers for each
  hotcell embed --mean --json < lines.txt | jq '.embeddings[].values'")]
    Embed(EmbedFlags),
    /// Make bearer tokens for schedulers that listen on TCP
    #[command(after_help = "\
Examples:
  hotcell token new alice --role use --tenant acme --days 90
  hotcell --address https://gpu-box:4100 --tls-ca ca.pem --token-file alice.token ps

The scheduler keeps a salted hash only: the token is shown once.")]
    Token(TokenFlags),
    /// Print a completion script for a shell
    #[command(after_help = "\
Examples:
  hotcell completions bash > ~/.local/share/bash-completion/completions/hotcell
  hotcell completions zsh > \"${fpath[1]}/_hotcell\"
  hotcell completions fish > ~/.config/fish/completions/hotcell.fish")]
    Completions(CompletionsFlags),
}

/// The program: reads the command line, does what it says, tells how it went.
pub fn main(bundled: Bundled) -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    let cli = match parse(&args) {
        Ok(cli) => cli,
        Err(error) => {
            let exit = if error.use_stderr() {
                Exit::Usage
            } else {
                Exit::Success
            };
            // Help may go to `head`.
            return match error.print() {
                Err(e) => Failure::Output(e).exit().into(),
                Ok(()) => exit.into(),
            };
        }
    };
    let mut ui = Ui::standard(cli.global.manner());
    // Before any thread is started: this process is about to become another.
    if let Command::Serve(flags) = &cli.command {
        let failure = operate::serve(&cli.global, flags, bundled);
        ui.report(&failure);
        return failure.exit().into();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            ui.report(&Failure::Output(error));
            return Exit::Failed.into();
        }
    };
    runtime
        .block_on(async {
            let interrupt = Interrupt::install();
            run(cli, &mut ui, bundled, interrupt).await
        })
        .into()
}

/// Reads a command line, the program's name first. The colour of help and errors follows `--color` too.
///
/// # Errors
/// clap's, to be printed; asking for help or the version is one.
pub fn parse(args: &[OsString]) -> Result<Cli, clap::Error> {
    let mut color = clap::ColorChoice::Auto;
    let mut words = args
        .iter()
        .filter_map(|arg| arg.to_str())
        .take_while(|arg| *arg != "--");
    while let Some(word) = words.next() {
        let value = match word.strip_prefix("--color") {
            Some("") => words.next(),
            Some(rest) => rest.strip_prefix('='),
            None => continue,
        };
        color = match value {
            Some("always") => clap::ColorChoice::Always,
            Some("never") => clap::ColorChoice::Never,
            _ => color,
        };
    }
    let matches = Cli::command().color(color).try_get_matches_from(args)?;
    <Cli as clap::FromArgMatches>::from_arg_matches(&matches)
}

/// Does one command and reports a failure. `serve` is not for here: it would replace the process.
pub async fn run(cli: Cli, ui: &mut Ui, bundled: Bundled, mut interrupt: Interrupt) -> Exit {
    let (global, stop) = (&cli.global, &mut interrupt);
    let result = match &cli.command {
        Command::Run(flags) => generate::run(ui, global, flags, bundled, stop).await,
        Command::Generate(flags) => generate::generate(ui, global, flags, stop).await,
        Command::Verify(flags) => receipt::verify(ui, global, flags, stop).await,
        Command::Chat(flags) => chat::chat(ui, global, flags, bundled, stop).await,
        Command::Bench(flags) => bench::bench(ui, global, flags, bundled, stop).await,
        Command::Serve(flags) => Err(operate::serve(global, flags, bundled)),
        Command::Load(flags) => operate::load(ui, global, flags, stop).await,
        Command::Inspect(flags) => inspect::inspect(ui, global, flags, bundled, stop).await,
        Command::Unload(flags) => operate::unload(ui, global, flags).await,
        Command::Graphs(flags) => graphs::graphs(ui, global, flags).await,
        Command::Release(flags) => worker::release(ui, global, flags).await,
        Command::Restart(flags) => worker::restart(ui, global, flags).await,
        Command::Drain(flags) => worker::drain(ui, global, flags).await,
        Command::Ps => operate::workers(ui, global).await,
        Command::Devices => operate::devices(ui, global).await,
        Command::Doctor => doctor::doctor(ui, global, bundled, stop).await,
        Command::Models => operate::models(ui, global).await,
        Command::Watch => operate::watch(ui, global, stop).await,
        Command::Top(flags) => top::top(ui, global, flags).await,
        Command::Crashes(flags) => crashes::crashes(ui, global, flags, stop).await,
        Command::Debug(flags) => debug::debug(ui, global, flags, bundled, stop).await,
        Command::Tokenize(flags) => operate::tokenize(ui, global, flags).await,
        Command::Embed(flags) => embed::embed(ui, global, flags).await,
        Command::Detokenize(flags) => operate::detokenize(ui, global, flags).await,
        Command::Token(flags) => token::token(ui, flags),
        Command::Completions(flags) => operate::completions(ui, flags),
    };
    match result {
        Ok(()) => Exit::Success,
        Err(failure) => {
            ui.report(&failure);
            failure.exit()
        }
    }
}
