// Elementary functions of f32 as kernels/src/cpu/math/single.rs and power.rs compute them, bit by bit; what is said there is not said again here.
#pragma once
#include "common.cuh"

namespace math {

constexpr float MAGIC = 12582912.0f, LN_2 = 0.693147182f, MOST_EXP = 89.0f, LEAST_NORMAL = 1.17549435e-38f;

DEVICE float power_of_two(unsigned n) { return __uint_as_float((n + 127u) << 23); }
DEVICE unsigned halved(unsigned n) { return n >> 1 | (n & 0x80000000u); }

DEVICE float exp(float x) {
  x = x > MOST_EXP ? MOST_EXP : x;
  unsigned n;
  float q = exp_parts(x < -104.0f ? -104.0f : x, n);
  unsigned half = halved(n);
  return (q + 1.0f) * power_of_two(half) * power_of_two(n - half);
}

DEVICE float exp_of_negative(float x) {
  unsigned n;
  float q = exp_parts(x < -104.0f ? -104.0f : x, n);
  return (q + 1.0f) * power_of_two(n + 64u) * __uint_as_float((127u - 64u) << 23);
}

DEVICE float one_and_exp(float x) {
  x = x > MOST_EXP ? MOST_EXP : x;
  unsigned n;
  float q = exp_parts(x < -80.0f ? -80.0f : x, n);
  return fmaf((q + 1.0f) * power_of_two(n - 1u), 2.0f, 1.0f);
}

DEVICE float half_exp(float x) {
  unsigned n;
  float q = exp_parts(x > 89.5f ? 89.5f : x, n);
  return (q + 1.0f) * power_of_two(n - 2u) * 2.0f;
}

DEVICE float expm1(float x) {
  float within = x > MOST_EXP ? MOST_EXP : x;
  unsigned n;
  float q = exp_parts(within < -30.0f ? -30.0f : within, n);
  float half = power_of_two(n - 1u);
  return copysignf(fmaf(half, q, half - 0.5f) * 2.0f, x);
}

DEVICE float log_tail(float m) {
  float s = m * m, r = -0.13031006f, t = 0.14086914f;
  r = fmaf(r, s, -0.12148351f);
  t = fmaf(t, s, 0.13981485f);
  r = fmaf(r, s, -0.16684613f);
  t = fmaf(t, s, 0.20012035f);
  r = fmaf(r, s, -0.2499962f);
  r = fmaf(t, m, r);
  r = fmaf(r, m, 0.33333197f);
  return fmaf(r, m, -0.5f);
}

DEVICE float normal_log_parts(float x, float& e) {
  unsigned bits = __float_as_uint(x), of = (bits - 0x3f2aaaabu) & 0xff800000u;
  e = float(int(of) >> 23);
  return __uint_as_float(bits - of) - 1.0f;
}

DEVICE float log_parts(float x, float& e) {
  bool small = x < LEAST_NORMAL;
  float m = normal_log_parts(small ? x * 8388608.0f : x, e);
  e = small ? e - 23.0f : e;
  return m;
}

DEVICE float log_edges(float x, float y) {
  y = x > 0.0f ? y : quiet_nan();
  y = x == 0.0f ? -INFINITY_F : y;
  return x == INFINITY_F ? x : y;
}

DEVICE float log(float x) {
  float e, m = log_parts(x, e);
  return log_edges(x, fmaf(e, LN_2, fmaf(log_tail(m), m * m, m)));
}

DEVICE float log2(float x) {
  const float hi = 1.44269504f, lo = 1.925963e-8f;
  float e, m = log_parts(x, e);
  float high = m * hi, low = fmaf(m, hi, -high) + m * lo;
  low = fmaf(log_tail(m) * (m * m), hi, low);
  return log_edges(x, e + (high + low));
}

DEVICE float log1p_inside(float x) {
  unsigned e = (__float_as_uint(x + 1.0f) - 0x3f2aaaabu) & 0xff800000u;
  float four = __uint_as_float(0x40800000u - e);
  float m = fmaf(x * four, 0.25f, fmaf(four, 0.25f, -1.0f));
  return fmaf(float(int(e) >> 23), LN_2, fmaf(log_tail(m), m * m, m));
}

DEVICE float log1p(float x) {
  float y = log1p_inside(x);
  y = x > -1.0f ? y : quiet_nan();
  y = x == -1.0f ? -INFINITY_F : y;
  y = x == INFINITY_F ? x : y;
  return x == 0.0f ? x : y;
}

DEVICE float reduce(float x, unsigned& quadrant) {
  float j = fmaf(x, 0.636619747f, MAGIC);
  quadrant = __float_as_uint(j);
  j -= MAGIC;
  float r = fmaf(j, -__uint_as_float(0x3fc90fd8u), x);
  r = fmaf(j, -3.1391647e-7f, r);
  return fmaf(j, -5.3903025e-15f, r);
}

DEVICE float sin_poly(float r) {
  float s = r * r, p = 2.8656796e-6f;
  p = fmaf(p, s, -1.9855992e-4f);
  p = fmaf(p, s, 8.333386e-3f);
  p = fmaf(p, s, -1.6666667e-1f);
  return fmaf(p, fmaf(r, s, 0.0f), r);
}

DEVICE float cos_poly(float r) {
  float s = r * r, p = 2.4467707e-5f;
  p = fmaf(p, s, -1.388773e-3f);
  p = fmaf(p, s, 4.1666666e-2f);
  p = fmaf(p, s, -0.5f);
  return fmaf(p, s, 1.0f);
}

DEVICE float sine_of(float r, unsigned quadrant) {
  float y = (quadrant & 1u) == 0 ? sin_poly(r) : cos_poly(r);
  return (quadrant & 2u) == 0 ? y : -y;
}

/// Beyond this, an f32 angle is reduced in f64, by the library's functions: two libraries differ in the rare case of a result on the edge between two f32.
constexpr float LARGEST_ANGLE = 100000.0f;

DEVICE float sin(float x) {
  if (fabsf(x) > LARGEST_ANGLE) return float(::sin(double(x)));
  unsigned quadrant;
  float r = reduce(x, quadrant);
  return sine_of(r, quadrant);
}

DEVICE float cos(float x) {
  if (fabsf(x) > LARGEST_ANGLE) return float(::cos(double(x)));
  unsigned quadrant;
  float r = reduce(x, quadrant);
  return sine_of(r, quadrant + 1u);
}

DEVICE float tan(float x) {
  if (fabsf(x) > LARGEST_ANGLE) return float(::tan(double(x)));
  unsigned quadrant;
  float r = reduce(x, quadrant), s = sin_poly(r), c = cos_poly(r);
  return quadrant & 1u ? -c / s : s / c;
}

DEVICE float asin_tail(float z) {
  float p = 4.21632e-2f;
  p = fmaf(p, z, 2.418131e-2f);
  p = fmaf(p, z, 4.5470026e-2f);
  p = fmaf(p, z, 7.4953e-2f);
  p = fmaf(p, z, 1.6666752e-1f);
  return p * z;
}

/// π/2 − x.
DEVICE float complement(float x) { return fmaf(0.93318945f, 1.6832556f, -x); }

DEVICE float asin_parts(float t, bool& far) {
  far = t > 0.5f;
  float z = far ? fmaf(t, -0.5f, 0.5f) : t * t, s = far ? sqrtf(z) : t;
  return fmaf(asin_tail(z), s, s);
}

DEVICE float asin(float x) {
  bool far;
  float r = asin_parts(fabsf(x), far);
  return copysignf(far ? complement(2.0f * r) : r, x);
}

DEVICE float acos(float x) {
  bool far;
  float r = asin_parts(fabsf(x), far);
  float near = complement(copysignf(r, x)), far_y = x > 0.0f ? 2.0f * r : 2.0f * complement(r);
  return far ? far_y : near;
}

DEVICE float atan_poly(float t) {
  float s = t * t, p = 0.002823639f;
  p = fmaf(p, s, -0.015956903f);
  p = fmaf(p, s, 0.04250499f);
  p = fmaf(p, s, -0.07489009f);
  p = fmaf(p, s, 0.10634793f);
  p = fmaf(p, s, -0.14202736f);
  p = fmaf(p, s, 0.19992696f);
  p = fmaf(p, s, -0.33333102f);
  return fmaf(p, s * t, t);
}

DEVICE float atan(float x) {
  float t = fabsf(x);
  bool far = t > 1.0f;
  float r = atan_poly(far ? 1.0f / t : t);
  return copysignf(far ? complement(r) : r, x);
}

DEVICE float atan2(float y, float x) {
  float a = fabsf(y), b = fabsf(x);
  bool steep = a > b;
  float low = steep ? b : a, high = steep ? a : b;
  float q = high == 0.0f ? 0.0f : low / high;
  q = low == INFINITY_F ? 1.0f : q;
  float r = atan_poly(q);
  r = steep ? complement(r) : r;
  float back = (3.14159274f - r) - 8.742278e-8f;
  r = copysignf(__float_as_uint(x) >> 31 ? back : r, y);
  return is_nan(x) || is_nan(y) ? quiet_nan() : r;
}

DEVICE float sinh(float x) {
  float t = fabsf(x), s = t * t, p = 2.5052108e-8f;
  p = fmaf(p, s, 2.7557319e-6f);
  p = fmaf(p, s, 1.984127e-4f);
  p = fmaf(p, s, 8.333333e-3f);
  p = fmaf(p, s, 1.6666667e-1f);
  float near = fmaf(p, s * t, t), h = half_exp(t), far = h - 0.25f / h;
  return copysignf(t < 1.0f ? near : far, x);
}

DEVICE float cosh(float x) {
  float h = half_exp(fabsf(x));
  return h + 0.25f / h;
}

DEVICE float asinh(float x) {
  float t = fabsf(x);
  bool far = t >= 1e9f;
  float near = t + t * t / (1.0f + sqrtf(fmaf(t, t, 1.0f)));
  float y = log1p(far ? t : near);
  return copysignf(far ? y + LN_2 : y, x);
}

DEVICE float acosh(float x) {
  float s = x - 1.0f;
  bool far = x > 1e9f;
  float y = log1p(far ? x : s + sqrtf(fmaf(s, s, 2.0f * s)));
  y = far ? y + LN_2 : y;
  return x < 1.0f ? quiet_nan() : y;
}

DEVICE float atanh(float x) {
  float t = fabsf(x), z = fmaf(2.0f * t, t / (1.0f - t), 2.0f * t);
  return copysignf(t > 1.0f ? quiet_nan() : 0.5f * log1p(z), x);
}

DEVICE float erf(float x) {
  float t = fabsf(x), s = x * x;
  float r = fmaf(-1.7285347e-5f, t, 3.8319713e-4f), u = fmaf(-3.8839644e-3f, t, 2.4254622e-2f);
  r = fmaf(r, s, u);
  r = fmaf(r, t, -1.0677788e-1f);
  r = fmaf(r, t, -6.348467e-1f);
  r = fmaf(r, t, -1.2871751e-1f);
  float far = copysignf(1.0f - exp_of_negative(fmaf(r, t, -t)), x);
  float p = -5.967617e-4f;
  p = fmaf(p, s, 4.9911942e-3f);
  p = fmaf(p, s, -2.6768135e-2f);
  p = fmaf(p, s, 1.1281992e-1f);
  p = fmaf(p, s, -3.7612534e-1f);
  p = fmaf(p, s, 1.2837917e-1f);
  float near = fmaf(p, x, x);
  return t > 0.9277344f ? far : near;
}

DEVICE float erfinv(float x) {
  float e, m = normal_log_parts(fmaf(x, -x, 1.0f), e);
  float t = fmaf(e, LN_2, fmaf(log_tail(m), m * m, m));
  float p = 3.0369757e-10f;
  p = fmaf(p, t, 2.932431e-8f);
  p = fmaf(p, t, 1.2215034e-6f);
  p = fmaf(p, t, 2.8410896e-5f);
  p = fmaf(p, t, 3.9355297e-4f);
  p = fmaf(p, t, 3.026988e-3f);
  p = fmaf(p, t, 4.831858e-3f);
  p = fmaf(p, t, -2.6464614e-1f);
  float far = fmaf(p, t, 8.400165e-1f);
  p = 5.4387783e-9f;
  p = fmaf(p, t, 1.4328545e-7f);
  p = fmaf(p, t, 1.2277479e-6f);
  p = fmaf(p, t, 1.1296363e-7f);
  p = fmaf(p, t, -5.6153076e-5f);
  p = fmaf(p, t, -1.4769763e-4f);
  p = fmaf(p, t, 2.3146868e-3f);
  p = fmaf(p, t, 1.1539258e-2f);
  p = fmaf(p, t, -2.3201548e-1f);
  float near = fmaf(p, t, 8.862269e-1f);
  float y = x * (t < -6.125f ? far : near);
  float edge = fabsf(x) == 1.0f ? copysignf(INFINITY_F, x) : quiet_nan();
  return fabsf(x) >= 1.0f ? edge : y;
}

DEVICE float sigmoid(float x) {
  float e = exp_of_negative(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

DEVICE float silu(float x) { return x / one_and_exp(-x); }

DEVICE float logaddexp(float a, float b) {
  float high = a > b || is_nan(a) ? a : b;
  float sum = high + log1p_inside(exp_of_negative(-fabsf(a - b)));
  return a == b ? a + LN_2 : sum;
}

DEVICE word64 bits_of(double x) { return word64(__double_as_longlong(x)); }
DEVICE double of_bits(word64 bits) { return __longlong_as_double((long long)bits); }

/// x to the power y; the tables are those of power.rs.
DEVICE float pow(float x, float y) {
  const double reciprocals[8] = {1.352112676056338,  1.2467532467532467, 1.1566265060240963, 1.0786516853932584,
                                 1.0,                0.9056603773584905, 0.8135593220338982, 0.7384615384615384};
  const double logarithms[8] = {-0.4352153812164741, -0.3181759600262548, -0.20992306937423136, -0.10922906975475839,
                                0.0,                 0.14295795384204313, 0.29768054864068516,  0.43740531230729846};
  const word64 roots[8] = {0x3ff0000000000000, 0x3fef72b83c7d517b, 0x3fef06fe0a31b715, 0x3feebfdad5362a27,
                           0x3feea09e667f3bcd, 0x3feeace5422aa0db, 0x3feee89f995ad3ad, 0x3fef5818dcfba487};
  const double whole_and_half = 6755399441055744.0, round = 844424930131968.0, most = 200.0;
  float a = fabsf(x);
  // y · log2(|x|), in eighths and what is left.
  word64 bits = bits_of(double(a)), from = bits - 0x3fe6aaaaaaaaaaab;
  double z = of_bits(bits - (from & 0xfff0000000000000));
  double k = of_bits(word64((long long)from >> 52) + bits_of(whole_and_half)) - whole_and_half;
  unsigned entry = unsigned(from >> 49) % 8;
  double r = fma(z, reciprocals[entry], -1.0);
  double p = fma(0.2070010409565553, r, -0.24146356756085716);
  p = fma(p, r, 0.288537562159488);
  p = fma(p, r, -0.36067213360583084);
  p = fma(p, r, 0.4808983475423057);
  p = fma(p, r, -0.7213475210961477);
  p = fma(p, r, 1.4426950408889634);
  double log2 = fma(p, r, k + logarithms[entry]);
  double shifted = fma(double(y), log2, round), f = fma(double(y), log2, round - shifted);
  // 2 to that.
  double root = of_bits(roots[unsigned(bits_of(shifted)) % 8] + (bits_of(shifted) << 49));
  p = fma(0.009618730825679362, f, 0.05550931728962304);
  p = fma(p, f, 0.24022650666529183);
  p = fma(p, f, 0.6931471780166573);
  float out = float(fma(root * f, p, root));
  double far = shifted - round;
  out = far > most ? INFINITY_F : out;
  out = far < -most ? 0.0f : out;
  bool down = y < 0.0f;
  if (a == 0.0f) out = down ? INFINITY_F : 0.0f;
  if (a == INFINITY_F) out = down ? 0.0f : INFINITY_F;
  if (a == 1.0f) out = 1.0f;
  float half = y * 0.5f;
  bool whole = truncf(y) == y, odd = whole && truncf(half) != half;
  if (odd) out = copysignf(out, x);
  if (x < 0.0f && a < INFINITY_F && a != 0.0f && !whole) out = quiet_nan();
  if (is_nan(x) || is_nan(y)) out = quiet_nan();
  return y == 0.0f || x == 1.0f ? 1.0f : out;
}

}  // namespace math
