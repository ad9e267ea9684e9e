//! `hotcell graphs`: what is saved under which name.

use clap::{Args, Subcommand};
use hotcell_proto::v1::{NamedTensor, dim::Kind};
use serde_json::{Value, json};

use super::{
    GlobalFlags,
    exit::Failure,
    session::Session,
    table::{Table, bytes},
    ui::Ui,
};

/// `hotcell graphs`.
#[derive(Args, Clone, Debug)]
pub struct GraphsFlags {
    /// What to do instead of listing them.
    #[command(subcommand)]
    pub command: Option<GraphsCommand>,
}

/// What is done with saved graphs.
#[derive(Clone, Debug, Subcommand)]
#[non_exhaustive]
pub enum GraphsCommand {
    /// Forget a saved graph
    Forget {
        /// Its name
        name: String,
    },
    /// Serve a graph again that is refused because workers died of it
    Clear {
        /// Its name
        name: String,
    },
}

/// `x f32[rows, 4]`.
fn tensor(named: &NamedTensor) -> String {
    let spec = named.spec.clone().unwrap_or_default();
    let axes = spec.dims.iter().map(|dim| match dim.kind {
        Some(Kind::Fixed(size)) => size.to_string(),
        _ => "rows".to_owned(),
    });
    let axes: Vec<_> = axes.collect();
    format!("{} {}[{}]", named.name, spec.dtype, axes.join(", "))
}

fn tensors(all: &[NamedTensor]) -> Vec<String> {
    all.iter().map(tensor).collect()
}

pub(crate) async fn graphs(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &GraphsFlags,
) -> Result<(), Failure> {
    let session = Session::running(global).await?;
    if let Some(command) = &flags.command {
        let (done, name) = match command {
            GraphsCommand::Forget { name } => {
                session.client.forget_graph(name).await?;
                ("forgotten", name)
            }
            GraphsCommand::Clear { name } => {
                session.client.clear_graph(name).await?;
                ("cleared", name)
            }
        };
        return match ui.manner.json {
            true => ui.print_json(&json!({ done: name })),
            false => ui.print(&format!("{name} is {done}\n")),
        };
    }
    let graphs = session.client.graphs().await?;
    if ui.manner.json {
        let views = graphs.iter().map(|graph| {
            json!({
                "name": graph.name,
                "inputs": tensors(&graph.inputs),
                "outputs": tensors(&graph.outputs),
                "max_rows": graph.max_rows,
                "bytes": graph.bytes,
                "deaths": graph.deaths,
                "refused": graph.refused,
                "sha256": graph.sha256.iter().map(|b| format!("{b:02x}")).collect::<String>(),
            })
        });
        return ui.print_json(&json!({ "graphs": views.collect::<Vec<Value>>() }));
    }
    let mut table = Table::new(&["GRAPH", "INPUTS", "OUTPUTS", "ROWS", "SIZE", "STATE"]);
    for graph in &graphs {
        table.row([
            graph.name.clone(),
            tensors(&graph.inputs).join(", "),
            tensors(&graph.outputs).join(", "),
            match graph.max_rows {
                0 => String::new(),
                rows => format!("at most {rows}"),
            },
            bytes(graph.bytes),
            match (graph.refused, graph.deaths) {
                (true, deaths) => format!("refused: killed {deaths} workers"),
                (false, 0) => "served".to_owned(),
                (false, deaths) => format!("runs alone: killed {deaths} workers"),
            },
        ]);
    }
    table.print(
        ui,
        "no graph is saved; a program saves one by `Compiled::save`",
    )
}
