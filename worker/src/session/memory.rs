//! Memory of tensors: charged before it is allocated, and kept for the same session when it is freed.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    ops::Range,
    rc::{Rc, Weak},
    sync::Arc,
};

use bytes::Bytes;
use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError},
    host::{SharedBytes, Staging},
};
use hotcell_proto::{
    error::{Error, Reason},
    v1,
};

use super::{
    account::{Account, Charge, Usage},
    plan,
};
use crate::{debug::observer::Observer, error::of_plan, session::shared::Region, weights::Weight};

/// The device, the worker's account, and every session's freed memory.
pub struct Hub {
    /// The device.
    pub device: Rc<dyn Device>,
    /// The worker's account.
    pub account: Arc<Account>,
    /// Where calls of plans are noted while somebody watches.
    observer: Arc<Observer>,
    pools: RefCell<Vec<Weak<Pool>>>,
    /// Plans that were made, and calls of plans that ended well.
    pub compiled: Cell<u64>,
    /// See `compiled`.
    pub executed: Cell<u64>,
}

impl Hub {
    /// A worker whose tensors take `limit` bytes at most.
    pub fn new(device: Rc<dyn Device>, limit: u64, observer: Arc<Observer>) -> Rc<Self> {
        Rc::new(Self {
            device,
            observer,
            account: Account::new(limit, None),
            pools: RefCell::default(),
            compiled: Cell::default(),
            executed: Cell::default(),
        })
    }

    fn clear(&self) {
        for pool in self.pools.borrow().iter().filter_map(Weak::upgrade) {
            pool.clear();
        }
    }
}

/// Freed buffers that a session keeps at most: each takes memory of the worker's beside its bytes, which are what is counted.
const MOST_KEPT: usize = 1024;

/// A session's memory. What it frees is kept for itself and never given to others.
pub struct Pool {
    hub: Rc<Hub>,
    account: Arc<Account>,
    freed: RefCell<BTreeMap<usize, Vec<(Buffer, Charge)>>>,
    /// How many these are.
    kept: Cell<usize>,
    cache_limit: Cell<u64>,
    dry_run: bool,
}

impl Pool {
    /// Notes that a plan was made.
    pub fn compiled(&self) {
        let count = &self.hub.compiled;
        count.set(count.get().saturating_add(1));
    }

    /// Notes that a plan's call ended well.
    pub fn executed(&self) {
        let count = &self.hub.executed;
        count.set(count.get().saturating_add(1));
    }

    /// The memory of a session that may hold `limit` bytes. `dry_run`: bytes are counted, and not allocated.
    pub fn new(hub: &Rc<Hub>, limit: u64, dry_run: bool) -> Rc<Self> {
        // What is only counted must take nothing from those who have real memory.
        let parent = match dry_run {
            true => Account::new(u64::MAX, None),
            false => Arc::clone(&hub.account),
        };
        let pool = Rc::new(Self {
            hub: Rc::clone(hub),
            account: Account::new(limit, Some(parent)),
            freed: RefCell::default(),
            kept: Cell::new(0),
            cache_limit: Cell::new(limit),
            dry_run,
        });
        let mut pools = hub.pools.borrow_mut();
        pools.retain(|p| p.strong_count() > 0);
        pools.push(Rc::downgrade(&pool));
        pool
    }

    /// The session's account.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Where calls of plans are noted.
    pub fn observer(&self) -> &Observer {
        &self.hub.observer
    }

    /// The device.
    pub fn device(&self) -> &Rc<dyn Device> {
        &self.hub.device
    }

    /// Whether bytes are only counted.
    pub fn dry_run(&self) -> bool {
        self.dry_run
    }

    /// Freed bytes that are kept at most.
    pub fn cache_limit(&self) -> u64 {
        self.cache_limit.get()
    }

    /// Sets how many freed bytes are kept at most.
    pub fn set_cache_limit(&self, limit: u64) {
        self.cache_limit.set(limit);
        if self.account.usage().cached > limit {
            self.clear();
        }
    }

