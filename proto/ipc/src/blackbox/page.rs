//! The fixed layout of a black box. Every field is an atomic word, so that both sides may touch it at any time.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

/// Requests it names at once.
pub const MAX_RUNNING: usize = hotcell_proto::limits::MAX_WORKER_REQUESTS;
/// Names of ops it holds.
pub const MAX_NAMES: usize = 512;
/// Return addresses of one backtrace.
pub const MAX_FRAMES: usize = 64;
/// Size of a black box; the page is at its start, the rest is zero.
pub const BYTES: usize = 64 << 10;

/// "hotcellb", and the layout's version: both sides are of one release, and check.
pub(super) const MAGIC: u64 = u64::from_be_bytes(*b"hotcellb");
pub(super) const VERSION: u64 = 2;

/// The layout. Zero everywhere is an empty one.
#[repr(C)]
pub(super) struct Page {
    pub magic: AtomicU64,
    pub version: AtomicU64,
    pub pid: AtomicU64,
    /// The thread that owns the device; 0 before there is one.
    pub engine: AtomicU64,
    pub doing: AtomicU64,
    /// Counts the event loop's rounds.
    pub beat: AtomicU64,
    /// Counts executions and pieces of long nodes.
    pub progress: AtomicU64,
    /// A packed [`Node`].
    pub node: AtomicU64,
    pub steps: AtomicU64,
    pub allocated: AtomicU64,
    pub peak: AtomicU64,
    pub model: Text<16>,
    pub error: Text<64>,
    pub crash: Site,
    pub running: [Request; MAX_RUNNING],
    pub names: [Text<4>; MAX_NAMES],
    /// The thread that packs weights; 0 while none does.
    pub packer: AtomicU64,
    /// Bytes that it has packed.
    pub packed: AtomicU64,
    /// Which of a model's plans was executed last, a [`PlanPart`](hotcell_proto::plan_part::PlanPart); 0: none.
    pub part: AtomicU64,
}

const _: () = assert!(size_of::<Page>() <= BYTES);
const _: () = assert!(align_of::<Page>() == 8);

/// One running request.
#[repr(C)]
pub(super) struct Request {
    /// 0: free.
    pub taken: AtomicU64,
    pub tokens: AtomicU64,
    pub id: Text<8>,
}

/// Where a signal struck.
#[repr(C)]
pub(super) struct Site {
    pub signal: AtomicU64,
    pub code: AtomicU64,
    pub address: AtomicU64,
    pub instruction: AtomicU64,
    pub thread: AtomicU64,
    pub base: AtomicU64,
    pub frames: AtomicU64,
    pub returns: [AtomicU64; MAX_FRAMES],
}

/// A short text: a counter that is odd while it is written, its length in bytes, and the bytes.
#[repr(C)]
pub(super) struct Text<const WORDS: usize> {
    version: AtomicU64,
    length: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> Text<WORDS> {
    /// Writes as much of `text` as has room, whole characters. One writer at a time.
    pub fn write(&self, text: &str) {
        let version = self.version.load(Relaxed) | 1;
        self.version.store(version, Relaxed);
        fence(Release);
        let mut length = text.len().min(WORDS * 8);
        while !text.is_char_boundary(length) {
            length -= 1;
        }
        for (word, bytes) in self.words.iter().zip(text.as_bytes()[..length].chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(padded), Relaxed);
        }
        self.length.store(length as u64, Relaxed);
        self.version.store(version.wrapping_add(1), Release);
    }

    /// Whether it says nothing.
    pub fn is_empty(&self) -> bool {
        self.length.load(Relaxed) == 0
    }

    /// What it says, fit to be shown: characters that control a terminal become question marks.
    pub fn read(&self) -> String {
        // A writer that died, or does not stop writing, must not hold the reader: what is there after a few tries is
        // taken, and may be half of each.
        let mut bytes = Vec::new();
        for _ in 0..4 {
            let before = self.version.load(Acquire);
            let length = (self.length.load(Relaxed) as usize).min(WORDS * 8);
            bytes = self
                .words
                .iter()
                .flat_map(|word| word.load(Relaxed).to_ne_bytes())
                .take(length)
                .collect();
            fence(Acquire);
            if before.is_multiple_of(2) && self.version.load(Relaxed) == before {
                break;
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        let clean = |c: char| if c.is_control() { '?' } else { c };
        text.chars().map(clean).collect()
    }
}

/// What a worker is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Doing {
    /// It starts.
    Starting = 0,
    /// Nothing: it waits to be asked. Standing still is right then.
    Idle = 1,
    /// It makes a model ready.
    Loading = 2,
    /// A step of token requests.
    Stepping = 3,
    /// Tensor work.
    Tensors = 4,
    /// It checks itself.
    Checking = 5,
    /// Ending as asked.
    Ending = 6,
}

impl Doing {
    /// Each with its stable name.
    pub const ALL: [(Doing, &'static str); 7] = [
        (Doing::Starting, "starting"),
        (Doing::Idle, "idle"),
        (Doing::Loading, "loading"),
        (Doing::Stepping, "stepping"),
        (Doing::Tensors, "tensors"),
        (Doing::Checking, "checking"),
        (Doing::Ending, "ending"),
    ];

    /// Its stable name.
    pub fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(doing, _)| *doing == self);
        found.map_or("?", |(_, name)| name)
    }

    pub(super) fn from_word(word: u64) -> Option<Doing> {
        let mut all = Self::ALL.iter().map(|(doing, _)| *doing);
        all.find(|doing| *doing as u64 == word)
    }
}

/// Where in a plan execution is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Which of the plan's steps.
    pub step: u32,
    /// Which of the names it was opened with: the op, or the last of a fused group.
    pub op: u16,
    /// Whether several nodes are computed as one.
    pub group: bool,
}

impl Node {
    /// As one word, which is never 0.
    pub const fn packed(self) -> u64 {
        self.step as u64 | (self.op as u64) << 32 | (self.group as u64) << 48 | 1 << 49
    }

    /// Of such a word.
    pub const fn unpacked(word: u64) -> Self {
        Self {
            step: word as u32,
            op: (word >> 32) as u16,
            group: word >> 48 & 1 == 1,
        }
    }
}

impl Page {
    /// All of it as words.
    #[cfg(test)]
    pub fn words(&self) -> &[AtomicU64] {
        let count = size_of::<Page>() / size_of::<AtomicU64>();
        // SAFETY: `repr(C)` of nothing but AtomicU64, in arrays and structs of such: no padding, one alignment.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), count) }
    }
}
