//! Convolution: the filters, as rows, times the windows, as columns, which are never written out as a whole.

use std::ops::Range;

use half::{bf16, f16};
use hotcell_graph::{
    DType, Dim,
    op::{Call, ValueSpec},
};

use super::{Entry, unsupported, window::Windows};
use crate::{
    backend::DeviceError,
    cpu::{
        gemm::{Columns, Element, Gemm, Grid, Kernels, Number, Operands, Unit},
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "conv",
    supports: fits,
    launch: conv,
}];

/// The shapes of a call.
struct Sizes {
    windows: Windows,
    groups: usize,
    /// Results' channels of a group.
    outs: usize,
    /// Inputs' channels of a group.
    ins: usize,
}

impl Sizes {
    /// The product of one group of one image: filters by windows.
    fn gemm(&self) -> Gemm {
        let taps: usize = self.windows.axes.iter().map(|axis| axis.window).product();
        Gemm {
            dtype: self.windows.dtype,
            m: self.outs,
            n: self.windows.plane_out(),
            k: self.ins * taps,
        }
    }
}

fn sizes_of(call: &Call<'_>) -> Option<Sizes> {
    let [
        ValueSpec::Tensor(_),
        ValueSpec::Tensor(w),
        ValueSpec::Absent,
    ] = call.inputs
    else {
        return None;
    };
    let &[Dim::Fixed(outs), Dim::Fixed(ins), ref window @ ..] = w.shape.dims() else {
        return None;
    };
    let window: Vec<usize> = window.iter().map(|d| d.at(0)).collect();
    let windows = Windows::of(call, &window, 0)?;
    let groups = usize::try_from(call.int(4).ok()?).ok()?;
    let float = matches!(w.dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
    let fits = float && w.dtype == windows.dtype && call.name(5).ok()? == "channels_first";
    fits.then_some(Sizes {
        windows,
        groups,
        outs: outs.checked_div(groups)?,
        ins,
    })
}

fn fits(call: &Call<'_>) -> bool {
    sizes_of(call).is_some()
}

/// The windows of some channels, as columns: row `(channel, tap…)`, column `(place…)`, zero in the padding.
struct Image<'a, T> {
    at: *const T,
    windows: &'a Windows,
}

/// Columns of the widest tile.
const WIDEST: usize = 32;

impl<T: Element> Columns<T> for Image<'_, T> {
    unsafe fn pack(
        &self,
        kernels: &Kernels<T>,
        k: Range<usize>,
        n: Range<usize>,
        into: *mut T::Sum,
    ) {
        let [a, b, c] = self.windows.axes;
        let tile = kernels.tile.1;
        debug_assert!(tile <= WIDEST);
        let depth = k.len();
        let plane = self.windows.plane();
        for (panel, first) in n.clone().step_by(tile).enumerate() {
            let width = (n.end - first).min(tile);
            // Where tap 0 of each column lies.
            let mut starts = [[0i64; 3]; WIDEST];
            for (lane, start) in starts.iter_mut().enumerate().take(width) {
                let [oa, ob, oc] = self.windows.place(first + lane);
                *start = [a.start(oa), b.start(ob), c.start(oc)];
            }
            // One line of the input lies under the whole panel: nothing to look up for each column.
            let [one, last] = [first, first + width - 1].map(|i| self.windows.place(i));
            let line = c.stride == 1 && one[..2] == last[..2];
            for (row, k) in k.clone().enumerate() {
                let (rest, tap_c) = (k / c.window, k % c.window);
                let (rest, tap_b) = (rest / b.window, rest % b.window);
                let (channel, tap_a) = (rest / a.window, rest % a.window);
                let taps = [
                    (tap_a * a.dilation) as i64,
                    (tap_b * b.dilation) as i64,
                    (tap_c * c.dilation) as i64,
                ];
                // SAFETY: the panel has room for `tile` columns in each of its rows, and only elements that
                // lie inside the image are read.
                unsafe {
                    let into = into.add((panel * depth + row) * tile);
                    let from = self.at.add(channel * plane);
                    let element = |start: &[i64; 3]| {
                        let at = [start[0] + taps[0], start[1] + taps[1], start[2] + taps[2]];
                        let inside = at
                            .iter()
                            .zip(&self.windows.axes)
                            .all(|(at, axis)| (0..axis.size as i64).contains(at));
                        let [x, y, z] = at.map(|at| at as usize);
                        inside.then(|| (x * b.size + y) * c.size + z)
                    };
                    let ends = (element(&starts[0]), element(&starts[width - 1]));
                    if let (true, (Some(at), Some(_))) = (line, ends) {
                        for lane in 0..width {
                            let value = from.add(at + lane).read_unaligned();
                            into.add(lane).write(value.widen());
                        }
                    } else {
                        for (lane, start) in starts.iter().enumerate().take(width) {
                            let value = match element(start) {
                                Some(at) => from.add(at).read_unaligned().widen(),
                                None => T::Sum::ZERO,
                            };
                            into.add(lane).write(value);
                        }
                    }
                    for lane in width..tile {
                        into.add(lane).write(T::Sum::ZERO);
                    }
                }
            }
        }
    }
}

