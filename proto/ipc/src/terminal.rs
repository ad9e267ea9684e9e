//! Sessions and their terminals: where a child belongs.
//!
//! One that is in a session of its own has nothing to do with a terminal. But Linux divides processors among sessions first
//! (`sched(7)`, autogroups), and one that passes messages on was seen to wait for 20 ms and more while those in another session
//! computed in turns of half a one. So without a terminal, all stay in one session.

use std::{fs, io};

/// Whether this process's session has a controlling terminal, from which Ctrl-C comes and which whoever is in the session may
/// read and write (`tty_nr` of `proc_pid_stat(5)`, `tty(4)`). Where the system does not tell, it has one.
pub fn has_terminal() -> bool {
    let stat = fs::read_to_string("/proc/self/stat");
    // Not every system's numbers are right.
    !matches!(stat.and_then(|stat| number_of(&stat)), Ok(0)) || fs::File::open("/dev/tty").is_ok()
}

/// Where a child is, among process groups and sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In its parent's group.
    Parents,
    /// In a group of its own: a terminal's Ctrl-C does not reach it.
    OwnGroup,
    /// In a session of its own: it has no terminal.
    OwnSession,
}

impl Place {
    /// Of a child of this process. What gives way has a weight for its session, which is to be nobody else's.
    pub fn of(apart: bool, background: bool) -> Self {
        match apart {
            false => Self::Parents,
            true if background || has_terminal() => Self::OwnSession,
            true => Self::OwnGroup,
        }
    }

    /// Goes there; false: the system refuses. Safe between fork and exec: it is a system call.
    pub fn take(self) -> bool {
        // SAFETY: they change where this process is only.
        let done = unsafe {
            match self {
                Self::Parents => 0,
                Self::OwnGroup => libc::setpgid(0, 0),
                Self::OwnSession => libc::setsid(),
            }
        };
        done >= 0
    }
}

/// The terminal's device number. The program's name, before it, may hold anything.
fn number_of(stat: &str) -> io::Result<i64> {
    let after = stat.rsplit_once(')').map(|(_, after)| after);
    let number = after.and_then(|after| after.split_whitespace().nth(4)?.parse().ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_terminal_comes_after_whatever_the_name_is() {
        let number = |stat| number_of(stat).ok();
        assert_eq!(
            number("7 (a) b) 0 1 2) S 1 7 7 34816 7 4194304"),
            Some(34816)
        );
        assert_eq!(number("7 (cat) R 1 7 7 0 -1 4194304"), Some(0));
        assert_eq!(number("7 (cat) R 1 7"), None);
        assert_eq!(number(""), None);
    }

    #[test]
    fn the_system_says_the_same_by_the_terminals_own_name() {
        let opened = fs::File::open("/dev/tty");
        // A place may lack the name altogether.
        if opened
            .as_ref()
            .is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
        {
            return;
        }
        assert_eq!(has_terminal(), opened.is_ok(), "{opened:?}");
    }
}
