//! What a device can do at most, as a benchmark measures it: by the device's own clock, the median of some tries.

use std::rc::Rc;

use super::{
    CudaDevice,
    buffer::Memory,
    gpu::{Arguments, Grid},
};
use crate::{backend::DeviceError, part::overflow};

/// Tries of each.
const TRIES: usize = 9;

/// Instructions of a round, in each of a block's warps (`peak.cu`).
const IN_A_ROUND: f64 = 8.0 * 8.0;

/// Products and sums of an instruction on BF16 and on bytes.
const OF_BF16: f64 = 2.0 * 16.0 * 8.0 * 16.0;
const OF_S8: f64 = 2.0 * 16.0 * 8.0 * 32.0;

/// Blocks that a multiprocessor has at once.
const BLOCKS_EACH: usize = 4;

/// What there is at most of each in a second.
#[derive(Clone, Copy, Debug)]
pub struct Ceilings {
    /// Bytes of memory that are read and written by a copy within the device.
    pub copied: f64,
    /// Products and sums of BF16 by tensor cores, by the instruction that our kernels use.
    pub bf16: f64,
    /// Of bytes, likewise.
    pub bytes: f64,
}

impl CudaDevice {
    /// Copies so many bytes, and has tensor cores multiply in so many rounds.
    ///
    /// # Errors
    /// When there is not twice as much memory, or the driver fails.
    pub fn ceilings(&self, bytes: usize, rounds: u32) -> Result<Ceilings, DeviceError> {
        let gpu = &self.side.gpu;
        let blocks = gpu.multiprocessors()?.saturating_mul(BLOCKS_EACH);
        let whole = |n: usize| u32::try_from(n).map_err(|_| overflow());
        let grid = Grid {
            blocks: [whole(blocks)?, 1, 1],
            threads: [256, 1, 1],
            shared: 0,
        };
        let numbers = blocks.checked_mul(256 * size_of::<f32>());
        let out = Memory::new(gpu, "a benchmark", numbers.ok_or_else(overflow)?)?;
        let arguments = || Arguments::default().word(out.start()).int(rounds);
        let [from, to] = [(); 2].map(|()| Memory::new(gpu, "a benchmark", bytes));
        let (from, to) = (from?, to?);
        let copied = self.seconds(|| gpu.copy(to.start(), from.start(), bytes))?;
        let multiplied = |name| {
            // SAFETY: the kernel's arguments (peak.cu), with a number for each thread.
            self.seconds(|| unsafe { gpu.launch(name, grid, &arguments()) })
        };
        let all = f64::from(rounds) * blocks as f64 * IN_A_ROUND;
        Ok(Ceilings {
            copied: 2.0 * bytes as f64 / copied,
            bf16: all * OF_BF16 / multiplied("peak_bf16")?,
            bytes: all * OF_S8 / multiplied("peak_s8")?,
        })
    }

    /// The median of what it takes the device.
    fn seconds(&self, give: impl Fn() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
        let gpu = Rc::clone(&self.side.gpu);
        let mut all = Vec::with_capacity(TRIES);
        for _ in 0..TRIES {
            let before = gpu.timed_event()?;
            let given = give();
            let after = gpu.timed_event()?;
            let took = given
                .and_then(|()| gpu.synchronize())
                .and_then(|()| gpu.driver.elapsed(before, after));
            gpu.driver.free_event(before)?;
            gpu.driver.free_event(after)?;
            all.push(took?.as_secs_f64());
        }
        all.sort_by(f64::total_cmp);
        Ok(all.get(TRIES / 2).copied().unwrap_or(f64::NAN))
    }
}
