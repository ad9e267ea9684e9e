//! A terminal with a program in it, read as a person would.

use std::{
    fs::File,
    io::{Read, Write},
    num::NonZero,
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::{Child, Command, ExitStatus},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use hotcell_tests::cluster::SOON;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Termios, Winsize, tcgetattr, tcsetwinsize},
};

/// The size of a terminal until it gets another one.
pub(super) const ROWS: u16 = 40;
/// The same of its lines.
pub(super) const COLUMNS: u16 = 130;

/// A terminal with a program in it.
pub(super) struct Terminal {
    master: File,
    slave: OwnedFd,
    screen: Arc<Mutex<vt100::Parser>>,
    /// All that it wrote.
    raw: Arc<Mutex<Vec<u8>>>,
    /// Whether nobody reads what is written for now.
    held: Arc<AtomicBool>,
    /// Whether nobody will any more.
    closed: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
    before: Termios,
    pub(super) child: Child,
}

pub(super) fn parser(rows: u16, columns: u16) -> vt100::Parser {
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
    /// With a program of which it is the controlling terminal, as a person starts one.
    pub(super) fn start(command: Command) -> Self {
        Self::with(command, true)
    }

    /// With a program that no signal reaches when the terminal goes.
    pub(super) fn start_detached(command: Command) -> Self {
        Self::with(command, false)
    }

    fn with(mut command: Command, controls: bool) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(name.as_c_str(), flags, Mode::empty()).unwrap();
        tcsetwinsize(&slave, size(ROWS, COLUMNS)).unwrap();
        let before = tcgetattr(&slave).unwrap();
        let end = || slave.try_clone().unwrap();
        command.env("TERM", "xterm-256color");
        command.stdin(end()).stdout(end()).stderr(end());
        // SAFETY: two system calls, which is all that may be done between fork and exec.
        unsafe {
            command.pre_exec(move || {
                rustix::process::setsid()?;
                if controls {
                    rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                }
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        let master = File::from(master);
        let screen = Arc::new(Mutex::new(parser(ROWS, COLUMNS)));
        let raw = Arc::<Mutex<Vec<u8>>>::default();
        let (mut from, parser) = (master.try_clone().unwrap(), Arc::clone(&screen));
        let kept = Arc::clone(&raw);
        let closed = Arc::<AtomicBool>::default();
        let over = Arc::clone(&closed);
        let held = Arc::<AtomicBool>::default();
        let waits = Arc::clone(&held);
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Some(count) = read(&mut from, &mut bytes, &waits, &over) {
                kept.lock().unwrap().extend(&bytes[..count]);
                parser.lock().unwrap().process(&bytes[..count]);
            }
        });
        Self {
            master,
            slave,
            screen,
            raw,
            held,
            closed,
            reader: Some(reader),
            before,
            child,
        }
    }

    pub(super) fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    /// All that it wrote so far, byte for byte.
    pub(super) fn raw(&self) -> Vec<u8> {
        self.raw.lock().unwrap().clone()
    }

    /// The words of the line that begins so.
    pub(super) fn line(&self, start: &str) -> Vec<String> {
        let text = self.text();
        let found = text.lines().find(|line| line.starts_with(start));
        let words = found.unwrap_or_default().split_whitespace();
        words.map(str::to_owned).collect()
    }

    pub(super) async fn until(&self, what: &str, shown: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !shown(self) {
            assert!(start.elapsed() < SOON, "{what}:\n{}", self.text());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(super) fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    pub(super) fn resize(&self, rows: u16, columns: u16) {
        let mut screen = self.screen.lock().unwrap();
        screen.screen_mut().set_size(count(rows), count(columns));
        tcsetwinsize(&self.slave, size(rows, columns)).unwrap();
    }

    /// Takes no more bytes, as after Ctrl-S.
    pub(super) fn hold(&self) {
        self.held.store(true, Ordering::SeqCst);
    }

    pub(super) async fn ended(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < SOON, "it does not end:\n{}", self.text());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// How it ends once its terminal is closed, as by somebody who closes the window.
    pub(super) async fn close(mut self) -> ExitStatus {
        self.closed.store(true, Ordering::SeqCst);
        self.reader.take().unwrap().join().unwrap();
        // The last end of it but the program's own.
        let null = File::options().read(true).write(true).open("/dev/null");
        self.master = null.unwrap();
        self.ended().await
    }

    /// How it ended, and that the terminal is as it was.
    pub(super) async fn end(&mut self) -> ExitStatus {
        let status = self.ended().await;
        let own = |t: &Terminal| {
            let screen = t.screen.lock().unwrap();
            !screen.screen().alternate_screen() && !screen.screen().hide_cursor()
        };
        self.until("the screen is given back", own).await;
        self.has_its_modes();
        status
    }

    /// That the terminal has the modes that it had.
    pub(super) fn has_its_modes(&self) {
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
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::SeqCst);
        // What a test left running, if it is not over.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the program wrote next; nothing once it is over or nobody reads it any more.
fn read(from: &mut File, bytes: &mut [u8], held: &AtomicBool, over: &AtomicBool) -> Option<usize> {
    let timeout = Timespec::try_from(Duration::from_millis(20)).unwrap();
    while !over.load(Ordering::SeqCst) {
        if held.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        let mut ready = [PollFd::new(from, PollFlags::IN)];
        if poll(&mut ready, Some(&timeout)).unwrap() > 0 {
            return from.read(bytes).ok().filter(|&count| count > 0);
        }
    }
    None
}
