//! `hotcell doctor`: what confines workers here, and what the kernel lacks for it.

use std::time::Duration;

use hotcell_proto::v1;
use serde::Serialize;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::{connect::Client, local::Bundled};

use super::{
    GlobalFlags, exit::Failure, flags::ModelRef, interrupt::Interrupt, json, session::Session,
    table::Table, ui::Ui,
};

/// How long workers that are being started may take to say what confines them.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(50);

#[derive(Serialize)]
struct LayerView<'a> {
    layer: &'a str,
    state: String,
    detail: &'a str,
}

impl<'a> From<&'a v1::ConfinementLayer> for LayerView<'a> {
    fn from(l: &'a v1::ConfinementLayer) -> Self {
        Self {
            layer: &l.layer,
            state: json::layer_state(l.state),
            detail: &l.detail,
        }
    }
}

fn views(layers: &[v1::ConfinementLayer]) -> Vec<LayerView<'_>> {
    layers.iter().map(LayerView::from).collect()
}

/// Workers, once those that are about to start have said what confines them, or take too long.
async fn settled(client: &Client) -> Result<Vec<v1::WorkerInfo>, Failure> {
    let start = Instant::now();
    loop {
        let workers = client.workers().await?;
        let coming =
            |w: &v1::WorkerInfo| w.layers.is_empty() && w.state() == v1::WorkerState::Starting;
        if !workers.iter().any(coming) || start.elapsed() > PATIENCE {
            return Ok(workers);
        }
        sleep(PAUSE).await;
    }
}

pub(crate) async fn doctor(
    ui: &mut Ui,
    global: &GlobalFlags,
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    // A private scheduler needs no model to confine its workers.
    let none = ModelRef::Path(String::new());
    let session = Session::running_or_private(ui, global, false, &none, bundled).await?;
    let look = async {
        let workers = settled(&session.client).await?;
        let host = session.client.host_confinement().await?;
        Ok((host, workers))
    };
    let looked = tokio::select! {
        looked = look => looked,
        () = interrupt.pressed() => Err(Failure::Interrupted),
    };
    session.end().await;
    let (host, workers) = looked?;
    if ui.manner.json {
        let workers: Vec<_> = workers
            .iter()
            .map(|w| json!({ "id": w.id, "pid": w.pid, "layers": views(&w.layers) }))
            .collect();
        return ui.print_json(&json!({ "host": views(&host), "workers": workers }));
    }
    let mut table = Table::new(&["WHERE", "LAYER", "STATE", "DETAIL"]);
    let all = [("host", &host)].into_iter();
    let all = all.chain(workers.iter().map(|w| (w.id.as_str(), &w.layers)));
    for (place, layers) in all {
        for l in layers {
            table.row([
                place.to_owned(),
                l.layer.clone(),
                json::layer_state(l.state).replace('_', " "),
                l.detail.clone(),
            ]);
        }
    }
    table.print(ui, "nobody says what confines it")
}
