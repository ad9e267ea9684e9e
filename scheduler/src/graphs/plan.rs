//! A saved graph on one worker: planned, with its constants there.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use hotcell_proto::{
    error::{Error, Reason},
    v1::{
        self, CompileRequest, CreateRequest, ExecuteRequest, Handle, Operand, OutputWish,
        SaveGraphHead, TensorSpec, UploadChunk, UploadTarget, create_request, graph_input, operand,
        output_wish, upload_target,
    },
};
use tokio::time::Instant;
use tokio_stream::iter;

use super::{
    Call, Done,
    in_place::{InPlace, Taken},
    lane::{Lanes, Sink, Source},
    saved::{Found, Input, Saved},
    session::Session,
};
use crate::{fleet::Link, service::Shared};

/// A saved graph on one worker.
pub(super) struct Plan {
    session: Arc<Session>,
    saved: Arc<Saved>,
    plan: Handle,
    /// For each of the graph's inputs that is a constant.
    constants: Vec<Option<Handle>>,
    lanes: Lanes,
    /// Clients' memory that the worker has mapped for it.
    in_place: InPlace,
    /// Calls under way.
    running: AtomicU64,
    /// When the last one ended.
    last: Mutex<Instant>,
    /// Whether somebody looks what becomes of the worker under a call whose client left.
    left: AtomicBool,
}

fn odd(what: &str) -> Error {
    let what = format!("a worker's answer has {what}");
    Error::new(Reason::ProtocolViolation, what)
}

/// A spec with one row in place of its symbol.
fn one_row(spec: &TensorSpec) -> TensorSpec {
    let fixed = |dim: &v1::Dim| match dim.kind {
        Some(v1::dim::Kind::Fixed(_)) => *dim,
        _ => v1::Dim {
            kind: Some(v1::dim::Kind::Fixed(1)),
        },
    };
    TensorSpec {
        dtype: spec.dtype.clone(),
        dims: spec.dims.iter().map(fixed).collect(),
    }
}

/// Has a worker look at a graph: whether it makes sense, and what goes in and comes out.
///
/// # Errors
/// The worker's words.
pub(super) async fn examine(
    shared: &Shared,
    link: Arc<Link>,
    head: &SaveGraphHead,
) -> Result<Found, Error> {
    let session = Session::open(shared, link, "", true).await?;
    let (mut client, request) = session.call(CompileRequest {
        encoded: head.graph.clone(),
        dry_run: true,
        ..CompileRequest::default()
    });
    let compiled = session.said(client.compile(request).await)?;
    let size = async |spec: &TensorSpec| {
        let (mut client, request) = session.call(CreateRequest {
            spec: Some(create_request::Spec::Tensor(one_row(spec))),
            id: Vec::new(),
        });
        let made = session.said(client.create(request).await)?;
        // Sizes are asked for one after the other, and a session has room for so many.
        if let Some(handle) = made.handle {
            let handles = vec![handle];
            let (mut client, request) = session.call(v1::FreeRequest { handles });
            session.said(client.free(request).await)?;
        }
        Ok::<u64, Error>(made.bytes)
    };
    let mut found = Found::default();
    let all = compiled.inputs.len().saturating_add(compiled.outputs.len());
    if all > super::saved::MAX_VALUES {
        let limit = super::saved::MAX_VALUES;
        let what = format!("{all} inputs and outputs are more than the limit of {limit}");
        return Err(Error::new(Reason::LimitExceeded, what).with("limit", limit));
    }
    for input in &compiled.inputs {
        // Others are refused with their names.
        found.inputs.push(match &input.spec {
            Some(graph_input::Spec::Tensor(spec)) => size(spec).await?,
            _ => 0,
        });
    }
    for spec in &compiled.outputs {
        found.outputs.push(size(spec).await?);
    }
    found.compiled = v1::CompileResponse {
        plan: None,
        memory: None,
        ..compiled
    };
    Ok(found)
}

