//! Packed copies of models: one worker makes each, and all that have the model compute with it. A step towards speed,
//! never in the way of anything: requests are served meanwhile, and if nothing comes of it.

use std::{
    collections::BTreeMap,
    fs::File,
    os::{fd::AsFd, unix::fs::FileExt},
    sync::Arc,
    time::Duration,
};

use hotcell_ipc::memory::shared_memory;
use hotcell_proto::{
    error::Reason,
    ids::{Layout, ModelName},
    limits,
    v1::{Loaded, PackPiece},
};
use tokio::{
    task::{JoinSet, spawn_blocking},
    time::{Instant, sleep},
};

use super::{Fleet, Link, catalog::Model};
use crate::{
    packed::{Draft, Set},
    vault::OpenModel,
};

/// Before another try.
const PAUSE: Duration = Duration::from_millis(250);

/// A copy that is to be made.
struct Job {
    link: Arc<Link>,
    model: ModelName,
    files: Arc<OpenModel>,
    layout: Layout,
    /// The files with weights to pack.
    indices: Vec<u32>,
}

/// A worker that is to compute with a copy.
struct Switch {
    link: Arc<Link>,
    model: ModelName,
    files: Arc<OpenModel>,
    layout: Layout,
    set: Set,
    generation: u64,
}

/// Why there is no copy.
enum Unmade {
    /// Nobody wants it any more.
    Unwanted,
    /// Something went wrong; another try may go well.
    Failed(String),
    /// No try will.
    Hopeless(String),
}

fn failed(why: impl ToString) -> Unmade {
    Unmade::Failed(why.to_string())
}

/// The open files of a model that is wanted, and how the worker that loaded it would have them packed.
fn packable<'a>(
    models: &'a BTreeMap<ModelName, Model>,
    name: &ModelName,
    loaded: &Loaded,
) -> Option<(&'a Arc<OpenModel>, Layout)> {
    let model = models.get(name).filter(|model| model.is_wanted())?;
    let layout = Layout::new(loaded.packing.as_str()).ok()?;
    Some((model.files.as_ref()?, layout))
}

impl Fleet {
    /// Begins to see to packed copies, if there are to be any, until the fleet stops.
    pub fn keep_packed(self: &Arc<Self>) {
        if self.packs.is_on() {
            self.keepers.spawn(Arc::clone(self).see_to_packing());
        }
    }

    async fn see_to_packing(self: Arc<Self>) {
        let mut changed = self.changes();
        // One copy at a time; those who take one wait for nobody.
        let (mut making, mut switching) = (JoinSet::new(), JoinSet::new());
        loop {
            changed.see();
            for switch in self.due_switches() {
                let fleet = Arc::clone(&self);
                switching.spawn(async move { fleet.switch(switch).await });
            }
            if making.is_empty()
                && let Some(job) = self.next_job()
            {
                let fleet = Arc::clone(&self);
                making.spawn(async move { fleet.make(job).await });
            }
            tokio::select! {
                () = self.stop.cancelled() => return,
                Some(_) = making.join_next() => {}
                Some(_) = switching.join_next() => {}
                () = changed.changed() => {}
            }
        }
    }

    /// Workers that lack a copy which is there. Each is asked once.
    fn due_switches(&self) -> Vec<Switch> {
        let mut table = self.table();
        let table = &mut *table;
        let mut due = Vec::new();
        for slot in table.workers.values_mut() {
            let Some(link) = slot.serving().cloned() else {
                continue;
            };
            for (name, loaded) in &slot.models {
                let Some((files, layout)) = packable(&table.models, name, loaded) else {
                    continue;
                };
                if loaded.packed || slot.unexamined.contains(name) {
                    continue;
                }
                let Some((set, generation)) = files.copies().ready(&layout) else {
                    continue;
                };
                if slot.offered.insert(name.clone(), generation) != Some(generation) {
                    due.push(Switch {
                        link: Arc::clone(&link),
                        model: name.clone(),
                        files: Arc::clone(files),
                        layout,
                        set,
                        generation,
                    });
                }
            }
        }
        due
    }

