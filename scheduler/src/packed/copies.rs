//! The packed copies of one model: one set of files for each layout that a worker asked for, and how far it is.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use hotcell_proto::{
    ids::Layout,
    limits,
    v1::{PackedInfo, PackedState},
};

use super::{Copy, Packs};

/// Numbers complete copies, of all models: one that is loaded again under its name is another one.
static GENERATIONS: AtomicU64 = AtomicU64::new(1);

/// Layouts of one model at most.
const MAX_LAYOUTS: usize = 8;

/// Complete copies of a model's files, each with the file's index.
pub type Set = Arc<Vec<(u32, Arc<Copy>)>>;

/// What is known of a model's copies.
#[derive(Debug, Default)]
pub struct Copies(Mutex<BTreeMap<Layout, Held>>);

#[derive(Debug, Default)]
struct Held {
    state: State,
    /// Sets that there were: who refused one may like the next.
    generation: u64,
    failures: u32,
    packings: u32,
    problem: String,
}

#[derive(Debug, Default)]
enum State {
    /// Nobody makes it.
    #[default]
    Waiting,
    /// Bytes that are done, and all.
    Packing(u64, u64),
    Ready(Set),
    /// There will be none.
    Failed,
}

impl Copies {
    fn all(&self) -> MutexGuard<'_, BTreeMap<Layout, Held>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The complete set, and its number, if it is still what it was.
    pub fn ready(&self, layout: &Layout) -> Option<(Set, u64)> {
        let mut all = self.all();
        let held = all.get_mut(layout)?;
        let State::Ready(set) = &held.state else {
            return None;
        };
        if set.iter().all(|(_, copy)| copy.is_unchanged()) {
            return Some((Arc::clone(set), held.generation));
        }
        held.state = State::Waiting;
        None
    }

    /// Whether somebody should make it.
    pub fn is_wanted(&self, layout: &Layout) -> bool {
        let all = self.all();
        match all.get(layout) {
            Some(held) => matches!(held.state, State::Waiting),
            None => all.len() < MAX_LAYOUTS,
        }
    }

    fn edit(&self, layout: &Layout, change: impl FnOnce(&mut Held)) {
        let mut all = self.all();
        if all.len() < MAX_LAYOUTS || all.contains_key(layout) {
            change(all.entry(layout.clone()).or_default());
        }
    }

    /// Somebody makes it: so many bytes are done.
    pub fn progress(&self, layout: &Layout, done: u64, total: u64) {
        self.edit(layout, |held| held.state = State::Packing(done, total));
    }

    /// Nobody makes it any more, and nothing went wrong.
    pub fn put_off(&self, layout: &Layout) {
        self.edit(layout, |held| {
            if let State::Packing(..) = held.state {
                held.state = State::Waiting;
            }
        });
    }

    /// It is there; a worker made it, or it was found.
    pub fn complete(&self, layout: &Layout, set: Set, made: bool) {
        self.edit(layout, |held| {
            held.state = State::Ready(set);
            held.generation = GENERATIONS.fetch_add(1, Ordering::Relaxed);
            held.packings += u32::from(made);
            held.problem.clear();
        });
    }

    /// Making it failed. Says whether it is given up.
    pub fn fail(&self, layout: &Layout, why: &str) -> bool {
        let mut given_up = false;
        self.edit(layout, |held| {
            held.failures += 1;
            given_up = held.failures >= limits::PACK_ATTEMPTS;
            held.state = match given_up {
                true => State::Failed,
                false => State::Waiting,
            };
            why.clone_into(&mut held.problem);
        });
        given_up
    }

    /// It cannot be made.
    pub fn give_up(&self, layout: &Layout, why: &str) {
        self.edit(layout, |held| {
            held.state = State::Failed;
            why.clone_into(&mut held.problem);
        });
    }

    /// What was made cannot be believed: nobody is given it any more. Says which layouts are given up.
    pub fn distrust(&self, packs: &Packs, only: Option<u64>, why: &str) -> Vec<Layout> {
        let mut sets = Vec::new();
        for (layout, held) in self.all().iter() {
            if let State::Ready(set) = &held.state
                && only.is_none_or(|only| only == held.generation)
            {
                sets.push((layout.clone(), Arc::clone(set)));
            }
        }
        sets.retain(|(layout, set)| {
            set.iter().for_each(|(_, copy)| packs.discard(copy));
            self.fail(layout, why)
        });
        sets.into_iter().map(|(layout, _)| layout).collect()
    }

