//! Weights that workers left in their devices' memory, held by descriptor, so that the next worker on a device finds them.
//!
//! Nothing is read or mapped here, and what a descriptor leads to is never looked at.

use std::{
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use hotcell_ipc::{
    descriptors::{Collector, DescriptorReceiver},
    takeover,
};
use hotcell_proto::{limits, v1};

/// How long a worker may take to send what it says that it sent.
const PATIENCE: Duration = Duration::from_secs(5);

/// A model's weights in the memory of one device.
#[derive(Debug)]
pub struct Kept {
    /// What a worker said of them, and is told again.
    pub told: v1::KeptWeights,
    /// As long as these are open, the memory stays.
    pub pieces: Vec<OwnedFd>,
}

/// Descriptors of what a worker says that its devices keep; nothing where that is not to be believed.
fn pieces(told: &v1::KeptWeights) -> Option<usize> {
    let all = || std::iter::once(told).chain(&told.members);
    let is_sound = told.members.len() < limits::MAX_MEMBERS
        && all().all(|one| one.pieces > 0 && one.layout.len() <= limits::MAX_WORD)
        && told.members.iter().all(|member| member.members.is_empty());
    let sum = all().map(|one| u64::from(one.pieces)).sum::<u64>();
    let sum = usize::try_from(sum).ok()?;
    (is_sound && sum <= limits::MAX_KEPT_PIECES).then_some(sum)
}

impl Kept {
    /// Takes the descriptors that a worker has sent. Blocks until they are there.
    ///
    /// # Errors
    /// When other ones came than it said, or none.
    pub fn receive(told: v1::KeptWeights, receiver: &DescriptorReceiver) -> io::Result<Self> {
        let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let due = pieces(&told).ok_or_else(|| wrong("an odd memory of devices".to_owned()))?;
        let until = Instant::now() + PATIENCE;
        let mut collector = Collector::new(1, due);
        let pieces = loop {
            // Of all of them, however slowly they come.
            let left = until.saturating_duration_since(Instant::now());
            receiver.set_timeout(left.max(Duration::from_millis(1)))?;
            let added = collector.add(receiver.recv()?);
            if let Some((_, set)) = added.map_err(|error| wrong(error.to_string()))? {
                break set;
            }
        };
        match pieces.len() == due {
            true => Ok(Self { told, pieces }),
            false => Err(wrong(format!(
                "{} descriptors came for {due} pieces of device memory",
                pieces.len()
            ))),
        }
    }
}

impl Drop for Kept {
    /// Giving memory back may take the driver a while, for which nobody should wait.
    fn drop(&mut self) {
        let pieces = std::mem::take(&mut self.pieces);
        if pieces.is_empty() {
            return;
        }
        let close = move || drop(pieces);
        // Without a thread they are closed here, with the closure.
        let _ = thread::Builder::new().name("close".to_owned()).spawn(close);
    }
}

/// Gives back what nobody else has, and returns when that is done.
pub async fn close(all: Vec<Arc<Kept>>) {
    let close = move || {
        for mut kept in all.into_iter().filter_map(Arc::into_inner) {
            kept.pieces.clear();
        }
    };
    if let Err(error) = tokio::task::spawn_blocking(close).await {
        tracing::error!(%error, "giving back a device's memory failed");
    }
}

/// A model's weights on each device that has them.
#[derive(Debug, Default)]
pub struct KeptOn(Mutex<BTreeMap<String, Arc<Kept>>>);

impl KeptOn {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Kept>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is kept on a device.
    pub fn get(&self, device: &str) -> Option<Arc<Kept>> {
        self.all().get(device).cloned()
    }

    /// Keeps this on a device, and nothing else.
    pub fn keep(&self, device: &str, kept: Kept) {
        let before = self.all().insert(device.to_owned(), Arc::new(kept));
        drop(before);
    }

    /// Takes this from a device, if it still is what the device has.
    pub fn forget(&self, device: &str, this: &Arc<Kept>) {
        let mut all = self.all();
        if all.get(device).is_some_and(|kept| Arc::ptr_eq(kept, this)) {
            all.remove(device);
        }
    }

    /// Takes what devices have that are not to have it. With [`close`] they get their memory back, once no worker has it
    /// mapped either.
    pub fn take_unless(&self, stays: impl Fn(&str) -> bool) -> Vec<Arc<Kept>> {
        self.take_unless_so(|device, _| stays(device))
    }

    /// The same by what it is as well.
    pub fn take_unless_so(&self, stays: impl Fn(&str, &Kept) -> bool) -> Vec<Arc<Kept>> {
        let mut all = self.all();
        let taken = all.extract_if(.., |device, kept| !stays(device, kept));
        taken.map(|(_, kept)| kept).collect()
    }

    /// All of it, for a program that takes this one's place. The numbers are its descriptors' as long as what is put into
    /// `holding` is held.
    pub fn hold(&self, holding: &mut Vec<Arc<Kept>>) -> Vec<v1::HeldKept> {
        let all = self.all();
        holding.extend(all.values().cloned());
        let hold = |(device, kept): (&String, &Arc<Kept>)| v1::HeldKept {
            device: device.clone(),
            told: Some(kept.told.clone()),
            descriptors: kept.pieces.iter().map(takeover::number).collect(),
        };
        all.iter().map(hold).collect()
    }

    /// Takes what the program before this one held. What did not come whole is as good as nothing.
    pub fn inherit(&self, kept: Vec<v1::HeldKept>, mut claim: impl FnMut(i32) -> Option<OwnedFd>) {
        for held in kept {
            let pieces: Option<Vec<_>> = held.descriptors.into_iter().map(&mut claim).collect();
            if let (Some(told), Some(pieces)) = (held.told, pieces)
                && self::pieces(&told) == Some(pieces.len())
            {
                self.keep(&held.device, Kept { told, pieces });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsFd};

    use hotcell_ipc::descriptors::{DescriptorSender, descriptor_pair};

    use super::*;

    fn told(pieces: u32) -> v1::KeptWeights {
        v1::KeptWeights {
            layout: "l".to_owned(),
            bytes: 10,
            checksum: 3,
            pieces,
            members: vec![],
        }
    }

    #[test]
    fn members_pieces_are_counted_and_odd_ones_refused() {
        let with = |members: &[u32]| v1::KeptWeights {
            members: members.iter().map(|n| told(*n)).collect(),
            ..told(2)
        };
        assert_eq!(pieces(&with(&[])), Some(2));
        assert_eq!(pieces(&with(&[3, 1])), Some(6));
        assert_eq!(pieces(&with(&[3, 0])), None);
        assert_eq!(pieces(&with(&[u32::MAX])), None);
        assert_eq!(pieces(&with(&[1; limits::MAX_MEMBERS])), None);
        let nested = v1::KeptWeights {
            members: vec![with(&[1])],
            ..told(1)
        };
        assert_eq!(pieces(&nested), None);
    }

    /// What is made of so many descriptors, where so many were announced.
    fn received(sent: usize, announced: u32) -> io::Result<Kept> {
        let (a, b) = descriptor_pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        let sender = DescriptorSender::new(a).unwrap();
        if sent > 0 {
            sender.send(0, &vec![null.as_fd(); sent]).unwrap();
        }
        drop(sender);
        Kept::receive(told(announced), &DescriptorReceiver::new(b).unwrap())
    }

    #[test]
    fn what_was_said_must_come() {
        assert_eq!(received(3, 3).unwrap().pieces.len(), 3);
        assert_eq!(received(300, 300).unwrap().pieces.len(), 300);
        for (sent, announced) in [(0, 1), (1, 2), (2, 1), (0, 0), (1, u32::MAX)] {
            received(sent, announced).unwrap_err();
        }
    }

    #[tokio::test]
    async fn a_device_keeps_one_at_a_time() {
        let on = KeptOn::default();
        assert!(on.get("cuda:0").is_none());
        on.keep("cuda:0", received(1, 1).unwrap());
        on.keep("cuda:0", received(2, 2).unwrap());
        on.keep("cuda:1", received(1, 1).unwrap());
        assert_eq!(on.get("cuda:0").unwrap().pieces.len(), 2);
        let (zero, one) = (on.get("cuda:0").unwrap(), on.get("cuda:1").unwrap());
        on.forget("cuda:0", &one);
        assert!(on.get("cuda:0").is_some(), "that is another's");
        on.forget("cuda:0", &zero);
        assert!(on.get("cuda:0").is_none());
        assert!(on.take_unless(|device| device == "cuda:1").is_empty());
        let taken = on.take_unless(|device| device == "cuda:2");
        assert!(on.get("cuda:1").is_none() && Arc::ptr_eq(&taken[0], &one));
        drop(one);
        close(taken).await;
    }

    #[tokio::test]
    async fn what_is_given_back_is_closed_when_that_returns() {
        let (a, b) = rustix::pipe::pipe().unwrap();
        let kept = Arc::new(Kept {
            told: told(1),
            pieces: vec![b],
        });
        let other = Arc::clone(&kept);
        close(vec![kept]).await;
        assert_eq!(other.pieces.len(), 1, "somebody else has it");
        close(vec![other]).await;
        // Nobody writes any more.
        assert_eq!(rustix::io::read(&a, &mut [0u8; 1]).unwrap(), 0);
    }

    #[test]
    fn the_next_program_has_what_came_whole() {
        let (before, after) = (KeptOn::default(), KeptOn::default());
        before.keep("cuda:0", received(2, 2).unwrap());
        before.keep("cuda:1", received(1, 1).unwrap());
        let mut holding = Vec::new();
        let held = before.hold(&mut holding);
        assert_eq!(holding.len(), 2);
        let lost = held[0].descriptors[1];
        let claim = |number| {
            let null = File::open("/dev/null").unwrap();
            (number != lost).then(|| OwnedFd::from(null))
        };
        after.inherit(held, claim);
        assert!(after.get("cuda:0").is_none());
        assert_eq!(after.get("cuda:1").unwrap().told, told(1));
    }
}
