//! Which kernels multiply with weights of a dtype, and how many outputs and rows a block of threads has.

use hotcell_graph::DType;

use super::super::wanted::Blocks;

/// Rows that share a reading of the weights: of block types, of either in tiles, and of plain ones.
const TOGETHER: usize = 4;
const TILE: usize = 64;
const PLAIN_TOGETHER: usize = 8;

/// Outputs of a block of threads for few rows, and of a tile.
pub(super) const FEW_OUTPUTS: usize = 16;
pub(super) const TILE_OUTPUTS: usize = 64;

/// Of a tile of numbers of 16 bits: as many for each of two warps, which may have different scales.
const HALVES_TILE_OUTPUTS: usize = 128;

/// Rows from which on tiles, though they may be filled in part, have less to do: of block types, and of plain ones, which have more
/// rows together otherwise.
const MANY: usize = 17;
const MANY_HALVES: usize = 65;

/// Readings of an expert's weights from which on tiles, which read them once, have less to do.
const MANY_READINGS: usize = 5;

/// What multiplies with weights of a dtype.
#[derive(Clone, Copy)]
pub(super) enum Kernels {
    /// As numbers of 32 bits.
    Plain(&'static str),
    /// As numbers of 16 bits, by tensor cores: for eight rows, sixteen and 32, and for tiles of many.
    Halves {
        eights: [&'static str; 3],
        tile: &'static str,
        /// Whether they take the scales of weights.
        take_scales: bool,
    },
    /// As numbers of 8 bits.
    Blocks {
        blocks: Blocks,
        one: &'static str,
        four: &'static str,
        tile: &'static str,
    },
}

/// The three kernels of a block type: of a row, of four that share a reading of the weights, and of tiles of many.
macro_rules! block_kernels {
    ($name:literal) => {
        (
            concat!("mul_vec_", $name, "_1"),
            concat!("mul_vec_", $name, "_4"),
            concat!("mul_tile_", $name),
        )
    };
}

/// The kernels of a type of 16 bits.
macro_rules! half_kernels {
    ($name:literal) => {
        Self::Halves {
            eights: [
                concat!("mul_half_", $name, "_1"),
                concat!("mul_half_", $name, "_2"),
                concat!("mul_half_", $name, "_4"),
            ],
            tile: concat!("half_tile_", $name),
            take_scales: false,
        }
    };
}

/// A kernel, and what a block of threads has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shared {
    pub name: &'static str,
    pub rows: usize,
    pub outputs: usize,
    pub threads: u32,
}

impl Shared {
    fn of(name: &'static str, rows: usize, outputs: usize, threads: u32) -> Self {
        Self {
            name,
            rows,
            outputs,
            threads,
        }
    }

    fn tile(name: &'static str) -> Self {
        Self::of(name, TILE, TILE_OUTPUTS, 128)
    }

    fn tile_of_halves(name: &'static str) -> Self {
        Self::of(name, TILE, HALVES_TILE_OUTPUTS, 128)
    }
}

impl Kernels {
    /// Those of a dtype, if there are any.
    pub fn of(dtype: DType) -> Option<Self> {
        let (one, four, tile) = match dtype {
            DType::F32 => return Some(Self::Plain("mul_mat_f32")),
            DType::F16 => return Some(half_kernels!("f16")),
            DType::BF16 => return Some(half_kernels!("bf16")),
            DType::F8E4M3 => {
                return Some(Self::Halves {
                    eights: ["mul_float8_1", "mul_float8_2", "mul_float8_4"],
                    tile: "float8_tile",
                    take_scales: true,
                });
            }
            DType::Q8_0 => block_kernels!("q8_0"),
            DType::Q4_0 => block_kernels!("q4_0"),
            DType::Q4_1 => block_kernels!("q4_1"),
            DType::Q5_0 => block_kernels!("q5_0"),
            DType::Q5_1 => block_kernels!("q5_1"),
            DType::MXFP4 => block_kernels!("mxfp4"),
            DType::NVFP4 => block_kernels!("nvfp4"),
            DType::Q4K => block_kernels!("q4_k"),
            DType::Q5K => block_kernels!("q5_k"),
            DType::Q6K => block_kernels!("q6_k"),
            _ => return None,
        };
        let blocks = match dtype.block_len() {
            32 | 64 => Blocks::Of32,
            256 => Blocks::Of256,
            _ => return None,
        };
        Some(Self::Blocks {
            blocks,
            one,
            four,
            tile,
        })
    }

