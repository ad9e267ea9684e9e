//! The ways from one session to another.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use hotcell_graph::TensorSpec;
use hotcell_ipc::handoff::Ask;
use hotcell_proto::error::Error;

use super::super::{
    array::{State, Tensor, invalid},
    connection::{Connection, Remote, locked},
    session::Session,
    shared::import,
};

/// Lanes between two sessions that nobody uses now are kept, so many in all.
const IDLE: usize = 128;

/// The tensor in another session: itself if it is there, else a copy, by way of this process.
///
/// # Errors
/// When it cannot be downloaded or uploaded, has no value, or is a cache.
pub(in super::super) async fn carried(tensor: &Tensor, session: &Session) -> Result<Tensor, Error> {
    if tensor.0.session.as_ref().is_none_or(|s| s.is_same(session)) {
        return Ok(tensor.clone());
    }
    match tensor.state() {
        State::Host { data, .. } => Ok(Tensor::host(Some(session.clone()), data, false)),
        State::Remote(_) if tensor.0.cache.is_some() => {
            Err(invalid("a cache cannot go to another device"))
        }
        State::Remote(remote) => {
            let from = tensor.session()?;
            let data = from.download(&remote, tensor.spec()?).await?;
            session.upload(&data).await
        }
        _ => Err(invalid("only what has a value goes to another device")),
    }
}

/// Which way, and what: the names of the sessions that write and read, and what lies in the memory.
type Way = (String, String, TensorSpec);

/// Memory that is shared by two workers, by the way it goes.
#[derive(Default)]
pub(super) struct Lanes(Arc<Mutex<HashMap<Way, Vec<Ends>>>>);

/// The two ends of a lane: handles of each session on the same memory.
struct Ends {
    written: Arc<Remote>,
    read: Arc<Remote>,
}

/// A lane in use.
pub(super) struct Lane {
    way: Way,
    ends: Ends,
    lanes: Arc<Mutex<HashMap<Way, Vec<Ends>>>>,
}

impl Lanes {
    /// A lane from one session to another, if there can be one: both have a scheduler's socket on this host, and neither
    /// recovers, for which the bytes would have to be in this process.
    pub async fn take(&self, from: &Session, to: &Session, spec: &TensorSpec) -> Option<Lane> {
        if from.recovering().is_some() || to.recovering().is_some() || spec.bytes(0)? == 0 {
            return None;
        }
        let way = (from.name(), to.name(), spec.clone());
        let idle = locked(&self.0).get_mut(&way).and_then(Vec::pop);
        let ends = match idle {
            Some(ends) => ends,
            // Whatever is wrong with it: there is the other way, which says it if it is wrong there too.
            None => make(&from.connection(), &to.connection(), spec)
                .await
                .ok()?,
        };
        Some(Lane {
            way,
            ends,
            lanes: Arc::clone(&self.0),
        })
    }
}

/// Has the scheduler make memory for the workers of two sessions.
async fn make(from: &Connection, to: &Connection, spec: &TensorSpec) -> Result<Ends, Error> {
    let bytes = spec.bytes(0).unwrap_or(0).max(1) as u64;
    let ask = Ask::Lane {
        sessions: [from.opened.session.clone(), to.opened.session.clone()],
        bytes,
    };
    let given = from.hand_out(&ask).await?;
    let (written, _) = import(from, given.tag, spec).await?;
    let (read, _) = import(to, given.also, spec).await?;
    Ok(Ends { written, read })
}

impl Lane {
    /// Where the one session writes.
    pub fn written(&self) -> Arc<Remote> {
        Arc::clone(&self.ends.written)
    }

    /// Where the other one reads.
    pub fn read(&self) -> Arc<Remote> {
        Arc::clone(&self.ends.read)
    }

    /// It may be used again: nobody will write or read it any more.
    pub fn give_back(self) {
        let mut lanes = locked(&self.lanes);
        if lanes.values().map(Vec::len).sum::<usize>() >= IDLE {
            lanes.clear();
        }
        lanes.entry(self.way).or_default().push(self.ends);
    }
}
