//! Every limit on model files, in one place.
//!
//! They are far above what published models need and far below what would hurt: a file past one of them is
//! refused before anything is allocated for it.

/// Tensors in one file (the largest published files have a few thousand).
pub const TENSORS: u64 = 65_536;
/// Metadata entries of a GGUF file.
pub const GGUF_KEYS: u64 = 65_536;
/// Bytes of a GGUF metadata key (the format's own limit).
pub const GGUF_KEY_BYTES: u64 = 65_535;
/// Bytes of a GGUF tensor name (ggml's own limit, less its terminating zero).
pub const GGUF_NAME_BYTES: u64 = 63;
/// Bytes of one GGUF string.
pub const GGUF_STRING_BYTES: u64 = 1 << 20;
/// Bytes of one GGUF string below `tokenizer.`, where whole `tokenizer.json` files are found.
pub const GGUF_TOKENIZER_STRING_BYTES: u64 = 64 << 20;
/// Elements of a GGUF array: the tokens and merges of a vocabulary.
pub const GGUF_ARRAY_ELEMENTS: u64 = 1 << 24;
/// Dimensions of a GGUF tensor (the format's own limit).
pub const GGUF_DIMENSIONS: u32 = 4;
/// Bytes of a GGUF file's tensor alignment.
pub const GGUF_ALIGNMENT: u32 = 1 << 20;
/// Bytes of a safetensors header (the crate's own limit is 100 MB, of which its parser makes gigabytes).
pub const SAFETENSORS_HEADER_BYTES: u64 = 16 << 20;
/// Dimensions of a safetensors tensor.
pub const SAFETENSORS_DIMENSIONS: usize = 8;
/// Files of one model.
pub const FILES: usize = 4_096;
/// Bytes of `config.json` and of `generation_config.json`.
pub const CONFIG_BYTES: usize = 1 << 20;
/// Bytes of `tokenizer_config.json`.
pub const TOKENIZER_CONFIG_BYTES: usize = 4 << 20;
/// Bytes of `model.safetensors.index.json`.
pub const INDEX_BYTES: usize = 16 << 20;
/// Bytes of a chat template.
pub const CHAT_TEMPLATE_BYTES: usize = 1 << 20;

/// Transformer layers.
pub const LAYERS: usize = 1_024;
/// Width of the residual stream.
pub const HIDDEN: usize = 65_536;
/// Width of a feed-forward layer.
pub const INTERMEDIATE: usize = 1 << 20;
/// Attention heads.
pub const HEADS: usize = 1_024;
/// Width of one attention head.
pub const HEAD_DIM: usize = 1_024;
/// Experts of a layer.
pub const EXPERTS: usize = 1_024;
/// Tokens in a vocabulary.
pub const VOCAB: usize = 4 << 20;
/// Positions of a context, and of a sliding window.
pub const CONTEXT: usize = 1 << 24;
/// Tokens that may end a sequence.
pub const EOS_TOKENS: usize = 64;
