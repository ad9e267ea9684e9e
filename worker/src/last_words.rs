//! What a process that dies of a signal still writes: into the black box, with plain stores only.
//!
//! The handler notes where the signal struck and the frame pointers' backtrace, then lets the signal do its work, so
//! that whoever waits for the process sees the signal itself. Only SIGBUS inside a model's mapping ends with an exit
//! code of its own: the file was shortened under it, which is nobody's crash; and SIGBUS inside memory that a client
//! shares is [repaired](crate::repair), after which the thread goes on. Nothing is unwound and no symbol is looked up
//! here; that is done later, from outside.

use std::{
    io,
    ops::Range,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use hotcell_ipc::blackbox::{CrashWriter, POINT_OUT, Writer};
use hotcell_proto::limits;

use crate::exit::Exit;

/// Signals that mean a crash. SIGSYS has a handler of its own ([`crate::confine`]).
const SIGNALS: [libc::c_int; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGABRT,
];

/// `si_code` of a SIGBUS for an address without anything behind it, such as past a file's end.
const BUS_ADRERR: libc::c_int = 2;
/// A fault this near to the stack pointer is the stack's end.
const STACK_GUARD: u64 = 64 << 10;
/// Farthest that a frame may be from the stack pointer.
const STACK: u64 = 64 << 20;

/// Turns that a thread waits for another one to end the process: some seconds at most, on the slowest machine.
const PATIENCE: u32 = 1 << 26;

/// Whether a signal struck.
static STRUCK: AtomicBool = AtomicBool::new(false);

struct Known {
    writer: Writer,
    crash: CrashWriter,
    /// Where the program was loaded.
    base: u64,
}

static KNOWN: OnceLock<Known> = OnceLock::new();

/// Start and end of mapped model files; 0 where there is none.
static MAPPED: [(AtomicU64, AtomicU64); limits::MAX_MODEL_FILES] =
    [const { (AtomicU64::new(0), AtomicU64::new(0)) }; limits::MAX_MODEL_FILES];

/// One past the last place of `MAPPED` that was ever used.
static MAPPED_END: AtomicUsize = AtomicUsize::new(0);

/// Says that these bytes are a model's file. Forgotten when dropped.
#[derive(Debug, Default)]
pub struct MappedFiles(Vec<usize>);

impl MappedFiles {
    /// Files at these addresses. More than there is room for are not noted: a SIGBUS in them is a crash then.
    pub fn note(ranges: impl Iterator<Item = Range<*const u8>>) -> Self {
        let mut taken = Vec::new();
        let mut free = 0..MAPPED.len();
        for range in ranges.filter(|r| !r.is_empty()) {
            let (start, end) = (range.start.addr() as u64, range.end.addr() as u64);
            let found = free.find(|at| {
                MAPPED.get(*at).is_some_and(|(place, _)| {
                    place.compare_exchange(0, start, Relaxed, Relaxed).is_ok()
                })
            });
            let Some(at) = found else { break };
            if let Some((_, place)) = MAPPED.get(at) {
                place.store(end, Relaxed);
            }
            MAPPED_END.fetch_max(at + 1, Relaxed);
            taken.push(at);
        }
        Self(taken)
    }
}

impl Drop for MappedFiles {
    fn drop(&mut self) {
        for (start, end) in self.0.iter().filter_map(|at| MAPPED.get(*at)) {
            end.store(0, Relaxed);
            start.store(0, Relaxed);
        }
    }
}

fn in_model(address: u64) -> bool {
    let used = MAPPED.iter().take(MAPPED_END.load(Relaxed));
    used.into_iter()
        .any(|(start, end)| (start.load(Relaxed)..end.load(Relaxed)).contains(&address))
}

/// Has crashes write into this black box from now on. The first call counts.
///
/// # Errors
/// What `sigaction` reports.
pub fn install(writer: Writer) -> io::Result<()> {
    let known = Known {
        writer,
        crash: writer.crash(),
        base: load_address(),
    };
    if KNOWN.set(known).is_err() {
        return Ok(());
    }
    note_panics();
    for signal in SIGNALS {
        handle(signal, on_signal, 0)?;
    }
    handle(POINT_OUT.as_raw(), on_point_out, libc::SA_RESTART)
}

type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

fn handle(signal: libc::c_int, handler: Handler, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: zeroes are a valid `sigaction`; the handler has the signature that SA_SIGINFO asks for, and only
    // does what is async-signal-safe: plain loads and stores, `gettid`, `mmap`, `signal`, `raise`, `_exit`.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        // On the alternative stack: the usual one may have ended.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | flags;
        libc::sigfillset(&mut action.sa_mask);
        libc::sigaction(signal, &action, std::ptr::null_mut())
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has a panic's message, which may come just before an abort, in the black box as the last error.
fn note_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        error(&info.to_string());
        usual(info);
    }));
}

