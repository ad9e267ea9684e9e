//! The CPU backend's table: op → (supports, launch).

mod arg;
mod attention;
mod blocks;
mod close;
mod conv;
mod create;
mod elementwise;
mod experts;
mod fft;
mod gather;
mod gemm;
mod get_rows;
#[cfg(target_arch = "x86_64")]
mod groups;
mod index;
mod join;
mod keys;
mod linear;
mod matmul;
mod movement;
mod norm;
mod pool;
mod random;
mod recurrent;
mod reduce;
mod reducers;
mod reductions;
mod rope;
mod running_logs;
mod scan;
mod scanners;
mod scatter;
mod softmax;
mod softmax_columns;
mod sort;
mod statistics;
mod strided;
mod window;

use std::ops::Range;

use hotcell_graph::op::Call;

use super::plan::{Launcher, Reg};
use crate::{backend::DeviceError, cpu::NAME};

/// Adds the steps of a call to a plan.
type Launch = fn(&mut Launcher, &Call<'_>, &[Reg], &[Reg]) -> Result<(), DeviceError>;

/// One row of the table.
struct Entry {
    op: &'static str,
    supports: fn(&Call<'_>) -> bool,
    launch: Launch,
}

/// What there is a kernel for, file by file. What is not here is decomposed.
static TABLES: &[&[Entry]] = &[
    ALIASES,
    attention::ENTRIES,
    close::ENTRIES,
    conv::ENTRIES,
    blocks::ENTRIES,
    elementwise::ENTRIES,
    experts::ENTRIES,
    fft::ENTRIES,
    linear::ENTRIES,
    gemm::ENTRIES,
    matmul::ENTRIES,
    norm::ENTRIES,
    pool::ENTRIES,
    recurrent::ENTRIES,
    rope::ENTRIES,
    softmax::ENTRIES,
    softmax_columns::ENTRIES,
    get_rows::ENTRIES,
    create::ENTRIES,
    movement::ENTRIES,
    join::ENTRIES,
    gather::ENTRIES,
    reductions::ENTRIES,
    arg::ENTRIES,
    scan::ENTRIES,
    running_logs::ENTRIES,
    index::ENTRIES,
    scatter::ENTRIES,
    sort::ENTRIES,
    random::ENTRIES,
];

/// Ops that are their input's memory under another shape.
static ALIASES: &[Entry] = &[Entry {
    op: "reshape",
    supports: always,
    launch: nothing,
}];

/// Ops whose result is their input's memory under another shape.
pub(super) fn is_alias(op: &str) -> bool {
    ALIASES.iter().any(|e| e.op == op)
}

fn always(_: &Call<'_>) -> bool {
    true
}

fn nothing(_: &mut Launcher, _: &Call<'_>, _: &[Reg], _: &[Reg]) -> Result<(), DeviceError> {
    Ok(())
}

fn entries() -> impl Iterator<Item = &'static Entry> {
    TABLES.iter().copied().flatten()
}

/// The entry for a call. An op may have several, for inputs of different kinds.
fn entry(call: &Call<'_>) -> Option<&'static Entry> {
    entries().find(|e| e.op == call.op.name && (e.supports)(call))
}

/// Names of the ops in the table.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    entries().map(|e| e.op)
}

pub(super) fn supports(call: &Call<'_>) -> bool {
    entry(call).is_some()
}

pub(super) fn launch(
    launcher: &mut Launcher,
    call: &Call<'_>,
    inputs: &[Reg],
    outputs: &[Reg],
) -> Result<(), DeviceError> {
    match entry(call) {
        Some(e) => (e.launch)(launcher, call, inputs, outputs),
        None => Err(unsupported(call)),
    }
}

pub(super) fn unsupported(call: &Call<'_>) -> DeviceError {
    let why: Vec<String> = call.inputs.iter().map(ToString::to_string).collect();
    DeviceError::Unsupported {
        backend: NAME,
        op: call.op.name,
        why: why.join(", "),
    }
}

/// The `part`-th of `parts` nearly equal ranges of `0..n`, with starts at multiples of `step`.
fn split(n: usize, step: usize, part: usize, parts: usize) -> Range<usize> {
    let units = n.div_ceil(step);
    let at = |p: usize| (units * p / parts * step).min(n);
    at(part)..at(part + 1)
}

/// The same, but work of fewer than `worth` elements stays on part 0: sharing it would cost more.
pub(super) fn split_if_worth(
    n: usize,
    step: usize,
    worth: usize,
    part: usize,
    parts: usize,
) -> Range<usize> {
    match (stays(n, step, worth), part) {
        (true, 0) => 0..n,
        (true, _) => 0..0,
        (false, _) => split(n, step, part, parts),
    }
}

/// Whether [`split_if_worth`] gives all of it to part 0: also what cannot be shared out. See [`Kernel::is_alone`].
///
/// [`Kernel::is_alone`]: super::plan::Kernel::is_alone
pub(super) fn stays(n: usize, step: usize, worth: usize) -> bool {
    n < worth || n <= step
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotcell_graph::op::catalogue;

    #[test]
    fn every_row_has_an_entry_or_a_decomposition_and_no_entry_is_a_stranger() {
        for row in catalogue() {
            let has = entries().any(|e| e.op == row.name);
            assert!(has || row.decompose.is_some(), "{}", row.name);
        }
        for e in entries() {
            assert!(hotcell_graph::op::find(e.op).is_some(), "{}", e.op);
        }
    }

    #[test]
    fn parts_cover_everything_once() {
        for (n, step, parts) in [
            (0, 16, 2),
            (1, 16, 3),
            (100, 16, 3),
            (64, 16, 2),
            (17, 1, 5),
        ] {
            let mut next = 0;
            for part in 0..parts {
                let range = split(n, step, part, parts);
                assert_eq!(range.start, next);
                next = range.end;
            }
            assert_eq!(next, n);
        }
    }
}
