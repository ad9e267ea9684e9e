//! The scheduler's side of a black box: what a stranger wrote, bounded and cleaned.

use std::{
    io,
    os::fd::AsFd,
    sync::atomic::Ordering::{Acquire, Relaxed},
};

use hotcell_proto::plan_part::PlanPart;

use super::page::{BYTES, Doing, MAGIC, MAX_FRAMES, Node, Page, VERSION};
use crate::memory::SharedMapping;

/// Reads a worker's black box, also after its end.
#[derive(Debug)]
pub struct Reader(SharedMapping);

/// All that changes while a worker lives. One that is busy and whose pulse stays the same hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulse {
    /// What it is at; none if what it wrote is nonsense.
    pub doing: Option<Doing>,
    /// Rounds of its event loop.
    pub beat: u64,
    progress: u64,
    node: u64,
    steps: u64,
}

impl Pulse {
    /// Whether the engine moved between `earlier` and this.
    pub fn moved_since(&self, earlier: &Pulse) -> bool {
        let engine = |p: &Pulse| (p.doing, p.progress, p.node, p.steps);
        engine(self) != engine(earlier)
    }
}

/// A request that ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// Its id.
    pub request: String,
    /// Tokens it had, its prompt included.
    pub tokens: u64,
}

/// Where a signal struck.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crash {
    /// The signal.
    pub signal: i32,
    /// `si_code`.
    pub code: i32,
    /// `si_addr`: for SIGSEGV and SIGBUS, what was touched.
    pub address: u64,
    /// The thread.
    pub thread: u32,
    /// The backtrace, innermost first: addresses relative to where the program was loaded.
    pub frames: Vec<u64>,
}

/// What a worker was doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its process.
    pub pid: u32,
    /// What it is at.
    pub doing: Doing,
    /// The model it worked on last.
    pub model: String,
    /// Steps of token requests so far.
    pub steps: u64,
    /// The step of the plan that ran last.
    pub node: u32,
    /// Its op; empty if none ran.
    pub op: String,
    /// Which of a model's plans was executed last, while it made steps of token requests.
    pub part: Option<PlanPart>,
    /// Whether it was a group of fused nodes, of which `op` is the last.
    pub group: bool,
    /// Bytes in use on the device.
    pub allocated: u64,
    /// The most there were.
    pub peak: u64,
    /// Requests that ran.
    pub running: Vec<Running>,
    /// The thread that packed weights, if one did.
    pub packer: Option<u32>,
    /// Bytes that it had packed.
    pub packed: u64,
    /// The last error.
    pub error: String,
    /// Where a signal struck, if one did.
    pub crash: Option<Crash>,
}

/// The page at the start of a mapping.
pub(super) fn page_of(mapping: &SharedMapping) -> io::Result<&Page> {
    if mapping.len() != BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a black box has {BYTES} bytes, not {}", mapping.len()),
        ));
    }
    // SAFETY: mappings are aligned to pages and of sealed length, which is enough; every field is an atomic, which any
    // bits are valid for, and which other processes may change at any time.
    Ok(unsafe { &*mapping.start().cast::<Page>() })
}

impl Reader {
    /// Maps a black box, to be made with [`super::make`].
    ///
    /// # Errors
    /// `InvalidInput` if it is not of sealed length or of another size; otherwise what `mmap` reports.
    pub fn open(memory: impl AsFd) -> io::Result<Reader> {
        let mapping = SharedMapping::of_memory(memory)?;
        page_of(&mapping)?;
        Ok(Reader(mapping))
    }

    pub(super) fn page(&self) -> &Page {
        // SAFETY: as in `page_of`, which `open` asked.
        unsafe { &*self.0.start().cast::<Page>() }
    }

    /// Where it is now.
    pub fn pulse(&self) -> Pulse {
        let page = self.page();
        Pulse {
            doing: Doing::from_word(page.doing.load(Relaxed)),
            beat: page.beat.load(Relaxed),
            progress: page.progress.load(Relaxed),
            node: page.node.load(Relaxed),
            steps: page.steps.load(Relaxed),
        }
    }

    /// The thread that owns the device, as the worker says.
    pub fn engine_thread(&self) -> Option<i32> {
        let thread = self.page().engine.load(Relaxed);
        i32::try_from(thread).ok().filter(|thread| *thread > 0)
    }

    /// All that it says.
    ///
    /// # Errors
    /// `InvalidData` if it was not begun, or is not a black box any more.
    pub fn snapshot(&self) -> io::Result<Snapshot> {
        let page = self.page();
        let refused = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
        if page.magic.load(Acquire) != MAGIC {
            return Err(refused(
                "nothing was written, or it was overwritten with something else",
            ));
        }
        if page.version.load(Relaxed) != VERSION {
            return Err(refused("it has another version's layout"));
        }
        let doing = Doing::from_word(page.doing.load(Relaxed));
        let word = page.node.load(Relaxed);
        let node = Node::unpacked(word);
        let named = || Some(page.names.get(usize::from(node.op))?.read());
        Ok(Snapshot {
            pid: u32::try_from(page.pid.load(Relaxed)).unwrap_or(0),
            doing: doing.ok_or_else(|| refused("it is in a state that there is not"))?,
            model: page.model.read(),
            steps: page.steps.load(Relaxed),
            node: node.step,
            op: if word == 0 { None } else { named() }.unwrap_or_default(),
            group: node.group,
            part: match doing {
                Some(Doing::Stepping) => PlanPart::from_word(page.part.load(Relaxed)),
                _ => None,
            },
            allocated: page.allocated.load(Relaxed),
            peak: page.peak.load(Relaxed),
            running: page
                .running
                .iter()
                .filter(|r| r.taken.load(Acquire) != 0)
                .map(|r| Running {
                    request: r.id.read(),
                    tokens: r.tokens.load(Relaxed),
                })
                .collect(),
            packer: match page.packer.load(Relaxed) {
                0 => None,
                thread => Some(thread as u32),
            },
            packed: page.packed.load(Relaxed),
            error: page.error.read(),
            crash: self.crash(),
        })
    }

    fn crash(&self) -> Option<Crash> {
        let site = &self.page().crash;
        let signal = site.signal.load(Acquire) as u32 as i32;
        if signal == 0 {
            return None;
        }
        let count = (site.frames.load(Acquire) as usize).min(MAX_FRAMES);
        let base = site.base.load(Relaxed);
        Some(Crash {
            signal,
            code: site.code.load(Relaxed) as u32 as i32,
            address: site.address.load(Relaxed),
            thread: site.thread.load(Relaxed) as u32,
            frames: site
                .returns
                .iter()
                .take(count)
                .map(|r| r.load(Relaxed).wrapping_sub(base))
                .collect(),
        })
    }
}
