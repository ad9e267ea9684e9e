//! Rotary positions.

use hotcell_graph::{
    Dim,
    op::{Call, ValueSpec},
};

use super::{Entry, always, split_if_worth, stays, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::dispatch,
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "rope",
    supports: always,
    launch: rope,
}];

/// Numbers that are worth sharing out: of tables, whose functions take long, and of what is turned.
const WORTH_OF_TABLE: usize = 256;
const WORTH: usize = 4096;

/// For each row the cosines, then the sines, of its angles: `[m, d]`. One table serves every layer.
struct Table {
    positions: Reg,
    frequencies: Reg,
    out: Reg,
    count: Dim,
    half: usize,
}

impl Kernel for Table {
    fn is_alone(&self, rows: usize) -> bool {
        let width = self.half * 2;
        stays(self.count.at(rows) * width, width, WORTH_OF_TABLE)
    }

    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let (count, half) = (self.count.at(run.rows), self.half);
        let range = split_if_worth(count * half * 2, half * 2, WORTH_OF_TABLE, part, parts);
        // SAFETY: sizes as the specs say; parts write rows of their own.
        let (positions, frequencies, out) = unsafe {
            (
                run.slice::<i32>(self.positions, count),
                run.slice::<f32>(self.frequencies, half),
                run.slice_mut::<f32>(self.out, range.clone()),
            )
        };
        let first = range.start / (half * 2);
        for (row, position) in out.chunks_exact_mut(half * 2).zip(&positions[first..]) {
            let (cosines, sines) = row.split_at_mut(half);
            for ((c, s), f) in cosines.iter_mut().zip(sines).zip(frequencies) {
                // 31 + 24 bits: the angle is exact to the last bit of an f64, whatever the position.
                let (sin, cos) = libm::sincos(f64::from(*position) * f64::from(*f));
                (*c, *s) = (cos as f32, sin as f32);
            }
        }
    }
}

#[inline(always)]
fn turn_body(x: &[f32], table: &[f32], d: usize, interleaved: bool, out: &mut [f32]) {
    let half = d / 2;
    let (cosines, sines) = table.split_at(half);
    for (x, out) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
        if interleaved {
            let pairs = x.as_chunks::<2>().0.iter().zip(out.as_chunks_mut::<2>().0);
            for ((&[a, b], o), (c, s)) in pairs.zip(cosines.iter().zip(sines)) {
                *o = [a.mul_add(*c, -(b * s)), a.mul_add(*s, b * c)];
            }
        } else {
            let ((a, b), (oa, ob)) = (x.split_at(half), out.split_at_mut(half));
            for i in 0..half {
                oa[i] = a[i].mul_add(cosines[i], -(b[i] * sines[i]));
                ob[i] = a[i].mul_add(sines[i], b[i] * cosines[i]);
            }
        }
    }
}

dispatch! {
    fn turn(x: &[f32], table: &[f32], d: usize, interleaved: bool, out: &mut [f32]) = turn_body;
}

struct Rope {
    x: Reg,
    table: Reg,
    out: Reg,
    count: Dim,
    heads: usize,
    d: usize,
    interleaved: bool,
}

impl Kernel for Rope {
    fn is_alone(&self, rows: usize) -> bool {
        let width = self.heads * self.d;
        stays(self.count.at(rows) * width, width, WORTH)
    }

    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let (count, width) = (self.count.at(run.rows), self.heads * self.d);
        let range = split_if_worth(count * width, width, WORTH, part, parts);
        // SAFETY: sizes as the specs say; parts write rows of their own.
        let (x, table, out) = unsafe {
            (
                run.slice::<f32>(self.x, count * width),
                run.slice::<f32>(self.table, count * self.d),
                run.slice_mut::<f32>(self.out, range.clone()),
            )
        };
        let rows = x[range.clone()]
            .chunks_exact(width)
            .zip(out.chunks_exact_mut(width));
        for ((x, out), table) in
            rows.zip(table[range.start / width * self.d..].chunks_exact(self.d))
        {
            turn(run.path, x, table, self.d, self.interleaved, out);
        }
    }
}

fn rope(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (Some(ValueSpec::Tensor(t)), &[x, positions, frequencies], &[out]) =
        (call.inputs.first(), ins, outs)
    else {
        return Err(unsupported(call));
    };
    let &[count, Dim::Fixed(heads), Dim::Fixed(d)] = t.shape.dims() else {
        return Err(unsupported(call));
    };
    let bytes = count
        .at(launcher.max_rows)
        .saturating_mul(d)
        .saturating_mul(4);
    let table = launcher.shared("rope", &[positions, frequencies], bytes, |out| Table {
        positions,
        frequencies,
        out,
        count,
        half: d / 2,
    });
    let interleaved = call.bool(0)?;
    launcher.step(
        Rope {
            x,
            table,
            out,
            count,
            heads,
            d,
            interleaved,
        },
        &[x, table],
        &[out],
    );
    Ok(())
}
