//! The scheduler under a service manager: what it tells it, and a unit file that fits.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Read,
    os::unix::{fs::PermissionsExt, net::UnixDatagram},
    path::Path,
    time::{Duration, Instant},
};

use hotcell_ipc::spawn::{Child, Command, ExitStatus, Signal, Spawner};
use hotcell_scheduler::exit::Exit;
use tempfile::TempDir;

const SOON: Duration = Duration::from_secs(30);
const WATCHDOG: Duration = Duration::from_millis(400);
const PROBED: &str = r#"{"protocol":1,"devices":[{"id":"cpu:0","backend":"cpu","cores":[0]}]}"#;

/// A service manager, and a scheduler that it started, whose worker can be probed and then is silent.
struct Service {
    scheduler: Child,
    manager: UnixDatagram,
    heard: Vec<String>,
    folder: TempDir,
}

impl Service {
    fn start(address: Option<&str>) -> Self {
        let folder = tempfile::Builder::new()
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .tempdir()
            .unwrap();
        let worker = folder.path().join("worker");
        let script = format!(
            "#!/bin/sh\nif [ $1 = probe ]; then echo '{PROBED}'; exit; fi\nexec sleep 100\n"
        );
        fs::write(&worker, script).unwrap();
        fs::set_permissions(&worker, fs::Permissions::from_mode(0o755)).unwrap();
        let at = folder.path().join("notify");
        let manager = UnixDatagram::bind(&at).unwrap();
        manager.set_read_timeout(Some(SOON)).unwrap();
        let notify = address.map_or(at.into_os_string(), Into::into);
        let command = Command::new(env!("CARGO_BIN_EXE_hotcell-scheduler"))
            .arg("--worker-binary")
            .arg(worker)
            .arg("--socket")
            .arg(folder.path().join("s.sock"))
            .env("PATH", "/usr/bin:/bin")
            .env("NOTIFY_SOCKET", notify)
            .env("WATCHDOG_USEC", WATCHDOG.as_micros().to_string());
        Self {
            scheduler: Spawner::start().unwrap().spawn_blocking(command).unwrap(),
            manager,
            heard: Vec::new(),
            folder,
        }
    }

    /// The next datagram that fits.
    fn hear(&mut self, fits: impl Fn(&str) -> bool) -> String {
        loop {
            let mut buffer = [0; 4096];
            let heard = self.manager.recv(&mut buffer);
            let bytes = heard.unwrap_or_else(|error| panic!("{error}; heard {:?}", self.heard));
            let said = String::from_utf8(buffer[..bytes].to_vec()).unwrap();
            self.heard.push(said.clone());
            if fits(&said) {
                return said;
            }
        }
    }

    /// Ends it; its exit code and what it wrote.
    fn end(mut self) -> (i32, String) {
        self.scheduler.kill(Signal::TERM).unwrap();
        let mut said = String::new();
        let mut stderr = fs::File::from(self.scheduler.stderr.take().unwrap());
        stderr.read_to_string(&mut said).unwrap();
        match self.scheduler.wait_blocking(SOON).unwrap() {
            Some(ExitStatus::Code(code)) => (code, said),
            other => panic!("{other:?}: {said}"),
        }
    }
}

fn is_ping(said: &str) -> bool {
    said == "WATCHDOG=1\n"
}

#[test]
fn it_pings_is_not_ready_without_a_worker_and_says_that_it_stops() {
    let mut service = Service::start(None);
    service.hear(|said| said == "STATUS=0 of 1 workers ready\n");
    for _ in 0..3 {
        service.hear(is_ping);
    }
    service.scheduler.kill(Signal::TERM).unwrap();
    let stopping = service.hear(|said| said.starts_with("STOPPING=1\n"));
    assert!(stopping.contains("\nSTATUS=ending"), "{stopping}");
    assert!(!service.heard.iter().any(|said| said.contains("READY=1")));
    let socket = service.folder.path().join("s.sock");
    match service.scheduler.wait_blocking(SOON).unwrap() {
        Some(ExitStatus::Code(0)) => assert!(!socket.exists()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_scheduler_that_does_not_get_to_run_does_not_ping() {
    let mut service = Service::start(None);
    service.hear(is_ping);
    service.scheduler.kill(Signal::STOP).unwrap();
    service
        .manager
        .set_read_timeout(Some(2 * WATCHDOG))
        .unwrap();
    // What was on its way still comes.
    let began = Instant::now();
    let mut buffer = [0; 4096];
    while service.manager.recv(&mut buffer).is_ok() {
        assert!(began.elapsed() < SOON, "it pings while it is stopped");
    }
    service.scheduler.kill(Signal::CONT).unwrap();
    service.manager.set_read_timeout(Some(SOON)).unwrap();
    service.hear(is_ping);
}

#[test]
fn an_address_that_is_no_good_stops_nobody() {
    let service = Service::start(Some("nonsense"));
    let began = Instant::now();
    while !service.folder.path().join("s.sock").exists() {
        assert!(began.elapsed() < SOON);
        std::thread::sleep(Duration::from_millis(5));
    }
    // Its signals are heard before its doors open.
    let (code, said) = service.end();
    assert_eq!(code, 0, "{said}");
}

/// Assignments of a unit file, by section and key.
fn unit(path: &Path) -> BTreeMap<(String, String), String> {
    let mut section = String::new();
    let mut all = BTreeMap::new();
    for line in std::fs::read_to_string(path).unwrap().lines() {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_owned();
        } else if let Some((key, value)) = line.split_once('=').filter(|_| !line.starts_with('#')) {
            let key = (section.clone(), key.to_owned());
            assert!(all.insert(key, value.to_owned()).is_none(), "{line} twice");
        }
    }
    all
}

#[test]
fn the_unit_restarts_what_a_restart_can_mend_and_leaves_the_drain_alone() {
    let unit = unit(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/hotcell.service"));
    let value = |key: &str| {
        let key = ("Service".to_owned(), key.to_owned());
        unit.get(&key).map_or("", String::as_str)
    };
    assert_eq!(value("Type"), "notify");
    assert_eq!(value("Restart"), "on-failure");
    assert_eq!(value("KillMode"), "mixed");
    assert_eq!(value("OOMPolicy"), "continue");
    assert!(!value("WatchdogSec").is_empty());
    let codes = |key: &str| -> BTreeSet<u8> {
        let codes = value(key).split_whitespace();
        codes.map(|code| code.parse().unwrap()).collect()
    };
    let in_vain = codes("RestartPreventExitStatus");
    let as_asked = codes("SuccessExitStatus");
    // Of every exit there is, it is decided whether another start may mend it.
    for (exit, words) in Exit::ALL {
        let code = *exit as u8;
        let (vain, asked) = match exit {
            // The last two are those of the reload's command.
            Exit::Ok | Exit::TakeoverRefused | Exit::TakeoverFailed => continue,
            Exit::Usage | Exit::NoWorkerBinary | Exit::Unconfined => (true, false),
            Exit::Interrupted => (false, true),
            Exit::CannotListen | Exit::NoDevice | Exit::Internal => (false, false),
        };
        assert_eq!(in_vain.contains(&code), vain, "{words}");
        assert_eq!(as_asked.contains(&code), asked, "{words}");
    }
}
