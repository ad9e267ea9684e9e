//! Running a plan: what holds values, and what an op's entry sees of them.

use std::{
    cell::RefCell,
    collections::HashMap,
    rc::Rc,
    sync::atomic::{AtomicBool, Ordering},
};

use hotcell_graph::{
    DType, TensorSpec,
    op::{Call, ValueSpec},
};
use mlx_rs::Array;

use super::{
    array,
    plan::{MlxNode, MlxPlan, Place, Work, overflow},
    weights::{Form, Prepared, Source, Weights},
};
use crate::{
    backend::{Buffer, DeviceError, Trail},
    bound::{Bound, overlap},
    part::HostPart,
    plan::{PlanHints, Slot},
};

/// A value while a plan runs.
#[derive(Clone)]
enum Held {
    Array(Rc<Array>),
    /// In a buffer of a host part, from its start.
    Host(Rc<Buffer>),
}

/// Two arrays that belong together, as cosines and sines do.
type Pair = (Rc<Array>, Rc<Array>);

/// What an execution leaves for its next slice, and one execution for the next.
pub(super) struct State {
    held: Vec<Option<Held>>,
    /// Forms of constants in imported memory, which stay from one execution to the next.
    prepared: HashMap<(usize, Form), Rc<Prepared>>,
    /// What several nodes of an execution compute from the same values.
    shared: HashMap<(&'static str, usize, usize), Pair>,
    weights: Rc<Weights>,
}

impl State {
    pub fn new(values: usize, weights: Rc<Weights>) -> Self {
        Self {
            held: vec![None; values],
            prepared: HashMap::new(),
            shared: HashMap::new(),
            weights,
        }
    }

    /// Another buffer was bound to this value.
    pub fn forget(&mut self, value: usize) {
        self.prepared.retain(|(of, _), _| *of != value);
        if let Some(held) = self.held.get_mut(value) {
            *held = None;
        }
    }

    /// Nothing is bound any more.
    pub fn clear(&mut self) {
        self.held.iter_mut().for_each(|held| *held = None);
        self.prepared.clear();
        self.shared.clear();
    }

    /// A new execution begins.
    fn begin(&mut self) {
        self.held.iter_mut().for_each(|held| *held = None);
        self.shared.clear();
    }

    fn put(&mut self, value: usize, held: Held) -> Result<(), DeviceError> {
        *self.held.get_mut(value).ok_or_else(overflow)? = Some(held);
        Ok(())
    }
}

/// What is bound to a place, and for how many rows it is read.
struct Reader<'a> {
    places: &'a [Place],
    bound: &'a [Option<Bound>],
    inputs: usize,
    rows: usize,
    stop: &'a AtomicBool,
    trail: Option<Trail>,
}

/// Bytes of a tensor for the rows of an execution.
fn bytes_of(spec: &TensorSpec, rows: usize) -> Result<usize, DeviceError> {
    spec.bytes(rows).ok_or_else(overflow)
}

impl Reader<'_> {
    /// What is bound to an input of the graph.
    fn input(&self, value: usize) -> Option<(&Place, &Bound)> {
        let place = self.places.get(value).filter(|_| value < self.inputs)?;
        Some((place, self.bound.get(value)?.as_ref()?))
    }

    /// Says that something moved.
    ///
    /// # Errors
    /// When the execution is to stop.
    fn goes_on(&self) -> Result<(), DeviceError> {
        if let Some(trail) = &self.trail {
            trail.progressed();
        }
        match self.stop.load(Ordering::Relaxed) {
            true => Err(DeviceError::Stopped),
            false => Ok(()),
        }
    }
}

/// What is bound to a constant whose forms are kept.
fn kept<'a>(state: &State, reader: &'a Reader<'_>, value: usize) -> Option<&'a Bound> {
    let (place, bound) = reader.input(value)?;
    let lasts = place.constant && state.weights.keeps(&bound.buffer);
    lasts.then_some(bound)
}

/// A form of a constant in imported memory: made once, and found again by its number.
fn prepared(
    state: &mut State,
    bound: &Bound,
    value: usize,
    spec: &TensorSpec,
    form: Form,
) -> Result<Rc<Prepared>, DeviceError> {
    let made = state.weights.get(bound, spec, form)?;
    state.prepared.insert((value, form), Rc::clone(&made));
    Ok(made)
}

