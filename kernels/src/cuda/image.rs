//! The kernels, compiled: what `deploy/cuda/compile` made of the sources beside this file.

/// One for each source, for every architecture in one file.
macro_rules! images {
    ($($source:literal)*) => { &[$(include_bytes!(concat!($source, ".fatbin"))),*] };
}

/// All of them.
pub(super) static IMAGES: &[&[u8]] = images!(
    "attention" "block_tile" "block_vec" "checksum" "crumb" "experts" "float8_tile" "float8_vec" "gated" "gather" "gemm" "generic_cast" "generic_elementwise" "generic_functions" "generic_group" "generic_reduce" "half_tile"
    "half_vec" "index" "norm" "peak" "plain_mat" "quantize" "rope" "rows" "sample" "scatter" "softmax" "sort"
);
