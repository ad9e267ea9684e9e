//! `hotcell debug WORKER`: a prompt for all that looks into a worker, with completion and help. Nothing that is typed is
//! kept in a file.

mod stepper;

use std::{io, thread, time::Duration};

use clap::{CommandFactory, Parser, Subcommand};
use hotcell_proto::{
    error::{Error, Reason},
    v1::WorkerInfo,
};
use rustyline::{
    Context, Editor, Helper,
    completion::{Completer, FilenameCompleter},
    error::ReadlineError,
    highlight::Highlighter,
    hint::Hinter,
    history::MemHistory,
    validate::Validator,
};
use tokio::sync::mpsc;

use self::stepper::{StepCommand, Stepper};
use super::DebugCommand;
use crate::{
    cli::{
        GlobalFlags, crashes,
        exit::Failure,
        flags::duration,
        interrupt::Interrupt,
        operate,
        session::Session,
        ui::{DIM, Ui, one_line},
        worker::{self, DrainFlags, ReleaseFlags},
    },
    connect::Client,
    local::Bundled,
};

/// How long what runs may take to end by itself after Ctrl-C.
const GRACE: Duration = Duration::from_secs(2);

/// What a line of this prompt may be
#[derive(Debug, Parser)]
#[command(name = "", no_binary_name = true, disable_version_flag = true, after_help = AFTER)]
struct Line {
    /// Print JSON instead of words
    #[arg(long, global = true)]
    json: bool,
    /// Say more
    #[arg(short, long, global = true)]
    verbose: bool,
    #[command(subcommand)]
    command: LineCommand,
}

const AFTER: &str = "Tab completes commands, flags, workers, requests and reports. Ctrl-C stops what runs, Ctrl-D leaves.";

#[derive(Debug, Subcommand)]
enum LineCommand {
    #[command(flatten)]
    Debug(DebugCommand),
    #[command(flatten)]
    Step(StepCommand),
    /// List the workers
    Workers,
    /// Look into another worker from now on
    Use {
        /// Its name
        worker: String,
    },
    /// What is known about workers that died, and running again what killed them
    Crashes(crashes::CrashesFlags),
    /// Have another process take this worker's place; what it computed goes on there
    Restart,
    /// Let this worker's requests end, and give it no others until its release
    Drain {
        /// How long they have before they go on elsewhere: 500ms, 30s, 2h
        #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
        within: Duration,
    },
    /// Let this worker out of quarantine or a drain
    Release,
    /// Leave
    #[command(visible_alias = "exit")]
    Quit,
}

/// Words that a line may be completed with, as far as the server tells.
#[derive(Clone, Debug, Default)]
struct Known {
    workers: Vec<String>,
    requests: Vec<String>,
    crashes: Vec<String>,
    /// Nodes of the request that is gone through.
    nodes: Vec<String>,
}

impl Known {
    /// Who may not see them does not complete them.
    async fn ask(client: &Client) -> Self {
        let workers = client.workers().await.unwrap_or_default();
        let requests = workers.iter().flat_map(|worker| &worker.caches);
        let requests = requests.flat_map(|cache| &cache.requests);
        Self {
            workers: workers.iter().map(|worker| worker.id.clone()).collect(),
            requests: requests.map(|request| request.request_id.clone()).collect(),
            crashes: (client.crashes().await.unwrap_or_default().into_iter())
                .map(|crash| crash.id)
                .collect(),
            nodes: Vec::new(),
        }
    }
}

