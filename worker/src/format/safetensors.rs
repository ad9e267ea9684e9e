//! safetensors: one file, or the shards that an index names.
//!
//! The `safetensors` crate parses and checks a file (its fuzzing record is better than a new parser's). It
//! keeps the last of two equal names, though, and buffers whatever JSON it is given, so a first pass over the
//! header, which builds nothing but the set of names, refuses repeated names and anything but the three
//! fields of a tensor first.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use hotcell_graph::DType;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{ModelError, StoredDType, StoredTensor, limits, shown};

/// The index of a sharded model.
pub const INDEX: &str = "model.safetensors.index.json";
/// A model in one file.
pub const SINGLE: &str = "model.safetensors";

/// Bytes before the header: its length.
const LENGTH_BYTES: usize = 8;

/// Reads the header of a safetensors file and checks it against the file's length. Tensors come in
/// alphabetical order. Fails with `Corrupt` or `TooLarge`, naming `file`.
pub fn parse(file: &str, bytes: &[u8]) -> Result<Vec<StoredTensor>, ModelError> {
    let corrupt = |what: String| ModelError::Corrupt {
        file: file.to_owned(),
        what,
    };
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(corrupt(
            "it ends inside the length of the header; the download is incomplete".to_owned(),
        ));
    };
    let length = u64::from_le_bytes(*length);
    if length > limits::SAFETENSORS_HEADER_BYTES {
        let limit = limits::SAFETENSORS_HEADER_BYTES;
        let what = format!("its header claims {length} bytes where the limit is {limit}");
        return Err(ModelError::TooLarge {
            file: file.to_owned(),
            what,
        });
    }
    let header = usize::try_from(length)
        .ok()
        .and_then(|length| rest.get(..length));
    let Some(header) = header else {
        return Err(corrupt(format!(
            "it ends inside its header of {length} bytes; the download is incomplete"
        )));
    };
    let bad = |error: serde_json::Error| {
        corrupt(format!(
            "its header is not as it should be: {}",
            cut(&error)
        ))
    };
    serde_json::from_slice::<Names>(header).map_err(bad)?;

    let bad = |error: safetensors::SafeTensorError| corrupt(cut(&error));
    let (header_len, metadata) = SafeTensors::read_metadata(bytes).map_err(bad)?;
    let outside = || corrupt("its data lies outside the file".to_owned());
    let data = header_len.checked_add(LENGTH_BYTES).ok_or_else(outside)?;
    let mut tensors = Vec::new();
    for (name, info) in metadata.tensors() {
        let (start, end) = info.data_offsets;
        let range = data
            .checked_add(start)
            .zip(data.checked_add(end))
            .map(|(start, end)| start..end);
        let range = range
            .filter(|range| bytes.get(range.clone()).is_some())
            .ok_or_else(outside)?;
        tensors.push(StoredTensor {
            name,
            dtype: stored_dtype(info.dtype, &info.shape),
            shape: info.shape.clone(),
            range,
        });
    }
    tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(tensors)
}

/// An error text that may quote the file, fit for a message.
fn cut(error: &dyn fmt::Display) -> String {
    let text = error.to_string();
    text.chars()
        .take(200)
        .flat_map(char::escape_debug)
        .collect()
}

/// Bool is not among the known ones, because a file may hold bytes other than 0 and 1; and 8-bit floats have an axis.
fn stored_dtype(dtype: Dtype, shape: &[usize]) -> StoredDType {
    StoredDType::Known(match dtype {
        Dtype::U8 => DType::U8,
        Dtype::I8 => DType::I8,
        Dtype::U16 => DType::U16,
        Dtype::I16 => DType::I16,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F8_E4M3 if !shape.is_empty() => DType::F8E4M3,
        Dtype::U32 => DType::U32,
        Dtype::I32 => DType::I32,
        Dtype::F32 => DType::F32,
        Dtype::C64 => DType::C64,
        Dtype::F64 => DType::F64,
        Dtype::I64 => DType::I64,
        Dtype::U64 => DType::U64,
        other => return StoredDType::Other(other.to_string().to_lowercase()),
    })
}

/// A header, of which only the form and the names are looked at.
struct Names;

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Names, D::Error> {
        deserializer.deserialize_map(NamesVisitor)
    }
}

struct NamesVisitor;

impl<'de> Visitor<'de> for NamesVisitor {
    type Value = Names;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from tensor names to tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
        let mut names = BTreeSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else {
                map.next_value::<Entry>()?;
            }
            if names.contains(&name) {
                return Err(A::Error::custom(format_args!(
                    "tensor {} occurs twice",
                    shown(&name)
                )));
            }
            names.insert(name);
            if names.len() as u64 > limits::TENSORS {
                return Err(A::Error::custom(format_args!(
                    "it has more than {} tensors",
                    limits::TENSORS
                )));
            }
        }
        Ok(Names)
    }
}

