//! Elements of outputs as JSON.

use serde_json::Value;

use crate::gateway::oip::tensor::{Datatype, each_string};

/// The value of a number of 16 bits, of which five are the exponent (IEEE 754, binary16).
fn half(bits: u16) -> f32 {
    let (exponent, fraction) = ((bits >> 10) & 0x1f, f32::from(bits & 0x3ff));
    let size = match exponent {
        0 => fraction * 2f32.powi(-24),
        0x1f if fraction == 0.0 => f32::INFINITY,
        0x1f => f32::NAN,
        _ => (1024.0 + fraction) * 2f32.powi(i32::from(exponent) - 25),
    };
    if bits >> 15 == 1 { -size } else { size }
}

/// The elements of an output as JSON. What is no number there (infinities, not-a-number) is null.
pub(super) fn elements(datatype: &str, data: &[u8]) -> Vec<Value> {
    macro_rules! each {
        ($number:ty) => {
            each!($number, |value: $number| value)
        };
        ($number:ty, $value:expr) => {{
            let words = data.as_chunks::<{ size_of::<$number>() }>().0.iter();
            let value = $value;
            words
                .map(|word| Value::from(value(<$number>::from_le_bytes(*word))))
                .collect()
        }};
    }
    match Datatype::of(datatype) {
        Ok(Datatype::Bool) => data.iter().map(|byte| Value::from(*byte != 0)).collect(),
        Ok(Datatype::Uint8) => each!(u8),
        Ok(Datatype::Uint16) => each!(u16),
        Ok(Datatype::Uint32) => each!(u32),
        Ok(Datatype::Uint64) => each!(u64),
        Ok(Datatype::Int8) => each!(i8),
        Ok(Datatype::Int16) => each!(i16),
        Ok(Datatype::Int32) => each!(i32),
        Ok(Datatype::Int64) => each!(i64),
        Ok(Datatype::Fp16) => each!(u16, half),
        Ok(Datatype::Bf16) => each!(u16, |bits| f32::from_bits(u32::from(bits) << 16)),
        Ok(Datatype::Fp32) => each!(f32),
        Ok(Datatype::Fp64) => each!(f64),
        Ok(Datatype::Bytes) | Err(_) => {
            let texts = each_string(data).map(String::from_utf8_lossy);
            texts.map(|text| text.into_owned().into()).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_of_every_type_are_told_as_they_are() {
        let told = |datatype: &str, data: &[u8]| Value::from(elements(datatype, data));
        assert_eq!(told("FP32", &1.5f32.to_le_bytes()), json!([1.5]));
        assert_eq!(told("FP64", &(-0.1f64).to_le_bytes()), json!([-0.1]));
        assert_eq!(told("INT8", &[0xff, 1]), json!([-1, 1]));
        assert_eq!(told("INT64", &(-5i64).to_le_bytes()), json!([-5]));
        assert_eq!(told("UINT64", &u64::MAX.to_le_bytes()), json!([u64::MAX]));
        assert_eq!(told("BOOL", &[0, 1]), json!([false, true]));
        assert_eq!(told("BF16", &0x3fc0u16.to_le_bytes()), json!([1.5]));
        // One and a half, minus two, the smallest one, the largest one, infinity.
        let halves = [0x3e00u16, 0xc000, 0x0001, 0x7bff, 0x7c00];
        let halves: Vec<u8> = halves.iter().flat_map(|h| h.to_le_bytes()).collect();
        let want = json!([1.5, -2.0, 2f32.powi(-24), 65504.0, null]);
        assert_eq!(told("FP16", &halves), want);
        assert_eq!(told("BYTES", b"\x02\0\0\0hi"), json!(["hi"]));
    }
}
