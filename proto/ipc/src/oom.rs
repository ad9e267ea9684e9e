//! How often the kernel killed for want of memory: the only trace that such a kill leaves outside its log.

use std::fs;
use std::path::{Path, PathBuf};

/// Counters as they stand now. They only rise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OomCounts {
    /// Processes killed because this process's control group was out of memory; none where it does not count.
    pub group: Option<u64>,
    /// Times the control group ran against its limit.
    pub limit_hits: u64,
    /// Processes killed for memory on the whole host, as far as it is visible from here.
    pub host: u64,
}

impl OomCounts {
    /// Reads them. What cannot be read counts as nothing.
    pub fn read() -> Self {
        let read = |path: PathBuf| fs::read_to_string(path).ok();
        let groups = read("/proc/self/cgroup".into()).unwrap_or_default();
        let host = read("/proc/vmstat".into()).and_then(|text| value(&text, "oom_kill"));
        let mut counts = Self {
            host: host.unwrap_or(0),
            ..Self::default()
        };
        for folder in folders(&groups) {
            let Self {
                group, limit_hits, ..
            } = Self::of(&folder);
            if group.is_some() {
                (counts.group, counts.limit_hits) = (group, limit_hits);
                break;
            }
        }
        counts
    }

    /// Those of the control group of this folder, without the host's.
    pub fn of(folder: &Path) -> Self {
        let read = |file: &str| fs::read_to_string(folder.join(file)).ok();
        let mut counts = Self::default();
        // Version 2, then version 1.
        if let Some(events) = read("memory.events") {
            counts.group = value(&events, "oom_kill");
            counts.limit_hits = value(&events, "max").unwrap_or(0);
        } else if let Some(control) = read("memory.oom_control") {
            counts.group = value(&control, "oom_kill");
            let hits = read("memory.failcnt");
            counts.limit_hits = hits.and_then(|h| h.trim().parse().ok()).unwrap_or(0);
        }
        counts
    }

    /// What was added since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            group: self
                .group
                .map(|now| now.saturating_sub(before.group.unwrap_or(now))),
            limit_hits: self.limit_hits.saturating_sub(before.limit_hits),
            host: self.host.saturating_sub(before.host),
        }
    }
}

/// Bytes of memory that this process may take before somebody is killed for it, as far as that can be told: what the
/// kernel says is available, and what the control group's limit leaves. Nothing if it cannot be told at all.
pub fn room() -> Option<u64> {
    let read = |path: PathBuf| fs::read_to_string(path).ok();
    let host = read("/proc/meminfo".into()).and_then(|text| {
        let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    });
    let number = |path: PathBuf| read(path)?.trim().parse::<u64>().ok();
    let groups = read("/proc/self/cgroup".into()).unwrap_or_default();
    let group = folders(&groups).into_iter().find_map(|folder| {
        let left = |limit: &str, used: &str, cached: &str| {
            let left = number(folder.join(limit))?.saturating_sub(number(folder.join(used))?);
            // The page cache makes room by itself.
            let cached = read(folder.join("memory.stat")).and_then(|text| value(&text, cached));
            Some(left.saturating_add(cached.unwrap_or(0)))
        };
        // Version 2, where "max" is no number and no limit; then version 1.
        left("memory.max", "memory.current", "inactive_file").or_else(|| {
            let (limit, used) = ("memory.limit_in_bytes", "memory.usage_in_bytes");
            left(limit, used, "total_inactive_file")
        })
    });
    host.map(|host| group.map_or(host, |group| host.min(group)))
}

/// The value of a line `name value`.
fn value(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines();
    lines.find_map(|line| {
        line.strip_prefix(name)?
            .strip_prefix(' ')?
            .trim()
            .parse()
            .ok()
    })
}

/// Where the counters of the groups in `/proc/self/cgroup` may be. A container often sees its own group mounted
/// as the root while the file still names the host's path: hence the roots as well.
pub(crate) fn folders(groups: &str) -> Vec<PathBuf> {
    let (mut own, mut roots) = (Vec::new(), Vec::new());
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) =
            (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let root = match (number, controllers) {
            ("0", "") => Path::new("/sys/fs/cgroup"),
            (_, names) if names.split(',').any(|name| name == "memory") => {
                Path::new("/sys/fs/cgroup/memory")
            }
            _ => continue,
        };
        own.push(root.join(path.trim_start_matches('/')));
        roots.push(root.to_owned());
    }
    own.extend(roots);
    own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_of_memory_is_found_in_both_versions() {
        let v2 = folders("0::/user.slice/hotcell\n");
        assert_eq!(v2[0], Path::new("/sys/fs/cgroup/user.slice/hotcell"));
        assert_eq!(v2[1], Path::new("/sys/fs/cgroup"));
        let v1 = folders("9:name=systemd:/\n4:cpu,memory:/a:b\n3:cpuset:/x\n");
        assert_eq!(
            v1,
            [
                Path::new("/sys/fs/cgroup/memory/a:b"),
                Path::new("/sys/fs/cgroup/memory")
            ]
        );
        assert!(folders("nonsense\n1:2\n").is_empty());
    }

    #[test]
    fn counters_are_read_by_their_whole_name() {
        let text = "low 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n";
        assert_eq!(value(text, "oom_kill"), Some(2));
        assert_eq!(value(text, "max"), Some(12));
        assert_eq!(value(text, "high"), None);
        assert_eq!(value("oom_kill x", "oom_kill"), None);
    }

    #[test]
    fn what_was_added_is_never_negative() {
        let before = OomCounts {
            group: Some(5),
            limit_hits: 9,
            host: 1,
        };
        let now = OomCounts {
            group: Some(6),
            limit_hits: 2,
            host: 4,
        };
        let added = now.since(&before);
        assert_eq!((added.group, added.limit_hits, added.host), (Some(1), 0, 3));
        // A group that was not counted before tells nothing of the time between.
        let since = now.since(&OomCounts::default());
        assert_eq!(since.group, Some(0));
        let _ = OomCounts::read();
    }
}