    /// For people; the workers are for who knows them to fill in.
    pub fn infos(&self) -> Vec<PackedInfo> {
        let all = self.all();
        let info = |(layout, held): (&Layout, &Held)| {
            let (state, bytes_done, bytes_total) = match &held.state {
                State::Waiting => (PackedState::Waiting, 0, 0),
                State::Packing(done, total) => (PackedState::Packing, *done, *total),
                State::Failed => (PackedState::Failed, 0, 0),
                State::Ready(set) => {
                    let lengths = set.iter().map(|(_, copy)| copy.identity().len);
                    let bytes = lengths.fold(0, u64::saturating_add);
                    (PackedState::Ready, bytes, bytes)
                }
            };
            PackedInfo {
                layout: layout.as_str().to_owned(),
                state: state.into(),
                bytes_done,
                bytes_total,
                packings: held.packings,
                workers: Vec::new(),
                problem: held.problem.clone(),
            }
        };
        all.iter().map(info).collect()
    }

    /// Every complete copy: its layout, file's index, and how often the set was made.
    pub fn held(&self) -> Vec<(Layout, u32, Arc<Copy>, u32)> {
        let mut held = Vec::new();
        for (layout, one) in self.all().iter() {
            if let State::Ready(set) = &one.state {
                let copy = |(index, copy): &(u32, Arc<Copy>)| {
                    (layout.clone(), *index, Arc::clone(copy), one.packings)
                };
                held.extend(set.iter().map(copy));
            }
        }
        held
    }

    /// Takes a set from the program before this one.
    pub fn inherit(&self, layout: &Layout, set: Set, packings: u32) {
        self.complete(layout, set, false);
        self.edit(layout, |held| held.packings = packings);
    }
}

#[cfg(test)]
mod tests {
    use hotcell_ipc::memory::{FileIdentity, sealed_memory};

    use super::*;

    fn set() -> Set {
        let fd = sealed_memory("x", b"abc").unwrap();
        let identity = FileIdentity::of(&fd).unwrap();
        Arc::new(vec![(1, Arc::new(Copy::inherit(fd, identity).unwrap()))])
    }

    #[test]
    fn it_is_made_again_a_few_times_and_then_given_up() {
        let (copies, packs) = (Copies::default(), Packs::new(None, None));
        let layout = Layout::new("l").unwrap();
        assert!(copies.is_wanted(&layout) && copies.ready(&layout).is_none());
        copies.progress(&layout, 1, 2);
        assert!(!copies.is_wanted(&layout));
        copies.put_off(&layout);
        assert!(!copies.fail(&layout, "one died") && copies.is_wanted(&layout));
        copies.complete(&layout, set(), true);
        let (_, first) = copies.ready(&layout).unwrap();
        assert!(copies.distrust(&packs, Some(first + 1), "no").is_empty());
        assert!(copies.ready(&layout).is_some());
        assert!(copies.distrust(&packs, Some(first), "no").is_empty());
        copies.complete(&layout, set(), true);
        assert_ne!(copies.ready(&layout).unwrap().1, first);
        assert_eq!(copies.infos()[0].packings, 2);
        let distrusted = copies.distrust(&packs, None, "wrong");
        assert_eq!(distrusted, std::slice::from_ref(&layout));
        let info = &copies.infos()[0];
        assert_eq!(
            (info.state(), info.problem.as_str()),
            (PackedState::Failed, "wrong")
        );
        assert!(!copies.is_wanted(&layout) && copies.held().is_empty());
    }

    #[test]
    fn a_worker_cannot_ask_for_any_number_of_layouts() {
        let copies = Copies::default();
        for n in 0..100 {
            let layout = Layout::new(format!("l{n}")).unwrap();
            copies.give_up(&layout, "full");
        }
        assert_eq!(copies.infos().len(), MAX_LAYOUTS);
        assert!(!copies.is_wanted(&Layout::new("l99").unwrap()));
    }
}
