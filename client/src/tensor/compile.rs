//! Functions of tensors, traced once and called many times.

mod save;

use std::{
    cell::RefCell,
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use hotcell_graph::{
    Dim, Shape, TensorSpec,
    op::{Attribute, OpRow},
};
use hotcell_proto::{
    error::{Error, Reason},
    v1::PlanMemory,
};

use super::{
    array::{State, Tensor, apply, invalid, of_graph},
    connection::{Connection, Remote, RemotePlan},
    program::{self, Arguments, Program, Scope},
    recent::Recent,
    recover::again,
    session::Session,
    stream::Order,
};

/// Rows that the first plan of a shapeless function has room for at least.
const MIN_ROWS: usize = 64;
/// Traces that a function keeps, each with its plan on the worker.
const KEPT_TRACES: usize = 64;

static TRACES: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// Traces that run on this thread, innermost last.
    static RUNNING: RefCell<Vec<Running>> = const { RefCell::new(Vec::new()) };
}

struct Running {
    rows: usize,
    /// Somebody asked for the size of the symbolic axis.
    dependent: bool,
}

/// The size that the symbolic axis has in the trace that runs, which then depends on it.
pub(super) fn concrete_rows() -> usize {
    RUNNING.with_borrow_mut(|running| match running.last_mut() {
        Some(trace) => {
            trace.dependent = true;
            trace.rows
        }
        // Symbolic tensors exist in traces only; one that was carried out of its trace cannot be evaluated.
        None => 0,
    })
}

/// Notes that a trace depends on the size of its symbolic axis, where an op's result has another rank when it is 1.
pub(super) fn note_rank(row: &OpRow, inputs: &[Option<&Tensor>], attributes: &[Attribute]) {
    let drops_ones =
        row.name == "squeeze" && matches!(attributes, [Attribute::Ints(axes)] if axes.is_empty());
    let symbolic = |tensor: &&Tensor| tensor.spec().is_ok_and(|s| s.shape.is_symbolic());
    if drops_ones && inputs.iter().flatten().any(symbolic) {
        concrete_rows();
    }
}

type Function = dyn Fn(&[Tensor]) -> Vec<Tensor> + Send + Sync;

/// A function of tensors. It is traced when it is called with specs that it has not seen, or not among the last 64 different ones;
/// values that it captures are read anew at each call, and a random key has to be one of its arguments to differ between
/// calls.
#[derive(Clone)]
pub struct Compiled(Arc<Inner>);

struct Inner {
    session: Session,
    function: Box<Function>,
    shapeless: bool,
    traces: Mutex<Recent<Vec<TensorSpec>, Kept>>,
}

#[derive(Clone)]
enum Kept {
    Trace(Arc<Trace>),
    /// Cannot be traced without knowing the sizes.
    NeedsShapes,
}

/// What a call of the function does.
pub(super) struct Trace {
    /// The graph: arguments first, then what the function captured.
    program: Program,
    plan: Mutex<Option<Arc<RemotePlan>>>,
    /// The results as expressions of the arguments.
    results: Vec<Tensor>,
    id: u64,
    max_rows: usize,
}

impl Session {
    /// A function that is traced once for every list of its arguments' dtypes and shapes.
    pub fn compile(
        &self,
        function: impl Fn(&[Tensor]) -> Vec<Tensor> + Send + Sync + 'static,
    ) -> Compiled {
        self.compile_any(Box::new(function), false)
    }

    /// A function that, where its ops allow it, is traced once for all sizes of the outermost axis. The axis is that of the
    /// first argument and of every other one that is as long. Shapes are inferred for a symbolic axis, so that nothing of one
    /// size is baked in; a function that cannot do without the size is traced anew for each.
    pub fn compile_shapeless(
        &self,
        function: impl Fn(&[Tensor]) -> Vec<Tensor> + Send + Sync + 'static,
    ) -> Compiled {
        self.compile_any(Box::new(function), true)
    }

