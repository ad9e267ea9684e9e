//! Going through what is computed for a request's tokens, node by node, forwards and back.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{CaptureOptions, CapturedNode, NodeValues, ReplayRequest, replay_request::Which},
};

use crate::{
    cli::{
        debug::{
            dump::{self, DumpStyle},
            replay::{is_file, known, request_id},
            told::{follow, named, node_line, row_view},
        },
        exit::Failure,
        interrupt::Interrupt,
        ui::{Ui, one_line},
    },
    connect::Client,
    debug::Recording,
    tensor::TensorFile,
};

/// Lines that go through what is computed for a token.
#[derive(Debug, Subcommand)]
pub(super) enum StepCommand {
    /// Run a request again to go through it node by node, from before the first one
    ///
    /// A token is computed in a throw-away worker, of the tokens before it, and its nodes are gone through then. So one can go
    /// back, too: to nodes that were passed, and to the token before, which is computed again.
    Open {
        /// A request's id, running or ended, or a file that `capture --reveal` wrote
        what: String,
        /// The token of its answer [default: the first]
        #[arg(long, value_name = "TOKEN")]
        at: Option<u64>,
    },
    /// Show the next nodes that are computed; after the last one, the next token
    Step {
        /// So many
        #[arg(default_value_t = 1)]
        nodes: usize,
    },
    /// Go back so many nodes; before the first one, to the end of the token before
    Back {
        /// So many
        #[arg(default_value_t = 1)]
        nodes: usize,
    },
    /// Go on to the node of this name, and show it
    Until {
        /// Its name
        node: String,
    },
    /// Go to the next token, before its first node
    Next,
    /// Show the numbers of a node of this token
    Print {
        /// Its name [default: the one that was shown last]
        node: Option<String>,
        /// How they are written.
        #[command(flatten)]
        style: DumpStyle,
    },
    /// Write the tensors of this token's nodes into a safetensors file, named as the nodes
    Save {
        /// The file
        file: PathBuf,
        /// Their names [default: all that were passed]
        nodes: Vec<String>,
    },
}

/// Where somebody is in a request.
#[derive(Debug)]
pub(super) struct Stepper {
    /// What is run again, but for the token.
    request: ReplayRequest,
    /// What was computed for this token.
    now: Recording,
    /// How many of its nodes were passed.
    passed: usize,
}

fn invalid(what: impl Into<String>) -> Failure {
    Failure::Call(Error::new(Reason::InvalidArgument, what))
}

/// What is computed for one token.
async fn computed(
    client: &Client,
    request: &ReplayRequest,
    at: u64,
    interrupt: &mut Interrupt,
) -> Result<Recording, Failure> {
    let starting = client.replay(ReplayRequest {
        at,
        ..request.clone()
    });
    let messages = tokio::select! {
        messages = starting => messages?,
        () = interrupt.pressed() => return Err(Failure::Interrupted),
    };
    let none = || invalid(format!("the answer has no token {at}"));
    let now = match follow(messages, interrupt, |_, _| Ok(())).await {
        // It was found, and ended before.
        Err(Failure::Call(error)) if error.reason() == Reason::RequestNotFound => {
            return Err(none());
        }
        now => now?,
    };
    match now.tokens.first().is_some_and(|token| token.index == at) {
        true => Ok(now),
        false => Err(none()),
    }
}

impl Stepper {
    async fn open(
        client: &Client,
        (worker, what, at): (&str, &str, Option<u64>),
        interrupt: &mut Interrupt,
    ) -> Result<Self, Failure> {
        let (which, first) = match is_file(what) {
            true => {
                let (request, first) = known(&Recording::read(Path::new(what))?)?;
                (Which::Request(request), first)
            }
            false => (Which::RequestId(request_id(client, what).await?), 0),
        };
        let request = ReplayRequest {
            worker: worker.to_owned(),
            which: Some(which),
            options: Some(CaptureOptions {
                tokens: 1,
                values: u32::MAX,
                max_bytes: limits::MAX_CAPTURE_BYTES,
                // Values tell of the prompt, and they are what is asked for.
                reveal: true,
                ..CaptureOptions::default()
            }),
            ..ReplayRequest::default()
        };
        let now = computed(client, &request, at.unwrap_or(first), interrupt).await?;
        Ok(Self {
            request,
            now,
            passed: 0,
        })
    }

    fn token(&self) -> u64 {
        self.now.tokens.first().map_or(0, |token| token.index)
    }

    /// Names of all nodes.
    pub(super) fn names(&self) -> Vec<String> {
        let nodes = self.now.head.nodes.iter();
        nodes.map(|node| node.name.clone()).collect()
    }

    fn row(&self, number: usize) -> Option<(&CapturedNode, &NodeValues)> {
        let token = self.now.tokens.first()?;
        (self.now.head.nodes.get(number)).zip(token.nodes.get(number))
    }

    fn number_of(&self, name: &str) -> Result<usize, Failure> {
        let mut nodes = self.now.head.nodes.iter();
        let found = nodes.position(|node| node.name == name);
        found.ok_or_else(|| invalid(format!("no node is named {name}")))
    }

    /// Computes another token, and stands before its first node.
    async fn go(
        &mut self,
        client: &Client,
        at: u64,
        interrupt: &mut Interrupt,
    ) -> Result<(), Failure> {
        self.now = computed(client, &self.request, at, interrupt).await?;
        self.passed = 0;
        Ok(())
    }

