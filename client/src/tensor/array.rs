//! The lazy value.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
};

use hotcell_graph::{
    CacheSpec, DType, Dim, GraphError, TensorSpec,
    op::{self, Attribute, OpRow, ValueSpec},
};
use hotcell_proto::error::{Error, Reason};

use super::{compile, connection::Remote, host::HostTensor, session::Session};

/// An invalid-argument error.
pub(super) fn invalid(what: impl Into<String>) -> Error {
    Error::new(Reason::InvalidArgument, what)
}

/// What a graph error is to a caller.
pub(super) fn of_graph(error: &GraphError) -> Error {
    Error::new(Reason::GraphInvalid, error.to_string())
}

/// A tensor of a session, known or yet to be computed. Clones are the same tensor.
#[derive(Clone)]
pub struct Tensor(pub(super) Arc<Inner>);

pub(super) struct Inner {
    /// The session it belongs to; scalars belong to any.
    pub session: Option<Session>,
    /// Dtype and shape; absent when the expression is wrong, and of a cache.
    pub spec: Option<TensorSpec>,
    /// It is what a [`super::Cache`] hides: nobody is given it as a tensor.
    pub cache: Option<CacheSpec>,
    /// What its owner calls it.
    name: OnceLock<Arc<str>>,
    state: Mutex<State>,
}

/// Where the value is.
#[derive(Clone)]
pub(super) enum State {
    /// Nowhere: the expression is wrong.
    Wrong(Error),
    /// In this process. Small constants written into an expression become part of its graph.
    Host { data: HostTensor, literal: bool },
    /// To be computed.
    Lazy { node: Arc<OpNode>, output: usize },
    /// On the worker.
    Remote(Arc<Remote>),
    /// An argument of a function that is being traced.
    Argument { trace: u64, index: usize },
}

/// An op applied to tensors.
pub(super) struct OpNode {
    pub row: &'static OpRow,
    /// `None`: an optional input that is not given.
    pub inputs: Vec<Option<Tensor>>,
    pub attributes: Vec<Attribute>,
    /// Of an op with an effect: its place among the others.
    pub turn: Option<Turn>,
}

/// When an effect takes place: in this step, after its earlier effects.
pub(super) struct Turn {
    pub step: u64,
    pub after: Option<Arc<OpNode>>,
}

impl Drop for OpNode {
    /// Without recursion: an expression may be a million nodes deep.
    fn drop(&mut self) {
        let mut tensors: Vec<Option<Tensor>> = std::mem::take(&mut self.inputs);
        let mut nodes: Vec<Arc<OpNode>> = Vec::new();
        nodes.extend(self.turn.take().and_then(|turn| turn.after));
        loop {
            if let Some(node) = nodes.pop() {
                if let Some(mut node) = Arc::into_inner(node) {
                    tensors.append(&mut node.inputs);
                    nodes.extend(node.turn.take().and_then(|turn| turn.after));
                }
                continue;
            }
            let Some(tensor) = tensors.pop() else {
                return;
            };
            let Some(inner) = tensor.and_then(|t| Arc::into_inner(t.0)) else {
                continue;
            };
            let state = inner.state.into_inner().unwrap_or_else(|e| e.into_inner());
            if let State::Lazy { node, .. } = state {
                nodes.push(node);
            }
        }
    }
}

impl Tensor {
    pub(super) fn new(session: Option<Session>, spec: Option<TensorSpec>, state: State) -> Self {
        Self(Arc::new(Inner {
            session,
            spec,
            cache: None,
            name: OnceLock::new(),
            state: Mutex::new(state),
        }))
    }

    /// What stands for a cache among an op's inputs.
    pub(super) fn cache(session: &Session, spec: CacheSpec, remote: Arc<Remote>) -> Self {
        Self(Arc::new(Inner {
            session: Some(session.clone()),
            spec: None,
            cache: Some(spec),
            name: OnceLock::new(),
            state: Mutex::new(State::Remote(remote)),
        }))
    }

    /// What an op's rule is told of it.
    fn value_spec(&self) -> Result<ValueSpec, Error> {
        match self.0.cache {
            Some(cache) => Ok(ValueSpec::Cache(cache)),
            None => Ok(ValueSpec::Tensor(self.spec()?.clone())),
        }
    }