    pub fn names(self) -> Vec<&'static str> {
        match self {
            Self::Plain(name) => vec![name],
            Self::Halves { eights, tile, .. } => eights.into_iter().chain([tile]).collect(),
            Self::Blocks {
                blocks,
                one,
                four,
                tile,
            } => vec![blocks.name(), one, four, tile],
        }
    }

    /// Whether they take the scales of weights.
    pub fn take_scales(self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Halves { take_scales, .. } => take_scales,
            // Of whole rows, as the op has it.
            Self::Blocks { .. } => true,
        }
    }

    /// What multiplies so many rows, if `tall` by tiles too.
    pub fn for_rows(self, rows: usize, tall: bool) -> Shared {
        match self {
            Self::Plain(name) => Shared::of(name, PLAIN_TOGETHER, 64, 128),
            Self::Halves { tile, .. } if rows >= MANY_HALVES && tall => {
                Shared::tile_of_halves(tile)
            }
            Self::Halves { eights, .. } => {
                let [one, two, four] = eights;
                match rows.div_ceil(8) {
                    0 | 1 => Shared::of(one, 8, FEW_OUTPUTS, 256),
                    2 => Shared::of(two, 16, FEW_OUTPUTS, 256),
                    _ => Shared::of(four, 32, FEW_OUTPUTS, 256),
                }
            }
            Self::Blocks { one, .. } if rows == 1 => Shared::of(one, 1, 8, 128),
            Self::Blocks { tile, .. } if rows >= MANY => Shared::tile(tile),
            Self::Blocks { four, .. } => Shared::of(four, TOGETHER, 8, 128),
        }
    }

    /// What multiplies rows that have an expert each, one by one.
    pub fn for_chosen(self) -> Shared {
        match self {
            Self::Plain(_) | Self::Halves { .. } => self.for_rows(1, true),
            Self::Blocks { one, .. } => Shared::of(one, 1, 8, 128),
        }
    }

    /// What multiplies so many of them in groups that have one of so many experts, if `tall` by tiles too. More of them are
    /// never in smaller groups.
    pub fn for_groups(self, choices: usize, experts: usize, tall: bool) -> Shared {
        let few = match self {
            Self::Plain(_) | Self::Halves { .. } => self.for_chosen(),
            Self::Blocks { four, .. } => Shared::of(four, TOGETHER, 8, 128),
        };
        // On average.
        let of_one = choices / experts.max(1);
        let many = of_one.div_ceil(few.rows) >= MANY_READINGS && tall;
        match self {
            Self::Halves { tile, .. } if many => Shared::tile_of_halves(tile),
            Self::Blocks { tile, .. } if many => Shared::tile(tile),
            _ => few,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_become_tiles_where_an_expert_is_chosen_often() {
        for (dtype, last) in [(DType::Q4K, 16), (DType::BF16, 32), (DType::F8E4M3, 32)] {
            let kernels = Kernels::of(dtype).unwrap();
            let rows = |of_one: usize, tall| kernels.for_groups(128 * of_one, 128, tall).rows;
            let few = rows(1, true);
            assert!(few < TILE);
            assert_eq!(
                [rows(last, true), rows(last + 1, true)],
                [few, TILE],
                "{dtype}"
            );
            assert_eq!(rows(last + 1, false), few, "{dtype}");
        }
        let plain = Kernels::of(DType::F32).unwrap();
        assert_eq!(plain.for_groups(1 << 20, 1, true), plain.for_chosen());
    }
}
