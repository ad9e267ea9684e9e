//! Metadata values: where each one lies in the file, and typed, checked access to it.

use std::ops::Range;

use super::{Gguf, GgufError};
use crate::format::shown;

/// The type of a metadata value, by GGUF's ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    /// 0
    U8,
    /// 1
    I8,
    /// 2
    U16,
    /// 3
    I16,
    /// 4
    U32,
    /// 5
    I32,
    /// 6
    F32,
    /// 7: one byte, 0 or 1
    Bool,
    /// 8: a `u64` length, then UTF-8
    Str,
    /// 9: element type, `u64` length, elements
    Array,
    /// 10
    U64,
    /// 11
    I64,
    /// 12
    F64,
}

impl ValueType {
    /// In the order of their ids: id, name for messages, bytes of a value of fixed size.
    const TABLE: [(ValueType, &'static str, Option<usize>); 13] = [
        (ValueType::U8, "u8", Some(1)),
        (ValueType::I8, "i8", Some(1)),
        (ValueType::U16, "u16", Some(2)),
        (ValueType::I16, "i16", Some(2)),
        (ValueType::U32, "u32", Some(4)),
        (ValueType::I32, "i32", Some(4)),
        (ValueType::F32, "f32", Some(4)),
        (ValueType::Bool, "bool", Some(1)),
        (ValueType::Str, "string", None),
        (ValueType::Array, "array", None),
        (ValueType::U64, "u64", Some(8)),
        (ValueType::I64, "i64", Some(8)),
        (ValueType::F64, "f64", Some(8)),
    ];

    /// The type of this id.
    pub fn from_id(id: u32) -> Option<ValueType> {
        ValueType::TABLE
            .get(usize::try_from(id).ok()?)
            .map(|row| row.0)
    }

    fn row(self) -> Option<&'static (ValueType, &'static str, Option<usize>)> {
        ValueType::TABLE.iter().find(|row| row.0 == self)
    }

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        self.row().map_or("unknown", |row| row.1)
    }

    /// Bytes of a value; `None` for strings and arrays, whose size varies.
    pub fn size(self) -> Option<usize> {
        self.row().and_then(|row| row.2)
    }
}

/// A number or truth value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scalar {
    Uint(u64),
    Int(i64),
    Float(f64),
    Bool(bool),
}

/// Reads a value of fixed size from the beginning of `bytes`; `None` when they are too few, or for a `bool`
/// that is neither 0 nor 1.
pub(super) fn scalar(kind: ValueType, bytes: &[u8]) -> Option<Scalar> {
    Some(match kind {
        ValueType::U8 => Scalar::Uint(u8::from_le_bytes(*bytes.first_chunk()?).into()),
        ValueType::U16 => Scalar::Uint(u16::from_le_bytes(*bytes.first_chunk()?).into()),
        ValueType::U32 => Scalar::Uint(u32::from_le_bytes(*bytes.first_chunk()?).into()),
        ValueType::U64 => Scalar::Uint(u64::from_le_bytes(*bytes.first_chunk()?)),
        ValueType::I8 => Scalar::Int(i8::from_le_bytes(*bytes.first_chunk()?).into()),
        ValueType::I16 => Scalar::Int(i16::from_le_bytes(*bytes.first_chunk()?).into()),
        ValueType::I32 => Scalar::Int(i32::from_le_bytes(*bytes.first_chunk()?).into()),
        ValueType::I64 => Scalar::Int(i64::from_le_bytes(*bytes.first_chunk()?)),
        ValueType::F32 => Scalar::Float(f32::from_le_bytes(*bytes.first_chunk()?).into()),
        ValueType::F64 => Scalar::Float(f64::from_le_bytes(*bytes.first_chunk()?)),
        ValueType::Bool => match bytes.first()? {
            0 => Scalar::Bool(false),
            1 => Scalar::Bool(true),
            _ => return None,
        },
        ValueType::Str | ValueType::Array => return None,
    })
}

/// What the index remembers of one metadata entry.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Slot {
    /// A number or truth value, with its exact type.
    Scalar(ValueType, Scalar),
    /// The UTF-8 of a string, without its length.
    Str(Range<usize>),
    /// The elements of an array.
    Array {
        element: ValueType,
        len: usize,
        range: Range<usize>,
    },
}

