//! Tensors as requests bring them: bytes that are as many as their shape and type say, whatever was claimed.

use bytes::{BufMut, Bytes, BytesMut};
use hotcell_gateways::inference::InferTensorContents;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
};

/// The protocol's types of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Datatype {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Bf16,
    Fp32,
    Fp64,
    /// Each element is its length, four bytes with the lowest first, and as many bytes.
    Bytes,
}

impl Datatype {
    /// Each with its name, the bytes of an element (none for strings), and the name of the dtype that it is.
    const ALL: &'static [(Self, &'static str, usize, &'static str)] = &[
        (Self::Bool, "BOOL", 1, "bool"),
        (Self::Uint8, "UINT8", 1, "u8"),
        (Self::Uint16, "UINT16", 2, "u16"),
        (Self::Uint32, "UINT32", 4, "u32"),
        (Self::Uint64, "UINT64", 8, "u64"),
        (Self::Int8, "INT8", 1, "i8"),
        (Self::Int16, "INT16", 2, "i16"),
        (Self::Int32, "INT32", 4, "i32"),
        (Self::Int64, "INT64", 8, "i64"),
        (Self::Fp16, "FP16", 2, "f16"),
        (Self::Bf16, "BF16", 2, "bf16"),
        (Self::Fp32, "FP32", 4, "f32"),
        (Self::Fp64, "FP64", 8, "f64"),
        (Self::Bytes, "BYTES", 0, ""),
    ];

    /// The type of this name.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`].
    pub fn of(name: &str) -> Result<Self, Error> {
        let row = Self::ALL.iter().find(|(_, known, ..)| *known == name);
        row.map(|(datatype, ..)| *datatype)
            .ok_or_else(|| invalid(format!("{:?} is no type of the protocol's", short(name))))
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        let row = Self::ALL.iter().find(|(known, ..)| *known == self);
        row.map_or("", |(_, name, ..)| name)
    }

    /// The type of a graph's dtype of this name; none for those that the protocol does not have.
    pub fn of_dtype(dtype: &str) -> Option<Self> {
        let row = Self::ALL.iter().find(|(.., known)| *known == dtype);
        row.map(|(datatype, ..)| *datatype)
            .filter(|_| !dtype.is_empty())
    }

    /// Bytes of so many elements; none for those that have a length each, and if there are too many.
    pub fn bytes(self, elements: usize) -> Option<u64> {
        u64::try_from(elements.checked_mul(self.size()?)?).ok()
    }

    /// Bytes of one element; none for those that have a length each.
    fn size(self) -> Option<usize> {
        let row = Self::ALL.iter().find(|(known, ..)| *known == self);
        row.map(|(_, _, size, _)| *size).filter(|size| *size > 0)
    }
}

/// A tensor that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    pub name: String,
    pub datatype: Datatype,
    /// Elements in row-major order as they are on the wire, the lowest byte first.
    pub data: Bytes,
    elements: usize,
}

pub(super) fn invalid(what: impl Into<String>) -> Error {
    Error::new(Reason::InvalidArgument, what)
}

/// The beginning of somebody's word.
pub(super) fn short(word: &str) -> String {
    word.chars().take(80).collect()
}

/// Elements of this shape.
///
/// # Errors
/// [`Reason::InvalidArgument`] for negative axes and products that are no number, [`Reason::LimitExceeded`].
pub(super) fn elements(shape: &[i64]) -> Result<usize, Error> {
    if shape.len() > limits::MAX_RANK {
        let what = format!(
            "{} axes are more than the limit of {}",
            shape.len(),
            limits::MAX_RANK
        );
        return Err(Error::new(Reason::LimitExceeded, what));
    }
    let product = shape.iter().try_fold(1usize, |product, axis| {
        product.checked_mul(usize::try_from(*axis).ok()?)
    });
    product.ok_or_else(|| invalid(format!("{shape:?} is no shape of a tensor")))
}

impl Tensor {
    /// A tensor of these bytes.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] if they are not those of its shape and type.
    pub fn new(name: &str, datatype: &str, shape: &[i64], data: Bytes) -> Result<Self, Error> {
        let datatype = Datatype::of(datatype)?;
        let elements = elements(shape)?;
        let fits = match datatype.size() {
            Some(size) => elements.checked_mul(size) == Some(data.len()),
            None => {
                strings(&data).try_fold(0usize, |count, string| string.map(|_| count + 1))
                    == Some(elements)
            }
        };
        if !fits {
            return Err(invalid(format!(
                "input {:?}: {} bytes are not those of {} elements of {}",
                short(name),
                data.len(),
                elements,
                datatype.name()
            )));
        }
        Ok(Self {
            name: name.to_owned(),
            datatype,
            data,
            elements,
        })
    }