    /// The expression that cannot be.
    pub(super) fn wrong(session: Option<Session>, error: Error) -> Self {
        Self::new(session, None, State::Wrong(error))
    }

    /// Elements of this process.
    pub(super) fn host(session: Option<Session>, data: HostTensor, literal: bool) -> Self {
        let spec = data.spec().clone();
        Self::new(session, Some(spec), State::Host { data, literal })
    }

    pub(super) fn state(&self) -> State {
        self.lock().clone()
    }

    pub(super) fn set(&self, state: State) {
        // Dropped outside of the lock: what it held may be long.
        let before = std::mem::replace(&mut *self.lock(), state);
        drop(before);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held: states are cloned or replaced whole.
        self.0.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Gives it a name, by which errors speak of it (see [`super::Recovery`]). The first one stays.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        let name = self.0.name.get_or_init(|| name.into());
        if let State::Remote(remote) = &*self.lock()
            && let Some(recipe) = remote.recipe()
        {
            recipe.set_name(Arc::clone(name));
        }
        self
    }

    /// What its owner calls it.
    pub fn name(&self) -> Option<&str> {
        self.0.name.get().map(AsRef::as_ref)
    }

    /// It was computed.
    pub(super) fn computed(&self, remote: Arc<Remote>) {
        if let (Some(recipe), Some(spec)) = (remote.recipe(), &self.0.spec) {
            let made = match &*self.lock() {
                State::Lazy { node, .. } => node.row.name,
                _ => "uploaded",
            };
            recipe.describe(spec, made, self.0.name.get().cloned());
        }
        self.set(State::Remote(remote));
    }

    /// Dtype and shape.
    ///
    /// # Errors
    /// What is wrong with the expression.
    pub fn spec(&self) -> Result<&TensorSpec, Error> {
        match &self.0.spec {
            Some(spec) => Ok(spec),
            None => Err(self.problem()),
        }
    }

    fn problem(&self) -> Error {
        match self.state() {
            State::Wrong(error) => error,
            _ => Error::new(Reason::Internal, "a tensor without a spec"),
        }
    }

    /// Whether the expression can be computed, so far as shapes and dtypes tell.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), Error> {
        self.spec().map(|_| ())
    }

    /// Element type.
    ///
    /// # Errors
    /// What is wrong with the expression.
    pub fn dtype(&self) -> Result<DType, Error> {
        Ok(self.spec()?.dtype)
    }

    /// Sizes of the axes. Asking for the size of a symbolic axis while a shapeless function is traced makes that trace
    /// depend on it: it is traced anew for every other size.
    ///
    /// # Errors
    /// What is wrong with the expression.
    pub fn shape(&self) -> Result<Vec<usize>, Error> {
        let dims = self.spec()?.shape.dims();
        let size = |d: &Dim| match d {
            Dim::Fixed(n) => *n,
            Dim::Rows => compile::concrete_rows(),
        };
        Ok(dims.iter().map(size).collect())
    }

    /// Number of axes.
    ///
    /// # Errors
    /// What is wrong with the expression.
    pub fn rank(&self) -> Result<usize, Error> {
        Ok(self.spec()?.shape.rank())
    }

    /// Number of elements; see [`Tensor::shape`] about symbolic axes.
    ///
    /// # Errors
    /// What is wrong with the expression.
    pub fn size(&self) -> Result<usize, Error> {
        Ok(self.shape()?.iter().product())
    }

    /// Size of its value, bytes; see [`Tensor::shape`] about symbolic axes.
    ///
    /// # Errors
    /// What is wrong with the expression.
    pub fn nbytes(&self) -> Result<usize, Error> {
        let spec = self.spec()?;
        let rows = match spec.shape.is_symbolic() {
            true => compile::concrete_rows(),
            false => 0,
        };
        spec.bytes(rows)
            .ok_or_else(|| invalid("the tensor is too large"))
    }

    /// Whether its value is known: in this process or on the worker.
    pub fn is_evaluated(&self) -> bool {
        matches!(*self.lock(), State::Remote(_) | State::Host { .. })
    }

    /// Applies an op of the catalogue by name. Every method is this with a name; use it for the ops that have none.
    pub fn apply(
        name: &str,
        inputs: &[Option<&Tensor>],
        attributes: Vec<Attribute>,
    ) -> Vec<Tensor> {
        match op::find(name) {
            Some(row) => apply(row, inputs, attributes, None),
            None => vec![Self::wrong(
                None,
                invalid(format!("there is no op named {name:?}")),
            )],
        }
    }
}

