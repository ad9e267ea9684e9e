//! What the screen shows is gathered by tasks that wait for nobody but the server.

use std::{collections::BTreeMap, time::Duration};

use hotcell_proto::{error::Reason, v1};
use tokio::{sync::mpsc, task::AbortHandle, time::sleep};

use crate::connect::Client;

/// How long until what failed is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// Workers that are looked into at once. The rest is listed only.
pub(super) const WATCHED: usize = 64;

/// Whether a worker can be looked into; the first [`WATCHED`] that can are.
pub(super) fn can_be_looked_into(worker: &v1::WorkerInfo) -> bool {
    worker.pid != 0 && worker.state() != v1::WorkerState::Standby
}

/// What was asked for together.
pub(super) struct Lists {
    pub(super) workers: Vec<v1::WorkerInfo>,
    pub(super) models: Vec<v1::ModelInfo>,
    pub(super) devices: Vec<v1::Device>,
}

/// Something new.
pub(super) enum Update {
    Lists(Lists),
    /// The server did not answer; why.
    Lost(String),
    Sample(Box<v1::WatchSample>),
    /// A worker cannot be looked into; why.
    Blind(String, String),
    Event(v1::Event),
    /// The report of a death.
    Report(String),
    /// How something that was asked for went.
    Said(String),
}

/// The tasks. They end when this is dropped.
pub(super) struct Feed {
    client: Client,
    every: Duration,
    updates: mpsc::Sender<Update>,
    lists: Vec<AbortHandle>,
    /// By worker.
    watchers: BTreeMap<String, AbortHandle>,
}

impl Feed {
    pub(super) fn start(client: Client, every: Duration) -> (Self, mpsc::Receiver<Update>) {
        let (updates, receiver) = mpsc::channel(256);
        let lists = tokio::spawn(list(client.clone(), every, updates.clone()));
        let events = tokio::spawn(events(client.clone(), updates.clone()));
        let feed = Self {
            client,
            every,
            updates,
            lists: vec![lists.abort_handle(), events.abort_handle()],
            watchers: BTreeMap::new(),
        };
        (feed, receiver)
    }

    /// Where updates go.
    pub(super) fn updates(&self) -> mpsc::Sender<Update> {
        self.updates.clone()
    }

    /// Looks into these workers from now on, and into no others.
    pub(super) fn follow(&mut self, workers: &[v1::WorkerInfo]) {
        let wanted = workers
            .iter()
            .filter(|w| can_be_looked_into(w))
            .take(WATCHED);
        let wanted: Vec<&str> = wanted.map(|w| w.id.as_str()).collect();
        self.watchers.retain(|worker, task| {
            let stays = wanted.contains(&worker.as_str());
            if !stays {
                task.abort();
            }
            stays
        });
        for worker in wanted {
            if !self.watchers.contains_key(worker) {
                let (client, updates) = (self.client.clone(), self.updates.clone());
                let task = tokio::spawn(watch(client, worker.to_owned(), self.every, updates));
                self.watchers.insert(worker.to_owned(), task.abort_handle());
            }
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        for task in self.lists.iter().chain(self.watchers.values()) {
            task.abort();
        }
    }
}

async fn list(client: Client, every: Duration, updates: mpsc::Sender<Update>) {
    loop {
        let all = tokio::try_join!(client.workers(), client.models(), client.devices());
        let update = match all {
            Ok((workers, models, devices)) => Update::Lists(Lists {
                workers,
                models,
                devices,
            }),
            Err(error) => Update::Lost(error.message().to_owned()),
        };
        if updates.send(update).await.is_err() {
            return;
        }
        sleep(every).await;
    }
}

async fn events(client: Client, updates: mpsc::Sender<Update>) {
    loop {
        if let Ok(mut events) = client.watch().await {
            while let Some(Ok(event)) = events.next().await {
                if updates.send(Update::Event(event)).await.is_err() {
                    return;
                }
            }
        }
        // That the server is lost is told by the lists.
        sleep(AGAIN).await;
    }
}

async fn watch(client: Client, worker: String, every: Duration, updates: mpsc::Sender<Update>) {
    loop {
        let error = match client.watch_worker(&worker, every).await {
            Ok(mut samples) => loop {
                match samples.next().await {
                    Some(Ok(sample)) => {
                        if updates
                            .send(Update::Sample(Box::new(sample)))
                            .await
                            .is_err()
                        {
                            return;
                        }
                    }
                    Some(Err(error)) => break Some(error),
                    None => break None,
                }
            },
            Err(error) => Some(error),
        };
        let refused = error
            .as_ref()
            .is_some_and(|e| e.reason() == Reason::PermissionDenied);
        let why = error.map_or_else(|| "it ended".to_owned(), |e| e.message().to_owned());
        let said = updates.send(Update::Blind(worker.clone(), why)).await;
        if said.is_err() || refused {
            return;
        }
        sleep(AGAIN).await;
    }
}
