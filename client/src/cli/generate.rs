//! `run` and `generate`: one prompt, one answer.

use clap::Args;

use crate::{local::Bundled, tokens::Prompt};

use super::{
    GlobalFlags,
    exit::Failure,
    flags::{
        DEFAULT_MAX_TOKENS, GrammarFlags, ModelRef, PromptFlags, SamplingFlags, text_or_input,
    },
    interrupt::Interrupt,
    receipt::Destination,
    session::{Session, with_hint},
    several::{Choice, several},
    stream::{Report, show},
    ui::{BOLD, Ui, harmless},
};

/// `hotcell run`.
#[derive(Args, Clone, Debug)]
pub struct RunFlags {
    /// The text to continue; read from standard input if missing
    pub prompt: Option<String>,
    /// A loaded or configured model's name, or the path of a model to load: a folder or a .gguf file
    /// [default: kjv, the bundled model; for a worker run alone, its own]
    #[arg(short, long, value_name = "NAME-or-PATH")]
    pub model: Option<String>,
    /// Start a private scheduler even if one runs already
    #[arg(long)]
    pub private: bool,
    /// How to choose tokens.
    #[command(flatten)]
    pub sampling: SamplingFlags,
}

/// `hotcell generate`.
#[derive(Args, Clone, Debug)]
pub struct GenerateFlags {
    /// What to continue.
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
    /// What the text has to be.
    #[command(flatten)]
    pub grammar: GrammarFlags,
    /// How to choose tokens.
    #[command(flatten)]
    pub sampling: SamplingFlags,
    /// Report each token's log probability (shown with --json)
    #[arg(long)]
    pub logprobs: bool,
    /// Report this many alternatives of each token too (shown with --json)
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub top_logprobs: u32,
    /// Which of several continuations of one prompt and seed to make
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub branch: u32,
    /// Make this many continuations of the prompt at once, with one seed: branches that share its memory in a worker
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MOST))]
    pub n: u32,
    /// Make this many continuations and show the likeliest (or the --n likeliest), by the mean log probability of their
    /// tokens
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MOST))]
    pub best_of: Option<u32>,
    /// Whose request this is: tenants share workers fairly, and no cached prompts
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    pub tenant: String,
    /// How urgent among the tenant's requests, 0 to 7; each step up doubles its share
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub priority: u32,
    /// Draw one token at a time, also where guessing would be faster; the tokens are the same
    #[arg(long)]
    pub no_speculation: bool,
    /// An id of your own for this request: asked for again under it within a minute, its answer is not computed again.
    /// Who knows the id can read the answer
    #[arg(long, value_name = "ID", default_value = "", hide_default_value = true,
        conflicts_with_all = ["n", "best_of"])]
    pub request_id: String,
    /// Write request, answer and receipt to this file, for `hotcell verify`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["n", "best_of"])]
    pub receipt: Option<String>,
}

/// Continuations of one request at most: as many as a worker computes at once.
const MOST: i64 = 64;

fn done(report: &Report) -> Result<(), Failure> {
    if report.interrupted {
        Err(Failure::Interrupted)
    } else {
        Ok(())
    }
}

pub(crate) async fn run(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &RunFlags,
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let prompt = text_or_input(flags.prompt.as_deref(), ui)?;
    let model = match &flags.model {
        Some(model) => ModelRef::parse(model),
        None => ModelRef::Name(bundled.model.to_owned()),
    };
    let mut session = tokio::select! {
        session = Session::running_or_private(ui, global, flags.private, &model, bundled) => session?,
        () = interrupt.pressed() => return Err(Failure::Interrupted),
    };
    let result = run_in(ui, &mut session, flags, &model, prompt, interrupt).await;
    session.end().await;
    done(&result?)
}

async fn run_in(
    ui: &mut Ui,
    session: &mut Session,
    flags: &RunFlags,
    model: &ModelRef,
    prompt: String,
    interrupt: &mut Interrupt,
) -> Result<Report, Failure> {
    let name = session
        .prepare(ui, interrupt, model, flags.model.is_some())
        .await?;
    if ui.out_terminal && !ui.manner.json {
        // The continuation alone would begin in the middle of a sentence.
        let echo = ui.styled(BOLD, &harmless(&prompt));
        ui.print(&echo)?;
    }
    let options = flags.sampling.options(&name, DEFAULT_MAX_TOKENS);
    show(ui, session, interrupt, Prompt::Text(prompt), options)
        .await
        .map_err(|failure| hinted(failure, flags.model.as_deref().unwrap_or_default()))
}

pub(crate) async fn generate(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &GenerateFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let prompt = flags.prompt.read(ui)?;
    let mut session = Session::running(global).await?;
    let mut options = flags.sampling.options(&flags.model, DEFAULT_MAX_TOKENS);
    options.logprobs = flags.logprobs || flags.top_logprobs > 0;
    options.top_logprobs = flags.top_logprobs;
    options.branch = flags.branch;
    options.tenant.clone_from(&flags.tenant);
    options.priority = flags.priority;
    options.no_speculation = flags.no_speculation;
    options.request_id.clone_from(&flags.request_id);
    options.grammar = flags.grammar.read()?;
    let choice = Choice {
        shown: flags.n,
        made: flags.best_of.unwrap_or(flags.n),
    };
    if choice.made < choice.shown {
        let what = format!("--best-of {} cannot show --n {}", choice.made, choice.shown);
        return Err(Failure::Usage(what));
    }
    if choice.made > 1 {
        let several = several(ui, &mut session, interrupt, prompt, options, choice).await;
        return match several.map_err(|failure| hinted(failure, &flags.model))? {
            true => Err(Failure::Interrupted),
            false => Ok(()),
        };
    }
    let receipt = flags
        .receipt
        .as_deref()
        .map(Destination::open)
        .transpose()?;
    let report = show(ui, &mut session, interrupt, prompt, options.clone()).await;
    let report = report.map_err(|failure| hinted(failure, &flags.model))?;
    if let Some(receipt) = receipt
        && let (Some(accepted), Some(finished)) = (&report.accepted, &report.finished)
    {
        receipt.write(&options, accepted, (&report.tokens, &report.text), finished)?;
    }
    done(&report)
}

fn hinted(failure: Failure, model: &str) -> Failure {
    use hotcell_proto::error::Reason;
    match failure {
        Failure::Call(error) if error.reason() == Reason::ModelNotFound => {
            // It takes no files itself.
            let before = "to load the files here first, run `hotcell load ";
            Failure::Call(with_hint(error, model, before, "`"))
        }
        failure => failure,
    }
}