impl Slot {
    pub(super) fn kind(&self) -> ValueType {
        match self {
            Slot::Scalar(kind, _) => *kind,
            Slot::Str(_) => ValueType::Str,
            Slot::Array { .. } => ValueType::Array,
        }
    }
}

/// The metadata of a GGUF file: an index, and the bytes that it points into.
///
/// Every getter gives `Ok(None)` where the key is absent, and an error where the value has another type or
/// does not fit. Integers are taken from any integer type, floats from `f32` and `f64`.
#[derive(Clone, Copy, Debug)]
pub struct Metadata<'a> {
    pub(super) gguf: &'a Gguf,
    pub(super) bytes: &'a [u8],
}

impl<'a> Metadata<'a> {
    /// All keys, in alphabetical order.
    pub fn keys(self) -> impl Iterator<Item = &'a str> {
        self.gguf.values.keys().map(|key| &**key)
    }

    /// Whether there is an entry of this key.
    pub fn contains(self, key: &str) -> bool {
        self.gguf.values.contains_key(key)
    }

    /// The type of this entry.
    pub fn kind(self, key: &str) -> Option<ValueType> {
        self.gguf.values.get(key).map(Slot::kind)
    }

    /// An unsigned integer.
    pub fn get_u64(self, key: &str) -> Result<Option<u64>, GgufError> {
        match self.gguf.values.get(key) {
            None => Ok(None),
            Some(Slot::Scalar(_, Scalar::Uint(value))) => Ok(Some(*value)),
            Some(Slot::Scalar(_, Scalar::Int(value))) => {
                u64::try_from(*value)
                    .map(Some)
                    .map_err(|_| GgufError::ValueRange {
                        key: shown(key),
                        wanted: "u64",
                    })
            }
            Some(slot) => Err(wrong_type(key, slot, "an integer")),
        }
    }

    /// An unsigned integer below 2³².
    pub fn get_u32(self, key: &str) -> Result<Option<u32>, GgufError> {
        let narrow = |value| {
            u32::try_from(value).map_err(|_| GgufError::ValueRange {
                key: shown(key),
                wanted: "u32",
            })
        };
        self.get_u64(key)?.map(narrow).transpose()
    }

    /// A float. It may be infinite or not a number.
    pub fn get_f64(self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.gguf.values.get(key) {
            None => Ok(None),
            Some(Slot::Scalar(_, Scalar::Float(value))) => Ok(Some(*value)),
            Some(slot) => Err(wrong_type(key, slot, "a float")),
        }
    }

    /// A float, rounded to `f32` if stored as `f64`. It may be infinite or not a number.
    pub fn get_f32(self, key: &str) -> Result<Option<f32>, GgufError> {
        Ok(self.get_f64(key)?.map(|value| value as f32))
    }

    /// A truth value.
    pub fn get_bool(self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.gguf.values.get(key) {
            None => Ok(None),
            Some(Slot::Scalar(_, Scalar::Bool(value))) => Ok(Some(*value)),
            Some(slot) => Err(wrong_type(key, slot, "a bool")),
        }
    }

    /// A string, in place.
    pub fn get_str(self, key: &str) -> Result<Option<&'a str>, GgufError> {
        match self.gguf.values.get(key) {
            None => Ok(None),
            // Checked when the file was indexed, and again here, for the file may have changed since.
            Some(Slot::Str(range)) => self
                .bytes
                .get(range.clone())
                .and_then(|bytes| std::str::from_utf8(bytes).ok())
                .map(Some)
                .ok_or_else(|| GgufError::NotUtf8 {
                    what: format!("the value of {}", shown(key)),
                }),
            Some(slot) => Err(wrong_type(key, slot, "a string")),
        }
    }

    /// An array of any element type, in place.
    pub fn get_array(self, key: &str) -> Result<Option<Array<'a>>, GgufError> {
        match self.gguf.values.get(key) {
            None => Ok(None),
            Some(Slot::Array {
                element,
                len,
                range,
            }) => {
                let bytes = self.bytes.get(range.clone()).unwrap_or_default();
                Ok(Some(Array {
                    element: *element,
                    len: *len,
                    bytes,
                }))
            }
            Some(slot) => Err(wrong_type(key, slot, "an array")),
        }
    }

    /// An array of strings.
    pub fn get_strings(self, key: &str) -> Result<Option<Strings<'a>>, GgufError> {
        let strings = |array: Array<'a>| {
            array
                .strings()
                .ok_or_else(|| wrong_elements(key, array, "strings"))
        };
        self.get_array(key)?.map(strings).transpose()
    }

    /// An array of floats.
    pub fn get_floats(
        self,
        key: &str,
    ) -> Result<Option<impl ExactSizeIterator<Item = f32> + 'a>, GgufError> {
        let floats = |array: Array<'a>| {
            array
                .floats()
                .ok_or_else(|| wrong_elements(key, array, "floats"))
        };
        self.get_array(key)?.map(floats).transpose()
    }

    /// An array of integers.
    pub fn get_ints(
        self,
        key: &str,
    ) -> Result<Option<impl ExactSizeIterator<Item = i64> + 'a>, GgufError> {
        let ints = |array: Array<'a>| {
            array
                .ints()
                .ok_or_else(|| wrong_elements(key, array, "integers"))
        };
        self.get_array(key)?.map(ints).transpose()
    }
}

