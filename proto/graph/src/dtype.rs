//! Element types: plain dtypes and the GGUF block types.
//!
//! Sources: MLX's fourteen plain dtypes; GGUF v3 type ids and block layouts; E4M3 of OCP's 8-bit floating point (OFP8) 1.0. A block
//! type packs `block_len` elements of the innermost axis into `block_bytes` bytes; every other axis is plain.

use std::fmt;

macro_rules! dtypes {
    ($($variant:ident $name:literal $gguf:expr, $len:literal, $bytes:literal, $kind:ident;)*) => {
        /// An element type. Plain types, and `f8_e4m3`, have a block length of 1.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum DType { $(#[doc = concat!("`", $name, "`")] $variant,)* }

        impl DType {
            /// Every dtype, in declaration order.
            pub const ALL: &'static [DType] = &[$(DType::$variant,)*];

            /// The stable name used on the wire and in messages, for example `bf16` or `q4_k`.
            pub const fn name(self) -> &'static str { match self { $(DType::$variant => $name,)* } }

            /// Elements per block along the innermost axis; 1 for plain types.
            pub const fn block_len(self) -> usize { match self { $(DType::$variant => $len,)* } }

            /// Bytes per block.
            pub const fn block_bytes(self) -> usize { match self { $(DType::$variant => $bytes,)* } }

            /// What kind of value an element is.
            pub const fn kind(self) -> Kind { match self { $(DType::$variant => Kind::$kind,)* } }

            /// The type id GGUF v3 uses, where it has one.
            pub const fn gguf_id(self) -> Option<u32> { match self { $(DType::$variant => $gguf,)* } }
        }
    };
}

/// The kind of value an element of a [`DType`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `bool`, one byte, 0 or 1.
    Bool,
    /// Unsigned integers.
    Unsigned,
    /// Signed integers.
    Signed,
    /// IEEE and bfloat16 floating point.
    Float,
    /// Complex numbers.
    Complex,
    /// Stored more tightly than it is computed with: quantised blocks, and numbers of 8 bits, which are blocks of one. Only matrix
    /// multiplication, `take` and `cast` read them.
    Block,
}

dtypes! {
    // variant, name, GGUF id, elements and bytes per block, kind
    Bool  "bool"  None,     1, 1, Bool;
    U8    "u8"    None,     1, 1, Unsigned;
    U16   "u16"   None,     1, 2, Unsigned;
    U32   "u32"   None,     1, 4, Unsigned;
    U64   "u64"   None,     1, 8, Unsigned;
    I8    "i8"    Some(24), 1, 1, Signed;
    I16   "i16"   Some(25), 1, 2, Signed;
    I32   "i32"   Some(26), 1, 4, Signed;
    I64   "i64"   Some(27), 1, 8, Signed;
    F16   "f16"   Some(1),  1, 2, Float;
    BF16  "bf16"  Some(30), 1, 2, Float;
    F32   "f32"   Some(0),  1, 4, Float;
    F64   "f64"   Some(28), 1, 8, Float;
    C64   "c64"   None,     1, 8, Complex;
    Q4_0  "q4_0"  Some(2),  32, 18, Block;
    Q4_1  "q4_1"  Some(3),  32, 20, Block;
    Q5_0  "q5_0"  Some(6),  32, 22, Block;
    Q5_1  "q5_1"  Some(7),  32, 24, Block;
    Q8_0  "q8_0"  Some(8),  32, 34, Block;
    Q4K   "q4_k"  Some(12), 256, 144, Block;
    Q5K   "q5_k"  Some(13), 256, 176, Block;
    Q6K   "q6_k"  Some(14), 256, 210, Block;
    MXFP4 "mxfp4" Some(39), 32, 17, Block;
    NVFP4 "nvfp4" Some(40), 64, 36, Block;
    Q2K "q2_k" Some(10), 256, 84, Block;
    Q3K "q3_k" Some(11), 256, 110, Block;
    IQ2XXS "iq2_xxs" Some(16), 256, 66, Block;
    IQ2XS "iq2_xs" Some(17), 256, 74, Block;
    IQ3XXS "iq3_xxs" Some(18), 256, 98, Block;
    IQ1S "iq1_s" Some(19), 256, 50, Block;
    IQ4NL "iq4_nl" Some(20), 32, 18, Block;
    IQ3S "iq3_s" Some(21), 256, 110, Block;
    IQ2S "iq2_s" Some(22), 256, 82, Block;
    IQ4XS "iq4_xs" Some(23), 256, 136, Block;
    IQ1M "iq1_m" Some(29), 256, 56, Block;
    TQ1_0 "tq1_0" Some(34), 256, 54, Block;
    TQ2_0 "tq2_0" Some(35), 256, 66, Block;
    F8E4M3 "f8_e4m3" None, 1, 1, Block;
}