/// Notes where a signal struck. Async-signal-safe.
///
/// # Safety
/// `info` and `context` are what the kernel gave a handler with SA_SIGINFO.
pub(crate) unsafe fn note(
    signal: libc::c_int,
    info: *const libc::siginfo_t,
    context: *const libc::c_void,
) -> u64 {
    // SAFETY: the caller's promise.
    let (code, address) = match unsafe { info.as_ref() } {
        // SAFETY: for the signals that have no address this reads other parts of the union, which are numbers too.
        Some(info) => (info.si_code, unsafe { info.si_addr() }.addr() as u64),
        None => (0, 0),
    };
    let Some(known) = KNOWN.get() else {
        return address;
    };
    // SAFETY: the caller's promise.
    let at = unsafe { Registers::of(context) };
    // SAFETY: no arguments, and it cannot fail.
    let thread = unsafe { libc::syscall(libc::SYS_gettid) } as u32;
    let crash = &known.crash;
    crash.site(signal, code, address, at.instruction, thread, known.base);
    crash.frame(at.instruction);
    if signal == libc::SIGSEGV && address.abs_diff(at.stack) < STACK_GUARD {
        known
            .writer
            .error("the fault is at the stack pointer: the stack may have overflowed");
    }
    let mut frame = at.frame;
    let mut lowest = at.stack;
    // A frame is {the caller's frame, the return address}. Frames go upwards within the stack; whatever does not is the
    // end. Should one lead astray all the same, this fault is fatal at once, and what was written stays.
    while frame.is_multiple_of(8) && frame >= lowest && frame - at.stack < STACK {
        let pair = frame as *const u64;
        // SAFETY: on a stack whose code keeps frame pointers, this is a frame; see above for what else it may be.
        let (next, back) = unsafe { (pair.read_volatile(), pair.add(1).read_volatile()) };
        if back == 0 {
            break;
        }
        // The call itself is just before the address that it returns to.
        crash.frame(back.wrapping_sub(1));
        lowest = frame + 16;
        frame = next;
    }
    address
}

/// Writes the last error. Async-signal-safe.
pub(crate) fn error(text: &str) {
    if let Some(known) = KNOWN.get() {
        known.writer.error(text);
    }
}

/// Ends this process by a signal, if that one ends processes. What the black box says stays.
pub(crate) fn die_of(signal: libc::c_int) {
    // SAFETY: the default effect, and a signal to this thread; numbers that there are no signals of fail.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// Writes the last error, unless there is one.
pub(crate) fn error_unless_said(text: &str) {
    if let Some(known) = KNOWN.get()
        && !known.writer.has_said()
    {
        known.writer.error(text);
    }
}

extern "C" fn on_signal(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel's own.
    let bus = unsafe { info.as_ref() }
        .filter(|info| signal == libc::SIGBUS && info.si_code == BUS_ADRERR)
        // SAFETY: of this signal and code, it has an address.
        .map(|info| unsafe { info.si_addr() }.addr());
    if bus.is_some_and(crate::repair::repair) {
        return;
    }
    if STRUCK.swap(true, Relaxed) {
        // Another thread was struck first, perhaps by the same file, and is about to end the process in its way; the
        // default effect here would be sooner. It needs far less than this, unless it cannot go on either.
        for _ in 0..PATIENCE {
            std::hint::spin_loop();
        }
    }
    // SAFETY: the kernel's own.
    let address = unsafe { note(signal, info, context) };
    // SAFETY: the kernel's own.
    let code = unsafe { info.as_ref() }.map_or(0, |i| i.si_code);
    if signal == libc::SIGBUS && code == BUS_ADRERR && in_model(address) {
        error("a model's file was shortened while it was in use");
        // SAFETY: async-signal-safe, and does not return.
        unsafe { libc::_exit(Exit::ModelChanged.code()) };
    }
    // When this returns, the instruction faults again and the signal has its default effect.
    // SAFETY: async-signal-safe.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    // Sent by somebody instead of raised by an instruction: it would not come again by itself.
    if code <= 0 {
        // SAFETY: async-signal-safe; the signal is blocked until the handler returns, and has its default effect then.
        unsafe { libc::raise(signal) };
    }
}

/// Somebody wants to know where this thread is.
extern "C" fn on_point_out(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel's own.
    unsafe { note(signal, info, context) };
}

/// Where the program was loaded: what is added to the addresses in its file.
fn load_address() -> u64 {
    extern "C" fn first(
        info: *mut libc::dl_phdr_info,
        _: libc::size_t,
        base: *mut libc::c_void,
    ) -> libc::c_int {
        // SAFETY: both are what `dl_iterate_phdr` was called with: its own record, and our number.
        unsafe { *base.cast::<u64>() = (*info).dlpi_addr };
        // The first is the program itself.
        1
    }
    let mut base = 0u64;
    // SAFETY: the callback has the right signature, and the pointer outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(first), std::ptr::from_mut(&mut base).cast()) };
    base
}

#[derive(Clone, Copy, Default)]
struct Registers {
    instruction: u64,
    stack: u64,
    frame: u64,
}

impl Registers {
    /// # Safety
    /// `context` is what the kernel gave a handler with SA_SIGINFO.
    unsafe fn of(context: *const libc::c_void) -> Self {
        // SAFETY: the caller's promise.
        let Some(context) = (unsafe { context.cast::<libc::ucontext_t>().as_ref() }) else {
            return Self::default();
        };
        let machine = &context.uc_mcontext;
        #[cfg(target_arch = "x86_64")]
        {
            let register = |at: libc::c_int| machine.gregs[at as usize] as u64;
            Self {
                instruction: register(libc::REG_RIP),
                stack: register(libc::REG_RSP),
                frame: register(libc::REG_RBP),
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            Self {
                instruction: machine.pc,
                stack: machine.sp,
                frame: machine.regs[29],
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            let _ = machine;
            Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_belongs_to_a_model_while_its_files_are_mapped() {
        let bytes = [0u8; 64];
        let inside = bytes.as_ptr().addr() as u64 + 63;
        assert!(!in_model(inside));
        let files = MappedFiles::note([bytes.as_ptr_range(), [].as_ptr_range()].into_iter());
        assert!(in_model(inside) && !in_model(inside + 1));
        drop(files);
        assert!(!in_model(inside));
    }
}
