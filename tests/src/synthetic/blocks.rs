//! Random weights of every weight dtype, any part of a tensor at a time: what a block holds depends on its place only.

use hotcell_graph::DType;
use hotcell_kernels::cpu::{
    dequant::is_weight_dtype,
    lanes::{f16_to_f32, f32_to_bf16, f32_to_f16},
};

use crate::chance::nth;

/// Numbers that a block may use up.
const NUMBERS: u64 = 64;
/// Plain elements that one number makes.
const PLAIN: usize = 4;

/// The root mean square of whole numbers from `low` to `high`, all as likely.
fn spread(low: i32, high: i32) -> f32 {
    let squares: f64 = (low..=high).map(|n| f64::from(n * n)).sum();
    (squares / f64::from(high - low + 1)).sqrt() as f32
}

/// The numbers of one block.
struct Numbers {
    key: u64,
    at: u64,
}

impl Numbers {
    fn next(&mut self) -> u64 {
        let number = nth(self.key, self.at);
        self.at += 1;
        number
    }

    fn bytes(&mut self, out: &mut [u8]) {
        for eight in out.chunks_mut(8) {
            eight.copy_from_slice(&self.next().to_le_bytes()[..eight.len()]);
        }
    }

    /// This code of a scale or the next one, each as often as makes the mean of the squares that of `about`, which lies
    /// between them.
    fn between(&mut self, about: f32, low: u8, value: impl Fn(u8) -> f32) -> u8 {
        let (less, more) = (value(low), value(low + 1));
        let share = (about * about - less * less) / (more * more - less * less);
        let chance = (self.next() >> 40) as f32 / (1u64 << 24) as f32;
        low + u8::from(chance < share)
    }

    /// A block's scale in F16: about this large, with either sign if `signed`, and never the same as the next one's.
    fn scale(&mut self, about: f32, signed: bool) -> u16 {
        let number = self.next();
        let size = 0.75 + (number >> 40) as f32 / (1u64 << 25) as f32;
        let negative = signed && number & 1 == 1;
        f32_to_f16(if negative {
            -about * size
        } else {
            about * size
        })
    }
}

fn put(out: &mut [u8], at: usize, half: u16) {
    out[at..at + 2].copy_from_slice(&half.to_le_bytes());
}

/// So many times an F16, rounded to F16 again.
fn times(half: u16, factor: f32) -> u16 {
    f32_to_f16(f16_to_f32(half) * factor)
}

/// Fills `out` with weights of this dtype whose mean is about 0 and whose standard deviation is about `deviation`.
/// They are those of the tensor that `key` names, from its `first` element on, which begins a block, and a group of
/// four if there are no blocks; so does the end of `out`.
///
/// Scales and quants are like those of real files: Q4_0, Q5_0 and Q6_K have negative scales too, minima are what
/// brings the mean to 0, and -128 does not occur.
///
/// # Panics
/// When `dtype` is no weight dtype or `out` is no whole number of blocks.
pub fn fill(dtype: DType, key: u64, first: u64, deviation: f32, out: &mut [u8]) {
    let plain = |element: u64| -> [f32; PLAIN] {
        let number = nth(key, element / PLAIN as u64);
        // Evenly between ±√3 deviations.
        let unit = deviation * 3f32.sqrt() / 32768.0;
        std::array::from_fn(|i| f32::from((number >> (16 * i)) as u16 as i16) * unit + 0.5 * unit)
    };
    match dtype {
        DType::F32 => {
            for (i, out) in out.chunks_exact_mut(4 * PLAIN).enumerate() {
                let values = plain(first + (i * PLAIN) as u64);
                for (out, value) in out.chunks_exact_mut(4).zip(values) {
                    out.copy_from_slice(&value.to_le_bytes());
                }
            }
        }
        DType::F16 | DType::BF16 => {
            let convert = match dtype {
                DType::F16 => f32_to_f16,
                _ => f32_to_bf16,
            };
            for (i, out) in out.chunks_exact_mut(2 * PLAIN).enumerate() {
                let values = plain(first + (i * PLAIN) as u64);
                for (out, value) in out.chunks_exact_mut(2).zip(values) {
                    out.copy_from_slice(&convert(value).to_le_bytes());
                }
            }
        }
        _ => {
            let (len, bytes) = (dtype.block_len() as u64, dtype.block_bytes());
            assert!(dtype.is_block() && out.len().is_multiple_of(bytes));
            let scale = deviation / unit(dtype);
            for (i, out) in out.chunks_exact_mut(bytes).enumerate() {
                let at = (first / len + i as u64) * NUMBERS;
                block(dtype, &mut Numbers { key, at }, scale, out);
            }
        }
    }
}

/// Whether there is such a dtype in GGUF, to compute with.
pub(super) fn is_writable(dtype: DType) -> bool {
    is_weight_dtype(dtype) && dtype.gguf_id().is_some()
}

/// The standard deviation of weights whose blocks' scale is 1.
fn unit(dtype: DType) -> f32 {
    match dtype {
        DType::Q4_0 => spread(-8, 7),
        DType::Q5_0 => spread(-16, 15),
        DType::Q8_0 => spread(-127, 127),
        // The minimum moves these to halves from -7.5 to 7.5, and from -15.5 to 15.5.
        DType::Q4_1 | DType::Q4K => ((16f32 * 16.0 - 1.0) / 12.0).sqrt() * sub_scale(dtype),
        DType::Q5_1 | DType::Q5K => ((32f32 * 32.0 - 1.0) / 12.0).sqrt() * sub_scale(dtype),
        DType::Q6K => spread(-32, 31) * sub_scale(dtype),
        // Of E2M1's eight sizes the squares' sum is 68.5.
        DType::MXFP4 | DType::NVFP4 => (68.5f32 / 8.0).sqrt(),
        _ => panic!("{dtype} has no random blocks"),
    }
}

