//! The memory of a model's KV cache.

use hotcell_graph::CacheSpec;
use hotcell_kernels::backend::{Buffer, Device, DeviceError};

/// The KV cache of all layers.
pub(super) struct Caches {
    pub layers: Vec<Buffer>,
    /// Bytes of the keys of a layer; its values come after them.
    half: usize,
    /// Bytes of one block's keys, and of its values.
    pub block: usize,
    pub scratch: Vec<u8>,
}

impl Caches {
    pub fn new(
        device: &dyn Device,
        layers: usize,
        spec: &CacheSpec,
        progressed: &dyn Fn(),
    ) -> Result<Self, DeviceError> {
        let bytes = spec.bytes().unwrap_or(usize::MAX);
        let half = spec.half_bytes().unwrap_or(usize::MAX);
        let allocate = |_| {
            progressed();
            device.allocate("the KV cache", bytes)
        };
        Ok(Self {
            layers: (0..layers).map(allocate).collect::<Result<_, _>>()?,
            half,
            block: half / spec.blocks.max(1),
            scratch: Vec::new(),
        })
    }

    /// Where a block's keys and values are.
    pub fn places(&self, block: u32) -> [usize; 2] {
        let at = (block as usize).saturating_mul(self.block);
        [at, at.saturating_add(self.half)]
    }

    pub fn bytes(&self) -> usize {
        self.layers.iter().map(Buffer::bytes).sum()
    }
}
