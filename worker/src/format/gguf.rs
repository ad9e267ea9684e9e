//! GGUF, versions 2 and 3, little endian: the reader.
//!
//! Layout (github.com/ggml-org/ggml, docs/gguf.md): magic, version, counts of tensors and entries; entries
//! {key, type, value}; tensor descriptions {name, dimensions, type, offset}; padding; data. [`Gguf::parse`]
//! builds an index of positions and copies nothing but keys and tensor names. Each published flaw of other
//! readers (sizes that wrap, block size 0, offsets past the end) has an error here and a test in `tests`.

mod value;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use hotcell_graph::DType;

use super::{ModelError, StoredDType, StoredTensor, limits, shown};
pub use value::{Array, Metadata, Strings, ValueType};
use value::{Slot, scalar};

/// What is wrong with a GGUF file. Names in the fields are already quoted and cut for display.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum GgufError {
    #[error("it does not begin with the letters GGUF")]
    BadMagic,
    #[error("it is big-endian; convert it to a little-endian file with gguf_convert_endian.py")]
    BigEndian,
    #[error("GGUF version {version} is not supported; convert the model to version 3")]
    UnsupportedVersion { version: u32 },
    #[error("it ends inside {what}; the download is incomplete")]
    Truncated { what: String },
    #[error("it claims {count} {what} where the limit is {limit}")]
    TooMany {
        what: &'static str,
        count: u64,
        limit: u64,
    },
    #[error("{what} claims {len} {unit} where the limit is {limit}")]
    TooLong {
        what: String,
        len: u64,
        unit: &'static str,
        limit: u64,
    },
    #[error("{what} is not UTF-8")]
    NotUtf8 { what: String },
    #[error("metadata entry {index} has an empty key")]
    EmptyKey { index: u64 },
    #[error("metadata key {key} occurs twice")]
    DuplicateKey { key: String },
    #[error("metadata key {key} has the unknown value type {id}")]
    UnknownValueType { key: String, id: u32 },
    #[error("metadata key {key} is an array of arrays, which GGUF readers do not accept")]
    NestedArray { key: String },
    #[error("metadata key {key} has a truth value that is neither 0 nor 1")]
    BadBool { key: String },
    #[error("metadata key {key} is of type {found} but should be {wanted}")]
    WrongType {
        key: String,
        found: &'static str,
        wanted: &'static str,
    },
    #[error("metadata key {key} is an array of {found} but should hold {wanted}")]
    WrongElements {
        key: String,
        found: &'static str,
        wanted: &'static str,
    },
    #[error("metadata key {key} does not fit into {wanted}")]
    ValueRange { key: String, wanted: &'static str },
    #[error("general.alignment is of type {found} but must be u32")]
    AlignmentType { found: &'static str },
    #[error("general.alignment is {alignment} but must be a power of two from 1 to {limit}")]
    BadAlignment { alignment: u32, limit: u32 },
    #[error("tensor {index} has an empty name")]
    EmptyTensorName { index: u64 },
    #[error("tensor name {name} occurs twice")]
    DuplicateTensor { name: String },
    #[error("tensor {name} has {dimensions} dimensions where the limit is {limit}")]
    TooManyDimensions {
        name: String,
        dimensions: u32,
        limit: u32,
    },
    #[error("tensor {name} has the negative dimension {dimension}")]
    NegativeDimension { name: String, dimension: i64 },
    #[error("tensor {name} has no elements")]
    NoElements { name: String },
    #[error("the size of tensor {name} overflows")]
    SizeOverflow { name: String },
    #[error("tensor {name} has the type {id}, which GGUF has removed; convert the model anew")]
    RemovedType { name: String, id: u32 },
    #[error("tensor {name} has the unknown type {id}")]
    UnknownType { name: String, id: u32 },
    #[error(
        "tensor {name} has rows of {row} elements, which is not a multiple of the {block} in a block of {dtype}"
    )]
    PartialBlock {
        name: String,
        row: u64,
        block: u64,
        dtype: &'static str,
    },
    #[error(
        "tensor {name} lies at offset {offset}, which is not a multiple of the alignment {alignment}"
    )]
    UnalignedOffset {
        name: String,
        offset: u64,
        alignment: u32,
    },
    #[error(
        "tensor {name} of {size} bytes at offset {offset} reaches past the end of the file; the download is incomplete"
    )]
    PastEnd {
        name: String,
        offset: u64,
        size: u64,
    },
    #[error("tensors {first} and {second} overlap")]
    Overlap { first: String, second: String },
}