/// What an op's entry sees: its call, and its inputs as it wants them.
pub(super) struct Cx<'a> {
    node: &'a MlxNode,
    reader: &'a Reader<'a>,
    state: RefCell<&'a mut State>,
    /// Rows of this execution.
    pub rows: usize,
}

impl Cx<'_> {
    /// The call.
    pub fn call(&self) -> Call<'_> {
        Call {
            op: self.node.op,
            inputs: &self.node.specs,
            attributes: &self.node.attributes,
        }
    }

    /// The op's name.
    pub fn op(&self) -> &'static str {
        self.node.op.name
    }

    /// Specs of the results.
    pub fn results(&self) -> &[TensorSpec] {
        &self.node.results
    }

    /// How many inputs there are, absent ones counted.
    pub fn inputs(&self) -> usize {
        self.node.inputs.len()
    }

    /// The shape of result `o` in MLX's numbers.
    pub fn result_dims(&self, o: usize) -> Result<Vec<i32>, DeviceError> {
        let spec = self.results().get(o).ok_or_else(overflow)?;
        array::dims_or(self.op(), &spec.shape, self.rows)
    }

    /// The shape of input `i` in MLX's numbers.
    pub fn dims(&self, i: usize) -> Result<Vec<i32>, DeviceError> {
        array::dims_or(self.op(), &self.call().tensor(i)?.shape, self.rows)
    }

    /// The number of input `i`'s value, if it is given.
    pub fn value(&self, i: usize) -> Option<usize> {
        self.node.inputs.get(i).copied().flatten()
    }

    /// Input `i`, if it is given.
    pub fn optional(&self, i: usize) -> Result<Option<Rc<Array>>, DeviceError> {
        self.value(i).map(|_| self.array(i)).transpose()
    }

    /// Input `i`.
    pub fn array(&self, i: usize) -> Result<Rc<Array>, DeviceError> {
        let value = self.value(i).ok_or_else(overflow)?;
        let spec = match self.node.specs.get(i) {
            Some(ValueSpec::Tensor(spec)) => spec,
            _ => return Err(overflow()),
        };
        array_of(&mut self.state.borrow_mut(), self.reader, value, spec)
    }

    /// Weights, the matrix that input `i` is, in another form: made once for a constant in memory that nobody writes.
    pub fn weights(&self, i: usize, form: Form) -> Result<Rc<Prepared>, DeviceError> {
        let value = self.value(i).ok_or_else(overflow)?;
        let call = self.call();
        let spec = call.tensor(i)?;
        let mut state = self.state.borrow_mut();
        if let Some(there) = state.prepared.get(&(value, form)) {
            return Ok(Rc::clone(there));
        }
        if let Some(bound) = kept(&state, self.reader, value) {
            return prepared(&mut state, bound, value, spec, form);
        }
        let source = match self.reader.input(value) {
            Some((_, bound)) => Source::Memory(bound),
            None => {
                let array = array_of(&mut state, self.reader, value, spec)?;
                return Prepared::new(Source::Array(&array), spec, form).map(Rc::new);
            }
        };
        Prepared::new(source, spec, form).map(Rc::new)
    }

    /// Says that something moved, in an entry that takes long.
    ///
    /// # Errors
    /// When the execution is to stop.
    pub fn goes_on(&self) -> Result<(), DeviceError> {
        self.reader.goes_on()
    }

    /// Rows of the table that input `table` is, at the checked indices of input `indices`, where the table is in memory
    /// and no array yet: then only they are read.
    pub fn taken_rows(&self, table: usize, indices: usize) -> Result<Option<Array>, DeviceError> {
        let value = self.value(table).ok_or_else(overflow)?;
        let held = self.state.borrow().held.get(value).cloned().flatten();
        let call = self.call();
        let spec = call.tensor(table)?;
        let (buffer, offset) = match (&held, self.reader.input(value)) {
            (Some(Held::Array(_)), _) | (None, None) => return Ok(None),
            (Some(Held::Host(buffer)), _) => (&**buffer, 0),
            (None, Some((_, bound))) => (&bound.buffer, bound.offset),
        };
        let rows = spec.shape.dims().first().ok_or_else(overflow)?;
        let rows = rows.at(self.rows);
        let row = spec.shape.elements_per_row().ok_or_else(overflow)?;
        let row = spec.dtype.row_bytes(row).ok_or_else(overflow)?;
        let at = self.indices(indices, rows)?;
        let size = at.len().checked_mul(row).ok_or_else(overflow)?;
        let mut taken = array::zeros("rows of a table", size)?;
        for (to, index) in taken.chunks_exact_mut(row.max(1)).zip(at) {
            // Checked: no index is negative, and each names a row.
            let from = usize::try_from(index).map_err(|_| overflow())?;
            buffer.read(offset + from * row, to)?;
        }
        array::from_bytes(&taken, spec.dtype, &self.result_dims(0)?).map(Some)
    }

    /// Bytes of input `i`, read once: what they say stays what was checked.
    pub fn bytes(&self, i: usize) -> Result<Vec<u8>, DeviceError> {
        let value = self.value(i).ok_or_else(overflow)?;
        let call = self.call();
        let size = bytes_of(call.tensor(i)?, self.rows)?;
        let held = self.state.borrow().held.get(value).cloned().flatten();
        let mut bytes = array::zeros(self.op(), size)?;
        match (held, self.reader.input(value)) {
            (Some(Held::Array(array)), _) => {
                array::with_bytes(&array, |there| {
                    for (to, from) in bytes.iter_mut().zip(there) {
                        *to = *from;
                    }
                })?;
            }
            (Some(Held::Host(buffer)), _) => buffer.read(0, &mut bytes)?,
            (None, Some((_, bound))) => bound.buffer.read(bound.offset, &mut bytes)?,
            (None, None) => return Err(overflow()),
        }
        Ok(bytes)
    }

    /// Input `i`, integers of any dtype.
    pub fn integers(&self, i: usize) -> Result<Vec<i64>, DeviceError> {
        let dtype = self.call().tensor(i)?.dtype;
        let bytes = self.bytes(i)?;
        let mut all = array::room(self.op(), bytes.len() / dtype.block_bytes().max(1))?;
        macro_rules! each {
            ($t:ty) => {{
                let each = bytes.as_chunks::<{ size_of::<$t>() }>().0.iter();
                all.extend(
                    each.map(|b| i64::try_from(<$t>::from_le_bytes(*b)).unwrap_or(i64::MAX)),
                );
            }};
        }
        match dtype {
            DType::U8 => each!(u8),
            DType::U16 => each!(u16),
            DType::U32 => each!(u32),
            DType::U64 => each!(u64),
            DType::I8 => each!(i8),
            DType::I16 => each!(i16),
            DType::I32 => each!(i32),
            DType::I64 => each!(i64),
            _ => return Err(overflow()),
        }
        Ok(all)
    }

    /// Input `i` as indices of `0..bound`, checked, where negative ones count from the end: MLX would read whatever lies
    /// where they point.
    pub fn indices(&self, i: usize, bound: usize) -> Result<Vec<i32>, DeviceError> {
        let op = self.op();
        let wrong = |index| DeviceError::IndexOutOfRange { op, index, bound };
        let end = i64::try_from(bound).unwrap_or(i64::MAX);
        let all = self.integers(i)?;
        let mut checked = array::room(op, all.len())?;
        for index in all {
            let at = if index < 0 { index + end } else { index };
            let inside = Some(at).filter(|at| (0..end).contains(at));
            let at = inside.and_then(|at| i32::try_from(at).ok());
            checked.push(at.ok_or_else(|| wrong(index))?);
        }
        Ok(checked)
    }

    /// Memory of the cache that input `i` is.
    pub fn cache(&self, i: usize) -> Result<&Bound, DeviceError> {
        let value = self.value(i).ok_or_else(overflow)?;
        let (_, bound) = self.reader.input(value).ok_or_else(overflow)?;
        Ok(bound)
    }

    /// Two arrays made of inputs `a` and `b`, once per execution.
    pub fn shared(
        &self,
        what: &'static str,
        a: usize,
        b: usize,
        make: impl FnOnce() -> Result<(Array, Array), DeviceError>,
    ) -> Result<Pair, DeviceError> {
        let value = |i: usize| self.value(i).ok_or_else(overflow);
        let key = (what, value(a)?, value(b)?);
        if let Some((x, y)) = self.state.borrow().shared.get(&key) {
            return Ok((Rc::clone(x), Rc::clone(y)));
        }
        let (x, y) = make()?;
        let both = (Rc::new(x), Rc::new(y));
        self.state.borrow_mut().shared.insert(key, both.clone());
        Ok(both)
    }
}

