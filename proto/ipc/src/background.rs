//! Computing on the time that others leave: for a worker that runs beside one that serves, and that no client waits for.

use std::{ffi::CStr, io, thread, time::Duration};

use crate::turns::Attributes;

/// The lowest weight that a thread can have, and a group of a session.
pub const LOWEST_NICE: i32 = 19;
const LOWEST: &[u8] = b"19";
const OWN_GROUP: &CStr = c"/proc/self/autogroup";

/// Between two tries to say a group's weight, and how often it is tried.
const PAUSE: Duration = Duration::from_millis(60);
const TRIES: u32 = 5;

/// From here on, this thread and those that it starts run when nobody else wants the processor: `sched(7)`'s idle policy, and
/// the lowest weight of its own group where each session is one. Safe between fork and exec: it is system calls alone, and
/// allocates nothing.
///
/// Between the groups of two sessions the policy weighs nothing, which is what the group's weight is for. But a processor on
/// which nothing else runs counts as free for whoever wakes: those who serve do not queue behind one another
/// on the next one until the system comes to look at its balance.
///
/// # Errors
/// What the system refuses; what it does not refuse is done. `EAGAIN`, where a process without rights has said the weight of
/// a group within the last tenth of a second: [`insist`] waits.
pub fn give_way() -> io::Result<()> {
    // Where each session is a group by itself, threads are weighed within it, and it against the others. A process that
    // leads one already has its group; one that leads a group of processes can have none, and is weighed among those of its
    // session, whose weight is not its to say.
    let _ = rustix::process::setsid();
    let mut group_refused = None;
    // SAFETY: they read numbers.
    let has_group = unsafe { libc::getsid(0) == libc::getpid() };
    // SAFETY: a name that ends with zero; what was opened is written to and closed.
    unsafe {
        let group = match has_group {
            true => libc::open(OWN_GROUP.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC),
            false => -1,
        };
        // Not every system has such groups.
        if group >= 0 {
            if libc::write(group, LOWEST.as_ptr().cast(), LOWEST.len()) < 0 {
                group_refused = Some(io::Error::last_os_error());
            }
            libc::close(group);
        }
    }
    let attributes = Attributes {
        policy: libc::SCHED_IDLE.unsigned_abs(),
        nice: LOWEST_NICE,
        ..Attributes::ORDINARY
    };
    attributes.set()?;
    group_refused.map_or(Ok(()), Err)
}

/// [`give_way`], waiting where the system asks for that, if it has not been done.
///
/// # Errors
/// What the system refuses.
pub fn insist() -> io::Result<()> {
    let path = OWN_GROUP.to_str().unwrap_or_default();
    let lowest = std::str::from_utf8(LOWEST).unwrap_or_default();
    for _ in 0..TRIES {
        let group = std::fs::read_to_string(path);
        if group.is_ok_and(|group| group.trim_end().ends_with(&format!("nice {lowest}"))) {
            return Ok(());
        }
        match give_way() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(PAUSE),
            done => return done,
        }
    }
    Err(io::ErrorKind::WouldBlock.into())
}
