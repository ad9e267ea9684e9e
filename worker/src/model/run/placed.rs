//! Where a model's weights are: each by itself, or all in device memory that outlives this process.

use std::{collections::HashMap, ops::Range, rc::Rc};

use hotcell_kernels::{
    backend::{Buffer, Device, DeviceError, HostRegion},
    vault::{Kept, Vault, Wish},
};
use sha2::{Digest, Sha256};

use super::{
    super::{
        constants::{found, stack, stack_bytes},
        weave::{Source, Sourced},
    },
    RunError, WeightRegion,
};
use crate::weights::{ModelSource, Weights};

/// What is wanted of device memory that outlives this process.
#[derive(Debug, Default)]
pub enum Keeping {
    /// Nothing: weights are this process's own.
    #[default]
    Nothing,
    /// Weights are put there, and found there if this is what an earlier process left: of each member of a communicator, by
    /// their ranks; a process takes the first for its own.
    Weights(Vec<Kept>),
}

/// What became of it.
#[derive(Debug, Default)]
pub struct Keeps {
    /// What whoever holds it does not know yet, of each member; none: it knows all of it, or there is nothing.
    pub kept: Vec<Kept>,
    /// Whether the weights were where an earlier process had left them.
    pub found: bool,
    /// Whether what an earlier process left is not what it was.
    pub damaged: bool,
    /// Bytes of them.
    pub bytes: u64,
}

/// Weights as they are needed, each once.
pub(super) struct Placed<'a> {
    device: &'a dyn Device,
    weights: &'a Weights,
    vault: Option<Box<dyn Vault>>,
    /// Of the vault's weights.
    numbers: HashMap<String, usize>,
    made: HashMap<String, Buffer>,
    found: bool,
    /// Bytes of the vault's weights.
    bytes: usize,
}

/// What a weight goes by; none of what is computed anew every time.
fn key(source: &Source) -> Option<String> {
    match source {
        // No name has a line's end in it, or this is one of its own.
        Source::Weight { name, rows } => Some(piece_key(name, rows.as_ref())),
        Source::Stack(pieces) => {
            let all = pieces.iter().map(|p| piece_key(&p.name, p.rows.as_ref()));
            Some(all.collect::<Vec<_>>().join("\n"))
        }
        _ => None,
    }
}

fn piece_key(name: &str, rows: Option<&Range<usize>>) -> String {
    match rows {
        None => name.to_owned(),
        Some(rows) => format!("{name}\n{}..{}", rows.start, rows.end),
    }
}

fn bytes(weights: &Weights, source: &Source) -> Result<usize, RunError> {
    match source {
        Source::Stack(pieces) => stack_bytes(weights, pieces),
        Source::Weight { name, rows } => Ok(found(weights, name, rows.as_ref())?.range.len()),
        _ => Ok(0),
    }
}

impl<'a> Placed<'a> {
    /// For the weights of these graphs.
    ///
    /// # Errors
    /// When a tensor is missing, or there is no memory.
    pub fn new(
        device: &'a dyn Device,
        source: &'a ModelSource,
        graphs: &[&Sourced],
        keeping: Keeping,
    ) -> Result<Self, RunError> {
        let mut placed = Self {
            device,
            weights: &source.weights,
            vault: None,
            numbers: HashMap::new(),
            made: HashMap::new(),
            found: false,
            bytes: 0,
        };
        let Keeping::Weights(kept) = keeping else {
            return Ok(placed);
        };
        let mut sizes = Vec::new();
        let mut hash = Sha256::new();
        hash.update(source.weights.fingerprint().to_le_bytes());
        for from in graphs.iter().flat_map(|graph| &graph.sources) {
            let Some(key) = key(from).filter(|key| !placed.numbers.contains_key(key)) else {
                continue;
            };
            let bytes = bytes(&source.weights, from)?;
            hash.update((key.len() as u64).to_le_bytes());
            hash.update(&key);
            hash.update((bytes as u64).to_le_bytes());
            placed.numbers.insert(key, sizes.len());
            sizes.push(bytes);
        }
        let layout: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        let wish = Wish {
            layout: &layout,
            sizes: &sizes,
        };
        // One process's own is the only one.
        placed.vault = device.vault(&wish, kept.into_iter().next())?;
        placed.bytes = sizes.iter().sum();
        Ok(placed)
    }

    /// The buffer of a weight, or of several copied together.
    ///
    /// # Errors
    /// When a tensor is missing, or memory is short.
    pub fn buffer(&mut self, source: &Source, progressed: &dyn Fn()) -> Result<Buffer, RunError> {
        let key = key(source).ok_or_else(no_weight)?;
        if let Some(made) = self.made.get(&key) {
            return Ok(made.clone());
        }
        let number = self.numbers.get(&key).copied();
        let buffer = match (&mut self.vault, number) {
            (Some(vault), Some(number)) => match vault.find(number) {
                Some(found) => {
                    self.found = true;
                    found
                }
                None => {
                    let region = region(self.weights, source, progressed)?;
                    let put = vault.put(number, region.bytes())?;
                    // Nobody has read the files before, if it was hoped to find it.
                    progressed();
                    put
                }
            },
            _ => self
                .device
                .import(region(self.weights, source, progressed)?)?,
        };
        self.made.insert(key, buffer.clone());
        Ok(buffer)
    }

    /// Ends it, when all weights are in use.
    pub fn close(self) -> Keeps {
        let damaged = self.vault.as_ref().is_some_and(|vault| vault.is_damaged());
        let closed: Result<Option<Kept>, DeviceError> =
            self.vault.map_or(Ok(None), |vault| vault.close());
        Keeps {
            found: self.found,
            damaged,
            bytes: self.bytes as u64,
            kept: match closed {
                Ok(kept) => kept.into_iter().collect(),
                Err(error) => {
                    tracing::warn!(%error, "weights end with this process");
                    Vec::new()
                }
            },
        }
    }
}

/// The bytes of a weight in place, or of several in a copy.
fn region(
    weights: &Weights,
    source: &Source,
    progressed: &dyn Fn(),
) -> Result<Rc<dyn HostRegion>, RunError> {
    match source {
        Source::Stack(pieces) => stack(weights, pieces, progressed),
        Source::Weight { name, rows } => {
            let weight = found(weights, name, rows.as_ref())?;
            Ok(Rc::new(WeightRegion(weight)))
        }
        _ => Err(no_weight()),
    }
}

fn no_weight() -> RunError {
    DeviceError::Binding("an input that is computed was taken for a weight".to_owned()).into()
}
