//! Weights in memory that outlives this process.

use std::{os::fd::AsFd, rc::Rc};

use super::{
    buffer::{ALIGNMENT, Memory},
    gpu::{Arguments, Gpu, Grid},
    mapped::{Mapped, May},
};
use crate::{
    backend::{Buffer, DeviceError, DeviceMemory},
    vault::{Kept, Vault, Wish},
};

/// Blocks of the checksum's kernel, enough to fill a device, and threads of each.
const BLOCKS: u32 = 1024;
const THREADS: u32 = 256;
/// Bytes of the words that it sums.
const WORD: usize = 8;

struct CudaVault {
    gpu: Rc<Gpu>,
    mapped: Rc<Mapped>,
    layout: String,
    /// Where each weight is, and its bytes.
    places: Vec<(usize, usize)>,
    bytes: usize,
    /// Whether the weights are there.
    found: bool,
    /// Whether what was handed over is not what it was.
    damaged: bool,
}

/// Where each weight is, and the bytes of all.
fn arrange(sizes: &[usize]) -> Option<(Vec<(usize, usize)>, usize)> {
    let mut end = 0usize;
    let place = |&bytes: &usize| {
        let at = end;
        end = at.checked_add(bytes)?.checked_next_multiple_of(ALIGNMENT)?;
        Some((at, bytes))
    };
    let places = sizes.iter().map(place).collect::<Option<_>>()?;
    Some((places, end))
}

/// A number for all of mapped memory.
fn checksum(gpu: &Rc<Gpu>, mapped: &Mapped) -> Result<u64, DeviceError> {
    let sum = Memory::new(gpu, "a checksum", WORD)?;
    let words = (mapped.bytes() / WORD) as u64;
    let arguments = Arguments::default().word(mapped.start());
    let arguments = arguments.word(words).word(sum.start());
    let grid = Grid {
        blocks: [BLOCKS, 1, 1],
        threads: [THREADS, 1, 1],
        shared: 0,
    };
    // SAFETY: it reads so many words of what is mapped, and adds to the one that was made for it.
    unsafe { gpu.launch("checksum_words", grid, &arguments) }?;
    let mut bytes = [0; WORD];
    sum.read(0, &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Opens what was kept, or makes room.
///
/// # Errors
/// [`DeviceError::OutOfMemory`].
pub(super) fn open(
    gpu: &Rc<Gpu>,
    wish: &Wish<'_>,
    kept: Option<Kept>,
) -> Result<Box<dyn Vault>, DeviceError> {
    let (places, bytes) = arrange(wish.sizes).ok_or_else(|| DeviceError::OutOfMemory {
        what: "weights".to_owned(),
        bytes: usize::MAX,
    })?;
    let fits = |kept: &Kept| kept.layout == wish.layout && kept.bytes == bytes as u64;
    let mut damaged = false;
    let reopened = kept.filter(fits).and_then(|kept| {
        let opened = reopen(gpu, bytes, &kept);
        let opened = opened.inspect_err(|error| {
            tracing::warn!(%error, "weights that were kept on the device cannot be had");
        });
        let found = opened.ok()?;
        damaged = found.is_none();
        found
    });
    let found = reopened.is_some();
    let mapped = match reopened {
        Some(mapped) => mapped,
        // Not in place of what is damaged: others may compute from that, to whom nothing may happen amid a step.
        None => {
            let mapped = Mapped::new(gpu, bytes)?;
            // What is between the weights counts, too; and what was there may have been another's.
            gpu.zero(mapped.start(), mapped.bytes())?;
            mapped
        }
    };
    Ok(Box::new(CudaVault {
        gpu: Rc::clone(gpu),
        mapped: Rc::new(mapped),
        layout: wish.layout.to_owned(),
        places,
        bytes,
        found,
        damaged,
    }))
}

/// Maps what was kept; nothing if it is not what it was.
fn reopen(gpu: &Rc<Gpu>, bytes: usize, kept: &Kept) -> Result<Option<Mapped>, DeviceError> {
    let descriptors: Vec<_> = kept.pieces.iter().map(AsFd::as_fd).collect();
    let mapped = Mapped::import(gpu, bytes, &descriptors)?;
    let found = checksum(gpu, &mapped)? == kept.checksum;
    if !found {
        tracing::warn!(
            bytes,
            "weights that were kept on the device are damaged and loaded again"
        );
    }
    Ok(found.then_some(mapped))
}

impl CudaVault {
    fn buffer(&self, number: usize) -> Option<Buffer> {
        let &(at, bytes) = self.places.get(number)?;
        let memory = Memory::within(&self.gpu, &self.mapped, at, bytes);
        Some(Buffer::new(Rc::new(memory)))
    }
}

impl Vault for CudaVault {
    fn find(&self, number: usize) -> Option<Buffer> {
        self.buffer(number).filter(|_| self.found)
    }

    fn put(&mut self, number: usize, bytes: &[u8]) -> Result<Buffer, DeviceError> {
        let place = self.places.get(number).filter(|p| p.1 == bytes.len());
        let (Some(&(at, _)), Some(buffer)) = (place, self.buffer(number)) else {
            return Err(DeviceError::Binding(format!(
                "no room of {} bytes for weight {number}",
                bytes.len()
            )));
        };
        self.gpu.upload(self.mapped.start() + at as u64, bytes)?;
        Ok(buffer)
    }

    fn close(self: Box<Self>) -> Result<Option<Kept>, DeviceError> {
        if self.found {
            return Ok(None);
        }
        self.gpu.synchronize()?;
        self.mapped.allow(May::Read)?;
        let checksum = checksum(&self.gpu, &self.mapped)?;
        Ok(Some(Kept {
            layout: self.layout,
            bytes: self.bytes as u64,
            checksum,
            pieces: self.mapped.export()?,
        }))
    }

    fn is_damaged(&self) -> bool {
        self.damaged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_lie_apart_and_one_behind_the_other() {
        let (places, bytes) = arrange(&[1, 256, 257, 0, 5]).unwrap();
        let expected = vec![(0, 1), (256, 256), (512, 257), (1024, 0), (1024, 5)];
        assert_eq!((places, bytes), (expected, 1280));
        assert_eq!(arrange(&[]), Some((vec![], 0)));
        assert_eq!(arrange(&[usize::MAX - 8]), None);
    }
}
