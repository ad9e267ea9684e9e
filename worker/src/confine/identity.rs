//! Who a worker is: a user of its own where root starts it, in namespaces of its own, without capabilities.

use std::{fs, io, ops::Range};

use hotcell_ipc::spawn::die_with_parent;
use rustix::{
    process::{Gid, Pid, Uid},
    thread::{CapabilitySet, CapabilitySets, UnshareFlags},
};

use super::report::{Lack, Layer};
use crate::exit::Exit;

/// Ids that nobody else hands out: past the 16 bits of people's and services', and before the subordinate ids of
/// people (100000) and containers (524288).
const USERS: Range<u32> = 65_536..98_304;
/// Where no more than 16 bits are mapped, as in many containers: those that systemd would hand out for a while.
const FEW_USERS: Range<u32> = 61_184..65_520;

/// What a network namespace is made with: System V's and POSIX' queues and memory are named like sockets.
const OUTSIDE: UnshareFlags = UnshareFlags::NEWNET.union(UnshareFlags::NEWIPC);

/// What the kernel forgets of a process that becomes somebody else.
struct Kept {
    dumpable: rustix::process::DumpableBehavior,
    death: Option<rustix::process::Signal>,
    parent: u32,
}

impl Kept {
    fn look() -> rustix::io::Result<Self> {
        Ok(Self {
            dumpable: rustix::process::dumpable_behavior()?,
            death: rustix::process::parent_process_death_signal()?,
            parent: std::os::unix::process::parent_id(),
        })
    }

    fn restore(&self) -> io::Result<()> {
        if self.dumpable == rustix::process::DumpableBehavior::Dumpable {
            rustix::process::set_dumpable_behavior(self.dumpable)?;
        }
        let Some(signal) = self.death else {
            return Ok(());
        };
        match die_with_parent(signal, Some(self.parent)) {
            Err(error) if error.kind() == io::ErrorKind::NotConnected => {
                // It would have been killed.
                std::process::exit(Exit::Ok.code())
            }
            done => done,
        }
    }
}

/// Becomes a user that owns nothing, in namespaces that hold nothing, as far as the kernel lets it: the layers `user`,
/// `user namespace` and `network namespace`. While there is one thread.
pub(super) fn leave() -> [Layer; 3] {
    let kept = Kept::look();
    // Root's own way does not depend on whether users may make namespaces.
    let network = match effective() {
        Ok(held) if held.contains(CapabilitySet::SYS_ADMIN) => unshare(OUTSIDE),
        _ => Err(Lack::new("not tried")),
    };
    let user = match rustix::process::geteuid().is_root() {
        true => Layer::new("user", become_nobody()),
        false => Layer::not_needed("user", "root did not start it"),
    };
    let (namespace, network) = match network {
        Ok(()) => (unshare(UnshareFlags::NEWUSER), Ok(())),
        Err(_) => match unshare(UnshareFlags::NEWUSER | OUTSIDE) {
            Ok(()) => (Ok(()), Ok(())),
            // The one may be refused and not the other.
            Err(lack) => (unshare(UnshareFlags::NEWUSER), Err(lack)),
        },
    };
    let restored = match kept {
        Ok(kept) => kept.restore().map_err(Lack::from),
        Err(error) => Err(error.into()),
    };
    let plain = |done: Result<(), Lack>| done.map(|()| String::new());
    [
        match (user, restored) {
            (_, Err(lack)) => Layer::new("user", Err(lack)),
            (user, Ok(())) => user,
        },
        Layer::new("user namespace", plain(namespace)),
        Layer::new("network namespace", plain(network)),
    ]
}

fn effective() -> rustix::io::Result<CapabilitySet> {
    rustix::thread::capabilities(None).map(|held| held.effective)
}

fn unshare(what: UnshareFlags) -> Result<(), Lack> {
    // SAFETY: the table of descriptors stays as it is.
    Ok(unsafe { rustix::thread::unshare_unsafe(what) }?)
}

