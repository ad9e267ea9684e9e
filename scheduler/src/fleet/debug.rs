//! Looking into one worker for somebody: which one, over a connection that nobody else has, and what of its words is
//! passed on.

use std::{sync::Arc, time::Duration};

use hotcell_ipc::transport::Windows;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{
        BlackBox, CaptureEnd, CaptureHead, Captured, CapturedNode, CapturedPlan, GuardEvent,
        GuardHit, HeldHandle, MemoryMap, NodeShare, SessionMemory, TraceHead, TracePiece,
        WatchSample, WatchedRequest, captured::Kind, debug_client::DebugClient, guard_event,
        trace_piece,
    },
};
use tokio::time::timeout;
use tonic::{Status, transport::Channel};

use super::{
    Fleet, Link,
    caches::{believe as believe_caches, believe_memory},
    is_broken,
    slot::resident,
    words,
};
use crate::{
    audit::{Audit, Entry, Who},
    discover::clip,
};

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(5);

/// Requests that one worker tells of, at most.
const REQUESTS: usize = 2 * limits::MAX_WORKER_REQUESTS;

/// A worker's words about what it does, within bounds; about itself the scheduler knows better.
pub fn believe(said: WatchSample, link: &Link) -> WatchSample {
    WatchSample {
        worker: link.worker.clone(),
        epoch: link.epoch,
        doing: clip(&said.doing),
        caches: believe_caches(said.caches),
        requests: (said.requests.into_iter().take(REQUESTS))
            .map(|request| WatchedRequest {
                request_id: clip(&request.request_id),
                model: clip(&request.model),
                ..request
            })
            .collect(),
        memory: believe_memory(said.memory),
        nodes: (said.nodes.into_iter().take(limits::MAX_WATCHED_NODES))
            .map(|node| NodeShare {
                op: clip(&node.op),
                name: clip(&node.name),
                part: clip(&node.part),
                ..node
            })
            .collect(),
        tensors: said.tensors.map(|mut census| {
            census.holders.truncate(limits::MAX_TOLD_SESSIONS);
            census
        }),
        ..said
    }
}

fn believe_node(node: CapturedNode) -> CapturedNode {
    CapturedNode {
        name: clip(&node.name),
        op: clip(&node.op),
        weight: clip(&node.weight),
        dtype: clip(&node.dtype),
        dims: node.dims.into_iter().take(limits::MAX_RANK).collect(),
        ..node
    }
}

fn believe_nodes(nodes: Vec<CapturedNode>) -> Vec<CapturedNode> {
    let nodes = nodes.into_iter().take(limits::MAX_GRAPH_NODES);
    nodes.map(believe_node).collect()
}

fn believe_hit(hit: GuardHit, link: &Link) -> GuardHit {
    GuardHit {
        worker: link.worker.clone(),
        epoch: link.epoch,
        model: clip(&hit.model),
        request_id: clip(&hit.request_id),
        node: hit.node.map(believe_node),
        ..hit
    }
}

/// A worker's words about what it computed, within bounds. Rows are the caller's to check against the nodes.
pub fn believe_captured(said: Captured, link: &Link) -> Captured {
    let kind = said.kind.and_then(|kind| {
        Some(match kind {
            // Only the scheduler holds one, and reads its black box.
            Kind::Held(_) | Kind::Seen(_) => return None,
            Kind::Plan(plan) => Kind::Plan(CapturedPlan {
                steps: believe_nodes(plan.steps),
                logits_steps: believe_nodes(plan.logits_steps),
                looked_steps: believe_nodes(plan.looked_steps),
                looked_logits_steps: believe_nodes(plan.looked_logits_steps),
            }),
            Kind::Hit(hit) => Kind::Hit(believe_hit(hit, link)),
            Kind::Head(head) => Kind::Head(CaptureHead {
                worker: link.worker.clone(),
                epoch: link.epoch,
                model: clip(&head.model),
                version: clip(&head.version),
                nodes: believe_nodes(head.nodes),
                ..head
            }),
            Kind::End(end) => Kind::End(CaptureEnd {
                failed: clip(&end.failed),
                ..end
            }),
            told => told,
        })
    });
    Captured { kind }
}

/// A worker's words about a watchpoint, within bounds.
pub fn believe_guarded(said: GuardEvent, link: &Link) -> GuardEvent {
    let kind = said.kind.map(|kind| match kind {
        guard_event::Kind::Hit(hit) => guard_event::Kind::Hit(believe_hit(hit, link)),
        told => told,
    });
    GuardEvent { kind }
}

