//! The same records with AVX-512, a register for sixteen numbers: of the loops over arrays compilers make gathers.

use std::arch::x86_64::*;

use super::{Q8_RECORD, Q8K_RECORD};
use crate::cpu::lanes::LANES;

/// Blocks of [`q8`] whose scales and sums are computed side by side.
const SIDE: usize = 4;

/// As `q8_body`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn q8(x: &[f32], scratch: &mut [u8]) {
    let (blocks, _) = x.as_chunks::<32>();
    let (records, _) = scratch.as_chunks_mut::<Q8_RECORD>();
    let (some, few) = blocks.as_chunks::<SIDE>();
    let (some_records, few_records) = records.as_chunks_mut::<SIDE>();
    for (blocks, records) in some.iter().zip(some_records) {
        side_by_side(blocks, records);
    }
    if !few.is_empty() {
        // Beside blocks of zeros.
        let mut blocks = [[0.0; 32]; SIDE];
        let mut records = [[0; Q8_RECORD]; SIDE];
        for (block, there) in blocks.iter_mut().zip(few) {
            *block = *there;
        }
        side_by_side(&blocks, &mut records);
        for (there, record) in few_records.iter_mut().zip(records) {
            *there = record;
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn side_by_side(blocks: &[[f32; 32]; SIDE], records: &mut [[u8; Q8_RECORD]; SIDE]) {
    let mut x = blocks.map(|block| {
        let (runs, _) = block.as_chunks::<LANES>();
        [load(&runs[0]), load(&runs[1])]
    });
    let tops = x.map(|[low, high]| _mm512_max_epu32(magnitude(low), magnitude(high)));
    let [a, b, c, d] = tops;
    let tops = four(a, b, c, d, |a, b| _mm512_max_epu32(a, b));
    let tops = across(tops, |a, b| _mm_max_epu32(a, b));
    let amax = _mm_castsi128_ps(tops);
    let inverse = _mm_div_ps(_mm_set1_ps(127.0), amax);
    let mut inverses = floats(inverse);
    let mut da = _mm_div_ps(amax, _mm_set1_ps(127.0));
    let finite = |v| _mm_cmp_ps_mask::<_CMP_LT_OQ>(v, _mm_set1_ps(f32::INFINITY));
    if finite(amax) & finite(inverse) != 0xf {
        // Blocks that become zeros are as good as zeros from here on.
        let mut scales = [0.0; SIDE];
        for (i, top) in words(tops).into_iter().enumerate() {
            let scale = super::scale(top as u32);
            scales[i] = scale.da;
            inverses[i] = scale.inverse.unwrap_or_else(|| {
                x[i] = [_mm512_setzero_ps(); 2];
                1.0
            });
        }
        let [a, b, c, d] = scales;
        da = _mm_setr_ps(a, b, c, d);
    }
    let da = _mm_cvtph_ps(_mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(da));
    let mut codes = [[_mm512_setzero_si512(); 2]; SIDE];
    for (i, codes) in codes.iter_mut().enumerate() {
        *codes = x[i].map(|x| code(x, inverses[i]));
    }
    let [a, b, c, d] = codes.map(|[low, high]| _mm512_packs_epi32(low, high));
    for (i, two) in [(a, b), (c, d)].into_iter().enumerate() {
        // In each lane of 128 bits four of each half of both.
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        let q = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(two.0, two.1));
        store32(&mut records[2 * i], _mm512_castsi512_si256(q));
        store32(&mut records[2 * i + 1], _mm512_extracti64x4_epi64::<1>(q));
    }
    let sums = codes.map(|[low, high]| _mm512_add_epi32(low, high));
    let [a, b, c, d] = sums;
    let sums = four(a, b, c, d, |a, b| _mm512_add_epi32(a, b));
    let sums = across(sums, |a, b| _mm_add_epi32(a, b));
    for ((record, da), sum) in records.iter_mut().zip(floats(da)).zip(words(sums)) {
        super::close_q8(record, da, sum);
    }
}

/// As `q8k_body`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn q8k(x: &[f32], scratch: &mut [u8]) {
    let (blocks, _) = x.as_chunks::<256>();
    let (records, _) = scratch.as_chunks_mut::<Q8K_RECORD>();
    for (x, record) in blocks.iter().zip(records) {
        let (x, _) = x.as_chunks::<LANES>();
        let mut top = _mm512_setzero_si512();
        for run in x {
            top = _mm512_max_epu32(top, magnitude(load(run)));
        }
        let scale = super::scale(_mm512_reduce_max_epu32(top));
        // A block that becomes zeros is as good as zeros from here on.
        let (inverse, there) = match scale.inverse {
            Some(inverse) => (inverse, !0),
            None => (1.0, 0),
        };
        let (q, rest) = record.split_at_mut(256);
        let (q, _) = q.as_chunks_mut::<LANES>();
        // Word `w` of register `i` is the sum of word `16 i + w` of the codes.
        let mut sums = [_mm512_setzero_si512(); 4];
        for (i, (x, q)) in x.chunks(4).zip(q.chunks_mut(4)).enumerate() {
            let mut codes = [_mm_setzero_si128(); 4];
            for (run, codes) in x.iter().zip(&mut codes) {
                let run = _mm512_maskz_mov_ps(there, load(run));
                *codes = _mm512_cvtepi32_epi8(code(run, inverse));
            }
            for (codes, q) in codes.iter().zip(q) {
                store(q, *codes);
            }
            let [a, b, c, d] = codes;
            let codes = _mm512_inserti64x4::<1>(
                _mm512_castsi256_si512(_mm256_set_m128i(b, a)),
                _mm256_set_m128i(d, c),
            );
            sums[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), codes);
        }
        // Those of sixteen codes: of run `4 i + lane` in word `i` of the lane.
        let [a, b, c, d] = sums;
        let sums = four(a, b, c, d, |a, b| _mm512_add_epi32(a, b));
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        let sums = _mm512_permutexvar_epi32(order, sums);
        let negative = _mm512_sub_epi32(_mm512_setzero_si512(), sums);
        // The two in the middle of four change places.
        let halves = _mm512_cvtepi32_epi16(_mm512_shuffle_epi32::<0b11_01_10_00>(negative));
        let pairs = _mm512_add_epi32(sums, _mm512_shuffle_epi32::<0b10_11_00_01>(sums));
        let order = _mm512_setr_epi32(0, 4, 2, 6, 8, 12, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
        let pairs = _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(order, pairs));
        let (da, rest) = rest.split_at_mut(4);
        da.copy_from_slice(&scale.da.to_le_bytes());
        let (lines, _) = rest.as_chunks_mut::<16>();
        store(&mut lines[0], _mm256_castsi256_si128(pairs));
        let times = _mm512_slli_epi32::<5>(negative);
        store(&mut lines[1], _mm512_extracti32x4_epi32::<0>(times));
        store(&mut lines[2], _mm512_extracti32x4_epi32::<1>(times));
        store(&mut lines[3], _mm512_extracti32x4_epi32::<2>(times));
        store(&mut lines[4], _mm512_extracti32x4_epi32::<3>(times));
        store(&mut lines[5], _mm256_castsi256_si128(halves));
        store(&mut lines[6], _mm256_extracti128_si256::<1>(halves));
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(run: &[f32; LANES]) -> __m512 {
    // SAFETY: sixteen numbers are there.
    unsafe { _mm512_loadu_ps(run.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(to: &mut [u8; 16], bytes: __m128i) {
    // SAFETY: sixteen bytes are there.
    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), bytes) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store32(to: &mut [u8; Q8_RECORD], bytes: __m256i) {
    const { assert!(Q8_RECORD >= 32) };
    // SAFETY: thirty-two bytes are there.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), bytes) }
}

/// The words of a register.
#[inline]
#[target_feature(enable = "avx512f")]
fn words(of: __m128i) -> [i32; 4] {
    let mut words = [0; 4];
    // SAFETY: sixteen bytes are there.
    unsafe { _mm_storeu_si128(words.as_mut_ptr().cast(), of) };
    words
}

/// The same of floats.
#[inline]
#[target_feature(enable = "avx512f")]
fn floats(of: __m128) -> [f32; 4] {
    words(_mm_castps_si128(of)).map(|bits| f32::from_bits(bits as u32))
}

/// The bits of absolute values order like integers.
#[inline]
#[target_feature(enable = "avx512f")]
fn magnitude(x: __m512) -> __m512i {
    _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fff_ffff))
}

/// The codes of sixteen numbers of a block with this `127 / amax`.
#[inline]
#[target_feature(enable = "avx512f")]
fn code(x: __m512, inverse: f32) -> __m512i {
    let product = _mm512_mul_ps(x, _mm512_set1_ps(inverse));
    let shifted = _mm512_castps_si512(_mm512_add_ps(product, _mm512_set1_ps(super::SHIFT)));
    let code = _mm512_sub_epi32(shifted, _mm512_set1_epi32(super::SHIFT.to_bits() as i32));
    _mm512_min_epi32(
        _mm512_max_epi32(code, _mm512_set1_epi32(-127)),
        _mm512_set1_epi32(127),
    )
}

/// In each lane of 128 bits `join` of the four words of `a`, of `b`, of `c`, of `d`.
#[inline]
#[target_feature(enable = "avx512f")]
fn four(
    a: __m512i,
    b: __m512i,
    c: __m512i,
    d: __m512i,
    join: impl Fn(__m512i, __m512i) -> __m512i,
) -> __m512i {
    let ab = join(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let cd = join(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    join(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
}

/// `join` of the four lanes of 128 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn across(lanes: __m512i, join: impl Fn(__m128i, __m128i) -> __m128i) -> __m128i {
    join(
        join(
            _mm512_castsi512_si128(lanes),
            _mm512_extracti32x4_epi32::<1>(lanes),
        ),
        join(
            _mm512_extracti32x4_epi32::<2>(lanes),
            _mm512_extracti32x4_epi32::<3>(lanes),
        ),
    )
}
