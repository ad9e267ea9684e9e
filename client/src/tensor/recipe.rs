//! How a tensor on the worker can be made again: from bytes of this process, a model's weight, or a call and what it read.
//!
//! Recipes form a graph without cycles that goes back to what this process or the host holds. They own no memory on the worker:
//! what a tensor was made of may be freed there, and is made again on the way. Bytes are counted once, however many
//! recipes share them; what is too much to remember makes a recipe that says so.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, Weak},
};

use bytes::Bytes;
use hotcell_graph::TensorSpec;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
};

use super::{
    array::{State, Tensor},
    connection::{Connection, Remote, RemotePlan, locked},
    host::HostTensor,
    program::PlanKey,
};

/// What a session's recipes hold.
pub(super) struct Ledger {
    books: Mutex<Books>,
    max_bytes: usize,
}

#[derive(Default)]
struct Books {
    /// How many hold the bytes at this address, of this length.
    shared: HashMap<(usize, usize), usize>,
    bytes: usize,
    calls: usize,
}

/// Bytes, counted while this lives.
pub(super) struct Held {
    bytes: Bytes,
    ledger: Arc<Ledger>,
}

impl Held {
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let key = place(&self.bytes);
        let mut books = locked(&self.ledger.books);
        if let Some(count) = books.shared.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                books.shared.remove(&key);
                books.bytes -= key.1;
            }
        }
    }
}

/// Where bytes are. While somebody holds them nobody else's are there.
fn place(bytes: &Bytes) -> (usize, usize) {
    (bytes.as_ptr() as usize, bytes.len())
}

impl Ledger {
    pub fn new(max_bytes: usize) -> Arc<Self> {
        let books = Mutex::default();
        Arc::new(Self { books, max_bytes })
    }

    /// Holds bytes; `None` when they are too many.
    fn hold(self: &Arc<Self>, bytes: &Bytes) -> Option<Held> {
        let mut books = locked(&self.books);
        if let Some(count) = books.shared.get_mut(&place(bytes)) {
            *count += 1;
        } else {
            let more = books.bytes.checked_add(bytes.len());
            books.bytes = more.filter(|sum| *sum <= self.max_bytes)?;
            books.shared.insert(place(bytes), 1);
        }
        Some(Held {
            bytes: bytes.clone(),
            ledger: Arc::clone(self),
        })
    }
}

/// How a tensor is made.
pub(super) struct Recipe {
    pub kind: Kind,
    /// Calls of which each needs the one before.
    depth: u32,
    about: Mutex<About>,
    /// The tensor it made, while somebody has it.
    made: Mutex<Weak<Remote>>,
}

/// What errors say about a tensor.
#[derive(Default)]
struct About {
    spec: Option<TensorSpec>,
    made: &'static str,
    name: Option<Arc<str>>,
}

pub(super) enum Kind {
    /// It is uploaded.
    Host(TensorSpec, Held),
    /// A model's weight.
    Weight { model: String, name: String },
    /// Zeros.
    Zeros(TensorSpec),
    /// A result of a call.
    Result { call: Arc<Call>, output: usize },
    /// It cannot be made again, for this reason.
    Gone(String),
}

/// A call without effects.
pub(super) struct Call {
    pub graph: PlanKey,
    pub rows: usize,
    pub outputs: usize,
    pub inputs: Vec<Source>,
    _graph: Held,
    ledger: Arc<Ledger>,
}

/// What an input of a call was.
pub(super) enum Source {
    Data(Held),
    Tensor(Arc<Recipe>),
}

impl Drop for Call {
    /// Without recursion: the way back to what this process holds may be thousands of calls long.
    fn drop(&mut self) {
        locked(&self.ledger.books).calls -= 1;
        let mut rest = std::mem::take(&mut self.inputs);
        while let Some(source) = rest.pop() {
            if let Source::Tensor(recipe) = source
                && let Some(recipe) = Arc::into_inner(recipe)
                && let Kind::Result { call, .. } = recipe.kind
                && let Some(mut call) = Arc::into_inner(call)
            {
                rest.append(&mut call.inputs);
            }
        }
    }
}

