//! Products with the experts that tokens choose.

use hotcell_graph::{
    DType, Dim,
    op::{Call, ValueSpec},
};

use super::{
    Entry,
    index::{Indices, wrap},
    matmul::{Scaled, prepared, weight_bytes},
    split, unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::{
        dequant::is_weight_dtype,
        matmul::{MulMat, pack},
        plan::{Kernel, Launcher, Reg, Run},
        quantize::scratch_bytes,
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "mul_mat_id",
        supports: fits,
        launch: mul_mat_id,
    },
    Entry {
        op: "mul_mat_id_scaled",
        supports: fits,
        launch: mul_mat_id,
    },
];

/// Rows that are gathered for an expert at a time, so that its weights are unpacked once for all of them.
const GATHERED: usize = 16;

#[derive(Clone, Copy)]
struct Sizes {
    dtype: DType,
    ids: DType,
    experts: usize,
    n: usize,
    k: usize,
    tokens: Dim,
    /// Experts of a token.
    used: usize,
    /// Whether a token has one row for all its experts.
    shared: bool,
}

fn sizes_of(call: &Call<'_>) -> Option<Sizes> {
    let [
        ValueSpec::Tensor(w),
        ValueSpec::Tensor(x),
        ValueSpec::Tensor(ids),
        ..,
    ] = call.inputs
    else {
        return None;
    };
    match (w.shape.dims(), x.shape.dims(), ids.shape.dims()) {
        (
            &[Dim::Fixed(experts), Dim::Fixed(n), Dim::Fixed(k)],
            &[tokens, Dim::Fixed(rows), _],
            &[_, Dim::Fixed(used)],
        ) => Some(Sizes {
            dtype: w.dtype,
            ids: ids.dtype,
            experts,
            n,
            k,
            tokens,
            used,
            shared: rows == 1,
        }),
        _ => None,
    }
}

fn fits(call: &Call<'_>) -> bool {
    sizes_of(call).is_some_and(|s| is_weight_dtype(s.dtype))
}

struct Experts {
    op: &'static str,
    w: Reg,
    /// The packed form of all experts' weights, which may be bound.
    packed: Option<Reg>,
    x: Reg,
    ids: Indices,
    prepared: Option<Reg>,
    scaled: Option<Scaled>,
    out: Reg,
    scratch: Reg,
    /// Scratch bytes of one part: gathered rows, their sums, and the choices by experts.
    room: usize,
    /// Bytes of one expert.
    weight_bytes: usize,
    sizes: Sizes,
}

impl Experts {
    /// The expert of a choice, or the id that is none.
    ///
    /// # Safety
    ///
    /// As for [`Kernel::run`]; `choice` is below the number of choices.
    unsafe fn expert(&self, run: &Run<'_>, choice: usize) -> Result<usize, i64> {
        let mut id = [0];
        // SAFETY: the caller's promise.
        unsafe { self.ids.read(run, choice, &mut id) };
        wrap(id[0], self.sizes.experts).ok_or(id[0])
    }
}

/// A choice below its expert: choices in this order are grouped by experts. The launch checks that both fit.
fn chosen(expert: usize, choice: usize) -> u64 {
    (expert as u64) << 32 | choice as u64
}

/// The expert and the choice.
fn parts_of(chosen: u64) -> (usize, usize) {
    ((chosen >> 32) as usize, chosen as u32 as usize)
}

