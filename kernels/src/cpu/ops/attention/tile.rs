//! A tile of keys: widened once for all queries that see some of it, then scores, softmax and weighted values.

use std::ops::Range;

use super::{
    element::Element,
    product::Matrix,
    span::{Job, Room, reference},
    vector::Vector,
};
use crate::cpu::{
    lanes::{LANES, exp, max16},
    math::Real,
    plan::Run,
};

/// Keys between two looks at the running maximum.
pub(super) const TILE: usize = 64;
/// Queries that share a tile at most.
pub(super) const MAX_QUERIES: usize = 64;
/// Numbers of a head at most.
pub(super) const MAX_HEAD_DIM: usize = 512;

/// What a key outside of the tile is read from: zeros in every form.
static ZEROS: [u8; MAX_HEAD_DIM * 4] = [0; MAX_HEAD_DIM * 4];

/// A cache as bytes.
#[derive(Clone, Copy)]
pub(super) struct Cache<'a> {
    pub keys: &'a [u8],
    pub values: &'a [u8],
    /// Physical block of each logical block of the sequence, as the caller gave it.
    pub table: &'a [i32],
    pub blocks: usize,
    pub block_len: usize,
    pub kv_heads: usize,
    pub kv_head: usize,
    /// Numbers of a head.
    pub d: usize,
}

/// Whether a row sees keys of `keys`, and which.
#[inline(always)]
pub(super) fn seen((first, last): (usize, usize), keys: &Range<usize>) -> Range<usize> {
    first.max(keys.start)..(last + 1).min(keys.end)
}

/// Where the keys of a tile lie, from the start of the keys and of the values.
#[derive(Clone, Copy)]
pub(super) struct Places([Option<usize>; TILE]);

impl Cache<'_> {
    /// Places of the keys `keys`, which are in the tile that starts at `start`; none for the others. A block that the
    /// cache does not have is reported, and read as zeros.
    #[inline(always)]
    pub fn places<E: Element>(&self, run: &Run<'_>, start: usize, keys: Range<usize>) -> Places {
        let mut places = Places([None; TILE]);
        let bytes = E::bytes(self.d);
        let mut key = keys.start;
        while key < keys.end {
            let (logical, place) = (key / self.block_len, key % self.block_len);
            let until = keys.end.min(key + self.block_len - place);
            let block = self.table.get(logical).map_or(-1, super::once);
            let physical = usize::try_from(block).ok().filter(|b| *b < self.blocks);
            if physical.is_none() {
                run.index_out_of_range("paged_attention", block.into(), self.blocks);
            }
            let first = physical.map(|b| (b * self.kv_heads + self.kv_head) * self.block_len);
            for (i, to) in places.0[key - start..until - start].iter_mut().enumerate() {
                *to = first.map(|first| (first + place + i) * bytes);
            }
            key = until;
        }
        places
    }
}

/// One head of a half of the cache, or zeros.
#[inline(always)]
fn head_at<E: Element>(half: &[u8], place: Option<usize>, d: usize) -> *const u8 {
    let head = place.and_then(|at| half.get(at..at + E::bytes(d)));
    head.unwrap_or(&ZEROS).as_ptr()
}

/// Sixteen numbers, or as many as the head has, and zeros.
///
/// # Safety
///
/// As for [`Element::load`].
#[inline(always)]
unsafe fn load<V: Vector, E: Element>(head: *const u8, first: usize, d: usize) -> V::F {
    // SAFETY: the caller's promise. Forms of several numbers have them by sixteens.
    unsafe {
        if first + LANES <= d {
            E::load::<V>(head, first)
        } else {
            E::load_some::<V>(head, first, d - first)
        }
    }
}