    /// The next copy to make, and by whom: the worker with the least to do.
    fn next_job(&self) -> Option<Job> {
        let table = self.table();
        let mut slots: Vec<_> = table.workers.values().collect();
        slots.sort_by_key(|slot| slot.outstanding());
        for slot in slots {
            let Some(link) = slot.serving() else { continue };
            for (name, loaded) in &slot.models {
                let Some((files, layout)) = packable(&table.models, name, loaded) else {
                    continue;
                };
                // What it computes from a copy is held to what it computes without.
                if !slot.unexamined.contains(name)
                    && !loaded.packing_files.is_empty()
                    && files.copies().is_wanted(&layout)
                {
                    return Some(Job {
                        link: Arc::clone(link),
                        model: name.clone(),
                        files: Arc::clone(files),
                        layout,
                        indices: loaded.packing_files.clone(),
                    });
                }
            }
        }
        None
    }

    /// Whether a model is still what it was when it was opened.
    fn is_current(&self, model: &ModelName, files: &Arc<OpenModel>) -> bool {
        let table = self.table();
        let model = table.models.get(model).filter(|m| m.is_wanted());
        model.is_some_and(|m| m.files.as_ref().is_some_and(|f| Arc::ptr_eq(f, files)))
    }

    async fn make(&self, job: Job) {
        let copies = job.files.copies();
        copies.progress(&job.layout, 0, 0);
        let (model, layout) = (&job.model, &job.layout);
        let began = Instant::now();
        match self.try_make(&job).await {
            Ok((set, made)) => {
                let took = began.elapsed();
                copies.complete(layout, set, made);
                match made {
                    true => {
                        tracing::info!(%model, worker = job.link.worker, %layout, ?took, "weights packed");
                    }
                    false => tracing::info!(%model, %layout, "packed weights found"),
                }
            }
            Err(Unmade::Unwanted) => copies.put_off(layout),
            Err(Unmade::Failed(why)) => {
                sleep(PAUSE).await;
                let given_up = copies.fail(layout, &why);
                let attempts = limits::PACK_ATTEMPTS;
                match given_up {
                    true => {
                        tracing::warn!(%model, %layout, why, "packing failed {attempts} times; the model goes on unpacked");
                    }
                    false => tracing::info!(%model, %layout, why, "packing failed"),
                }
            }
            Err(Unmade::Hopeless(why)) => {
                copies.give_up(layout, &why);
                tracing::warn!(%model, %layout, why, "the model goes on unpacked");
            }
        }
        self.tell();
    }

