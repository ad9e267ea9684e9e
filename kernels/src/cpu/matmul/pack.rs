//! Packing: weights in the layout that the multiplication reads fastest. A packed matrix takes as many bytes
//! as the one in the file, and gives the very same bits; [`place`](super::place) describes it.

use hotcell_graph::DType;

use super::cut_of;
use super::format::Format;
use super::place::{Beside, packed_block};
use crate::cpu::lanes::LANES;

/// The layout's name. Whoever changes the layout, or where in a copy workers put what is packed, changes the name.
pub const LAYOUT: &str = "panel16-3";

/// Rows that are packed together, where they are in the file.
pub const PANEL: usize = LANES;

/// How a dtype's rows are cut.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    /// Elements and bytes of a block.
    len: usize,
    bytes: usize,
    beside: Beside,
    /// Where a word goes, by its place in the block.
    order: fn(usize) -> usize,
    /// See [`Format::APART`].
    apart: bool,
}

impl Cut {
    pub(super) const fn of<F: Format>() -> Cut {
        Cut {
            len: F::LEN,
            bytes: F::BYTES,
            beside: F::BESIDE,
            order: F::packed,
            apart: F::APART,
        }
    }
}

/// Whether a weight matrix `[n, k]` has a packed form: a weight dtype, sixteen rows at least, and whole blocks.
pub fn packs(dtype: DType, n: usize, k: usize) -> bool {
    n >= LANES && k > 0 && cut_of(dtype).is_some_and(|cut| k.is_multiple_of(cut.len))
}

/// Packs rows of `k` weights, as a file has them in `stored`, into `packed`, which is as long. Rows from a multiple of
/// sixteen on may be packed by themselves. What is left of sixteen at the end is copied.
///
/// # Panics
///
/// When [`packs`] says no for `k`, or the lengths differ or are no whole rows.
pub fn pack(dtype: DType, k: usize, stored: &[u8], packed: &mut [u8]) {
    let cut = cut_of(dtype).filter(|cut| k > 0 && k.is_multiple_of(cut.len));
    let (Some(cut), Some(stride)) = (cut, dtype.row_bytes(k)) else {
        panic!("{dtype} rows of {k} have no packed form");
    };
    assert_eq!(stored.len(), packed.len(), "packed {dtype} rows");
    assert!(stored.len().is_multiple_of(stride), "{dtype} rows of {k}");
    let mut from = stored.chunks_exact(LANES * stride);
    let mut to = packed.chunks_exact_mut(LANES * stride);
    for (from, to) in (&mut from).zip(&mut to) {
        pack_panel(cut, stride, from, to);
    }
    to.into_remainder().copy_from_slice(from.remainder());
}

fn pack_panel(cut: Cut, stride: usize, from: &[u8], to: &mut [u8]) {
    let Cut {
        bytes,
        beside,
        order,
        apart,
        ..
    } = cut;
    let (lead, size) = (beside.lead(), bytes - beside.bytes());
    // Where in the packed block the words go, in the order of the stored one; 256 weights of 32 bits at most.
    let mut places = [0; 256];
    let places = &mut places[..size / 4];
    for (i, place) in places.iter_mut().enumerate() {
        *place = (order(lead + 4 * i) - lead) / 4;
    }
    for b in 0..stride / bytes {
        let (words, numbers) = packed_block(beside, bytes, stride, b);
        for (r, row) in from.chunks_exact(stride).enumerate() {
            let block = &row[b * bytes..][..bytes];
            let lines = to[words..][..LANES * size]
                .as_chunks_mut::<{ 4 * LANES }>()
                .0;
            for (word, &place) in block[lead..].as_chunks::<4>().0.iter().zip(&*places) {
                let line = &mut lines[place];
                match apart {
                    false => line[4 * r..][..4].copy_from_slice(word),
                    true => {
                        let (low, high) = word.split_at(2);
                        line[2 * r..][..2].copy_from_slice(low);
                        line[2 * LANES + 2 * r..][..2].copy_from_slice(high);
                    }
                }
            }
            let number = match beside {
                Beside::None => continue,
                Beside::First | Beside::FirstByte => &block[..lead],
                Beside::Last => &block[size..],
            };
            to[numbers + number.len() * r..][..number.len()].copy_from_slice(number);
        }
    }
}
