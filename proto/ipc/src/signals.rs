//! Which signals a thread hears. Threads begin with the mask of the one that made them, and so do programs.

use crate::child::Signal;

/// Lets this thread hear every signal: its handlers are there.
pub fn hear() {
    mask(&[]);
}

/// Keeps these signals, and no others, from this thread: they wait, or another thread hears them.
pub(crate) fn mask(kept: &[Signal]) {
    // SAFETY: an all-zero set is a valid argument of `sigemptyset`, and all calls get valid pointers and signals.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in kept {
            libc::sigaddset(&mut set, signal.as_raw());
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}

/// Keeps every signal from this thread.
pub(crate) fn mask_all() {
    // SAFETY: an all-zero set is a valid argument of `sigfillset`, and both calls get valid pointers.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
    }
}

/// Gives all signals their defaults and lets all of them through, for a program that is about to begin: exec resets handlers
/// but not what is ignored, and Rust ignores SIGPIPE.
///
/// Safe in a child that has its parent's memory. Not by `sigaction`: for SIGABRT some C libraries take a lock, which the parent has, too.
pub(crate) fn reset() {
    // The kernel's own: no handler, no flags, nothing masked.
    let default = [0u64; 4];
    // Fails for SIGKILL and SIGSTOP, which need nothing.
    for signal in 1..=64 {
        let (new, old) = (default.as_ptr(), std::ptr::null_mut::<u64>());
        // SAFETY: the numbers of signals, a valid action, and the size of a set of signals.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, new, old, size_of::<u64>()) };
    }
    hear();
}
