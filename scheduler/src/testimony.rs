//! What requests tell about devices: which served them, and on which their workers died. Without effects.
//!
//! A request that killed a worker where nothing else ran is poison only if it is not the device that kills whatever runs
//! there. Known answers tell that a device computes at all; whether it serves requests, requests tell.

use std::collections::{BTreeMap, VecDeque};

use crate::suspicion::Process;

/// Remembered of each device; one that served so many since needs no older testimony.
const KEPT: usize = 64;

/// What a request met with.
#[derive(Clone, Debug, PartialEq, Eq)]
enum What {
    /// A whole step was computed for it.
    Served,
    /// This process died under it, perhaps because of it.
    Died(Process),
}

#[derive(Clone, Debug)]
struct Mark {
    at: u64,
    request: String,
    what: What,
}

/// What is remembered, by device.
#[derive(Clone, Debug, Default)]
pub struct Testimony {
    marks: BTreeMap<String, VecDeque<Mark>>,
    /// Counts all that was ever told: the time here.
    told: u64,
}

impl Testimony {
    fn tell(&mut self, device: &str, request: &str, what: What) {
        self.told += 1;
        let marks = self.marks.entry(device.to_owned()).or_default();
        marks.retain(|mark| !(mark.request == request && mark.what == what));
        marks.push_back(Mark {
            at: self.told,
            request: request.to_owned(),
            what,
        });
        if marks.len() > KEPT {
            marks.pop_front();
        }
    }

    /// A device served a request.
    pub fn served(&mut self, device: &str, request: &str) {
        self.tell(device, request, What::Served);
    }

    /// A process on a device died under a request that may have caused it.
    pub fn died(&mut self, device: &str, request: &str, process: &Process) {
        self.tell(device, request, What::Died(process.clone()));
    }

    /// All that was told until now.
    pub fn now(&self) -> u64 {
        self.told
    }

    /// Whether a device is sound as far as others than `request` can tell, that first lost a worker at `since` and lost
    /// these in all: it served one of them since then, or no worker died under any of them.
    pub fn is_sound(&self, device: &str, request: &str, since: u64, lost: &[Process]) -> bool {
        let marks = self.marks.get(device).into_iter().flatten();
        let mut died = false;
        for mark in marks.filter(|mark| mark.request != request) {
            match &mark.what {
                What::Served if mark.at > since => return true,
                What::Served => {}
                What::Died(process) => died |= mark.at > since || lost.contains(process),
            }
        }
        !died
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(epoch: u64) -> Process {
        Process {
            worker: "w0".into(),
            epoch,
        }
    }

    #[test]
    fn a_device_is_sound_if_it_serves_others_or_nobody_else_lost_a_worker_there() {
        let mut told = Testimony::default();
        told.served("w0", "early");
        let since = told.now();
        told.died("w0", "r", &process(1));
        assert!(told.is_sound("w0", "r", since, &[process(1)]));
        // Somebody else was there, whose word came before or after.
        told.died("w0", "s", &process(1));
        assert!(!told.is_sound("w0", "r", since, &[process(1)]));
        assert!(!told.is_sound("w0", "s", told.now() - 1, &[process(1)]));
        // Its own steps speak for nothing, nor do those on another device.
        told.served("w0", "r");
        told.served("w1", "s");
        assert!(!told.is_sound("w0", "r", since, &[process(1)]));
        told.served("w0", "s");
        assert!(told.is_sound("w0", "r", since, &[process(1)]));
        // Long ago is not since.
        assert!(!told.is_sound("w0", "r", told.now(), &[process(1)]));
        assert!(told.is_sound("w9", "r", since, &[]));
    }

    #[test]
    fn what_is_remembered_is_bounded_and_each_request_is_heard_once() {
        let mut told = Testimony::default();
        for _ in 0..1000 {
            told.served("w0", "r");
        }
        assert_eq!(told.marks["w0"].len(), 1);
        for i in 0..1000 {
            told.died("w0", &i.to_string(), &process(i));
        }
        assert_eq!(told.marks["w0"].len(), KEPT);
    }
}
