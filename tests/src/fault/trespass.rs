//! What a confined process must not do, tried by raw system calls so that no library comes between it and the kernel.

use std::{
    ffi::CString,
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    ptr,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use hotcell_proto::limits::MAX_WORKER_THREADS;
use libc::{c_long, c_void};

use super::Fault;
use crate::cluster::{Cluster, SOON, kjv};

/// How it ends where it was not stopped before it could do harm.
pub const ENDED: i32 = 77;

/// Where it tries to make a file.
pub const NEW_FILE: &str = "/tmp/hotcell-trespass";

const PAGE: usize = 4096;
/// In place of a descriptor or a process: none.
const NONE: i32 = -1;

macro_rules! trespasses {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// What it can be ordered to try.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Trespass { $($(#[doc = $doc])* $name,)* }

        impl Trespass {
            /// All there are.
            pub const ALL: &'static [Trespass] = &[$(Trespass::$name,)*];
        }
    };
}

trespasses! {
    /// Opens /etc/passwd.
    OpenPasswords,
    /// Opens the memory of process 1.
    OpenInit,
    /// Opens the scheduler's memory.
    OpenScheduler,
    /// Opens a file in the model's folder that it was not given.
    OpenNeighbour,
    /// Opens a model's file again, to write.
    ReopenWeights,
    /// Makes a file.
    CreateFile,
    /// Removes a model's file.
    RemoveWeights,
    /// Opens a file by its handle.
    OpenByHandle,
    /// Makes a socket.
    Socket,
    /// Makes a socket after it has blocked all signals.
    QuietSocket,
    /// Connects a socket that it has.
    Connect,
    /// Executes a program.
    Execute,
    /// Makes processes without end.
    ForkBomb,
    /// Makes a process in the way whose flags a filter cannot see.
    ForkUnseen,
    /// Makes threads without end, as far as it may.
    ThreadBomb,
    /// Traces the scheduler.
    Trace,
    /// Writes the scheduler's memory.
    WriteScheduler,
    /// Reads the scheduler's memory.
    ReadScheduler,
    /// Kills the scheduler.
    KillScheduler,
    /// Kills one of the scheduler's threads.
    KillThread,
    /// Opens a handle to kill the scheduler by.
    KillByHandle,
    /// Leaves the scheduler no descriptors.
    LimitScheduler,
    /// Mounts a file system.
    Mount,
    /// Makes a user namespace, in which it would have all capabilities.
    Unshare,
    /// Enters a namespace.
    EnterNamespace,
    /// Becomes root.
    BecomeRoot,
    /// Takes capabilities.
    TakeCapabilities,
    /// Adds a filter of its own.
    Filter,
    /// Makes a ring by which system calls are made unseen.
    IoUring,
    /// Loads a program into the kernel.
    Bpf,
    /// Uses the kernel's keys.
    Keys,
    /// Counts the kernel's events.
    PerfEvents,
    /// Handles page faults itself.
    UserFaults,
    /// Makes memory that can be executed as a file.
    ExecutableMemory,
    /// Maps memory that can be executed.
    MapCode,
    /// Makes weights executable.
    ExecuteWeights,
    /// Makes weights writable, writes them, and ends with [`ENDED`].
    ProtectWeights,
    /// Maps a model's file to write.
    MapWeights,
    /// Writes a model's file.
    WriteWeights,
    /// Drops pages out of a model's file.
    RemovePages,
    /// Writes weights where they are mapped.
    ScribbleWeights,
    /// Shortens every file and memory that it shares with others.
    Truncate,
    /// Makes holes in them.
    Punch,
    /// Seals them, so that others cannot write.
    Seal,
}

static WHICH: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Files and memory that it was given.
static SHARED: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());
/// Where the largest weights are mapped, and how many bytes.
static WEIGHTS: Mutex<(usize, usize)> = Mutex::new((0, 0));

/// Descriptors that are kept, at most.
const KEPT: usize = 256;

/// Takes note of a file or memory that it was given.
pub(super) fn note_shared(fd: OwnedFd) {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if shared.len() < KEPT {
        shared.push(fd);
    }
}

/// Takes note of mapped weights.
pub(super) fn note_weights(bytes: &[u8]) {
    let mut weights = WEIGHTS.lock().unwrap_or_else(PoisonError::into_inner);
    if bytes.len() > weights.1 {
        *weights = (bytes.as_ptr().addr(), bytes.len());
    }
}

