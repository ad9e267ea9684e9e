//! Reductions over any axes, in the order of [`reduction`](crate::reduction).

use hotcell_graph::op::{Call, rules::normal_axis};

use super::{
    reducers::{Reducer, TILE},
    split, split_if_worth, unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::plan::{Kernel, Launcher, Reg, Run},
    reduction::{Layout, NARROW, Sizes},
};

/// Elements below which one thread does it all.
const WORTH: usize = 16 << 10;

/// The first step: reduces every chunk.
struct Chunks<R: Reducer> {
    reducer: R,
    op: &'static str,
    /// Nothing has no result.
    needs_one: bool,
    x: Reg,
    /// The result, or the chunks' results where there are several for one result.
    out: Reg,
    direct: bool,
    layout: Layout,
}

impl<R: Reducer> Chunks<R> {
    /// Stores results `at..` of chunks.
    ///
    /// # Safety
    /// As for [`Run::slice_mut`].
    unsafe fn store(&self, run: &Run<'_>, at: usize, parts: &[R::Part]) {
        let range = at..at + parts.len();
        // SAFETY: the caller's promise, for the type that the launch chose.
        unsafe {
            if self.direct {
                let out = run.slice_mut::<R::Out>(self.out, range);
                for (o, p) in out.iter_mut().zip(parts) {
                    *o = self.reducer.finish(*p);
                }
            } else {
                run.slice_mut::<R::Part>(self.out, range)
                    .copy_from_slice(parts);
            }
        }
    }

    /// Contiguous rows, one chunk each.
    unsafe fn short_rows(&self, run: &Run<'_>, x: &[R::In], s: &Sizes, part: usize, parts: usize) {
        const BATCH: usize = 64;
        let worth = WORTH / s.n.max(1);
        // Short rows' results share cache lines.
        let step = if s.n < 1024 { 64 } else { 1 };
        let range = split_if_worth(s.outer, step, worth.max(1), part, parts);
        let mut buffer = [self.reducer.nothing(); BATCH];
        for at in range.clone().step_by(BATCH) {
            if run.stopped() {
                return;
            }
            let rows = BATCH.min(range.end - at);
            let x = &x[at * s.n..(at + rows) * s.n];
            self.reducer.rows(run.path, x, s.n, &mut buffer[..rows]);
            // SAFETY: rows of this part.
            unsafe { self.store(run, at, &buffer[..rows]) };
        }
    }
}

impl<R: Reducer> Kernel for Chunks<R> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let s = self.layout.at(run.rows);
        let kept = self.layout.count(false, run.rows).saturating_mul(s.k);
        let over = self.layout.count(true, run.rows).saturating_mul(s.n);
        if kept == 0 {
            return;
        }
        if self.needs_one && over == 0 && part == 0 {
            run.fail(DeviceError::Undefined {
                op: self.op,
                why: "an axis without elements has none",
            });
        }
        // SAFETY: the specs say this size.
        let x = unsafe { run.slice::<R::In>(self.x, s.outer * s.n * s.k) };
        if self.layout.in_rows() && s.chunks == 1 {
            // SAFETY: the caller's promise.
            return unsafe { self.short_rows(run, x, &s, part, parts) };
        }
        // Columns are apart, so their tiles may be as the threads like them.
        let units = s.outer.saturating_mul(s.chunks);
        let tile = match units.saturating_mul(s.k.div_ceil(TILE)) < 2 * parts {
            true => (s.k / (2 * parts))
                .next_multiple_of(NARROW)
                .clamp(NARROW, TILE),
            false => TILE,
        };
        let tiles = s.k.div_ceil(tile).max(1);
        let items = s.outer * s.chunks * tiles;
        let range = if x.len() < WORTH {
            split_if_worth(items, 1, usize::MAX, part, parts)
        } else {
            split(items, 1, part, parts)
        };
        // SAFETY: the launch asked for a tile's, which are this part's own; any bits are a chunk's result.
        let buffer = unsafe {
            std::slice::from_raw_parts_mut(run.workspace(part).cast::<R::Part>(), tile.min(s.k))
        };
        for item in range {
            if run.stopped() {
                return;
            }
            let (unit, first) = (item / tiles, item % tiles * tile);
            let (outer, chunk) = (unit / s.chunks, unit % s.chunks);
            let rows = chunk * s.chunk..s.n.min((chunk + 1) * s.chunk);
            let x = &x[(outer * s.n + rows.start) * s.k..(outer * s.n + rows.end) * s.k];
            let out = &mut buffer[..tile.min(s.k - first)];
            if self.layout.in_rows() {
                self.reducer.rows(run.path, x, x.len(), out);
            } else if s.k > 0 {
                self.reducer.columns(run.path, x, s.k, first, out);
            }
            // SAFETY: every item has results of its own.
            unsafe { self.store(run, unit * s.k + first, out) };
        }
    }
}

