//! What a worker may use up of what is counted for it: the limits that bind nobody else.

use hotcell_proto::limits::MAX_WORKER_THREADS;
use rustix::{
    fs::FileType,
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

use super::report::{Lack, Layer};

/// What it needs nothing of: queues of messages, locked memory, a place before others; core dumps, of which a limit of 1
/// also means none for a program that collects them.
const NONE: [(Resource, u64); 4] = [
    (Resource::Core, 1),
    (Resource::Msgqueue, 0),
    (Resource::Memlock, 0),
    (Resource::Rtprio, 0),
];

/// Sets the limits. The number of threads is one only where no other process of this user is counted with them.
pub(super) fn set(counted_apart: bool) -> Result<String, Lack> {
    for (resource, most) in NONE {
        lower(resource, most)?;
    }
    let mut detail = "no core dumps, queues or locked memory".to_owned();
    // A log may be a file when somebody starts it by hand.
    if !writes_files() {
        lower(Resource::Fsize, 0)?;
        detail.push_str(", no bytes in files");
    }
    if counted_apart {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
        let threads = MAX_WORKER_THREADS.saturating_add(cores);
        lower(Resource::Nproc, threads)?;
        detail.push_str(&format!(", at most {threads} threads"));
    }
    Ok(detail)
}

fn lower(resource: Resource, most: u64) -> Result<(), Lack> {
    let most = getrlimit(resource)
        .maximum
        .map_or(most, |now| now.min(most));
    let limit = Rlimit {
        current: Some(most),
        maximum: Some(most),
    };
    Ok(setrlimit(resource, limit)?)
}

/// Whether its output or its log goes to a file.
fn writes_files() -> bool {
    let is_file = |stat: rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode).is_file();
    [
        rustix::fs::fstat(std::io::stdout()),
        rustix::fs::fstat(std::io::stderr()),
    ]
    .into_iter()
    .any(|stat| stat.is_ok_and(is_file))
}

/// Whether the memory that it may take is bounded by a control group of its own: the layer `memory group`.
pub(super) fn memory_group() -> Layer {
    const NAME: &str = "memory group";
    match hotcell_ipc::group::own() {
        Some(own) => {
            let limit = own.limit.map(|bytes| format!("{} MiB", bytes >> 20));
            let limit = limit.ok_or_else(|| Lack::new("its group has no limit"));
            Layer::new(NAME, limit)
        }
        None => Layer::not_needed(NAME, "no control group is delegated to who started it"),
    }
}
