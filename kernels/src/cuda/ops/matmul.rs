//! Products with weights.

mod kernels;

use hotcell_graph::{DType, Shape, op::Call};

use self::kernels::{FEW_OUTPUTS, Kernels, Shared, TILE_OUTPUTS};
use super::{
    Cx, Entry, Kernel, Made, Wanted, index::index_code, int, layout::grid, wanted::Numbers,
};
use crate::{
    backend::DeviceError,
    cuda::{
        gpu::{Arguments, Grid},
        join::Following,
    },
    part::overflow,
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "mul_mat",
        make: mul_mat,
    },
    Entry {
        op: "mul_mat_scaled",
        make: mul_mat,
    },
    Entry {
        op: "mul_mat_id",
        make: mul_mat_id,
    },
    Entry {
        op: "mul_mat_id_scaled",
        make: mul_mat_id,
    },
];

/// Blocks of a grid's second axis at most (CUDA's programming guide, compute capabilities).
const MOST_BLOCKS_DOWN: usize = 65_535;

/// First rows and numbers of rows of as many launches as it takes, where each has at most `most` of them. No overflow in the
/// sizes before a row: the tensors are no larger than memory.
fn parts_of(rows: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows)
        .step_by(most)
        .map(move |first| (first, most.min(rows - first)))
}

/// Elements that kernels go beyond a row's end in their counting, at most.
const MOST_PAST: usize = 1024;

/// Experts that choices are grouped by at most (`MOST_EXPERTS` in `experts.cu`).
const MOST_EXPERTS: usize = 1024;

/// The expert of each row of a product.
struct Chosen {
    /// Address of their numbers, i32.
    ids: u64,
    /// How many rows.
    rows: usize,
    /// What multiplies them.
    by: Shared,
    /// Address of groups of rows with one expert, and how many groups there may be; without them a row is by itself.
    order: Option<(u64, usize)>,
    experts: usize,
    /// Experts of a token, and rows that it has for them.
    used: usize,
    per_token: usize,
}

/// Rectangles of weights that have a scale each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rectangles {
    height: usize,
    width: usize,
}

/// Elements of a chunk (`CHUNK` in `halves.cuh`).
const CHUNK: usize = 32;

impl Rectangles {
    /// Those of a call that has some.
    fn of(call: &Call<'_>) -> Option<Self> {
        let size = |i: usize| usize::try_from(call.int(i).ok()?).ok();
        Some(Self {
            height: size(0)?,
            width: size(1)?,
        })
    }

    /// How many are side by side.
    fn across(self, k: usize) -> usize {
        k.div_ceil(self.width.max(1))
    }

    /// Whether each block of so many outputs is within one's height, or takes scales when the sums are there.
    fn hold(self, outputs: usize, [n, k]: [usize; 2]) -> bool {
        self.across(k) == 1 || self.height >= n || self.height.is_multiple_of(outputs)
    }

    /// `Scales` in `scales.cuh`, of matrices `[n, k]` whose scales are there.
    fn words(self, values: [u64; 3], [n, k]: [usize; 2]) -> Result<[u64; 5], DeviceError> {
        // Higher than a matrix, or wider, is as high and wide.
        let (height, width) = (self.height.min(n.max(1)), self.width.min(k));
        let across = self.across(k);
        let sizes = [
            height,
            width.div_ceil(CHUNK),
            across,
            across * n.div_ceil(height),
        ];
        let mut words = [values[0], values[1], values[2], 0, 0];
        for (i, size) in sizes.into_iter().enumerate() {
            words[3 + i / 2] |= u64::from(int(size)?) << (32 * (i % 2));
        }
        Ok(words)
    }
}

/// `x` times weights as they are stored. The order of summation is the CPU's (block_vec.cu, plain_mat.cu), and the device's own with
/// numbers of 16 bits and fewer (halves.cuh).
struct Product {
    kernels: Kernels,
    n: usize,
    k: usize,
    rectangles: Option<Rectangles>,
}

impl Product {
    /// With weights `[…, n, k]`.
    fn of(dtype: DType, n: usize, k: usize, rectangles: Option<Rectangles>) -> Option<Self> {
        // Of `k` kernels count some past the end.
        let most = k.checked_add(MOST_PAST)?;
        int(n).and_then(|_| int(most)).ok()?;
        let kernels = Kernels::of(dtype)?;
        if let Some(of) = rectangles {
            let chunks = of.across(k) == 1 || of.width.is_multiple_of(CHUNK);
            if !kernels.take_scales() || !chunks || !of.hold(FEW_OUTPUTS, [n, k]) {
                return None;
            }
            int(of.across(k).checked_mul(n)?).ok()?;
        }
        (k > 0).then_some(Self {
            kernels,
            n,
            k,
            rectangles,
        })
    }