/// Becomes a user that no file, no process and no other worker belongs to.
fn become_nobody() -> Result<String, Lack> {
    let needed = CapabilitySet::SETUID | CapabilitySet::SETGID | CapabilitySet::KILL;
    if !effective()?.contains(needed) {
        // Who starts it must be able to end it, too.
        return Err(Lack::new(
            "root is without CAP_SETUID, CAP_SETGID or CAP_KILL here",
        ));
    }
    let maps = ["/proc/self/uid_map", "/proc/self/gid_map"].map(fs::read_to_string);
    let is_mapped = |id| {
        // Where the file is missing, trying tells.
        let mut maps = maps.iter().flatten();
        maps.all(|map| maps_id(map, id))
    };
    let id = choose(std::process::id(), is_mapped)
        .ok_or_else(|| Lack::new("no user id is left for it in this user namespace"))?;
    let (user, group) = (Uid::from_raw(id), Gid::from_raw(id));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_thread_res_uid(user, user, user)?;
    Ok(id.to_string())
}

/// A user id that no other running worker has: no two processes have one process id, and ids would have to be far apart
/// to come to the same.
fn choose(pid: u32, is_mapped: impl Fn(u32) -> bool) -> Option<u32> {
    let of = |ids: Range<u32>| ids.start + pid % (ids.end - ids.start);
    [USERS, FEW_USERS]
        .map(of)
        .into_iter()
        .find(|id| is_mapped(*id))
}

/// Whether a map of `/proc/PID/uid_map` has this id: lines of first id inside, first id outside, and how many.
fn maps_id(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        match (numbers.next(), numbers.next(), numbers.next()) {
            (Some(Ok(first)), Some(Ok(_)), Some(Ok(count))) => {
                id.checked_sub(first).is_some_and(|at| at < count)
            }
            _ => false,
        }
    })
}

/// Drops all capabilities, also those that a user namespace came with.
pub(super) fn drop_capabilities() -> Result<String, Lack> {
    let held = rustix::thread::capabilities(None)?;
    if held.permitted.contains(CapabilitySet::SETPCAP) {
        let setpcap = CapabilitySet::SETPCAP;
        let effective = held.effective | setpcap;
        rustix::thread::set_capabilities(None, CapabilitySets { effective, ..held })?;
        // Where it is refused, or without the right to, the bounding set stays; no new privileges makes it harmless.
        // The first that is refused may also be past the kernel's last one.
        for number in 0..64 {
            let capability = CapabilitySet::from_bits_retain(1 << number);
            if rustix::thread::remove_capability_from_bounding_set(capability).is_err() {
                break;
            }
        }
    }
    // The ambient set cannot exceed the two below.
    let none = CapabilitySet::empty();
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: none,
            permitted: none,
            inheritable: none,
        },
    )?;
    let left = rustix::thread::capabilities(None::<Pid>)?;
    if !(left.effective | left.permitted | left.inheritable).is_empty() {
        return Err(Lack::new("the kernel kept some"));
    }
    let had = if held.permitted.is_empty() {
        "it had none"
    } else {
        "dropped"
    };
    Ok(had.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_has_a_user_of_its_own_among_those_that_are_mapped() {
        let all = |_| true;
        assert_eq!(choose(1, all), Some(65_537));
        assert_ne!(choose(1, all), choose(4_194_303, all));
        let map = "         0     100000      65536\n";
        let few = |id| maps_id(map, id);
        assert_eq!(choose(5, few), Some(61_189));
        assert_eq!(
            choose(u32::MAX, few).filter(|id| !FEW_USERS.contains(id)),
            None
        );
        assert_eq!(choose(5, |id| maps_id("0 0 1\n", id)), None);
        assert!(maps_id("0 0 4294967295\n", 70_000));
        assert!(!maps_id("nonsense\n1 2\n", 1));
    }
}
