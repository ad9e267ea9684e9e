//! How long a thread's turns on a processor are.
//!
//! Who wakes need not wait for the turn of someone with longer turns to end (EEVDF with Linux 6.12: I. Stoica and H. Abdel-Wahab
//! 1995; `sched_runtime` of `sched(7)`'s ordinary policy). Turns say nothing of shares: whoever passes a message on wants its
//! moment soon, and whoever computes and yields gives no more than such a turn away, to another one who computes there.

use std::{io, time::Duration};

/// The shortest that a system gives.
pub const SHORT: Duration = Duration::from_micros(100);

/// `sched_attr` of `sched_setattr(2)`, as its first version has it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    pub size: u32,
    pub policy: u32,
    pub flags: u64,
    pub nice: i32,
    pub priority: u32,
    pub runtime: u64,
    pub deadline: u64,
    pub period: u64,
}

impl Attributes {
    pub const ORDINARY: Self = Self {
        size: size_of::<Self>() as u32,
        policy: libc::SCHED_OTHER.unsigned_abs(),
        flags: 0,
        nice: 0,
        priority: 0,
        runtime: 0,
        deadline: 0,
        period: 0,
    };

    /// Gives this thread these. Safe between fork and exec.
    pub fn set(&self) -> io::Result<()> {
        // SAFETY: it reads the attributes, which live until it returns, and changes how this thread is scheduled only.
        match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, std::ptr::from_ref(self), 0) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// This thread's.
    fn get() -> io::Result<Self> {
        let mut attributes = Self::ORDINARY;
        let (at, size) = (std::ptr::from_mut(&mut attributes), attributes.size);
        // SAFETY: it writes so many bytes at most there, and all bits are numbers.
        match unsafe { libc::syscall(libc::SYS_sched_getattr, 0, at, size, 0) } {
            0 => Ok(attributes),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// This thread, and those that it starts, have turns this long from here on; zero: what the system thinks right. Systems
/// before Linux 6.12 take no notice, and a thread of another policy than the ordinary one stays as it is.
///
/// # Errors
/// What the system refuses.
pub fn take(turns: Duration) -> io::Result<()> {
    let attributes = Attributes::get()?;
    if attributes.policy != Attributes::ORDINARY.policy {
        return Ok(());
    }
    Attributes {
        size: Attributes::ORDINARY.size,
        flags: 0,
        runtime: turns.as_nanos() as u64,
        ..attributes
    }
    .set()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `policy`, niceness and turns.
    fn mine() -> (u32, i32, u64) {
        let attributes = Attributes::get().unwrap();
        (attributes.policy, attributes.nice, attributes.runtime)
    }

    #[test]
    fn turns_are_a_threads_own_and_of_those_that_it_starts() {
        let before = mine();
        let of_both = std::thread::spawn(|| {
            take(SHORT).unwrap();
            let started = std::thread::spawn(mine).join().unwrap();
            let short = (mine(), started);
            take(Duration::ZERO).unwrap();
            (short, mine())
        });
        let ((short, started), ordinary) = of_both.join().unwrap();
        assert_eq!(short, started);
        assert_eq!(short.0, before.0);
        assert_eq!(short.1, before.1, "its weight is what it was");
        // An older system tells no turns.
        assert!(
            short.2 == SHORT.as_nanos() as u64 || short.2 == 0,
            "{short:?}"
        );
        assert!(ordinary.2 > short.2 || short.2 == 0, "{ordinary:?}");
        assert_eq!(mine(), before);
    }
}
