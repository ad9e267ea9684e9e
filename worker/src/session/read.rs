//! Reading a tensor, once what is queued to write it is done.

use std::{ops::Range, rc::Rc, sync::Arc, sync::atomic::AtomicBool};

use bytes::Bytes;
use hotcell_graph::op::ValueSpec;
use hotcell_proto::{error::Error, session::HandleId, v1};
use tokio::sync::oneshot;

use super::{
    invalid,
    memory::Pool,
    state::Session,
    value::{State, Waiter, cache_in_use, not_ready, wire_state},
};

/// What a download reads.
pub struct Readable {
    /// The tensor.
    pub info: v1::TensorInfo,
    /// The bytes that were asked for.
    pub bytes: Bytes,
    /// Set when the session is over.
    pub over: Arc<AtomicBool>,
}

/// Gets what a download reads.
pub type ReadReply = oneshot::Sender<Result<Readable, Error>>;

/// Somebody who waits for bytes.
struct Reader {
    reply: ReadReply,
    pool: Rc<Pool>,
    info: v1::TensorInfo,
    range: Range<usize>,
    /// Work changes a cache in place, so readers get a copy, made between two pieces of work.
    is_cache: bool,
    over: Arc<AtomicBool>,
}

impl Waiter for Reader {
    fn has_left(&self) -> bool {
        self.reply.is_closed()
    }

    fn settled(self: Box<Self>, state: &State) {
        // A copy for nobody costs as much as one for somebody.
        if self.has_left() {
            return;
        }
        let Self {
            reply,
            pool,
            info,
            range,
            is_cache,
            over,
        } = *self;
        let bytes = match state {
            State::Ready(storage) if is_cache => storage.read_copy(&pool, range),
            State::Ready(storage) => storage.read(&pool, range),
            state => Err(not_ready(state)),
        };
        let readable = bytes.map(|bytes| Readable {
            info: v1::TensorInfo {
                state: wire_state(state).into(),
                ..info
            },
            bytes,
            over,
        });
        let _ = reply.send(readable);
    }
}

impl Session {
    /// Waits for what is queued to write the tensor, and then lets `done` know.
    ///
    /// # Errors
    /// When there is no such tensor, or too many wait.
    pub fn when_settled(&self, id: HandleId, done: oneshot::Sender<()>) -> Result<(), Error> {
        self.tensor(id)?.value.when_settled(Box::new(done))
    }

    /// Gives part of a tensor's bytes to `reply` once they are there. `length` 0: to the end.
    ///
    /// # Errors
    /// When there is no such tensor, the range is outside of it, or too many wait.
    pub fn read(
        &self,
        id: HandleId,
        offset: u64,
        length: u64,
        reply: ReadReply,
    ) -> Result<(), Error> {
        let tensor = self.tensor(id)?;
        let is_cache = matches!(tensor.spec, ValueSpec::Cache(_));
        if is_cache && Rc::strong_count(&tensor.value) > 1 {
            return Err(cache_in_use());
        }
        let total = tensor.bytes as u64;
        let end = match length {
            0 => Some(total),
            length => offset.checked_add(length),
        };
        let end = end.filter(|&end| offset <= end && end <= total);
        let Some(range) = end.map(|end| offset as usize..end as usize) else {
            let what = format!("{length} bytes at {offset} are outside of a tensor of {total}");
            return Err(invalid(what));
        };
        tensor.value.when_settled(Box::new(Reader {
            reply,
            pool: Rc::clone(&self.pool),
            info: tensor.info(id, self.epoch),
            range,
            is_cache,
            over: Arc::clone(&self.over),
        }))
    }
}
