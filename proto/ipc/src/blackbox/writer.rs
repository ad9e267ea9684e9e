//! The worker's side of a black box.

use std::{
    fmt, io,
    os::fd::AsFd,
    sync::atomic::{
        AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use hotcell_proto::plan_part::PlanPart;

use super::{
    page::{Doing, MAGIC, MAX_FRAMES, MAX_RUNNING, Node, Page, Site, VERSION},
    reader::page_of,
};
use crate::memory::SharedMapping;

/// Writes what this process does. It stays mapped for the rest of the process's life, so that a signal handler may use
/// it at any time; copies write to the same one. The counters have one writer each: the engine's thread, except for
/// [`Writer::beat`], which is the event loop's, and [`Packing::done`].
#[derive(Clone, Copy)]
pub struct Writer(&'static Page);

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Writer")
    }
}

/// A running request's place.
#[derive(Debug, PartialEq, Eq)]
pub struct Slot(usize);

fn bump(counter: &AtomicU64) {
    // One writer: no need for a locked instruction.
    counter.store(counter.load(Relaxed).wrapping_add(1), Relaxed);
}

impl Writer {
    /// The black box in memory that the scheduler made. `names` are the ops that [`Node`]s name by number.
    ///
    /// # Errors
    /// `InvalidInput` if it is not a black box's memory.
    pub fn open(
        memory: impl AsFd,
        names: impl Iterator<Item = &'static str>,
    ) -> io::Result<Writer> {
        let mapping = Box::leak(Box::new(SharedMapping::of_memory(memory)?));
        Ok(Self::begin_page(page_of(mapping)?, names))
    }

    /// One that nobody else sees, for a worker without a scheduler.
    pub fn private(names: impl Iterator<Item = &'static str>) -> Writer {
        let words = size_of::<Page>() / size_of::<AtomicU64>();
        let zeroes: Vec<AtomicU64> = (0..words).map(|_| AtomicU64::new(0)).collect();
        let start = Box::leak(zeroes.into_boxed_slice()).as_ptr();
        // SAFETY: as many zeroed atomic words as a page is made of, of its alignment, leaked: never freed.
        let page = unsafe { &*start.cast::<Page>() };
        Self::begin_page(page, names)
    }

    fn begin_page(page: &'static Page, names: impl Iterator<Item = &'static str>) -> Writer {
        for (place, name) in page.names.iter().zip(names) {
            place.write(name);
        }
        page.pid.store(u64::from(std::process::id()), Relaxed);
        page.version.store(VERSION, Relaxed);
        page.magic.store(MAGIC, Release);
        Writer(page)
    }

    /// Says what it is at.
    pub fn doing(&self, doing: Doing) {
        self.0.doing.store(doing as u64, Relaxed);
    }

    /// Says that this thread owns the device.
    pub fn owns_device(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.0.engine.store(thread as u64, Relaxed);
    }

    /// Says which model it works on.
    pub fn model(&self, name: &str) {
        self.0.model.write(name);
    }

    /// The event loop is alive.
    pub fn beat(&self) {
        bump(&self.0.beat);
    }

    /// A step of token requests is done.
    pub fn stepped(&self) {
        bump(&self.0.steps);
    }

    /// Something moved within a long node, or an execution began.
    pub fn progressed(&self) {
        bump(&self.0.progress);
    }

    /// Which of a model's plans is executed next. What else is executed says nothing: see [`Doing::Stepping`].
    pub fn executes(&self, part: PlanPart) {
        self.0.part.store(part as u64, Relaxed);
    }

    /// A node begins.
    pub fn enter(&self, node: Node) {
        self.0.node.store(node.packed(), Relaxed);
    }

    /// What it said last: what it is at, and the node that began last.
    pub fn seen(&self) -> (Doing, Option<Node>) {
        let doing = Doing::from_word(self.0.doing.load(Relaxed)).unwrap_or(Doing::Starting);
        let node = self.0.node.load(Relaxed);
        (doing, (node != 0).then(|| Node::unpacked(node)))
    }

    /// Which of a model's plans it said was executed last.
    pub fn executed(&self) -> Option<PlanPart> {
        PlanPart::from_word(self.0.part.load(Relaxed))
    }

    /// The two words that plans write themselves: the progress counter and the packed [`Node`].
    pub fn trail(&self) -> (&'static AtomicU64, &'static AtomicU64) {
        (&self.0.progress, &self.0.node)
    }

    /// This thread packs weights from now on; until it is dropped.
    pub fn packs(&self) -> Packing {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.0.packed.store(0, Relaxed);
        self.0.packer.store(thread as u64, Relaxed);
        Packing(self.0)
    }

    /// Bytes in use on the device, and the most there were.
    pub fn memory(&self, allocated: u64, peak: u64) {
        self.0.allocated.store(allocated, Relaxed);
        self.0.peak.store(peak, Relaxed);
    }

    /// The last error, in words.
    pub fn error(&self, text: &str) {
        self.0.error.write(text);
    }

    /// Whether there is an error.
    pub fn has_said(&self) -> bool {
        !self.0.error.is_empty()
    }

    /// A request starts to run; none if more run than the black box can name.
    pub fn begin(&self, request: &str) -> Option<Slot> {
        let free = |r: &super::page::Request| r.taken.load(Acquire) == 0;
        let at = self.0.running.iter().position(free)?;
        let place = self.0.running.get(at)?;
        place.id.write(request);
        place.tokens.store(0, Relaxed);
        place.taken.store(1, Release);
        Some(Slot(at))
    }

    /// How many tokens a request has now.
    pub fn computed(&self, slot: &Slot, tokens: usize) {
        if let Some(place) = self.0.running.get(slot.0) {
            place.tokens.store(tokens as u64, Relaxed);
        }
    }

    /// A request runs no more.
    pub fn end(&self, slot: Slot) {
        if let Some(place) = self.0.running.get(slot.0) {
            place.taken.store(0, Release);
        }
    }

    /// Where a signal handler writes.
    pub fn crash(&self) -> CrashWriter {
        CrashWriter(&self.0.crash)
    }
}

/// Says that a thread packs weights, and how far it is. One at a time.
pub struct Packing(&'static Page);

impl Packing {
    /// So many bytes are packed.
    pub fn done(&self, bytes: u64) {
        self.0.packed.store(bytes, Relaxed);
    }
}

impl Drop for Packing {
    fn drop(&mut self) {
        self.0.packer.store(0, Relaxed);
        self.0.packed.store(0, Relaxed);
    }
}

const _: () = assert!(MAX_RUNNING <= u16::MAX as usize);

/// Async-signal-safe: plain stores.
#[derive(Clone, Copy)]
pub struct CrashWriter(&'static Site);

impl CrashWriter {
    /// Where the signal struck: number, `si_code`, `si_addr`, instruction pointer, thread id, and the address at which
    /// the program is loaded.
    pub fn site(
        &self,
        signal: i32,
        code: i32,
        address: u64,
        instruction: u64,
        thread: u32,
        base: u64,
    ) {
        self.0.code.store(code as u32 as u64, Relaxed);
        self.0.address.store(address, Relaxed);
        self.0.instruction.store(instruction, Relaxed);
        self.0.thread.store(thread.into(), Relaxed);
        self.0.base.store(base, Relaxed);
        self.0.frames.store(0, Relaxed);
        self.0.signal.store(signal as u32 as u64, Release);
    }

    /// One more frame, from the innermost outwards: an instruction's address.
    pub fn frame(&self, address: u64) {
        let count = self.0.frames.load(Relaxed);
        if let Some(place) = self.0.returns.get(count as usize) {
            place.store(address, Relaxed);
            self.0
                .frames
                .store((count + 1).min(MAX_FRAMES as u64), Release);
        }
    }
}
