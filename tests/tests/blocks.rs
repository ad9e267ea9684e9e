//! Block formats against the PyPI package `gguf`, value for value (`tests/golden/blocks/make.py`).

use std::path::Path;

use hotcell_graph::DType;
use hotcell_kernels::cpu::dequant::dequantize_row;
use safetensors::SafeTensors;

#[test]
fn every_block_type_decodes_to_the_reference_values() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/blocks");
    for dtype in [
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::MXFP4,
        DType::NVFP4,
        DType::Q2K,
        DType::Q3K,
        DType::IQ2XXS,
        DType::IQ2XS,
        DType::IQ3XXS,
        DType::IQ1S,
        DType::IQ4NL,
        DType::IQ3S,
        DType::IQ2S,
        DType::IQ4XS,
        DType::IQ1M,
        DType::TQ1_0,
        DType::TQ2_0,
        DType::F16,
        DType::BF16,
    ] {
        let bytes = std::fs::read(folder.join(format!("{dtype}.safetensors"))).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let (raw, values) = (file.tensor("raw").unwrap(), file.tensor("values").unwrap());
        let (rows, row_bytes, width) = (raw.shape()[0], raw.shape()[1], values.shape()[1]);
        assert_eq!(dtype.row_bytes(width), Some(row_bytes), "{dtype}");
        assert!(rows >= 12);
        for r in 0..rows {
            let mut ours = vec![0.0f32; width];
            dequantize_row(dtype, &raw.data()[r * row_bytes..][..row_bytes], &mut ours);
            for (i, value) in ours.iter().enumerate() {
                let at = (r * width + i) * 4;
                let reference = f32::from_le_bytes(values.data()[at..at + 4].try_into().unwrap());
                // −0 and +0 are one value; everything else is compared by its bits.
                let equal = value.to_bits() == reference.to_bits() || *value == reference;
                assert!(
                    equal,
                    "{dtype} block {r} element {i}: {value:e}, not {reference:e}"
                );
            }
        }
    }
}
