//! Elementary functions of f32: no branches, only `mul_add` where a fused operation is wanted, hence vectorisable with
//! equal bits on every instruction path. Polynomials without another source are N. Juffa's.

use std::f32::consts::{LN_2, LOG2_E, PI};

pub(super) use super::power::power as pow;

/// 1.5 · 2^23: adding it rounds to an integer and leaves that in the low bits.
const MAGIC: f32 = 12_582_912.0;

/// ln 2 in two parts; a product of the first and a small integer is exact inside the `mul_add`.
const LN2_PARTS: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];

/// Minimax for `(e^r − 1 − r) / r²`, highest power first (Cephes' `expf`).
const EXP_TERMS: [f32; 6] = [
    1.987_569_1e-4,
    1.398_2e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_5e-1,
    5.0e-1,
];

/// `e^x − 1 = q` after taking `n ln 2` off `x`; `|x|` up to about 120. Beside it a word that ends, below 22 bits of [`MAGIC`]'s, in
/// `n + MORE`: as much as what is made of it wants.
#[inline(always)]
fn exp_parts<const MORE: i32>(x: f32) -> (f32, u32) {
    // No product lies half way between two integers, so that an odd number rounds as an even one does.
    let magic = MAGIC + MORE as f32;
    let shifted = x.mul_add(LOG2_E, magic);
    let nf = shifted - magic;
    let r = (-nf).mul_add(LN2_PARTS[1], (-nf).mul_add(LN2_PARTS[0], x));
    let mut p = EXP_TERMS[0];
    for term in &EXP_TERMS[1..] {
        p = p.mul_add(r, *term);
    }
    (p.mul_add(r * r, r), shifted.to_bits())
}

/// The number of which a word ends in the exponent as it is stored, which is 127 more: `2^n` of a word that ends in `n + 127`.
#[inline(always)]
fn power_of_two(word: u32) -> f32 {
    f32::from_bits(word << 23)
}

/// `p · 2^n` in two factors, by a word that ends in `n + 254`: rounded once, and finite when only `2^n` is not.
#[inline(always)]
fn scale(p: f32, word: u32) -> f32 {
    let half = word >> 1;
    p * power_of_two(half) * power_of_two(word.wrapping_sub(half))
}

/// `e^x`, 1.02 ulp, with subnormal results; else the bits of [`lanes::exp`](crate::cpu::lanes::exp).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let x = if x > MOST_EXP { MOST_EXP } else { x };
    // A NaN stays.
    let (q, word) = exp_parts::<254>(if x < LEAST_EXP { LEAST_EXP } else { x });
    scale(q + 1.0, word)
}

/// [`exp`] of sixteen, bit for bit: AVX-512 has an instruction for what takes `scale` six.
///
/// # Safety
/// The processor has AVX-512 F.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub unsafe fn exp_avx512(x: std::arch::x86_64::__m512) -> std::arch::x86_64::__m512 {
    use std::arch::x86_64::*;
    // SAFETY: the caller's promise; no memory is touched.
    unsafe {
        let all = |v| _mm512_set1_ps(v);
        // Where one is NaN, these give the second.
        let x = _mm512_max_ps(all(LEAST_EXP), _mm512_min_ps(all(MOST_EXP), x));
        let nf = _mm512_fmadd_ps(x, all(LOG2_E), all(MAGIC));
        let nf = _mm512_sub_ps(nf, all(MAGIC));
        let r = _mm512_fnmadd_ps(nf, all(LN2_PARTS[0]), x);
        let r = _mm512_fnmadd_ps(nf, all(LN2_PARTS[1]), r);
        let mut p = all(EXP_TERMS[0]);
        for term in &EXP_TERMS[1..] {
            p = _mm512_fmadd_ps(p, r, all(*term));
        }
        let q = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r);
        _mm512_scalef_ps(_mm512_add_ps(q, all(1.0)), nf)
    }
}

