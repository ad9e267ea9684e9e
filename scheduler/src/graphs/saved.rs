//! What is kept of one saved graph.

use std::{
    collections::HashSet,
    fs::File,
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hotcell_ipc::memory::{is_immutable, seal};
use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{self, HeldGraph, NamedTensor, SaveGraphHead, SavedGraph, TensorSpec, dim::Kind},
};
use prost::Message;
use sha2::{Digest, Sha256};

use super::{
    constants::{Constants, no_memory},
    suspect::Suspect,
};
use crate::{access::Held, discover::clip};

/// Inputs or outputs of one call: as many as the doors take, and as many pieces of memory as a session shares.
const MAX_PORTS: usize = 32;
/// Constants of one graph.
const MAX_CONSTANTS: usize = limits::MAX_OP_INPUTS;
/// All of these.
pub(super) const MAX_VALUES: usize = 2 * MAX_PORTS + MAX_CONSTANTS;
/// Bytes that are read at once.
const PIECE: usize = limits::TENSOR_CHUNK;

/// An input or output of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    /// Unique among the inputs, or the outputs.
    pub name: String,
    /// As a worker told of it.
    pub spec: TensorSpec,
    /// Bytes with one row, and in how many axes the rows are: bytes with more are their power as many times.
    pub unit: u64,
    /// See `unit`.
    pub row_axes: u32,
}

impl Port {
    /// The sizes of its axes; none where the rows are.
    pub fn axes(&self) -> impl Iterator<Item = Option<u64>> {
        self.spec.dims.iter().map(|dim| match dim.kind {
            Some(Kind::Fixed(size)) => Some(size),
            _ => None,
        })
    }

    /// Bytes with so many rows; none if that is no number.
    pub fn bytes(&self, rows: u64) -> Option<u64> {
        rows.checked_pow(self.row_axes)?.checked_mul(self.unit)
    }

    /// The same with so many rows and no symbol.
    pub fn at(&self, rows: u64) -> TensorSpec {
        let fixed = |size: Option<u64>| v1::Dim {
            kind: Some(Kind::Fixed(size.unwrap_or(rows))),
        };
        TensorSpec {
            dtype: self.spec.dtype.clone(),
            dims: self.axes().map(fixed).collect(),
        }
    }
}

/// How a graph's inputs come, in its order.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// With each call: which of the call's.
    Call(usize),
    /// Once: what it is, and where in the memory its bytes begin.
    Constant {
        /// What it is.
        spec: TensorSpec,
        /// Where.
        at: u64,
        /// How many bytes.
        bytes: u64,
    },
}

/// What a worker said of a graph.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// As its answer to Compile.
    pub compiled: v1::CompileResponse,
    /// Bytes of each input and output, with one row.
    pub inputs: Vec<u64>,
    /// See `inputs`.
    pub outputs: Vec<u64>,
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(Reason::InvalidArgument, what)
}

/// One saved graph.
#[derive(Debug)]
pub struct Saved {
    /// Unique in this process.
    pub id: u64,
    /// Its name.
    pub name: ModelName,
    /// Whose it is.
    pub tenant: String,
    /// The inputs that each call brings.
    pub inputs: Vec<Port>,
    /// What comes out.
    pub outputs: Vec<Port>,
    /// Rows at most; 0 if it has no symbolic dimension.
    pub max_rows: u64,
    /// All inputs in the graph's order.
    pub(super) all: Vec<Input>,
    sha256: [u8; 32],
    /// The constants, the graph, and what [`Tail`] holds.
    memory: File,
    /// Where the graph begins.
    graph: u64,
    /// Where it ends.
    bytes: u64,
    /// What is known against it.
    pub(crate) suspect: Suspect,
    _held: Held,
    _counted: Option<Counted>,
}

/// Bytes that are there.
#[derive(Debug)]
struct Counted {
    bytes: u64,
    there: Arc<AtomicU64>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.there.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Reads a file from its beginning, whatever its offset.
struct Reader<'a> {
    file: &'a File,
    at: u64,
}

impl io::Read for Reader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// What lies after the constants and the graph: two messages, sizes, a digest, and at the very end the lengths of all.
struct Tail {
    /// Without the graph.
    head: SaveGraphHead,
    compiled: v1::CompileResponse,
    sizes: Vec<u64>,
    sha256: [u8; 32],
    tenant: String,
}

/// Bytes of the constants, the graph, and the tail's parts.
type Lengths = [u64; 7];
const LENGTHS: usize = size_of::<Lengths>();

fn handed() -> Error {
    Error::new(Reason::Internal, "a saved graph was not handed over whole")
}