    /// Whether tiles can take the scales of matrices of so many outputs.
    fn fits_tiles(&self, mut outputs: impl Iterator<Item = usize>) -> bool {
        self.rectangles
            .is_none_or(|of| outputs.all(|n| of.hold(TILE_OUTPUTS, [n, self.k])))
    }

    /// What kernels take of the scales of these matrices, if they take any.
    fn with_scales(
        &self,
        arguments: Arguments,
        matrices: &[Matrix],
    ) -> Result<Arguments, DeviceError> {
        if !self.kernels.take_scales() {
            return Ok(arguments);
        }
        let mut values = [0; MOST_MATRICES];
        for (value, matrix) in values.iter_mut().zip(matrices) {
            *value = matrix.scales;
        }
        let words = match self.rectangles {
            None => [0, 0, 0, 1, 0],
            // A height that is that of the highest one is higher than the others.
            Some(of) => {
                let n = matrices.iter().map(|m| m.n).max().unwrap_or(0);
                of.words(values, [n, self.k])?
            }
        };
        Ok(arguments.block(&words))
    }

    /// What it wants of activations, if it reads them as numbers of 8 bits.
    fn numbers(&self, x: &Shape) -> Option<Numbers> {
        let Kernels::Blocks { blocks, .. } = self.kernels else {
            return None;
        };
        let (x, k) = (x.clone(), self.k);
        Some(Numbers { blocks, x, k })
    }

    /// Of each of so many rows the product with each of these matrices, which all are of this one's dtype and `k`.
    fn launch(
        &self,
        cx: &Cx<'_>,
        x: Activations,
        matrices: &[Matrix],
        rows: usize,
    ) -> Result<(), DeviceError> {
        let shared = self
            .kernels
            .for_rows(rows, self.fits_tiles(matrices.iter().map(|m| m.n)));
        for all in matrices.chunks(MOST_MATRICES) {
            let Some((matrix, further)) = all.split_first() else {
                continue;
            };
            let blocks = all.iter().map(|m| m.n.div_ceil(shared.outputs)).sum();
            for (first, rows) in parts_of(rows, MOST_BLOCKS_DOWN * shared.rows) {
                let arguments = self.arguments(*matrix, x, (first, first), rows)?;
                let arguments = arguments
                    .block(&words_of(further, first))
                    .word(0)
                    .word(0)
                    .int(0)
                    .int(0)
                    .int(0)
                    .word(cx.faults);
                let arguments = self.with_scales(arguments, all)?;
                let grid = grid_of(&shared, blocks, rows.div_ceil(shared.rows))?;
                // SAFETY: the kernel's arguments (block_vec.cu, block_tile.cu, plain_mat.cu, half_vec.cu, half_tile.cu, float8_vec.cu,
                // float8_tile.cu), without ids; weights, scales, activations, what was made of them, and results are of these sizes.
                unsafe { cx.gpu.launch(shared.name, grid, &arguments)? };
            }
        }
        Ok(())
    }

    /// Of each chosen row of `activations` the product with its expert.
    fn launch_chosen(
        &self,
        cx: &Cx<'_>,
        x: Activations,
        matrix: Matrix,
        chosen: &Chosen,
    ) -> Result<(), DeviceError> {
        let shared = chosen.by;
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
            let arguments = self.arguments(matrix, x, (from, first), rows)?;
            let order = chosen
                .order
                .map(|(order, _)| order + (group * shared.rows * 4) as u64);
            let arguments = arguments
                .block(&words_of(&[], 0))
                .word(chosen.ids + (first * 4) as u64)
                .word(order.unwrap_or(0))
                .int(int(chosen.experts)?)
                .int(int(chosen.used)?)
                .int(int(chosen.per_token)?)
                .word(cx.faults);
            let arguments = self.with_scales(arguments, &[matrix])?;
            // SAFETY: as in `launch`, with ids that were checked, and groups of them.
            unsafe {
                let grid = grid_of(&shared, self.n.div_ceil(shared.outputs), down)?;
                cx.gpu.launch(shared.name, grid, &arguments)?;
            }
        }
        Ok(())
    }

    /// What all kernels begin with, from a row of activations and one of results on.
    fn arguments(
        &self,
        Matrix { w, out, n, .. }: Matrix,
        x: Activations,
        (from, to): (usize, usize),
        rows: usize,
    ) -> Result<Arguments, DeviceError> {
        let k = self.k;
        let arguments = match (self.kernels, x) {
            (Kernels::Blocks { blocks, .. }, Activations::Numbers([q, da, sums])) => {
                Arguments::default()
                    .word(w)
                    .word(q + (from * k) as u64)
                    .word(da + (from * (k / blocks.len()) * 4) as u64)
                    .word(sums + (from * (k / 32) * 4) as u64)
            }
            (Kernels::Plain(_) | Kernels::Halves { .. }, Activations::Plain(x)) => {
                let x = x + (from * k * 4) as u64;
                Arguments::default().word(w).word(x).word(k as u64)
            }
            _ => return Err(overflow()),
        };
        Ok(arguments
            .word(out + (to * n * 4) as u64)
            .word(n as u64)
            .int(int(n)?)
            .int(int(k)?)
            .int(int(rows)?))
    }
}

