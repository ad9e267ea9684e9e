//! Products with weights, and rows of tables.

use hotcell_graph::{DType, Shape, op::Call};

use super::{Cx, Entry, Kernel, Made, index::index_code, int, layout::grid};
use crate::{
    backend::DeviceError,
    cuda::{
        buffer::ALIGNMENT,
        gpu::{Arguments, Grid},
    },
    part::overflow,
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "get_rows",
        make: get_rows,
    },
    Entry {
        op: "mul_mat",
        make: mul_mat,
    },
    Entry {
        op: "mul_mat_id",
        make: mul_mat_id,
    },
];

struct GetRows {
    name: &'static str,
    n: usize,
    k: usize,
    indices: Shape,
}

fn get_rows(call: &Call<'_>) -> Option<Made> {
    let (table, indices) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
    let name = match table.dtype {
        DType::F32 => "get_rows_f32",
        DType::F16 => "get_rows_f16",
        DType::BF16 => "get_rows_bf16",
        DType::Q8_0 => "get_rows_q8_0",
        DType::Q4_0 => "get_rows_q4_0",
        DType::Q4_1 => "get_rows_q4_1",
        DType::Q5_0 => "get_rows_q5_0",
        DType::Q5_1 => "get_rows_q5_1",
        DType::MXFP4 => "get_rows_mxfp4",
        DType::NVFP4 => "get_rows_nvfp4",
        DType::Q4K => "get_rows_q4_k",
        DType::Q5K => "get_rows_q5_k",
        DType::Q6K => "get_rows_q6_k",
        _ => return None,
    };
    let [n, k] = table.shape.dims() else {
        return None;
    };
    // A table that has as many rows as the execution is not one of weights.
    if table.shape.is_symbolic() || indices.dtype != DType::I32 {
        return None;
    }
    let kernel = GetRows {
        name,
        n: n.at(0),
        k: k.at(0),
        indices: indices.shape.clone(),
    };
    int(kernel.n).and_then(|_| int(kernel.k)).ok()?;
    Some((Box::new(kernel), vec![name]))
}

impl Kernel for GetRows {
    fn reads_indices(&self) -> bool {
        true
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let rows = self.indices.elements(cx.rows).ok_or_else(overflow)?;
        let grid = Grid {
            blocks: [int(rows)?, int(self.k.div_ceil(4096).clamp(1, 64))?, 1],
            threads: [64, 1, 1],
            shared: 0,
        };
        let arguments = Arguments::default()
            .word(cx.input(0)?)
            .word(cx.input(1)?)
            .word(cx.output(0)?)
            .int(int(self.n)?)
            .int(int(self.k)?)
            .word(cx.faults);
        // SAFETY: the kernel's arguments (rows.cu), of a table of this size.
        unsafe { cx.gpu.launch(self.name, grid, &arguments) }
    }
}

/// Blocks of a grid's second axis at most (CUDA's programming guide, compute capabilities).
const MOST_BLOCKS_DOWN: usize = 65_535;

/// First rows and numbers of rows of as many launches as it takes, where each has at most `most` of them. No overflow in the
/// sizes before a row: the tensors are no larger than memory.
fn parts_of(rows: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows)
        .step_by(most)
        .map(move |first| (first, most.min(rows - first)))
}

/// Rows that share a reading of the weights: of block types, of these in tiles, and of plain ones.
const TOGETHER: usize = 4;
const TILE: usize = 64;
const PLAIN_TOGETHER: usize = 8;

/// Rows from which on tiles, though they may be filled in part, have less to do.
const MANY: usize = 17;

/// Experts that choices are grouped by at most (`MOST_EXPERTS` in `experts.cu`).
const MOST_EXPERTS: usize = 1024;

/// What multiplies with weights of a dtype.
#[derive(Clone, Copy)]
enum Kernels {
    /// As numbers of 32 bits.
    Plain(&'static str),
    /// As 8-bit numbers in blocks of `block`, which `quantize` makes.
    Blocks {
        quantize: &'static str,
        one: &'static str,
        four: &'static str,
        /// Not of all types.
        tile: Option<&'static str>,
        block: usize,
    },
}

/// The three kernels of a block type: of a row, of four that share a reading of the weights, and of tiles of many.
macro_rules! block_kernels {
    ($name:literal) => {
        (
            concat!("mul_vec_", $name, "_1"),
            concat!("mul_vec_", $name, "_4"),
            Some(concat!("mul_tile_", $name)),
        )
    };
}

impl Kernels {
    fn of(dtype: DType) -> Option<Self> {
        let (one, four, tile) = match dtype {
            DType::F32 => return Some(Self::Plain("mul_mat_f32")),
            DType::F16 => return Some(Self::Plain("mul_mat_f16")),
            DType::BF16 => return Some(Self::Plain("mul_mat_bf16")),
            DType::Q8_0 => block_kernels!("q8_0"),
            DType::Q4_0 => block_kernels!("q4_0"),
            DType::Q4_1 => block_kernels!("q4_1"),
            DType::Q5_0 => block_kernels!("q5_0"),
            DType::Q5_1 => block_kernels!("q5_1"),
            DType::MXFP4 => block_kernels!("mxfp4"),
            DType::NVFP4 => ("mul_vec_nvfp4_1", "mul_vec_nvfp4_4", None),
            DType::Q4K => block_kernels!("q4_k"),
            DType::Q5K => block_kernels!("q5_k"),
            DType::Q6K => block_kernels!("q6_k"),
            _ => return None,
        };
        let (block, quantize) = match dtype.block_len() {
            32 | 64 => (32, "quantize_q8"),
            256 => (256, "quantize_q8k"),
            _ => return None,
        };
        Some(Self::Blocks {
            quantize,
            one,
            four,
            tile,
            block,
        })
    }

