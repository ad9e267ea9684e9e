//! The memory of a model's KV cache.

use hotcell_kernels::backend::{Buffer, Device, DeviceError};

use super::{KINDS, RunShape};
use crate::model::config::ModelConfig;

/// One layer's cache.
struct Layer {
    buffer: Buffer,
    kind: usize,
}

/// Where blocks are in the cache of a layer.
#[derive(Clone, Copy, Default)]
struct Half {
    /// Bytes of all keys; the values come after them.
    bytes: usize,
    /// Bytes of one block's keys, and of its values.
    block: usize,
}

/// The KV cache of the layers that are computed here.
pub(super) struct Caches {
    /// The number of the first of them in the model.
    first: usize,
    layers: Vec<Layer>,
    kinds: [Half; KINDS],
    scratch: Vec<u8>,
}

impl Caches {
    pub fn new(
        device: &dyn Device,
        config: &ModelConfig,
        shape: &RunShape,
        progressed: &dyn Fn(),
    ) -> Result<Self, DeviceError> {
        let mut kinds = [Half::default(); KINDS];
        let own = shape.parts.layers(config.layers);
        let first = own.start;
        let mut layers = Vec::with_capacity(own.len());
        for layer in own {
            progressed();
            let kind = config.kind(layer);
            let spec = shape.cache(config, kind);
            let bytes = spec.half_bytes().unwrap_or(usize::MAX);
            kinds[kind] = Half {
                bytes,
                block: bytes / spec.blocks.max(1),
            };
            let bytes = spec.bytes().unwrap_or(usize::MAX);
            let buffer = device.allocate("the KV cache", bytes)?;
            layers.push(Layer { buffer, kind });
        }
        Ok(Self {
            first,
            layers,
            kinds,
            scratch: Vec::new(),
        })
    }

    /// That of one of them, by its number in the model.
    pub fn of_layer(&self, layer: usize) -> Option<&Buffer> {
        let layer = self.layers.get(layer.checked_sub(self.first)?)?;
        Some(&layer.buffer)
    }

    fn of_kind(&self, kind: usize) -> impl Iterator<Item = &Layer> {
        self.layers.iter().filter(move |layer| layer.kind == kind)
    }

    /// Where a block's keys and values are.
    fn places(&self, kind: usize, block: u32) -> [usize; 2] {
        let Half { bytes, block: size } = self.kinds[kind];
        let at = (block as usize).saturating_mul(size);
        [at, at.saturating_add(bytes)]
    }

    pub fn copy(&mut self, kind: usize, from: u32, to: u32) -> Result<(), DeviceError> {
        let (sources, targets) = (self.places(kind, from), self.places(kind, to));
        self.scratch.resize(self.kinds[kind].block, 0);
        let of_kind = self.layers.iter_mut().filter(|layer| layer.kind == kind);
        for Layer { buffer, .. } in of_kind {
            for (source, target) in sources.into_iter().zip(targets) {
                buffer.read(source, &mut self.scratch)?;
                buffer.write(target, &self.scratch)?;
            }
        }
        Ok(())
    }

    pub fn read(&self, kind: usize, block: u32) -> Result<Vec<u8>, DeviceError> {
        let mut all = Vec::new();
        let mut half = vec![0; self.kinds[kind].block];
        for Layer { buffer, .. } in self.of_kind(kind) {
            for place in self.places(kind, block) {
                buffer.read(place, &mut half)?;
                all.extend_from_slice(&half);
            }
        }
        Ok(all)
    }

    pub fn wipe(&mut self, kind: usize, block: u32) -> Result<(), DeviceError> {
        let places = self.places(kind, block);
        self.scratch.clear();
        self.scratch.resize(self.kinds[kind].block, 0);
        let of_kind = self.layers.iter_mut().filter(|layer| layer.kind == kind);
        for Layer { buffer, .. } in of_kind {
            for place in places {
                buffer.write(place, &self.scratch)?;
            }
        }
        Ok(())
    }

    pub fn bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.buffer.bytes()).sum()
    }
}
