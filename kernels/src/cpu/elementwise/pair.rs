//! Two f32 instructions in one: `(a ∘ b) ∘ c`, each rounded by itself, without a tile for what lies between.

use hotcell_graph::DType;

use super::code::{Code, binary, ternary};
use crate::cpu::path::CpuPath;

/// What may be one of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arith {
    Add,
    Sub,
    Mul,
    Abs,
}

impl Arith {
    /// The op's, on operands of a dtype.
    pub fn of(op: &str, dtype: DType) -> Option<Self> {
        match (op, dtype) {
            ("add", DType::F32) => Some(Arith::Add),
            ("sub", DType::F32) => Some(Arith::Sub),
            ("mul", DType::F32) => Some(Arith::Mul),
            ("abs", DType::F32) => Some(Arith::Abs),
            _ => None,
        }
    }
}

/// The pair in which the first's result is the second's operand `place`. Of two NaNs, processors take the first operand's
/// bits, so a sum or product keeps its order. The arguments are those of the first, then the
/// second's other one.
pub(super) fn code(first: Arith, second: Arith, place: usize, path: CpuPath) -> Option<Code> {
    macro_rules! after {
        (|$a:ident, $b:ident| $e:expr) => {
            match (second, place) {
                (Arith::Add, 0) => ternary!(wide3, path, f32 => f32, |$a, $b, c| ($e) + c),
                (Arith::Sub, 0) => ternary!(wide3, path, f32 => f32, |$a, $b, c| ($e) - c),
                (Arith::Sub, 1) => ternary!(wide3, path, f32 => f32, |$a, $b, c| c - ($e)),
                (Arith::Mul, 0) => ternary!(wide3, path, f32 => f32, |$a, $b, c| ($e) * c),
                (Arith::Abs, 0) => binary!(wide2, path, f32 => f32, |$a, $b| ($e).abs()),
                _ => None,
            }
        };
    }
    match first {
        Arith::Add => after!(|a, b| a + b),
        Arith::Sub => after!(|a, b| a - b),
        Arith::Mul => after!(|a, b| a * b),
        Arith::Abs => None,
    }
}