    fn one(&self, datatype: Datatype) -> Result<&Bytes, Error> {
        if self.elements == 1 && self.datatype == datatype {
            return Ok(&self.data);
        }
        Err(invalid(format!(
            "input {:?} is one element of {}, not {} of {}",
            short(&self.name),
            datatype.name(),
            self.elements,
            self.datatype.name()
        )))
    }

    /// Its one element, a text.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] if it is something else.
    pub fn text(&self) -> Result<&str, Error> {
        let data = self.one(Datatype::Bytes)?;
        let bytes = strings(data).next().flatten().unwrap_or_default();
        std::str::from_utf8(bytes)
            .map_err(|_| invalid(format!("input {:?} is no UTF-8 text", short(&self.name))))
    }

    /// Its one element, true or false.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] if it is something else.
    pub fn truth(&self) -> Result<bool, Error> {
        let data = self.one(Datatype::Bool)?;
        Ok(data.first().is_some_and(|byte| *byte != 0))
    }
}

/// The elements of a tensor of strings; ends with a none if the bytes do not divide into such.
fn strings(mut data: &[u8]) -> impl Iterator<Item = Option<&[u8]>> {
    std::iter::from_fn(move || {
        if data.is_empty() {
            return None;
        }
        let taken = data.split_first_chunk::<4>().and_then(|(length, rest)| {
            let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
            rest.split_at_checked(length)
        });
        match taken {
            Some((string, rest)) => {
                data = rest;
                Some(Some(string))
            }
            None => {
                data = &[];
                Some(None)
            }
        }
    })
}

/// The elements of a tensor of strings that was checked.
pub(super) fn each_string(data: &[u8]) -> impl Iterator<Item = &[u8]> {
    strings(data).flatten()
}

/// Strings as they are on the wire.
///
/// # Errors
/// [`Reason::LimitExceeded`] for one of more than 4 GiB.
pub(super) fn of_strings<S: AsRef<[u8]>>(all: &[S]) -> Result<Bytes, Error> {
    let bytes = all.iter().map(|s| 4 + s.as_ref().len()).sum();
    let mut data = BytesMut::with_capacity(bytes);
    for string in all {
        let string = string.as_ref();
        let length = u32::try_from(string.len())
            .map_err(|_| Error::new(Reason::LimitExceeded, "a string has more than 4 GiB"))?;
        data.put_u32_le(length);
        data.put_slice(string);
    }
    Ok(data.freeze())
}

/// Numbers as they are on the wire.
macro_rules! numbers {
    ($all:expr, $to:ty) => {{
        let all = $all;
        let mut data = ::bytes::BytesMut::with_capacity(all.len() * size_of::<$to>());
        for value in all {
            let value = <$to>::try_from(value).map_err(|_| {
                let what = format!("{value} is no {}", stringify!($to));
                $crate::gateway::oip::tensor::invalid(what)
            })?;
            ::bytes::BufMut::put_slice(&mut data, &value.to_le_bytes());
        }
        data.freeze()
    }};
}
pub(super) use numbers;