async fn upload(
    session: &Session,
    saved: &Arc<Saved>,
    (spec, at, bytes): (&TensorSpec, u64, u64),
) -> Result<Handle, Error> {
    let target = UploadTarget {
        kind: Some(upload_target::Kind::Create(spec.clone())),
        ..UploadTarget::default()
    };
    let first = UploadChunk {
        target: Some(target),
        ..UploadChunk::default()
    };
    let (whose, failed) = (Arc::clone(saved), Arc::new(Mutex::new(None)));
    let (pieces, note) = (saved.offsets(at, bytes), Arc::clone(&failed));
    let rest = pieces.map_while(move |(at, bytes)| match whose.read(at, bytes) {
        Ok(data) => Some(UploadChunk {
            data: data.into(),
            target: None,
        }),
        Err(error) => {
            *note.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            None
        }
    });
    let (mut client, request) = session.call(iter(std::iter::once(first).chain(rest)));
    let said = session.said(client.upload(request).await);
    if let Some(error) = failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
        return Err(error);
    }
    let handle = said?.tensor.and_then(|tensor| tensor.handle);
    handle.ok_or_else(|| odd("no name for what was uploaded"))
}

impl Plan {
    /// Plans a graph on a worker and sends its constants there.
    ///
    /// # Errors
    /// The worker's words.
    pub(super) async fn make(
        shared: &Shared,
        saved: &Arc<Saved>,
        link: Arc<Link>,
    ) -> Result<Self, Error> {
        let session = Session::open(shared, link, &saved.tenant, false).await?;
        let (mut client, request) = session.call(CompileRequest {
            encoded: saved.graph()?,
            ..CompileRequest::default()
        });
        let compiled = session.said(client.compile(request).await)?;
        let plan = compiled.plan.ok_or_else(|| odd("no plan"))?;
        let mut constants = Vec::with_capacity(saved.all.len());
        for input in &saved.all {
            constants.push(match input {
                Input::Call(_) => None,
                Input::Constant { spec, at, bytes } => {
                    Some(upload(&session, saved, (spec, *at, *bytes)).await?)
                }
            });
        }
        let session = Arc::new(session);
        Ok(Self {
            lanes: Lanes::new(&session, saved),
            in_place: InPlace::new(&session),
            session,
            saved: Arc::clone(saved),
            plan,
            constants,
            running: AtomicU64::new(0),
            last: Mutex::new(Instant::now()),
            left: AtomicBool::new(false),
        })
    }

    /// Calls under way.
    pub(super) fn running(&self) -> u64 {
        self.running.load(Ordering::Relaxed)
    }

    /// The worker and the graph.
    pub(super) fn of(&self) -> (&Arc<Link>, &Arc<Saved>) {
        (&self.session.link, &self.saved)
    }

    /// A client left its call. Whether somebody has to look what becomes of the worker, which nobody does yet.
    pub(super) fn is_left(&self) -> bool {
        !self.left.swap(true, Ordering::Relaxed)
    }

    /// Nobody looks any more.
    pub(super) fn note_left(&self) {
        self.left.store(false, Ordering::Relaxed);
    }

    /// When nothing will have run for so long, if nothing begins until then.
    pub(super) fn idle_at(&self, patience: Duration) -> Instant {
        match self.running() {
            0 => *self.last.lock().unwrap_or_else(PoisonError::into_inner) + patience,
            _ => Instant::now() + patience,
        }
    }

    /// Computes it, with tensors copied to the worker and from it.
    ///
    /// # Errors
    /// The worker's words, and why inputs cannot be read or outputs be written.
    pub(super) async fn run_copied(&self, call: &Call) -> Result<Done, Error> {
        self.run_with(call, Taken::default()).await
    }

    /// Computes it, in clients' memory where that may be.
    ///
    /// # Errors
    /// As [`run_copied`](Self::run_copied), and [`Reason::RegionChanged`].
    pub(super) async fn run(&self, call: &Call) -> Result<Done, Error> {
        let taken = self.in_place.take(&self.saved, call).await?;
        self.run_with(call, taken).await
    }