impl Tail {
    fn encode(&self, constants: u64, graph: u64) -> Vec<u8> {
        let sizes: Vec<u8> = self.sizes.iter().flat_map(|n| n.to_le_bytes()).collect();
        let parts = [
            self.head.encode_to_vec(),
            self.compiled.encode_to_vec(),
            sizes,
            self.sha256.to_vec(),
            self.tenant.clone().into_bytes(),
        ];
        let lengths = parts.iter().map(|part| part.len() as u64);
        let lengths = [constants, graph].into_iter().chain(lengths);
        let lengths: Vec<u8> = lengths.flat_map(u64::to_le_bytes).collect();
        let mut all = parts.concat();
        all.extend(lengths);
        all
    }

    /// The tail of such memory, and how many bytes the constants and the graph have.
    fn read(memory: &File) -> Result<(Self, u64, u64), Error> {
        let all = memory.metadata().map_err(|_| handed())?.len();
        let mut lengths = [0; LENGTHS];
        let end = all.checked_sub(LENGTHS as u64).ok_or_else(handed)?;
        memory
            .read_exact_at(&mut lengths, end)
            .map_err(|_| handed())?;
        let numbers = |bytes: &[u8]| -> Vec<u64> {
            let numbers = bytes.as_chunks::<8>().0.iter();
            numbers.map(|bytes| u64::from_le_bytes(*bytes)).collect()
        };
        let lengths = numbers(&lengths);
        let [constants, graph, head, compiled, sizes, sha, tenant] = lengths[..] else {
            return Err(handed());
        };
        let sum = lengths.iter().try_fold(0u64, |sum, n| sum.checked_add(*n));
        if sum != Some(end) {
            return Err(handed());
        }
        let mut from = constants + graph;
        let mut part = |bytes: u64| -> Result<Vec<u8>, Error> {
            let most = (limits::MAX_GRAPH_BYTES as u64).saturating_mul(4);
            let size = usize::try_from(bytes).ok().filter(|_| bytes <= most);
            let mut part = vec![0; size.ok_or_else(handed)?];
            memory
                .read_exact_at(&mut part, from)
                .map_err(|_| handed())?;
            from += bytes;
            Ok(part)
        };
        let tail = Self {
            head: SaveGraphHead::decode(part(head)?.as_slice()).map_err(|_| handed())?,
            compiled: v1::CompileResponse::decode(part(compiled)?.as_slice())
                .map_err(|_| handed())?,
            sizes: numbers(&part(sizes)?),
            sha256: part(sha)?.try_into().map_err(|_| handed())?,
            tenant: String::from_utf8(part(tenant)?).map_err(|_| handed())?,
        };
        Ok((tail, constants, graph))
    }
}

/// How many of a spec's axes are rows.
fn row_axes(spec: &TensorSpec) -> u32 {
    let rows = |dim: &&v1::Dim| !matches!(dim.kind, Some(Kind::Fixed(_)));
    u32::try_from(spec.dims.iter().filter(rows).count()).unwrap_or(u32::MAX)
}

fn port(name: String, spec: &TensorSpec, unit: u64) -> Result<Port, Error> {
    if spec.dims.len() > limits::MAX_RANK
        || spec.dtype.len() > limits::MAX_LAYOUT
        || name.len() > limits::MAX_WORD
    {
        let what = format!("{:?} has no name, shape or dtype of use", clip(&name));
        return Err(invalid(what));
    }
    Ok(Port {
        name,
        row_axes: row_axes(spec),
        unit,
        spec: spec.clone(),
    })
}

/// The parts of a graph as its tail has them.
struct Parts {
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    all: Vec<Input>,
}

