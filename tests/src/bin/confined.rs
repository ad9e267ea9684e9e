//! Confines itself as a worker does, then does one thing, for `tests/confinement.rs`.
//!
//! `confined [--nobody] inherited|listening ACTION [ARGUMENT…]`. Standard output gets the confinement's report, and then
//! "done" (exit 0) or "refused: ERROR" (exit 9). Standard input may be a socket.

use std::ffi::c_long;
use std::fs::File;
use std::hint::black_box;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::ExitCode;
use std::ptr;
use std::time::Duration;

use hotcell_ipc::transport::{Windows, incoming_once};
use hotcell_worker::confine::{self, Mode};
use hotcell_worker::exit::Exit;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use rustix::process::{Pid, Resource, Rlimit, Signal};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const REFUSED: u8 = 9;
const PAGE: usize = 4096;

/// What a worker has before it is confined.
struct Before {
    program: File,
    input: OwnedFd,
}

fn main() -> ExitCode {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let nobody = args.first().is_some_and(|arg| arg == "--nobody");
    if nobody {
        args.remove(0);
    }
    let mode = match args.first().map(String::as_str) {
        Some("inherited") => Mode::Inherited,
        Some("listening") => Mode::Listening,
        _ => return Exit::Usage.into(),
    };
    let Some(action) = args.get(1) else {
        return Exit::Usage.into();
    };
    let before = match prepare(nobody) {
        Ok(before) => before,
        Err(error) => {
            eprintln!("cannot prepare: {error}");
            return Exit::Internal.into();
        }
    };
    let report = confine::confine(mode);
    println!("{report}");
    // Only then is it safe to try what must not be done.
    if !report.has("seccomp") {
        return Exit::Unconfined.into();
    }
    match perform(action, args.get(2..).unwrap_or_default(), before) {
        Ok(true) => {
            println!("done");
            Exit::Ok.into()
        }
        Ok(false) => {
            eprintln!("no such action: {action}");
            Exit::Usage.into()
        }
        Err(error) => {
            println!("refused: {error}");
            ExitCode::from(REFUSED)
        }
    }
}

fn prepare(nobody: bool) -> io::Result<Before> {
    let program = File::open("/proc/self/exe")?;
    // std now knows that `statx` works, and takes every later error of it as it is.
    program.metadata()?;
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    if nobody {
        // There is only this thread.
        rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65534))?;
    }
    Ok(Before { program, input })
}

/// Whether there is such an action, once it is done.
fn perform(action: &str, args: &[String], before: Before) -> io::Result<bool> {
    match action {
        "nothing" => {}
        "wait" => drop(io::stdin().read_to_end(&mut Vec::new())?),
        "call" => return call(args).map(|()| true),
        "threads" => threads(),
        "allocate" => allocate(),
        "parallelism" => println!("{}", std::thread::available_parallelism()?),
        "names" => {
            let named = std::thread::Builder::new().name("compute-0".to_owned());
            let name = named.spawn(rustix::thread::name)?.join();
            let name = name.map_err(|_| io::Error::other("the thread panicked"))??;
            println!("{}", name.to_string_lossy());
        }
        "use-open-file" => {
            let length = before.program.metadata()?.len();
            let mut start = [0; 4];
            (&before.program).read_exact(&mut start)?;
            // SAFETY: nobody changes a running program's file.
            let map = unsafe { memmap2::Mmap::map(&before.program)? };
            if map.len() as u64 != length || map.get(..4) != Some(&start) {
                return Err(io::Error::other("the mapping is not the file"));
            }
        }
        "use-self" => {
            let own = rustix::process::getpid();
            rustix::process::test_kill_process(own)?;
            let files = rustix::process::getrlimit(Resource::Nofile);
            rustix::process::prlimit(Some(own), Resource::Nofile, files)?;
            let cpus = rustix::thread::sched_getaffinity(None)?;
            rustix::thread::sched_setaffinity(None, &cpus)?;
            hotcell_ipc::turns::take(hotcell_ipc::turns::SHORT)?;
        }
        "panic" => panic!("as asked"),
        "abort" => std::process::abort(),
        "overflow" => drop(black_box(overflow(0))),
        "echo" => runtime()?.block_on(echo(tokio_stream(before.input)?))?,
        "accept" => runtime()?.block_on(accept(before.input))?,
        "grpc" => runtime()?.block_on(async {
            let (incoming, end) = incoming_once(before.input);
            let mut server = Windows::default().server();
            let server = server.add_routes(tonic::service::Routes::default());
            server
                .serve_with_incoming_shutdown(incoming, async move { end.wait().await })
                .await
                .map_err(io::Error::other)
        })?,
        "grpc-tcp" => runtime()?.block_on(async {
            let listener = std::net::TcpListener::from(before.input);
            listener.set_nonblocking(true)?;
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let incoming = tonic::transport::server::TcpIncoming::from(listener)
                .with_nodelay(Some(true))
                .with_keepalive(Some(Duration::from_secs(30)));
            let server = Windows::default().server();
            let mut server = server.http2_keepalive_interval(Some(Duration::from_secs(5)));
            let server = server.add_routes(tonic::service::Routes::default());
            server
                .serve_with_incoming(incoming)
                .await
                .map_err(io::Error::other)
        })?,
        "open" => drop(File::open(args.first().map_or("/", String::as_str))?),
        "stat" => println!(
            "{:?}",
            std::fs::metadata(args.first().map_or("/", String::as_str))?
        ),
        "remove" => std::fs::remove_file(args.first().map_or("/", String::as_str))?,
        "run" => drop(std::process::Command::new("/bin/true").status()?),
        "execute" => return Err(std::process::Command::new("/bin/true").exec()),
        "connect" => drop(UnixStream::connect("/run/nobody")?),
        "listen" => drop(std::net::TcpListener::bind("127.0.0.1:0")?),
        "map-code" => {
            // SAFETY: a new mapping, which nothing refers to.
            unsafe {
                let prot = ProtFlags::READ | ProtFlags::EXEC;
                rustix::mm::mmap_anonymous(ptr::null_mut(), PAGE, prot, MapFlags::PRIVATE)?;
            }
        }
        "make-code" => {
            // SAFETY: as above; it stays mapped.
            unsafe {
                let prot = ProtFlags::READ | ProtFlags::WRITE;
                let page =
                    rustix::mm::mmap_anonymous(ptr::null_mut(), PAGE, prot, MapFlags::PRIVATE)?;
                rustix::mm::mprotect(page, PAGE, MprotectFlags::EXEC)?;
            }
        }
        "kill-parent" => rustix::process::kill_process(parent()?, Signal::KILL)?,
        "kill-group" => rustix::process::kill_current_process_group(Signal::KILL)?,
        "limit-parent" => {
            let limit = Rlimit {
                current: Some(0),
                maximum: None,
            };
            rustix::process::prlimit(Some(parent()?), Resource::Nofile, limit)?;
        }
        "lengthen" => before.program.set_len(0)?,
        _ => return Ok(false),
    }
    Ok(true)
}

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
}