/// A worker's words about when it did what, within bounds.
pub fn believe_traced(said: TracePiece, link: &Link) -> TracePiece {
    use trace_piece::Kind;
    let kind = said.kind.map(|kind| match kind {
        Kind::Head(head) => Kind::Head(TraceHead {
            worker: link.worker.clone(),
            epoch: link.epoch,
            ..head
        }),
        Kind::Spans(mut some) => {
            for span in &mut some.spans {
                (span.name, span.node) = (clip(&span.name), clip(&span.node));
                // Whose request it is in which trace the scheduler knows.
                span.trace_id.clear();
            }
            some.counts
                .iter_mut()
                .for_each(|count| count.name = clip(&count.name));
            Kind::Spans(some)
        }
        told => told,
    });
    TracePiece { kind }
}

/// A worker's words about its memory, within bounds.
pub fn believe_memory_map(said: MemoryMap, link: &Link) -> MemoryMap {
    let session = |session: SessionMemory| SessionMemory {
        handles: (session.handles.into_iter().take(limits::MAX_TOLD_HANDLES))
            .map(|handle| HeldHandle {
                kind: clip(&handle.kind),
                what: clip(&handle.what),
                ..handle
            })
            .collect(),
        ..session
    };
    MemoryMap {
        worker: link.worker.clone(),
        epoch: link.epoch,
        uses: believe_memory(said.uses),
        caches: believe_caches(said.caches),
        sessions: (said.sessions.into_iter().take(limits::MAX_TOLD_SESSIONS))
            .map(session)
            .collect(),
        ..said
    }
}

impl Link {
    /// A connection of its own for one who looks into it, so that one who does not read holds up nobody else.
    ///
    /// # Errors
    /// As [`Link::connect_debug`].
    pub async fn debug(&self) -> Result<DebugClient<Channel>, Error> {
        let lost = |why: String| {
            let what = format!("worker {} cannot be looked into: {why}", self.worker);
            Error::new(Reason::WorkerLost, what)
        };
        let connect = async {
            let wire = self.connect_debug().await?;
            let channel = wire.channel(Windows::default()).await;
            channel.map_err(|e| lost(e.to_string()))
        };
        let channel = timeout(CONNECT, connect).await;
        let channel = channel.map_err(|_| lost(format!("no answer for {CONNECT:?}")))??;
        Ok(DebugClient::new(channel)
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES))
    }

    /// What a status of a call to it is to its caller.
    pub async fn said(&self, status: &Status) -> Error {
        if !is_broken(status) {
            return words(status);
        }
        let what = match self.is_lost().await {
            true => "died; `hotcell crashes list` shows of what",
            false => "ended the connection; try again",
        };
        Error::new(Reason::WorkerLost, format!("worker {} {what}", self.worker))
            .with("worker", &self.worker)
            .with("epoch", self.epoch)
    }
}

impl Link {
    /// Where its process is, or was at last, as that writes down itself.
    pub fn seen(&self) -> Option<BlackBox> {
        let seen = self.blackbox()?.snapshot().ok()?;
        Some(crate::crash::read(seen))
    }
}

impl Fleet {
    /// The worker of this name, if it serves; without a name, the only one.
    ///
    /// # Errors
    /// [`Reason::NoWorker`], [`Reason::InvalidArgument`] naming those that there are.
    pub fn for_debug(&self, worker: &str) -> Result<Arc<Link>, Error> {
        let table = self.table();
        let mut names = table.workers.keys();
        let id = match (worker, names.next(), names.next()) {
            ("", Some(only), None) => only.clone(),
            ("", Some(_), Some(_)) => {
                let names: Vec<&str> = table.workers.keys().map(String::as_str).collect();
                let what = format!("which worker? There are {}", names.join(", "));
                return Err(Error::new(Reason::InvalidArgument, what));
            }
            (named, ..) => named.to_owned(),
        };
        let slot = table.workers.get(&id).ok_or_else(|| {
            let what = format!(
                "there is no worker {:?}; `hotcell ps` lists them",
                clip(&id)
            );
            Error::new(Reason::NoWorker, what)
        })?;
        let link = slot.serving().ok_or_else(|| {
            let what = format!("worker {id} is not ready; `hotcell ps` shows why");
            Error::new(Reason::NoWorker, what)
        })?;
        Ok(Arc::clone(link))
    }

    /// Bytes of a worker's process in memory; 0 if it has none.
    pub fn resident_bytes(&self, worker: &str) -> u64 {
        let pid = self.table().workers.get(worker).map_or(0, |slot| slot.pid);
        match pid {
            0 => 0,
            pid => resident(pid),
        }
    }

    /// The audit log.
    pub fn audit(&self) -> &Audit {
        &self.gate.audit
    }

    /// Notes in the audit log that somebody looks into a worker.
    pub fn audit_debug(&self, who: &Who, call: &str, worker: &str, detail: String) {
        self.gate.audit.note(Entry {
            event: "debug",
            who: Some(who),
            worker,
            outcome: call,
            detail,
            ..Entry::default()
        });
    }
}