fn wrong_type(key: &str, slot: &Slot, wanted: &'static str) -> GgufError {
    GgufError::WrongType {
        key: shown(key),
        found: slot.kind().name(),
        wanted,
    }
}

fn wrong_elements(key: &str, array: Array<'_>, wanted: &'static str) -> GgufError {
    GgufError::WrongElements {
        key: shown(key),
        found: array.element.name(),
        wanted,
    }
}

/// An array value: a view into the file, decoded as it is walked.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// The type of the elements; never an array.
    pub fn element(&self) -> ValueType {
        self.element
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as they lie in the file (little endian; strings with their lengths).
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements as strings; `None` if they are something else.
    pub fn strings(&self) -> Option<Strings<'a>> {
        (self.element == ValueType::Str).then_some(Strings {
            left: self.len,
            bytes: self.bytes,
        })
    }

    /// The elements as integers, a `u64` past `i64::MAX` as `i64::MAX`; `None` if they are something else.
    pub fn ints(&self) -> Option<impl ExactSizeIterator<Item = i64> + use<'a>> {
        use ValueType::{I8, I16, I32, I64, U8, U16, U32, U64};
        let element = self.element;
        let whole = matches!(element, U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64);
        let size = element.size().filter(|_| whole)?;
        Some(
            self.bytes
                .chunks_exact(size)
                .map(move |bytes| match scalar(element, bytes) {
                    Some(Scalar::Int(value)) => value,
                    Some(Scalar::Uint(value)) => i64::try_from(value).unwrap_or(i64::MAX),
                    _ => 0,
                }),
        )
    }

    /// The elements as `f32`; `None` if they are something else.
    pub fn floats(&self) -> Option<impl ExactSizeIterator<Item = f32> + use<'a>> {
        let element = self.element;
        let float = matches!(element, ValueType::F32 | ValueType::F64);
        let size = element.size().filter(|_| float)?;
        Some(
            self.bytes
                .chunks_exact(size)
                .map(move |bytes| match scalar(element, bytes) {
                    Some(Scalar::Float(value)) => value as f32,
                    _ => f32::NAN,
                }),
        )
    }
}

/// The strings of an array, decoded one by one. A string that is not UTF-8 is an error of its own; the
/// following ones can still be read.
#[derive(Clone, Debug)]
pub struct Strings<'a> {
    left: usize,
    bytes: &'a [u8],
}

impl<'a> Iterator for Strings<'a> {
    type Item = Result<&'a str, GgufError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let element = self.bytes.split_first_chunk::<8>().and_then(|(len, rest)| {
            let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
            rest.split_at_checked(len)
        });
        let Some((text, rest)) = element else {
            // The lengths were right when the file was indexed: it has changed since.
            self.left = 0;
            return Some(Err(GgufError::Truncated {
                what: "an array of strings".to_owned(),
            }));
        };
        self.bytes = rest;
        let text = std::str::from_utf8(text);
        Some(text.map_err(|_| GgufError::NotUtf8 {
            what: "an element of an array of strings".to_owned(),
        }))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left))
    }
}

impl Strings<'_> {
    /// How many strings are left.
    pub fn len(&self) -> usize {
        self.left
    }

    /// Whether none is left.
    pub fn is_empty(&self) -> bool {
        self.left == 0
    }
}
