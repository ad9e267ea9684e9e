//! Masks of grammars, computed on a thread of their own while the model computes the logits that they are for.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
    time::Duration,
};

use super::grammar::Follower;

/// What a mask must take to be worth handing to another thread and back.
const WORTH: Duration = Duration::from_micros(100);

struct Helper {
    to: SyncSender<(u64, Follower)>,
    from: Receiver<(u64, Follower)>,
}

/// Followers that are away while their next masks are computed.
#[derive(Default)]
pub struct Masks {
    /// Started for the first one.
    helper: Option<Helper>,
    away: usize,
}

impl Masks {
    /// Whether this follower's next mask should be computed beside the model: the last one took its time.
    pub fn pays(follower: &Follower) -> bool {
        follower.cost() >= WORTH
    }

    /// Takes a follower until [`Masks::back`] returns it, by `key`, with its next mask computed. `most` bounds how many are away
    /// at a time. Gives it back at once where there is no thread for it.
    pub fn lend(&mut self, key: u64, follower: Follower, most: usize) -> Option<Follower> {
        if self.helper.is_none() {
            self.helper = start(most);
        }
        let Some(helper) = &self.helper else {
            return Some(follower);
        };
        match helper.to.try_send((key, follower)) {
            Ok(()) => {
                self.away += 1;
                None
            }
            Err(refused) => {
                let (std::sync::mpsc::TrySendError::Full((_, follower))
                | std::sync::mpsc::TrySendError::Disconnected((_, follower))) = refused;
                Some(follower)
            }
        }
    }

    /// One that is away, when it is done; none when all are back.
    pub fn back(&mut self) -> Option<(u64, Follower)> {
        self.away = self.away.checked_sub(1)?;
        // The thread cannot end before all are back.
        self.helper.as_ref()?.from.recv().ok()
    }
}

fn start(most: usize) -> Option<Helper> {
    let (to, inbox) = sync_channel::<(u64, Follower)>(most);
    let (outbox, from) = sync_channel(most);
    let work = move || {
        for (key, mut follower) in inbox {
            let prepared = catch_unwind(AssertUnwindSafe(|| follower.prepare()));
            if prepared.is_err() {
                follower.give_up();
            }
            if outbox.send((key, follower)).is_err() {
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("masks".to_owned());
    thread.spawn(work).ok()?;
    Some(Helper { to, from })
}