/// A raw system call: its name or number, and its arguments.
fn call(args: &[String]) -> io::Result<()> {
    let wrong = || io::Error::from(io::ErrorKind::InvalidInput);
    let mut args = args.iter();
    let call = args.next().ok_or_else(wrong)?;
    let listed = confine::answers().find(|(name, ..)| name == call);
    let number = match listed {
        Some((_, number, _)) => number,
        None => call.parse().map_err(|_| wrong())?,
    };
    let mut values = [0i64; 6];
    for (value, arg) in values.iter_mut().zip(args) {
        *value = arg.parse().map_err(|_| wrong())?;
    }
    let [a, b, c, d, e, f] = values;
    // SAFETY: performed in no test: each expects an answer of the filter, which is known to be in force.
    if unsafe { syscall(number, a, b, c, d, e, f) } == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn threads() {
    for _ in 0..4 {
        let all: Vec<_> = (0..8u64)
            .map(|start| std::thread::spawn(move || (start..start + 100_000).sum::<u64>()))
            .collect();
        for thread in all {
            black_box(thread.join().is_ok());
        }
    }
}

/// Large and small pieces from many threads: makes arenas, gives memory back, grows and moves blocks.
fn allocate() {
    std::thread::scope(|scope| {
        for seed in 1..=8usize {
            scope.spawn(move || {
                let mut kept: Vec<Vec<u8>> = Vec::new();
                for round in 0..300 {
                    let mut piece = vec![seed as u8; (round * seed * 701) % 300_000 + 1];
                    piece.extend_from_within(..);
                    kept.push(piece);
                    if kept.len() > 40 {
                        kept.clear();
                        kept.shrink_to_fit();
                    }
                }
                black_box(kept);
            });
        }
    });
}

#[expect(unconditional_recursion, reason = "it is to run out of stack")]
fn overflow(depth: u64) -> [u64; 64] {
    let mut frame = [depth; 64];
    let deeper = overflow(black_box(depth + 1));
    frame[1] += deeper[0];
    black_box(frame)
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
}

fn parent() -> io::Result<Pid> {
    rustix::process::getppid().ok_or_else(|| io::Error::other("the parent is outside"))
}

fn tokio_stream(fd: OwnedFd) -> io::Result<UnixStream> {
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(true)?;
    Ok(stream)
}

/// Sends back what comes, until the end, from a task, past a timer and a blocking thread.
async fn echo(stream: UnixStream) -> io::Result<()> {
    let mut stream = tokio::net::UnixStream::from_std(stream)?;
    stream.peer_cred()?;
    let task = tokio::spawn(async move {
        let mut buffer = [0; 1024];
        loop {
            let count = stream.read(&mut buffer).await?;
            let Some(text) = buffer.get(..count).filter(|text| !text.is_empty()) else {
                return Ok(());
            };
            tokio::time::sleep(Duration::from_millis(1)).await;
            tokio::task::spawn_blocking(|| io::stderr().write_all(b"echo\n")).await??;
            stream.write_all(text).await?;
        }
    });
    task.await?
}

async fn accept(fd: OwnedFd) -> io::Result<()> {
    let listener = UnixListener::from(fd);
    listener.set_nonblocking(true)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let (stream, _) = listener.accept().await?;
    echo(stream.into_std()?).await
}