impl DType {
    /// Those whose elements are single numbers, in declaration order.
    pub const PLAIN: &'static [DType] = Self::ALL.split_at(14).0;

    /// Those whose elements are single real numbers, `bool` among them.
    pub const REAL: &'static [DType] = Self::PLAIN.split_at(13).0;

    /// The dtype of this wire name.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.iter().copied().find(|d| d.name() == name)
    }

    /// The dtype of this GGUF v3 type id.
    pub fn from_gguf_id(id: u32) -> Option<DType> {
        DType::ALL.iter().copied().find(|d| d.gguf_id() == Some(id))
    }

    /// Whether it is of the kind [`Kind::Block`].
    pub const fn is_block(self) -> bool {
        matches!(self.kind(), Kind::Block)
    }

    /// Whether this is a block type that floats can be cast to: those whose rule GGUF's own package writes down.
    pub const fn is_encoded(self) -> bool {
        use DType::{MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ1_0, TQ2_0};
        matches!(
            self,
            Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | MXFP4 | TQ1_0 | TQ2_0
        )
    }

    /// Whether elements are plain floating-point numbers.
    pub const fn is_float(self) -> bool {
        matches!(self.kind(), Kind::Float)
    }

    /// Whether elements are integers, `bool` not among them.
    pub const fn is_integer(self) -> bool {
        matches!(self.kind(), Kind::Unsigned | Kind::Signed)
    }

    /// The dtype that holds both operands' values, as JAX and MLX have it: `bool` gives way to everything,
    /// an integer to a float, everything to `c64`; an unsigned with a signed integer takes the next larger
    /// signed one, `u64` with a signed one `f32`, `f16` with `bf16` `f32`. `None` for a block type.
    pub fn promote(self, other: DType) -> Option<DType> {
        use Kind::{Block, Bool, Complex, Float, Signed, Unsigned};
        let wider = |a: DType, b: DType| {
            if a.block_bytes() >= b.block_bytes() {
                a
            } else {
                b
            }
        };
        Some(match (self.kind(), other.kind()) {
            (Block, _) | (_, Block) => return None,
            _ if self == other => self,
            (Bool, _) => other,
            (_, Bool) => self,
            (Complex, _) | (_, Complex) => DType::C64,
            (Float, Float) if self.block_bytes() == other.block_bytes() => DType::F32,
            (Float, Float) | (Unsigned, Unsigned) | (Signed, Signed) => wider(self, other),
            (Float, _) => self,
            (_, Float) => other,
            (Unsigned, Signed) => self.with_signed(other),
            (Signed, Unsigned) => other.with_signed(self),
        })
    }

    /// What an unsigned integer and a signed one promote to.
    fn with_signed(self, signed: DType) -> DType {
        let least = match self {
            DType::U8 => DType::I16,
            DType::U16 => DType::I32,
            DType::U32 => DType::I64,
            _ => return DType::F32,
        };
        if signed.block_bytes() > least.block_bytes() {
            signed
        } else {
            least
        }
    }

    /// What a function of real numbers gives for this dtype: floats stay, integers and `bool` become `f32`.
    /// `None` for `c64` and block types.
    pub const fn to_float(self) -> Option<DType> {
        match self.kind() {
            Kind::Float => Some(self),
            Kind::Bool | Kind::Unsigned | Kind::Signed => Some(DType::F32),
            Kind::Complex | Kind::Block => None,
        }
    }

    /// The dtype that several roundings are done in before one to this dtype: `f32` for `f16` and `bf16`, else itself.
    pub const fn working(self) -> DType {
        match self {
            DType::F16 | DType::BF16 => DType::F32,
            other => other,
        }
    }

    /// Bytes of `elements` elements along the innermost axis; `None` when they do not fill whole
    /// blocks or the size overflows.
    pub const fn row_bytes(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_len()) {
            return None;
        }
        (elements / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ids_are_unique_and_round_trip() {
        for &d in DType::ALL {
            assert_eq!(DType::from_name(d.name()), Some(d));
            if let Some(id) = d.gguf_id() {
                assert_eq!(DType::from_gguf_id(id), Some(d));
            }
        }
        // Ids that GGUF removed have no block size; reading one must not find a type.
        for id in [4, 5, 31, 32, 33, 36, 37, 38, u32::MAX] {
            assert_eq!(DType::from_gguf_id(id), None);
        }
    }

    #[test]
    fn plain_and_real_are_what_their_kinds_say() {
        let of = |is: fn(Kind) -> bool| -> Vec<DType> {
            let all = DType::ALL.iter().copied();
            all.filter(|dtype| is(dtype.kind())).collect()
        };
        assert_eq!(DType::PLAIN, of(|kind| kind != Kind::Block));
        let real = of(|kind| !matches!(kind, Kind::Block | Kind::Complex));
        assert_eq!(DType::REAL, real);
    }

    #[test]
    fn promotion_is_the_table() {
        use DType::*;
        // Columns as the rows, and both as they are declared. From the rules: JAX's lattice, with u64 and a signed
        // integer f32.
        let order = DType::PLAIN;
        #[rustfmt::skip]
        let table = [
            [Bool, U8, U16, U32, U64, I8, I16, I32, I64, F16, BF16, F32, F64, C64],
            [U8, U8, U16, U32, U64, I16, I16, I32, I64, F16, BF16, F32, F64, C64],
            [U16, U16, U16, U32, U64, I32, I32, I32, I64, F16, BF16, F32, F64, C64],
            [U32, U32, U32, U32, U64, I64, I64, I64, I64, F16, BF16, F32, F64, C64],
            [U64, U64, U64, U64, U64, F32, F32, F32, F32, F16, BF16, F32, F64, C64],
            [I8, I16, I32, I64, F32, I8, I16, I32, I64, F16, BF16, F32, F64, C64],
            [I16, I16, I32, I64, F32, I16, I16, I32, I64, F16, BF16, F32, F64, C64],
            [I32, I32, I32, I64, F32, I32, I32, I32, I64, F16, BF16, F32, F64, C64],
            [I64, I64, I64, I64, F32, I64, I64, I64, I64, F16, BF16, F32, F64, C64],
            [F16, F16, F16, F16, F16, F16, F16, F16, F16, F16, F32, F32, F64, C64],
            [BF16, BF16, BF16, BF16, BF16, BF16, BF16, BF16, BF16, F32, BF16, F32, F64, C64],
            [F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F64, C64],
            [F64, F64, F64, F64, F64, F64, F64, F64, F64, F64, F64, F64, F64, C64],
            [C64, C64, C64, C64, C64, C64, C64, C64, C64, C64, C64, C64, C64, C64],
        ];
        for (a, row) in order.iter().zip(&table) {
            for (b, want) in order.iter().zip(row) {
                assert_eq!(a.promote(*b), Some(*want), "{a} and {b}");
            }
            assert_eq!(a.promote(Q4_0), None);
            assert_eq!(Q6K.promote(*a), None);
        }
        assert_eq!(Q4_0.promote(Q4_0), None);
        assert_eq!([Bool, U64, I8].map(DType::to_float), [Some(F32); 3]);
        assert_eq!([F16, F64].map(DType::to_float), [Some(F16), Some(F64)]);
        assert_eq!([C64, Q4_0].map(DType::to_float), [None; 2]);
        assert_eq!(
            [F16, BF16, F32, F64, I8].map(DType::working),
            [F32, F32, F32, F64, I8]
        );
    }

    #[test]
    fn rows_must_fill_whole_blocks() {
        assert_eq!(DType::Q4_0.row_bytes(64), Some(36));
        assert_eq!(DType::Q4_0.row_bytes(33), None);
        assert_eq!(DType::Q6K.row_bytes(512), Some(420));
        assert_eq!(DType::F64.row_bytes(usize::MAX), None);
    }
}
