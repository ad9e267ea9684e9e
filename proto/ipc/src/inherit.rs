//! Descriptors that whoever started this program placed at agreed numbers.

use std::{
    io,
    os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd},
    sync::{Mutex, PoisonError},
};

use rustix::io::FdFlags;

/// One at a time: looking and marking must not interleave with another taker's.
static TAKING: Mutex<()> = Mutex::new(());

/// Takes over the inherited descriptor at this number and keeps children from inheriting it.
///
/// Whatever this program opened itself is close-on-exec (Rust's library and this package see to that), and
/// what was inherited is not, until it is taken. So a number that is close-on-exec is somebody else's.
///
/// # Errors
/// `InvalidInput` for a standard stream, or a descriptor that is not open, was not inherited, or was taken
/// before.
pub fn take(fd: RawFd) -> io::Result<OwnedFd> {
    let refused = |why: &str| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("descriptor {fd} {why}"),
        )
    };
    if fd < 3 {
        return Err(refused("is a standard stream"));
    }
    let _one = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: only asks about the number, and only while this function runs; an unused one is an error.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::io::fcntl_getfd(borrowed).map_err(|_| refused("is not open"))?;
    if flags.contains(FdFlags::CLOEXEC) {
        return Err(refused("was not inherited, or was named twice"));
    }
    rustix::io::fcntl_setfd(borrowed, flags | FdFlags::CLOEXEC)?;
    // SAFETY: open; nobody in this process owns it, for it was not close-on-exec, and from now on it is,
    // so it cannot be taken again.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes over the descriptors that the service manager kept for this process, under names that begin with `prefix`
/// (`sd_listen_fds_with_names(3)`). Others stay as they are.
pub fn stored(prefix: &str) -> Vec<(String, OwnedFd)> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Vec::new();
    }
    let count = number("LISTEN_FDS").unwrap_or(0) as usize;
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let named = (3..).zip(names.split(':')).take(count);
    named
        .filter(|(_, name)| name.starts_with(prefix))
        .filter_map(|(fd, name)| Some((name.to_owned(), take(fd).ok()?)))
        .collect()
}

/// Closes what was inherited and is not wanted; what this process opened itself is close-on-exec (see [`take`]).
///
/// # Errors
/// What reading `/proc/self/fd` reports.
pub fn close_others(wanted: &[RawFd]) -> io::Result<()> {
    let _one = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let open: Vec<RawFd> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for fd in open
        .into_iter()
        .filter(|fd| *fd > 2 && !wanted.contains(fd))
    {
        // SAFETY: only asks about the number; an unused one is an error.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let kept = rustix::io::fcntl_getfd(borrowed).map_or(true, |f| f.contains(FdFlags::CLOEXEC));
        if !kept {
            // SAFETY: open, inherited and taken by nobody, so that nobody in this process owns it.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsRawFd, IntoRawFd};

    #[test]
    fn a_descriptor_is_taken_once_and_only_if_it_was_inherited() {
        let own = std::fs::File::open("/dev/null").unwrap();
        assert!(take(own.as_raw_fd()).is_err(), "it is ours already");
        // As a parent leaves it: not close-on-exec, owned by nobody.
        let left = rustix::io::dup(&own).unwrap().into_raw_fd();
        let taken = take(left).unwrap();
        assert_eq!(taken.as_raw_fd(), left);
        assert!(take(left).is_err(), "twice");
        for never in [-1, 0, 2, 1_000_000] {
            assert!(take(never).is_err());
        }
    }
}