impl Recipe {
    fn new(kind: Kind, depth: u32) -> Self {
        Self {
            kind,
            depth,
            about: Mutex::default(),
            made: Mutex::default(),
        }
    }

    pub fn gone(why: impl Into<String>) -> Self {
        Self::new(Kind::Gone(why.into()), 0)
    }

    pub fn weight(model: &str, name: &str) -> Self {
        let (model, name) = (model.to_owned(), name.to_owned());
        Self::new(Kind::Weight { model, name }, 0)
    }

    pub fn zeros(spec: &TensorSpec) -> Self {
        Self::new(Kind::Zeros(spec.clone()), 0)
    }

    /// Of bytes of this process.
    pub fn host(ledger: &Arc<Ledger>, data: &HostTensor) -> Self {
        match ledger.hold(data.bytes()) {
            Some(held) => Self::new(Kind::Host(data.spec().clone(), held), 0),
            None => Self::gone(too_many_bytes(ledger)),
        }
    }

    /// Binds it to the tensor it makes.
    pub fn bind(self, remote: &Arc<Remote>) {
        *locked(&self.made) = Arc::downgrade(remote);
        remote.set_recipe(Some(Arc::new(self)));
    }

    /// Binds it to the tensor it makes, or to none: what the tensor now holds, this does not make.
    pub fn rebind(&self, remote: Option<&Arc<Remote>>) {
        *locked(&self.made) = remote.map(Arc::downgrade).unwrap_or_default();
    }

    /// The tensor it made, while somebody has it.
    pub fn made(&self) -> Option<Arc<Remote>> {
        locked(&self.made).upgrade()
    }

    /// Notes what errors should say.
    pub fn describe(&self, spec: &TensorSpec, made: &'static str, name: Option<Arc<str>>) {
        let spec = Some(spec.clone());
        *locked(&self.about) = About { spec, made, name };
    }

    pub fn set_name(&self, name: Arc<str>) {
        locked(&self.about).name = Some(name);
    }

    /// Says the same as another one.
    pub fn describe_as(&self, other: &Recipe) {
        let About { spec, made, name } = &*locked(&other.about);
        if let Some(spec) = spec {
            self.describe(spec, made, name.clone());
        }
    }

    /// The tensor in words: its name if it has one, dtype and shape, how it was made.
    pub fn words(&self) -> String {
        let About { spec, made, name } = &*locked(&self.about);
        match (spec, &self.kind) {
            (Some(spec), _) => {
                let name = name.as_deref().map(|n| format!("{n:?}, "));
                format!("the tensor ({}{spec}, {made})", name.unwrap_or_default())
            }
            (None, Kind::Weight { model, name }) => format!("the weight {name} of {model}"),
            (None, _) => "a tensor".to_owned(),
        }
    }

    fn name(&self) -> Option<Arc<str>> {
        locked(&self.about).name.clone()
    }
}

fn too_many_bytes(ledger: &Ledger) -> String {
    format!(
        "it is made of more than the {} bytes that the session may hold for that",
        ledger.max_bytes
    )
}

/// Notes how the results of a call can be made again.
pub(super) fn note_call(
    ledger: &Arc<Ledger>,
    plan: &RemotePlan,
    rows: usize,
    inputs: &[Tensor],
    results: &[Arc<Remote>],
) {
    match call(ledger, plan, rows, inputs, results.len()) {
        Ok((call, depth)) => {
            for (output, remote) in results.iter().enumerate() {
                let call = Arc::clone(&call);
                Recipe::new(Kind::Result { call, output }, depth).bind(remote);
            }
        }
        Err(why) => results
            .iter()
            .for_each(|remote| Recipe::gone(&*why).bind(remote)),
    }
}

