//! Computing on the time that others leave: for a worker that runs beside one that serves, and that no client waits for.

use std::{
    ffi::CStr,
    io, thread,
    time::{Duration, Instant},
};

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

/// What is computed at a stretch, about.
const STRETCH: Duration = Duration::from_micros(300);
/// How long a rest is at least and at most.
const SHORTEST: Duration = Duration::from_micros(100);
const LONGEST: Duration = Duration::from_micros(1_500);

/// The rests of a thread that [gives way](give_way).
///
/// The least weight alone does not make room: a system looks whose turn it is when somebody wakes, and else at its clock's
/// ticks, which may be 4 ms apart; and two threads that serve take turns on one processor as long as something, whatever
/// its weight, runs on the other one. One that is free they find when they wake. And what runs there has their caches.
#[derive(Debug)]
pub struct Rests {
    since: Instant,
    computed: Duration,
}

impl Rests {
    /// Of this thread, from now on.
    #[expect(clippy::new_without_default, reason = "it looks at clocks")]
    pub fn new() -> Self {
        Self {
            since: Instant::now(),
            computed: computed(),
        }
    }

    /// Rests if it is time to: for as long as this thread had no processor since the last rest, which is taken for others'
    /// having it, and is a little too long where the thread waited for something else. To be asked between pieces of
    /// work, by the thread whose rests they are.
    pub fn rest(&mut self) {
        let passed = self.since.elapsed();
        if passed < STRETCH {
            return;
        }
        thread::sleep(length(passed, computed().saturating_sub(self.computed)));
        *self = Self::new();
    }
}

/// Of a rest after so much time, of which so much was computed.
fn length(passed: Duration, computed: Duration) -> Duration {
    passed.saturating_sub(computed).clamp(SHORTEST, LONGEST)
}

/// How long this thread has had a processor.
fn computed() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: it writes to where it is told. Every Linux has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_are_as_long_as_others_computed() {
        let micros = Duration::from_micros;
        assert_eq!(length(micros(300), micros(300)), SHORTEST);
        assert_eq!(length(micros(1_000), micros(300)), micros(700));
        assert_eq!(length(micros(60_000), micros(300)), LONGEST);
        // Clocks need not agree.
        assert_eq!(length(micros(300), micros(301)), SHORTEST);
    }

    #[test]
    fn only_time_with_a_processor_is_computed() {
        let begun = (Instant::now(), computed());
        while computed() - begun.1 < Duration::from_millis(5) {
            std::hint::spin_loop();
        }
        let slept = Duration::from_millis(50);
        thread::sleep(slept);
        // In this order: what is computed between the two is in neither's favour.
        let computed = computed() - begun.1;
        let passed = begun.0.elapsed();
        assert!(computed + slept <= passed, "{computed:?} of {passed:?}");
    }
}
