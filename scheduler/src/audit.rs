//! The audit log: who had which models loaded and looked into, what came of it, and which workers died. One JSON object
//! per line, each of bounded length, in files of bounded size.
//!
//! Written by a thread of its own. Whoever has something to say never waits for the disk: what does not fit is counted,
//! and the count is the next line.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{SystemTime, UNIX_EPOCH},
};

use hotcell_proto::limits;
use serde::Serialize;

use crate::discover::clip;

/// Who asked, as far as the door that was used tells.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Who {
    /// The name that the door knows it by: `uid 1000`, `token alice`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// User id of a local process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Its process id, when it connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Address of a remote one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Set when it was the scheduler's own configuration.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub configuration: bool,
}

impl Who {
    /// The scheduler, as it was configured.
    pub fn configuration() -> Self {
        Self {
            configuration: true,
            ..Self::default()
        }
    }
}

/// What happened. Empty parts are left out.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Entry<'a> {
    /// load, unload, inspect, debug or death.
    pub event: &'static str,
    /// Who asked for it, if anybody did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub who: Option<&'a Who>,
    /// The model's name.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub model: &'a str,
    /// Where its bytes came from.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub source: String,
    /// Its trust domain.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub trust_domain: &'a str,
    /// loaded, unloaded, fine, suspicious, refused, died, what a worker died of, or how it was looked into.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub outcome: &'a str,
    /// Why not, by its name in the list of errors.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub reason: &'a str,
    /// In words.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// The worker that died or was looked into.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub worker: &'a str,
    /// Its epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// Digest of the names and digests of the model's files.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub sha256: String,
}

/// A line.
#[derive(Serialize)]
struct Line<'a> {
    /// Milliseconds since 1970.
    time_ms: u64,
    #[serde(flatten)]
    entry: &'a Entry<'a>,
}

/// Where it is written. Clones share it; none writes nothing.
#[derive(Clone, Debug, Default)]
pub struct Audit(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    lines: Option<SyncSender<String>>,
    missed: Arc<AtomicU64>,
    writer: Option<JoinHandle<()>>,
}

impl Drop for Inner {
    /// What was said is written before the last handle is gone.
    fn drop(&mut self) {
        self.lines = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX))
}