fn parts(tail: &Tail, constants: u64) -> Result<Parts, Error> {
    let compiled = &tail.compiled;
    let (inputs, outputs) = (compiled.inputs.len(), compiled.outputs.len());
    if tail.sizes.len() != inputs + outputs {
        return Err(Error::new(
            Reason::Internal,
            "the sizes of a saved graph are not those of its inputs and outputs",
        ));
    }
    let mut sizes = tail.sizes.iter().copied();
    let mut names = HashSet::new();
    let mut parts = Parts {
        inputs: Vec::new(),
        outputs: Vec::new(),
        all: Vec::with_capacity(inputs),
    };
    let mut at = 0u64;
    for input in &compiled.inputs {
        let bytes = sizes.next().unwrap_or_default();
        let Some(v1::graph_input::Spec::Tensor(spec)) = &input.spec else {
            return Err(invalid(format!(
                "input {:?} is a cache, and a saved graph keeps nothing from call to call",
                clip(&input.name)
            )));
        };
        if input.constant {
            if row_axes(spec) > 0 {
                let what = format!("the constant {:?} has rows", clip(&input.name));
                return Err(invalid(what));
            }
            parts.all.push(Input::Constant {
                spec: port(input.name.clone(), spec, bytes)?.spec,
                at,
                bytes,
            });
            at = at.saturating_add(bytes);
            continue;
        }
        if input.name.is_empty()
            || input.name.len() > limits::MAX_WORD
            || !names.insert(&input.name)
        {
            let what = format!("{:?} names no input, or two", clip(&input.name));
            return Err(invalid(what));
        }
        parts.all.push(Input::Call(parts.inputs.len()));
        parts.inputs.push(port(input.name.clone(), spec, bytes)?);
    }
    if at != constants {
        return Err(invalid(format!(
            "the constants have {at} bytes, and {constants} came; send them in the order of the graph's inputs"
        )));
    }
    let given = &tail.head.outputs;
    if !given.is_empty() && given.len() != outputs {
        return Err(invalid(format!(
            "{} names for the {outputs} outputs of the graph",
            given.len()
        )));
    }
    let mut names = HashSet::new();
    for (i, spec) in compiled.outputs.iter().enumerate() {
        let name = given.get(i).cloned();
        let name = name.unwrap_or_else(|| format!("output_{i}"));
        if name.is_empty() || name.len() > limits::MAX_WORD || !names.insert(name.clone()) {
            let what = format!("{:?} names no output, or two", clip(&name));
            return Err(invalid(what));
        }
        let bytes = sizes.next().unwrap_or_default();
        parts.outputs.push(port(name, spec, bytes)?);
    }
    for (what, count, limit) in [
        ("inputs", parts.inputs.len(), MAX_PORTS),
        ("outputs", parts.outputs.len(), MAX_PORTS),
        (
            "constants",
            parts.all.len() - parts.inputs.len(),
            MAX_CONSTANTS,
        ),
    ] {
        if count > limit {
            let what = format!("{count} {what} are more than the limit of {limit}");
            return Err(Error::new(Reason::LimitExceeded, what).with("limit", limit));
        }
    }
    if parts.outputs.is_empty() {
        return Err(invalid("nothing comes out of the graph"));
    }
    Ok(parts)
}

/// Names of outputs as they are hashed.
fn names<'a>(all: impl Iterator<Item = &'a str>) -> Vec<u8> {
    all.flat_map(|name| name.bytes().chain([0])).collect()
}

impl Saved {
    /// A graph as a client sent it and a worker found it.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] if names or constants do not fit, [`Reason::LimitExceeded`].
    pub fn new(
        name: ModelName,
        tenant: String,
        mut head: SaveGraphHead,
        constants: Constants,
        found: Found,
        held: Held,
    ) -> Result<Self, Error> {
        let Constants {
            file,
            bytes: constants,
            mut sha,
        } = constants;
        let graph = std::mem::take(&mut head.graph);
        sha.update(&graph);
        let mut tail = Tail {
            head,
            compiled: found.compiled,
            sizes: [found.inputs, found.outputs].concat(),
            sha256: [0; 32],
            tenant,
        };
        let parts = parts(&tail, constants)?;
        sha.update(names(parts.outputs.iter().map(|port| port.name.as_str())));
        tail.sha256 = sha.finalize().into();
        let bytes = graph.len() as u64;
        let written = file.write_all_at(&graph, constants).and_then(|()| {
            let end = constants + bytes;
            file.write_all_at(&tail.encode(constants, bytes), end)
        });
        written.map_err(|e| no_memory(&e))?;
        let memory = seal(&file).map_err(|e| no_memory(&e))?;
        Ok(Self::of(
            name,
            tail,
            parts,
            (memory, constants, bytes),
            held,
        ))
    }

    fn of(
        name: ModelName,
        tail: Tail,
        parts: Parts,
        (memory, constants, graph): (OwnedFd, u64, u64),
        held: Held,
    ) -> Self {
        Self {
            id: 0,
            name,
            tenant: tail.tenant,
            inputs: parts.inputs,
            outputs: parts.outputs,
            max_rows: tail.compiled.max_rows,
            all: parts.all,
            sha256: tail.sha256,
            memory: memory.into(),
            graph: constants,
            bytes: constants.saturating_add(graph),
            suspect: Suspect::default(),
            _held: held,
            _counted: None,
        }
    }

