//! Computing on the time that others leave: for a worker that runs beside one that serves, and that no client waits for.

use std::{fs::File, io::Write};

/// The lowest weight that a group of a session can have.
const LOWEST: &[u8] = b"19";
const OWN_GROUP: &str = "/proc/self/autogroup";

/// Nanoseconds that it runs at a time while others wait: as few as Linux lets it say.
const SLICE: u64 = 100_000;

/// `sched_attr` of `sched_setattr(2)`, as its first version has it.
#[repr(C)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// From here on, this thread and those that it starts run when nobody else wants the processor, and give it back soon when
/// somebody does: `sched(7)`, its lowest weight, the shortest slice, and the autogroup feature. To be called before the
/// confinement, which takes the file away.
///
/// Not `SCHED_IDLE`: between the groups of two sessions that means nothing, and has no slice.
///
/// # Errors
/// What the system refuses. The process then runs with the same right as any other.
pub fn give_way() -> std::io::Result<()> {
    // Where each session is a group by itself, threads are weighed within it, and it against the others. A scheduler's
    // child leads none yet; one that does already has its group.
    let _ = rustix::process::setsid();
    match File::options().write(true).open(OWN_GROUP) {
        Ok(mut group) => group.write_all(LOWEST)?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let attributes = Attributes {
        size: size_of::<Attributes>() as u32,
        policy: libc::SCHED_BATCH.unsigned_abs(),
        flags: 0,
        nice: 19,
        priority: 0,
        runtime: SLICE,
        deadline: 0,
        period: 0,
    };
    // SAFETY: it reads the attributes, which live until it returns, and changes how this thread is scheduled only.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