/// An op's inputs checked: whose session computes it, and the specs of its results.
///
/// # Errors
/// What is wrong with an input, and what the op's row says of them.
pub(super) fn checked(
    row: &'static OpRow,
    inputs: &[Option<&Tensor>],
    attributes: &[Attribute],
    session: &mut Option<Session>,
) -> Result<Vec<TensorSpec>, Error> {
    let mut specs = Vec::with_capacity(inputs.len());
    let given = session.is_some();
    let mut greatest = 0;
    for tensor in inputs {
        let Some(tensor) = tensor else {
            specs.push(ValueSpec::Absent);
            continue;
        };
        specs.push(tensor.value_spec()?);
        match (&*session, &tensor.0.session) {
            (Some(a), Some(b)) if !a.mixes_with(b) => {
                return Err(invalid(format!(
                    "{}: its inputs belong to two sessions; copy one of them over, or open both as a Spread",
                    row.name
                )));
            }
            // Where the greatest of its inputs is: a product is with its weight, on whatever device that lies.
            (Some(a), Some(b)) if !given && !a.is_same(b) && size(&specs) > greatest => {
                *session = Some(b.clone());
            }
            (None, Some(b)) => *session = Some(b.clone()),
            _ => {}
        }
        if tensor.0.session.is_some() {
            greatest = greatest.max(size(&specs));
        }
    }
    row.check(&specs, attributes).map_err(|e| of_graph(&e))
}

/// Bytes of the last of these, however many rows it has.
fn size(specs: &[ValueSpec]) -> usize {
    match specs.last() {
        Some(ValueSpec::Tensor(t)) => t.bytes(1).unwrap_or(usize::MAX),
        Some(ValueSpec::Cache(c)) => c.bytes().unwrap_or(usize::MAX),
        _ => 0,
    }
}

/// The results of a node, by their specs.
pub(super) fn results(
    node: &Arc<OpNode>,
    specs: Vec<TensorSpec>,
    owner: Option<&Session>,
) -> Vec<Tensor> {
    let lazy = |(output, spec)| {
        let node = Arc::clone(node);
        Tensor::new(owner.cloned(), Some(spec), State::Lazy { node, output })
    };
    specs.into_iter().enumerate().map(lazy).collect()
}

/// Applies an op; what is wrong with it is in its results, of which there is always at least one.
pub(super) fn apply(
    row: &'static OpRow,
    inputs: &[Option<&Tensor>],
    attributes: Vec<Attribute>,
    session: Option<&Session>,
) -> Vec<Tensor> {
    let mut owner = session.cloned();
    let specs = checked(row, inputs, &attributes, &mut owner);
    let specs = specs.and_then(|specs| match specs.is_empty() {
        true => Err(invalid(format!("{} has no result", row.name))),
        false => Ok(specs),
    });
    match specs {
        Err(error) => vec![Tensor::wrong(owner, error)],
        Ok(specs) => {
            compile::note_rank(row, inputs, &attributes);
            let node = Arc::new(OpNode {
                row,
                inputs: inputs.iter().map(|t| t.cloned()).collect(),
                attributes,
                turn: None,
            });
            results(&node, specs, owner.as_ref())
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &*self.lock() {
            State::Wrong(error) => return write!(f, "Tensor(wrong: {error})"),
            State::Host { .. } => "host",
            State::Lazy { node, .. } => node.row.name,
            State::Remote(_) => "remote",
            State::Argument { .. } => "argument",
        };
        match &self.0.spec {
            Some(spec) => write!(f, "Tensor({spec}, {state})"),
            None => write!(f, "Tensor({state})"),
        }
    }
}