/// A tensor in the header: nothing else may be in it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only the form matters")]
struct Entry {
    dtype: IgnoredAny,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// A list of few numbers.
struct Shape;

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Shape, D::Error> {
        deserializer.deserialize_seq(ShapeVisitor)
    }
}

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a shape of at most {} dimensions",
            limits::SAFETENSORS_DIMENSIONS
        )
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
        let mut dimensions = 0;
        while list.next_element::<u64>()?.is_some() {
            dimensions += 1;
            if dimensions > limits::SAFETENSORS_DIMENSIONS {
                return Err(A::Error::invalid_length(dimensions, &self));
            }
        }
        Ok(Shape)
    }
}

/// Which of a folder's files hold the model's tensors.
#[derive(Debug, PartialEq, Eq)]
pub struct Shards {
    /// The files, by name.
    pub files: Vec<String>,
    /// Where the index says that each tensor is; empty without an index.
    pub placed: BTreeMap<String, String>,
}

/// Decides which files hold the tensors: `model.safetensors`, or the shards that the index names, or, where
/// there is no index, shards named `…-00001-of-00003.safetensors` if none is missing.
pub fn shards(names: &BTreeSet<&str>, index: Option<&[u8]>) -> Result<Shards, ModelError> {
    if names.contains(SINGLE) {
        return Ok(Shards {
            files: vec![SINGLE.to_owned()],
            placed: BTreeMap::new(),
        });
    }
    let files: BTreeSet<String>;
    let placed;
    if let Some(index) = index {
        placed = weight_map(index)?;
        files = placed.values().cloned().collect();
        if files.len() > limits::FILES {
            let what = format!(
                "it names {} shards where the limit is {}",
                files.len(),
                limits::FILES
            );
            return Err(ModelError::TooLarge {
                file: INDEX.to_owned(),
                what,
            });
        }
    } else {
        placed = BTreeMap::new();
        files = numbered(names)?;
    }
    if files.is_empty() {
        let why = format!(
            "a Hugging Face model folder has its tensors there, or in the shards that {INDEX} names"
        );
        return Err(ModelError::MissingFile {
            file: SINGLE.to_owned(),
            why,
        });
    }
    for file in &files {
        if !names.contains(file.as_str()) {
            let source = if placed.is_empty() {
                "the other shards ask for it"
            } else {
                "the index names it"
            };
            let why = format!("{source}; download it into the model's folder");
            return Err(ModelError::MissingFile {
                file: shown(file),
                why,
            });
        }
    }
    Ok(Shards {
        files: files.into_iter().collect(),
        placed,
    })
}

/// The index's map from tensors to shards.
fn weight_map(index: &[u8]) -> Result<BTreeMap<String, String>, ModelError> {
    struct Unique(BTreeMap<String, String>);

    impl<'de> Deserialize<'de> for Unique {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Unique, D::Error> {
            deserializer.deserialize_map(UniqueVisitor)
        }
    }

    struct UniqueVisitor;

    impl<'de> Visitor<'de> for UniqueVisitor {
        type Value = Unique;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map from tensor names to file names")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique, A::Error> {
            let mut placed = BTreeMap::new();
            while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                if placed.contains_key(&tensor) {
                    return Err(A::Error::custom(format_args!(
                        "tensor {} occurs twice",
                        shown(&tensor)
                    )));
                }
                placed.insert(tensor, file);
            }
            Ok(Unique(placed))
        }
    }

    #[derive(Deserialize)]
    struct Index {
        weight_map: Unique,
    }

    if index.len() > limits::INDEX_BYTES {
        let what = format!(
            "it has {} bytes where the limit is {}",
            index.len(),
            limits::INDEX_BYTES
        );
        return Err(ModelError::TooLarge {
            file: INDEX.to_owned(),
            what,
        });
    }
    let index: Index = serde_json::from_slice(index).map_err(|error| ModelError::Corrupt {
        file: INDEX.to_owned(),
        what: cut(&error),
    })?;
    Ok(index.weight_map.0)
}

/// The complete set of shards that a numbered one implies.
fn numbered(names: &BTreeSet<&str>) -> Result<BTreeSet<String>, ModelError> {
    let parts = |name: &str| {
        let stem = name.strip_suffix(".safetensors")?;
        let (rest, total) = stem.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        let valid = stem == "model" && digits(number) && digits(total);
        total.parse::<usize>().ok().filter(|_| valid)
    };
    let totals: BTreeSet<usize> = names.iter().filter_map(|name| parts(name)).collect();
    let mut totals = totals.into_iter();
    let (total, other) = (totals.next(), totals.next());
    if let (Some(total), Some(other)) = (total, other) {
        let what = format!(
            "it has shards of a set of {total} and of a set of {other}; remove one of the two"
        );
        return Err(ModelError::NotAModel { what });
    }
    let total = total.unwrap_or(0);
    if total > limits::FILES {
        let what = format!(
            "it is one of {total} shards where the limit is {}",
            limits::FILES
        );
        return Err(ModelError::TooLarge {
            file: SINGLE.to_owned(),
            what,
        });
    }
    Ok((1..=total)
        .map(|number| format!("model-{number:05}-of-{total:05}.safetensors"))
        .collect())
}