impl GgufError {
    /// The error with the name of the file it concerns, in the group it belongs to.
    pub fn in_file(self, file: &str) -> ModelError {
        let (file, what) = (file.to_owned(), self.to_string());
        match self {
            GgufError::BadMagic => ModelError::NotAModel {
                what: format!("{file} is no GGUF file, for {what}"),
            },
            GgufError::BigEndian | GgufError::UnsupportedVersion { .. } => {
                ModelError::Unsupported { file, what }
            }
            GgufError::TooMany { .. } | GgufError::TooLong { .. } => {
                ModelError::TooLarge { file, what }
            }
            _ => ModelError::Corrupt { file, what },
        }
    }
}

/// A tensor type of the format: id, name, elements and bytes of a block.
struct TypeRow(u32, &'static str, u64, u64);

/// Types that GGUF files may hold and Hotcell does not compute with; their sizes are needed to check a file
/// that has one among others. Sources: ggml.c `type_traits`, gguf-py `GGML_QUANT_SIZES`.
const OTHER_TYPES: &[TypeRow] = &[
    TypeRow(9, "q8_1", 32, 36),
    TypeRow(15, "q8_k", 256, 292),
    TypeRow(41, "q1_0", 128, 18),
];

/// Ids that once had a type. Their block size in ggml's table is 0, by which readers have divided.
const REMOVED_TYPES: &[u32] = &[4, 5, 31, 32, 33, 36, 37, 38];

/// The index of a GGUF file: metadata positions and checked tensor ranges, in the order of the file.
#[derive(Clone, Debug)]
pub struct Gguf {
    version: u32,
    alignment: u32,
    pub(self) values: BTreeMap<Box<str>, Slot>,
    tensors: Vec<StoredTensor>,
}

impl Gguf {
    /// Indexes a file and checks all of it except tensor data. Bytes after the last tensor (padding) are ignored.
    pub fn parse(bytes: &[u8]) -> Result<Gguf, GgufError> {
        let mut reader = Reader { bytes, at: 0 };
        let magic = reader.take(4).ok_or_else(|| truncated("the magic"))?;
        if magic != b"GGUF" {
            return Err(GgufError::BadMagic);
        }
        let version = reader.u32().ok_or_else(|| truncated("the version"))?;
        match version {
            2 | 3 => {}
            _ if matches!(version.swap_bytes(), 1..=3) => return Err(GgufError::BigEndian),
            _ => return Err(GgufError::UnsupportedVersion { version }),
        }
        let tensor_count = reader
            .u64()
            .ok_or_else(|| truncated("the number of tensors"))?;
        let value_count = reader
            .u64()
            .ok_or_else(|| truncated("the number of metadata entries"))?;
        bounded("tensors", tensor_count, limits::TENSORS)?;
        bounded("metadata entries", value_count, limits::GGUF_KEYS)?;

        // Nothing is reserved from the counts: both grow with the bytes that are really there.
        let mut values = BTreeMap::new();
        for index in 0..value_count {
            let (key, slot) = reader.entry(index)?;
            if values.contains_key(key) {
                return Err(GgufError::DuplicateKey { key: shown(key) });
            }
            values.insert(Box::from(key), slot);
        }
        let alignment = alignment(values.get("general.alignment"))?;

        let mut tensors = Vec::new();
        let mut names = BTreeSet::new();
        for index in 0..tensor_count {
            let tensor = reader.tensor(index)?;
            if !names.insert(tensor.name) {
                return Err(GgufError::DuplicateTensor {
                    name: shown(tensor.name),
                });
            }
            tensors.push(tensor);
        }
        let tensors = place(tensors, reader.at, alignment, bytes.len())?;
        Ok(Gguf {
            version,
            alignment,
            values,
            tensors,
        })
    }

    /// The format version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The alignment of tensor data in bytes.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// The tensors in the order of the file.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// The metadata; `bytes` is the file that was parsed.
    pub fn metadata<'a>(&'a self, bytes: &'a [u8]) -> Metadata<'a> {
        Metadata { gguf: self, bytes }
    }
}

fn truncated(what: &str) -> GgufError {
    GgufError::Truncated {
        what: what.to_owned(),
    }
}

fn bounded(what: &'static str, count: u64, limit: u64) -> Result<(), GgufError> {
    if count > limit {
        Err(GgufError::TooMany { what, count, limit })
    } else {
        Ok(())
    }
}

fn alignment(slot: Option<&Slot>) -> Result<u32, GgufError> {
    match slot {
        None => Ok(32),
        Some(Slot::Scalar(ValueType::U32, value::Scalar::Uint(value))) => {
            let alignment = u32::try_from(*value).unwrap_or(0);
            if alignment.is_power_of_two() && alignment <= limits::GGUF_ALIGNMENT {
                Ok(alignment)
            } else {
                Err(GgufError::BadAlignment {
                    alignment,
                    limit: limits::GGUF_ALIGNMENT,
                })
            }
        }
        Some(slot) => Err(GgufError::AlignmentType {
            found: slot.kind().name(),
        }),
    }
}

/// A tensor description whose shape and type are checked, and whose place is not yet.
struct Description<'a> {
    name: &'a str,
    dtype: StoredDType,
    shape: Vec<usize>,
    size: usize,
    offset: u64,
}

