//! The black box: one page set per worker in which it writes what it is doing, and which outlives it.
//!
//! The scheduler makes the memory, seals its length and hands it to the worker; both map it. The worker writes through
//! [`Writer`] without a lock or a system call, also from a signal handler; the scheduler reads through [`Reader`] while
//! the worker lives (is it still moving?) and after its death (what was it doing?). What is read is a stranger's: every
//! number is bounded and every text cleaned before anybody sees it.

mod page;
mod reader;
mod writer;

pub use page::{BYTES, Doing, MAX_FRAMES, MAX_NAMES, MAX_RUNNING, Node};
pub use reader::{Crash, Pulse, Reader, Running, Snapshot};
pub use writer::{CrashWriter, Packing, Slot, Writer};

use std::{io, os::fd::OwnedFd};

/// Asks the thread that it is sent to to write into the black box where it is, and to go on.
pub const POINT_OUT: crate::spawn::Signal = crate::spawn::Signal::USR1;

/// Makes an empty black box, its length sealed, to be handed to one worker.
///
/// # Errors
/// As [`crate::memory::shared_memory`].
pub fn make() -> io::Result<OwnedFd> {
    crate::memory::shared_memory("hotcell-blackbox", BYTES as u64)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    fn pair() -> (Writer, Reader) {
        let memory = make().unwrap();
        let reader = Reader::open(&memory).unwrap();
        let writer = Writer::open(&memory, ["matmul", "softmax"].into_iter()).unwrap();
        (writer, reader)
    }

    #[test]
    fn what_is_written_is_read() {
        let (writer, reader) = pair();
        writer.doing(Doing::Stepping);
        writer.model("tiny");
        writer.stepped();
        writer.enter(Node {
            step: 17,
            op: 1,
            group: true,
        });
        writer.memory(10, 20);
        let one = writer.begin("request-1").unwrap();
        let two = writer.begin("request-2").unwrap();
        writer.computed(&two, 5);
        writer.end(one);
        writer.error("it went \u{1b}[31mwrong\nhere");
        let packing = writer.packs();
        packing.done(4096);

        let seen = reader.snapshot().unwrap();
        assert_eq!(seen.pid, std::process::id());
        assert_eq!(seen.doing, Doing::Stepping);
        assert_eq!((seen.model.as_str(), seen.steps), ("tiny", 1));
        assert_eq!(
            (seen.node, seen.op.as_str(), seen.group),
            (17, "softmax", true)
        );
        assert_eq!((seen.allocated, seen.peak), (10, 20));
        assert_eq!(
            seen.running,
            [Running {
                request: "request-2".to_owned(),
                tokens: 5
            }]
        );
        assert_eq!(seen.error, "it went ?[31mwrong?here");
        assert_eq!(seen.crash, None);
        let own = rustix::thread::gettid().as_raw_nonzero().get();
        assert_eq!((seen.packer, seen.packed), (Some(own as u32), 4096));
        drop(packing);
        let seen = reader.snapshot().unwrap();
        assert_eq!((seen.packer, seen.packed), (None, 0));
    }

    #[test]
    fn a_pulse_changes_with_whatever_moves() {
        let (writer, reader) = pair();
        let mut last = reader.pulse();
        let mut changed = |what: &str| {
            let now = reader.pulse();
            assert_ne!(now, last, "{what}");
            last = now;
        };
        writer.doing(Doing::Loading);
        changed("another state");
        writer.stepped();
        changed("a step");
        writer.enter(Node {
            step: 1,
            op: 0,
            group: false,
        });
        changed("a node");
        writer.progressed();
        changed("progress within a node");
        writer.beat();
        changed("the event loop");
        assert_eq!(reader.pulse(), last);
    }

    #[test]
    fn there_is_no_more_room_than_there_is() {
        let (writer, reader) = pair();
        let slots: Vec<Slot> = (0..MAX_RUNNING)
            .map(|i| writer.begin(&format!("r{i}")).unwrap())
            .collect();
        assert!(writer.begin("one more").is_none());
        assert_eq!(reader.snapshot().unwrap().running.len(), MAX_RUNNING);
        slots.into_iter().for_each(|slot| writer.end(slot));
        let long = writer.begin(&"é".repeat(500)).unwrap();
        let seen = reader.snapshot().unwrap();
        assert_eq!(seen.running.len(), 1);
        assert!(seen.running[0].request.starts_with("éé") && seen.running[0].request.len() <= 64);
        writer.end(long);
        writer.error(&"x".repeat(10_000));
        assert!(reader.snapshot().unwrap().error.len() <= 512);
    }

    #[test]
    fn a_crash_is_written_frame_by_frame() {
        let (writer, reader) = pair();
        let crash = writer.crash();
        crash.site(11, 1, 0xdead, 0x4000_1234, 42, 0x4000_0000);
        crash.frame(0x4000_1234);
        crash.frame(0x4000_5678);
        let seen = reader.snapshot().unwrap().crash.unwrap();
        assert_eq!((seen.signal, seen.code, seen.address), (11, 1, 0xdead));
        assert_eq!(seen.thread, 42);
        assert_eq!(seen.frames, [0x1234, 0x5678], "relative to the program");
        (0..2 * MAX_FRAMES).for_each(|_| crash.frame(1));
        let seen = reader.snapshot().unwrap().crash.unwrap();
        assert_eq!(seen.frames.len(), MAX_FRAMES);
    }

    #[test]
    fn what_a_worker_spoils_is_an_error_or_harmless() {
        let (_writer, reader) = pair();
        let page = reader.page();
        // Every word in turn holds whatever a broken worker may leave there.
        let words = page.words();
        for (at, word) in words.iter().enumerate() {
            for garbage in [u64::MAX, 1 << 63, 0x8080_8080_8080_8080, 7] {
                let was = word.swap(garbage, Relaxed);
                if let Ok(seen) = reader.snapshot() {
                    assert!(seen.running.len() <= MAX_RUNNING, "word {at}");
                    assert!(seen.error.len() <= 3 * 512 && seen.model.len() <= 3 * 128);
                    // A byte that is no text becomes a character of three.
                    let crash = seen.crash.map_or(0, |c| c.frames.len());
                    assert!(crash <= MAX_FRAMES);
                }
                word.store(was, Relaxed);
            }
        }
        page.words().iter().for_each(|w| w.store(u64::MAX, Relaxed));
        assert!(reader.snapshot().is_err(), "no magic number");
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let small = crate::memory::shared_memory("small", 4096).unwrap();
        assert!(Reader::open(&small).is_err());
        assert!(Writer::open(&small, [].into_iter()).is_err());
        let file = tempfile::tempfile().unwrap();
        file.set_len(BYTES as u64).unwrap();
        assert!(Reader::open(&file).is_err());
    }

    #[test]
    fn a_worker_alone_has_one_of_its_own() {
        let writer = Writer::private(["matmul"].into_iter());
        writer.stepped();
        writer.end(writer.begin("r").unwrap());
    }
}
