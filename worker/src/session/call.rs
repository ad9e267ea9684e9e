//! A call of a plan as it arrives, and its answer.

use std::{
    collections::HashSet,
    sync::{Arc, atomic::AtomicBool},
};

use bytes::Bytes;
use hotcell_proto::{
    error::{Error, Reason},
    ids::Epoch,
    limits,
    session::HandleId,
    v1,
};

use super::invalid;

/// What an input gets.
#[derive(Debug)]
pub enum Operand {
    /// A tensor or cache.
    Tensor(HandleId),
    /// These bytes.
    Data(Bytes),
}

/// What becomes of a result.
#[derive(Debug)]
pub enum Wish {
    /// It is kept, under this id or a new one.
    Keep(Option<HandleId>),
    /// Its bytes are in the answer.
    Inline,
    /// It overwrites this tensor.
    Into(HandleId),
    /// Nothing.
    Drop,
}

/// A call.
#[derive(Debug)]
pub struct CallRequest {
    /// What to execute.
    pub plan: HandleId,
    /// Rows.
    pub rows: usize,
    /// One per input.
    pub inputs: Vec<Operand>,
    /// One per output, or fewer.
    pub outputs: Vec<Wish>,
    /// Its queue.
    pub stream: u32,
    /// Points of other streams that come first.
    pub wait: Vec<(u32, u64)>,
    /// Whether it is answered when it is queued.
    pub detached: bool,
}

fn at_most(what: &str, count: usize, limit: usize) -> Result<(), Error> {
    if count > limit {
        let message = format!("the call has {count} {what}, {limit} are allowed");
        return Err(Error::new(Reason::LimitExceeded, message).with("limit", limit));
    }
    Ok(())
}

impl CallRequest {
    /// Reads and checks what can be checked without the session.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`], [`Reason::LimitExceeded`] or [`Reason::HandleStale`].
    pub fn read(request: v1::ExecuteRequest, epoch: Epoch) -> Result<Self, Error> {
        at_most("inputs", request.inputs.len(), limits::MAX_CALL_HANDLES)?;
        at_most("outputs", request.outputs.len(), limits::MAX_CALL_HANDLES)?;
        at_most("fences", request.wait.len(), limits::MAX_CALL_FENCES)?;
        let plan = HandleId::of(request.plan.as_ref(), epoch)?;
        let rows = usize::try_from(request.rows).map_err(|_| invalid("too many rows"))?;
        let mut inline = 0usize;
        let inputs = request
            .inputs
            .into_iter()
            .map(|operand| match operand.kind {
                Some(v1::operand::Kind::Tensor(h)) => {
                    Ok(Operand::Tensor(HandleId::of(Some(&h), epoch)?))
                }
                Some(v1::operand::Kind::Data(data)) => {
                    inline = inline.saturating_add(data.len());
                    Ok(Operand::Data(data))
                }
                None => Err(invalid("an input is neither a tensor nor bytes")),
            });
        let inputs = inputs.collect::<Result<Vec<_>, Error>>()?;
        at_most("inline bytes", inline, limits::MAX_INLINE_BYTES)?;
        let mut taken = HashSet::new();
        let mut once = |id: HandleId| match taken.insert(id) {
            true => Ok(id),
            false => Err(invalid("two outputs go to the same id")),
        };
        let outputs = request.outputs.into_iter().map(|wish| {
            Ok(match wish.kind {
                Some(v1::output_wish::Kind::Id(id)) if !id.is_empty() => {
                    Wish::Keep(Some(once(HandleId::from_wire(&id)?)?))
                }
                Some(v1::output_wish::Kind::Inline(true)) if request.detached => {
                    return Err(invalid("a detached call cannot send results in its answer"));
                }
                Some(v1::output_wish::Kind::Inline(true)) => Wish::Inline,
                Some(v1::output_wish::Kind::Into(h)) => {
                    Wish::Into(once(HandleId::of(Some(&h), epoch)?)?)
                }
                Some(v1::output_wish::Kind::Drop(true)) => Wish::Drop,
                _ => Wish::Keep(None),
            })
        });
        let outputs = outputs.collect::<Result<Vec<_>, Error>>()?;
        Ok(Self {
            plan,
            rows,
            inputs,
            outputs,
            stream: request.stream,
            wait: request.wait.iter().map(|f| (f.stream, f.value)).collect(),
            detached: request.detached,
        })
    }
}

/// What a call gave.
#[derive(Debug)]
pub struct Answer {
    /// One per output, dropped ones as an empty one.
    pub outputs: Vec<v1::Output>,
    /// The call's place in its stream.
    pub fence: v1::Fence,
    /// Nanoseconds on the device.
    pub compute_ns: u64,
}

/// Gets a call's answer; called on the engine's thread. Returns whether there was somebody to get it.
pub type Reply = Box<dyn FnOnce(Result<Answer, Error>) -> bool + Send>;

/// A call, who hears of it, and whether it is still wanted.
pub struct Submitted {
    /// The call.
    pub request: CallRequest,
    /// Who hears of it.
    pub reply: Option<Reply>,
    /// Set when nobody wants it any more.
    pub cancelled: Arc<AtomicBool>,
}
