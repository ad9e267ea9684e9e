//! Descriptors cross in whole sets or not at all, and a path has one server.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use hotcell_ipc::memory::{FileIdentity, sealed_memory};
use hotcell_ipc::socket::{
    Batch, BatchError, CollectError, Collector, DescriptorReceiver, DescriptorSender, ListenError,
    MAX_BATCH, descriptor_pair, is_end, listen_unix, peer_credentials, stream_pair,
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

fn memories(count: usize) -> Vec<OwnedFd> {
    (0..count)
        .map(|index| sealed_memory("numbered", index.to_string().as_bytes()).unwrap())
        .collect()
}

fn read(fd: OwnedFd) -> String {
    let mut text = String::new();
    File::from(fd).read_to_string(&mut text).unwrap();
    text
}

fn sender_and_receiver() -> (DescriptorSender, DescriptorReceiver) {
    let (a, b) = descriptor_pair().unwrap();
    (
        DescriptorSender::new(a).unwrap(),
        DescriptorReceiver::new(b).unwrap(),
    )
}

#[test]
fn a_large_set_arrives_whole_and_in_order() {
    let (sender, receiver) = sender_and_receiver();
    let fds = memories(2 * MAX_BATCH + 13);
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    sender.send(7, &borrowed).unwrap();
    sender.send(8, &borrowed[..1]).unwrap();
    drop(sender);

    let mut collector = Collector::new(1, 1000);
    let mut packets = 0;
    let (tag, received) = loop {
        packets += 1;
        if let Some(set) = collector.add(receiver.recv().unwrap()).unwrap() {
            break set;
        }
    };
    assert_eq!((tag, packets), (7, 3));
    for (fd, received) in received.iter().zip(&fds) {
        assert!(
            rustix::io::fcntl_getfd(fd)
                .unwrap()
                .contains(rustix::io::FdFlags::CLOEXEC)
        );
        assert_eq!(
            FileIdentity::of(fd).unwrap().ino,
            FileIdentity::of(received).unwrap().ino
        );
    }
    assert_eq!(read(received.into_iter().next_back().unwrap()), "512");

    let (tag, one) = collector.add(receiver.recv().unwrap()).unwrap().unwrap();
    assert_eq!((tag, one.len()), (8, 1));
    let end = receiver.recv().unwrap_err();
    assert!(is_end(&end));
    assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    assert!(!is_end(&io::ErrorKind::UnexpectedEof.into()));
}

#[test]
fn descriptors_go_one_way_only() {
    let (a, b) = descriptor_pair().unwrap();
    let _sender = DescriptorSender::new(a).unwrap();
    let memory = memories(1);
    let error = raw_send(b.as_fd(), &[0; 20], &[memory[0].as_fd()]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn ends_want_a_socket_of_packets() {
    let (stream, _other) = stream_pair().unwrap();
    let error = DescriptorReceiver::new(stream).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    let file = sealed_memory("file", b"").unwrap();
    let error = DescriptorSender::new(file).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
}

fn raw_send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    rustix::net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

fn header(first: u32, count: u32, total: u32) -> Vec<u8> {
    let mut bytes = 1_u64.to_le_bytes().to_vec();
    for part in [first, count, total] {
        bytes.extend(part.to_le_bytes());
    }
    bytes
}

#[test]
fn a_packet_that_breaks_the_protocol_is_refused_and_its_descriptors_closed() {
    let long = [header(0, 1, 1), vec![0]].concat();
    let cases = [
        (header(0, 1, 1)[..19].to_vec(), 1, BatchError::Length(19)),
        (long, 1, BatchError::Length(21)),
        (vec![], 1, BatchError::Length(0)),
        (
            header(0, 2, 2),
            1,
            BatchError::Count {
                announced: 2,
                carried: 1,
            },
        ),
        (
            header(0, 1, 1),
            2,
            BatchError::Count {
                announced: 1,
                carried: 2,
            },
        ),
        (
            header(0, 0, 1),
            0,
            BatchError::Range {
                first: 0,
                count: 0,
                total: 1,
            },
        ),
        (
            header(5, 1, 5),
            1,
            BatchError::Range {
                first: 5,
                count: 1,
                total: 5,
            },
        ),
        (
            header(u32::MAX, 1, 5),
            1,
            BatchError::Range {
                first: u32::MAX,
                count: 1,
                total: 5,
            },
        ),
        (
            header(0, 251, 251),
            251,
            BatchError::Range {
                first: 0,
                count: 251,
                total: 251,
            },
        ),
    ];
    for (bytes, count, expected) in cases {
        let (a, b) = descriptor_pair().unwrap();
        let receiver = DescriptorReceiver::new(b).unwrap();
        let (mut watch, write) = io::pipe().unwrap();
        raw_send(a.as_fd(), &bytes, &vec![write.as_fd(); count]).unwrap();
        drop(write);
        let error = receiver.recv().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let inner = error.get_ref().unwrap().downcast_ref::<BatchError>();
        assert_eq!(inner, Some(&expected));
        // Ends only if every copy of the writing end was closed.
        assert_eq!(watch.read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn a_receiver_that_does_not_read_costs_the_timeout_and_gets_no_half_set() {
    let (sender, receiver) = sender_and_receiver();
    let sender = sender.with_timeout(Duration::from_millis(50));
    let memory = memories(1);
    let many = vec![memory[0].as_fd(); 1_000_000];
    let start = Instant::now();
    let error = sender.send(1, &many).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(start.elapsed() < Duration::from_secs(10));
    let mut came = 0;
    let end = loop {
        match receiver.recv() {
            // Counted, not kept: this process may not open so many.
            Ok(batch) => came += batch.fds.len(),
            Err(error) => break error,
        }
    };
    assert!(came > 0 && came < many.len(), "{came}");
    assert!(is_end(&end), "{end}");
    assert_eq!(
        sender.send(2, &many[..1]).unwrap_err().kind(),
        io::ErrorKind::BrokenPipe
    );
}

#[tokio::test]
async fn async_sending_waits_for_the_receiver_without_holding_the_thread() {
    let (sender, receiver) = sender_and_receiver();
    let sender = sender.with_timeout(Duration::from_secs(60));
    let memory = memories(1);
    let many = vec![memory[0].as_fd(); 200_000];
    // On this one-threaded runtime: if sending held the thread, this would never be started.
    let reader = tokio::spawn(async move {
        tokio::task::spawn_blocking(move || {
            let mut came = 0;
            while came < 200_000 {
                came += receiver.recv().unwrap().fds.len();
            }
        })
        .await
        .unwrap();
    });
    sender.send_async(3, &many).await.unwrap();
    reader.await.unwrap();
}

#[test]
fn an_empty_set_is_refused() {
    let (sender, _receiver) = sender_and_receiver();
    let error = sender.send(1, &[]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
}

fn batch(tag: u64, first: u32, count: usize, total: u32) -> Batch {
    Batch {
        tag,
        first,
        total,
        fds: memories(count),
    }
}

#[test]
fn a_collector_takes_batches_in_any_order_and_any_mix() {
    let mut collector = Collector::new(2, 4);
    assert!(collector.add(batch(1, 2, 2, 4)).unwrap().is_none());
    assert!(collector.add(batch(2, 0, 1, 2)).unwrap().is_none());
    assert_eq!(collector.pending(), 2);
    let (tag, fds) = collector.add(batch(1, 0, 2, 4)).unwrap().unwrap();
    assert_eq!(tag, 1);
    let texts: Vec<String> = fds.into_iter().map(read).collect();
    assert_eq!(texts, ["0", "1", "0", "1"]);
    collector.forget(2);
    assert_eq!(collector.pending(), 0);
}

#[test]
fn a_collector_refuses_what_overlaps_or_is_too_much() {
    let mut collector = Collector::new(2, 4);
    assert_eq!(
        collector.add(batch(1, 0, 1, 5)).unwrap_err(),
        CollectError::TooLarge { total: 5, limit: 4 }
    );
    collector.add(batch(1, 1, 2, 4)).unwrap();
    assert_eq!(
        collector.add(batch(1, 0, 2, 4)).unwrap_err(),
        CollectError::Twice(1)
    );
    assert_eq!(collector.pending(), 0, "the set is given up");
    collector.add(batch(1, 0, 1, 4)).unwrap();
    assert_eq!(
        collector.add(batch(1, 1, 1, 3)).unwrap_err(),
        CollectError::TotalChanged { before: 4, now: 3 }
    );
    collector.add(batch(1, 0, 1, 4)).unwrap();
    collector.add(batch(2, 0, 1, 4)).unwrap();
    assert_eq!(
        collector.add(batch(3, 0, 1, 4)).unwrap_err(),
        CollectError::TooManySets(2)
    );
    // Hand-made, outside its own set.
    assert!(collector.add(batch(1, 3, 2, 4)).is_err());
}

#[test]
fn the_peer_of_a_pair_is_this_process() {
    let (a, _b) = stream_pair().unwrap();
    let peer = peer_credentials(&a).unwrap();
    assert_eq!(peer.pid, std::process::id());
    assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
    assert_eq!(peer.gid, rustix::process::getegid().as_raw());
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(peer_credentials(&tcp).is_err());
}

#[test]
fn listening_makes_a_private_directory_and_socket_and_cleans_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run/hotcell/socket");
    let (listener, guard) = listen_unix(&path).unwrap();
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(path.parent().unwrap()), 0o700);
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"x").unwrap();
    let (mut served, _) = listener.accept().unwrap();
    served.read_exact(&mut [0]).unwrap();
    drop(guard);
    assert!(!path.exists());
    let _again = listen_unix(&path).unwrap();
}

#[test]
fn a_live_server_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let (_listener, _guard) = listen_unix(&path).unwrap();
    let error = listen_unix(&path).unwrap_err();
    assert!(matches!(error, ListenError::InUse { .. }), "{error}");
    assert!(error.to_string().contains("already running"));
    assert!(error.to_string().contains(path.to_str().unwrap()));
    UnixStream::connect(&path).unwrap();

    // One that knows nothing of lock files, and one too busy to accept.
    let other = dir.path().join("other");
    let listener = UnixListener::bind(&other).unwrap();
    let error = listen_unix(&other).unwrap_err();
    assert!(matches!(error, ListenError::InUse { .. }), "{error}");
    rustix::net::listen(&listener, 0).unwrap();
    let mut waiting = Vec::new();
    loop {
        let socket = rustix::net::socket_with(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        let address = rustix::net::SocketAddrUnix::new(&other).unwrap();
        match rustix::net::connect(&socket, &address) {
            Ok(()) => waiting.push(socket),
            Err(error) => {
                assert_eq!(error, rustix::io::Errno::AGAIN);
                break;
            }
        }
    }
    let error = listen_unix(&other).unwrap_err();
    assert!(matches!(error, ListenError::InUse { .. }), "{error}");
}

#[test]
fn of_many_servers_at_a_stale_socket_one_wins() {
    for _ in 0..20 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        // std leaves the file behind, as a crash would.
        drop(UnixListener::bind(&path).unwrap());
        let start = std::sync::Barrier::new(4);
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        listen_unix(&path)
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
        UnixStream::connect(&path).unwrap();
    }
}

#[test]
fn a_server_that_is_just_starting_counts_as_running() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    drop(UnixListener::bind(&path).unwrap());
    // It has the lock, and has not replaced the stale socket yet.
    let lock = File::create_new(dir.path().join("socket.lock")).unwrap();
    lock.lock().unwrap();
    let error = listen_unix(&path).unwrap_err();
    assert!(matches!(error, ListenError::InUse { .. }), "{error}");
    assert!(
        path.exists(),
        "the stale socket is the other server's to replace"
    );
    drop(lock);
    let _won = listen_unix(&path).unwrap();
}

#[test]
fn what_is_not_a_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("precious");
    std::fs::write(&path, "data").unwrap();
    let error = listen_unix(&path).unwrap_err();
    assert!(matches!(error, ListenError::NotASocket { .. }), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "data");

    // Nor is a link followed, even to a stale socket.
    let socket = dir.path().join("stale");
    drop(UnixListener::bind(&socket).unwrap());
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&socket, &link).unwrap();
    let error = listen_unix(&link).unwrap_err();
    assert!(matches!(error, ListenError::NotASocket { .. }), "{error}");
    assert!(socket.exists());
}

#[test]
fn a_path_without_room_is_refused_before_anything_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d").join("x".repeat(108));
    let error = listen_unix(&path).unwrap_err();
    assert!(matches!(error, ListenError::BadPath { .. }), "{error}");
    assert!(!path.parent().unwrap().exists());
    assert!(matches!(listen_unix(""), Err(ListenError::BadPath { .. })));
}

#[test]
fn a_guard_does_not_remove_a_successors_socket() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let (_listener, guard) = listen_unix(&path).unwrap();
    let moved = dir.path().join("moved");
    std::fs::rename(&path, &moved).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    drop(guard);
    assert!(path.exists());
}