/// Of what lies beyond, `e^x` is infinite, and so it is of this.
const MOST_EXP: f32 = 89.0;

/// Of what lies below, it is 0, and so it is of this.
const LEAST_EXP: f32 = -104.0;

/// [`exp`] of no positive number.
#[inline(always)]
fn exp_of_negative(x: f32) -> f32 {
    let (q, word) = exp_parts::<{ 127 + 64 }>(if x < LEAST_EXP { LEAST_EXP } else { x });
    // Rounded once, by the second factor: the first is not below the normal numbers, nor is their product.
    (q + 1.0) * power_of_two(word) * f32::from_bits((127 - 64) << 23)
}

/// [`exp`] of no positive number, at least e⁻⁸⁷: what adds up numbers around 1 needs no less.
#[inline(always)]
pub fn exp_down_to_normal(x: f32) -> f32 {
    let (q, word) = exp_parts::<127>(if x < -87.0 { -87.0 } else { x });
    (q + 1.0) * power_of_two(word)
}

/// `1 + e^x`, infinite where `e^x` is.
#[inline(always)]
fn one_and_exp(x: f32) -> f32 {
    let x = if x > MOST_EXP { MOST_EXP } else { x };
    // Below, it is 1.
    let (q, word) = exp_parts::<{ 127 - 1 }>(if x < -80.0 { -80.0 } else { x });
    // 2^n may be infinite where e^x is not.
    let half = (q + 1.0) * power_of_two(word);
    half.mul_add(2.0, 1.0)
}

/// `e^x / 2` for `x ≥ 0`, which overflows later than `e^x`.
#[inline(always)]
fn half_exp(x: f32) -> f32 {
    let (q, word) = exp_parts::<{ 127 - 2 }>(if x > 89.5 { 89.5 } else { x });
    (q + 1.0) * power_of_two(word) * 2.0
}

#[inline(always)]
pub(super) fn expm1(x: f32) -> f32 {
    let within = if x > MOST_EXP { MOST_EXP } else { x };
    // Below, it is -1, and so it is of this.
    let (q, word) = exp_parts::<{ 127 - 1 }>(if within < -30.0 { -30.0 } else { within });
    // 2^n may be infinite where the result is not.
    let half = power_of_two(word);
    // The sign is for -0.
    (half.mul_add(q, half - 0.5) * 2.0).copysign(x)
}

/// `(ln(1 + m) − m) / m²` for `m` in [−1/3, 1/3].
#[inline(always)]
fn log_tail(m: f32) -> f32 {
    let s = m * m;
    let r = -0.130_310_06_f32;
    let t = 0.140_869_14_f32;
    let r = r.mul_add(s, -0.121_483_51);
    let t = t.mul_add(s, 0.139_814_85);
    let r = r.mul_add(s, -0.166_846_13);
    let t = t.mul_add(s, 0.200_120_35);
    let r = r.mul_add(s, -0.249_996_2);
    let r = t.mul_add(m, r);
    let r = r.mul_add(m, 0.333_331_97);
    r.mul_add(m, -0.5)
}

/// `x = 2^e (1 + m)` with `m` in [−1/3, 1/3], for positive normal `x`; `e` as it is stored, 2^23 times as much.
#[inline(always)]
fn shifted_log_parts(x: f32) -> (f32, i32) {
    let bits = x.to_bits() as i32;
    let e = bits.wrapping_sub(0x3f2a_aaab) & 0xff80_0000_u32 as i32;
    let m = f32::from_bits(bits.wrapping_sub(e) as u32) - 1.0;
    (m, e)
}

/// The same with `e` as it is.
#[inline(always)]
fn normal_log_parts(x: f32) -> (f32, f32) {
    let (m, e) = shifted_log_parts(x);
    (m, (e >> 23) as f32)
}

/// [`normal_log_parts`] for positive finite `x`.
#[inline(always)]
fn log_parts(x: f32) -> (f32, f32) {
    let small = x < f32::MIN_POSITIVE;
    let (m, e) = normal_log_parts(if small { x * 8_388_608.0 } else { x });
    (m, if small { e - 23.0 } else { e })
}

