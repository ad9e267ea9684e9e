//! Powers of f32, computed in f64 as `powf` of Arm's optimized routines (Sz. Nagy): `log2` of the base by a small table and
//! a polynomial, 2 to the product by another. What these leave out of `x^y` is below 2^-31 of it, so that a result is off
//! by no more than 0.51 ulp.
//!
//! The steps are apart for those who take several elements through one after the other.

/// Bits of the least number that the table is for, 17/24. The largest is twice that.
pub const LEAST: u64 = 0x3fe6_aaaa_aaaa_aaab;

/// The table's entry is the three bits from this one on, of what lies above [`LEAST`].
pub const ENTRY: u32 = 49;

/// About the reciprocals of the middles of eight intervals: 1 where that is inside.
pub static RECIPROCALS: [f64; 8] = [
    1.352_112_676_056_338,
    1.246_753_246_753_246_7,
    1.156_626_506_024_096_3,
    1.078_651_685_393_258_4,
    1.0,
    0.905_660_377_358_490_5,
    0.813_559_322_033_898_2,
    0.738_461_538_461_538_4,
];

/// `−log2` of [`RECIPROCALS`].
pub static LOGARITHMS: [f64; 8] = [
    -0.435_215_381_216_474_1,
    -0.318_175_960_026_254_8,
    -0.209_923_069_374_231_36,
    -0.109_229_069_754_758_39,
    0.0,
    0.142_957_953_842_043_13,
    0.297_680_548_640_685_16,
    0.437_405_312_307_298_46,
];

/// `log2(1 + r) / r` for `|r|` up to 0.0567, to 2^−37: interpolated at Chebyshev's points, as is [`EXP`].
pub const LOG: [f64; 7] = [
    std::f64::consts::LOG2_E,
    -0.721_347_521_096_147_7,
    0.480_898_347_542_305_7,
    -0.360_672_133_605_830_84,
    0.288_537_562_159_488,
    -0.241_463_567_560_857_16,
    0.207_001_040_956_555_3,
];

/// 1.5 · 2^49: adding it rounds to an eighth, whose number is then in the low bits.
pub const ROUND: f64 = 844_424_930_131_968.0;

/// By how much the number of an eighth is shifted, so that eight of them count one exponent.
pub const EXPONENT: u32 = 49;

/// Bits of `2^(i/8)`, less `i` shifted by [`EXPONENT`].
pub static ROOTS: [u64; 8] = [
    0x3ff0_0000_0000_0000,
    0x3fef_72b8_3c7d_517b,
    0x3fef_06fe_0a31_b715,
    0x3fee_bfda_d536_2a27,
    0x3fee_a09e_667f_3bcd,
    0x3fee_ace5_422a_a0db,
    0x3fee_e89f_995a_d3ad,
    0x3fef_5818_dcfb_a487,
];

/// `(2^f − 1) / f` for `|f|` up to 1/16: what `2^f` is, to 2^−32.
pub const EXP: [f64; 4] = [
    0.693_147_178_016_657_3,
    0.240_226_506_665_291_83,
    0.055_509_317_289_623_04,
    0.009_618_730_825_679_362,
];

/// Beyond this exponent, results are 0 or infinite.
const MOST: f64 = 200.0;

/// `|x|`, finite and not 0, as `2^k z`: what lies above [`LEAST`], and `z`.
#[inline(always)]
fn parts(x: f32) -> (u64, f64) {
    let bits = (x.abs() as f64).to_bits();
    let from = bits.wrapping_sub(LEAST);
    let e = from & 0xfff0_0000_0000_0000;
    (from, f64::from_bits(bits.wrapping_sub(e)))
}

/// Which entry of the table is for `x`.
#[inline(always)]
pub fn entry(x: f32) -> usize {
    (parts(x).0 >> ENTRY) as usize % 8
}

/// `y · log2(|x|)`, given the entry of `x`: in the low bits of the first its number of eighths, the second what is left.
#[inline(always)]
pub fn product(x: f32, y: f32, reciprocal: f64, logarithm: f64) -> (f64, f64) {
    const WHOLE: f64 = 6_755_399_441_055_744.0;
    let (from, z) = parts(x);
    // A conversion that vectors of every processor have.
    let k = ((from as i64) >> 52).wrapping_add(WHOLE.to_bits() as i64);
    let k = f64::from_bits(k as u64) - WHOLE;
    let r = z.mul_add(reciprocal, -1.0);
    let p = LOG[6].mul_add(r, LOG[5]);
    let p = p.mul_add(r, LOG[4]);
    let p = p.mul_add(r, LOG[3]);
    let p = p.mul_add(r, LOG[2]);
    let p = p.mul_add(r, LOG[1]);
    let p = p.mul_add(r, LOG[0]);
    let log2 = p.mul_add(r, k + logarithm);
    let y = y as f64;
    let shifted = y.mul_add(log2, ROUND);
    (shifted, y.mul_add(log2, ROUND - shifted))
}

/// Which of [`ROOTS`] is for a product.
#[inline(always)]
pub fn root(shifted: f64) -> usize {
    shifted.to_bits() as usize % 8
}

/// The power, given [`product`] and the root.
#[inline(always)]
pub fn result(x: f32, y: f32, (shifted, f): (f64, f64), root: u64) -> f32 {
    let root = f64::from_bits(root.wrapping_add(shifted.to_bits() << EXPONENT));
    let p = EXP[3].mul_add(f, EXP[2]);
    let p = p.mul_add(f, EXP[1]);
    let p = p.mul_add(f, EXP[0]);
    let r = (root * f).mul_add(p, root) as f32;
    let a = x.abs();
    let far = shifted - ROUND;
    let r = if far > MOST { f32::INFINITY } else { r };
    let r = if far < -MOST { 0.0 } else { r };
    let down = y < 0.0;
    let r = if a == 0.0 {
        if down { f32::INFINITY } else { 0.0 }
    } else {
        r
    };
    let r = if a == f32::INFINITY {
        if down { 0.0 } else { f32::INFINITY }
    } else {
        r
    };
    // An infinite y times 0 is no number.
    let r = if a == 1.0 { 1.0 } else { r };
    let half = y * 0.5;
    let whole = y.trunc() == y;
    let odd = whole && half.trunc() != half;
    let r = if odd { r.copysign(x) } else { r };
    let r = if x < 0.0 && a < f32::INFINITY && a != 0.0 && !whole {
        f32::NAN
    } else {
        r
    };
    let r = if x.is_nan() || y.is_nan() {
        f32::NAN
    } else {
        r
    };
    if y == 0.0 || x == 1.0 { 1.0 } else { r }
}

/// `x` to the power `y`, as C's `pow`.
#[inline(always)]
pub fn power(x: f32, y: f32) -> f32 {
    let entry = entry(x);
    let product = product(x, y, RECIPROCALS[entry], LOGARITHMS[entry]);
    result(x, y, product, ROOTS[root(product.0)])
}