/// Checks where the tensors lie, and gives them their ranges.
fn place(
    descriptions: Vec<Description<'_>>,
    end_of_header: usize,
    alignment: u32,
    file_len: usize,
) -> Result<Vec<StoredTensor>, GgufError> {
    let data = end_of_header.checked_next_multiple_of(alignment as usize);
    let mut tensors = Vec::with_capacity(descriptions.len());
    for tensor in descriptions {
        let Description {
            name,
            dtype,
            shape,
            size,
            offset,
        } = tensor;
        if !offset.is_multiple_of(alignment.into()) {
            return Err(GgufError::UnalignedOffset {
                name: shown(name),
                offset,
                alignment,
            });
        }
        let start = usize::try_from(offset)
            .ok()
            .and_then(|offset| data?.checked_add(offset));
        let range = start.and_then(|start| Some(start..start.checked_add(size)?));
        let Some(range) = range.filter(|range| range.end <= file_len) else {
            return Err(GgufError::PastEnd {
                name: shown(name),
                offset,
                size: size as u64,
            });
        };
        tensors.push(StoredTensor {
            name: name.to_owned(),
            dtype,
            shape,
            range,
        });
    }
    let mut by_place: Vec<&StoredTensor> = tensors.iter().collect();
    by_place.sort_unstable_by_key(|tensor| tensor.range.start);
    for pair in by_place.windows(2) {
        if let [first, second] = pair
            && first.range.end > second.range.start
        {
            return Err(GgufError::Overlap {
                first: shown(&first.name),
                second: shown(&second.name),
            });
        }
    }
    Ok(tensors)
}