    /// Gives freed memory back to the system.
    pub fn clear(&self) {
        let freed = std::mem::take(&mut *self.freed.borrow_mut());
        self.kept.set(0);
        drop(freed);
    }

    /// Takes bytes from the account, giving up freed memory for them.
    ///
    /// # Errors
    /// As [`Account::charge`].
    pub fn charge(&self, what: &str, bytes: usize) -> Result<Charge, Error> {
        let bytes = bytes as u64;
        if let Ok(charge) = self.account.charge(what, bytes) {
            return Ok(charge);
        }
        self.clear();
        match self.account.charge(what, bytes) {
            Err(error) if error.reason() == Reason::OutOfMemory => {
                self.hub.clear();
                self.account.charge(what, bytes)
            }
            other => other,
        }
    }

    /// As [`Pool::charge`], for bytes that are taken even in a dry run: what the worker itself keeps.
    ///
    /// # Errors
    /// As [`Account::charge`].
    pub fn charge_held(&self, what: &str, bytes: usize) -> Result<Charge, Error> {
        match self.dry_run {
            true => self.hub.account.charge(what, bytes as u64),
            false => self.charge(what, bytes),
        }
    }

    /// Whether a plan, what it reads and what it gives could be held if nothing else were. Constants are somebody else's.
    /// `parts`: bytes that the plan takes besides its arena.
    ///
    /// # Errors
    /// [`Reason::OutOfMemory`] when the worker's limit is less, [`Reason::QuotaExceeded`] when the session's is; with the
    /// sizes.
    pub fn could_hold(&self, memory: &v1::PlanMemory, parts: usize) -> Result<(), Error> {
        let bytes = [memory.inputs, memory.caches, memory.outputs, parts as u64]
            .into_iter()
            .fold(memory.arena, u64::saturating_add);
        let limits = [
            (Reason::OutOfMemory, "worker", self.hub.account.usage()),
            (Reason::QuotaExceeded, "session", self.account.usage()),
        ];
        for (reason, whose, Usage { limit, .. }) in limits {
            if bytes > limit {
                let what = format!(
                    "the plan with its inputs, caches and outputs needs {bytes} bytes and the {whose} may hold {limit}"
                );
                let error = Error::new(reason, what).with("bytes", bytes);
                return Err(plan::with_sizes(error.with("limit", limit), memory));
            }
        }
        Ok(())
    }

    fn reuse(&self, bytes: usize) -> Option<(Buffer, Charge)> {
        let mut freed = self.freed.borrow_mut();
        let of_size = freed.get_mut(&bytes)?;
        let found = of_size.pop();
        if of_size.is_empty() {
            freed.remove(&bytes);
        }
        let (buffer, mut charge) = found?;
        self.kept.set(self.kept.get().saturating_sub(1));
        charge.set_cached(false);
        Some((buffer, charge))
    }

    fn of_device(&self, error: &DeviceError, bytes: usize) -> Error {
        of_plan(error)
            .with("bytes", bytes)
            .with("available", self.account.available())
    }

    /// Memory for a value that will be written whole.
    ///
    /// # Errors
    /// As [`Pool::charge`], and when the system has no memory.
    pub fn allocate(self: &Rc<Self>, what: &str, bytes: usize) -> Result<Storage, Error> {
        let (buffer, charge) = if self.dry_run {
            (None, self.charge(what, bytes)?)
        } else if let Some((buffer, charge)) = self.reuse(bytes) {
            (Some(buffer), charge)
        } else {
            let charge = self.charge(what, bytes)?;
            let buffer = self.device().allocate(what, bytes);
            (Some(buffer.map_err(|e| self.of_device(&e, bytes))?), charge)
        };
        Ok(self.own(buffer, charge, bytes))
    }

