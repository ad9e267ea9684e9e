//! Which blocks of a cache are found by their keys, and whose tokens are in them, for who watches that.
//!
//! What is there is noted always, because who comes to watch wants to know it; changes only while somebody watches. They
//! wait until they are asked for, up to a bound: past it they are forgotten, and all that is there is told anew.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use hotcell_proto::limits;
use tokio::sync::oneshot;

use super::{blocks::Key, useful::Useful};

/// What stands before and in a block.
#[derive(Clone, Copy, Debug)]
pub struct Beginning<'a> {
    /// The key of the block before it; none for a prompt's first.
    pub parent: Option<&'a Key>,
    /// How many blocks are before it.
    pub depth: usize,
    /// Its tokens.
    pub tokens: &'a [u32],
    /// Whose they are.
    pub tenant: &'a str,
}

/// A block that is found by its key. The key itself stays here: who knows it could look for what others asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Stands for the key.
    pub hash: u64,
    /// That of the block before it.
    pub parent: Option<u64>,
    /// How many blocks are before it.
    pub depth: usize,
    /// Its tokens.
    pub tokens: Box<[u32]>,
    /// Whose they are.
    pub tenant: Box<str>,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is found from now on.
    Stored(Arc<Kept>),
    /// The one with this hash is found no more.
    Removed(u64),
}

/// Changes in the order in which they came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// What was told before is void; what is stored follows, blocks after those that are before them.
    pub reset: bool,
    /// What changed.
    pub list: Vec<Change>,
    /// It was looked for, which takes a while, and nothing may have changed.
    pub looked: bool,
}

/// Blocks by their keys.
pub type Entries = HashMap<Key, Arc<Kept>>;

/// Where changes are told.
pub type Reply = oneshot::Sender<Changes>;

/// Changes for somebody who watches.
#[derive(Debug)]
struct Queue {
    watcher: Weak<()>,
    /// All has to be told anew: nothing was told yet, or more changed than may wait.
    reset: bool,
    list: Vec<Change>,
    asked: Option<Reply>,
    /// What was found by [`Ledger::look`], once it looked.
    useful: Option<Useful>,
}

impl Queue {
    fn new(watcher: &Arc<()>) -> Self {
        Self {
            watcher: Arc::downgrade(watcher),
            reset: true,
            list: Vec::new(),
            asked: None,
            useful: None,
        }
    }
}

/// The blocks of one cache.
#[derive(Debug, Default)]
pub struct Ledger {
    kept: Entries,
    queue: Option<Queue>,
}

/// What stands for a key where others hear of it.
pub(super) fn hash(key: &Key) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *key;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

impl Ledger {
    /// A block is found by this key from now on.
    pub fn stored(&mut self, key: Key, of: &Beginning<'_>) {
        let kept = Arc::new(Kept {
            hash: hash(&key),
            parent: of.parent.map(hash),
            depth: of.depth,
            tokens: of.tokens.into(),
            tenant: of.tenant.into(),
        });
        self.note(|| Change::Stored(Arc::clone(&kept)));
        self.kept.insert(key, kept);
    }

    /// No block is found by this key any more.
    pub fn removed(&mut self, key: &Key) {
        self.kept.remove(key);
        self.note(|| Change::Removed(hash(key)));
    }

    fn note(&mut self, change: impl FnOnce() -> Change) {
        let Some(queue) = self.queue.as_mut().filter(|queue| !queue.reset) else {
            return;
        };
        if queue.list.len() < limits::MAX_BLOCK_CHANGES {
            queue.list.push(change());
        } else {
            queue.reset = true;
            queue.list = Vec::new();
        }
    }

    /// Somebody wants to know what changed since the last time: at once, or when something has. Who begins is told all
    /// that is there, and takes the place of who watched before, whose further questions are not answered.
    pub fn ask(&mut self, watcher: &Arc<()>, begins: bool, reply: Reply) {
        if let Some(queue) = self.queue_of(watcher, begins) {
            queue.asked = Some(reply);
            self.tell();
        }
    }

    /// The same where what can be found is not all that counts: `update` says what changed of what is of use, all of it
    /// if it is told so. Answers at once, if need be that nothing changed.
    pub fn look(
        &mut self,
        watcher: &Arc<()>,
        begins: bool,
        update: impl FnOnce(&Entries, &mut Useful, bool) -> Vec<Change>,
        reply: Reply,
    ) {
        if self.queue_of(watcher, begins).is_none() {
            return;
        }
        let Some(queue) = &mut self.queue else { return };
        let reset = queue.useful.is_none();
        let useful = queue.useful.get_or_insert_default();
        let said = Changes {
            reset,
            list: update(&self.kept, useful, reset),
            looked: true,
        };
        if reply.send(said).is_err() {
            // Nobody heard it.
            self.queue = None;
        }
    }