/// Widens the keys and values of a tile, the keys so that a lane is a key.
///
/// # Safety
///
/// As for [`attend`](super::span::attend), and the processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn widen<V: Vector, E: Element>(
    cache: &Cache<'_>,
    keys: Range<usize>,
    places: &Places,
    next: &Places,
    room: &mut Room<'_>,
) {
    let d = cache.d;
    let wide = d.next_multiple_of(LANES);
    assert!(room.keys.len() >= wide * TILE && room.values.len() >= wide * TILE && keys.end <= TILE);
    let (to_keys, to_values) = (room.keys.as_mut_ptr(), room.values.as_mut_ptr());
    for group in keys.start / LANES..keys.end.div_ceil(LANES) {
        let mut heads = [ZEROS.as_ptr(); LANES];
        for (i, head) in heads.iter_mut().enumerate() {
            let key = group * LANES + i;
            *head = head_at::<E>(cache.keys, places.0[key], d);
            if let Some(at) = next.0[key] {
                for line in (0..E::bytes(d)).step_by(64) {
                    // SAFETY: prefetches touch nothing.
                    unsafe {
                        V::prefetch(cache.keys.as_ptr().wrapping_add(at + line));
                        V::prefetch(cache.values.as_ptr().wrapping_add(at + line));
                    }
                }
            }
        }
        for first in (0..d).step_by(LANES) {
            // SAFETY: each head has `d` numbers; `to_keys` has room for `wide` rows of a tile.
            unsafe {
                let mut square = [V::splat(0.0); LANES];
                for (row, head) in square.iter_mut().zip(&heads) {
                    *row = load::<V, E>(*head, first, d);
                }
                V::transpose(&mut square);
                for (i, row) in square.iter().enumerate() {
                    V::store(to_keys.add((first + i) * TILE + group * LANES), *row);
                }
            }
        }
    }
    for key in keys {
        let head = head_at::<E>(cache.values, places.0[key], d);
        for first in (0..d).step_by(LANES) {
            // SAFETY: the head has `d` numbers; `to_values` has room for a tile of `wide` numbers.
            unsafe {
                V::store(
                    to_values.add(key * wide + first),
                    load::<V, E>(head, first, d),
                )
            };
        }
    }
}

/// One tile for all queries that see some of it.
///
/// # Safety
///
/// As for [`attend`](super::span::attend), and the processor has the instructions of `V`; the tile was widened.
#[inline(always)]
pub(super) unsafe fn one_tile<V: Vector>(job: &Job<'_>, start: usize, room: &mut Room<'_>) {
    let count = job.count().min(MAX_QUERIES);
    let tile = start..start + TILE;
    let mut q = 0;
    while q < count {
        // As many queries of rows that see some of it as registers hold.
        let mut keys: [Range<usize>; 4] = [0..0, 0..0, 0..0, 0..0];
        let mut n = 0;
        while n < 4 && q + n < count {
            let keys_of = seen(job.rows[(q + n) / job.heads], &tile);
            if keys_of.is_empty() {
                break;
            }
            keys[n] = keys_of.start - start..keys_of.end - start;
            n += 1;
        }
        // SAFETY: the caller's promise.
        unsafe {
            match n {
                0 => {}
                1 => some_queries::<V, 1>(job, q, [keys[0].clone()], room),
                2 | 3 => {
                    n = 2;
                    some_queries::<V, 2>(job, q, [keys[0].clone(), keys[1].clone()], room);
                }
                _ => some_queries::<V, 4>(job, q, keys, room),
            }
        }
        q += n.max(1);
    }
}