/// Takes note of what is ordered. In a signal's handler.
pub(super) fn note_order(which: usize) {
    WHICH.store(which, Ordering::Relaxed);
}

/// Tries what was ordered and tells on the log how that went, if it lives to tell.
pub(super) fn commit() {
    let which = WHICH.swap(usize::MAX, Ordering::Relaxed);
    let Some(trespass) = Trespass::ALL.get(which) else {
        return;
    };
    match trespass.attempt() {
        Ok(()) => eprintln!("trespass {trespass:?}: done"),
        Err(error) => match error.raw_os_error() {
            Some(errno) => eprintln!("trespass {trespass:?}: refused with {errno}"),
            None => eprintln!("trespass {trespass:?}: not tried: {error}"),
        },
    }
}

fn call(number: c_long, args: [usize; 6]) -> io::Result<c_long> {
    let [a, b, c, d, e, f] = args;
    // SAFETY: there is none to have: what is tried must be refused. Pointers among the arguments are to memory that
    // outlives the call.
    match unsafe { libc::syscall(number, a, b, c, d, e, f) } {
        -1 => Err(io::Error::last_os_error()),
        done => Ok(done),
    }
}

/// A call with fewer arguments.
macro_rules! call {
    ($number:ident $(, $arg:expr)*) => {{
        let mut args = [0usize; 6];
        let given: &[usize] = &[$($arg as usize),*];
        for (place, arg) in args.iter_mut().zip(given) {
            *place = *arg;
        }
        call(libc::$number, args).map(drop)
    }};
}

fn path(text: impl Into<Vec<u8>>) -> io::Result<CString> {
    CString::new(text).map_err(io::Error::other)
}

fn open(at: impl Into<Vec<u8>>, flags: i32) -> io::Result<()> {
    let at = path(at)?;
    call!(SYS_openat, libc::AT_FDCWD, at.as_ptr(), flags, 0o600)
}

fn model_file(name: &str) -> String {
    kjv().join(name).display().to_string()
}

fn nothing(what: &str) -> io::Error {
    io::Error::other(format!("there is no {what}"))
}

/// What it shares, all or what was given to be read only.
fn shared(only_to_read: bool) -> io::Result<Vec<RawFd>> {
    let all = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let wanted = |fd: &&OwnedFd| {
        let mode = rustix::fs::fcntl_getfl(fd).map(|f| f & rustix::fs::OFlags::ACCMODE);
        !only_to_read || mode == Ok(rustix::fs::OFlags::RDONLY)
    };
    let found: Vec<_> = all.iter().filter(wanted).map(AsRawFd::as_raw_fd).collect();
    if found.is_empty() {
        return Err(nothing("such descriptor"));
    }
    Ok(found)
}

/// The last refusal, if all were refused.
fn each(all: Vec<RawFd>, attempt: impl Fn(RawFd) -> io::Result<()>) -> io::Result<()> {
    let mut refused = Ok(());
    for fd in all {
        match attempt(fd) {
            Ok(()) => return Ok(()),
            error => refused = error,
        }
    }
    refused
}

/// The first whole page of weights.
fn weights() -> io::Result<usize> {
    let (start, bytes) = *WEIGHTS.lock().unwrap_or_else(PoisonError::into_inner);
    let page = start.next_multiple_of(PAGE);
    match start != 0 && page + PAGE <= start + bytes {
        true => Ok(page),
        false => Err(nothing("page of weights")),
    }
}

/// Threads that wait for one another: as many as there may be.
fn thread_bomb() -> io::Result<()> {
    let over = Arc::new((Mutex::new(false), Condvar::new()));
    let cores = thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let mut threads = Vec::new();
    let mut refused = Ok(());
    for _ in 0..=MAX_WORKER_THREADS + cores {
        let waits = Arc::clone(&over);
        let wait = move || {
            let (over, told) = &*waits;
            let held = over.lock().unwrap_or_else(PoisonError::into_inner);
            drop(told.wait_while(held, |over| !*over));
        };
        match thread::Builder::new().stack_size(32 << 10).spawn(wait) {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                refused = Err(error);
                break;
            }
        }
    }
    *over.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
    over.1.notify_all();
    for thread in threads {
        let _ = thread.join();
    }
    refused
}

