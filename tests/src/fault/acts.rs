//! What the faults do.

use std::{
    hint::{black_box, spin_loop},
    io::{self, Write},
    os::fd::{BorrowedFd, OwnedFd, RawFd},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use hotcell_ipc::{blackbox, memory::SharedMapping};
use hotcell_worker::config::Serve;
use rustix::{
    net::Shutdown,
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

use super::{Fault, proxy, trespass};

/// What a leak or a glutton may take, bytes: enough to run out of, little enough for any machine.
const MEMORY: u64 = 384 << 20;
/// Taken at a time.
const PIECE: usize = 16 << 20;
/// How much longer a late execution takes, and how many are late.
const DELAY: Duration = Duration::from_millis(50);
const LATE: u32 = 10;
/// Lines of a full log.
const LINES: usize = 200_000;

/// Copies of what the worker was born with.
struct Inherited {
    control: OwnedFd,
    tokens: OwnedFd,
    blackbox: SharedMapping,
}

static INHERITED: OnceLock<Inherited> = OnceLock::new();
static LATER: AtomicU32 = AtomicU32::new(0);

fn copy(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: only used during this call; a number that is not open is an error.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, 3)?)
}

/// Keeps copies of the descriptors, and comes between some of them and the worker. Before anything else runs.
pub(super) fn prepare(serve: &mut Serve) -> io::Result<()> {
    let inherited = Inherited {
        control: copy(serve.control_fd)?,
        tokens: copy(serve.tokens_fd)?,
        blackbox: SharedMapping::of_memory(copy(serve.blackbox_fd)?)?,
    };
    let _ = INHERITED.set(inherited);
    trespass::note_shared(copy(serve.blackbox_fd)?);
    proxy::prepare(serve)
}

/// Starts the thread that carries out what needs no execution. From the engine's thread.
pub(super) fn begin() {
    static BEGUN: OnceLock<()> = OnceLock::new();
    if BEGUN.set(()).is_err() {
        return;
    }
    let watch = || loop {
        thread::sleep(Duration::from_millis(1));
        sabotage();
    };
    if let Err(error) = thread::Builder::new().name("saboteur".into()).spawn(watch) {
        eprintln!("error: no saboteur: {error}");
    }
    proxy::begin();
}

fn sabotage() {
    let Some(inherited) = INHERITED.get() else {
        return;
    };
    if Fault::ScribbleBlackBox.taken() {
        let _ = inherited.blackbox.write(0, &vec![0xff; blackbox::BYTES]);
    }
    if Fault::GarbageOnTokens.taken() {
        babble(&inherited.tokens);
    }
    if Fault::GarbageOnControl.taken() {
        babble(&inherited.control);
    }
    if Fault::CloseTokens.taken() {
        let _ = rustix::net::shutdown(&inherited.tokens, Shutdown::Both);
    }
    if Fault::FillLog.taken() {
        fill_log();
    }
    if Fault::Spin.taken() {
        let cores = thread::available_parallelism().map_or(2, |n| n.get());
        for _ in 0..2 * cores {
            thread::spawn(|| {
                loop {
                    spin_loop();
                }
            });
        }
    }
    if Fault::Fork.taken() {
        fork();
    }
    if Fault::Trespass.taken() {
        trespass::commit();
    }
}

/// Bytes that mean nothing, and not even the same nothing throughout.
fn babble(fd: &OwnedFd) {
    // First a frame that is longer than any may be: no reader waits for its end.
    let bytes: Vec<u8> = (0..1024u32)
        .map(|i| if i < 9 { 0xff } else { (i * i + 7 * i) as u8 })
        .collect();
    let _ = rustix::io::write(fd, &bytes);
}

fn fill_log() {
    let mut log = io::stderr().lock();
    for line in 0..LINES {
        let said = writeln!(log, "line {line} \x1b[31mis red\x1b[0m {}", "x".repeat(200));
        if said.is_err() {
            return;
        }
    }
}

fn fork() {
    // By number, for glibc's function blocks the signal by which the filter reports.
    // SAFETY: as fork(2): no stack, no pointers. The child, if there is one, leaves at once.
    unsafe {
        if libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) == 0 {
            libc::_exit(0);
        }
    }
}

/// Never returns, and takes no time of anybody's.
pub(super) fn hang() -> ! {
    loop {
        thread::sleep(Duration::from_secs(1));
    }
}

/// Dies of SIGSEGV.
#[inline(never)]
pub(super) fn segfault() {
    let nowhere = std::ptr::without_provenance_mut::<u8>(8);
    // SAFETY: there is none: nothing is mapped there, which is the point.
    unsafe { nowhere.write_volatile(1) };
}

/// Whoever reads what lies there dies of it: in the very kernel.
pub(super) fn forbid(start: *mut u8, bytes: usize) {
    // Whole pages only: what lies beside it is others'.
    // SAFETY: as sysconf(3): it takes a number and gives one.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let page = usize::try_from(page).unwrap_or(4096);
    let from = start.addr().next_multiple_of(page);
    let to = (start.addr() + bytes) / page * page;
    let Some(length) = to.checked_sub(from).filter(|length| *length > 0) else {
        return;
    };
    // SAFETY: it is mapped, and this process dies when it reads it, which is the point.
    unsafe {
        libc::mprotect(start.with_addr(from).cast(), length, libc::PROT_NONE);
    }
}

/// From now on there is no more memory than this.
fn limit_memory() {
    let limit = Rlimit {
        current: Some(MEMORY),
        maximum: getrlimit(Resource::Data).maximum,
    };
    let _ = setrlimit(Resource::Data, limit);
}

fn take_memory() {
    let piece = vec![1u8; PIECE];
    black_box(&piece);
    std::mem::forget(piece);
}

/// Carries out what is ordered for an execution.
pub(super) fn execute() {
    if Fault::Segfault.taken() {
        segfault();
    }
    if Fault::Abort.taken() {
        std::process::abort();
    }
    if Fault::ExitZero.taken() {
        std::process::exit(0);
    }
    if Fault::Panic.taken() {
        panic!("ordered to");
    }
    if Fault::HangInKernel.taken() {
        hang();
    }
    if Fault::Exhaust.taken() {
        limit_memory();
        loop {
            take_memory();
        }
    }
    if Fault::Leak.is_on() {
        limit_memory();
        take_memory();
    }
    if Fault::Late.taken() {
        LATER.store(LATE, Ordering::Relaxed);
    }
    let later = LATER.load(Ordering::Relaxed);
    if later > 0 {
        LATER.store(later - 1, Ordering::Relaxed);
        thread::sleep(DELAY);
    }
}
