//! What is known about workers that died: made at each death, kept for a while, and written to files if a folder is
//! given.

use std::{
    collections::{BTreeSet, VecDeque},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hotcell_ipc::{
    blackbox::{Crash, Snapshot},
    spawn::signal_name,
};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    plan_part::PlanPart,
    v1::{AffectedRequest, BlackBox, CrashReport, DeviceFault, RunningRequest, SignalSite},
};

use crate::{
    death::{Death, Ended},
    discover::clip,
};

/// A death and a device's fault belong together if there is no more than this between them.
pub(crate) const TOGETHER: Duration = Duration::from_secs(10);

/// Faults of a device in a report.
const FAULTS: usize = 16;

/// The process that died, as the fleet knew it.
#[derive(Clone, Debug, Default)]
pub struct Dead {
    /// The worker's name.
    pub worker: String,
    /// Which of its processes.
    pub epoch: u64,
    /// Its id.
    pub pid: u32,
    /// Its device.
    pub device: String,
    /// How long it lived.
    pub uptime: Duration,
    /// The models it served.
    pub models: Vec<String>,
}

/// Puts together what is known about a death.
pub fn report(
    dead: Dead,
    death: &Death,
    ended: &Ended,
    blackbox: io::Result<Snapshot>,
) -> CrashReport {
    let (blackbox, blackbox_problem) = match blackbox {
        Ok(seen) => (Some(read(seen)), String::new()),
        Err(error) => (None, clip(&error.to_string())),
    };
    CrashReport {
        id: id(&dead.worker, dead.epoch),
        time_ms: now(),
        worker: dead.worker,
        epoch: dead.epoch,
        pid: dead.pid,
        device: dead.device,
        kind: death.kind.name().to_owned(),
        reason: death.to_string(),
        uptime_ms: millis(dead.uptime),
        models: dead.models,
        blackbox,
        blackbox_problem,
        requests: Vec::new(),
        device_faults: Vec::new(),
        log: ended.last_lines.iter().map(|line| clip(line)).collect(),
    }
}

/// Of a time, milliseconds.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Milliseconds since the Unix epoch.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, millis)
}

fn id(worker: &str, epoch: u64) -> String {
    format!("{worker}.{epoch}")
}

/// What a black box says, within bounds.
pub fn read(seen: Snapshot) -> BlackBox {
    BlackBox {
        doing: seen.doing.name().to_owned(),
        model: clip(&seen.model),
        steps: seen.steps,
        node: seen.node,
        op: clip(&seen.op),
        group: seen.group,
        allocated_bytes: seen.allocated,
        peak_bytes: seen.peak,
        running: seen
            .running
            .into_iter()
            .map(|r| RunningRequest {
                request_id: clip(&r.request),
                tokens: r.tokens,
            })
            .collect(),
        error: clip(&seen.error),
        signal: seen.crash.map(site),
        packed_bytes: seen.packed,
        part: seen.part.map(PlanPart::name).unwrap_or_default().to_owned(),
    }
}

fn site(crash: Crash) -> SignalSite {
    SignalSite {
        signal: crash.signal,
        name: signal_name(crash.signal).unwrap_or_default().to_owned(),
        code: crash.code,
        address: crash.address,
        thread: crash.thread,
        frames: crash.frames,
    }
}

/// The reports of this scheduler. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Crashes(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    known: Mutex<Known>,
    folder: Option<PathBuf>,
    /// Reports whose files somebody is about to write.
    unwritten: Mutex<BTreeSet<String>>,
    /// Who has it writes: one at a time, what is known then.
    writing: Mutex<()>,
}

#[derive(Debug, Default)]
struct Known {
    /// The newest first.
    reports: VecDeque<CrashReport>,
    /// Requests of processes whose end has not shown yet, by the report's id; the oldest first.
    early: VecDeque<(String, AffectedRequest)>,
}