/// The second step: joins the chunks of every result, in order.
struct Join<R: Reducer> {
    reducer: R,
    chunks: Reg,
    out: Reg,
    layout: Layout,
}

impl<R: Reducer> Join<R> {
    /// The index of a unit from a counter over the kept runs and one over the reduced runs.
    fn unit(&self, mut kept: usize, mut reduced: usize, rows: usize) -> usize {
        let (mut at, mut stride) = (0, 1);
        for run in self.layout.outer.iter().rev() {
            let n = run.at(rows).max(1);
            let counter = if run.reduced { &mut reduced } else { &mut kept };
            at += *counter % n * stride;
            *counter /= n;
            stride *= n;
        }
        at
    }
}

impl<R: Reducer> Kernel for Join<R> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        const WIDTH: usize = 256;
        let s = self.layout.at(run.rows);
        let kept = self.layout.count(false, run.rows);
        let reduced = self.layout.count(true, run.rows);
        if kept == 0 || s.k == 0 {
            return;
        }
        let per_result = reduced.saturating_mul(s.chunks);
        let tiles = s.k.div_ceil(WIDTH);
        let worth = 4096 / per_result.saturating_mul(s.k.min(WIDTH)).max(1);
        let range = split_if_worth(kept * tiles, 1, worth.max(2), part, parts);
        // SAFETY: the launch made it of this size at least.
        let chunks = unsafe { run.slice::<R::Part>(self.chunks, s.outer * s.chunks * s.k) };
        let r = self.reducer;
        let mut buffer = [r.nothing(); WIDTH];
        for item in range {
            if run.stopped() {
                return;
            }
            let (kept, first) = (item / tiles, item % tiles * WIDTH);
            let acc = &mut buffer[..WIDTH.min(s.k - first)];
            acc.fill(r.nothing());
            for reduced in 0..reduced {
                let unit = self.unit(kept, reduced, run.rows);
                for chunk in 0..s.chunks {
                    let from = &chunks[(unit * s.chunks + chunk) * s.k + first..];
                    for (a, p) in acc.iter_mut().zip(from) {
                        *a = r.join(*a, *p);
                    }
                }
            }
            let at = kept * s.k + first;
            // SAFETY: every item has results of its own, of the type that the launch chose.
            let out = unsafe { run.slice_mut::<R::Out>(self.out, at..at + acc.len()) };
            for (o, a) in out.iter_mut().zip(acc) {
                *o = r.finish(*a);
            }
        }
    }
}

/// A call's place in a plan.
pub(super) struct Site<'a, 'b> {
    pub launcher: &'a mut Launcher,
    pub call: &'a Call<'b>,
    pub x: Reg,
    pub out: Reg,
    /// Nothing has no result.
    pub needs_one: bool,
}

impl Site<'_, '_> {
    /// Adds the steps.
    pub fn reduce<R: Reducer>(self, reducer: R) -> Result<(), DeviceError> {
        let call = self.call;
        let dims = call.tensor(0)?.shape.dims();
        let axes = call.ints(0)?.iter().map(|a| normal_axis(*a, dims.len()));
        let axes: Vec<Option<usize>> = axes.collect();
        let layout = Layout::new(dims, |a| axes.is_empty() || axes.contains(&Some(a)));
        let rows = self.launcher.max_rows;
        let s = layout.at(rows);
        let direct = layout.is_direct(&s);
        let target = if direct {
            self.out
        } else {
            let parts = s
                .outer
                .checked_mul(s.chunks)
                .and_then(|n| n.checked_mul(s.k)?.checked_mul(size_of::<R::Part>()));
            self.launcher
                .scratch(parts.ok_or_else(|| unsupported(call))?)
        };
        let width = s.k.min(TILE);
        self.launcher.workspace(width * size_of::<R::Part>());
        let chunks = Chunks {
            reducer,
            op: call.op.name,
            needs_one: self.needs_one,
            x: self.x,
            out: target,
            direct,
            layout: layout.clone(),
        };
        self.launcher.step(chunks, &[self.x], &[target]);
        if !direct {
            let join = Join {
                reducer,
                chunks: target,
                out: self.out,
                layout,
            };
            self.launcher.step(join, &[target], &[self.out]);
        }
        Ok(())
    }
}