fn call(
    ledger: &Arc<Ledger>,
    plan: &RemotePlan,
    rows: usize,
    inputs: &[Tensor],
    outputs: usize,
) -> Result<(Arc<Call>, u32), String> {
    if !plan.graph.is_pure() {
        return Err("the call that made it had effects besides, and is done once only".to_owned());
    }
    let full = || too_many_bytes(ledger);
    let mut sources = Vec::with_capacity(inputs.len());
    let mut depth = 0;
    for input in inputs {
        sources.push(match input.state() {
            State::Host { data, .. } => {
                let held = ledger.hold(data.bytes()).ok_or_else(full)?;
                Source::Data(held)
            }
            State::Remote(remote) => {
                let recipe = remote.recipe();
                let recipe = recipe.ok_or("what it was made of has no recipe")?;
                depth = depth.max(recipe.depth);
                Source::Tensor(recipe)
            }
            _ => return Err("what it was made of has no value".to_owned()),
        });
    }
    if depth >= limits::MAX_RECIPE_DEPTH {
        return Err(format!(
            "more than {} calls, each of which needs the one before, made it; Tensor::checkpoint in between avoids that",
            limits::MAX_RECIPE_DEPTH
        ));
    }
    let graph = ledger.hold(plan.graph.bytes()).ok_or_else(full)?;
    {
        let mut books = locked(&ledger.books);
        if books.calls >= limits::MAX_RECIPE_CALLS {
            return Err(format!(
                "the session remembers {} calls already; Tensor::checkpoint avoids that",
                limits::MAX_RECIPE_CALLS
            ));
        }
        books.calls += 1;
    }
    let call = Call {
        graph: plan.graph.clone(),
        rows,
        outputs,
        inputs: sources,
        _graph: graph,
        ledger: Arc::clone(ledger),
    };
    Ok((Arc::new(call), depth + 1))
}

/// One thing to do so that tensors have values again.
pub(super) enum Step {
    /// Makes a tensor out of what this process or the host holds.
    Make(Arc<Recipe>),
    /// Executes a call, of whose results these are needed.
    Execute(Arc<Call>, Vec<(usize, Arc<Recipe>)>),
}

/// What has to be done, in order.
pub(super) struct Steps {
    pub steps: Vec<Step>,
    /// What has a value, by its recipe; held so that it keeps it.
    pub there: HashMap<usize, Arc<Remote>>,
    /// By how many inputs of the steps' calls each recipe's value is read.
    pub uses: HashMap<usize, usize>,
}

pub(super) fn address<T>(of: &Arc<T>) -> usize {
    Arc::as_ptr(of) as usize
}

impl Steps {
    /// What to do so that tensors have values over this connection.
    ///
    /// # Errors
    /// [`Reason::TensorLost`] naming one that cannot, and why.
    pub fn plan(at: &Connection, wanted: &[Arc<Remote>]) -> Result<Self, Error> {
        let mut plan = Self {
            steps: vec![],
            there: HashMap::new(),
            uses: HashMap::new(),
        };
        let mut by_call: HashMap<usize, usize> = HashMap::new();
        let mut seen = HashSet::new();
        for remote in wanted.iter().filter(|r| r.handle(at).is_none()) {
            let recipe = remote.recipe().ok_or_else(super::connection::moved)?;
            // A recipe is pushed once to be entered and once to be left.
            let mut stack = vec![(Arc::clone(&recipe), false)];
            while let Some((this, done)) = stack.pop() {
                if done {
                    plan.leave(this, &mut by_call);
                    continue;
                }
                if !seen.insert(address(&this)) {
                    continue;
                }
                if let Some(made) = this.made().filter(|m| m.handle(at).is_some()) {
                    plan.there.insert(address(&this), made);
                    continue;
                }
                match &this.kind {
                    Kind::Gone(why) => return Err(lost(&recipe, &this, why)),
                    Kind::Result { call, .. } => {
                        let inputs: Vec<Arc<Recipe>> = call.tensors().cloned().collect();
                        stack.push((this, true));
                        stack.extend(inputs.into_iter().rev().map(|i| (i, false)));
                    }
                    _ => plan.steps.push(Step::Make(this)),
                }
            }
        }
        Ok(plan)
    }

