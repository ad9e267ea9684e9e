//! Tensors in this process's memory.

use bytes::Bytes;
use half::{bf16, f16};

use hotcell_graph::{DType, Shape, TensorSpec};
use hotcell_proto::error::{Error, Reason};

use super::array::invalid;

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is a dtype's element.
pub trait Element: Copy + sealed::Sealed {
    /// The dtype.
    const DTYPE: DType;
    /// Appends its little-endian bytes.
    fn put(self, bytes: &mut Vec<u8>);
    /// Reads it from exactly as many bytes as it has.
    fn get(bytes: &[u8]) -> Self;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            fn put(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }
            fn get(bytes: &[u8]) -> Self {
                let mut exact = [0; size_of::<$type>()];
                exact.copy_from_slice(bytes);
                Self::from_le_bytes(exact)
            }
        }
    )*};
}

elements! {
    u8 => U8, u16 => U16, u32 => U32, u64 => U64, i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    f16 => F16, bf16 => BF16, f32 => F32, f64 => F64,
}

impl sealed::Sealed for bool {}
impl Element for bool {
    const DTYPE: DType = DType::Bool;
    fn put(self, bytes: &mut Vec<u8>) {
        bytes.push(u8::from(self));
    }
    fn get(bytes: &[u8]) -> Self {
        bytes.iter().any(|b| *b != 0)
    }
}

/// A complex number: real and imaginary part.
impl sealed::Sealed for [f32; 2] {}
impl Element for [f32; 2] {
    const DTYPE: DType = DType::C64;
    fn put(self, bytes: &mut Vec<u8>) {
        self.into_iter().for_each(|part| part.put(bytes));
    }
    fn get(bytes: &[u8]) -> Self {
        let (re, im) = bytes.split_at(4);
        [f32::get(re), f32::get(im)]
    }
}

/// One element of any plain dtype, for printing and comparing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Plain {
    /// A number. Every dtype below 64 bits fits exactly.
    Float(f64),
    /// An integer.
    Int(i128),
    /// Yes or no.
    Bool(bool),
    /// Real and imaginary part.
    Complex(f64, f64),
}

impl Plain {
    /// As a number; a complex one gives its real part.
    pub fn as_f64(self) -> f64 {
        self.parts()[0]
    }

    /// Real and imaginary part; of a real number the second is 0.
    pub fn parts(self) -> [f64; 2] {
        match self {
            Plain::Float(v) => [v, 0.0],
            Plain::Complex(re, im) => [re, im],
            Plain::Int(v) => [v as f64, 0.0],
            Plain::Bool(v) => [f64::from(u8::from(v)), 0.0],
        }
    }
}

/// Dtype, shape and bytes (row-major, little-endian).
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    spec: TensorSpec,
    bytes: Bytes,
}

impl HostTensor {
    /// Checks that `bytes` is as long as the spec says.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when it is not, or the shape has a symbolic axis.
    pub fn new(spec: TensorSpec, bytes: impl Into<Bytes>) -> Result<Self, Error> {
        let bytes = bytes.into();
        match spec.bytes(0) {
            Some(n) if n == bytes.len() && !spec.shape.is_symbolic() => Ok(Self { spec, bytes }),
            _ => Err(invalid(format!("{} bytes are not a {spec}", bytes.len()))),
        }
    }

    /// A tensor of these elements, row-major.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when there are not as many as the shape says.
    pub fn from_slice<T: Element>(values: &[T], shape: &[usize]) -> Result<Self, Error> {
        let shape = Shape::fixed(shape).map_err(|e| invalid(e.to_string()))?;
        let mut bytes = Vec::with_capacity(values.len().saturating_mul(T::DTYPE.block_bytes()));
        values.iter().for_each(|v| v.put(&mut bytes));
        let spec = TensorSpec::new(T::DTYPE, shape).map_err(|e| invalid(e.to_string()))?;
        Self::new(spec, bytes)
    }

    /// Dtype and shape.
    pub fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> Vec<usize> {
        self.spec.shape.dims().iter().map(|d| d.at(0)).collect()
    }

    /// The bytes.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The elements, row-major.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when the dtype is not `T`'s; cast first.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>, Error> {
        if T::DTYPE != self.spec.dtype {
            let what = format!(
                "the tensor is {}, not {}; cast it first",
                self.spec.dtype,
                T::DTYPE
            );
            return Err(Error::new(Reason::InvalidArgument, what));
        }
        let size = T::DTYPE.block_bytes();
        Ok(self.bytes.chunks_exact(size).map(T::get).collect())
    }

    /// The elements as numbers, row-major.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] for block types; cast first.
    pub fn plain(&self) -> Result<Vec<Plain>, Error> {
        fn all<T: Element>(t: &HostTensor, as_plain: fn(T) -> Plain) -> Result<Vec<Plain>, Error> {
            Ok(t.to_vec::<T>()?.into_iter().map(as_plain).collect())
        }
        match self.spec.dtype {
            DType::Bool => all::<bool>(self, Plain::Bool),
            DType::U8 => all::<u8>(self, |v| Plain::Int(v.into())),
            DType::U16 => all::<u16>(self, |v| Plain::Int(v.into())),
            DType::U32 => all::<u32>(self, |v| Plain::Int(v.into())),
            DType::U64 => all::<u64>(self, |v| Plain::Int(v.into())),
            DType::I8 => all::<i8>(self, |v| Plain::Int(v.into())),
            DType::I16 => all::<i16>(self, |v| Plain::Int(v.into())),
            DType::I32 => all::<i32>(self, |v| Plain::Int(v.into())),
            DType::I64 => all::<i64>(self, |v| Plain::Int(v.into())),
            DType::F16 => all::<f16>(self, |v| Plain::Float(v.to_f64())),
            DType::BF16 => all::<bf16>(self, |v| Plain::Float(v.to_f64())),
            DType::F32 => all::<f32>(self, |v| Plain::Float(v.into())),
            DType::F64 => all::<f64>(self, Plain::Float),
            DType::C64 => all::<[f32; 2]>(self, |[re, im]| Plain::Complex(re.into(), im.into())),
            block => Err(invalid(format!(
                "{block} elements are packed; cast the tensor to f32 first"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_round_trip_and_are_typed() {
        let t = HostTensor::from_slice(&[1i32, -2, 3, 4], &[2, 2]).unwrap();
        assert_eq!(t.bytes()[4..8], [0xfe, 0xff, 0xff, 0xff]);
        assert_eq!(t.to_vec::<i32>().unwrap(), [1, -2, 3, 4]);
        assert!(t.to_vec::<f32>().is_err());
        assert!(HostTensor::from_slice(&[1i32], &[2]).is_err());
        // Nothing at all is a tensor too.
        let empty = HostTensor::from_slice::<f32>(&[], &[0, 3]).unwrap();
        assert_eq!(empty.to_vec::<f32>().unwrap(), [] as [f32; 0]);
        let c = HostTensor::from_slice(&[[1.0f32, -2.0]], &[]).unwrap();
        assert_eq!(c.plain().unwrap(), [Plain::Complex(1.0, -2.0)]);
        let b = HostTensor::from_slice(&[true, false], &[2]).unwrap();
        assert_eq!(b.to_vec::<bool>().unwrap(), [true, false]);
    }
}
