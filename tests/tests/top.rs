//! `hotcell top` in a terminal: what it shows while workers serve and die, and that it leaves the terminal as it was.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    fs::File,
    io::{Read, Write},
    num::NonZero,
    os::{fd::OwnedFd, unix::process::CommandExt},
    path::Path,
    process::{Child, Command, ExitStatus},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use hotcell_client::GenerateOptions;
use hotcell_tests::cluster::{Cluster, SOON, all_have, hotcell, is_own, kjv, signal_pid};
use rustix::{
    fs::{Mode, OFlags},
    process::Signal,
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Termios, Winsize, tcgetattr, tcsetwinsize},
};

/// A terminal with a program in it.
struct Terminal {
    master: File,
    slave: OwnedFd,
    screen: Arc<Mutex<vt100::Parser>>,
    before: Termios,
    child: Child,
}

fn parser(rows: u16, columns: u16) -> vt100::Parser {
    vt100::Parser::new(count(rows), count(columns), 0)
}

fn count(cells: u16) -> NonZero<u16> {
    NonZero::new(cells).unwrap()
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

impl Terminal {
    fn start(mut command: Command) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(name.as_c_str(), flags, Mode::empty()).unwrap();
        tcsetwinsize(&slave, size(40, 130)).unwrap();
        let before = tcgetattr(&slave).unwrap();
        let end = || slave.try_clone().unwrap();
        command.env("TERM", "xterm-256color");
        command.stdin(end()).stdout(end()).stderr(end());
        // SAFETY: two system calls, which is all that may be done between fork and exec.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        let master = File::from(master);
        let screen = Arc::new(Mutex::new(parser(40, 130)));
        let (mut from, parser) = (master.try_clone().unwrap(), Arc::clone(&screen));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                parser.lock().unwrap().process(&bytes[..count]);
            }
        });
        Self {
            master,
            slave,
            screen,
            before,
            child,
        }
    }

    fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    /// The words of the line that begins so.
    fn line(&self, start: &str) -> Vec<String> {
        let text = self.text();
        let found = text.lines().find(|line| line.starts_with(start));
        let words = found.unwrap_or_default().split_whitespace();
        words.map(str::to_owned).collect()
    }

    async fn until(&self, what: &str, shown: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !shown(self) {
            assert!(start.elapsed() < SOON, "{what}:\n{}", self.text());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    fn resize(&self, rows: u16, columns: u16) {
        let mut screen = self.screen.lock().unwrap();
        screen.screen_mut().set_size(count(rows), count(columns));
        tcsetwinsize(&self.slave, size(rows, columns)).unwrap();
    }

    /// How it ended, and that the terminal is as it was.
    async fn end(&mut self) -> ExitStatus {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < SOON, "it does not end:\n{}", self.text());
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let own = |t: &Terminal| {
            let screen = t.screen.lock().unwrap();
            !screen.screen().alternate_screen() && !screen.screen().hide_cursor()
        };
        self.until("the screen is given back", own).await;
        let after = tcgetattr(&self.slave).unwrap();
        let modes = |t: &Termios| {
            (
                t.input_modes,
                t.output_modes,
                t.control_modes,
                t.local_modes,
            )
        };
        assert_eq!(modes(&after), modes(&self.before));
        status
    }
}

fn top(cluster: &Cluster) -> Terminal {
    let mut command = hotcell(cluster.folder.path()).unwrap();
    let address = format!("unix:{}", cluster.socket.display());
    command.args(["--address", &address, "top", "--every", "100ms"]);
    Terminal::start(command)
}

fn has_file(folder: &Path, ending: &str) -> bool {
    let mut files = std::fs::read_dir(folder).unwrap();
    files.any(|f| f.unwrap().path().extension().is_some_and(|e| e == ending))
}

#[tokio::test]
async fn a_host_is_watched_while_a_worker_dies() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    let client = cluster.client().await.unwrap();
    let mut top = top(&cluster);
    top.until("a worker", |t| {
        t.line("w0").get(1).is_some_and(|s| s == "ready")
    })
    .await;
    assert!(top.text().contains("1 workers"), "{}", top.text());
    // What it serves, while it serves it: one request after another.
    let served = tokio::spawn(async move {
        for number in 0.. {
            let options = GenerateOptions {
                request_id: format!("moses-{number}"),
                ignore_eos: true,
                ..GenerateOptions::default()
            };
            let mut stream = client.generate("In the beginning", options).await.unwrap();
            while let Some(event) = stream.next().await {
                event.unwrap();
            }
        }
    });
    top.until("a request", |t| t.line("moses").contains(&"drawing".into()))
        .await;
    top.until("tokens", |t| {
        t.line("w0")
            .get(9)
            .is_some_and(|n| n.parse::<u64>().is_ok_and(|n| n > 0))
    })
    .await;
    // Another size: all of it is drawn anew.
    top.resize(30, 100);
    top.until("the keys at the foot", |t| {
        let text = t.text();
        text.lines()
            .nth(29)
            .is_some_and(|l| l.starts_with("q quit"))
    })
    .await;
    top.resize(40, 130);
    let workers = cluster.workers(all_have("kjv")).await.unwrap();
    let worker = workers.iter().find(|w| is_own(w)).unwrap();
    signal_pid(worker.pid, Signal::KILL).unwrap();
    top.until("its death", |t| t.text().contains("worker_died  w0"))
        .await;
    top.until("its next process", |t| {
        let line = t.line("w0");
        line.get(1).is_some_and(|s| s == "ready" || s == "busy")
            && line.get(3) != Some(&worker.pid.to_string())
    })
    .await;
    top.press("\r");
    top.until("the report", |t| {
        t.text().contains("Last death") && t.text().contains("w0.1")
    })
    .await;
    top.press("x");
    top.until("the workers again", |t| t.text().contains("WORKER"))
        .await;
    // It may be listed a moment before it can be looked into.
    let start = Instant::now();
    while !top.text().contains(".pftrace: ") {
        assert!(start.elapsed() < SOON, "{}", top.text());
        top.press("t");
        tokio::time::sleep(Duration::from_millis(1500)).await;
    }
    assert!(has_file(cluster.folder.path(), "pftrace"));
    top.press("?");
    top.until("help", |t| {
        t.text().contains("the report of its last death")
    })
    .await;
    top.press("x");
    assert!(!served.is_finished());
    served.abort();
    top.press("q");
    assert!(top.end().await.success());
}

#[tokio::test]
async fn whatever_ends_it_gives_the_terminal_back() {
    let mut cluster = Cluster::ready().await.unwrap();
    for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
        let mut top = top(&cluster);
        top.until("a worker", |t| !t.line("w0").is_empty()).await;
        signal_pid(top.child.id(), signal).unwrap();
        assert!(top.end().await.success(), "{signal:?}");
    }
    let mut top = top(&cluster);
    top.until("a worker", |t| !t.line("w0").is_empty()).await;
    // A scheduler that is gone is waited for.
    cluster.scheduler.signal(Signal::TERM).unwrap();
    cluster.scheduler.wait().unwrap();
    top.until("that it is gone", |t| t.text().contains("does not answer"))
        .await;
    top.press("\u{3}");
    assert!(top.end().await.success());
    // Without a terminal there is nothing to draw on.
    let mut command = hotcell(cluster.folder.path()).unwrap();
    let output = command.arg("top").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("needs a terminal"), "{said}");
}
