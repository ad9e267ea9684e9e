//! Computing on the time that others leave: for a worker that runs beside one that serves, and that no client waits for.

use std::{fs::File, io::Write};

/// The lowest weight that a group of a session can have.
const LOWEST: &[u8] = b"19";
const OWN_GROUP: &str = "/proc/self/autogroup";

/// From here on, this thread and those that it starts run when nobody else wants the processor: `sched(7)`,
/// `SCHED_IDLE` and the autogroup feature. To be called before the confinement, which takes the file away.
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
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: it reads the parameters, which live until it returns, and changes how this thread is scheduled only.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