/// Takes note of a request, or of what became of one that is noted already.
fn note(requests: &mut Vec<AffectedRequest>, request: AffectedRequest) {
    let same = |r: &AffectedRequest| r.request_id == request.request_id;
    requests.retain(|r| !same(r));
    if requests.len() < limits::MAX_WORKER_REQUESTS {
        requests.push(request);
    }
}

impl Crashes {
    /// None yet. Each is also written to `folder`, if there is one.
    pub fn new(folder: Option<PathBuf>) -> Self {
        Self(Arc::new(Inner {
            folder,
            ..Inner::default()
        }))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        lock(&self.0.known)
    }

    /// Keeps a report; the oldest one goes when there are too many.
    pub fn keep(&self, mut report: CrashReport) {
        let mut known = self.known();
        known.early.retain(|(id, request)| {
            let its = *id == report.id;
            if its {
                note(&mut report.requests, request.clone());
            }
            !its
        });
        let id = report.id.clone();
        known.reports.push_front(report);
        known.reports.truncate(limits::KEPT_CRASHES);
        drop(known);
        self.file(id);
    }

    /// Notes a request that a dead process had, or what became of it.
    pub fn affected(&self, worker: &str, epoch: u64, request: AffectedRequest) {
        let id = id(worker, epoch);
        let mut known = self.known();
        let Some(report) = known.reports.iter_mut().find(|r| r.id == id) else {
            // A stream that broke tells of its worker's end before the system does.
            if known.early.len() >= limits::MAX_WORKER_REQUESTS {
                known.early.pop_front();
            }
            known.early.push_back((id, request));
            return;
        };
        note(&mut report.requests, request);
        drop(known);
        self.file(id);
    }

    /// Notes what went wrong with a device in the report of a death there that was a moment ago: a driver may tell of it
    /// later than it takes a process along.
    pub fn fault(&self, device: &str, fault: DeviceFault) {
        let mut known = self.known();
        let newest = known.reports.iter_mut().find(|r| r.device == device);
        let since = fault.time_ms.saturating_sub(millis(TOGETHER));
        let Some(report) = newest.filter(|report| report.time_ms >= since) else {
            return;
        };
        if report.device_faults.len() >= FAULTS || report.device_faults.contains(&fault) {
            return;
        }
        report.device_faults.push(fault);
        let id = report.id.clone();
        drop(known);
        self.file(id);
    }

    /// All that are kept, the newest first, without what makes them large.
    pub fn list(&self) -> Vec<CrashReport> {
        self.latest(limits::KEPT_CRASHES)
    }

    /// The newest of them, so many at most.
    pub fn latest(&self, most: usize) -> Vec<CrashReport> {
        let short = |report: &CrashReport| {
            let mut report = report.clone();
            report.log.clear();
            if let Some(signal) = report.blackbox.as_mut().and_then(|b| b.signal.as_mut()) {
                signal.frames.clear();
            }
            report
        };
        let known = self.known();
        known.reports.iter().take(most).map(short).collect()
    }

    /// All that are kept, the newest first.
    pub fn all(&self) -> Vec<CrashReport> {
        self.known().reports.iter().cloned().collect()
    }

    /// Takes what another program kept.
    pub fn inherit(&self, reports: Vec<CrashReport>) {
        let mut known = self.known();
        known.reports.extend(reports);
        known.reports.truncate(limits::KEPT_CRASHES);
    }

    /// One report.
    ///
    /// # Errors
    /// [`Reason::CrashNotFound`].
    pub fn get(&self, id: &str) -> Result<CrashReport, Error> {
        let found = self.known().reports.iter().find(|r| r.id == id).cloned();
        found.ok_or_else(|| {
            let what = format!(
                "there is no crash report {}; `hotcell crashes list` shows the last {}",
                clip(id),
                limits::KEPT_CRASHES
            );
            Error::new(Reason::CrashNotFound, what)
        })
    }

