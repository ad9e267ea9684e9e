//! A small valid folder of a model, and safetensors files that can be spoilt.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use crate::cluster::golden;

/// Files by name.
#[derive(Clone)]
pub struct Folder(pub BTreeMap<String, Vec<u8>>);

impl Folder {
    /// A model of one shard.
    pub fn valid() -> Result<Folder> {
        let mut folder = Self::sharded()?;
        let shards: Vec<String> = folder.shards();
        let mut whole = Safetensors::default();
        for shard in shards {
            let file = folder.0.remove(&shard).unwrap_or_default();
            whole.append(Safetensors::read(&file).context("a golden shard")?);
        }
        folder.0.remove(INDEX);
        folder.put("model.safetensors", whole.write());
        Ok(folder)
    }

    /// A model of three shards with an index.
    pub fn sharded() -> Result<Folder> {
        static READ: OnceLock<BTreeMap<String, Vec<u8>>> = OnceLock::new();
        if let Some(files) = READ.get() {
            return Ok(Folder(files.clone()));
        }
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(golden("llama3"))? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            files.insert(name, fs::read(entry.path())?);
        }
        Ok(Folder(READ.get_or_init(|| files).clone()))
    }

    /// The names of the shards.
    pub fn shards(&self) -> Vec<String> {
        let shard = |name: &&String| name.contains("-of-");
        self.0.keys().filter(shard).cloned().collect()
    }

    /// Sets a file.
    pub fn put(&mut self, name: &str, bytes: impl Into<Vec<u8>>) {
        self.0.insert(name.to_owned(), bytes.into());
    }

    /// A file's JSON.
    pub fn json(&self, name: &str) -> Value {
        let bytes = self.0.get(name).map(Vec::as_slice).unwrap_or_default();
        serde_json::from_slice(bytes).unwrap_or_default()
    }

    /// Changes a file's JSON.
    pub fn edit(&mut self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = self.json(name);
        change(&mut value);
        self.put(name, value.to_string());
    }

    /// Changes the tensors.
    pub fn tensors(&mut self, change: impl FnOnce(&mut Safetensors)) {
        let bytes = self.0.get("model.safetensors").cloned();
        let mut file = Safetensors::read(&bytes.unwrap_or_default()).unwrap_or_default();
        change(&mut file);
        self.put("model.safetensors", file.write());
    }

    /// Writes it into an empty folder.
    pub fn write(&self, place: &Path) -> Result<PathBuf> {
        let path = place.join("model");
        fs::create_dir(&path)?;
        for (name, bytes) in &self.0 {
            fs::write(path.join(name), bytes)?;
        }
        Ok(path)
    }
}

/// The index of shards.
pub const INDEX: &str = "model.safetensors.index.json";

/// A safetensors file in parts.
#[derive(Clone, Default)]
pub struct Safetensors {
    /// In the header's order: names, and what is said about each.
    pub tensors: Vec<(String, Value)>,
    /// Instead of the header that the tensors make.
    pub header: Option<Vec<u8>>,
    /// Instead of the header's length.
    pub length: Option<u64>,
    pub data: Vec<u8>,
}

impl Safetensors {
    /// Reads a valid file.
    pub fn read(bytes: &[u8]) -> Option<Safetensors> {
        let (length, rest) = bytes.split_at_checked(8)?;
        let length = u64::from_le_bytes(length.try_into().ok()?) as usize;
        let (header, data) = rest.split_at_checked(length)?;
        let header: Map<String, Value> = serde_json::from_slice(header).ok()?;
        let mut tensors: Vec<(String, Value)> = header
            .into_iter()
            .filter(|(name, _)| name != "__metadata__")
            .collect();
        tensors.sort_by_key(|(_, about)| about["data_offsets"][0].as_u64());
        Some(Safetensors {
            tensors,
            data: data.to_vec(),
            ..Safetensors::default()
        })
    }

    /// With another's tensors behind these.
    fn append(&mut self, other: Safetensors) {
        let before = self.data.len() as u64;
        for (name, mut about) in other.tensors {
            for end in 0..2 {
                let at = about["data_offsets"][end].as_u64().unwrap_or(0);
                about["data_offsets"][end] = json!(at + before);
            }
            self.tensors.push((name, about));
        }
        self.data.extend(other.data);
    }

    /// The header as it is written.
    pub fn header(&self) -> Vec<u8> {
        if let Some(header) = &self.header {
            return header.clone();
        }
        let entry = |(name, about): &(String, Value)| format!("{}:{about}", json!(name));
        let entries: Vec<String> = self.tensors.iter().map(entry).collect();
        format!("{{{}}}", entries.join(",")).into_bytes()
    }

    /// The file.
    pub fn write(&self) -> Vec<u8> {
        let header = self.header();
        let length = self.length.unwrap_or(header.len() as u64);
        [&length.to_le_bytes(), header.as_slice(), &self.data].concat()
    }

    /// What is said about a tensor.
    pub fn about(&mut self, name: &str) -> &mut Value {
        let at = self.tensors.iter().position(|(known, _)| known == name);
        &mut self.tensors[at.unwrap_or(0)].1
    }
}