/// Elements that came in fields of their own types, as they would be as bytes.
///
/// # Errors
/// [`Reason::InvalidArgument`] for a value that its type does not have, and for types that have no field.
pub(super) fn of_contents(
    datatype: Datatype,
    contents: InferTensorContents,
) -> Result<Bytes, Error> {
    let c = contents;
    Ok(match datatype {
        Datatype::Bool => c.bool_contents.into_iter().map(u8::from).collect(),
        Datatype::Int8 => numbers!(c.int_contents, i8),
        Datatype::Int16 => numbers!(c.int_contents, i16),
        Datatype::Int32 => numbers!(c.int_contents, i32),
        Datatype::Int64 => numbers!(c.int64_contents, i64),
        Datatype::Uint8 => numbers!(c.uint_contents, u8),
        Datatype::Uint16 => numbers!(c.uint_contents, u16),
        Datatype::Uint32 => numbers!(c.uint_contents, u32),
        Datatype::Uint64 => numbers!(c.uint64_contents, u64),
        Datatype::Fp32 => numbers!(c.fp32_contents, f32),
        Datatype::Fp64 => numbers!(c.fp64_contents, f64),
        Datatype::Bytes => of_strings(&c.bytes_contents)?,
        Datatype::Fp16 | Datatype::Bf16 => {
            return Err(invalid(format!(
                "elements of {} have no field; send their bytes",
                datatype.name()
            )));
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bytes_are_as_many_as_shape_and_type_say() {
        let of = |datatype: &str, shape: &[i64], bytes: usize| {
            Tensor::new("x", datatype, shape, Bytes::from(vec![0; bytes]))
        };
        assert!(of("FP32", &[2, 3], 24).is_ok());
        assert!(of("FP32", &[], 4).is_ok());
        assert!(of("FP32", &[0], 0).is_ok());
        for (datatype, shape, bytes) in [
            ("FP32", &[2, 3][..], 23),
            ("FP32", &[-1][..], 4),
            ("FP32", &[i64::MAX, i64::MAX][..], 4),
            // The product of elements is a number, the one of their bytes is not.
            ("FP64", &[1 << 61, 1][..], 0),
            ("FP64", &[1 << 60, 1 << 4][..], 0),
            ("BOOL", &[1; 9][..], 1),
            ("BYTES", &[1][..], 3),
            ("BYTES", &[2][..], 4),
            ("COMPLEX64", &[1][..], 8),
            ("", &[1][..], 1),
        ] {
            assert!(
                of(datatype, shape, bytes).is_err(),
                "{datatype} {shape:?} {bytes}"
            );
        }
    }

    #[test]
    fn strings_do_not_reach_beyond_their_tensor() {
        let of = |bytes: &'static [u8], count: i64| {
            Tensor::new("x", "BYTES", &[count], Bytes::from_static(bytes))
        };
        assert_eq!(of(b"\x02\0\0\0hi", 1).unwrap().text().unwrap(), "hi");
        assert_eq!(of(b"\0\0\0\0", 1).unwrap().text().unwrap(), "");
        assert!(of(b"\x03\0\0\0hi", 1).is_err());
        assert!(of(b"\xff\xff\xff\xffhi", 1).is_err());
        assert!(of(b"\x02\0\0\0hi\x01", 1).is_err());
        assert!(of(b"\x02\0\0\0hi", 2).is_err());
        assert!(of(b"\x01\0\0\0\xff", 1).unwrap().text().is_err());
        let two = of(b"\x01\0\0\0a\x01\0\0\0b", 2).unwrap();
        assert!(two.text().is_err());
        assert_eq!(each_string(&two.data).collect::<Vec<_>>(), [b"a", b"b"]);
    }

    #[test]
    fn typed_elements_become_bytes_and_are_in_range() {
        let ints = |datatype: Datatype, all: &[i32]| {
            let contents = InferTensorContents {
                int_contents: all.to_vec(),
                ..InferTensorContents::default()
            };
            of_contents(datatype, contents)
        };
        assert_eq!(
            &ints(Datatype::Int16, &[1, -1]).unwrap()[..],
            [1, 0, 255, 255]
        );
        assert!(ints(Datatype::Int8, &[128]).is_err());
        assert!(ints(Datatype::Fp16, &[1]).is_err());
        // Elements in a field of another type are none.
        assert!(ints(Datatype::Fp32, &[1]).unwrap().is_empty());
        assert_eq!(&of_strings(&["hi"]).unwrap()[..], b"\x02\0\0\0hi");
    }

    proptest! {
        #[test]
        fn no_bytes_and_no_shape_panic(
            data in prop::collection::vec(any::<u8>(), 0..64),
            shape in prop::collection::vec(any::<i64>(), 0..10),
            kind in 0..Datatype::ALL.len(),
        ) {
            let (_, name, size, _) = Datatype::ALL[kind];
            if let Ok(tensor) = Tensor::new("x", name, &shape, data.clone().into()) {
                match size {
                    0 => prop_assert_eq!(each_string(&tensor.data).count(), tensor.elements),
                    size => prop_assert_eq!(tensor.elements * size, data.len()),
                }
            }
        }

        #[test]
        fn strings_come_back(all in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..9)) {
            let data = of_strings(&all).unwrap();
            let tensor = Tensor::new("x", "BYTES", &[all.len() as i64], data).unwrap();
            let back: Vec<_> = each_string(&tensor.data).map(<[u8]>::to_vec).collect();
            prop_assert_eq!(back, all);
        }
    }
}