/// A position in the file. Every read says whether the bytes were there.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(len)?;
        let taken = self.bytes.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?
            .first_chunk()
            .map(|bytes| u32::from_le_bytes(*bytes))
    }

    fn u64(&mut self) -> Option<u64> {
        self.take(8)?
            .first_chunk()
            .map(|bytes| u64::from_le_bytes(*bytes))
    }

    /// A length and that many bytes, no more than `limit`.
    fn string(&mut self, limit: u64, what: impl Fn() -> String) -> Result<&'a [u8], GgufError> {
        let len = self
            .u64()
            .ok_or_else(|| GgufError::Truncated { what: what() })?;
        if len > limit {
            return Err(GgufError::TooLong {
                what: what(),
                len,
                unit: "bytes",
                limit,
            });
        }
        let bytes = usize::try_from(len).ok().and_then(|len| self.take(len));
        bytes.ok_or_else(|| GgufError::Truncated { what: what() })
    }

    /// A metadata entry.
    fn entry(&mut self, index: u64) -> Result<(&'a str, Slot), GgufError> {
        let what = || format!("the key of metadata entry {index}");
        let key = self.string(limits::GGUF_KEY_BYTES, what)?;
        if key.is_empty() {
            return Err(GgufError::EmptyKey { index });
        }
        let key = std::str::from_utf8(key).map_err(|_| GgufError::NotUtf8 { what: what() })?;
        let what = || format!("the value of metadata key {}", shown(key));
        let limit = if key.starts_with("tokenizer.") {
            limits::GGUF_TOKENIZER_STRING_BYTES
        } else {
            limits::GGUF_STRING_BYTES
        };
        let slot = match self.value_type(key)? {
            ValueType::Str => {
                let text = self.string(limit, what)?;
                std::str::from_utf8(text).map_err(|_| GgufError::NotUtf8 { what: what() })?;
                Slot::Str(self.at - text.len()..self.at)
            }
            ValueType::Array => self.array(key, limit)?,
            kind => {
                let bytes = kind.size().and_then(|size| self.take(size));
                let bytes = bytes.ok_or_else(|| GgufError::Truncated { what: what() })?;
                let value =
                    scalar(kind, bytes).ok_or_else(|| GgufError::BadBool { key: shown(key) })?;
                Slot::Scalar(kind, value)
            }
        };
        Ok((key, slot))
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, GgufError> {
        let what = || format!("the type of metadata key {}", shown(key));
        let id = self
            .u32()
            .ok_or_else(|| GgufError::Truncated { what: what() })?;
        ValueType::from_id(id).ok_or_else(|| GgufError::UnknownValueType {
            key: shown(key),
            id,
        })
    }

    fn array(&mut self, key: &str, limit: u64) -> Result<Slot, GgufError> {
        let what = || format!("the array of metadata key {}", shown(key));
        let element = self.value_type(key)?;
        if element == ValueType::Array {
            return Err(GgufError::NestedArray { key: shown(key) });
        }
        let count = self
            .u64()
            .ok_or_else(|| GgufError::Truncated { what: what() })?;
        if count > limits::GGUF_ARRAY_ELEMENTS {
            let limit = limits::GGUF_ARRAY_ELEMENTS;
            return Err(GgufError::TooLong {
                what: what(),
                len: count,
                unit: "elements",
                limit,
            });
        }
        let len = usize::try_from(count).map_err(|_| GgufError::Truncated { what: what() })?;
        let start = self.at;
        if let Some(size) = element.size() {
            let bytes = len.checked_mul(size).and_then(|bytes| self.take(bytes));
            let bytes = bytes.ok_or_else(|| GgufError::Truncated { what: what() })?;
            if element == ValueType::Bool && bytes.iter().any(|&byte| byte > 1) {
                return Err(GgufError::BadBool { key: shown(key) });
            }
        } else {
            for _ in 0..len {
                self.string(limit, what)?;
            }
        }
        Ok(Slot::Array {
            element,
            len,
            range: start..self.at,
        })
    }

    /// A tensor description.
    fn tensor(&mut self, index: u64) -> Result<Description<'a>, GgufError> {
        let what = || format!("the name of tensor {index}");
        let name = self.string(limits::GGUF_NAME_BYTES, what)?;
        if name.is_empty() {
            return Err(GgufError::EmptyTensorName { index });
        }
        let name = std::str::from_utf8(name).map_err(|_| GgufError::NotUtf8 { what: what() })?;
        let short = || GgufError::Truncated {
            what: format!("the description of tensor {}", shown(name)),
        };
        let overflow = || GgufError::SizeOverflow { name: shown(name) };

        let dimensions = self.u32().ok_or_else(short)?;
        if dimensions > limits::GGUF_DIMENSIONS {
            let limit = limits::GGUF_DIMENSIONS;
            return Err(GgufError::TooManyDimensions {
                name: shown(name),
                dimensions,
                limit,
            });
        }
        let mut shape = Vec::with_capacity(dimensions as usize);
        let mut elements = 1u64;
        for _ in 0..dimensions {
            let dimension = self.u64().ok_or_else(short)?;
            // The format says u64, ggml reads int64.
            if dimension > i64::MAX as u64 {
                let dimension = dimension as i64;
                return Err(GgufError::NegativeDimension {
                    name: shown(name),
                    dimension,
                });
            }
            if dimension == 0 {
                return Err(GgufError::NoElements { name: shown(name) });
            }
            elements = elements.checked_mul(dimension).ok_or_else(overflow)?;
            shape.push(usize::try_from(dimension).map_err(|_| overflow())?);
        }
        let row = shape.first().map_or(1, |&row| row as u64);
        shape.reverse();

        let id = self.u32().ok_or_else(short)?;
        let (dtype, dtype_name, block, block_bytes) = tensor_type(name, id)?;
        if !row.is_multiple_of(block) {
            return Err(GgufError::PartialBlock {
                name: shown(name),
                row,
                block,
                dtype: dtype_name,
            });
        }
        // Rows are whole blocks, so the whole tensor is.
        let blocks = elements.checked_div(block).ok_or_else(overflow)?;
        let size = blocks
            .checked_mul(block_bytes)
            .and_then(|size| usize::try_from(size).ok());
        let size = size
            .filter(|&size| size <= isize::MAX as usize)
            .ok_or_else(overflow)?;
        let offset = self.u64().ok_or_else(short)?;
        Ok(Description {
            name,
            dtype,
            shape,
            size,
            offset,
        })
    }
}

/// The type of an id: as stored, its name, elements and bytes of a block.
fn tensor_type(name: &str, id: u32) -> Result<(StoredDType, &'static str, u64, u64), GgufError> {
    if REMOVED_TYPES.contains(&id) {
        return Err(GgufError::RemovedType {
            name: shown(name),
            id,
        });
    }
    if let Some(dtype) = DType::from_gguf_id(id) {
        let (block, bytes) = (dtype.block_len() as u64, dtype.block_bytes() as u64);
        return Ok((StoredDType::Known(dtype), dtype.name(), block, bytes));
    }
    match OTHER_TYPES.iter().find(|row| row.0 == id) {
        Some(TypeRow(_, name, block, bytes)) => {
            Ok((StoredDType::Other((*name).to_owned()), name, *block, *bytes))
        }
        None => Err(GgufError::UnknownType {
            name: shown(name),
            id,
        }),
    }
}