/// A value as an array: as it is, or copied from where it lies.
fn array_of(
    state: &mut State,
    reader: &Reader<'_>,
    value: usize,
    spec: &TensorSpec,
) -> Result<Rc<Array>, DeviceError> {
    let held = state.held.get(value).cloned().flatten();
    let made = match (held, reader.input(value)) {
        (Some(Held::Array(array)), _) => return Ok(array),
        (Some(Held::Host(buffer)), _) => {
            let host = buffer.host().ok_or_else(overflow)?;
            array::of_host(&host, 0, spec, reader.rows)?
        }
        (None, Some((_, bound))) => {
            if let Some(there) = state.prepared.get(&(value, Form::Stored)) {
                return Ok(Rc::clone(there.arrays.first().ok_or_else(overflow)?));
            }
            if let Some(bound) = kept(state, reader, value) {
                let made = prepared(state, bound, value, spec, Form::Stored)?;
                return Ok(Rc::clone(made.arrays.first().ok_or_else(overflow)?));
            }
            array::of_bound(bound, spec, reader.rows)?
        }
        (None, None) => return Err(overflow()),
    };
    let made = Rc::new(made);
    state.put(value, Held::Array(Rc::clone(&made)))?;
    Ok(made)
}

impl MlxPlan {
    /// What is wrong with executing now.
    fn check(&mut self, rows: usize, from: usize) -> Result<(), DeviceError> {
        let fail = |what: String| Err(DeviceError::Binding(what));
        let open = self.bound.iter().position(Option::is_none);
        if let Some(at) = open {
            return match at.checked_sub(self.inputs) {
                None => fail(format!("Input({at}) is not bound")),
                Some(at) => fail(format!("Output({at}) is not bound")),
            };
        }
        if !self.allocated {
            return fail("the plan was made as a dry run".to_owned());
        }
        if self.rebound {
            let most = self.bound.iter().flatten().map(|b| b.rows).min();
            self.most_rows = most.unwrap_or(self.max_rows);
        }
        if rows > self.most_rows {
            return fail(format!("{rows} rows, at most {}", self.most_rows));
        }
        if from > self.units.len() {
            return fail(format!("step {from}, there are {}", self.units.len()));
        }
        if self.rebound {
            if let Some(slot) = overlap(self.bound.iter().flatten()) {
                return fail(format!("{slot:?}: overlaps memory that the graph writes"));
            }
            self.rebound = false;
        }
        Ok(())
    }