impl Kernel for Experts {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let Sizes {
            dtype,
            experts,
            n,
            k,
            used,
            shared,
            ..
        } = self.sizes;
        let choices = self.sizes.tokens.at(run.rows) * used;
        let columns = split(n, 16, part, parts);
        let width = columns.len();
        // A row as the kernel reads it: prepared, or numbers.
        let prepared_bytes = scratch_bytes(dtype, k);
        let (from, row_bytes) = match self.prepared {
            Some(reg) => (run.pointer(reg), prepared_bytes),
            None => (run.pointer(self.x), k * size_of::<f32>()),
        };
        let packed = self.packed.filter(|&reg| run.has(reg));
        let all = run.pointer(packed.unwrap_or(self.w));
        // SAFETY: sizes as the specs say; each part writes columns and scratch of its own.
        unsafe {
            let gathered = run.pointer(self.scratch).add(part * self.room);
            let sums = gathered.add((GATHERED * row_bytes).next_multiple_of(64));
            let (out, sums) = (run.pointer(self.out).cast::<f32>(), sums.cast::<f32>());
            // Every id is read once, so that what was checked is what is used.
            let order = sums.add((GATHERED * n).next_multiple_of(16)).cast::<u64>();
            let mut valid = 0;
            for choice in 0..choices {
                match self.expert(run, choice) {
                    Ok(expert) => {
                        order.add(valid).write(chosen(expert, choice));
                        valid += 1;
                    }
                    Err(id) => {
                        if part == 0 {
                            run.index_out_of_range(self.op, id, experts);
                        }
                        let row = out.add(choice * n + columns.start);
                        row.write_bytes(0, width);
                    }
                }
            }
            if width == 0 {
                return;
            }
            let order = std::slice::from_raw_parts_mut(order, valid);
            order.sort_unstable();
            let multiply = |expert: usize, chosen: &[u64]| {
                for (i, &choice) in chosen.iter().enumerate() {
                    let (_, choice) = parts_of(choice);
                    let row = if shared { choice / used } else { choice };
                    let to = gathered.add(i * row_bytes);
                    from.add(row * row_bytes)
                        .copy_to_nonoverlapping(to, row_bytes);
                }
                let rows = chosen.len();
                let (x, prepared): (&[f32], &[u8]) = match self.prepared {
                    Some(_) => (&[], std::slice::from_raw_parts(gathered, rows * row_bytes)),
                    None => (std::slice::from_raw_parts(gathered.cast(), rows * k), &[]),
                };
                // A part's columns are whole panels, and so are an expert's rows where they are packed.
                let weights = all.add(expert * self.weight_bytes);
                let skipped = self.weight_bytes / n * columns.start;
                let product = MulMat {
                    dtype,
                    w: std::slice::from_raw_parts(
                        weights.add(skipped),
                        self.weight_bytes - skipped,
                    ),
                    packed: packed.is_some(),
                    k,
                    x,
                    x_stride: k,
                    prepared,
                    rows,
                };
                match &self.scaled {
                    None => product.run(run.path, 0..width, sums, width),
                    Some(scaled) => {
                        let first = [expert, columns.start];
                        scaled.run(run, part, &product, first, (0..width, sums, width));
                    }
                }
                for (i, &choice) in chosen.iter().enumerate() {
                    let (_, choice) = parts_of(choice);
                    let to = out.add(choice * n + columns.start);
                    sums.add(i * width).copy_to_nonoverlapping(to, width);
                }
            };
            for chosen in order.chunk_by(|a, b| parts_of(*a).0 == parts_of(*b).0) {
                for some in chosen.chunks(GATHERED) {
                    if run.stopped() {
                        return;
                    }
                    multiply(parts_of(some[0]).0, some);
                }
            }
        }
    }
}

fn mul_mat_id(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (Some(sizes), &[w, x, ids, ref scales @ ..], &[out]) = (sizes_of(call), ins, outs) else {
        return Err(unsupported(call));
    };
    let Sizes {
        dtype,
        experts,
        n,
        k,
        tokens,
        used,
        shared,
        ..
    } = sizes;
    let per_token = if shared { 1 } else { used };
    let scaled = match *scales {
        [] => None,
        [reg, ..] => Some(Scaled::of(launcher, call, reg, [n, k], GATHERED)?),
    };
    let prepared = prepared(launcher, dtype, x, (tokens, per_token), k);
    let row_bytes = match prepared {
        Some(_) => scratch_bytes(dtype, k),
        None => k * size_of::<f32>(),
    };
    let choices = tokens.at(launcher.max_rows).checked_mul(used);
    let choices = choices.filter(|n| u32::try_from(*n).is_ok() && u32::try_from(experts).is_ok());
    let choices = choices.ok_or_else(|| unsupported(call))?;
    // The widest share of columns is that of a single part.
    let room = (GATHERED * row_bytes).next_multiple_of(64)
        + (GATHERED * n * size_of::<f32>()).next_multiple_of(64)
        + (choices * size_of::<u64>()).next_multiple_of(64);
    let scratch = launcher.scratch(room.saturating_mul(launcher.parts));
    // All experts' rows are one matrix, of which none may be in the panel of another expert's.
    let packed = match n.is_multiple_of(pack::PANEL) && scaled.is_none_or(|s| s.fits_panels()) {
        true => launcher.packed(w, dtype, experts.saturating_mul(n), k),
        false => None,
    };
    let kernel = Experts {
        op: call.op.name,
        w,
        packed,
        x,
        ids: Indices {
            reg: ids,
            dtype: sizes.ids,
        },
        prepared,
        scaled,
        out,
        scratch,
        room,
        weight_bytes: weight_bytes(call, dtype, n, k)?,
        sizes,
    };
    let mut reads = vec![w, x, ids];
    reads.extend(prepared.into_iter().chain(scaled.map(|s| s.reg)));
    launcher.aligned(x);
    launcher.step_with_bytes(kernel, &reads, &[out, scratch]);
    Ok(())
}
