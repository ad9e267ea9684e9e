//! A value: bytes that are written once, by an upload or by queued work, and then only read.

use std::{
    cell::{Cell, Ref, RefCell},
    rc::Rc,
    sync::Arc,
};

use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};
use tokio::sync::oneshot;

use super::{memory::Storage, quota, upload::Upload};

/// How far a value is.
pub enum State {
    /// It has its bytes.
    Ready(Storage),
    /// Queued work will write it.
    Pending,
    /// Its bytes are arriving.
    Uploading(Arc<Upload>),
    /// What should have written it failed so.
    Failed(Error),
}

/// Told when a value is settled.
pub trait Waiter {
    /// Whether nobody waits for it any more.
    fn has_left(&self) -> bool;
    /// The value is in this state, its last.
    fn settled(self: Box<Self>, state: &State);
}

impl Waiter for oneshot::Sender<()> {
    fn has_left(&self) -> bool {
        self.is_closed()
    }

    fn settled(self: Box<Self>, _: &State) {
        // Whoever waited may have left.
        let _ = self.send(());
    }
}

/// A value. Handles and queued work share it.
pub struct Value {
    state: RefCell<State>,
    waiters: RefCell<Vec<Box<dyn Waiter>>>,
    /// A cache that running work uses: it changes in place.
    pub busy: Cell<bool>,
}

impl Value {
    /// A value in this state.
    pub fn new(state: State) -> Rc<Self> {
        Rc::new(Self {
            state: RefCell::new(state),
            waiters: RefCell::default(),
            busy: Cell::new(false),
        })
    }

    /// Its state, while nobody changes it.
    pub fn state(&self) -> Ref<'_, State> {
        self.state.borrow()
    }

    /// Whether nothing queued will change it any more.
    pub fn is_settled(&self) -> bool {
        !matches!(*self.state(), State::Pending)
    }

    /// Gives it its last state, and tells who waits.
    pub fn settle(&self, state: State) {
        *self.state.borrow_mut() = state;
        let waiters = std::mem::take(&mut *self.waiters.borrow_mut());
        let state = self.state();
        for waiter in waiters {
            waiter.settled(&state);
        }
    }

    /// Tells `waiter` once it is settled, now if it is.
    ///
    /// # Errors
    /// [`Reason::QuotaExceeded`] when too many wait.
    pub fn when_settled(&self, waiter: Box<dyn Waiter>) -> Result<(), Error> {
        if self.is_settled() {
            waiter.settled(&self.state());
            return Ok(());
        }
        let mut waiters = self.waiters.borrow_mut();
        waiters.retain(|w| !w.has_left());
        if waiters.len() >= limits::MAX_SESSION_CALLS {
            return Err(quota("calls waiting for one tensor", waiters.len()));
        }
        waiters.push(waiter);
        Ok(())
    }

    /// Takes the bytes out, if nobody else can see the value: of whoever replaces it.
    pub fn steal(self: &Rc<Self>) -> Option<Storage> {
        if Rc::strong_count(self) > 1 {
            return None;
        }
        let mut state = self.state.borrow_mut();
        match &*state {
            State::Ready(storage) if storage.is_free_to_write() => {}
            _ => return None,
        }
        match std::mem::replace(&mut *state, State::Pending) {
            State::Ready(storage) => Some(storage),
            _ => None,
        }
    }

    /// Does something with its bytes.
    ///
    /// # Errors
    /// [`Reason::TensorNotReady`] when it has none, and what `read` says.
    pub fn with<T>(&self, read: impl FnOnce(&Storage) -> Result<T, Error>) -> Result<T, Error> {
        match &*self.state() {
            State::Ready(storage) => read(storage),
            state => Err(not_ready(state)),
        }
    }
}

/// Why a value cannot be read.
pub fn not_ready(state: &State) -> Error {
    let error = |what: String| Error::new(Reason::TensorNotReady, what);
    match state {
        State::Uploading(upload) => {
            let (done, total) = (upload.uploaded(), upload.total());
            error(format!(
                "the tensor's upload is unfinished: {done} of {total} bytes have come; resume it first"
            ))
            .with("uploaded", done)
        }
        State::Failed(cause) => error(format!(
            "the work that should have written the tensor failed: {cause}"
        ))
        .with("cause", cause.reason().name()),
        State::Pending | State::Ready(_) => {
            error("queued work has yet to write the tensor".to_owned())
        }
    }
}

/// Why a cache cannot be read or written now.
pub fn cache_in_use() -> Error {
    let what = "queued work uses the cache; synchronize first";
    Error::new(Reason::TensorNotReady, what)
}

/// The state's name on the wire.
pub fn wire_state(state: &State) -> v1::TensorState {
    match state {
        State::Ready(_) => v1::TensorState::Ready,
        State::Pending => v1::TensorState::Pending,
        State::Uploading(_) => v1::TensorState::Uploading,
        State::Failed(_) => v1::TensorState::Failed,
    }
}