    /// What the black box of a dead process says that it ran last, in words.
    pub fn last_node(&self, worker: &str, epoch: u64) -> Option<String> {
        let id = id(worker, epoch);
        let known = self.known();
        let report = known.reports.iter().find(|r| r.id == id)?;
        let seen = report.blackbox.as_ref().filter(|b| !b.op.is_empty())?;
        Some(format!("{} (node {} of a plan)", seen.op, seen.node))
    }

    /// Writes a report's file, off this thread: a disk that hangs must not hold a stream's continuation. A death tells of
    /// hundreds of requests at once, which are written together.
    fn file(&self, id: String) {
        let Some(folder) = self.0.folder.clone() else {
            return;
        };
        if !lock(&self.0.unwritten).insert(id.clone()) {
            return;
        }
        let crashes = self.clone();
        let write = move || {
            let _one_at_a_time = lock(&crashes.0.writing);
            // Before it is read: what is noted from now on is written once more.
            lock(&crashes.0.unwritten).remove(&id);
            // One that is gone meanwhile was one of too many.
            let Ok(report) = crashes.get(&id) else { return };
            if let Err(error) = write(&folder, &report) {
                tracing::warn!(folder = %folder.display(), %error, "cannot write a crash report");
            }
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(write)),
            Err(_) => write(),
        }
    }
}

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes one report as JSON, whole or not at all, and removes the oldest files when there are too many.
fn write(folder: &Path, report: &CrashReport) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let name = format!("crash-{:013}-{}.json", report.time_ms, report.id);
    let (path, part) = (folder.join(&name), folder.join(format!(".{name}.part")));
    let mut text = serde_json::to_vec_pretty(report)?;
    text.push(b'\n');
    std::fs::write(&part, text)?;
    std::fs::rename(&part, &path)?;
    let mut ours: Vec<PathBuf> = std::fs::read_dir(folder)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path
                .file_name()
                .and_then(|n| n.to_str())
                .unwrap_or_default();
            name.starts_with("crash-") && name.ends_with(".json")
        })
        .collect();
    // By name is by time.
    ours.sort();
    let surplus = ours.len().saturating_sub(limits::KEPT_CRASH_FILES);
    for old in ours.iter().take(surplus) {
        std::fs::remove_file(old)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use hotcell_ipc::blackbox::{self, Doing, Node, Reader, Writer};

    use super::*;
    use crate::death::DeathKind;

    fn dead(epoch: u64) -> Dead {
        Dead {
            worker: "w0".into(),
            epoch,
            pid: 42,
            device: "cpu:0".into(),
            uptime: Duration::from_secs(3),
            models: vec!["tiny".into()],
        }
    }

    fn a_report(epoch: u64) -> CrashReport {
        let death = Death::new(DeathKind::Signal { number: 11 }, "");
        let ended = Ended {
            last_lines: vec!["\u{1b}[31mhelp".into()],
            ..Ended::default()
        };
        let memory = blackbox::make().unwrap();
        let reader = Reader::open(&memory).unwrap();
        let writer = Writer::open(&memory, ["matmul"].into_iter()).unwrap();
        writer.doing(Doing::Stepping);
        writer.enter(Node {
            step: 3,
            op: 0,
            group: false,
        });
        writer.crash().site(11, 1, 16, 100, 7, 10);
        writer.crash().frame(100);
        report(dead(epoch), &death, &ended, reader.snapshot())
    }

    #[test]
    fn a_report_tells_what_the_black_box_and_the_log_say() {
        let report = a_report(3);
        assert_eq!(
            (report.id.as_str(), report.kind.as_str()),
            ("w0.3", "signal")
        );
        assert_eq!(report.reason, "killed by SIGSEGV");
        assert!(!report.log[0].contains('\u{1b}'), "{:?}", report.log);
        let blackbox = report.blackbox.unwrap();
        assert_eq!(blackbox.doing, "stepping");
        let signal = blackbox.signal.unwrap();
        assert_eq!((signal.name.as_str(), signal.frames), ("SIGSEGV", vec![90]));
    }

    #[test]
    fn a_black_box_that_cannot_be_read_is_said_so() {
        let death = Death::new(DeathKind::Wedged, "");
        let broken = Err(io::Error::other("overwritten"));
        let report = report(dead(1), &death, &Ended::default(), broken);
        assert_eq!(report.blackbox, None);
        assert_eq!(report.blackbox_problem, "overwritten");
    }

    #[test]
    fn the_newest_are_kept_and_learn_what_became_of_their_requests() {
        let crashes = Crashes::new(None);
        for epoch in 1..=limits::KEPT_CRASHES as u64 + 2 {
            crashes.keep(a_report(epoch));
        }
        let list = crashes.list();
        assert_eq!(list.len(), limits::KEPT_CRASHES);
        assert_eq!(list[0].epoch, limits::KEPT_CRASHES as u64 + 2);
        assert!(list[0].log.is_empty());
        let gone = crashes.get("w0.2").unwrap_err();
        assert_eq!(gone.reason(), Reason::CrashNotFound);

        let had = |outcome: &str| AffectedRequest {
            request_id: "r".into(),
            outcome: outcome.into(),
            ..AffectedRequest::default()
        };
        crashes.affected("w0", 5, had(""));
        crashes.affected("w0", 5, had("continued on w1 (epoch 2)"));
        crashes.affected("w0", 2, had("to nobody"));
        let report = crashes.get("w0.5").unwrap();
        assert_eq!(report.requests, [had("continued on w1 (epoch 2)")]);
        let next = limits::KEPT_CRASHES as u64 + 3;
        crashes.affected("w0", next, had("noted before the report was made"));
        crashes.keep(a_report(next));
        let report = crashes.get(&format!("w0.{next}")).unwrap();
        assert_eq!(report.requests, [had("noted before the report was made")]);
        let node = crashes.last_node("w0", next).unwrap();
        assert_eq!(node, "matmul (node 3 of a plan)");
        assert_eq!(crashes.last_node("w1", next), None);
    }

    #[test]
    fn files_are_whole_and_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("crashes");
        std::fs::create_dir(&at).unwrap();
        std::fs::write(at.join("notes.txt"), "mine").unwrap();
        let crashes = Crashes::new(Some(at.clone()));
        for epoch in 1..=limits::KEPT_CRASH_FILES as u64 + 3 {
            let mut report = a_report(epoch);
            report.time_ms = epoch;
            crashes.keep(report);
        }
        let mut names: Vec<String> = std::fs::read_dir(&at)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names.len(), limits::KEPT_CRASH_FILES + 1);
        assert_eq!(names[0], "crash-0000000000004-w0.4.json");
        let text = std::fs::read_to_string(at.join(&names[0])).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["blackbox"]["signal"]["name"], "SIGSEGV");
        assert_eq!(json["worker"], "w0");
    }

    #[tokio::test]
    async fn a_file_has_what_was_told_last_however_much_came_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let crashes = Crashes::new(Some(folder.path().to_owned()));
        crashes.keep(a_report(3));
        for outcome in ["lost", "goes on"] {
            for number in 0..limits::MAX_WORKER_REQUESTS {
                let request = AffectedRequest {
                    request_id: number.to_string(),
                    outcome: outcome.to_owned(),
                    ..AffectedRequest::default()
                };
                crashes.affected("w0", 3, request);
            }
        }
        while !lock(&crashes.0.unwritten).is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(lock(&crashes.0.writing));
        let files: Vec<PathBuf> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        let [file] = files.as_slice() else {
            panic!("{files:?}");
        };
        let report: serde_json::Value =
            serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let told = serde_json::to_value(crashes.get("w0.3").unwrap()).unwrap();
        assert_eq!(report, told);
        let requests = told["requests"].as_array().unwrap();
        assert_eq!(requests.len(), limits::MAX_WORKER_REQUESTS);
    }
}
