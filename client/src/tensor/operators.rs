//! Arithmetic and bit operators of tensors, and of tensors and numbers.

use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Neg, Not, Rem, Sub};

use hotcell_graph::DType;

use super::{array::Tensor, host::HostTensor, ops::one};

/// A number written into an expression takes the tensor's dtype, as Python's numbers do; f32 beside integers.
fn number(beside: &Tensor, value: f64) -> Tensor {
    let dtype = match beside.dtype() {
        Ok(dtype) if dtype.is_float() || dtype == DType::C64 => dtype,
        Ok(dtype) if value.fract() == 0.0 && dtype != DType::Bool && !dtype.is_block() => dtype,
        Ok(_) => DType::F32,
        Err(error) => return Tensor::wrong(None, error),
    };
    match HostTensor::from_slice(&[value], &[]) {
        // Cast on the worker by the catalogue's rule, not by a second one here.
        Ok(data) => Tensor::host(None, data, true).cast(dtype),
        Err(error) => Tensor::wrong(None, error),
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:literal;)*) => {$(
        impl $trait<&Tensor> for &Tensor {
            type Output = Tensor;
            fn $method(self, other: &Tensor) -> Tensor {
                one($op, &[Some(self), Some(other)], vec![])
            }
        }
        impl $trait<Tensor> for &Tensor {
            type Output = Tensor;
            fn $method(self, other: Tensor) -> Tensor {
                $trait::$method(self, &other)
            }
        }
        impl $trait<&Tensor> for Tensor {
            type Output = Tensor;
            fn $method(self, other: &Tensor) -> Tensor {
                $trait::$method(&self, other)
            }
        }
        impl $trait<Tensor> for Tensor {
            type Output = Tensor;
            fn $method(self, other: Tensor) -> Tensor {
                $trait::$method(&self, &other)
            }
        }
        impl $trait<f64> for &Tensor {
            type Output = Tensor;
            fn $method(self, other: f64) -> Tensor {
                $trait::$method(self, &number(self, other))
            }
        }
        impl $trait<f64> for Tensor {
            type Output = Tensor;
            fn $method(self, other: f64) -> Tensor {
                $trait::$method(&self, other)
            }
        }
        impl $trait<&Tensor> for f64 {
            type Output = Tensor;
            fn $method(self, other: &Tensor) -> Tensor {
                $trait::$method(&number(other, self), other)
            }
        }
        impl $trait<Tensor> for f64 {
            type Output = Tensor;
            fn $method(self, other: Tensor) -> Tensor {
                $trait::$method(self, &other)
            }
        }
    )*};
}

operators! {
    Add add "add";
    Sub sub "sub";
    Mul mul "mul";
    Div div "div";
    Rem rem "remainder";
    BitAnd bitand "bitwise_and";
    BitOr bitor "bitwise_or";
    BitXor bitxor "bitwise_xor";
}

impl Neg for &Tensor {
    type Output = Tensor;
    fn neg(self) -> Tensor {
        Tensor::neg(self)
    }
}

impl Neg for Tensor {
    type Output = Tensor;
    fn neg(self) -> Tensor {
        Tensor::neg(&self)
    }
}

impl Not for &Tensor {
    type Output = Tensor;
    fn not(self) -> Tensor {
        self.logical_not()
    }
}

impl Not for Tensor {
    type Output = Tensor;
    fn not(self) -> Tensor {
        self.logical_not()
    }
}
