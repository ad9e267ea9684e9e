//! What kernels read that is made of a value, once for all that want the same. It is in the arena as values are, and no node has it.

use hotcell_graph::{Dim, Shape};

use super::{Cx, Kernel, blocks_of, int};
use crate::{
    backend::DeviceError,
    cuda::{
        buffer::ALIGNMENT,
        gpu::{Arguments, Grid},
    },
    part::overflow,
};

/// What is made.
#[derive(Clone, PartialEq)]
pub(in crate::cuda) enum Wanted {
    /// Of positions and frequencies the cosines and sines (`rope_table` in `rope.cu`).
    Table(Table),
    /// Of activations numbers of 8 bits.
    Numbers(Numbers),
}

impl Wanted {
    /// Bytes for so many rows; `None`: more than there can be.
    pub fn bytes(&self, rows: usize) -> Option<usize> {
        match self {
            Self::Table(table) => table.bytes(rows),
            Self::Numbers(numbers) => numbers.parts(rows).map(|[.., end]| end),
        }
    }

    /// What makes it, as the one result of what it is made of.
    pub fn kernel(&self) -> Box<dyn Kernel> {
        match self {
            Self::Table(table) => Box::new(table.clone()),
            Self::Numbers(numbers) => Box::new(numbers.clone()),
        }
    }
}

/// Cosines and sines of so many rows.
#[derive(Clone, PartialEq)]
pub(in crate::cuda) struct Table {
    pub rows: Dim,
    pub half: usize,
}

impl Table {
    pub const NAME: &str = "rope_table";

    fn bytes(&self, rows: usize) -> Option<usize> {
        let each = self.half.checked_mul(2 * size_of::<f32>())?;
        self.rows.at(rows).checked_mul(each)
    }
}

impl Kernel for Table {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let rows = self.rows.at(cx.rows);
        let arguments = Arguments::default()
            .word(cx.input(0)?)
            .word(cx.input(1)?)
            .word(cx.output(0)?)
            .int(int(rows)?)
            .int(int(self.half)?);
        let grid = Grid {
            blocks: [blocks_of(rows.checked_mul(self.half), 128)?, 1, 1],
            threads: [128, 1, 1],
            shared: 0,
        };
        // SAFETY: the kernel's arguments (rope.cu), of a table of these sizes.
        unsafe { cx.gpu.launch(Self::NAME, grid, &arguments) }
    }
}

/// Rows of `k` activations as products with block types read them (`quantize.cu`).
#[derive(Clone)]
pub(in crate::cuda) struct Numbers {
    pub blocks: Blocks,
    pub x: Shape,
    pub k: usize,
}

/// Of the same value, whatever its axes before the last one.
impl PartialEq for Numbers {
    fn eq(&self, other: &Self) -> bool {
        self.blocks == other.blocks && self.k == other.k
    }
}

/// How many of them have a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Blocks {
    Of32,
    Of256,
}

impl Blocks {
    pub fn len(self) -> usize {
        match self {
            Self::Of32 => 32,
            Self::Of256 => 256,
        }
    }

    /// The kernel that makes them.
    pub fn name(self) -> &'static str {
        match self {
            Self::Of32 => "quantize_q8",
            Self::Of256 => "quantize_q8k",
        }
    }

    /// This or that kernel, which makes them of its result.
    pub fn of(self, of_32: &'static str, of_256: &'static str) -> &'static str {
        match self {
            Self::Of32 => of_32,
            Self::Of256 => of_256,
        }
    }
}

impl Numbers {
    fn rows(&self, rows: usize) -> Option<usize> {
        self.x.elements(rows)?.checked_div(self.k)
    }

    /// Where the numbers, what a unit of them stands for, and their sums begin; and the end.
    pub fn parts(&self, rows: usize) -> Option<[usize; 4]> {
        let rows = self.rows(rows)?;
        let each = [self.k, self.k / self.blocks.len() * 4, self.k / 32 * 4];
        let mut at = [0usize; 4];
        for (i, bytes) in each.into_iter().enumerate() {
            let size = rows.checked_mul(bytes)?;
            let size = size.checked_next_multiple_of(ALIGNMENT)?;
            at[i + 1] = at[i].checked_add(size)?;
        }
        Some(at)
    }

    /// The addresses of the three, from where they are.
    pub fn addresses(&self, start: u64, rows: usize) -> Result<[u64; 3], DeviceError> {
        let [q, da, sums, _] = self.parts(rows).ok_or_else(overflow)?;
        Ok([q, da, sums].map(|at| start + at as u64))
    }

    /// The addresses as a kernel's last arguments.
    pub fn told(
        &self,
        arguments: Arguments,
        start: u64,
        rows: usize,
    ) -> Result<Arguments, DeviceError> {
        let parts = self.addresses(start, rows)?;
        Ok(parts.into_iter().fold(arguments, Arguments::word))
    }
}

impl Kernel for Numbers {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let rows = self.rows(cx.rows).ok_or_else(overflow)?;
        let blocks = rows.checked_mul(self.k / self.blocks.len());
        let arguments = Arguments::default().word(cx.input(0)?).word(self.k as u64);
        let arguments = self
            .told(arguments, cx.output(0)?, cx.rows)?
            .int(int(rows)?)
            .int(int(self.k)?);
        let grid = Grid {
            blocks: [blocks_of(blocks, 8)?, 1, 1],
            threads: [256, 1, 1],
            shared: 0,
        };
        // SAFETY: the kernel's arguments (quantize.cu); there is as much memory as `bytes` says.
        unsafe { cx.gpu.launch(self.blocks.name(), grid, &arguments) }
    }
}