/// The words of a line: those in quotes are one, and a backslash takes what follows as it is.
///
/// # Errors
/// For an open quote.
fn words(line: &str) -> Result<Vec<String>, String> {
    let (mut all, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match (c, quote) {
            (c, Some(open)) if c == open => quote = None,
            ('\\', None | Some('"')) => {
                word.get_or_insert_default().extend(chars.next());
            }
            ('"' | '\'', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (c, None) if c.is_whitespace() => all.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    match quote {
        Some(open) => Err(format!("a {open} is open at the end of the line")),
        None => {
            all.extend(word);
            Ok(all)
        }
    }
}

/// What the last word of a line may become, and where it begins.
fn completions(line: &str, known: &Known) -> (usize, Vec<String>) {
    let start = line.rfind(char::is_whitespace).map_or(0, |at| at + 1);
    let (before, last) = line.split_at(start);
    let mut typed = before.split_whitespace();
    let first = typed.next();
    let command = Line::command();
    let names = |of: &clap::Command| -> Vec<String> {
        let all = of.get_subcommands().map(|sub| sub.get_name().to_owned());
        all.collect()
    };
    let mut all = match first {
        None => {
            let mut all = names(&command);
            all.push("help".to_owned());
            all
        }
        Some("help") => names(&command),
        Some(name) => match command.find_subcommand(name) {
            None => Vec::new(),
            Some(sub) if last.starts_with('-') => {
                let flags = sub.get_arguments().filter_map(clap::Arg::get_long);
                flags.map(|flag| format!("--{flag}")).collect()
            }
            Some(sub) => match (name, before.split_whitespace().last()) {
                ("use", _) | (_, Some("--worker" | "-w")) => known.workers.clone(),
                ("until" | "print" | "save", _) => known.nodes.clone(),
                ("capture" | "open" | "replay", _) => known.requests.clone(),
                ("crashes", Some("show" | "replay")) => known.crashes.clone(),
                _ => names(sub),
            },
        },
    };
    all.retain(|word| word.starts_with(last) && !word.is_empty());
    all.sort_unstable();
    all.dedup();
    (start, all)
}

/// Commands that take files.
const FILES: [&str; 9] = [
    "capture", "compare", "dump", "open", "reduce", "replay", "rerun", "save", "trace",
];

/// Whether the last word of a line may be a file.
fn takes_files(line: &str) -> bool {
    let mut typed = line.split_whitespace();
    let command = typed.next().filter(|first| first.len() < line.len());
    let last = line.rsplit(char::is_whitespace).next();
    command.is_some_and(|name| FILES.contains(&name))
        && !last.is_some_and(|last| last.starts_with('-'))
}

/// What the editor asks while somebody types.
struct Help(Known);

impl Completer for Help {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        pos: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let line = line.get(..pos).unwrap_or_default();
        let (mut start, mut all) = completions(line, &self.0);
        if takes_files(line) {
            let (from, files) = FilenameCompleter::new().complete_path(line, pos)?;
            if all.is_empty() {
                start = from;
            }
            if from == start {
                all.extend(files.into_iter().map(|file| file.replacement));
            }
        }
        // The word is whole; a folder's is not.
        if let [only] = &mut all[..]
            && !only.ends_with('/')
        {
            only.push(' ');
        }
        Ok((start, all))
    }
}

impl Hinter for Help {
    type Hint = String;
}

impl Highlighter for Help {}
impl Validator for Help {}
impl Helper for Help {}

/// Where lines come from.
enum Lines {
    /// A terminal: a thread reads a line with an editor for each prompt that it is given.
    Edited {
        prompts: std::sync::mpsc::Sender<(String, Known)>,
        lines: mpsc::Receiver<Result<String, ReadlineError>>,
    },
    /// A file or a pipe: as they are, without a prompt.
    Plain(mpsc::Receiver<Result<String, Error>>),
}

/// Reads a line for each prompt that is asked for.
fn edit(
    asked: &std::sync::mpsc::Receiver<(String, Known)>,
    to: &mpsc::Sender<Result<String, ReadlineError>>,
) -> rustyline::Result<()> {
    // What is typed may be a prompt's text: it is kept while this runs only.
    let config = rustyline::Config::builder()
        .auto_add_history(true)
        .completion_type(rustyline::CompletionType::List)
        .build();
    let mut editor = Editor::<Help, _>::with_history(config, MemHistory::new())?;
    while let Ok((prompt, known)) = asked.recv() {
        editor.set_helper(Some(Help(known)));
        if to.blocking_send(editor.readline(&prompt)).is_err() {
            break;
        }
    }
    Ok(())
}

impl Lines {
    fn of(ui: &mut Ui) -> Self {
        if !(ui.in_terminal && ui.out_terminal) {
            return Self::Plain(ui.lines());
        }
        let (prompts, asked) = std::sync::mpsc::channel();
        let (to, lines) = mpsc::channel(1);
        // Not one of tokio's blocking threads: the runtime would wait for it at the end.
        thread::spawn(move || {
            if let Err(error) = edit(&asked, &to) {
                // Nobody waits for it if that fails.
                let _ = to.blocking_send(Err(error));
            }
        });
        Self::Edited { prompts, lines }
    }

    /// Whether somebody sees a prompt and may complete what is typed.
    fn is_edited(&self) -> bool {
        matches!(self, Self::Edited { .. })
    }

    /// The next line; none at the end. Ctrl-C throws a line away.
    async fn next(&mut self, prompt: String, known: Known) -> Result<Option<String>, Failure> {
        let gone = || Failure::Output(io::Error::other("nothing reads the prompt any more"));
        match self {
            Self::Plain(lines) => Ok(lines.recv().await.transpose()?),
            Self::Edited { prompts, lines } => {
                prompts.send((prompt, known)).map_err(|_| gone())?;
                match lines.recv().await.ok_or_else(gone)? {
                    Ok(line) => Ok(Some(line)),
                    Err(ReadlineError::Interrupted) => Ok(Some(String::new())),
                    Err(ReadlineError::Eof) => Ok(None),
                    Err(error) => Err(Failure::Output(io::Error::other(error))),
                }
            }
        }
    }
}

/// The worker that is meant.
///
/// # Errors
/// [`Reason::NoWorker`] naming those that there are.
fn meant(workers: &[WorkerInfo], named: Option<&str>) -> Result<String, Failure> {
    let names: Vec<&str> = workers.iter().map(|worker| worker.id.as_str()).collect();
    let found = match (named, &names[..]) {
        (Some(named), names) if names.contains(&named) => Some(named),
        (None, [only]) => Some(*only),
        _ => None,
    };
    found.map(str::to_owned).ok_or_else(|| {
        let what = match named {
            Some(named) => format!("there is no worker {named:?}"),
            None => "which worker?".to_owned(),
        };
        let what = format!("{what} There are {}", names.join(", "));
        Failure::Call(Error::new(Reason::NoWorker, what))
    })
}

/// What runs when lines are done.
struct Prompt<'a> {
    global: &'a GlobalFlags,
    bundled: Bundled,
    client: &'a Client,
    /// The worker that lines mean.
    worker: String,
    /// What is gone through node by node.
    stepper: Option<Stepper>,
}

impl Prompt<'_> {
    /// Does one line. Whether that was the last.
    async fn does(
        &mut self,
        ui: &mut Ui,
        command: LineCommand,
        interrupt: &mut Interrupt,
    ) -> Result<bool, Failure> {
        match command {
            LineCommand::Quit => return Ok(true),
            LineCommand::Workers => operate::workers(ui, self.global).await?,
            LineCommand::Use { worker } => {
                self.worker = meant(&self.client.workers().await?, Some(&worker))?;
            }
            LineCommand::Crashes(flags) => {
                crashes::crashes(ui, self.global, &flags, interrupt).await?;
            }
            LineCommand::Restart => {
                let worker = self.worker.clone();
                worker::restart(ui, self.global, &ReleaseFlags { worker }).await?;
            }
            LineCommand::Release => {
                let worker = self.worker.clone();
                worker::release(ui, self.global, &ReleaseFlags { worker }).await?;
            }
            LineCommand::Drain { within } => {
                let worker = self.worker.clone();
                worker::drain(ui, self.global, &DrainFlags { worker, within }).await?;
            }
            LineCommand::Step(command) => {
                let what = (&mut self.stepper, command);
                let does = stepper::does(ui, self.client, &self.worker, what, interrupt);
                Box::pin(does).await?;
            }
            LineCommand::Debug(mut command) => {
                command.at(&self.worker);
                let run = super::run(ui, self.global, &command, self.bundled, interrupt);
                Box::pin(run).await?;
            }
        }
        Ok(false)
    }

    /// Does one line, until Ctrl-C.
    async fn line(
        &mut self,
        ui: &mut Ui,
        line: &str,
        interrupt: &mut Interrupt,
    ) -> Result<bool, Failure> {
        let typed = words(line).map_err(Failure::Usage)?;
        // A comment, for those who keep lines in a file.
        if typed.first().is_none_or(|first| first.starts_with('#')) {
            return Ok(false);
        }
        let line = match Line::try_parse_from(typed) {
            Ok(line) => line,
            Err(help) if !help.use_stderr() => {
                ui.print_text(&help.render().to_string())?;
                return Ok(false);
            }
            Err(error) => return Err(Failure::Usage(wrong(&error))),
        };
        let manner = ui.manner;
        ui.manner.json |= line.json;
        ui.manner.verbose |= line.verbose;
        // What was pressed while nothing ran is over.
        interrupt.heard();
        let mut pressed = interrupt.clone();
        let left = async {
            pressed.pressed().await;
            tokio::time::sleep(GRACE).await;
        };
        let done = tokio::select! {
            done = self.does(ui, line.command, interrupt) => done,
            // It has nothing that it would end by itself.
            () = left => Err(Failure::Interrupted),
        };
        interrupt.heard();
        ui.manner = manner;
        done
    }
}