    /// Finds what there is of a copy, and has the worker make the rest. Says whether it made any.
    async fn try_make(&self, job: &Job) -> Result<(Set, bool), Unmade> {
        let Job {
            link,
            model,
            files,
            layout,
            indices,
        } = job;
        let keys = indices.iter().map(|index| {
            let key = files.key(*index, layout);
            let unknown = || Unmade::Hopeless("the worker names files that there are not".into());
            Ok((*index, key.ok_or_else(unknown)?))
        });
        let keys = keys.collect::<Result<Vec<_>, _>>()?;
        let (packs, inherited) = (Arc::clone(&self.packs), files.is_inherited());
        let begun = spawn_blocking(move || {
            let (mut found, mut drafts) = (BTreeMap::new(), BTreeMap::new());
            for (index, key) in keys {
                match packs.find(&key, inherited) {
                    Some(copy) => drop(found.insert(index, copy)),
                    None => drop(drafts.insert(index, packs.begin(&key, inherited)?)),
                }
            }
            Ok((found, drafts))
        });
        let begun = begun.await.map_err(failed)?;
        let (mut set, mut drafts) = begun.map_err(Unmade::Hopeless)?;
        let made = !drafts.is_empty();
        if made {
            let memory = shared_memory("hotcell-pieces", limits::PACK_PIECE as u64);
            let memory = memory.map_err(|e| Unmade::Hopeless(format!("no memory: {e}")))?;
            let missing: Vec<u32> = drafts.keys().copied().collect();
            let pieces = tokio::select! {
                biased;
                () = link.fate.gone.cancelled() => return Err(gone(link)),
                pieces = link.pack(model, &missing, memory.as_fd()) => pieces,
            };
            let mut pieces = pieces.map_err(|error| self.unmade(job, &error))?;
            let mut taker = Taker::new(memory.into(), drafts);
            loop {
                let piece = tokio::select! {
                    biased;
                    piece = pieces.next(link) => piece.map_err(|error| self.unmade(job, &error))?,
                    () = link.fate.gone.cancelled() => return Err(gone(link)),
                };
                if !self.is_current(model, files) {
                    return Err(Unmade::Unwanted);
                }
                if piece.bytes == 0 {
                    break;
                }
                files
                    .copies()
                    .progress(layout, piece.bytes_done, piece.bytes_total);
                taker = taker.take(piece).await?;
                pieces.ask();
            }
            drafts = taker.drafts;
        }
        // What was packed may have been another file's bytes.
        files
            .check()
            .map_err(|error| Unmade::Hopeless(error.to_string()))?;
        let packs = Arc::clone(&self.packs);
        let finished = spawn_blocking(move || {
            let finish = |(index, draft)| Ok((index, packs.finish(draft)?));
            drafts
                .into_iter()
                .map(finish)
                .collect::<Result<Vec<_>, String>>()
        });
        set.extend(finished.await.map_err(failed)?.map_err(Unmade::Hopeless)?);
        Ok((Arc::new(set.into_iter().collect()), made))
    }

    fn unmade(&self, job: &Job, error: &hotcell_proto::error::Error) -> Unmade {
        match self.is_current(&job.model, &job.files) {
            true => failed(error),
            false => Unmade::Unwanted,
        }
    }

    /// Has a worker compute with a copy.
    async fn switch(&self, switch: Switch) {
        let Switch {
            link,
            model,
            files,
            layout,
            set,
            generation,
        } = switch;
        let switched = tokio::select! {
            biased;
            () = link.fate.gone.cancelled() => return,
            switched = link.use_packed(&model, &layout, &set) => switched,
        };
        match switched {
            Ok(()) => {
                let loaded = self.note_switched(&link, &model);
                tracing::info!(%model, worker = link.worker, %layout, "computes with packed weights");
                // The same bits as before, or somebody is wrong.
                if let Some(loaded) = loaded
                    && let Err(why) = self.examine(&link, &model, &loaded).await
                {
                    self.sentence(&link, why);
                }
            }
            Err(error) if error.reason() == Reason::ModelChanged => {
                let why = format!(
                    "worker {} does not take it: {}",
                    link.worker,
                    error.message()
                );
                self.distrust(&model, &files, Some(generation), &why);
            }
            Err(error) => {
                tracing::warn!(%model, worker = link.worker, %error, "packed weights are not used");
            }
        }
        self.tell();
    }

    /// A worker computes with a copy of a model from now on.
    fn note_switched(&self, link: &Link, model: &ModelName) -> Option<Loaded> {
        let mut table = self.table();
        let slot = table.workers.get_mut(&link.worker);
        let slot = slot.filter(|slot| slot.is_alive(link.epoch))?;
        let loaded = slot.models.get_mut(model)?;
        loaded.packed = true;
        Some(loaded.clone())
    }

    /// Has a copy made anew: what there is cannot be believed.
    fn distrust(&self, model: &ModelName, files: &OpenModel, only: Option<u64>, why: &str) {
        tracing::warn!(%model, why, "packed weights are in doubt");
        for layout in files.copies().distrust(&self.packs, only, why) {
            tracing::warn!(%model, %layout, "the model goes on unpacked");
        }
    }

    /// The same for all copies of a model.
    pub(super) fn distrust_copies(&self, model: &ModelName, why: &str) {
        let files = {
            let table = self.table();
            table.models.get(model).and_then(|m| m.files.clone())
        };
        if let Some(files) = files {
            self.distrust(model, &files, None, why);
        }
    }