/// Addresses of activations, as they are or as numbers of 8 bits, what a unit of these stands for, and their sums.
#[derive(Clone, Copy)]
enum Activations {
    Plain(u64),
    Numbers([u64; 3]),
}

impl Activations {
    /// Of an execution: what a kernel wanted comes after its inputs.
    fn of(
        numbers: Option<&Numbers>,
        cx: &Cx<'_>,
        [plain, wanted]: [usize; 2],
    ) -> Result<Self, DeviceError> {
        match numbers {
            None => cx.input(plain).map(Self::Plain),
            Some(numbers) => numbers
                .addresses(cx.input(wanted)?, cx.rows)
                .map(Self::Numbers),
        }
    }
}

/// A matrix `[n, k]` and where its products go.
#[derive(Clone, Copy)]
struct Matrix {
    w: u64,
    /// 0: it has none.
    scales: u64,
    out: u64,
    n: usize,
}

/// Matrices of a launch at most.
const MOST_MATRICES: usize = 3;

/// Those that are not the first of a launch as `Further` in `common.cuh`, from a row of the results on.
fn words_of(further: &[Matrix], row: usize) -> [u64; 6] {
    let mut words = [0; 6];
    for (i, Matrix { w, out, n, .. }) in further.iter().take(MOST_MATRICES - 1).enumerate() {
        let word = |of: usize| 2 * of + i;
        words[word(0)] = *w;
        words[word(1)] = out + (row * n * 4) as u64;
        words[word(2)] = *n as u64;
    }
    words
}

fn grid_of(of: &Shared, blocks: usize, down: usize) -> Result<Grid, DeviceError> {
    Ok(Grid {
        blocks: [int(blocks)?, int(down)?, 1],
        threads: [of.threads, 1, 1],
        shared: 0,
    })
}

/// Products of the same rows with one matrix, or several of one dtype, of which each node has `x` and its matrix.
struct MulMat {
    product: Product,
    x: Shape,
    numbers: Option<Numbers>,
    /// Outputs of the matrices.
    all: Vec<usize>,
}

impl MulMat {
    fn of(call: &Call<'_>) -> Option<Self> {
        let (x, w) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
        let [n, k] = w.shape.dims() else { return None };
        if x.dtype != DType::F32 || w.shape.is_symbolic() {
            return None;
        }
        let rectangles = match call.inputs.len() {
            2 => None,
            _ => Some(Rectangles::of(call)?),
        };
        let product = Product::of(w.dtype, n.at(0), k.at(0), rectangles)?;
        Some(Self {
            numbers: product.numbers(&x.shape),
            all: vec![product.n],
            x: x.shape.clone(),
            product,
        })
    }

    fn rows(&self, rows: usize) -> Option<usize> {
        Some(self.x.elements(rows)? / self.product.k)
    }
}

fn mul_mat(call: &Call<'_>) -> Option<Made> {
    let kernel = MulMat::of(call)?;
    let names = kernel.product.kernels.names();
    Some((Box::new(kernel), names))
}

/// What makes one step of products that have the same `x` and weights of one dtype, and of how many: a launch for few rows.
pub(super) fn together(nodes: &Following<'_>) -> Option<(usize, Made)> {
    let dtype = |call: &Call<'_>| call.tensor(1).ok().map(|w| w.dtype);
    let (first, rest) = nodes.calls.split_first()?;
    let mut kernel = MulMat::of(first)?;
    for (i, call) in rest.iter().enumerate().take(MOST_MATRICES - 1) {
        let same = call.op.name == first.op.name
            && dtype(call) == dtype(first)
            && call.attributes == first.attributes
            && nodes.input(i + 1, 0) == nodes.input(0, 0)
            // One without outputs ends a launch's list (`Further`), and none of them is another one's matrix, or its scales.
            && kernel.all.last() != Some(&0)
            && (0..=i).all(|of| (1..call.inputs.len()).all(|at| !nodes.is_result(i + 1, at, of)));
        let Some(next) = MulMat::of(call).filter(|_| same) else {
            break;
        };
        kernel.all.push(next.product.n);
    }
    let (count, names) = (kernel.all.len(), kernel.product.kernels.names());
    (count > 1).then(|| -> (usize, Made) { (count, (Box::new(kernel), names)) })
}

