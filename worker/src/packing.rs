//! Weights in the layout that the device computes from fastest: packing them for the scheduler, piece by piece, and
//! computing from the copies that it made of the pieces.
//!
//! A copy is as long as the file, and has each packed matrix where the file has it, but for less than a cache line: see
//! [`Places`]. What is packed gives the same bits, so that nobody sees when a worker changes from one to the other.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Range,
    os::fd::OwnedFd,
    sync::Arc,
};

use hotcell_graph::DType;
use hotcell_ipc::{
    blackbox::{Packing, Writer},
    memory::{Mapping, SharedMapping},
};
use hotcell_kernels::{
    cpu::pack::{LAYOUT, PANEL, pack, packs},
    memory::ALIGNMENT,
};
use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::{
    host::{Loaded, map_file},
    weights::{ModelFile, Weight, Weights},
};

/// How much less urgent packing is than computing: as little as can be.
const NICE: i32 = 19;

/// Whether a tensor has a packed form.
pub fn is_packable(weight: &Weight) -> bool {
    matrix(weight).is_some()
}

/// Rows, columns and bytes of a row of a tensor that has a packed form: a matrix, or several of one shape, such as those of
/// experts, whose rows are whole panels.
fn matrix(weight: &Weight) -> Option<(usize, usize, usize)> {
    let (n, k) = match *weight.shape.as_slice() {
        [n, k] => (n, k),
        [count, n, k] if n.is_multiple_of(PANEL) => (count.checked_mul(n)?, k),
        _ => return None,
    };
    let stride = weight.range.len().checked_div(n)?;
    let fits = (1..=limits::PACK_PIECE / PANEL).contains(&stride);
    (fits && packs(weight.dtype, n, k) && weight.dtype.row_bytes(k) == Some(stride))
        .then_some((n, k, stride))
}

/// A matrix that the device likes packed.
#[derive(Clone)]
struct Matrix {
    name: String,
    /// Its file's index.
    file: u32,
    weight: Weight,
    rows: usize,
    columns: usize,
    stride: usize,
    /// Where it begins in the copy.
    place: usize,
}

impl Matrix {
    /// The bytes of these rows, in their file.
    fn range(&self, rows: &Range<usize>) -> Range<usize> {
        let start = self.weight.range.start;
        start + rows.start * self.stride..start + rows.end * self.stride
    }

    /// The same in the copy.
    fn range_in_copy(&self, rows: &Range<usize>) -> Range<usize> {
        self.place + rows.start * self.stride..self.place + rows.end * self.stride
    }

    /// Packs rows, of which the first is a panel's, into memory of their size.
    fn pack(&self, rows: &Range<usize>, into: &mut [u8]) {
        let dtype: DType = self.weight.dtype;
        if let Some(raw) = self.weight.mapping.bytes().get(self.range(rows)) {
            pack(dtype, self.columns, raw, into);
        }
    }
}

/// Where the copies of a model's files have their weights: each as much before its place in the file as the first one begins
/// after a cache line. So panels' lines are whole ones of the memory, unless a weight's are not as the first one's. It depends on
/// the file alone, whoever packs or reads which part of it.
pub struct Places(Vec<(Mapping, usize)>);

impl Places {
    /// Those of these weights' files.
    pub fn of(weights: &Weights) -> Self {
        let lead_of = |file: &ModelFile| {
            let here = weights.iter().filter(|(_, w)| file.mapping.is(&w.mapping));
            let first = here.map(|(_, weight)| weight.range.start).min();
            (file.mapping.clone(), first.unwrap_or(0) % ALIGNMENT)
        };
        Self(weights.files().iter().map(lead_of).collect())
    }

    /// The bytes of a weight in its copy.
    pub fn range(&self, weight: &Weight) -> Range<usize> {
        let known = self.0.iter().find(|(file, _)| file.is(&weight.mapping));
        let lead = known.map_or(0, |(_, lead)| *lead).min(weight.range.start);
        weight.range.start - lead..weight.range.end - lead
    }
}

/// What of a model the device likes packed.
#[derive(Default)]
pub struct Wanted {
    /// In the order of the files, and of the places in them.
    matrices: Vec<Matrix>,
}