/// What a logarithm of `x` is where it is not `y`.
#[inline(always)]
fn log_edges(x: f32, y: f32) -> f32 {
    let y = if x > 0.0 { y } else { f32::NAN };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if x == f32::INFINITY { x } else { y }
}

/// Natural logarithm, 0.9 ulp.
#[inline(always)]
pub fn log(x: f32) -> f32 {
    let (m, e) = log_parts(x);
    let r = log_tail(m).mul_add(m * m, m);
    log_edges(x, e.mul_add(LN_2, r))
}

/// [`log`] of normal numbers. Of others it says nothing, also not of a NaN.
#[inline(always)]
pub fn log_of_normal(x: f32) -> f32 {
    let (m, e) = shifted_log_parts(x);
    // A power of 2 costs no factor a bit.
    (e as f32).mul_add(LN_2 / 8_388_608.0, log_tail(m).mul_add(m * m, m))
}

#[inline(always)]
pub(super) fn log2(x: f32) -> f32 {
    // log2(e) in two parts, so that m · log2(e) is known beyond its rounding.
    const HI: f32 = LOG2_E;
    const LO: f32 = 1.925_963e-8;
    let (m, e) = log_parts(x);
    let high = m * HI;
    let low = m.mul_add(HI, -high) + m * LO;
    let tail = log_tail(m) * (m * m);
    let low = tail.mul_add(HI, low);
    log_edges(x, e + (high + low))
}

/// [`log1p`] of finite numbers above −1, but that it loses the sign of 0.
#[inline(always)]
fn log1p_inside(x: f32) -> f32 {
    let u = x + 1.0;
    let e = (u.to_bits() as i32).wrapping_sub(0x3f2a_aaab) & 0xff80_0000_u32 as i32;
    // 4 · 2^−e, because 2^−e may be subnormal.
    let four = f32::from_bits(0x4080_0000_i32.wrapping_sub(e) as u32);
    let m = (x * four).mul_add(0.25, four.mul_add(0.25, -1.0));
    let r = log_tail(m).mul_add(m * m, m);
    ((e >> 23) as f32).mul_add(LN_2, r)
}

/// [`log1p_inside`] of what is from 0 to 1, bit for bit.
#[inline(always)]
fn log1p_of_part(x: f32) -> f32 {
    let beyond = x + 1.0 > f32::from_bits(0x3faa_aaaa);
    let m = if beyond { x.mul_add(0.5, -0.5) } else { x };
    let r = log_tail(m).mul_add(m * m, m);
    if beyond { r + LN_2 } else { r }
}

#[inline(always)]
pub(super) fn log1p(x: f32) -> f32 {
    let y = log1p_inside(x);
    let y = if x > -1.0 { y } else { f32::NAN };
    let y = if x == -1.0 { f32::NEG_INFINITY } else { y };
    let y = if x == f32::INFINITY { x } else { y };
    if x == 0.0 { x } else { y }
}

/// `x` less the nearest multiple of π/2, and which multiple.
#[inline(always)]
fn reduce(x: f32) -> (f32, i32) {
    let j = x.mul_add(std::f32::consts::FRAC_2_PI, MAGIC);
    let quadrant = j.to_bits() as i32;
    let j = j - MAGIC;
    // π/2 in three parts, the first with zeros at its end.
    let r = j.mul_add(-f32::from_bits(0x3fc9_0fd8), x);
    let r = j.mul_add(-3.139_164_7e-7, r);
    (j.mul_add(-5.390_302_5e-15, r), quadrant)
}

#[inline(always)]
fn sin_poly(r: f32) -> f32 {
    let s = r * r;
    let p = 2.865_679_6e-6_f32;
    let p = p.mul_add(s, -1.985_599_2e-4);
    let p = p.mul_add(s, 8.333_386e-3);
    let p = p.mul_add(s, -1.666_666_7e-1);
    // Plus 0, so that −0 stays what it is.
    p.mul_add(r.mul_add(s, 0.0), r)
}