struct Conv {
    x: Reg,
    w: Reg,
    out: Reg,
    scratch: Reg,
    /// Scratch bytes of one part.
    room: usize,
    sizes: Sizes,
}

impl Conv {
    /// One unit of the work.
    ///
    /// # Safety
    ///
    /// As for [`Kernel::run`], and `T` is the dtype.
    unsafe fn unit<T: Element>(&self, run: &Run<'_>, gemm: &Gemm, unit: Unit, scratch: *mut u8) {
        let Sizes {
            windows,
            groups,
            ins,
            ..
        } = &self.sizes;
        let group = unit.batch % groups;
        // SAFETY: sizes as the specs say: `unit.batch` counts the groups of all images.
        unsafe {
            let x = run.pointer(self.x).cast::<T>();
            let x = x.add(unit.batch * ins * windows.plane());
            let w = run.pointer(self.w).cast::<T>();
            let w = w.add(group * gemm.m * gemm.k);
            let out = run.pointer(self.out).cast::<T>();
            let out = out.add(unit.batch * gemm.m * gemm.n);
            if gemm.k == 0 || windows.axes.iter().all(|axis| axis.is_plain()) {
                let at = Operands {
                    a: w.cast(),
                    b: x.cast(),
                    out: out.cast(),
                };
                return gemm.run(run.path, at, unit.rows, unit.columns, scratch);
            }
            let image = Image { at: x, windows };
            let (w, out) = (
                w.add(unit.rows.start * gemm.k),
                out.add(unit.rows.start * gemm.n),
            );
            gemm.packed(
                run.path,
                w,
                &image,
                out,
                unit.rows.len(),
                unit.columns,
                scratch,
            );
        }
    }
}

impl Kernel for Conv {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let gemm = self.sizes.gemm();
        let batch = self.sizes.windows.batch.at(run.rows) * self.sizes.groups;
        let Gemm { m, n, k, .. } = gemm;
        for unit in Grid::of(batch, m, n, k, parts)
            .units(part)
            .flat_map(Unit::pieces)
        {
            if run.stopped() {
                return;
            }
            // SAFETY: the caller's promise; units share no result and parts no scratch.
            unsafe {
                let scratch = run.pointer(self.scratch).add(part * self.room);
                match gemm.dtype {
                    DType::F32 => self.unit::<f32>(run, &gemm, unit, scratch),
                    DType::F64 => self.unit::<f64>(run, &gemm, unit, scratch),
                    DType::F16 => self.unit::<f16>(run, &gemm, unit, scratch),
                    DType::BF16 => self.unit::<bf16>(run, &gemm, unit, scratch),
                    // `fits` accepts no other.
                    _ => {}
                }
            }
        }
    }
}

fn conv(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (Some(sizes), &[x, w, _], &[out]) = (sizes_of(call), ins, outs) else {
        return Err(unsupported(call));
    };
    let room = sizes.gemm().scratch_bytes().next_multiple_of(64);
    let scratch = launcher.scratch(room.saturating_mul(launcher.parts));
    let kernel = Conv {
        x,
        w,
        out,
        scratch,
        room,
        sizes,
    };
    launcher.step_with_bytes(kernel, &[x, w], &[out, scratch]);
    Ok(())
}
