//! Telling everyone who waits that the table changed.
//!
//! Not tokio's `watch`, which wakes those who wait in random order: here they are woken in the order in which they
//! began to wait, so that whoever waits longest for a place looks first.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tokio::sync::Notify;

#[derive(Debug, Default)]
struct Inner {
    /// Counts the changes.
    count: AtomicU64,
    told: Notify,
}

/// Tells of changes. Clones tell the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Teller(Arc<Inner>);

impl Teller {
    /// Wakes everyone who waits.
    pub(super) fn tell(&self) {
        self.0.count.fetch_add(1, Ordering::Release);
        self.0.told.notify_waiters();
    }

    /// Hears of changes from now on.
    pub(super) fn listen(&self) -> Changes {
        Changes {
            seen: self.0.count.load(Ordering::Acquire),
            inner: Arc::clone(&self.0),
        }
    }
}

/// Hears of changes.
#[derive(Clone, Debug)]
pub struct Changes {
    inner: Arc<Inner>,
    seen: u64,
}

impl Changes {
    /// What happened so far is known, and is not to be told again.
    pub fn see(&mut self) {
        self.seen = self.inner.count.load(Ordering::Acquire);
    }

    /// Returns once something changed since the last call of this or [`Changes::see`]. May be dropped and called
    /// again.
    pub async fn changed(&mut self) {
        loop {
            let told = self.inner.told.notified();
            tokio::pin!(told);
            // Before looking, so that a change in between wakes.
            told.as_mut().enable();
            let count = self.inner.count.load(Ordering::Acquire);
            if count != self.seen {
                self.seen = count;
                return;
            }
            told.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_is_missed_and_the_first_to_wait_is_the_first_to_look() {
        let teller = Teller::default();
        let mut changes = teller.listen();
        teller.tell();
        changes.changed().await;
        teller.tell();
        changes.see();
        let order = Arc::new(std::sync::Mutex::new(Vec::new()));
        let waiting: Vec<_> = (0..10)
            .map(|number| {
                let (mut changes, order) = (changes.clone(), Arc::clone(&order));
                tokio::spawn(async move {
                    changes.changed().await;
                    order.lock().unwrap().push(number);
                })
            })
            .collect();
        tokio::task::yield_now().await;
        assert!(order.lock().unwrap().is_empty());
        teller.tell();
        for task in waiting {
            task.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), (0..10).collect::<Vec<_>>());
    }
}