    /// Looks whether its bytes are those that were saved.
    ///
    /// # Errors
    /// [`Reason::Internal`] if they are not.
    pub(super) fn verify(&self) -> Result<(), Error> {
        let mut sha = Sha256::new();
        for (at, bytes) in self.offsets(0, self.bytes) {
            sha.update(self.read(at, bytes)?);
        }
        sha.update(names(self.outputs.iter().map(|port| port.name.as_str())));
        match <[u8; 32]>::from(sha.finalize()) == self.sha256 {
            true => Ok(()),
            false => Err(Error::new(
                Reason::Internal,
                "its bytes are not those that were saved",
            )),
        }
    }

    /// The same under a number, counted among the bytes that are `there` until it is dropped.
    pub(super) fn numbered(self, id: u64, there: Arc<AtomicU64>) -> Self {
        there.fetch_add(self.bytes, Ordering::Relaxed);
        let counted = Some(Counted {
            bytes: self.bytes,
            there,
        });
        Self {
            id,
            _counted: counted,
            ..self
        }
    }

    /// The same with what another program knew against it.
    pub(super) fn known_for(self, deaths: u32, blamed: Vec<v1::HeldProcess>) -> Self {
        Self {
            suspect: Suspect::restore(deaths, blamed),
            ..self
        }
    }

    /// Bytes of the graph and its constants.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of its memory.
    ///
    /// # Errors
    /// [`Reason::Internal`].
    pub(super) fn read(&self, at: u64, bytes: usize) -> Result<Vec<u8>, Error> {
        let gone = |e: io::Error| {
            let what = format!("graph {} cannot be read: {e}", self.name);
            Error::new(Reason::Internal, what)
        };
        let mut data = vec![0; bytes];
        self.memory.read_exact_at(&mut data, at).map_err(gone)?;
        Ok(data)
    }

    /// The graph, encoded.
    ///
    /// # Errors
    /// [`Reason::Internal`].
    pub(super) fn graph(&self) -> Result<Vec<u8>, Error> {
        let bytes = usize::try_from(self.bytes - self.graph).unwrap_or(usize::MAX);
        self.read(self.graph, bytes)
    }

    /// Where the pieces of a constant are, and how long each is.
    pub(super) fn offsets(
        &self,
        at: u64,
        bytes: u64,
    ) -> impl Iterator<Item = (u64, usize)> + use<> {
        let mut done = 0;
        std::iter::from_fn(move || {
            let left = usize::try_from(bytes - done).unwrap_or(usize::MAX);
            let next = left.min(PIECE);
            (next > 0).then(|| {
                let place = at + done;
                done += next as u64;
                (place, next)
            })
        })
    }

    /// What is told of it.
    pub fn told(&self) -> SavedGraph {
        let named = |ports: &[Port]| {
            let each = ports.iter().map(|port| NamedTensor {
                name: port.name.clone(),
                spec: Some(port.spec.clone()),
            });
            each.collect()
        };
        SavedGraph {
            name: self.name.to_string(),
            inputs: named(&self.inputs),
            outputs: named(&self.outputs),
            max_rows: self.max_rows,
            bytes: self.bytes,
            sha256: self.sha256.to_vec(),
            deaths: self.suspect.deaths(),
            refused: self.suspect.is_refused(),
        }
    }

    /// Writes all of it to a file, from which [`Saved::restore`] makes it again.
    ///
    /// # Errors
    /// What `write` reports.
    pub(super) fn copy_to(&self, file: &mut File) -> io::Result<()> {
        // Not by its own offset, which whoever it is handed to shares.
        let mut memory = Reader {
            file: &self.memory,
            at: 0,
        };
        io::copy(&mut memory, file).map(|_| ())
    }

    /// For another program, while this is held.
    pub fn hold(&self) -> HeldGraph {
        let (deaths, blamed) = self.suspect.hold();
        HeldGraph {
            memory: self.memory.as_raw_fd(),
            deaths,
            blamed,
        }
    }

    /// What another program held. `hold` is asked to count its bytes.
    ///
    /// # Errors
    /// [`Reason::Internal`] and others if it contradicts itself.
    pub(super) fn restore(
        memory: OwnedFd,
        hold: impl FnOnce(&str, u64) -> Held,
    ) -> Result<Self, Error> {
        if !is_immutable(&memory).unwrap_or(false) {
            return Err(handed());
        }
        let file = File::from(memory);
        let (tail, constants, graph) = Tail::read(&file)?;
        let name = ModelName::new(tail.head.name.as_str())?;
        let parts = parts(&tail, constants)?;
        let held = hold(&tail.tenant, constants.saturating_add(graph));
        let memory = (file.into(), constants, graph);
        Ok(Self::of(name, tail, parts, memory, held))
    }
}