#[inline(always)]
fn cos_poly(r: f32) -> f32 {
    let s = r * r;
    let p = 2.446_770_7e-5_f32;
    let p = p.mul_add(s, -1.388_773e-3);
    let p = p.mul_add(s, 4.166_666_6e-2);
    let p = p.mul_add(s, -0.5);
    p.mul_add(s, 1.0)
}

#[inline(always)]
fn sine_of(r: f32, quadrant: i32) -> f32 {
    let y = if quadrant & 1 == 0 {
        sin_poly(r)
    } else {
        cos_poly(r)
    };
    if quadrant & 2 == 0 { y } else { -y }
}

#[inline(always)]
pub(super) fn tan(x: f32) -> f32 {
    let (r, quadrant) = reduce(x);
    let (s, c) = (sin_poly(r), cos_poly(r));
    let odd = quadrant & 1 != 0;
    let (s, c) = if odd { (-c, s) } else { (s, c) };
    s / c
}

/// `(asin(s) − s) / s` for `z = s²` up to 1/4 (Cephes asinf).
#[inline(always)]
fn asin_tail(z: f32) -> f32 {
    let p = 4.216_32e-2_f32;
    let p = p.mul_add(z, 2.418_131e-2);
    let p = p.mul_add(z, 4.547_002_6e-2);
    let p = p.mul_add(z, 7.495_3e-2);
    let p = p.mul_add(z, 1.666_675_2e-1);
    p * z
}

/// π/2 − x with π/2 known beyond its rounding.
#[inline(always)]
fn complement(x: f32) -> f32 {
    0.933_189_45_f32.mul_add(1.683_255_6, -x)
}

/// `asin` of `|x|` where that is at most 1/2, else what twice of must be taken off π/2.
#[inline(always)]
fn asin_parts(t: f32) -> (f32, bool) {
    let far = t > 0.5;
    let z = if far { t.mul_add(-0.5, 0.5) } else { t * t };
    let s = if far { z.sqrt() } else { t };
    (asin_tail(z).mul_add(s, s), far)
}

#[inline(always)]
pub(super) fn asin(x: f32) -> f32 {
    let (r, far) = asin_parts(x.abs());
    let y = if far { complement(2.0 * r) } else { r };
    y.copysign(x)
}

#[inline(always)]
pub(super) fn acos(x: f32) -> f32 {
    let (r, far) = asin_parts(x.abs());
    let near = complement(r.copysign(x));
    let far_y = if x > 0.0 {
        2.0 * r
    } else {
        2.0 * complement(r)
    };
    if far { far_y } else { near }
}

/// `atan` of `t` in [0, 1] (polynomial of SLEEF).
#[inline(always)]
fn atan_poly(t: f32) -> f32 {
    let s = t * t;
    let p = 0.002_823_639_f32;
    let p = p.mul_add(s, -0.015_956_903);
    let p = p.mul_add(s, 0.042_504_99);
    let p = p.mul_add(s, -0.074_890_09);
    let p = p.mul_add(s, 0.106_347_93);
    let p = p.mul_add(s, -0.142_027_36);
    let p = p.mul_add(s, 0.199_926_96);
    let p = p.mul_add(s, -0.333_331_02);
    p.mul_add(s * t, t)
}

#[inline(always)]
pub(super) fn atan(x: f32) -> f32 {
    let t = x.abs();
    let far = t > 1.0;
    let r = atan_poly(if far { 1.0 / t } else { t });
    (if far { complement(r) } else { r }).copysign(x)
}

