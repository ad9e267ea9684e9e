//! Numbers as integers of the same order, so that one comparison serves every dtype.
//!
//! A float's bits, read as a signed integer, order like the number once the magnitude of negative numbers is
//! turned over. NaN is the greatest key whatever its sign and payload.

/// Infinity's bits in the sixteen-bit formats.
pub(super) const F16_INFINITY: i16 = 0x7c00;
/// The same for bfloat16.
pub(super) const BF16_INFINITY: i16 = 0x7f80;

macro_rules! float_keys {
    ($($(#[$doc:meta])* $key:ident, $order:ident: $int:ty, $shift:literal;)*) => {$(
        $(#[$doc])*
        /// `infinity`: the bits of infinity; `flip`: 0 for ascending order, −1 for descending.
        #[inline(always)]
        pub(super) fn $key(bits: $int, infinity: $int, flip: $int) -> $int {
            let magnitude = bits & <$int>::MAX;
            let key = bits ^ ((bits >> $shift) & <$int>::MAX) ^ flip;
            if magnitude > infinity { <$int>::MAX } else { key }
        }

        /// The same, with both zeros equal.
        #[inline(always)]
        pub(super) fn $order(bits: $int, infinity: $int, flip: $int) -> $int {
            let bits = if bits == <$int>::MIN { 0 } else { bits };
            $key(bits, infinity, flip)
        }
    )*};
}

float_keys! {
    /// The key of a sixteen-bit float.
    key16, order16: i16, 15;
    /// The key of an f32.
    key32, order32: i32, 31;
    /// The key of an f64.
    key64, order64: i64, 63;
}

/// Infinity's bits.
pub(super) const F32_INFINITY: i32 = 0x7f80_0000;
/// Infinity's bits.
pub(super) const F64_INFINITY: i64 = 0x7ff0_0000_0000_0000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_as_numbers_do() {
        let values = [
            f32::NEG_INFINITY,
            -2.0,
            -f32::MIN_POSITIVE,
            -0.0,
            0.0,
            1e-40,
            1.0,
            f32::INFINITY,
            f32::NAN,
        ];
        let key = |v: f32, flip| key32(v.to_bits() as i32, F32_INFINITY, flip);
        for pair in values.windows(2) {
            assert!(key(pair[0], 0) < key(pair[1], 0), "{pair:?}");
        }
        for pair in values[..8].windows(2) {
            assert!(key(pair[0], -1) > key(pair[1], -1), "{pair:?}");
        }
        assert_eq!(key(-f32::NAN, 0), i32::MAX);
        assert_eq!(key(f32::NAN, -1), i32::MAX);
        assert_eq!(
            order16(i16::MIN, F16_INFINITY, 0),
            order16(0, F16_INFINITY, 0)
        );
    }
}
