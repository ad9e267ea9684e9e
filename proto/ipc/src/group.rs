//! Control groups of memory: which one this process is in, and one for each worker where somebody lets us make them.
//!
//! A service manager *delegates* a group to a service (systemd's `Delegate=memory`, marked on the folder); an
//! administrator may name a folder. Nobody else's groups are touched.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};

use crate::oom::{OomCounts, folders};

/// How the names of groups begin that were made for one process each.
const PREFIX: &str = "hotcell-worker-";
/// The group that this process moves into: in version 2, a group with groups in it holds no processes.
const OURS: &str = "hotcell-scheduler";

/// The group of this process, if it was made for it alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Own {
    /// Bytes that it may take; none if there is no limit.
    pub limit: Option<u64>,
}

/// Looks whether this process is in a group that was made for it.
pub fn own() -> Option<Own> {
    own_of(&fs::read_to_string("/proc/self/cgroup").ok()?)
}

fn own_of(groups: &str) -> Option<Own> {
    let all = folders(groups);
    let name = all.iter().find_map(|folder| {
        let name = folder.file_name()?;
        name.to_str()?.starts_with(PREFIX).then(|| name.to_owned())
    })?;
    // In a container the file may name the host's path, and the folder be at the root.
    let candidates = all.iter().flat_map(|f| [f.clone(), f.join(&name)]);
    let mut limits = candidates.filter(|f| f.ends_with(&name)).filter_map(|f| {
        let files = ["memory.max", "memory.limit_in_bytes"];
        let mut read = files
            .iter()
            .filter_map(|l| fs::read_to_string(f.join(l)).ok());
        read.next()?.trim().parse::<u64>().ok()
    });
    // Version 1 says no limit with a number that no machine has.
    let limit = limits.next().filter(|bytes| *bytes < 1 << 60);
    Some(Own { limit })
}

/// A folder in which groups may be made.
#[derive(Debug)]
pub struct Groups {
    folder: PathBuf,
    /// The file that takes a limit, by the version.
    limit: &'static str,
    made: AtomicU64,
}

/// A group for one process. Dropping it removes it if the process is gone; else who makes the next one does.
#[derive(Debug)]
pub struct Group(PathBuf);

impl Groups {
    /// In `folder`, which is ours to use.
    ///
    /// # Errors
    /// What reading and writing its files report; `Unsupported` for a folder that bounds no memory.
    pub fn within(folder: &Path) -> io::Result<Groups> {
        let groups = |limit| Groups {
            folder: folder.to_owned(),
            limit,
            made: AtomicU64::new(0),
        };
        if folder.join("memory.limit_in_bytes").exists() {
            return Ok(groups("memory.limit_in_bytes"));
        }
        let has = |file: &str| -> io::Result<bool> {
            let list = fs::read_to_string(folder.join(file))?;
            Ok(list.split_whitespace().any(|name| name == "memory"))
        };
        if !has("cgroup.controllers")? {
            let why = format!("{} is no control group of memory", folder.display());
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        if !has("cgroup.subtree_control")? {
            fs::write(folder.join("cgroup.subtree_control"), "+memory")?;
        }
        Ok(groups("memory.max"))
    }

    /// In this process's own group, if a service manager marked it as delegated; this process moves into one within.
    ///
    /// # Errors
    /// As [`within`](Self::within).
    pub fn delegated() -> io::Result<Option<Groups>> {
        let text = fs::read_to_string("/proc/self/cgroup")?;
        let Some(own) = text.lines().find_map(|line| line.strip_prefix("0::")) else {
            return Ok(None);
        };
        let own = Path::new("/sys/fs/cgroup").join(own.trim_start_matches('/'));
        // Where the program before this one moved to.
        let inside = own.ends_with(OURS);
        let folder = match own.parent() {
            Some(parent) if inside => parent.to_owned(),
            _ => own,
        };
        let mut mark = [0u8; 8];
        match rustix::fs::getxattr(&folder, "user.delegate", &mut mark[..]) {
            Ok(1) if mark[0] == b'1' => {}
            _ => return Ok(None),
        }
        if !inside {
            let ours = folder.join(OURS);
            make(&ours)?;
            fs::write(ours.join("cgroup.procs"), "0")?;
        }
        Groups::within(&folder).map(Some)
    }

    /// Makes a group that may take so many bytes, and removes those whose processes are gone.
    ///
    /// # Errors
    /// What making it, or its limit, reports.
    pub fn make(&self, bytes: u64) -> io::Result<Group> {
        self.sweep();
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{number}", std::process::id());
        let group = Group(self.folder.join(name));
        make(&group.0)?;
        fs::write(group.0.join(self.limit), bytes.to_string())?;
        Ok(group)
    }

    fn sweep(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else {
            return;
        };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with(PREFIX) {
                // Fails while a process is in it.
                let _ = fs::remove_dir(entry.path());
            }
        }
    }
}

fn make(folder: &Path) -> io::Result<()> {
    match fs::create_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

impl Group {
    /// What a process writes "0" to, in order to join it.
    ///
    /// # Errors
    /// What opening reports.
    pub fn door(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(
            self.0.join("cgroup.procs"),
            flags,
            Mode::empty(),
        )?)
    }

    /// Counters of this group.
    pub fn counts(&self) -> OomCounts {
        OomCounts::of(&self.0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_group_made_for_a_worker_is_its_own() {
        assert_eq!(own_of("0::/user.slice/app.scope\n4:memory:/x\n"), None);
        let made = "4:memory:/no/such/hotcell-worker-7-0\n0::/\n";
        assert_eq!(own_of(made), Some(Own { limit: None }));
    }
}
