//! Who holds how many bytes: an account per session under the worker's.

use std::sync::{Arc, Mutex, MutexGuard};

use hotcell_proto::error::{Error, Reason};

/// What an account holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use.
    pub active: u64,
    /// Bytes freed and kept for later.
    pub cached: u64,
    /// Most bytes in use at once since the last reset.
    pub peak: u64,
    /// Bytes at most, both kinds together.
    pub limit: u64,
}

impl Usage {
    /// Bytes that could still be charged.
    pub fn available(&self) -> u64 {
        self.limit.saturating_sub(self.active + self.cached)
    }
}

/// Counts bytes against a limit, and against its parent's.
#[derive(Debug)]
pub struct Account {
    parent: Option<Arc<Account>>,
    usage: Mutex<Usage>,
}

impl Account {
    /// An account of at most `limit` bytes.
    pub fn new(limit: u64, parent: Option<Arc<Account>>) -> Arc<Self> {
        let usage = Usage {
            limit,
            ..Usage::default()
        };
        Arc::new(Self {
            parent,
            usage: Mutex::new(usage),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Usage> {
        // Nothing panics while it is held.
        self.usage.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// What it holds now.
    pub fn usage(&self) -> Usage {
        *self.lock()
    }

    /// Bytes that could still be charged here and above.
    pub fn available(&self) -> u64 {
        let above = self.parent.as_ref().map_or(u64::MAX, |p| p.available());
        self.usage().available().min(above)
    }

    /// Sets the limit; what is above it already stays.
    pub fn set_limit(&self, limit: u64) {
        self.lock().limit = limit;
    }

    /// Lets the peak begin again from what is in use.
    pub fn reset_peak(&self) {
        let mut usage = self.lock();
        usage.peak = usage.active;
    }

    fn add(&self, what: &str, bytes: u64) -> Result<(), Error> {
        {
            let mut usage = self.lock();
            let available = usage.available();
            if bytes > available {
                let (reason, whose) = match self.parent {
                    Some(_) => (Reason::QuotaExceeded, "session"),
                    None => (Reason::OutOfMemory, "worker"),
                };
                let message = format!(
                    "{what} needs {bytes} bytes and the {whose} has {available} left; free something first"
                );
                return Err(Error::new(reason, message)
                    .with("bytes", bytes)
                    .with("available", available));
            }
            usage.active += bytes;
            usage.peak = usage.peak.max(usage.active);
        }
        if let Some(parent) = &self.parent
            && let Err(error) = parent.add(what, bytes)
        {
            self.lock().active -= bytes;
            return Err(error);
        }
        Ok(())
    }

    fn remove(&self, bytes: u64, cached: bool) {
        let mut usage = self.lock();
        let from = match cached {
            true => &mut usage.cached,
            false => &mut usage.active,
        };
        *from = from.saturating_sub(bytes);
        drop(usage);
        if let Some(parent) = &self.parent {
            parent.remove(bytes, cached);
        }
    }

    fn turn(&self, bytes: u64, cached: bool) {
        let mut usage = self.lock();
        if cached {
            usage.active = usage.active.saturating_sub(bytes);
            usage.cached += bytes;
        } else {
            usage.cached = usage.cached.saturating_sub(bytes);
            usage.active += bytes;
            usage.peak = usage.peak.max(usage.active);
        }
        drop(usage);
        if let Some(parent) = &self.parent {
            parent.turn(bytes, cached);
        }
    }

    /// Takes bytes from the account, until the charge is dropped.
    ///
    /// # Errors
    /// [`Reason::QuotaExceeded`] when the session has not so many left, [`Reason::OutOfMemory`] when the worker has not.
    pub fn charge(self: &Arc<Self>, what: &str, bytes: u64) -> Result<Charge, Error> {
        self.add(what, bytes)?;
        Ok(Charge {
            account: Arc::clone(self),
            bytes,
            cached: false,
        })
    }
}

/// Bytes taken from an account.
#[derive(Debug)]
pub struct Charge {
    account: Arc<Account>,
    bytes: u64,
    cached: bool,
}

impl Charge {
    /// How many they are.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counts them as in use, or as freed and kept.
    pub fn set_cached(&mut self, cached: bool) {
        if self.cached != cached {
            self.cached = cached;
            self.account.turn(self.bytes, cached);
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.remove(self.bytes, self.cached);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_limits_hold_and_everything_comes_back() {
        let worker = Account::new(100, None);
        let (a, b) = (
            Account::new(80, Some(Arc::clone(&worker))),
            Account::new(80, Some(Arc::clone(&worker))),
        );
        let reason = |r: Result<Charge, Error>| r.map(|_| ()).map_err(|e| e.reason());
        let mut first = a.charge("x", 70).unwrap();
        assert_eq!(reason(a.charge("x", 11)), Err(Reason::QuotaExceeded));
        assert_eq!(reason(b.charge("x", 31)), Err(Reason::OutOfMemory));
        assert_eq!(b.usage().active, 0);
        assert_eq!(b.available(), 30);
        first.set_cached(true);
        assert_eq!((a.usage().active, a.usage().cached), (0, 70));
        assert_eq!(reason(a.charge("x", 11)), Err(Reason::QuotaExceeded));
        first.set_cached(false);
        drop(first);
        assert_eq!(a.usage().peak, 70);
        assert_eq!(worker.usage().active + worker.usage().cached, 0);
        assert_eq!(reason(b.charge("x", u64::MAX)), Err(Reason::QuotaExceeded));
    }
}
