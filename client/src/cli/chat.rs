//! `chat`: a conversation, line by line.

use clap::Args;
use hotcell_proto::{error::Error, v1::ChatMessage};
use tokio::sync::mpsc::Receiver;

use crate::{connect::is_unreachable, local::Bundled, tokens::Prompt};

use super::{
    GlobalFlags,
    exit::{Exit, Failure},
    flags::{ModelRef, SamplingFlags},
    interrupt::Interrupt,
    session::Session,
    stream::show,
    ui::{BOLD, DIM, Ui},
};

const HELP: &str = "\
/reset   forget the conversation so far
/help    this list
/exit    leave; so do Ctrl-D, and Ctrl-C at the prompt
Ctrl-C   stop an answer";

/// `hotcell chat`.
#[derive(Args, Clone, Debug)]
pub struct ChatFlags {
    /// A model's name, or the path of a model to load [default: the scheduler's default]
    #[arg(
        short,
        long,
        value_name = "NAME-or-PATH",
        default_value = "",
        hide_default_value = true
    )]
    pub model: String,
    /// Instructions that come before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// How to choose tokens.
    #[command(flatten)]
    pub sampling: SamplingFlags,
}

struct Conversation {
    messages: Vec<ChatMessage>,
    system: usize,
}

impl Conversation {
    fn new(system: Option<&str>) -> Self {
        let messages: Vec<_> = system
            .map(|text| message("system", text))
            .into_iter()
            .collect();
        Self {
            system: messages.len(),
            messages,
        }
    }

    fn reset(&mut self) {
        self.messages.truncate(self.system);
    }
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
        ..ChatMessage::default()
    }
}

pub(crate) async fn chat(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &ChatFlags,
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let model = ModelRef::parse(&flags.model);
    let mut session = tokio::select! {
        session = Session::running_or_private(ui, global, false, &model, bundled) => session?,
        () = interrupt.pressed() => return Err(Failure::Interrupted),
    };
    let result = converse(ui, &mut session, flags, &model, interrupt).await;
    session.end().await;
    result
}

async fn converse(
    ui: &mut Ui,
    session: &mut Session,
    flags: &ChatFlags,
    model: &ModelRef,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let name = session.prepare(ui, interrupt, model, true).await?;
    let mut conversation = Conversation::new(flags.system.as_deref());
    let mut lines = ui.lines();
    let interactive = ui.in_terminal && ui.out_terminal && !ui.manner.json;
    if interactive {
        ui.note(DIM, "type a message; /help lists what else there is");
    }
    loop {
        if interactive {
            let prompt = ui.styled(BOLD, "> ");
            ui.print(&prompt)?;
        }
        let line = next_line(&mut lines, interrupt).await;
        if interactive && !matches!(line, Ok(Some(_))) {
            // Leaves the line on which the prompt stands.
            ui.print("\n")?;
        }
        let Some(line) = line? else {
            return Ok(());
        };
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" => return Ok(()),
            "/help" => {
                ui.note(DIM, HELP);
                continue;
            }
            "/reset" => {
                conversation.reset();
                ui.note(DIM, "the conversation starts anew");
                continue;
            }
            command if interactive && command.starts_with('/') => {
                ui.note(DIM, "there is no such command; /help lists them");
                continue;
            }
            _ => {}
        }
        conversation.messages.push(message("user", &line));
        let prompt = Prompt::Chat(conversation.messages.clone());
        let options = flags.sampling.options(&name, 0);
        match show(ui, session, interrupt, prompt, options).await {
            Ok(report) => {
                if report.interrupted {
                    interrupt.heard();
                    if !interactive {
                        return Err(Failure::Interrupted);
                    }
                }
                let answer = message("assistant", &report.text);
                conversation.messages.push(answer);
            }
            // A refused message need not be the last one; a scheduler that is gone leaves nobody to talk to.
            Err(Failure::Call(error)) if interactive && may_go_on(&error) => {
                conversation.messages.pop();
                ui.report(&Failure::Call(error));
            }
            Err(failure) => return Err(failure),
        }
    }
}

fn may_go_on(error: &Error) -> bool {
    !is_unreachable(error) && Exit::of(error) != Exit::NotFound
}

async fn next_line(
    lines: &mut Receiver<Result<String, Error>>,
    interrupt: &mut Interrupt,
) -> Result<Option<String>, Failure> {
    tokio::select! {
        line = lines.recv() => Ok(line.transpose()?),
        () = interrupt.pressed() => Err(Failure::Interrupted),
    }
}