    fn names(self) -> Vec<&'static str> {
        match self {
            Self::Plain(name) => vec![name],
            Self::Blocks {
                quantize,
                one,
                four,
                tile,
                ..
            } => [quantize, one, four].into_iter().chain(tile).collect(),
        }
    }
}

/// The expert of each row of a product.
struct Chosen {
    /// Address of their numbers, i32.
    ids: u64,
    /// How many rows.
    rows: usize,
    /// Address of groups of rows with one expert, and how many groups there may be; without them a row is by itself.
    order: Option<(u64, usize)>,
    experts: usize,
    /// Experts of a token, and rows that it has for them.
    used: usize,
    per_token: usize,
}

/// `x` times weights as they are stored. The order of summation is the CPU's (block_vec.cu, plain_mat.cu).
struct Product {
    kernels: Kernels,
    n: usize,
    k: usize,
}

impl Product {
    /// With weights `[…, n, k]`.
    fn of(dtype: DType, n: usize, k: usize) -> Option<Self> {
        int(n).and_then(|_| int(k)).ok()?;
        let kernels = Kernels::of(dtype)?;
        (k > 0).then_some(Self { kernels, n, k })
    }

    /// Where the numbers of activations, what a unit of them stands for, and their sums begin in the scratch memory; and its
    /// end.
    fn parts(&self, rows: usize) -> Option<[usize; 4]> {
        let mut at = [0usize; 4];
        let Kernels::Blocks { block, .. } = self.kernels else {
            return Some(at);
        };
        let each = [self.k, self.k / block * 4, self.k / 32 * 4];
        for (i, bytes) in each.into_iter().enumerate() {
            let size = rows.checked_mul(bytes)?;
            let size = size.checked_next_multiple_of(ALIGNMENT)?;
            at[i + 1] = at[i].checked_add(size)?;
        }
        Some(at)
    }

    fn scratch(&self, rows: usize) -> Option<usize> {
        self.parts(rows).map(|[.., end]| end)
    }

    /// Rows of a group of choices that have one expert.
    fn together(&self) -> usize {
        match self.kernels {
            Kernels::Plain(_) => PLAIN_TOGETHER,
            Kernels::Blocks { .. } => TOGETHER,
        }
    }

    /// Of each of so many rows the product.
    fn launch(
        &self,
        cx: &Cx<'_>,
        (w, x, out): (u64, u64, u64),
        rows: usize,
    ) -> Result<(), DeviceError> {
        let (name, together, outputs) = match self.kernels {
            Kernels::Plain(name) => (name, PLAIN_TOGETHER, 64),
            Kernels::Blocks { one, .. } if rows == 1 => (one, 1, 8),
            Kernels::Blocks {
                tile: Some(tile), ..
            } if rows >= MANY => (tile, TILE, 64),
            Kernels::Blocks { four, .. } => (four, TOGETHER, 8),
        };
        let prepared = self.prepare(cx, x, rows)?;
        for (first, rows) in parts_of(rows, MOST_BLOCKS_DOWN * together) {
            let arguments = self.arguments((w, x, out), prepared, (first, first), rows)?;
            let arguments = match together {
                TILE => arguments,
                _ => arguments
                    .word(0)
                    .word(0)
                    .int(0)
                    .int(0)
                    .int(0)
                    .word(cx.faults),
            };
            let down = rows.div_ceil(together);
            // SAFETY: the kernel's arguments (block_vec.cu, block_tile.cu, plain_mat.cu), without ids; weights,
            // activations and results are of these sizes, and what was made of the activations is in scratch memory as
            // large as `scratch` says.
            unsafe { cx.gpu.launch(name, self.grid(outputs, down)?, &arguments)? };
        }
        Ok(())
    }