impl Kernel for MulMat {
    fn wants(&self) -> Option<(Wanted, Vec<usize>)> {
        let numbers = self.numbers.clone()?;
        Some((Wanted::Numbers(numbers), vec![0]))
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let rows = self.rows(cx.rows).ok_or_else(overflow)?;
        let scaled = self.product.rectangles.is_some();
        // Inputs of a node.
        let each = 2 + usize::from(scaled);
        let matrix = |(i, n): (usize, &usize)| {
            Ok(Matrix {
                w: cx.input(each * i + 1)?,
                scales: if scaled { cx.input(each * i + 2)? } else { 0 },
                out: cx.output(i)?,
                n: *n,
            })
        };
        let matrices = self.all.iter().enumerate().map(matrix);
        let matrices = matrices.collect::<Result<Vec<_>, DeviceError>>()?;
        let x = Activations::of(self.numbers.as_ref(), cx, [0, each * self.all.len()])?;
        self.product.launch(cx, x, &matrices, rows)
    }
}

/// `x` times the experts that each token uses.
struct MulMatId {
    product: Product,
    numbers: Option<Numbers>,
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
    let rectangles = match call.inputs.len() {
        3 => None,
        _ => Some(Rectangles::of(call)?),
    };
    let product = Product::of(w.dtype, n.at(0), k.at(0), rectangles)?;
    let mut names = product.kernels.names();
    names.extend(["experts_of", "group_choices"]);
    let kernel = MulMatId {
        numbers: product.numbers(&x.shape),
        product,
        dtype: index_code(ids.dtype)?,
        ids: ids.shape.clone(),
        experts: experts.at(0),
        used,
        per_token: per_token.at(0),
    };
    int(kernel.experts).ok()?;
    Some((Box::new(kernel), names))
}

/// Of an execution: choices, groups of these, and where the groups begin in the scratch memory, after the numbers of experts, and its
/// end.
struct Sizes {
    choices: usize,
    by: Shared,
    groups: usize,
    order: usize,
    end: usize,
}

impl MulMatId {
    fn sizes(&self, rows: usize) -> Option<Sizes> {
        let choices = self.ids.elements(rows)?;
        let (kernels, experts) = (self.product.kernels, self.experts);
        // Few choices have an expert each, and as many readings of weights as there are.
        let (by, groups) = match choices > experts && experts <= MOST_EXPERTS {
            true => {
                let tall = self.product.fits_tiles([self.product.n].into_iter());
                let by = kernels.for_groups(choices, experts, tall);
                // At most all but one of a group's places are left over, of each expert and of those that are none.
                let places = choices.checked_add((by.rows - 1) * (experts + 1))?;
                (by, places / by.rows)
            }
            false => (kernels.for_chosen(), 0),
        };
        let order = choices.checked_mul(4)?;
        Some(Sizes {
            choices,
            by,
            groups,
            order,
            end: order.checked_add(groups.checked_mul(by.rows)?.checked_mul(4)?)?,
        })
    }
}

impl Kernel for MulMatId {
    fn wants(&self) -> Option<(Wanted, Vec<usize>)> {
        let numbers = self.numbers.clone()?;
        Some((Wanted::Numbers(numbers), vec![1]))
    }

    fn reads_indices(&self) -> bool {
        true
    }

    fn scratch(&self, rows: usize) -> Option<usize> {
        self.sizes(rows).map(|sizes| sizes.end)
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let sizes = self.sizes(cx.rows).ok_or_else(overflow)?;
        let (ids, order) = (cx.scratch, cx.scratch + sizes.order as u64);
        let chosen = Chosen {
            ids,
            rows: sizes.choices,
            by: sizes.by,
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
                .int(int(sizes.by.rows)?)
                .int(int(sizes.groups)?);
            let each = Grid {
                blocks: [int(self.experts + 1)?, 1, 1],
                threads: [256, 1, 1],
                shared: 0,
            };
            // SAFETY: as above.
            unsafe { cx.gpu.launch("group_choices", each, &arguments)? };
        }
        let scaled = self.product.rectangles.is_some();
        let matrix = Matrix {
            w: cx.input(0)?,
            scales: if scaled { cx.input(3)? } else { 0 },
            out: cx.output(0)?,
            n: self.product.n,
        };
        let x = Activations::of(self.numbers.as_ref(), cx, [1, 3 + usize::from(scaled)])?;
        self.product.launch_chosen(cx, x, matrix, &chosen)
    }
}
