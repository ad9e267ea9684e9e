//! Going on with the models and workers of the program before this one.

use std::{sync::Arc, time::Duration};

use hotcell_proto::{
    error::Error,
    ids::ModelName,
    v1::{Device, Loaded, ModelState, ModelSummary, Serving},
};
use tokio::time::Instant;

use super::{
    Asked, Fleet, Launched, Process, Slot, Sockets, Table,
    catalog::{Model, Standing},
    keeper,
    loading::believe,
};
use crate::{
    discover::with_workers,
    room::Footprint,
    supervisor::Past,
    suspicion,
    vault::{OpenModel, Source},
};

/// A worker as another program left it.
pub struct Heir {
    /// Its name.
    pub id: String,
    /// Its device.
    pub device: Device,
    /// What is remembered of it.
    pub past: Past,
    /// Its process.
    pub live: Option<Live>,
    /// The one untrusted model it is for.
    pub guest: Option<ModelName>,
    /// Whether it gets no new requests.
    pub drained: bool,
}

/// A worker's process that lives on.
pub struct Live {
    /// It, and its sockets.
    pub launched: Launched,
    /// Tags of descriptors from here on are free.
    pub next_tag: u64,
    /// How long it has lived.
    pub uptime: Duration,
    /// The models that it has, in its words.
    pub models: Vec<(ModelName, Loaded)>,
}

/// A process on its way to its keeper.
pub(super) struct Adopted {
    pub(super) process: Box<dyn Process>,
    pub(super) sockets: Sockets,
    /// What it has loaded.
    pub(super) loaded: Asked,
    pub(super) next_tag: u64,
    pub(super) uptime: Duration,
}

impl Adopted {
    /// One that was just started.
    pub(super) fn fresh(process: Box<dyn Process>, sockets: Sockets) -> Self {
        Self {
            process,
            sockets,
            loaded: Asked::new(),
            next_tag: 0,
            uptime: Duration::ZERO,
        }
    }
}

/// What is known of a model that another program held.
#[derive(Debug)]
pub struct Inherited {
    /// Whether it stays known when it is unloaded.
    pub configured: bool,
    /// What was happening to it.
    pub state: ModelState,
    /// A worker's words about it.
    pub summary: Option<ModelSummary>,
    /// How it is served from now on.
    pub serving: Serving,
    /// How the configuration says that it is, if that names it.
    pub configured_serving: Option<Serving>,
    /// What it takes; nothing if nobody measured it.
    pub footprint: Footprint,
}

impl Table {
    /// What of a process another program left is gone on with: the models that are still wanted.
    fn adopt(&mut self, device: &str, live: Live) -> Adopted {
        let mut loaded = Asked::new();
        for (name, got) in live.models {
            let model = self.models.get_mut(&name).filter(|m| m.is_wanted());
            let (Some(model), Ok(got)) = (model, believe(got)) else {
                continue;
            };
            let Some(files) = model.files.clone() else {
                continue;
            };
            model.state = ModelState::Loaded;
            // It stays where it is.
            if model.serving.replicas > 0 {
                let homes = model.homes.get_or_insert_default();
                homes.insert(device.to_owned());
            }
            loaded.insert(name, (files, Some(got)));
        }
        let (process, sockets) = live.launched.split();
        Adopted {
            process,
            sockets,
            loaded,
            next_tag: live.next_tag,
            uptime: live.uptime,
        }
    }
}