    /// Of each chosen row of `activations` the product with its expert.
    fn launch_chosen(
        &self,
        cx: &Cx<'_>,
        (w, x, out): (u64, u64, u64),
        activations: usize,
        chosen: &Chosen,
    ) -> Result<(), DeviceError> {
        let (name, outputs) = match self.kernels {
            Kernels::Plain(name) => (name, 64),
            Kernels::Blocks { four, .. } if chosen.order.is_some() => (four, 8),
            Kernels::Blocks { one, .. } => (one, 8),
        };
        let prepared = self.prepare(cx, x, activations)?;
        // Launches: their first row of ids, their first group, and their rows or groups.
        let launches: Vec<[usize; 3]> = match chosen.order {
            Some((_, groups)) => parts_of(groups, MOST_BLOCKS_DOWN)
                .map(|(first, groups)| [0, first, groups])
                .collect(),
            // All rows of a token in one.
            None => parts_of(chosen.rows, MOST_BLOCKS_DOWN / chosen.used * chosen.used)
                .map(|(first, rows)| [first, 0, rows])
                .collect(),
        };
        for [first, group, down] in launches {
            let from = first / chosen.used * chosen.per_token;
            let rows = chosen.rows - first;
            let arguments = self.arguments((w, x, out), prepared, (from, first), rows)?;
            let order = chosen
                .order
                .map(|(order, _)| order + (group * self.together() * 4) as u64);
            let arguments = arguments
                .word(chosen.ids + (first * 4) as u64)
                .word(order.unwrap_or(0))
                .int(int(chosen.experts)?)
                .int(int(chosen.used)?)
                .int(int(chosen.per_token)?)
                .word(cx.faults);
            // SAFETY: as in `launch`, with ids that were checked, and groups of them.
            unsafe { cx.gpu.launch(name, self.grid(outputs, down)?, &arguments)? };
        }
        Ok(())
    }

    fn grid(&self, outputs: usize, down: usize) -> Result<Grid, DeviceError> {
        Ok(Grid {
            blocks: [int(self.n.div_ceil(outputs))?, int(down)?, 1],
            threads: [128, 1, 1],
            shared: 0,
        })
    }

    /// What all kernels begin with, from a row of activations and one of results on.
    fn arguments(
        &self,
        (w, x, out): (u64, u64, u64),
        prepared: Option<[u64; 3]>,
        (from, to): (usize, usize),
        rows: usize,
    ) -> Result<Arguments, DeviceError> {
        let k = self.k;
        let arguments = match (self.kernels, prepared) {
            (Kernels::Blocks { block, .. }, Some([q, da, sums])) => Arguments::default()
                .word(w)
                .word(q + (from * k) as u64)
                .word(da + (from * (k / block) * 4) as u64)
                .word(sums + (from * (k / 32) * 4) as u64),
            _ => {
                let x = x + (from * k * 4) as u64;
                Arguments::default().word(w).word(x).word(k as u64)
            }
        };
        Ok(arguments
            .word(out + (to * self.n * 4) as u64)
            .word(self.n as u64)
            .int(int(self.n)?)
            .int(int(k)?)
            .int(int(rows)?))
    }

    /// Makes 8-bit numbers of the activations, where the weights want them.
    fn prepare(
        &self,
        cx: &Cx<'_>,
        x: u64,
        activations: usize,
    ) -> Result<Option<[u64; 3]>, DeviceError> {
        let Kernels::Blocks {
            quantize, block, ..
        } = self.kernels
        else {
            return Ok(None);
        };
        let parts = self.parts(activations).ok_or_else(overflow)?;
        let [q, da, sums, _] = parts.map(|at| cx.scratch + at as u64);
        let blocks = activations.checked_mul(self.k / block);
        let grid = Grid {
            blocks: [int(blocks.ok_or_else(overflow)?.div_ceil(8))?, 1, 1],
            threads: [256, 1, 1],
            shared: 0,
        };
        let arguments = Arguments::default()
            .word(x)
            .word(self.k as u64)
            .word(q)
            .word(da)
            .word(sums)
            .int(int(activations)?)
            .int(int(self.k)?);
        // SAFETY: the kernel's arguments (quantize.cu); the scratch memory is as large as `scratch` says.
        unsafe { cx.gpu.launch(quantize, grid, &arguments)? };
        Ok(Some([q, da, sums]))
    }
}

struct MulMat {
    product: Product,
    x: Shape,
}

fn mul_mat(call: &Call<'_>) -> Option<Made> {
    let (x, w) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
    let [n, k] = w.shape.dims() else { return None };
    if x.dtype != DType::F32 || w.shape.is_symbolic() {
        return None;
    }
    let product = Product::of(w.dtype, n.at(0), k.at(0))?;
    let names = product.kernels.names();
    let x = x.shape.clone();
    Some((Box::new(MulMat { product, x }), names))
}