    /// Runs it where there is not one row: not every kernel of MLX knows what to do with nothing.
    fn run_without_rows(&mut self) -> Result<Option<usize>, DeviceError> {
        let mut plan = self.cpu.plan(&self.graph, &PlanHints::default())?;
        for bound in self.bound.iter().flatten() {
            plan.bind_for(0, bound.slot, &bound.buffer, bound.offset)?;
        }
        plan.execute(0)?;
        Ok(None)
    }

    /// Runs units until the end, a failure, or `pause` says so.
    pub(super) fn run_from(
        &mut self,
        rows: usize,
        from: usize,
        pause: &dyn Fn() -> bool,
    ) -> Result<Option<usize>, DeviceError> {
        self.check(rows, from)?;
        if rows == 0 && self.max_rows > 0 {
            return self.run_without_rows();
        }
        if from == 0 {
            self.state.begin();
        }
        let reader = Reader {
            places: &self.places,
            bound: &self.bound,
            inputs: self.inputs,
            rows,
            stop: &self.stop,
            trail: self.trail,
        };
        for (u, unit) in self.units.iter_mut().enumerate().skip(from) {
            if let Err(stopped) = reader.goes_on() {
                self.state.begin();
                return Err(stopped);
            }
            if u > from && pause() {
                return Ok(Some(u));
            }
            if let Some(trail) = &self.trail {
                trail.node.store(unit.mark, Ordering::Relaxed);
            }
            let state = &mut self.state;
            let done = match &mut unit.work {
                Work::Mlx(nodes) => run_mlx(nodes, &unit.kept, &reader, state),
                Work::Host(part) => run_host(part, &reader, state),
            };
            if let Err(error) = done {
                self.state.begin();
                return Err(error);
            }
            self.ran.add(&unit.ops, matches!(unit.work, Work::Mlx(_)));
            for value in &unit.dead {
                if let Some(held) = self.state.held.get_mut(*value) {
                    *held = None;
                }
            }
        }
        for (place, bound) in self.places.iter().zip(&self.bound).skip(self.inputs) {
            give(&mut self.state, &reader, place, bound)?;
        }
        self.state.begin();
        Ok(None)
    }
}