    /// What a recipe needs is there: the call can be executed.
    fn leave(&mut self, recipe: Arc<Recipe>, by_call: &mut HashMap<usize, usize>) {
        let Kind::Result { call, output } = &recipe.kind else {
            return;
        };
        let wanted = (*output, Arc::clone(&recipe));
        let known = by_call.get(&address(call)).copied();
        if let Some(Step::Execute(_, outputs)) = known.and_then(|i| self.steps.get_mut(i)) {
            outputs.push(wanted);
            return;
        }
        for input in call.tensors() {
            *self.uses.entry(address(input)).or_default() += 1;
        }
        by_call.insert(address(call), self.steps.len());
        self.steps
            .push(Step::Execute(Arc::clone(call), vec![wanted]));
    }
}

impl Call {
    pub fn tensors(&self) -> impl Iterator<Item = &Arc<Recipe>> {
        self.inputs.iter().filter_map(|source| match source {
            Source::Tensor(recipe) => Some(recipe),
            Source::Data(_) => None,
        })
    }
}

fn lost(wanted: &Arc<Recipe>, gone: &Arc<Recipe>, why: &str) -> Error {
    let what = match Arc::ptr_eq(wanted, gone) {
        true => format!("{} died with its worker: {why}", wanted.words()),
        false => format!(
            "{} died with its worker: it was made of another one, {}, which cannot be made again: {why}",
            wanted.words(),
            gone.words()
        ),
    };
    let error = Error::new(Reason::TensorLost, what);
    match gone.name().or(wanted.name()) {
        Some(name) => error.with("tensor", name),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(of: &[u8]) -> HostTensor {
        HostTensor::from_slice(of, &[of.len()]).unwrap()
    }

    fn bytes(ledger: &Ledger) -> usize {
        locked(&ledger.books).bytes
    }

    #[test]
    fn bytes_count_once_and_no_longer_than_they_are_held() {
        let ledger = Ledger::new(100);
        let (first, second) = (data(&[1; 60]), data(&[2; 60]));
        let held = [
            Recipe::host(&ledger, &first),
            Recipe::host(&ledger, &first.clone()),
        ];
        assert_eq!(bytes(&ledger), 60);
        assert!(held.iter().all(|r| matches!(r.kind, Kind::Host(..))));
        let refused = Recipe::host(&ledger, &second);
        assert!(matches!(&refused.kind, Kind::Gone(why) if why.contains("100 bytes")));
        assert_eq!(bytes(&ledger), 60);
        let [one, two] = held;
        drop(one);
        assert_eq!(bytes(&ledger), 60);
        drop(two);
        assert_eq!(bytes(&ledger), 0);
        let taken = Recipe::host(&ledger, &second);
        assert!(matches!(taken.kind, Kind::Host(..)));
        let nothing = Recipe::host(&ledger, &data(&[]));
        assert!(matches!(nothing.kind, Kind::Host(..)));
    }

    #[test]
    fn a_long_way_back_is_dropped_without_a_stack_of_its_length() {
        let ledger = Ledger::new(1 << 20);
        let graph = PlanKey::new(vec![1, 2, 3], true);
        let mut recipe = Arc::new(Recipe::host(&ledger, &data(&[1])));
        for depth in 0..1_000_000 {
            locked(&ledger.books).calls += 1;
            let call = Call {
                graph: graph.clone(),
                rows: 0,
                outputs: 1,
                inputs: vec![Source::Tensor(recipe)],
                _graph: ledger.hold(graph.bytes()).unwrap(),
                ledger: Arc::clone(&ledger),
            };
            let (call, output) = (Arc::new(call), 0);
            recipe = Arc::new(Recipe::new(Kind::Result { call, output }, depth));
        }
        assert_eq!(bytes(&ledger), 4);
        drop(recipe);
        assert_eq!((bytes(&ledger), locked(&ledger.books).calls), (0, 0));
    }
}