impl fmt::Debug for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} matrices", self.matrices.len())
    }
}

impl Wanted {
    /// Those of `names` that have a packed form.
    pub fn new(files: &[ModelFile], weights: &Weights, names: &BTreeSet<String>) -> Self {
        let places = Places::of(weights);
        let find = |name: &String| {
            let weight = weights.get(name).ok()?.clone();
            let (rows, columns, stride) = matrix(&weight)?;
            let place = places.range(&weight).start;
            let holds = |file: &ModelFile| file.mapping.is(&weight.mapping);
            Some(Matrix {
                name: name.clone(),
                file: u32::try_from(files.iter().position(holds)?).ok()?,
                weight,
                rows,
                columns,
                stride,
                place,
            })
        };
        let mut matrices: Vec<_> = names.iter().filter_map(find).collect();
        matrices.sort_by_key(|m| (m.file, m.weight.range.start));
        Self { matrices }
    }

    /// The layout; empty if nothing is wanted.
    pub fn layout(&self) -> &'static str {
        match self.matrices.is_empty() {
            true => "",
            false => LAYOUT,
        }
    }

    /// The files that hold them, by index.
    pub fn files(&self) -> Vec<u32> {
        let files: BTreeSet<u32> = self.matrices.iter().map(|m| m.file).collect();
        files.into_iter().collect()
    }

    /// The same weights in their copies.
    ///
    /// # Errors
    /// [`Reason::ModelChanged`] when a copy is missing or, as far as a look at a few rows of each matrix tells, is none.
    pub fn packed(&self, copies: &Copies) -> Result<BTreeMap<String, Weight>, Error> {
        let refused = |what: String| Error::new(Reason::ModelChanged, what);
        let mut panel = Vec::new();
        let mut packed = BTreeMap::new();
        for matrix in &self.matrices {
            let name = &matrix.name;
            let copy = copies.of(matrix.file);
            let copy = copy.ok_or_else(|| refused(format!("no packed copy of {name} came")))?;
            if copy.len() != matrix.weight.mapping.len() {
                return Err(refused(format!(
                    "the packed copy of {name} is of another length"
                )));
            }
            // The first rows, and some that are different ones in each matrix.
            let some = matrix.weight.range.start.wrapping_mul(0x9e37_79b9) % (matrix.rows / PANEL);
            for at in [0, some] {
                let rows = at * PANEL..(at + 1) * PANEL;
                panel.resize(PANEL * matrix.stride, 0);
                matrix.pack(&rows, &mut panel);
                if copy.bytes().get(matrix.range_in_copy(&rows)) != Some(&panel[..]) {
                    let what = format!("the packed copy of {name} is not what was packed");
                    return Err(refused(what));
                }
            }
            let weight = Weight {
                mapping: copy.clone(),
                range: matrix.range_in_copy(&(0..matrix.rows)),
                ..matrix.weight.clone()
            };
            packed.insert(name.clone(), weight);
        }
        Ok(packed)
    }

    /// Lets go of the pages in which the originals lie.
    pub fn forget(&self) {
        for matrix in &self.matrices {
            let range = matrix.weight.range.clone();
            if let Err(error) = matrix.weight.mapping.forget(range) {
                tracing::debug!(name = matrix.name, %error, "pages are kept");
            }
        }
    }
}

/// Packed copies of some of a model's files.
#[derive(Clone, Debug, Default)]
pub struct Copies(Vec<(u32, Mapping)>);