/// Records nodes, and evaluates what is read later.
fn run_mlx(
    nodes: &[MlxNode],
    kept: &[usize],
    reader: &Reader<'_>,
    state: &mut State,
) -> Result<(), DeviceError> {
    for node in nodes {
        // What reads values, as indices are, has all before it computed.
        reader.goes_on()?;
        let cx = Cx {
            node,
            reader,
            state: RefCell::new(state),
            rows: reader.rows,
        };
        let results = (node.launch)(&cx)?;
        if results.len() != node.results.len() {
            return Err(overflow());
        }
        for (o, (result, spec)) in results.into_iter().zip(&node.results).enumerate() {
            array::check(node.op.name, &result, spec, reader.rows)?;
            state.put(node.first + o, Held::Array(Rc::new(result)))?;
        }
    }
    let arrays: Vec<Rc<Array>> = kept
        .iter()
        .filter_map(|v| match state.held.get(*v) {
            Some(Some(Held::Array(array))) => Some(Rc::clone(array)),
            _ => None,
        })
        .collect();
    array::evaluate(arrays.iter().map(Rc::as_ref))
}

/// Runs a part on the CPU backend's kernels.
fn run_host(
    part: &mut HostPart,
    reader: &Reader<'_>,
    state: &mut State,
) -> Result<(), DeviceError> {
    for (i, input) in part.ins.iter().enumerate() {
        let (Some(copy), ValueSpec::Tensor(_)) = (&input.copy, &input.spec) else {
            continue;
        };
        match state.held.get(input.value).cloned().flatten() {
            Some(Held::Array(array)) => {
                array::with_bytes(&array, |bytes| copy.write(0, bytes))??;
                part.plan.bind(Slot::Input(i), copy, 0)?;
            }
            Some(Held::Host(buffer)) => part.plan.bind(Slot::Input(i), &buffer, 0)?,
            None => return Err(overflow()),
        }
    }
    for (o, out) in part.outs.iter().enumerate() {
        let buffer = out.buffer.as_ref().ok_or_else(overflow)?;
        part.plan.bind(Slot::Output(o), buffer, 0)?;
    }
    part.plan.execute(reader.rows)?;
    for out in &part.outs {
        let buffer = out.buffer.as_ref().ok_or_else(overflow)?;
        state.put(out.value, Held::Host(Rc::clone(buffer)))?;
    }
    Ok(())
}

/// Copies a value to where the caller wants it.
fn give(
    state: &mut State,
    reader: &Reader<'_>,
    place: &Place,
    bound: &Option<Bound>,
) -> Result<(), DeviceError> {
    let (Some(bound), ValueSpec::Tensor(spec)) = (bound, &place.spec) else {
        return Err(overflow());
    };
    let size = bytes_of(spec, reader.rows)?;
    let write = |bytes: &[u8]| match bytes.get(..size) {
        Some(bytes) => bound.buffer.write(bound.offset, bytes),
        None => Err(overflow()),
    };
    match state.held.get(place.value).cloned().flatten() {
        Some(Held::Array(array)) => array::with_bytes(&array, write)?,
        Some(Held::Host(from)) => {
            let mut bytes = array::zeros("a result", size)?;
            from.read(0, &mut bytes)?;
            write(&bytes)
        }
        None => {
            let (_, from) = reader.input(place.value).ok_or_else(overflow)?;
            let mut bytes = array::zeros("a result", size)?;
            from.buffer.read(from.offset, &mut bytes)?;
            write(&bytes)
        }
    }
}