    /// Zeroed memory.
    ///
    /// # Errors
    /// As [`Pool::allocate`].
    pub fn zeroed(self: &Rc<Self>, what: &str, bytes: usize) -> Result<Storage, Error> {
        if self.dry_run {
            return self.allocate(what, bytes);
        }
        // What was freed is not zero, and clearing it costs as much as fresh pages do.
        let charge = self.charge(what, bytes)?;
        let buffer = self.device().allocate(what, bytes);
        let buffer = buffer.map_err(|e| self.of_device(&e, bytes))?;
        Ok(self.own(Some(buffer), charge, bytes))
    }

    /// Memory to fill on another thread, and its charge.
    ///
    /// # Errors
    /// As [`Pool::allocate`].
    pub fn stage(&self, what: &str, bytes: usize) -> Result<(Staging, Charge), Error> {
        if self.dry_run {
            return Err(no_memory());
        }
        if let Some((buffer, charge)) = self.reuse(bytes) {
            let share = buffer.share();
            drop(buffer);
            if let Some(staging) = share.and_then(SharedBytes::into_staging) {
                return Ok((staging, charge));
            }
        }
        let charge = self.charge(what, bytes)?;
        let staging = Staging::new(what, bytes).map_err(|e| self.of_device(&e, bytes))?;
        Ok((staging, charge))
    }

    /// Makes filled memory the device's.
    ///
    /// # Errors
    /// When the device must copy it and has no memory.
    pub fn adopt(
        self: &Rc<Self>,
        what: &str,
        staging: Staging,
        charge: Charge,
    ) -> Result<Storage, Error> {
        let bytes = staging.bytes().len();
        let buffer = self.device().adopt(what, staging);
        let buffer = buffer.map_err(|e| self.of_device(&e, bytes))?;
        Ok(self.own(Some(buffer), charge, bytes))
    }

    fn own(self: &Rc<Self>, buffer: Option<Buffer>, charge: Charge, bytes: usize) -> Storage {
        Storage {
            buffer,
            offset: 0,
            bytes,
            home: Home::Own {
                charge: Some(Arc::new(charge)),
                pool: Rc::clone(self),
            },
        }
    }

    fn keep(&self, buffer: Buffer, charge: Arc<Charge>, bytes: usize) {
        let Ok(mut charge) = Arc::try_unwrap(charge) else {
            return;
        };
        let cached = self.account.usage().cached;
        let fits = cached.saturating_add(bytes as u64) <= self.cache_limit.get();
        if !fits || bytes == 0 || buffer.is_shared() {
            return;
        }
        let mut freed = self.freed.borrow_mut();
        if self.kept.get() >= MOST_KEPT {
            // The smallest is the least worth.
            let Some(mut least) = freed.first_entry().filter(|least| *least.key() < bytes) else {
                return;
            };
            least.get_mut().pop();
            if least.get().is_empty() {
                least.remove();
            }
            self.kept.set(self.kept.get().saturating_sub(1));
        }
        charge.set_cached(true);
        freed.entry(bytes).or_default().push((buffer, charge));
        self.kept.set(self.kept.get() + 1);
    }
}

/// What a session without memory answers to whoever wants bytes.
pub fn no_memory() -> Error {
    let what = "the session is a dry run, whose tensors have no bytes; open one with memory";
    Error::new(Reason::TensorNotReady, what)
}

/// Where the memory comes from.
pub enum Home {
    /// The session's own.
    Own {
        /// `None` only while it is dropped.
        charge: Option<Arc<Charge>>,
        /// Where it goes back.
        pool: Rc<Pool>,
    },
    /// A model's.
    Weight(Weight),
    /// Another process may change it at any time.
    Shared(Rc<Region>),
}

/// Bytes of a value.
pub struct Storage {
    /// `None` in a dry run.
    buffer: Option<Buffer>,
    /// Where the value begins.
    offset: usize,
    bytes: usize,
    home: Home,
}

