//! Rows of the catalogue that MLX computes for no inputs and that mean nothing in other rows: they run on the CPU
//! backend's kernels, in the same memory. Why single dtypes or attributes do stands at the entries' `supports`.

/// Such rows, and why.
pub(in crate::mlx) static REST: &[(&str, &str)] = &[
    (
        "arange",
        "MLX adds steps up in the result's dtype, the catalogue multiplies in f64",
    ),
    (
        "bitcast",
        "a copy of bytes, which the CPU's kernel makes in the same memory",
    ),
    ("erf", "near 0 MLX's is exact to the error of 1 only"),
    ("logical_xor", "MLX has none"),
    (
        "left_shift",
        "MLX leaves what happens beyond the width to the processor",
    ),
    (
        "right_shift",
        "MLX leaves what happens beyond the width to the processor",
    ),
    (
        "get_rows",
        "MLX reads no block types, and would copy the whole table for a few rows",
    ),
    (
        "gather_nd",
        "MLX checks no index: it would be checked here first, which is most of the work",
    ),
    (
        "scatter_along_axis",
        "which of several updates of an element wins is left open by MLX",
    ),
    (
        "scatter_nd",
        "which of several updates of an element wins is left open by MLX",
    ),
    (
        "fft",
        "the CPU has the same bits for every length and place",
    ),
    (
        "cholesky",
        "MLX computes it in f32 on the CPU only, and ends where there is none",
    ),
    ("qr", "MLX computes it in f32 on the CPU only"),
    ("lu", "MLX computes it in f32 on the CPU only"),
    ("det", "MLX has none"),
    ("solve", "MLX computes it in f32 on the CPU only"),
    ("solve_triangular", "MLX computes it in f32 on the CPU only"),
    ("svd", "MLX computes it in f32 on the CPU only"),
    ("eigh", "MLX computes it in f32 on the CPU only"),
    ("eig", "MLX computes it in f32 on the CPU only"),
    ("gated_delta", "MLX's core has none"),
    ("mamba2_scan", "MLX's core has none"),
    (
        "draw",
        "MLX draws by the largest sum of logits and noise, which are other draws",
    ),
    ("topk", "MLX gives values without places, in no order"),
    ("pool", "MLX's core has none"),
    (
        "cache_write",
        "it changes memory in place, and MLX's arrays are values",
    ),
];