/// Scores, softmax and weighted values of `M` queries from `first` on, which see these keys of the tile.
///
/// # Safety
///
/// As for [`one_tile`]; every query sees a key.
#[inline(always)]
unsafe fn some_queries<V: Vector, const M: usize>(
    job: &Job<'_>,
    first: usize,
    keys: [Range<usize>; M],
    room: &mut Room<'_>,
) {
    let d = job.cache.d;
    let wide = d.next_multiple_of(LANES);
    let mut all = keys[0].clone();
    let mut common = keys[0].clone();
    for keys in &keys {
        all = all.start.min(keys.start)..all.end.max(keys.end);
        common = common.start.max(keys.start)..common.end.min(keys.end);
    }
    assert!(first + M <= MAX_QUERIES && all.end <= TILE);
    assert!(room.queries.len() >= MAX_QUERIES * wide && room.sums.len() >= MAX_QUERIES * wide);
    assert!(room.keys.len() >= wide * TILE && room.values.len() >= wide * TILE);
    assert!(room.scores.len() >= MAX_QUERIES * TILE);
    let scores = Matrix {
        a: room.queries[first * wide..].as_ptr(),
        a_stride: wide,
        b: room.keys.as_ptr(),
        b_stride: TILE,
        c: room.scores[first * TILE..].as_mut_ptr(),
        c_stride: TILE,
    };
    let lanes = all.start / LANES..all.end.div_ceil(LANES);
    // SAFETY: the sizes were just asserted; the keys of these lanes were widened.
    unsafe { scores.product::<V, M, true>(0..d, lanes) };
    for (i, keys) in keys.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { soften::<V>(job, first + i, keys, room) };
    }
    let values = Matrix {
        a: room.scores[first * TILE..].as_ptr(),
        a_stride: TILE,
        b: room.values.as_ptr(),
        b_stride: wide,
        c: room.sums[first * wide..].as_mut_ptr(),
        c_stride: wide,
    };
    let vectors = 0..wide / LANES;
    // Keys in ascending order for each query, together where all see them.
    // SAFETY: the sizes were asserted; the values of these keys were widened.
    unsafe {
        if common.is_empty() {
            for (i, keys) in keys.into_iter().enumerate() {
                values.row(i).product::<V, 1, false>(keys, vectors.clone());
            }
            return;
        }
        for (i, keys) in keys.iter().enumerate() {
            let before = keys.start..common.start;
            values
                .row(i)
                .product::<V, 1, false>(before, vectors.clone());
        }
        values.product::<V, M, false>(common.clone(), vectors.clone());
        for (i, keys) in keys.iter().enumerate() {
            let after = common.end..keys.end;
            values.row(i).product::<V, 1, false>(after, vectors.clone());
        }
    }
}

/// Makes weights of the scores of a query, and takes its sums along to the new maximum.
///
/// # Safety
///
/// As for [`one_tile`].
#[inline(always)]
unsafe fn soften<V: Vector>(job: &Job<'_>, q: usize, keys: &Range<usize>, room: &mut Room<'_>) {
    let wide = job.cache.d.next_multiple_of(LANES);
    let lanes = keys.start / LANES * LANES..keys.end.next_multiple_of(LANES);
    let row = &mut room.scores[q * TILE..][..TILE];
    let (scores, _) = row[lanes.clone()].as_chunks_mut::<LANES>();
    // SAFETY: vectors of sixteen are read and written in arrays of sixteen.
    unsafe {
        let scale = V::splat(job.scale);
        for lanes in scores.iter_mut() {
            V::store(lanes.as_mut_ptr(), V::mul(V::load(lanes.as_ptr()), scale));
        }
    }
    if job.soft_cap > 0.0 {
        for score in &mut row[lanes.clone()] {
            *score = Real::tanh(*score / job.soft_cap) * job.soft_cap;
        }
    }
    row[lanes.start..keys.start].fill(f32::NEG_INFINITY);
    row[keys.end..lanes.end].fill(f32::NEG_INFINITY);
    let (scores, _) = row[lanes].as_chunks_mut::<LANES>();
    let mut top = [0.0; LANES];
    // SAFETY: as above.
    unsafe {
        let mut high = V::splat(f32::NEG_INFINITY);
        for lanes in scores.iter() {
            high = V::max(V::load(lanes.as_ptr()), high);
        }
        V::store(top.as_mut_ptr(), high);
    }
    let (before, tile) = (room.highest[q], max16(top));
    let highest = if tile > before { tile } else { before };
    let against = reference(highest);
    let shrink = exp(before - against);
    room.highest[q] = highest;
    let (totals, _) = room.totals[q * LANES..].as_chunks_mut::<LANES>();
    // SAFETY: as above.
    unsafe {
        let (against, shrink_all) = (V::splat(against), V::splat(shrink));
        let mut total = V::mul(V::load(totals[0].as_ptr()), shrink_all);
        for lanes in scores {
            // A NaN score stays NaN in its weight, so that the row is NaN, not plausible.
            let weight = V::exp(V::sub(V::load(lanes.as_ptr()), against));
            total = V::add(total, weight);
            V::store(lanes.as_mut_ptr(), weight);
        }
        V::store(totals[0].as_mut_ptr(), total);
        if shrink != 1.0 {
            let (sums, _) = room.sums[q * wide..][..wide].as_chunks_mut::<LANES>();
            for lanes in sums {
                V::store(
                    lanes.as_mut_ptr(),
                    V::mul(V::load(lanes.as_ptr()), shrink_all),
                );
            }
        }
    }
}