    fn compile_any(&self, function: Box<Function>, shapeless: bool) -> Compiled {
        Compiled(Arc::new(Inner {
            session: self.clone(),
            function,
            shapeless,
            traces: Mutex::new(Recent::new(KEPT_TRACES)),
        }))
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it is held; the traced function runs outside.
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// A spec whose outermost axis, if it has this many rows, is symbolic.
fn symbolic(spec: &TensorSpec, rows: usize) -> TensorSpec {
    let mut dims = spec.shape.dims().to_vec();
    if let Some(first) = dims.first_mut().filter(|d| **d == Dim::Fixed(rows)) {
        *first = Dim::Rows;
    }
    match Shape::new(dims).and_then(|shape| TensorSpec::new(spec.dtype, shape)) {
        Ok(symbolic) => symbolic,
        Err(_) => spec.clone(),
    }
}

fn at_rows(shape: &Shape, rows: usize) -> Result<Shape, Error> {
    Shape::new(shape.dims().iter().map(|d| Dim::Fixed(d.at(rows)))).map_err(|e| of_graph(&e))
}

impl Compiled {
    /// The results as expressions of the arguments; computed when they are needed. Inside a function that is being traced,
    /// the call becomes part of it.
    ///
    /// # Errors
    /// What is wrong with an argument or with a result; [`Reason::InvalidArgument`] when the function panicked.
    pub fn call(&self, arguments: &[Tensor]) -> Result<Vec<Tensor>, Error> {
        let (trace, rows) = self.trace(arguments)?;
        trace.inline(arguments, rows, &self.0.session)
    }

    /// Computes the results.
    ///
    /// # Errors
    /// As [`Compiled::call`] and [`Session::eval`].
    pub async fn call_eval(&self, arguments: &[Tensor]) -> Result<Vec<Tensor>, Error> {
        let session = &self.0.session;
        let order = Order::default();
        if session.group().is_some() {
            let (trace, rows) = self.trace(arguments)?;
            let inputs = arguments.iter().chain(&trace.program.inputs);
            if !session.alone(inputs.clone()) {
                session.eval(arguments).await?;
                let inputs: Vec<Tensor> = inputs.cloned().collect();
                let homes = vec![Some(session.clone()); trace.results.len()];
                let work = session.compute_spread(&trace.program, &inputs, rows, &homes, &order);
                return match work.await? {
                    made if made.len() == trace.results.len() => Ok(made),
                    _ => self.call(arguments), // a dry run computes nothing
                };
            }
        }
        let prepared = self.prepare(arguments).await?;
        let results = again!(session, at => async {
            let Some(plan) = prepared.trace.plan(session, &at).await? else {
                return Ok(None);
            };
            let (rows, count) = (prepared.rows, prepared.specs.len());
            let call = session.call(&at, &plan, rows, &prepared.inputs, count, &order);
            call.await.map(Some)
        });
        match results? {
            Some(results) => Ok(prepared.results(session, results)),
            None => self.call(arguments), // a dry run computes nothing
        }
    }

    /// Bytes the plan for these arguments takes on the worker: intermediate values, constants, inputs, outputs. Of a function
    /// that several sessions of a spread compute: all parts together.
    ///
    /// # Errors
    /// As [`Compiled::call_eval`].
    pub async fn reserve(&self, arguments: &[Tensor]) -> Result<PlanMemory, Error> {
        Ok(together(&self.reserve_each(arguments).await?))
    }

    /// The same by session: one, or one for each part of a function that several compute.
    pub(super) async fn reserve_each(
        &self,
        arguments: &[Tensor],
    ) -> Result<Vec<(Session, PlanMemory)>, Error> {
        let session = &self.0.session;
        let measured = async |trace: Arc<Trace>| {
            let inputs = arguments.iter().chain(&trace.program.inputs);
            let inputs: Vec<Tensor> = inputs.cloned().collect();
            session.reserve_program(&trace.program, &inputs, &[]).await
        };
        let (trace, rows) = self.trace(arguments)?;
        match measured(trace).await {
            Err(error) => measured(self.at_sizes(arguments, rows, error)?).await,
            made => made,
        }
    }

    pub(super) fn session(&self) -> &Session {
        &self.0.session
    }

    /// What to execute for these arguments, which then have values, and all its inputs.
    pub(super) async fn prepare(&self, arguments: &[Tensor]) -> Result<Prepared, Error> {
        let session = &self.0.session;
        session.eval(arguments).await?;
        let (mut trace, mut rows) = self.trace(arguments)?;
        if rows > 0 {
            let planned = async { again!(session, at => trace.plan(session, &at)) };
            if let Err(error) = planned.await {
                trace = self.at_sizes(arguments, rows, error)?;
                rows = 0;
            }
        }
        let specs = trace.results.iter().map(|r| {
            let spec = r.spec()?;
            TensorSpec::new(spec.dtype, at_rows(&spec.shape, rows)?).map_err(|e| of_graph(&e))
        });
        let specs = specs.collect::<Result<Vec<_>, Error>>()?;
        let captured = trace.program.inputs.iter();
        let inputs = arguments.iter().chain(captured).cloned().collect();
        Ok(Prepared {
            trace: Arc::clone(&trace),
            rows,
            inputs,
            specs,
        })
    }

    /// The trace for these arguments, and the rows they have.
    fn trace(&self, arguments: &[Tensor]) -> Result<(Arc<Trace>, usize), Error> {
        let specs = arguments
            .iter()
            .map(|a| a.spec().cloned())
            .collect::<Result<Vec<_>, _>>()?;
        let outer = specs.iter().find_map(|s| s.shape.dims().first().copied());
        // Inside another symbolic trace the arguments have no sizes to find the axis by.
        if let (true, Some(Dim::Fixed(rows @ 1..))) = (self.0.shapeless, outer)
            && !specs.iter().any(|s| s.shape.is_symbolic())
        {
            let pattern: Vec<TensorSpec> = specs.iter().map(|s| symbolic(s, rows)).collect();
            let kept = locked(&self.0.traces).get(&pattern);
            match kept {
                Some(Kept::Trace(trace)) if trace.max_rows >= rows => return Ok((trace, rows)),
                Some(Kept::NeedsShapes) => {}
                _ => {
                    let max_rows = rows.next_power_of_two().max(MIN_ROWS);
                    let traced = self.make(&pattern, rows, max_rows);
                    let (kept, found) = match traced {
                        Ok(Some(trace)) => (Kept::Trace(Arc::clone(&trace)), Some(trace)),
                        Ok(None) => (Kept::NeedsShapes, None),
                        // What fails for a symbolic axis may do for a size; what is wrong anyway fails again below.
                        Err(_) => (Kept::NeedsShapes, None),
                    };
                    self.keep(pattern, kept);
                    if let Some(trace) = found {
                        return Ok((trace, rows));
                    }
                }
            }
        }
        let kept = locked(&self.0.traces).get(&specs);
        if let Some(Kept::Trace(trace)) = kept {
            return Ok((trace, 0));
        }
        let max_rows = specs
            .iter()
            .any(|s| s.shape.is_symbolic())
            .then_some(MIN_ROWS);
        let made = self.make(&specs, 0, max_rows.unwrap_or(0))?;
        let trace = made.ok_or_else(|| {
            invalid(
                "a function called inside a shapeless one asked for the size of the symbolic axis",
            )
        })?;
        self.keep(specs, Kept::Trace(Arc::clone(&trace)));
        Ok((trace, 0))
    }

    /// The trace to take when no plan could be made of the one with a symbolic axis: a device may have an op only for known
    /// sizes.
    ///
    /// # Errors
    /// `error`, when it is another one, or the trace has sizes.
    fn at_sizes(
        &self,
        arguments: &[Tensor],
        rows: usize,
        error: Error,
    ) -> Result<Arc<Trace>, Error> {
        if rows == 0 || error.reason() != Reason::OpUnsupported {
            return Err(error);
        }
        let pattern = arguments
            .iter()
            .map(|a| Ok(symbolic(a.spec()?, rows)))
            .collect::<Result<Vec<_>, Error>>()?;
        self.keep(pattern, Kept::NeedsShapes);
        Ok(self.trace(arguments)?.0)
    }

    fn keep(&self, specs: Vec<TensorSpec>, kept: Kept) {
        let forgotten = locked(&self.0.traces).insert(specs, kept);
        // Outside of the lock: it may hold much.
        drop(forgotten);
    }

    /// Traces the function; `None` when it asked for the size of the symbolic axis.
    fn make(
        &self,
        specs: &[TensorSpec],
        rows: usize,
        max_rows: usize,
    ) -> Result<Option<Arc<Trace>>, Error> {
        let id = TRACES.fetch_add(1, Ordering::Relaxed);
        let session = &self.0.session;
        let argument = |(index, spec): (usize, &TensorSpec)| {
            let state = State::Argument { trace: id, index };
            Tensor::new(Some(session.clone()), Some(spec.clone()), state)
        };
        let arguments: Vec<Tensor> = specs.iter().enumerate().map(argument).collect();
        RUNNING.with_borrow_mut(|running| {
            running.push(Running {
                rows,
                dependent: false,
            });
        });
        let traced = catch_unwind(AssertUnwindSafe(|| (self.0.function)(&arguments)));
        let ran = RUNNING.with_borrow_mut(Vec::pop);
        let results = traced.map_err(|panic| {
            let what = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
                .unwrap_or_default();
            invalid(format!("the compiled function panicked: {what}"))
        })?;
        let symbolic = specs.iter().any(|s| s.shape.is_symbolic());
        if symbolic && ran.is_some_and(|r| r.dependent) {
            return Ok(None);
        }
        let arguments = Arguments { trace: id, specs };
        let program = program::build(&results, &Scope::Traced(&arguments), max_rows)?;
        Ok(Some(Arc::new(Trace {
            program,
            plan: Mutex::new(None),
            results,
            id,
            max_rows,
        })))
    }
}

/// What all parts take.
pub(super) fn together(each: &[(Session, PlanMemory)]) -> PlanMemory {
    let sum = |a: PlanMemory, b: &PlanMemory| PlanMemory {
        arena: a.arena.saturating_add(b.arena),
        unshared: a.unshared.saturating_add(b.unshared),
        constants: a.constants.saturating_add(b.constants),
        inputs: a.inputs.saturating_add(b.inputs),
        outputs: a.outputs.saturating_add(b.outputs),
        steps: a.steps.saturating_add(b.steps),
        barriers: a.barriers.saturating_add(b.barriers),
        caches: a.caches.saturating_add(b.caches),
    };
    let each = each.iter().map(|(_, memory)| memory);
    each.fold(PlanMemory::default(), sum)
}

/// A call that is ready to be sent.
pub(super) struct Prepared {
    pub trace: Arc<Trace>,
    pub rows: usize,
    pub inputs: Vec<Tensor>,
    pub specs: Vec<TensorSpec>,
}

impl Prepared {
    /// The results as tensors.
    pub fn results(&self, session: &Session, results: Vec<Arc<Remote>>) -> Vec<Tensor> {
        let specs = self.specs.iter().cloned();
        let made = specs
            .zip(results)
            .map(|(spec, remote)| session.tensor_at(remote, spec, "made by a compiled function"));
        made.collect()
    }
}

impl Trace {
    /// Its plan over this connection; `None` in a dry run.
    pub(super) async fn plan(
        &self,
        session: &Session,
        at: &Connection,
    ) -> Result<Option<Arc<RemotePlan>>, Error> {
        let kept = locked(&self.plan).clone();
        if let Some(plan) = kept.filter(|plan| plan.generation == at.generation) {
            return Ok(Some(plan));
        }
        let plan = session.plan(at, &self.program).await?;
        locked(&self.plan).clone_from(&plan);
        Ok(plan)
    }

    /// The results with other tensors in place of the arguments.
    fn inline(
        &self,
        arguments: &[Tensor],
        rows: usize,
        session: &Session,
    ) -> Result<Vec<Tensor>, Error> {
        let mut made: HashMap<usize, Vec<Tensor>> = HashMap::new();
        let replace = |tensor: &Tensor, made: &HashMap<usize, Vec<Tensor>>| match tensor.state() {
            State::Argument { trace, index } if trace == self.id => arguments.get(index).cloned(),
            State::Lazy { node, output } => made
                .get(&(Arc::as_ptr(&node) as usize))
                .and_then(|r| r.get(output))
                .cloned(),
            _ => Some(tensor.clone()),
        };
        let lost = || Error::new(Reason::Internal, "a trace is out of order");
        for node in program::order(&self.results) {
            let mut inputs = Vec::with_capacity(node.inputs.len());
            for input in &node.inputs {
                inputs.push(match input {
                    Some(tensor) => Some(replace(tensor, &made).ok_or_else(lost)?),
                    None => None,
                });
            }
            let fixed = |a: &Attribute| match a {
                Attribute::Shape(s) if rows > 0 => Ok(Attribute::Shape(at_rows(s, rows)?)),
                other => Ok(other.clone()),
            };
            let attributes = node
                .attributes
                .iter()
                .map(fixed)
                .collect::<Result<Vec<_>, Error>>()?;
            let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
            let results = apply(node.row, &inputs, attributes, Some(session));
            made.insert(Arc::as_ptr(&node) as usize, results);
        }
        let results = self
            .results
            .iter()
            .map(|r| replace(r, &made).ok_or_else(lost));
        let results = results.collect::<Result<Vec<_>, _>>()?;
        results.iter().try_for_each(Tensor::check)?;
        Ok(results)
    }
}
