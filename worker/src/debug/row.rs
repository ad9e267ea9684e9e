//! What is told of one row of a node's values.

use half::{bf16, f16};
use hotcell_graph::DType;
use hotcell_proto::v1;
use sha2::{Digest, Sha256};

/// What a row's values are like. Those that are no numbers are counted only.
pub(super) fn statistics(row: &[u8], dtype: DType) -> v1::NodeValues {
    let value = |bytes: &[u8]| match (dtype, bytes) {
        (DType::F16, &[a, b]) => f64::from(f16::from_le_bytes([a, b]).to_f32()),
        (DType::BF16, &[a, b]) => f64::from(bf16::from_le_bytes([a, b]).to_f32()),
        (_, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
        _ => f64::NAN,
    };
    let mut told = v1::NodeValues {
        hash: Sha256::digest(row).to_vec(),
        ..v1::NodeValues::default()
    };
    let (mut least, mut greatest) = (f64::INFINITY, f64::NEG_INFINITY);
    let (mut count, mut sum, mut squares) = (0u64, 0.0, 0.0);
    for value in row.chunks_exact(dtype.block_bytes()).map(value) {
        if value.is_nan() {
            told.nan += 1;
        } else if value.is_infinite() {
            told.infinite += 1;
        } else {
            told.zero += u64::from(value == 0.0);
            (least, greatest) = (least.min(value), greatest.max(value));
            count += 1;
            sum += value;
            squares += value * value;
        }
    }
    if count > 0 {
        (told.least, told.greatest) = (least, greatest);
        told.mean = sum / count as f64;
        told.rms = (squares / count as f64).sqrt();
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn a_row_is_told_by_its_numbers_and_what_is_none_is_counted() {
        let told = statistics(
            &row(&[3.0, 0.0, -4.0, f32::NAN, f32::INFINITY, -0.0]),
            DType::F32,
        );
        assert_eq!((told.nan, told.infinite, told.zero), (1, 1, 2));
        assert_eq!((told.least, told.greatest), (-4.0, 3.0));
        assert_eq!((told.mean, told.rms), (-0.25, 2.5));
        let half: Vec<u8> = [f16::from_f32(1.5), f16::NAN]
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect();
        let told = statistics(&half, DType::F16);
        assert_eq!((told.nan, told.greatest), (1, 1.5));
        assert_ne!(told.hash, statistics(&row(&[1.0]), DType::F32).hash);
        assert_eq!(statistics(&[], DType::F32).rms, 0.0);
    }
}
