//! Models that are written once, into the target folder.

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use hotcell_tests::synthetic::{
    Measures,
    gguf::{self, REVISION, Size, Weights},
};

/// A model's file.
pub struct Model {
    pub path: PathBuf,
    pub size: Size,
    pub vocabulary: u32,
}

impl Model {
    /// One of this shape, stored so; written if it is not there.
    pub fn get(shape: &str, weights: &str) -> Result<Self> {
        let named = Measures::NAMED.iter().find(|(name, _)| *name == shape);
        let (_, measures) = named.context("no such shape")?;
        let stored = Weights::from_name(weights).context("no such type")?;
        // target/PROFILE/deps/this-bench
        let this = std::env::current_exe()?;
        let folder = this.ancestors().nth(3).context("no target folder")?;
        let folder = folder.join("synthetic");
        fs::create_dir_all(&folder)?;
        let path = folder.join(format!("{shape}.{weights}.r{REVISION}.gguf"));
        if !path.exists() {
            let unfinished = path.with_extension("unfinished");
            let name = format!("{shape} {weights} random");
            gguf::write(&unfinished, &name, measures, stored)?;
            fs::rename(&unfinished, &path)?;
        }
        Ok(Self {
            path,
            size: gguf::size(measures, stored)?,
            vocabulary: u32::try_from(measures.vocab)?,
        })
    }

    /// Reads all of it, so that it is in the page cache.
    pub fn warm(&self) -> Result<()> {
        let mut file = File::open(&self.path)?;
        let mut buffer = vec![0; 1 << 20];
        while file.read(&mut buffer)? > 0 {}
        Ok(())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}
