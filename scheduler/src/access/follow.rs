//! Files that are read again when they change.

use std::{os::unix::fs::MetadataExt, path::PathBuf, sync::Arc, time::Duration};

use tokio::task::JoinHandle;

/// Between two looks. By time and not by notice: that also sees links that are exchanged above the file.
const PAUSE: Duration = Duration::from_secs(1);

/// What a file was when it was looked at; none if it was not there.
type Stamp = Option<(u64, u64, u64, i64, i64, i64, i64)>;

fn stamp(path: &PathBuf) -> Stamp {
    let data = std::fs::metadata(path).ok()?;
    Some((
        data.dev(),
        data.ino(),
        data.size(),
        data.mtime(),
        data.mtime_nsec(),
        data.ctime(),
        data.ctime_nsec(),
    ))
}

/// Calls `again` each time that one of these files changed, until it is aborted. `what` names them in the log.
pub(super) fn follow(
    what: &'static str,
    paths: Vec<PathBuf>,
    again: impl Fn() -> Result<(), String> + Send + Sync + 'static,
) -> JoinHandle<()> {
    // Files may be far away: not on a thread that others wait for.
    let look = Arc::new(move |before: Vec<Stamp>| {
        // Before they are read: what changes meanwhile is seen the next time.
        let now: Vec<_> = paths.iter().map(stamp).collect();
        if before != now {
            match again() {
                Ok(()) => tracing::info!(what, "read again"),
                Err(why) => {
                    tracing::error!(
                        what,
                        why,
                        "cannot be read again; what was read before holds"
                    );
                }
            }
        }
        now
    });
    tokio::spawn(async move {
        // What was read at the start may have changed since: the first look reads again too.
        let mut seen = Vec::new();
        loop {
            let (look, before) = (Arc::clone(&look), seen.clone());
            if let Ok(now) = tokio::task::spawn_blocking(move || look(before)).await {
                seen = now;
            }
            tokio::time::sleep(PAUSE).await;
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    async fn until(count: &AtomicU32, least: u32) {
        while count.load(Ordering::SeqCst) < least {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn a_file_that_changes_or_is_exchanged_is_read_again_also_after_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, "1").unwrap();
        let count = Arc::new(AtomicU32::new(0));
        let again = {
            let count = Arc::clone(&count);
            move || {
                count.fetch_add(1, Ordering::SeqCst);
                Err("no".to_owned())
            }
        };
        let task = follow("a file", vec![path.clone()], again);
        until(&count, 1).await;
        std::fs::write(&path, "22").unwrap();
        until(&count, 2).await;
        let other = dir.path().join("b");
        std::fs::write(&other, "33").unwrap();
        std::fs::rename(&other, &path).unwrap();
        until(&count, 3).await;
        std::fs::remove_file(&path).unwrap();
        until(&count, 4).await;
        task.abort();
    }
}
