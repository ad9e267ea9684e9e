//! Weights in device memory that outlives the process: what is put there is found again, as it was or not at all.

use std::{
    env,
    fs::File,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    process::{Command, Stdio},
    rc::Rc,
    thread,
    time::Duration,
};

use hotcell_ipc::descriptors::{Collector, DescriptorReceiver, DescriptorSender, descriptor_pair};

use hotcell_kernels::{
    backend::{Buffer, Device},
    vault::{Kept, Vault, Wish},
};

use super::{is_gpu, open};

/// More than one kernel's block of words, none of them a multiple of anything, and nothing at all.
const SIZES: [usize; 5] = [1, 1000, 0, 300_007, 4096];

fn bytes(number: usize) -> Vec<u8> {
    let byte = |i: usize| (i * 31 + number * 7 + i / 256) as u8;
    (0..SIZES[number]).map(byte).collect()
}

fn vault(device: &Rc<dyn Device>, layout: &str, kept: Option<Kept>) -> Box<dyn Vault> {
    let wish = Wish {
        layout,
        sizes: &SIZES,
    };
    device.vault(&wish, kept).unwrap().unwrap()
}

fn put_all(vault: &mut Box<dyn Vault>) -> Vec<Buffer> {
    (0..SIZES.len())
        .map(|number| vault.put(number, &bytes(number)).unwrap())
        .collect()
}

fn check(buffers: &[Buffer]) {
    for (number, buffer) in buffers.iter().enumerate() {
        let mut read = vec![0; SIZES[number]];
        buffer.read(0, &mut read).unwrap();
        assert!(read == bytes(number), "weight {number}");
        assert!(SIZES[number] == 0 || buffer.write(0, &[1]).is_err());
    }
}

/// What a process that holds it hands to the next.
fn again(kept: &Kept) -> Kept {
    let pieces = kept.pieces.iter().map(|fd| fd.try_clone().unwrap());
    Kept {
        layout: kept.layout.clone(),
        pieces: pieces.collect(),
        ..*kept
    }
}

fn find_all(vault: &dyn Vault) -> Option<Vec<Buffer>> {
    (0..SIZES.len()).map(|number| vault.find(number)).collect()
}

#[test]
fn weights_are_found_where_they_were_left() {
    let device = open();
    let mut first = vault(&device, "a", None);
    assert!(find_all(first.as_ref()).is_none());
    let buffers = put_all(&mut first);
    assert!(first.put(1, &[0; 999]).is_err(), "of another size");
    assert!(first.put(SIZES.len(), &[]).is_err(), "of no number");
    check(&buffers);
    let kept = first.close().unwrap().unwrap();
    check(&buffers);
    // As if its process had ended.
    drop(buffers);
    for _ in 0..2 {
        let next = vault(&device, "a", Some(again(&kept)));
        let found = find_all(next.as_ref()).unwrap();
        assert!(next.close().unwrap().is_none(), "nothing is new");
        check(&found);
    }
}

#[test]
fn what_does_not_fit_is_not_used() {
    let device = open();
    let mut first = vault(&device, "a", None);
    put_all(&mut first);
    let kept = first.close().unwrap().unwrap();
    let other = vault(&device, "b", Some(again(&kept)));
    assert!(other.find(0).is_none(), "of another layout");
    drop(other);
    let more = Kept {
        bytes: kept.bytes + 256,
        ..again(&kept)
    };
    assert!(vault(&device, "a", Some(more)).find(0).is_none());
    let none = Kept {
        pieces: vec![],
        ..again(&kept)
    };
    assert!(vault(&device, "a", Some(none)).find(0).is_none());
    let null = Kept {
        pieces: vec![OwnedFd::from(File::open("/dev/null").unwrap())],
        ..again(&kept)
    };
    let mut next = vault(&device, "a", Some(null));
    assert!(next.find(0).is_none());
    let buffers = put_all(&mut next);
    let anew = next.close().unwrap().unwrap();
    assert_eq!(anew.checksum, kept.checksum, "the same weights");
    check(&buffers);
}

