//! A worker that breaks on command: the real program over a backend that wraps the CPU's.
//!
//! Whoever knows its process id orders a fault by a real-time signal ([`Fault::order`]), so no help of the scheduler
//! is needed. A prompt that holds [`POISON`] kills every such worker that computes it. [`NAN_TOKEN`], [`WRONG_TOKEN`] and
//! [`CACHE_TOKEN`] have one node each give wrong numbers; a graph without tokens that reads that node's weight or cache does so
//! always, and one that reads [`CRASH_NODE`] crashes.

mod acts;
mod backend;
mod plant;
mod proxy;
mod trespass;

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Result, ensure};
use hotcell_worker::{
    config::{Cli, Mode},
    exit::Exit,
    program,
};

pub use trespass::{ENDED, NEW_FILE, Trespass};

/// Tokens of a prompt, one after the other, at which a fault worker crashes.
pub const POISON: [u32; 3] = [666, 667, 666];
/// Name of an input: a graph that has it crashes every fault worker that computes it.
pub const POISON_INPUT: &str = "poison";

/// A token in whose rows the node that reads [`NAN_NODE`] gives NaN.
pub const NAN_TOKEN: u32 = 660;
/// See [`NAN_TOKEN`].
pub const NAN_NODE: &str = "model.layers.1.mlp.down_proj.weight";
/// A token in whose rows the numbers of the node that reads [`WRONG_NODE`] are a thousandth too great.
pub const WRONG_TOKEN: u32 = 661;
/// See [`WRONG_TOKEN`].
pub const WRONG_NODE: &str = "model.layers.2.self_attn.o_proj.weight";
/// A token in whose rows the numbers of the node that reads the cache [`WRONG_CACHE`] are a thousandth too great.
pub const CACHE_TOKEN: u32 = 664;
/// See [`CACHE_TOKEN`].
pub const WRONG_CACHE: &str = "cache.2";
/// Tokens of a prompt, one after the other, in whose step the memory of [`CRASH_NODE`] cannot be read, so that the node that
/// reads it crashes.
pub const CRASH: [u32; 3] = [662, 663, 662];
/// See [`CRASH`].
pub const CRASH_NODE: &str = "model.layers.3.mlp.down_proj.weight";

/// Bytes that a fault worker's library says it has in use, and that it keeps until it is asked to give them back.
pub const LIBRARY: (usize, usize) = (7 << 20, 3 << 20);

macro_rules! faults {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// What it can be ordered to do.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Fault { $($(#[doc = $doc])* $name,)* }

        impl Fault {
            /// All there are.
            pub const ALL: &'static [Fault] = &[$(Fault::$name,)*];
        }
    };
}

faults! {
    /// Writes to an address that is not there, in the middle of an execution.
    Segfault,
    /// Aborts in the middle of an execution.
    Abort,
    /// Calls `exit(0)` in the middle of an execution.
    ExitZero,
    /// Panics on the thread that owns the device.
    Panic,
    /// Never comes back from an execution.
    HangInKernel,
    /// Never comes back from making the next plan, as when a model is loaded.
    HangInLoad,
    /// Keeps some memory at each execution from now on, until there is no more.
    Leak,
    /// Takes memory within an execution until there is no more.
    Exhaust,
    /// Gives wrong logits from now on.
    WrongNumbers,
    /// Writes ones over its whole black box.
    ScribbleBlackBox,
    /// Writes bytes that mean nothing on the tokens' connection.
    GarbageOnTokens,
    /// The same on the control connection.
    GarbageOnControl,
    /// Closes the tokens' connection, and lives on.
    CloseTokens,
    /// Answers late: each of the next executions takes a while longer.
    Late,
    /// Gives wrong handles for tensors from now on.
    LieAboutHandles,
    /// Fills its log.
    FillLog,
    /// Spins on more threads than there are cores.
    Spin,
    /// Tries to make another process.
    Fork,
    /// Tries what [`Trespass::order`] says.
    Trespass,
}

/// Orders that were given and not yet carried out.
static ORDERS: [AtomicBool; Fault::ALL.len()] =
    [const { AtomicBool::new(false) }; Fault::ALL.len()];

impl Fault {
    fn signal(self) -> libc::c_int {
        libc::SIGRTMIN() + self as libc::c_int
    }

    fn place(self) -> Option<&'static AtomicBool> {
        ORDERS.get(self as usize)
    }

    /// Orders this fault from a fault worker. Any other process dies of it.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn order(self, pid: u32) -> Result<()> {
        let pid = i32::try_from(pid)?;
        ensure!(pid > 1, "{pid} is no worker");
        // SAFETY: takes no pointers.
        let sent = unsafe { libc::kill(pid, self.signal()) };
        ensure!(sent == 0, io::Error::last_os_error());
        Ok(())
    }

    /// Whether it was ordered; stays so.
    fn is_on(self) -> bool {
        self.place().is_some_and(|p| p.load(Ordering::Relaxed))
    }

    /// Whether it was ordered since this was asked last.
    fn taken(self) -> bool {
        self.is_on()
            && self
                .place()
                .is_some_and(|p| p.swap(false, Ordering::Relaxed))
    }
}

extern "C" fn on_order(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel's own.
    if let Some(info) = unsafe { info.as_ref() }.filter(|_| signal == Fault::Trespass.signal()) {
        // SAFETY: a number that whoever queued the signal gave, or zero.
        trespass::note_order(unsafe { info.si_value() }.sival_ptr.addr());
    }
    let at = usize::try_from(signal - libc::SIGRTMIN());
    if let Some(place) = at.ok().and_then(|at| ORDERS.get(at)) {
        place.store(true, Ordering::Relaxed);
    }
}

fn take_orders() -> io::Result<()> {
    for fault in Fault::ALL {
        // SAFETY: zeroes are a valid `sigaction`; the handler has the signature that it asks for, and only stores.
        let done = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                on_order;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
            libc::sigaction(fault.signal(), &action, std::ptr::null_mut())
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// The whole program.
pub fn run(mut cli: Cli) -> Exit {
    let prepared = take_orders().and_then(|()| match &mut cli.mode {
        Some(Mode::Serve(serve)) => acts::prepare(serve),
        _ => Ok(()),
    });
    if let Err(error) = prepared {
        eprintln!("error: no faults here: {error}");
        return Exit::Internal;
    }
    program::run(cli, &[&backend::FaultBackend])
}
