//! The bundled model's bytes. Part of the `hotcell` binary only: users of the library do not carry it.

use hotcell_client::local::{Bundled, BundledFile};

macro_rules! files {
    ($folder:literal: $($name:literal)*) => {
        &[$(BundledFile {
            name: $name,
            bytes: include_bytes!(concat!("../../", $folder, "/", $name)),
        },)*]
    };
}

/// A small Llama trained on the King James Version; see its folder's model card.
pub const KJV: Bundled = Bundled {
    model: "kjv",
    files: files!("deploy/models/kjv":
        "config.json" "generation_config.json" "model.safetensors" "tokenizer.json" "tokenizer_config.json"),
};