#[test]
fn what_is_damaged_is_put_elsewhere() {
    // A descriptor of a real device's memory cannot be written to.
    if is_gpu() {
        return;
    }
    let device = open();
    let mut first = vault(&device, "a", None);
    let theirs = put_all(&mut first);
    let mut kept = first.close().unwrap().unwrap();
    let mut healthy = theirs;
    // A bit of the last weight, and one of what is between two.
    for (at, is_weight) in [(301_500, true), (3, false)] {
        let memory = File::from(again(&kept).pieces.pop().unwrap());
        let mut byte = [0];
        memory.read_exact_at(&mut byte, at).unwrap();
        memory.write_all_at(&[byte[0] ^ 4], at).unwrap();
        let mut next = vault(&device, "a", Some(again(&kept)));
        assert!(find_all(next.as_ref()).is_none(), "{at}");
        assert!(next.is_damaged());
        let buffers = put_all(&mut next);
        // Nothing happens to who computes from what is damaged.
        let mut still = [0];
        memory.read_exact_at(&mut still, at).unwrap();
        assert_eq!(still[0], byte[0] ^ 4);
        if !is_weight {
            check(&healthy);
        }
        let anew = next.close().unwrap().unwrap();
        assert_eq!(anew.checksum, kept.checksum);
        check(&buffers);
        (kept, healthy) = (anew, buffers);
        let last = vault(&device, "a", Some(again(&kept)));
        assert!(!last.is_damaged());
        check(&find_all(last.as_ref()).unwrap());
    }
}

#[test]
fn memory_that_changes_places_is_another() {
    if is_gpu() {
        return;
    }
    let device = open();
    let mut first = vault(&device, "a", None);
    put_all(&mut first);
    let kept = first.close().unwrap().unwrap();
    let memory = File::from(again(&kept).pieces.pop().unwrap());
    // Two words that change places have the same sum.
    let (mut a, mut b) = ([0; 8], [0; 8]);
    memory.read_exact_at(&mut a, 2048).unwrap();
    memory.read_exact_at(&mut b, 4096).unwrap();
    assert_ne!(a, b);
    memory.write_all_at(&b, 2048).unwrap();
    memory.write_all_at(&a, 4096).unwrap();
    assert!(vault(&device, "a", Some(kept)).find(0).is_none());
}

/// Set for the process that leaves weights: its standard input takes their descriptors.
const LEAVES: &str = "HOTCELL_LEAVES_WEIGHTS";

#[test]
fn weights_survive_the_process_that_put_them_there() {
    if env::var_os(LEAVES).is_some() {
        return leave();
    }
    let (its, ours) = descriptor_pair().unwrap();
    let mut child = Command::new(env::current_exe().unwrap())
        .args([
            "--exact",
            "vault::weights_survive_the_process_that_put_them_there",
        ])
        .env(LEAVES, "1")
        .stdin(Stdio::from(its))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let receiver = DescriptorReceiver::new(ours).unwrap();
    let mut collector = Collector::new(1, 16);
    let (checksum, pieces) = loop {
        if let Some(set) = collector.add(receiver.recv().unwrap()).unwrap() {
            break set;
        }
    };
    // SIGKILL, while it has them mapped.
    child.kill().unwrap();
    child.wait().unwrap();
    let kept = Kept {
        layout: "a".to_owned(),
        bytes: 305_408,
        checksum,
        pieces,
    };
    let next = vault(&open(), "a", Some(kept));
    check(&find_all(next.as_ref()).expect("weights end with their process"));
}

/// Puts weights there, hands over their descriptors, and waits for its end.
fn leave() {
    let device = open();
    let mut vault = vault(&device, "a", None);
    let _held = put_all(&mut vault);
    let kept = vault.close().unwrap().unwrap();
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let pieces: Vec<_> = kept.pieces.iter().map(AsFd::as_fd).collect();
    assert_eq!(kept.bytes, 305_408);
    let sender = DescriptorSender::new(socket).unwrap();
    sender.send(kept.checksum, &pieces).unwrap();
    loop {
        thread::sleep(Duration::from_secs(60));
    }
}
