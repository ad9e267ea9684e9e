//! The MLX backend.