    /// The queue of a watcher that goes on or begins.
    fn queue_of(&mut self, watcher: &Arc<()>, begins: bool) -> Option<&mut Queue> {
        let goes_on = self.queue.as_ref();
        let goes_on = goes_on.is_some_and(|q| q.watcher.as_ptr() == Arc::as_ptr(watcher));
        if !goes_on && begins {
            self.queue = Some(Queue::new(watcher));
        }
        self.queue.as_mut().filter(|_| goes_on || begins)
    }

    /// Whether somebody watches by [`look`](Self::look).
    pub fn is_looked_at(&self) -> bool {
        self.queue.as_ref().is_some_and(|q| q.useful.is_some())
    }

    /// Tells who asked, if there is something to be told.
    pub fn tell(&mut self) {
        let Some(queue) = &mut self.queue else {
            return;
        };
        if queue.watcher.strong_count() == 0 {
            self.queue = None;
            return;
        }
        let is_news = queue.reset || !queue.list.is_empty();
        let Some(reply) = queue.asked.take_if(|_| is_news) else {
            return;
        };
        let reset = std::mem::take(&mut queue.reset);
        let mut list = std::mem::take(&mut queue.list);
        if reset {
            let mut kept: Vec<&Arc<Kept>> = self.kept.values().collect();
            kept.sort_unstable_by_key(|kept| kept.depth);
            list = kept.into_iter().cloned().map(Change::Stored).collect();
        }
        let said = Changes {
            reset,
            list,
            looked: false,
        };
        if reply.send(said).is_err() {
            // Nobody heard it.
            self.queue = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u32) -> Key {
        let mut key = [7; 32];
        key[..4].copy_from_slice(&number.to_le_bytes());
        key
    }

    fn store(ledger: &mut Ledger, number: u32, parent: Option<u32>, depth: usize) {
        let parent = parent.map(key);
        let of = Beginning {
            parent: parent.as_ref(),
            depth,
            tokens: &[number],
            tenant: "t",
        };
        ledger.stored(key(number), &of);
    }

    fn ask(ledger: &mut Ledger, watcher: &Arc<()>, begins: bool) -> oneshot::Receiver<Changes> {
        let (reply, answer) = oneshot::channel();
        ledger.ask(watcher, begins, reply);
        answer
    }

    #[test]
    fn who_begins_is_told_all_and_then_what_changes() {
        let mut ledger = Ledger::default();
        store(&mut ledger, 1, None, 0);
        store(&mut ledger, 2, Some(1), 1);
        store(&mut ledger, 3, None, 0);
        ledger.removed(&key(3));
        let watcher = Arc::new(());
        let told = ask(&mut ledger, &watcher, true).try_recv().unwrap();
        assert!(told.reset);
        let [Change::Stored(first), Change::Stored(second)] = &told.list[..] else {
            panic!("{told:?}");
        };
        assert_eq!((first.hash, first.parent), (hash(&key(1)), None));
        assert_eq!(second.parent, Some(first.hash));
        assert_eq!((&*second.tokens, &*second.tenant), (&[2][..], "t"));

        // Nothing changed yet.
        let mut later = ask(&mut ledger, &watcher, false);
        ledger.tell();
        assert!(later.try_recv().is_err());
        ledger.removed(&key(2));
        store(&mut ledger, 4, None, 0);
        ledger.tell();
        let told = later.try_recv().unwrap();
        assert!(!told.reset && told.list.len() == 2, "{told:?}");
        assert_eq!(told.list[0], Change::Removed(hash(&key(2))));
    }

    #[test]
    fn changes_wait_up_to_a_bound_and_then_all_is_told_anew() {
        let mut ledger = Ledger::default();
        let watcher = Arc::new(());
        ask(&mut ledger, &watcher, true).try_recv().unwrap();
        store(&mut ledger, 1, None, 0);
        for _ in 0..limits::MAX_BLOCK_CHANGES {
            ledger.removed(&key(2));
        }
        store(&mut ledger, 5, None, 0);
        let told = ask(&mut ledger, &watcher, false).try_recv().unwrap();
        assert!(told.reset);
        assert_eq!(told.list.len(), 2);
    }

    #[test]
    fn nobody_is_noted_for_who_left_or_gave_way() {
        let mut ledger = Ledger::default();
        let (one, other) = (Arc::new(()), Arc::new(()));
        ask(&mut ledger, &one, true).try_recv().unwrap();
        let mut waiting = ask(&mut ledger, &one, false);
        ask(&mut ledger, &other, true).try_recv().unwrap();
        assert_eq!(
            waiting.try_recv(),
            Err(oneshot::error::TryRecvError::Closed)
        );
        let mut refused = ask(&mut ledger, &one, false);
        assert_eq!(
            refused.try_recv(),
            Err(oneshot::error::TryRecvError::Closed)
        );
        drop(other);
        ledger.tell();
        assert!(ledger.queue.is_none());
    }
}
