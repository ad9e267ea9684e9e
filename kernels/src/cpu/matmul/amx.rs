//! Multiplication by AMX: tiles of sixteen rows by 64 bytes, and instructions that multiply two of them.

pub(super) mod bf16;
pub(super) mod int8;
pub(super) mod scaled;
pub(super) mod tiled;

use std::arch::asm;
use std::cell::OnceCell;
use std::ptr;

use memmap2::MmapMut;

use crate::cpu::lanes::LANES;

/// Bytes of a row of a tile, and of sixteen of them.
const LINE: usize = 64;
const TILE: usize = LANES * LINE;

/// A row of a tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([u8; LINE]);

/// A thread's room, on the heap and never on a stack.
///
/// # Safety
///
/// Zeros are a value of `T`.
#[cold]
unsafe fn zeros<T>() -> Box<T> {
    // SAFETY: the caller's promise.
    unsafe { Box::<T>::new_zeroed().assume_init() }
}

/// How many of so many rows a pass has where there is room for some groups of them: as many in each, so that none has but a few, in
/// whole groups.
fn height(rows: usize, groups: usize) -> usize {
    let passes = rows.div_ceil((groups * LANES).max(1)).max(1);
    rows.div_ceil(passes).next_multiple_of(LANES)
}

/// What `ldtilecfg` reads: the palette, and bytes of a row and rows of each tile.
#[repr(C, align(64))]
pub(super) struct Config {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// Of each tile the rows and the bytes of a row.
    const fn new(tiles: [[u8; 2]; 8]) -> Config {
        let mut config = Config {
            palette: 1,
            start: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        let mut t = 0;
        while t < tiles.len() {
            let [rows, bytes] = tiles[t];
            config.rows[t] = rows;
            config.row_bytes[t] = bytes as u16;
            t += 1;
        }
        config
    }
}

/// The stack on which a thread that uses tiles handles signals. The system puts all of a thread's registers there first, tiles
/// included from the first time on that they are used, and what Rust gives its threads is no more than these take: a handler
/// would have no room.
struct SignalStack {
    _memory: MmapMut,
}

/// Bytes for what handlers do.
const HANDLING: usize = 64 << 10;

thread_local! {
    static SIGNALS: OnceCell<Option<SignalStack>> = const { OnceCell::new() };
}

impl SignalStack {
    /// This thread's from now on. `None` where the system gives no memory: signals are handled where they were.
    fn take() -> Option<Self> {
        // SAFETY: it reads what the system told the process at its start.
        let registers = unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) };
        let size = usize::try_from(registers).ok()?.checked_add(HANDLING)?;
        let mut memory = MmapMut::map_anon(size).ok()?;
        let stack = libc::stack_t {
            ss_sp: memory.as_mut_ptr().cast(),
            ss_flags: 0,
            ss_size: memory.len(),
        };
        // SAFETY: the memory is nobody else's, and stays until `drop` has given it up.
        let done = unsafe { libc::sigaltstack(&raw const stack, ptr::null_mut()) } == 0;
        done.then_some(Self { _memory: memory })
    }
}

impl Drop for SignalStack {
    fn drop(&mut self) {
        let none = libc::stack_t {
            ss_sp: ptr::null_mut(),
            ss_flags: libc::SS_DISABLE,
            ss_size: 0,
        };
        // SAFETY: the thread is at its end, and on no signal's stack.
        unsafe { libc::sigaltstack(&raw const none, ptr::null_mut()) };
    }
}

/// # Safety
///
/// The processor has AMX, and this process may use tiles. Their contents are lost, to nobody: the compiler uses none.
#[inline(always)]
unsafe fn configure(config: &'static Config) {
    SIGNALS.with(|signals| {
        signals.get_or_init(SignalStack::take);
    });
    // SAFETY: the caller's promise.
    unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, preserves_flags)) }
}

/// Gives the tiles up, so that the system has no state to keep.
///
/// # Safety
///
/// As for [`configure`].
#[inline(always)]
unsafe fn release() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
}

/// One instruction on tiles, which are named by number. Rows in memory are whole lines, or as many bytes apart as said.
///
/// # Safety
///
/// As for [`configure`]; tiles are configured, and memory is valid for what the tile has.
macro_rules! tile {
    (zero $t:literal) => {
        std::arch::asm!(concat!("tilezero tmm", $t), options(nomem, nostack, preserves_flags))
    };
    (load $t:literal, $from:expr) => {
        tile!(load $t, $from, apart LINE)
    };
    (load $t:literal, $from:expr, apart $stride:expr) => {
        std::arch::asm!(concat!("tileloadd tmm", $t, ", [{from} + {line}*1]"), from = in(reg) $from,
            line = in(reg) $stride, options(readonly, nostack, preserves_flags))
    };
    (store $t:literal, $to:expr) => {
        std::arch::asm!(concat!("tilestored [{to} + {line}*1], tmm", $t), to = in(reg) $to, line = in(reg) LINE,
            options(nostack, preserves_flags))
    };
    (bf16 $c:literal, $a:literal, $b:literal) => {
        std::arch::asm!(concat!("tdpbf16ps tmm", $c, ", tmm", $a, ", tmm", $b),
            options(nomem, nostack, preserves_flags))
    };
    (uint8 $c:literal, $a:literal, $b:literal) => {
        std::arch::asm!(concat!("tdpbsud tmm", $c, ", tmm", $a, ", tmm", $b),
            options(nomem, nostack, preserves_flags))
    };
    (int8 $c:literal, $a:literal, $b:literal) => {
        std::arch::asm!(concat!("tdpbssd tmm", $c, ", tmm", $a, ", tmm", $b),
            options(nomem, nostack, preserves_flags))
    };
}
use tile;