/// What the scales inside of a block multiply by, as a root mean square.
fn sub_scale(dtype: DType) -> f32 {
    match dtype {
        DType::Q4K | DType::Q5K => spread(32, 63),
        DType::Q6K => spread(64, 127),
        _ => 1.0,
    }
}

fn block(dtype: DType, numbers: &mut Numbers, about: f32, out: &mut [u8]) {
    match dtype {
        DType::Q4_0 | DType::Q5_0 => {
            put(out, 0, numbers.scale(about, true));
            numbers.bytes(&mut out[2..]);
        }
        DType::Q4_1 | DType::Q5_1 => {
            let middle = if dtype == DType::Q4_1 { -7.5 } else { -15.5 };
            let d = numbers.scale(about, false);
            put(out, 0, d);
            put(out, 2, times(d, middle));
            numbers.bytes(&mut out[4..]);
        }
        DType::Q8_0 => {
            put(out, 0, numbers.scale(about, false));
            numbers.bytes(&mut out[2..]);
            for quant in &mut out[2..] {
                *quant = if *quant == 0x80 { 0 } else { *quant };
            }
        }
        DType::Q4K | DType::Q5K => {
            let middle = if dtype == DType::Q4K { 7.5 } else { 15.5 };
            let d = numbers.scale(about, false);
            put(out, 0, d);
            put(out, 2, times(d, middle));
            // Each sub-block's minimum is as its scale, so that with dmin the mean is 0.
            let random = numbers.next().to_le_bytes();
            out[4..16].copy_from_slice(&scales(random.map(|byte| 32 + byte % 32)));
            numbers.bytes(&mut out[16..]);
        }
        DType::Q6K => {
            numbers.bytes(&mut out[..208]);
            for scale in &mut out[192..208] {
                let size = 64 + (*scale & 63);
                *scale = if *scale & 64 == 0 {
                    size
                } else {
                    size.wrapping_neg()
                };
            }
            put(out, 208, numbers.scale(about, false));
        }
        DType::MXFP4 => {
            numbers.bytes(out);
            let power = |code: u8| f32::from_bits(u32::from(code) << 23);
            out[0] = numbers.between(about, (about.to_bits() >> 23) as u8, power);
        }
        DType::NVFP4 => {
            numbers.bytes(out);
            // E4M3 is half precision with less of each, 2^8 times as large.
            let low = (f32_to_f16(about / 256.0) >> 7) as u8;
            let scale = |code: u8| f16_to_f32(u16::from(code) << 7) * 256.0;
            out[..4].fill_with(|| numbers.between(about, low, scale));
        }
        _ => panic!("{dtype} has no random blocks"),
    }
}

/// Eight 6-bit scales, and the same eight as minima, in the 12 bytes of Q4_K and Q5_K. Source: `get_scale_min_k4` in
/// ggml-quants.c, and `quants.py` of gguf-py.
fn scales(eight: [u8; 8]) -> [u8; 12] {
    let mut out = [0; 12];
    for j in 0..4 {
        let (low, high) = (eight[j], eight[j + 4]);
        out[j] = low | (high >> 4) << 6;
        out[j + 4] = low | (high >> 4) << 6;
        out[j + 8] = high & 15 | (high & 15) << 4;
    }
    out
}

#[cfg(test)]
mod tests {
    use hotcell_kernels::cpu::dequant::dequantize_row;

    use super::*;

    fn values(dtype: DType, key: u64, first: u64, count: usize) -> Vec<f32> {
        let mut bytes = vec![0; dtype.row_bytes(count).unwrap()];
        fill(dtype, key, first, 0.02, &mut bytes);
        let mut values = vec![0.0; count];
        dequantize_row(dtype, &bytes, &mut values);
        values
    }

    fn weights() -> impl Iterator<Item = DType> {
        let all = DType::ALL.iter().copied();
        all.filter(|dtype| is_writable(*dtype))
    }

    #[test]
    fn weights_are_spread_as_asked() {
        const COUNT: usize = 1 << 18;
        for dtype in weights() {
            let values = values(dtype, 7, 0, COUNT);
            assert!(values.iter().all(|v| v.is_finite()), "{dtype}");
            let sum = |f: fn(f64) -> f64| values.iter().map(|v| f(f64::from(*v))).sum::<f64>();
            let (mean, square) = (sum(|v| v) / COUNT as f64, sum(|v| v * v) / COUNT as f64);
            let deviation = square.sqrt();
            assert!(mean.abs() < 0.02 * 0.02, "{dtype}: {mean}");
            assert!(
                (deviation / 0.02 - 1.0).abs() < 0.05,
                "{dtype}: {deviation}"
            );
            let most = values.iter().fold(0f32, |most, v| most.max(v.abs()));
            assert!(most < 0.02 * 5.0, "{dtype}: {most}");
        }
    }

    #[test]
    fn a_part_is_a_part_of_the_whole() {
        for dtype in weights() {
            let whole = values(dtype, 3, 0, 4096);
            assert_eq!(values(dtype, 3, 1024, 512), whole[1024..1536], "{dtype}");
            assert_ne!(values(dtype, 4, 1024, 512), whole[1024..1536], "{dtype}");
            // No block is like the next.
            let len = dtype.block_len().max(PLAIN);
            assert_ne!(whole[..len], whole[len..2 * len], "{dtype}");
        }
    }
}
