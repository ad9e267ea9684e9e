// All inline PTX, each instruction with a twin for the shim that computes the same from what the lanes of a warp hold.
//
// Layouts of fragments: PTX ISA 8.5, "Matrix Fragments for mma.m16n8k32" and "mma.m16n8k16" with 8-bit types, and "mma.m16n8k16 with floating point
// type". With g = lane / 4, t = lane % 4:
//   m16n8k32: a[0] = A[g][4t … 4t+3], a[1] = A[g+8][4t …], a[2] = A[g][4t+16 …], a[3] = A[g+8][4t+16 …]; b[0] = B[4t …][g], b[1] = B[4t+16 …][g]
//   m16n8k16: a0 = A[g][4t … 4t+3], a1 = A[g+8][4t …]; b = B[4t …][g]
//   of bf16:  a[0] = A[g][2t, 2t+1], a[1] = A[g+8][2t …], a[2] = A[g][2t+8, 2t+9], a[3] = A[g+8][2t+8 …]; b[0] = B[2t, 2t+1][g], b[1] = B[2t+8 …][g]
//   all:      c[0], c[1] = C[g][2t, 2t+1], c[2], c[3] = C[g+8][2t, 2t+1]
#pragma once
#include "common.cuh"

#ifdef __CUDACC__

/// C += A · B of 16×32 and 32×8 signed bytes, exactly.
static __device__ __forceinline__ void mma_s8(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/// C += A · B of 16×16 and 16×8 signed bytes, exactly.
static __device__ __forceinline__ void mma_s8_half(int (&c)[4], unsigned a0, unsigned a1, unsigned b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(b));
}
/// C += A · B of 16×16 and 16×8 numbers of bf16, `N` times, one after the other: products are exact, their sums rounded as the device does it.
template <int N> static __device__ __forceinline__ void mma_bf16(float (&c)[4], const unsigned (&a)[N][4], const unsigned (&b)[N][2]) {
#pragma unroll
  for (int n = 0; n < N; n++)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[n][0]), "r"(a[n][1]), "r"(a[n][2]), "r"(a[n][3]), "r"(b[n][0]), "r"(b[n][1]));
}
/// Both numbers of bf16 in a word times 2^120, subnormal ones too.
static __device__ __forceinline__ unsigned times_2_120(unsigned pair) {
  unsigned product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(0x7b807b80u), "r"(0x80008000u));
  return product;
}
/// The two IEEE halves of a word as f32, exactly.
static __device__ __forceinline__ float lower_half(unsigned halves) {
  float value;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(value) : "r"(halves));
  return value;
}
static __device__ __forceinline__ float upper_half(unsigned halves) {
  float value;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(value) : "r"(halves));
  return value;
}

#else

// Each lane shows its registers to the others and computes its own four results; sums of integers have no order.
namespace twin {
struct Registers {
  unsigned a[4], b[2];
};
template <int K> void bytes(int (&c)[4], const Registers& mine) {
  auto all = shim::exchange(&mine, sizeof mine);
  unsigned lane = shim::lane();
  for (int i = 0; i < 4; i++) {
    unsigned row = lane / 4 + (i >= 2 ? 8 : 0), column = 2 * (lane % 4) + i % 2;
    for (unsigned k = 0; k < K; k += 4) {
      Registers x, w;
      memcpy(&x, all[row % 8 * 4 + k % 16 / 4], sizeof x);
      memcpy(&w, all[column * 4 + k % 16 / 4], sizeof w);
      c[i] = __dp4a(int(x.a[(row >= 8) + 2 * (k >= 16)]), int(w.b[k >= 16]), c[i]);
    }
  }
}
// Sums of floats have an order, which no manual tells: here all of an instruction's products are added in f64, and the sum is rounded once. A column of zeros, which rows that
// are not there have, changes nothing.
template <int N> struct Halves {
  unsigned a[N][4], b[N][2];
};
template <int N> void halves(float (&c)[4], const Halves<N>& mine) {
  auto all = shim::exchange(&mine, sizeof mine);
  auto of = [&](unsigned lane) { return reinterpret_cast<const Halves<N>*>(all[lane]); };
  auto number = [](unsigned word, unsigned k) { return double(__uint_as_float(k % 2 ? word & 0xffff0000u : word << 16)); };
  unsigned lane = shim::lane();
  for (int i = 0; i < 4; i++) {
    unsigned row = lane / 4 + (i >= 2 ? 8 : 0), column = 2 * (lane % 4) + i % 2, some = 0;
    for (unsigned t = 0; t < 4; t++)
      for (int n = 0; n < N; n++) some |= of(column * 4 + t)->b[n][0] | of(column * 4 + t)->b[n][1];
    if ((some & 0x7fff7fffu) == 0) continue;
    for (int n = 0; n < N; n++) {
      double sum = 0;
      for (unsigned k = 0; k < 16; k++) {
        unsigned t = k % 8 / 2;
        sum += number(of(row % 8 * 4 + t)->a[n][(row >= 8) + 2 * (k >= 8)], k) * number(of(column * 4 + t)->b[n][k >= 8], k);
      }
      c[i] = float(double(c[i]) + sum);
    }
  }
}
}  // namespace twin
static inline void mma_s8(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  twin::bytes<32>(c, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
}
static inline void mma_s8_half(int (&c)[4], unsigned a0, unsigned a1, unsigned b) { twin::bytes<16>(c, {{a0, a1, 0, 0}, {b, 0}}); }
template <int N> static inline void mma_bf16(float (&c)[4], const unsigned (&a)[N][4], const unsigned (&b)[N][2]) {
  static_assert(sizeof(twin::Halves<N>) <= shim::SHOWN * 8, "as much as a lane shows at once");
  twin::Halves<N> mine;
  memcpy(mine.a, a, sizeof mine.a), memcpy(mine.b, b, sizeof mine.b);
  twin::halves(c, mine);
}
static inline unsigned times_2_120(unsigned pair) {
  float more = __uint_as_float(0x7b800000u), low = __uint_as_float(pair << 16) * more, high = __uint_as_float(pair & 0xffff0000u) * more;
  return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
}
static inline float lower_half(unsigned halves) { return half_to_f32(halves & 0xffffu); }
static inline float upper_half(unsigned halves) { return half_to_f32(halves >> 16); }

#endif