#[inline(always)]
pub(super) fn atan2(y: f32, x: f32) -> f32 {
    let (a, b) = (y.abs(), x.abs());
    let steep = a > b;
    let (low, high) = if steep { (b, a) } else { (a, b) };
    let q = low / high;
    // 0/0 and ∞/∞ are no numbers, but have an angle.
    let q = if high == 0.0 { 0.0 } else { q };
    let q = if low == f32::INFINITY { 1.0 } else { q };
    let r = atan_poly(q);
    let r = if steep { complement(r) } else { r };
    // π in two parts.
    let back = (PI - r) - 8.742_278e-8;
    let r = if x.is_sign_negative() { back } else { r };
    let r = r.copysign(y);
    if x.is_nan() || y.is_nan() {
        f32::NAN
    } else {
        r
    }
}

#[inline(always)]
pub(super) fn sinh(x: f32) -> f32 {
    let t = x.abs();
    let s = t * t;
    let p = 2.505_210_8e-8_f32;
    let p = p.mul_add(s, 2.755_731_9e-6);
    let p = p.mul_add(s, 1.984_127e-4);
    let p = p.mul_add(s, 8.333_333e-3);
    let p = p.mul_add(s, 1.666_666_7e-1);
    let near = p.mul_add(s * t, t);
    let h = half_exp(t);
    let far = h - 0.25 / h;
    (if t < 1.0 { near } else { far }).copysign(x)
}

#[inline(always)]
pub(super) fn cosh(x: f32) -> f32 {
    let h = half_exp(x.abs());
    h + 0.25 / h
}

#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let t = x.abs();
    let s = t * t;
    let p = 1.573_944e-2_f32;
    let p = p.mul_add(s, -5.230_256e-2);
    let p = p.mul_add(s, 1.331_524_7e-1);
    let p = p.mul_add(s, -3.333_276_8e-1);
    let near = (p * s).mul_add(t, t);
    let far = 1.0 - 2.0 / one_and_exp(2.0 * t);
    (if t < 0.55 { near } else { far }).copysign(x)
}

#[inline(always)]
pub(super) fn asinh(x: f32) -> f32 {
    let t = x.abs();
    // Far out it is ln(2t), and 1 makes no difference to t.
    let far = t >= 1e9;
    let near = t + t * t / (1.0 + t.mul_add(t, 1.0).sqrt());
    let y = log1p(if far { t } else { near });
    (if far { y + LN_2 } else { y }).copysign(x)
}

#[inline(always)]
pub(super) fn acosh(x: f32) -> f32 {
    let s = x - 1.0;
    // As in `asinh`.
    let far = x > 1e9;
    let y = log1p(if far {
        x
    } else {
        s + s.mul_add(s, 2.0 * s).sqrt()
    });
    let y = if far { y + LN_2 } else { y };
    if x < 1.0 { f32::NAN } else { y }
}

#[inline(always)]
pub(super) fn atanh(x: f32) -> f32 {
    let t = x.abs();
    let z = (2.0 * t).mul_add(t / (1.0 - t), 2.0 * t);
    let y = if t > 1.0 { f32::NAN } else { 0.5 * log1p(z) };
    y.copysign(x)
}

#[inline(always)]
pub(super) fn erf(x: f32) -> f32 {
    let t = x.abs();
    let s = x * x;
    let r = (-1.728_534_7e-5_f32).mul_add(t, 3.831_971_3e-4);
    let u = (-3.883_964_4e-3_f32).mul_add(t, 2.425_462_2e-2);
    let r = r.mul_add(s, u);
    let r = r.mul_add(t, -1.067_778_8e-1);
    let r = r.mul_add(t, -6.348_467e-1);
    let r = r.mul_add(t, -1.287_175_1e-1);
    let far = (1.0 - exp_of_negative(r.mul_add(t, -t))).copysign(x);
    let p = -5.967_617e-4_f32;
    let p = p.mul_add(s, 4.991_194_2e-3);
    let p = p.mul_add(s, -2.676_813_5e-2);
    let p = p.mul_add(s, 1.128_199_2e-1);
    let p = p.mul_add(s, -3.761_253_4e-1);
    let p = p.mul_add(s, 1.283_791_7e-1);
    let near = p.mul_add(x, x);
    if t > 0.927_734_4 { far } else { near }
}