    async fn run_with(&self, call: &Call, mut in_place: Taken) -> Result<Done, Error> {
        self.running.fetch_add(1, Ordering::Relaxed);
        let _running = Running(self);
        in_place.look()?;
        let done = self.compute(call, &in_place).await;
        let changed = |e: &Error| e.reason() == Reason::RegionChanged;
        // What was computed of memory that went away meanwhile is nothing.
        let done = done.and_then(|done| in_place.look().map(|()| done));
        if done.as_ref().is_err_and(changed) {
            in_place.forget();
        }
        done
    }

    async fn compute(&self, call: &Call, in_place: &Taken) -> Result<Done, Error> {
        let mut lane = self.lanes.take(call, in_place).await?;
        lane.fill(&call.inputs).await?;
        let operand = |kind| Operand { kind: Some(kind) };
        let count = self.saved.inputs.len();
        let mut inputs = Vec::with_capacity(self.constants.len());
        for (input, constant) in self.saved.all.iter().zip(&self.constants) {
            inputs.push(operand(match (input, constant) {
                (Input::Constant { .. }, Some(handle)) => operand::Kind::Tensor(handle.clone()),
                (Input::Call(index), _) => match (
                    in_place.handle(*index).or_else(|| lane.input(*index)),
                    call.inputs.get(*index),
                ) {
                    (Some(handle), _) => operand::Kind::Tensor(handle),
                    (None, Some(Source::Bytes(bytes))) => operand::Kind::Data(bytes.clone()),
                    // Of nothing at all there is no place.
                    (None, Some(Source::Elsewhere(spot, _))) if spot.bytes == 0 => {
                        operand::Kind::Data(Bytes::new())
                    }
                    (None, _) => return Err(odd("no place for an input")),
                },
                (Input::Constant { .. }, None) => return Err(odd("no name for a constant")),
            }));
        }
        let wish = |(index, sink): (usize, &Sink)| OutputWish {
            kind: Some(
                match (
                    in_place
                        .handle(count + index)
                        .or_else(|| lane.output(index)),
                    sink,
                ) {
                    (_, Sink::Nothing) => output_wish::Kind::Drop(true),
                    (Some(handle), _) => output_wish::Kind::Into(handle),
                    (None, _) => output_wish::Kind::Inline(true),
                },
            ),
        };
        let outputs = call.outputs.iter().enumerate().map(wish).collect();
        let (mut client, request) = self.session.call(ExecuteRequest {
            plan: Some(self.plan.clone()),
            rows: call.rows,
            inputs,
            outputs,
            // Calls in lanes of their own do not wait for each other.
            stream: lane.stream(),
            ..ExecuteRequest::default()
        });
        let done = self.session.said(client.execute(request).await)?;
        if done.outputs.len() != self.saved.outputs.len() {
            return Err(odd("other outputs than the graph"));
        }
        let mut outputs = Vec::with_capacity(done.outputs.len());
        for (index, (said, sink)) in done.outputs.into_iter().zip(&call.outputs).enumerate() {
            let bytes = self.saved.outputs[index].bytes(call.rows);
            outputs.push(match (said.kind, lane.output(index), sink) {
                (_, _, Sink::Nothing) => Bytes::new(),
                _ if in_place.handle(count + index).is_some() => Bytes::new(),
                (_, Some(_), _) => lane.empty(index, sink).await?,
                (Some(v1::output::Kind::Data(data)), None, _)
                    if Some(data.len() as u64) == bytes =>
                {
                    data
                }
                _ => return Err(odd("an output of another size, or none")),
            });
        }
        lane.give_back();
        Ok(Done {
            outputs,
            compute: Duration::from_nanos(done.compute_ns),
        })
    }
}

/// A call under way.
struct Running<'a>(&'a Plan);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        *self.0.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}