    /// Where it stands.
    fn tell(&self, ui: &mut Ui) -> Result<(), Failure> {
        let (token, all) = (self.token(), self.now.head.nodes.len());
        let row = self.now.tokens.first();
        let position = row.map_or(0, |token| token.position);
        if ui.manner.json {
            return ui.print_json(&serde_json::json!({
                "token": token,
                "position": position,
                "passed": self.passed,
                "nodes": all,
            }));
        }
        let (worker, passed) = (&self.now.head.worker, self.passed);
        let text = format!(
            "token {token}, from position {position}, on {worker}: {passed} of {all} nodes"
        );
        ui.print(&format!("{}\n", one_line(&text)))
    }

    fn show(&self, ui: &mut Ui, number: usize) -> Result<(), Failure> {
        match self.row(number) {
            Some((node, row)) if ui.manner.json => ui.print_json(&row_view(node, row)),
            Some((node, row)) => ui.print_text(&node_line(node, row)),
            None => Ok(()),
        }
    }

    async fn step(
        &mut self,
        ui: &mut Ui,
        client: &Client,
        nodes: usize,
        interrupt: &mut Interrupt,
    ) -> Result<(), Failure> {
        for _ in 0..nodes {
            if self.passed >= self.now.head.nodes.len() {
                self.go(client, self.token().saturating_add(1), interrupt)
                    .await?;
                self.tell(ui)?;
            }
            self.show(ui, self.passed)?;
            self.passed += 1;
        }
        Ok(())
    }

    async fn back(
        &mut self,
        ui: &mut Ui,
        client: &Client,
        nodes: usize,
        interrupt: &mut Interrupt,
    ) -> Result<(), Failure> {
        for _ in 0..nodes {
            if self.passed == 0 {
                let before = self.token().checked_sub(1);
                let before = before.ok_or_else(|| invalid("there is nothing before it"))?;
                self.go(client, before, interrupt).await?;
                self.passed = self.now.head.nodes.len();
            }
            self.passed = self.passed.saturating_sub(1);
        }
        self.tell(ui)
    }

    fn print(&self, ui: &mut Ui, node: Option<&str>, style: DumpStyle) -> Result<(), Failure> {
        let number = match node {
            Some(name) => self.number_of(name)?,
            None => {
                let last = self.passed.checked_sub(1);
                last.ok_or_else(|| invalid("no node was passed yet; step, or name one"))?
            }
        };
        let (node, row) = self.row(number).ok_or_else(|| invalid("no such node"))?;
        let values = dump::text(node, row, style)?;
        let values = values.ok_or_else(|| {
            let what = format!("the values of {} were left out: too many", node.name);
            invalid(what)
        })?;
        let dims: Vec<String> = node.dims.iter().map(u64::to_string).collect();
        let text = format!("{} {}[{}]", named(node), node.dtype, dims.join(", "));
        ui.print_text(&format!("{}\n{values}\n", one_line(&text)))
    }

    fn save(&self, ui: &mut Ui, file: &Path, nodes: &[String]) -> Result<(), Failure> {
        let numbers = match nodes {
            [] => (0..self.passed).collect(),
            names => {
                let numbers = names.iter().map(|name| self.number_of(name));
                numbers.collect::<Result<Vec<_>, _>>()?
            }
        };
        let rows = numbers.iter().filter_map(|number| {
            let (node, row) = self.row(*number)?;
            Some((node.name.clone(), self.now.tensor(*number, row)?))
        });
        let tensors: Vec<_> = rows.collect();
        if tensors.is_empty() {
            return Err(invalid("no node was passed yet; step, or name some"));
        }
        TensorFile::write(file, &tensors, None)?;
        let path = file.display().to_string();
        let count = tensors.len();
        if ui.manner.json {
            return ui.print_json(&serde_json::json!({ "file": path, "tensors": count }));
        }
        ui.print(&format!("{}: {count} tensors\n", one_line(&path)))
    }
}

/// Does a line.
pub(super) async fn does(
    ui: &mut Ui,
    client: &Client,
    worker: &str,
    (at, command): (&mut Option<Stepper>, StepCommand),
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    if let StepCommand::Open { what, at: token } = &command {
        let opened = Stepper::open(client, (worker, what, *token), interrupt).await?;
        return at.insert(opened).tell(ui);
    }
    let stepper = at
        .as_mut()
        .ok_or_else(|| invalid("go through what? open a request or a capture first"))?;
    match command {
        StepCommand::Open { .. } => Ok(()),
        StepCommand::Step { nodes } => stepper.step(ui, client, nodes, interrupt).await,
        StepCommand::Back { nodes } => stepper.back(ui, client, nodes, interrupt).await,
        StepCommand::Until { node } => {
            let number = stepper.number_of(&node)?;
            if number < stepper.passed {
                let what = format!(
                    "{node} was passed already; next goes to the next token, back goes back"
                );
                return Err(invalid(what));
            }
            let nodes = number - stepper.passed + 1;
            stepper.step(ui, client, nodes, interrupt).await
        }
        StepCommand::Next => {
            let next = stepper.token().saturating_add(1);
            stepper.go(client, next, interrupt).await?;
            stepper.tell(ui)
        }
        StepCommand::Print { node, style } => stepper.print(ui, node.as_deref(), style),
        StepCommand::Save { file, nodes } => stepper.save(ui, &file, &nodes),
    }
}