impl Audit {
    /// Into this file, from its end on.
    ///
    /// # Errors
    /// If it cannot be opened, or the system gives no thread.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::of(path, limits::MAX_AUDIT_BYTES)
    }

    fn of(path: &Path, most: u64) -> io::Result<Self> {
        let mut file = Rotating::open(path, most)?;
        let (lines, queue) = sync_channel::<String>(limits::AUDIT_BUFFER);
        let missed = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&missed);
        let writer = thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || write(&queue, &counted, &mut file))?;
        Ok(Self(Some(Arc::new(Inner {
            lines: Some(lines),
            missed,
            writer: Some(writer),
        }))))
    }

    /// Whether anything is written.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Notes what happened.
    pub fn note(&self, entry: Entry<'_>) {
        let Some(inner) = &self.0 else { return };
        let line = line(entry);
        let sent = inner.lines.as_ref().map(|lines| lines.try_send(line));
        if let Some(Err(TrySendError::Full(_) | TrySendError::Disconnected(_))) = sent {
            inner.missed.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// One line, no longer than it may be.
fn line(entry: Entry<'_>) -> String {
    let entry = Entry {
        source: clip(&entry.source),
        detail: clip(&entry.detail),
        ..entry
    };
    let time_ms = now();
    let text = serde_json::to_string(&Line {
        time_ms,
        entry: &entry,
    });
    // Of clipped parts a line cannot be longer than this, unless every character has to be escaped.
    match text {
        Ok(text) if text.len() < limits::MAX_AUDIT_LINE => text,
        _ => {
            let entry = Entry {
                source: String::new(),
                detail: "too long to be told".to_owned(),
                ..entry
            };
            let line = Line {
                time_ms,
                entry: &entry,
            };
            serde_json::to_string(&line).unwrap_or_default()
        }
    }
}

fn write(queue: &Receiver<String>, missed: &AtomicU64, file: &mut Rotating) {
    let mut said = false;
    let mut write = |file: &mut Rotating, line: &str| {
        let wrote = file.write(line);
        if let Err(error) = &wrote
            && !said
        {
            tracing::error!(path = %file.path.display(), %error, "the audit log cannot be written");
        }
        said = wrote.is_err();
    };
    while let Ok(line) = queue.recv() {
        write(file, &line);
        let count = missed.swap(0, Ordering::Relaxed);
        if count > 0 {
            let line = format!(
                "{{\"time_ms\":{},\"event\":\"missed\",\"count\":{count}}}",
                now()
            );
            write(file, &line);
        }
    }
}

/// A file that makes way for another one when it is full.
struct Rotating {
    path: PathBuf,
    file: File,
    bytes: u64,
    most: u64,
}

impl Rotating {
    fn open(path: &Path, most: u64) -> io::Result<Self> {
        // Nobody else reads who asked for what, and a link put in its place is not followed.
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .custom_flags(libc_flags())
            .open(path)?;
        let data = file.metadata()?;
        if !data.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is not a regular file",
            ));
        }
        Ok(Self {
            path: path.to_owned(),
            bytes: data.size(),
            file,
            most,
        })
    }

    /// The name of an earlier file: 1 is the last one.
    fn earlier(&self, number: u32) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{number}"));
        name.into()
    }

    fn write(&mut self, line: &str) -> io::Result<()> {
        let bytes = line.len() as u64 + 1;
        if self.bytes > 0 && self.bytes.saturating_add(bytes) > self.most {
            self.rotate()?;
        }
        // In one piece, so that two programs' lines do not mix.
        self.file.write_all(format!("{line}\n").as_bytes())?;
        self.bytes += bytes;
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        for number in (1..limits::KEPT_AUDIT_FILES).rev() {
            match std::fs::rename(self.earlier(number), self.earlier(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        std::fs::rename(&self.path, self.earlier(1))?;
        *self = Self::open(&self.path, self.most)?;
        Ok(())
    }
}

/// Close-on-exec is the standard library's; these are ours.
fn libc_flags() -> i32 {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    i32::try_from(flags.bits()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(detail: &str) -> Entry<'_> {
        Entry {
            event: "load",
            model: "m",
            detail: detail.to_owned(),
            ..Entry::default()
        }
    }

    #[test]
    fn lines_are_json_and_files_make_way_for_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        let who = Who {
            uid: Some(7),
            ..Who::default()
        };
        let audit = Audit::of(&path, 2000).unwrap();
        for _ in 0..200 {
            audit.note(Entry {
                who: Some(&who),
                ..entry("a\nb\u{1b}[2J")
            });
        }
        drop(audit);
        let mut files = 0;
        let mut lines = 0;
        for file in std::fs::read_dir(dir.path()).unwrap() {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
            assert!(text.len() <= 2000);
            files += 1;
            for line in text.lines() {
                let value: serde_json::Value = serde_json::from_str(line).unwrap();
                if value["event"] == "load" {
                    assert_eq!(
                        (&value["who"]["uid"], &value["detail"]),
                        (&7.into(), &"a b [2J".into())
                    );
                }
                lines += 1;
            }
        }
        assert_eq!(files, 1 + limits::KEPT_AUDIT_FILES);
        assert!(lines > 0);
        // Another program goes on where this one ended.
        let audit = Audit::of(&path, 1 << 20).unwrap();
        audit.note(entry("again"));
        drop(audit);
        assert!(
            std::fs::read_to_string(&path)
                .unwrap()
                .ends_with("\"detail\":\"again\"}\n")
        );
    }

    #[test]
    fn no_line_is_longer_than_it_may_be() {
        let nasty = "\"\\".repeat(limits::MAX_AUDIT_LINE);
        let entry = Entry {
            source: nasty.clone(),
            ..entry(&nasty)
        };
        let line = line(entry);
        assert!(line.len() < limits::MAX_AUDIT_LINE, "{}", line.len());
        assert!(serde_json::from_str::<serde_json::Value>(&line).is_ok());
    }

    #[test]
    fn a_link_in_its_place_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        std::os::unix::fs::symlink(dir.path().join("other"), &path).unwrap();
        assert!(Audit::open(&path).is_err());
        assert!(!Audit::default().is_on());
    }
}