    /// What there is for a worker that has not said yet which files it would like packed.
    pub(super) async fn copies_for(
        &self,
        link: &Link,
        files: &Arc<OpenModel>,
    ) -> Option<(Layout, Set)> {
        let layout = link.layout().filter(|_| self.packs.is_on())?.clone();
        if let Some((set, _)) = files.copies().ready(&layout) {
            return Some((layout, set));
        }
        if !files.copies().is_wanted(&layout) {
            return None;
        }
        let (packs, files, wanted) = (Arc::clone(&self.packs), Arc::clone(files), layout.clone());
        let found = spawn_blocking(move || {
            let find = |index| {
                let key = files.key(index, &wanted)?;
                Some((index, packs.find(&key, files.is_inherited())?))
            };
            let all = 0..u32::try_from(files.handles().len()).unwrap_or(0);
            all.filter_map(find).collect::<Vec<_>>()
        });
        let set = found.await.ok().filter(|set| !set.is_empty())?;
        Some((layout, Arc::new(set)))
    }

    /// Notes what a worker made of the copies that it was given with a model.
    pub(super) fn note_offered(
        &self,
        model: &ModelName,
        files: &OpenModel,
        layout: &Layout,
        set: &Set,
        got: &Loaded,
    ) {
        if got.packing != layout.as_str() || got.packing_files.is_empty() {
            return;
        }
        let has = |index: &u32| set.iter().any(|(held, _)| held == index);
        let is_whole = got.packing_files.iter().all(has);
        match (got.packed, files.copies().ready(layout)) {
            (true, None) if is_whole => {
                let mut set = Vec::clone(set);
                set.retain(|(index, _)| got.packing_files.contains(index));
                files.copies().complete(layout, Arc::new(set), false);
                tracing::info!(%model, %layout, "packed weights found");
            }
            (false, None) if is_whole => {
                set.iter().for_each(|(_, copy)| self.packs.discard(copy));
                tracing::warn!(%model, %layout, "packed weights that were found are not used");
            }
            (false, Some((_, generation))) if is_whole => {
                let why = "a worker did not take it with the model";
                self.distrust(model, files, Some(generation), why);
            }
            _ => {}
        }
    }
}

fn gone(link: &Link) -> Unmade {
    failed(format!("worker {} died while it packed", link.worker))
}

/// Puts pieces in their places.
struct Taker {
    memory: File,
    drafts: BTreeMap<u32, Draft>,
    buffer: Vec<u8>,
    /// Bytes that may still come.
    left: u64,
}

impl Taker {
    fn new(memory: File, drafts: BTreeMap<u32, Draft>) -> Self {
        let left = drafts
            .values()
            .map(Draft::bytes)
            .fold(0, u64::saturating_add);
        Self {
            memory,
            drafts,
            buffer: Vec::new(),
            left,
        }
    }

    /// Takes a piece out of the shared memory.
    async fn take(mut self, piece: PackPiece) -> Result<Self, Unmade> {
        let wrong = |what: &str| Unmade::Hopeless(format!("the worker sends {what}"));
        let count = usize::try_from(piece.bytes).unwrap_or(usize::MAX);
        if count > limits::PACK_PIECE {
            return Err(wrong("more than there is room for"));
        }
        // None comes twice, so there is an end.
        let left = self.left.checked_sub(piece.bytes);
        self.left = left.ok_or_else(|| wrong("more than the files hold"))?;
        if !self.drafts.contains_key(&piece.file) {
            return Err(wrong("a file that it was not asked for"));
        }
        let taken = spawn_blocking(move || {
            self.buffer.resize(count, 0);
            self.memory.read_exact_at(&mut self.buffer, 0)?;
            if let Some(draft) = self.drafts.get(&piece.file) {
                draft.write(piece.offset, &self.buffer)?;
            }
            Ok(self)
        });
        let taken: std::io::Result<Self> = taken.await.map_err(failed)?;
        taken.map_err(|error| Unmade::Hopeless(format!("the copy cannot be written: {error}")))
    }
}