impl Trespass {
    /// Orders a fault worker to try this. Any other process dies of it.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn order(self, pid: u32) -> Result<()> {
        let pid = i32::try_from(pid)?;
        ensure!(pid > 1, "{pid} is no worker");
        let value = libc::sigval {
            sival_ptr: ptr::without_provenance_mut(self as usize),
        };
        // SAFETY: the pointer is a number, and is taken for one.
        let sent = unsafe { libc::sigqueue(pid, Fault::Trespass.signal(), value) };
        ensure!(sent == 0, io::Error::last_os_error());
        Ok(())
    }

    /// What a worker told of its attempt, once it has, and what the scheduler adds: which worker that was.
    ///
    /// # Errors
    /// When none tells it soon.
    pub async fn told(self, cluster: &Cluster) -> Result<(String, String)> {
        let start = format!("trespass {self:?}: ");
        let began = Instant::now();
        loop {
            let log = cluster.scheduler.log();
            if let Some((_, said)) = log.split_once(&start) {
                let line = said.lines().next().unwrap_or_default();
                let (what, worker) = line.split_once(" worker=").unwrap_or((line, ""));
                return Ok((what.to_owned(), worker.to_owned()));
            }
            ensure!(began.elapsed() < SOON, "nobody said {start:?}:\n{log}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn attempt(self) -> io::Result<()> {
        // SAFETY: takes nothing, and cannot fail.
        let scheduler = unsafe { libc::getppid() };
        let mut byte = [0u8; 64];
        let there = libc::iovec {
            iov_base: byte.as_mut_ptr().cast::<c_void>(),
            iov_len: 1,
        };
        let there = ptr::from_ref(&there);
        let zeroes = byte.as_ptr();
        match self {
            Trespass::OpenPasswords => open("/etc/passwd", libc::O_RDONLY),
            Trespass::OpenInit => open("/proc/1/mem", libc::O_RDWR),
            Trespass::OpenScheduler => open(format!("/proc/{scheduler}/mem"), libc::O_RDWR),
            Trespass::OpenNeighbour => open(model_file("train.py"), libc::O_RDONLY),
            Trespass::ReopenWeights => each(shared(true)?, |fd| {
                open(format!("/proc/self/fd/{fd}"), libc::O_RDWR)
            }),
            Trespass::CreateFile => open(NEW_FILE, libc::O_CREAT | libc::O_WRONLY),
            Trespass::RemoveWeights => {
                let file = path(model_file("model.safetensors"))?;
                call!(SYS_unlinkat, libc::AT_FDCWD, file.as_ptr(), 0)
            }
            Trespass::OpenByHandle => call!(SYS_open_by_handle_at, libc::AT_FDCWD, zeroes, 0),
            Trespass::Socket => call!(SYS_socket, libc::AF_INET, libc::SOCK_STREAM, 0),
            Trespass::QuietSocket => {
                // SAFETY: zeroes are a set of signals, and the pointers are to it.
                unsafe {
                    let mut all: libc::sigset_t = std::mem::zeroed();
                    libc::sigfillset(&mut all);
                    libc::pthread_sigmask(libc::SIG_BLOCK, &all, ptr::null_mut());
                }
                call!(SYS_socket, libc::AF_INET, libc::SOCK_STREAM, 0)
            }
            Trespass::Connect => {
                // SAFETY: zeroes are an address.
                let mut to: libc::sockaddr_un = unsafe { std::mem::zeroed() };
                to.sun_family = libc::AF_UNIX as u16;
                call!(SYS_connect, 0, &raw const to, size_of_val(&to))
            }
            Trespass::Execute => {
                let program = path("/bin/true")?;
                let none = [ptr::null::<u8>()];
                call!(SYS_execve, program.as_ptr(), none.as_ptr(), none.as_ptr())
            }
            Trespass::ForkBomb => loop {
                // SAFETY: as fork(2): no stack, no pointers. A child leaves at once.
                match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
                    // SAFETY: always fine.
                    0 => unsafe { libc::_exit(0) },
                    -1 => return Err(io::Error::last_os_error()),
                    _ => {}
                }
            },
            Trespass::ForkUnseen => {
                let mut args = [0u64; 8];
                args[4] = libc::SIGCHLD as u64;
                // SAFETY: `clone_args` are eight numbers at first; a child leaves at once.
                match unsafe { libc::syscall(libc::SYS_clone3, args.as_ptr(), 64) } {
                    // SAFETY: always fine.
                    0 => unsafe { libc::_exit(0) },
                    -1 => Err(io::Error::last_os_error()),
                    _ => Ok(()),
                }
            }
            Trespass::ThreadBomb => thread_bomb(),
            Trespass::Trace => call!(SYS_ptrace, libc::PTRACE_ATTACH, scheduler, 0, 0),
            Trespass::WriteScheduler => {
                call!(SYS_process_vm_writev, scheduler, there, 1, there, 1, 0)
            }
            Trespass::ReadScheduler => {
                call!(SYS_process_vm_readv, scheduler, there, 1, there, 1, 0)
            }
            Trespass::KillScheduler => call!(SYS_kill, scheduler, libc::SIGKILL),
            Trespass::KillThread => call!(SYS_tgkill, scheduler, scheduler, libc::SIGKILL),
            Trespass::KillByHandle => call!(SYS_pidfd_open, scheduler, 0),
            Trespass::LimitScheduler => {
                call!(SYS_prlimit64, scheduler, libc::RLIMIT_NOFILE, zeroes, 0)
            }
            Trespass::Mount => call!(SYS_mount, zeroes, zeroes, zeroes, 0, zeroes),
            Trespass::Unshare => call!(SYS_unshare, libc::CLONE_NEWUSER),
            Trespass::EnterNamespace => call!(SYS_setns, 0, 0),
            Trespass::BecomeRoot => call!(SYS_setuid, 0),
            Trespass::TakeCapabilities => call!(SYS_capset, zeroes, zeroes),
            Trespass::Filter => call!(SYS_prctl, libc::PR_SET_SECCOMP, 2, zeroes),
            Trespass::IoUring => call!(SYS_io_uring_setup, 1, zeroes),
            Trespass::Bpf => call!(SYS_bpf, 0, zeroes, 64),
            Trespass::Keys => call!(SYS_keyctl, 0, 0, 0),
            Trespass::PerfEvents => call!(SYS_perf_event_open, zeroes, 0, NONE, NONE, 0),
            Trespass::UserFaults => call!(SYS_userfaultfd, 0),
            Trespass::ExecutableMemory => {
                let name = path("code")?;
                call!(SYS_memfd_create, name.as_ptr(), libc::MFD_EXEC)
            }
            Trespass::MapCode => {
                let (prot, flags) = (libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                call!(SYS_mmap, 0, PAGE, prot, flags, NONE, 0)
            }
            Trespass::ExecuteWeights => {
                call!(
                    SYS_mprotect,
                    weights()?,
                    PAGE,
                    libc::PROT_READ | libc::PROT_EXEC
                )
            }
            Trespass::ProtectWeights => {
                let (page, prot) = (weights()?, libc::PROT_READ | libc::PROT_WRITE);
                call!(SYS_mprotect, page, PAGE, prot)?;
                let byte = ptr::with_exposed_provenance_mut::<u8>(page);
                // SAFETY: mapped, and writable now. Nobody sees it change, for the process ends at once.
                unsafe {
                    byte.write_volatile(!byte.read_volatile());
                    libc::_exit(ENDED)
                }
            }
            Trespass::MapWeights => each(shared(true)?, |fd| {
                let prot = libc::PROT_READ | libc::PROT_WRITE;
                call!(SYS_mmap, 0, PAGE, prot, libc::MAP_SHARED, fd, 0)
            }),
            Trespass::WriteWeights => {
                each(shared(true)?, |fd| call!(SYS_pwrite64, fd, zeroes, 1, 0))
            }
            Trespass::RemovePages => call!(SYS_madvise, weights()?, PAGE, libc::MADV_REMOVE),
            Trespass::ScribbleWeights => {
                let page = ptr::with_exposed_provenance_mut::<u8>(weights()?);
                // SAFETY: there is none: it is mapped to be read, which is the point.
                unsafe { page.write_volatile(1) };
                Ok(())
            }
            Trespass::Truncate => each(shared(false)?, |fd| call!(SYS_ftruncate, fd, 0)),
            Trespass::Punch => each(shared(false)?, |fd| {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                call!(SYS_fallocate, fd, mode, 0, PAGE)
            }),
            Trespass::Seal => each(shared(false)?, |fd| {
                call!(SYS_fcntl, fd, libc::F_ADD_SEALS, libc::F_SEAL_FUTURE_WRITE)
            }),
        }
    }
}
