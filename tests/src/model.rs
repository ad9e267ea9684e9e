//! A model in this process: folders opened as a worker opens them, and steps run by hand.

use std::{fs::File, path::Path};

use anyhow::{Context, Result, ensure};
use hotcell_graph::DType;
use hotcell_ipc::memory::Mapping;
use hotcell_kernels::{
    backend::Device,
    cpu::{CpuDevice, path::CpuPath},
    plan::PlanHints,
};
use hotcell_proto::limits;
use hotcell_worker::{
    model::run::{KINDS, Row, RunShape, Runner},
    weights::{ModelFile, ModelSource},
};

/// Opens a folder or a `.gguf` file.
///
/// # Errors
/// When it cannot be read or is no model.
pub fn open(path: &Path) -> Result<ModelSource> {
    Ok(ModelSource::open(files(path)?)?)
}

/// Maps the files of a folder, or a `.gguf` file.
///
/// # Errors
/// When one cannot be read.
pub fn files(path: &Path) -> Result<Vec<ModelFile>> {
    let mut paths = vec![path.to_owned()];
    if path.is_dir() {
        paths = path
            .read_dir()?
            .map(|e| Ok(e?.path()))
            .collect::<Result<_>>()?;
        paths.retain(|p| {
            p.extension()
                .is_some_and(|e| limits::MODEL_EXTENSIONS.contains(&&*e.to_string_lossy()))
        });
        paths.sort();
    }
    paths
        .iter()
        .map(|p| {
            let name = p
                .file_name()
                .context("no file name")?
                .to_string_lossy()
                .into_owned();
            let mapping =
                Mapping::of_file(File::open(p).with_context(|| p.display().to_string())?)?;
            Ok(ModelFile { name, mapping })
        })
        .collect()
}

/// One sequence of a model that is run alone.
pub struct Solo {
    /// The model on its device.
    pub runner: Runner,
    computed: usize,
}

impl Solo {
    /// Plans a model with a small cache for one sequence, on threads of the processor.
    ///
    /// # Errors
    /// When the device refuses it.
    pub fn new(source: &ModelSource, threads: u32, path: CpuPath, cache: DType) -> Result<Self> {
        Self::on(&CpuDevice::with_path(threads, path)?, source, cache)
    }

    /// The same on any device.
    ///
    /// # Errors
    /// When the device refuses it.
    pub fn on(device: &dyn Device, source: &ModelSource, cache: DType) -> Result<Self> {
        let shape = RunShape {
            max_rows: 64,
            ..RunShape::for_model(&source.config, cache)
        };
        let shape = RunShape {
            window_blocks: shape.blocks,
            ..shape
        };
        let mut runner = Runner::new(device, source, shape, &PlanHints::default(), &|| {})?;
        // Blocks in an order of their own, so that a kernel that ignores the table is found out.
        let blocks = runner.shape().blocks_per_sequence();
        let table: Vec<u32> = (0..blocks as u32).rev().collect();
        for kind in 0..source.config.kinds() {
            runner.set_table(kind, 0, 0, &table)?;
        }
        Ok(Self {
            runner,
            computed: 0,
        })
    }

    /// Starts again with an empty sequence.
    pub fn reset(&mut self) {
        self.computed = 0;
    }

    /// Computes these tokens in chunks and returns the logits of every position.
    ///
    /// # Errors
    /// When the step fails.
    pub fn feed(&mut self, tokens: &[u32], chunk: usize) -> Result<Vec<Vec<f32>>> {
        let mut logits = Vec::new();
        let (block_len, blocks) = (
            self.runner.shape().block_len,
            self.runner.shape().blocks_per_sequence(),
        );
        for chunk in tokens.chunks(chunk) {
            let rows: Vec<Row> = chunk
                .iter()
                .enumerate()
                .map(|(i, &token)| {
                    let position = self.computed + i;
                    let block = blocks - 1 - position / block_len;
                    Row {
                        token,
                        position,
                        sequence: 0,
                        slots: [block * block_len + position % block_len; KINDS],
                    }
                })
                .collect();
            let picks: Vec<usize> = (0..rows.len()).collect();
            ensure!(
                picks.len() <= self.runner.shape().max_sequences,
                "chunk too long"
            );
            self.runner.step(&rows, &picks)?;
            for i in picks {
                let mut row = vec![0.0; self.runner.vocab()];
                self.runner.logits(i, &mut row)?;
                logits.push(row);
            }
            self.computed += chunk.len();
        }
        Ok(logits)
    }
}

/// Index of the largest, the first among equals.
pub fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in values.iter().enumerate() {
        if *v > values[best] {
            best = i;
        }
    }
    best
}