impl Copies {
    /// Maps copies. Those in a layout that is not this device's are left.
    ///
    /// # Errors
    /// When they cannot be mapped, or are not as many as was said.
    pub fn map(packed: v1::PackedFiles, fds: Vec<OwnedFd>) -> Result<Self, Error> {
        if packed.files.len() != fds.len() {
            let what = format!(
                "{} descriptors came for {} packed files",
                fds.len(),
                packed.files.len()
            );
            return Err(Error::new(Reason::ProtocolViolation, what));
        }
        if packed.layout != LAYOUT {
            return Ok(Self::default());
        }
        let copies = packed.files.into_iter().zip(fds);
        let map = |(file, fd)| Ok((file, map_file("a packed copy".to_owned(), fd)?.mapping));
        Ok(Self(copies.map(map).collect::<Result<_, Error>>()?))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The copy of a file.
    pub fn of(&self, file: u32) -> Option<&Mapping> {
        let mut copies = self.0.iter();
        copies.find(|(of, _)| *of == file).map(|(_, copy)| copy)
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Mapping> {
        self.0.iter().map(|(_, copy)| copy)
    }
}

/// Packs a model's weights, a piece for each time that it is asked.
pub struct Packer {
    model: Arc<Loaded>,
    matrices: Vec<Matrix>,
    memory: SharedMapping,
    /// The matrix and row that come next.
    at: (usize, usize),
    done: u64,
    total: u64,
    piece: Vec<u8>,
    _one: OwnedSemaphorePermit,
}

impl Packer {
    /// Begins with the matrices in these files. `one` is the right to do so, one at a time.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when the memory is too small for a piece.
    pub fn new(
        model: Arc<Loaded>,
        files: &[u32],
        memory: SharedMapping,
        one: OwnedSemaphorePermit,
    ) -> Result<Self, Error> {
        if memory.len() < limits::PACK_PIECE {
            let what = format!("pieces need {} bytes of memory", limits::PACK_PIECE);
            return Err(Error::new(Reason::InvalidArgument, what));
        }
        let matrices = model.packing.matrices.iter();
        let matrices: Vec<_> = matrices
            .filter(|m| files.contains(&m.file))
            .cloned()
            .collect();
        let total = matrices.iter().map(|m| m.weight.range.len() as u64).sum();
        Ok(Self {
            model,
            matrices,
            memory,
            at: (0, 0),
            done: 0,
            total,
            piece: Vec::new(),
            _one: one,
        })
    }

    /// Packs for as long as somebody asks, on a thread of its own.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
        self,
        blackbox: Writer,
        asked: mpsc::Receiver<()>,
        pieces: mpsc::Sender<Result<v1::PackPiece, Error>>,
    ) -> std::io::Result<()> {
        let named = std::thread::Builder::new().name("packer".to_owned());
        named.spawn(move || self.run(&blackbox.packs(), asked, &pieces))?;
        Ok(())
    }

    fn run(
        mut self,
        progress: &Packing,
        mut asked: mpsc::Receiver<()>,
        pieces: &mpsc::Sender<Result<v1::PackPiece, Error>>,
    ) {
        // Only this thread's. Where that is not allowed it packs all the same.
        if let Err(error) = rustix::process::setpriority_process(None, NICE) {
            tracing::debug!(%error, "packing is as urgent as computing");
        }
        while let Some(()) = asked.blocking_recv() {
            let piece = self.next();
            progress.done(self.done);
            let over = !matches!(&piece, Ok(piece) if piece.bytes > 0);
            if pieces.blocking_send(piece).is_err() || over {
                return;
            }
        }
    }

    /// Puts the next piece into the memory.
    fn next(&mut self) -> Result<v1::PackPiece, Error> {
        if self.model.is_gone() {
            let what = format!("model {} was unloaded", self.model.name);
            return Err(Error::new(Reason::ModelNotFound, what));
        }
        let (index, row) = self.at;
        let mut piece = v1::PackPiece {
            bytes_done: self.done,
            bytes_total: self.total,
            ..v1::PackPiece::default()
        };
        let Some(matrix) = self.matrices.get(index) else {
            return Ok(piece);
        };
        let most = limits::PACK_PIECE / (matrix.stride * PANEL) * PANEL;
        let rows = row..matrix.rows.min(row + most);
        let range = matrix.range(&rows);
        self.piece.resize(range.len(), 0);
        matrix.pack(&rows, &mut self.piece);
        let written = self.memory.write(0, &self.piece);
        written.map_err(|e| Error::new(Reason::Internal, format!("a piece is lost: {e}")))?;
        self.at = match rows.end == matrix.rows {
            true => (index + 1, 0),
            false => (index, rows.end),
        };
        self.done += range.len() as u64;
        piece.file = matrix.file;
        piece.offset = matrix.range_in_copy(&rows).start as u64;
        piece.bytes = range.len() as u64;
        piece.bytes_done = self.done;
        Ok(piece)
    }
}
