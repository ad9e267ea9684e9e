//! How far a device's results may be from another one's: one bound per op, to which every backend is held by the
//! conformance tests and by which two captures are told apart.

use hotcell_graph::DType;

/// Whether the other factor of a product may be rounded as well: with weights in blocks of several.
pub fn rounds_others(weights: DType) -> bool {
    weights.block_len() > 1
}

/// Greatest normalised mean squared error of an op's results of this dtype.
///
/// f64 is held to more than the square of an f32's rounding: computing it in f32 must not pass. With `blocks`, one of [`rounds_others`]
/// among the inputs, a product may round the other factor to 8 bits, as ggml does and with ggml's bound.
pub fn tolerance(op: &str, dtype: DType, blocks: bool) -> f64 {
    let sums = matches!(
        op,
        "matmul"
            | "mul_mat"
            | "mul_mat_id"
            | "mul_mat_scaled"
            | "mul_mat_id_scaled"
            | "addmm"
            | "gather_mm"
            | "conv"
            | "scaled_dot_product_attention"
            | "paged_attention"
            | "cache_write"
    );
    match dtype {
        _ if sums && blocks => 5e-4,
        DType::F64 => 1e-20,
        DType::F16 | DType::BF16 if sums => 5e-4,
        DType::F16 => 5e-5,
        DType::BF16 => 5e-3,
        _ => 1e-7,
    }
}