#[inline(always)]
pub(super) fn erfinv(x: f32) -> f32 {
    let (m, e) = normal_log_parts(x.mul_add(-x, 1.0));
    let t = e.mul_add(LN_2, log_tail(m).mul_add(m * m, m));
    let p = 3.036_975_7e-10_f32;
    let p = p.mul_add(t, 2.932_431e-8);
    let p = p.mul_add(t, 1.221_503_4e-6);
    let p = p.mul_add(t, 2.841_089_6e-5);
    let p = p.mul_add(t, 3.935_529_7e-4);
    let p = p.mul_add(t, 3.026_988e-3);
    let p = p.mul_add(t, 4.831_858e-3);
    let p = p.mul_add(t, -2.646_461_4e-1);
    let far = p.mul_add(t, 8.400_165e-1);
    let p = 5.438_778_3e-9_f32;
    let p = p.mul_add(t, 1.432_854_5e-7);
    let p = p.mul_add(t, 1.227_747_9e-6);
    let p = p.mul_add(t, 1.129_636_3e-7);
    let p = p.mul_add(t, -5.615_307_6e-5);
    let p = p.mul_add(t, -1.476_976_3e-4);
    let p = p.mul_add(t, 2.314_686_8e-3);
    let p = p.mul_add(t, 1.153_925_8e-2);
    let p = p.mul_add(t, -2.320_154_8e-1);
    let near = p.mul_add(t, 8.862_269e-1);
    let y = x * if t < -6.125 { far } else { near };
    // Beyond 1 there is none; the logarithm does not say.
    let edge = if x.abs() == 1.0 {
        f32::INFINITY.copysign(x)
    } else {
        f32::NAN
    };
    if x.abs() >= 1.0 { edge } else { y }
}

#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    let e = exp_of_negative(-x.abs());
    (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
}

#[inline(always)]
pub(super) fn logaddexp(a: f32, b: f32) -> f32 {
    let high = if a > b || a.is_nan() { a } else { b };
    let sum = high + log1p_of_part(exp_of_negative(-(a - b).abs()));
    // Equal infinities have no difference.
    if a == b { a + LN_2 } else { sum }
}

/// What [`softplus`] takes the logarithm of, less 1.
#[inline(always)]
pub fn softplus_power(x: f32) -> f32 {
    exp_of_negative(-x.abs())
}

/// [`logaddexp`] of 0, bit for bit, with the [power](softplus_power) of `x`.
#[inline(always)]
pub fn softplus(x: f32, power: f32) -> f32 {
    let high = if x <= 0.0 { 0.0 } else { x };
    high + log1p_of_part(power)
}

#[inline(always)]
pub(super) fn sin(x: f32) -> f32 {
    let (r, quadrant) = reduce(x);
    sine_of(r, quadrant)
}

#[inline(always)]
pub(super) fn cos(x: f32) -> f32 {
    let (r, quadrant) = reduce(x);
    sine_of(r, quadrant.wrapping_add(1))
}

/// With the bits that [`lanes::exp`](crate::cpu::lanes::exp) gives, which models' recorded answers have.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / one_and_exp(-x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logarithm_of_one_and_a_part_has_the_same_bits_either_way() {
        let parts = (0..=1.0_f32.to_bits()).step_by(1009).map(f32::from_bits);
        // Around where another power of 2 is nearer, and the last ones.
        let third = (1.0_f32 / 3.0).to_bits();
        let near = (third - 2000..third + 2000).map(f32::from_bits);
        let last = (0..2000).map(|i| f32::from_bits(1.0_f32.to_bits() - i));
        for x in parts.chain(near).chain(last) {
            let (way, other) = (log1p_of_part(x), log1p_inside(x));
            assert_eq!(way.to_bits(), other.to_bits(), "{x:e}: {way:e}, {other:e}");
        }
        assert!(log1p_of_part(f32::NAN).is_nan());
    }
}