/// What is wrong with a line, without the usage that clap adds.
fn wrong(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    let first = first.strip_prefix("error: ").unwrap_or(first);
    format!("{}; help lists the commands", first.trim())
}

/// Reads lines and does them until the end.
pub(super) async fn prompt(
    ui: &mut Ui,
    global: &GlobalFlags,
    worker: Option<&str>,
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let session = Session::running(global).await?;
    let client = &session.client;
    let mut prompt = Prompt {
        global,
        bundled,
        client,
        worker: meant(&client.workers().await?, worker)?,
        stepper: None,
    };
    let mut lines = Lines::of(ui);
    if lines.is_edited() {
        let what = format!(
            "{} at {}; help lists the commands",
            prompt.worker,
            client.peer()
        );
        ui.note(DIM, &one_line(&what));
    }
    loop {
        let known = match lines.is_edited() {
            true => Known {
                nodes: (prompt.stepper.as_ref()).map_or_else(Vec::new, Stepper::names),
                ..Known::ask(client).await
            },
            false => Known::default(),
        };
        let line = tokio::select! {
            line = lines.next(format!("{}> ", one_line(&prompt.worker)), known) => line?,
            // Only where no editor takes it as a character.
            () = interrupt.pressed() => return Err(Failure::Interrupted),
        };
        let Some(line) = line else {
            return Ok(());
        };
        match prompt.line(ui, &line, interrupt).await {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // Nobody reads any more.
            Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
                return Err(Failure::Output(error));
            }
            Err(failure) => ui.report(&failure),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_well_made() {
        Line::command().debug_assert();
    }

    #[test]
    fn help_is_of_lines_not_of_a_program() {
        let help = |line: &[&str]| Line::try_parse_from(line).unwrap_err().to_string();
        let watch = help(&["watch", "--help"]);
        assert!(watch.contains("Usage: watch [OPTIONS]"), "{watch}");
        assert!(
            help(&["help"]).contains("Usage: [OPTIONS] <COMMAND>"),
            "{}",
            help(&["help"])
        );
        assert!(help(&["watch", "-x"]).starts_with("error: unexpected argument"));
    }

    #[test]
    fn lines_become_words_as_in_a_shell() {
        let split = |line: &str| words(line).unwrap();
        assert_eq!(split("  watch  -n 1 "), ["watch", "-n", "1"]);
        assert_eq!(
            split(r#"capture "a b" 'c"d' e\ f "" "#),
            ["capture", "a b", "c\"d", "e f", ""]
        );
        assert!(split("").is_empty());
        assert!(words("replay 'x").is_err());
    }

    #[test]
    fn commands_flags_and_what_there_is_are_completed() {
        let known = Known {
            workers: vec!["w0".into(), "w1".into()],
            requests: vec!["r-1".into(), String::new()],
            crashes: vec!["w0.1".into()],
            nodes: vec!["layers.0.add.0".into(), "layers.1.add.0".into()],
        };
        let of = |line: &str| completions(line, &known);
        assert_eq!(of("wa"), (0, vec!["watch".to_owned()]));
        assert!(of("").1.contains(&"compare".to_owned()) && of("").1.contains(&"help".to_owned()));
        assert_eq!(of("help gu"), (5, vec!["guard".to_owned()]));
        assert_eq!(of("replay --unt"), (7, vec!["--until".to_owned()]));
        assert_eq!(of("replay r"), (7, vec!["r-1".to_owned()]));
        assert_eq!(of("use "), (4, vec!["w0".to_owned(), "w1".to_owned()]));
        assert_eq!(of("crashes sh"), (8, vec!["show".to_owned()]));
        assert_eq!(of("crashes replay w"), (15, vec!["w0.1".to_owned()]));
        assert_eq!(of("until layers.1"), (6, vec!["layers.1.add.0".to_owned()]));
        assert_eq!(of("nothing x").1.len(), 0);
    }

    #[test]
    fn a_line_means_the_prompts_worker_unless_it_names_one() {
        let at = |line: &[&str]| match Line::try_parse_from(line).unwrap().command {
            LineCommand::Debug(mut command) => {
                command.at("w1");
                match command {
                    DebugCommand::Watch(flags) => flags.worker,
                    DebugCommand::Guard(flags) => flags.worker,
                    other => panic!("{other:?}"),
                }
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(at(&["watch"]).as_deref(), Some("w1"));
        assert_eq!(
            at(&["guard", "--nan", "--worker", "w0"]).as_deref(),
            Some("w0")
        );
        assert!(
            Line::try_parse_from(["guard"]).is_err(),
            "what is looked for is missing"
        );
    }
}
