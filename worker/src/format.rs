//! Model files, read as if every author were an enemy.
//!
//! Nothing here copies tensor data or trusts a length: a reader checks every number against the bytes that
//! are really there and against [`limits`] before it uses it, allocates no more than a small multiple of
//! those bytes, and answers bad input with an error that names the thing. Contents come as plain byte slices
//! of a mapping; a reader remembers positions, and looks each one up again with bounds checks, so that a
//! file changed behind the mapping gives wrong values or an error, never a wild read.

pub mod gguf;
pub mod limits;
pub mod open;
pub mod safetensors;

#[cfg(test)]
pub(crate) mod gguf_testing;

use std::ops::Range;

use hotcell_graph::DType;

/// Why a set of files could not be opened as a model. The variants are grouped by whom they concern, so that
/// a service can turn each into one status; every message is one sentence that names the thing and the way out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The files given are not a model at all.
    #[error("this is not a model: {what}")]
    NotAModel {
        /// What was found, and what would be a model.
        what: String,
    },
    /// A file that the others need is not among those given.
    #[error("{file} is missing: {why}")]
    MissingFile {
        /// The missing file's name.
        file: String,
        /// Who needs it, and what to do.
        why: String,
    },
    /// A tensor that the model needs is in none of its files.
    #[error(
        "tensor '{tensor}' is missing; the download is incomplete or the model is of another architecture"
    )]
    MissingTensor {
        /// The tensor's name.
        tensor: String,
    },
    /// The model is well formed, but Hotcell cannot run it.
    #[error("{file}: {what}")]
    Unsupported {
        /// The file that says so.
        file: String,
        /// The feature, and what could be used instead.
        what: String,
    },
    /// A file contradicts its format or itself.
    #[error("{file} is damaged: {what}")]
    Corrupt {
        /// The damaged file.
        file: String,
        /// What is wrong, where.
        what: String,
    },
    /// A tensor's shape is not the one that the configuration calls for.
    #[error(
        "tensor '{tensor}' has shape {found:?} but the model's configuration calls for {expected:?}; \
         weights and configuration are of different models"
    )]
    ShapeMismatch {
        /// The tensor's name.
        tensor: String,
        /// The shape the configuration calls for, outermost dimension first.
        expected: Vec<usize>,
        /// The shape in the file, outermost dimension first.
        found: Vec<usize>,
    },
    /// Something is past a limit of [`limits`].
    #[error("{file} is too large: {what}")]
    TooLarge {
        /// The file.
        file: String,
        /// The thing that is too large, and the limit.
        what: String,
    },
}

/// The dtype that a file gives a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoredDType {
    /// One that Hotcell computes with.
    Known(DType),
    /// One that the format knows, and Hotcell does not; its name, for messages.
    Other(String),
}

/// A tensor as a file describes it. The range is checked: it lies inside the file, and its length is what
/// dtype and shape call for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// Its name in the file.
    pub name: String,
    /// Its element type.
    pub dtype: StoredDType,
    /// Its shape in NumPy order, outermost dimension first.
    pub shape: Vec<usize>,
    /// Its bytes, counted from the beginning of the file.
    pub range: Range<usize>,
}

/// A name from a file, fit for a message: quoted, control characters escaped, cut to 80 characters.
pub(crate) fn shown(name: &str) -> String {
    let mut chars = name.chars();
    let head: String = chars.by_ref().take(80).collect();
    let more = if chars.next().is_some() { "…" } else { "" };
    format!("'{}{more}'", head.escape_debug())
}