impl Fleet {
    /// Makes a model known that another program held open. To be called before workers start.
    pub fn inherit_model(
        &self,
        name: ModelName,
        source: Source,
        held: Inherited,
        files: Option<Result<OpenModel, Error>>,
    ) {
        let Inherited {
            configured,
            state,
            summary,
            serving,
            configured_serving,
            footprint,
        } = held;
        let mut model = Model::new(source, configured);
        if state == ModelState::Retiring {
            model.standing = Standing::Replaced;
        }
        model.footprint = (footprint != Footprint::default()).then_some(footprint);
        match files.transpose() {
            Ok(None) => {
                model.state = ModelState::Asleep;
                model.summary = summary;
            }
            Ok(Some(files)) => {
                model.files = Some(Arc::new(files));
                model.has_room = true;
                model.state = ModelState::Loading;
                model.summary = summary;
            }
            Err(error) => {
                tracing::error!(model = %name, %error, "a model was not handed over");
                model.fail(error);
            }
        }
        let aliases: Result<Vec<_>, _> = serving.aliases.iter().map(ModelName::new).collect();
        model.serving = serving;
        model.configured_serving = configured_serving;
        let mut table = self.table();
        table.models.insert(name.clone(), model);
        let named = aliases.and_then(|aliases| table.give_names(&name, &aliases));
        if let Err(error) = named {
            tracing::error!(model = %name, %error, "a model's names were not handed over");
        }
    }

    /// Whether a model has this name.
    pub fn knows(&self, name: &ModelName) -> bool {
        self.table().key(name).is_some()
    }

    /// Remembers the deaths that were explained, and how many throw-away workers there were.
    pub fn inherit_past(&self, explained: &[suspicion::Process], solos: u64) {
        self.explained().explain(explained);
        self.solos_made
            .fetch_max(solos, std::sync::atomic::Ordering::Relaxed);
    }

    /// [`start`](Self::start), with workers that live already: each goes on if its device is still the same. Those that
    /// fit nowhere end here.
    pub fn start_with(self: &Arc<Self>, devices: Vec<Device>, mut heirs: Vec<Heir>) {
        let usable = with_workers(&devices);
        let mut workers = Vec::new();
        let mut table = self.table();
        for (index, device) in usable.enumerate() {
            let id = format!("w{index}");
            let same = |heir: &Heir| {
                heir.id == id
                    && heir.guest.is_none()
                    && heir.device.id == device.id
                    && heir.device.cores == device.cores
                    && heir.device.members == device.members
            };
            let heir = heirs.iter().position(same).map(|at| heirs.swap_remove(at));
            let drained = heir.as_ref().is_some_and(|heir| heir.drained);
            let heir = heir.map(|heir| {
                (
                    heir.past,
                    heir.live.map(|live| table.adopt(&device.id, live)),
                )
            });
            let mut slot = Slot::new(device.clone());
            slot.drain(drained);
            table.workers.insert(id.clone(), slot);
            workers.push((id, device.clone(), heir));
        }
        table.devices = devices;
        drop(table);
        self.follow_devices();
        self.release_rearranged();
        let mut guests = Vec::new();
        for heir in heirs {
            let still = |d: &Device| d.id == heir.device.id && d.cores == heir.device.cores;
            match &heir.guest {
                Some(guest) if workers.iter().any(|(_, device, _)| still(device)) => {
                    let guest = guest.clone();
                    let live = heir
                        .live
                        .map(|live| self.table().adopt(&heir.device.id, live));
                    let about = (guest, heir.drained);
                    guests.push((heir.id, heir.device, about, (heir.past, live)));
                }
                _ => tracing::info!(worker = heir.id, "its device is not used any more"),
            }
        }
        for (id, device, heir) in workers {
            self.keep_standby(&id, &device);
            self.keepers
                .spawn(keeper::keep(Arc::clone(self), id, device, heir));
        }
        for (id, device, (guest, drained), heir) in guests {
            self.inherit_guest(id, device, (&guest, drained), heir);
        }
        self.host_guests();
        self.keep_alive();
    }

    /// Notes how long a worker has lived already.
    pub(super) fn note_uptime(&self, id: &str, uptime: Duration) {
        if let Some(slot) = self.table().workers.get_mut(id) {
            let now = Instant::now();
            slot.since = now.checked_sub(uptime).unwrap_or(now);
        }
    }
}