impl MulMat {
    fn rows(&self, rows: usize) -> Option<usize> {
        Some(self.x.elements(rows)? / self.product.k)
    }
}

impl Kernel for MulMat {
    fn scratch(&self, rows: usize) -> Option<usize> {
        self.product.scratch(self.rows(rows)?)
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let rows = self.rows(cx.rows).ok_or_else(overflow)?;
        let at = (cx.input(1)?, cx.input(0)?, cx.output(0)?);
        self.product.launch(cx, at, rows)
    }
}

/// `x` times the experts that each token uses.
struct MulMatId {
    product: Product,
    x: Shape,
    ids: Shape,
    dtype: u32,
    experts: usize,
    used: usize,
    per_token: usize,
}

fn mul_mat_id(call: &Call<'_>) -> Option<Made> {
    let (w, x, ids) = (
        call.tensor(0).ok()?,
        call.tensor(1).ok()?,
        call.tensor(2).ok()?,
    );
    let [experts, n, k] = w.shape.dims() else {
        return None;
    };
    let [_, per_token, _] = x.shape.dims() else {
        return None;
    };
    let used = ids.shape.inner().filter(|used| *used > 0)?;
    if x.dtype != DType::F32 || w.shape.is_symbolic() || used > MOST_BLOCKS_DOWN {
        return None;
    }
    let product = Product::of(w.dtype, n.at(0), k.at(0))?;
    let mut names = product.kernels.names();
    names.extend(["experts_of", "group_choices"]);
    let kernel = MulMatId {
        product,
        dtype: index_code(ids.dtype)?,
        x: x.shape.clone(),
        ids: ids.shape.clone(),
        experts: experts.at(0),
        used,
        per_token: per_token.at(0),
    };
    int(kernel.experts).ok()?;
    Some((Box::new(kernel), names))
}

/// Of an execution: rows of `x`, choices, groups of these, and where the numbers of experts and the groups begin in the scratch
/// memory, and its end.
struct Sizes {
    activations: usize,
    choices: usize,
    groups: usize,
    ids: usize,
    order: usize,
    end: usize,
}

impl MulMatId {
    fn sizes(&self, rows: usize) -> Option<Sizes> {
        let activations = self.x.elements(rows)? / self.product.k;
        let (choices, together) = (self.ids.elements(rows)?, self.product.together());
        // Few choices have an expert each, and as many readings of weights as there are.
        let groups = match choices > self.experts && self.experts <= MOST_EXPERTS {
            // At most all but one of a group's places are left over, of each expert and of those that are none.
            true => choices.checked_add((together - 1) * (self.experts + 1))? / together,
            false => 0,
        };
        let ids = self.product.scratch(activations)?;
        let order = ids.checked_add(choices.checked_mul(4)?)?;
        Some(Sizes {
            activations,
            choices,
            groups,
            ids,
            order,
            end: order.checked_add(groups.checked_mul(together)?.checked_mul(4)?)?,
        })
    }
}

impl Kernel for MulMatId {
    fn reads_indices(&self) -> bool {
        true
    }

    fn scratch(&self, rows: usize) -> Option<usize> {
        self.sizes(rows).map(|sizes| sizes.end)
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let sizes = self.sizes(cx.rows).ok_or_else(overflow)?;
        let [ids, order] = [sizes.ids, sizes.order].map(|at| cx.scratch + at as u64);
        let chosen = Chosen {
            ids,
            rows: sizes.choices,
            order: (sizes.groups > 0).then_some((order, sizes.groups)),
            experts: self.experts,
            used: self.used,
            per_token: self.per_token,
        };
        let arguments = Arguments::default()
            .int(self.dtype)
            .word(ids)
            .word(cx.input(2)?)
            .word(sizes.choices as u64)
            .word(self.experts as u64)
            .word(cx.faults);
        // SAFETY: the kernel's arguments (experts.cu); the scratch memory is as large as `scratch` says.
        unsafe {
            let grid = grid(sizes.choices as u64);
            cx.gpu.launch("experts_of", grid, &arguments)?;
        }
        if sizes.groups > 0 {
            let arguments = Arguments::default()
                .word(ids)
                .word(order)
                .int(int(sizes.choices)?)
                .int(int(self.experts)?)
                .int(int(self.product.together())?)
                .int(int(sizes.groups)?);
            let one = Grid {
                blocks: [1, 1, 1],
                threads: [256, 1, 1],
                shared: 0,
            };
            // SAFETY: as above.
            unsafe { cx.gpu.launch("group_choices", one, &arguments)? };
        }
        let at = (cx.input(0)?, cx.input(1)?, cx.output(0)?);
        self.product
            .launch_chosen(cx, at, sizes.activations, &chosen)
    }
}