impl Storage {
    /// A model's weight.
    pub fn weight(buffer: Buffer, weight: Weight) -> Self {
        Self {
            bytes: buffer.bytes(),
            buffer: Some(buffer),
            offset: 0,
            home: Home::Weight(weight),
        }
    }

    /// Part of memory that another process shares.
    pub fn shared(buffer: Buffer, region: Rc<Region>, offset: usize, bytes: usize) -> Self {
        Self {
            buffer: Some(buffer),
            offset,
            bytes,
            home: Home::Shared(region),
        }
    }

    /// The buffer and where the value begins in it.
    ///
    /// # Errors
    /// [`Reason::TensorNotReady`] in a dry run.
    pub fn place(&self) -> Result<(&Buffer, usize), Error> {
        let buffer = self.buffer.as_ref().ok_or_else(no_memory)?;
        Ok((buffer, self.offset))
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it comes from.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// Whether it is the session's own and nobody reads it on another thread.
    pub fn is_free_to_write(&self) -> bool {
        matches!(self.home, Home::Own { .. }) && self.buffer.as_ref().is_none_or(|b| !b.is_shared())
    }

    /// Copies bytes into it.
    ///
    /// # Errors
    /// When they do not fit or it is read-only.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), Error> {
        let (buffer, start) = self.place()?;
        buffer
            .write(start.saturating_add(offset), data)
            .map_err(|e| of_plan(&e))
    }

    /// A copy in the session's own memory.
    ///
    /// # Errors
    /// As [`Pool::stage`].
    pub fn copy(&self, pool: &Rc<Pool>) -> Result<Storage, Error> {
        let (buffer, start) = self.place()?;
        let (mut staging, charge) = pool.stage("a copy", self.bytes)?;
        buffer
            .read(start, staging.bytes_mut())
            .map_err(|e| of_plan(&e))?;
        pool.adopt("a copy", staging, charge)
    }

    /// Some of its bytes for other threads: shared where they can be, else a copy that `pool` pays for.
    ///
    /// # Errors
    /// When there are none, or no memory for a copy.
    pub fn read(&self, pool: &Pool, range: Range<usize>) -> Result<Bytes, Error> {
        let (buffer, _) = self.place()?;
        let all = match (&self.home, buffer.share()) {
            (Home::Own { charge, .. }, Some(share)) => {
                Bytes::from_owner(Owner(share, charge.clone()))
            }
            (Home::Weight(weight), _) => Bytes::from_owner(WeightBytes(weight.clone())),
            _ => return self.read_copy(pool, range),
        };
        // The whole buffer is the value, unless it is empty.
        let within = |at: usize| at.min(self.bytes).min(all.len());
        Ok(all.slice(within(range.start)..within(range.end)))
    }

    /// A copy of some of its bytes, that `pool` pays for.
    ///
    /// # Errors
    /// When there are none, or no memory for a copy.
    pub fn read_copy(&self, pool: &Pool, range: Range<usize>) -> Result<Bytes, Error> {
        let (buffer, start) = self.place()?;
        let (mut staging, charge) = pool.stage("a copy to send", range.len())?;
        buffer
            .read(start.saturating_add(range.start), staging.bytes_mut())
            .map_err(|e| of_plan(&e))?;
        Ok(Bytes::from_owner(Owner(Copied(staging), Some(charge))))
    }
}

/// Bytes, and the charge that ends with them.
struct Owner<B, C>(B, #[allow(dead_code)] C);

impl<B: AsRef<[u8]>, C> AsRef<[u8]> for Owner<B, C> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref()
    }
}

struct Copied(Staging);

impl AsRef<[u8]> for Copied {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

struct WeightBytes(Weight);

impl AsRef<[u8]> for WeightBytes {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let (Some(buffer), Home::Own { charge, pool }) = (self.buffer.take(), &mut self.home)
            && let Some(charge) = charge.take()
        {
            pool.keep(buffer, charge, self.bytes);
        }
    }
}
