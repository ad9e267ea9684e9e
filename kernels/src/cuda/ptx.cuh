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

/// The same number, of which the compiler knows nothing: what is computed of it in a loop isn't kept in registers from before it.
static __device__ __forceinline__ int anew(int number) {
  asm volatile("" : "+r"(number));
  return number;
}
/// A place in shared memory, known once: from an address each use would find it again.
typedef unsigned Place;
static __device__ __forceinline__ Place place_in_shared(void* at) { return Place(anew(int(__cvta_generic_to_shared(at)))); }
/// Copies `BYTES` (4, 8 or 16) from memory to shared memory, both at multiples of it, of which only the first `some` are read, and zeros come after them. It may end with
/// `copied` only, which waits for all that the thread began.
template <int BYTES> static __device__ __forceinline__ void copy_ahead(Place to, const void* from, int some) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(some) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" : : "r"(to), "l"(from), "n"(BYTES), "r"(some) : "memory");
}
template <int BYTES> static __device__ __forceinline__ void copy_ahead(Place to, const void* from) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(to), "l"(from), "n"(BYTES) : "memory");
}
/// Waits for all that this thread copies.
static __device__ __forceinline__ void copied() { asm volatile("cp.async.wait_all;" : : : "memory"); }
/// Sixteen bytes from memory to shared memory, both at multiples of sixteen, while the thread goes on; of `LINE` bytes there all come as far as the L2 cache.
template <int LINE> static __device__ __forceinline__ void bring_16(void* shared, const void* from, bool there) {
  unsigned to = unsigned(__cvta_generic_to_shared(shared)), some = there ? 16 : 0;
  if (LINE == 256)
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(some) : "memory");
  else
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(some) : "memory");
}
/// Ends a group of what this thread copies.
static __device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits for all of this thread's groups but the last `N`.
template <int N> static __device__ __forceinline__ void await_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
/// Four matrices of eight rows of 16 bytes in shared memory, each row at a multiple of 16: lane 8 i + r says where row r of matrix i is, and each lane gets word t of row g of
/// matrix i as to[i].
static __device__ __forceinline__ void load_matrices(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(unsigned(__cvta_generic_to_shared(row)))
               : "memory");
}
/// A · B of 16×32 and 32×8 signed bytes, exactly, with `begin` added to each sum.
static __device__ __forceinline__ void mma_s8_from(int (&d)[4], int begin, const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(begin));
}
static __device__ __forceinline__ void mma_s8_half_from(int (&d)[4], int begin, unsigned a0, unsigned a1, unsigned b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(a0), "r"(a1), "r"(b), "r"(begin));
}
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
/// Two of a word's bytes, the lower or the upper ones, each with its sign before it.
template <bool UPPER> static __device__ __forceinline__ unsigned signed_pair(unsigned bytes) {
  unsigned pair;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(pair) : "r"(bytes), "n"(UPPER ? 0xb3a2 : 0x9180));
  return pair;
}
/// C[m][first + n] += A[m] · B[n][q] of 16×16 and 16×8 numbers of bf16, for each `q` in ascending order, and in an order in which no instruction waits for the one before it.
template <int M, int N, int Q, int WIDTH> static __device__ __forceinline__ void mma_bf16_all(float (*c)[WIDTH][4], int first, const unsigned (&a)[M][4], const unsigned (&b)[N][Q][2]) {
#pragma unroll
  for (int q = 0; q < Q; q++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int m = 0; m < M; m++)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[m][first + n][0]), "+f"(c[m][first + n][1]), "+f"(c[m][first + n][2]), "+f"(c[m][first + n][3])
                     : "r"(a[m][0]), "r"(a[m][1]), "r"(a[m][2]), "r"(a[m][3]), "r"(b[n][q][0]), "r"(b[n][q][1]));
}
/// Both numbers of bf16 in a word times 2^120, subnormal ones too.
static __device__ __forceinline__ unsigned times_2_120(unsigned pair) {
  unsigned product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(0x7b807b80u), "r"(0x80008000u));
  return product;
}
/// Both numbers of bf16 in a word times zero, and `sum` added: so many zeros added stay zeros, and one that is not finite makes a NaN of its half.
static __device__ __forceinline__ unsigned add_none_of(unsigned pair, unsigned sum) {
  unsigned more;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(more) : "r"(pair), "r"(0u), "r"(sum));
  return more;
}
/// The same number (blocks have one dimension), which the compiler takes for another one: what is part of a loaded vector it copies for each instruction whose operand it
/// is part of, and this one not.
static __device__ __forceinline__ unsigned by_itself(unsigned word) { return word * blockDim.y; }
/// For the compiler the value is a new one then: it is kept where it would be computed again, and what comes of it is computed again where it would be kept.
static __device__ __forceinline__ void keep(int& value) { asm volatile("" : "+r"(value)); }
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

/// Sixteen bytes from global to shared memory, both at multiples of sixteen, while the thread goes on. What a thread has so copied since its last `close_group` is a group.
static __device__ __forceinline__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(__cvta_generic_to_global(from)) : "memory");
}
/// The same where it says so, without a branch.
static __device__ __forceinline__ void copy_16_if(bool wanted, void* to, const void* from) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(unsigned(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from)), "r"(int(wanted))
               : "memory");
}
/// Four bytes of `a` and `b` by the fours of bits of `select`: of one that is 8 or more the byte's sign, in all bits.
static __device__ __forceinline__ unsigned permuted(unsigned a, unsigned b, unsigned select) {
  unsigned value;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(value) : "r"(a), "r"(b), "r"(select));
  return value;
}
/// Has an address in registers from here on, rather than made again where it is used.
static __device__ __forceinline__ void keep(const uint8_t*& address) { asm volatile("" : "+l"(address)); }
/// `start` and the products of the four bytes of `a`, which are 0 to 255, with those of `b`, which have signs.
static __device__ __forceinline__ int dot_unsigned(unsigned a, unsigned b, int start) {
  int sum;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(start));
  return sum;
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
template <int M, int N, int Q> struct AllHalves {
  unsigned a[M][4], b[N][Q][2];
};
template <int M, int N, int Q, int WIDTH> void all_halves(float (*c)[WIDTH][4], int first, const AllHalves<M, N, Q>& mine) {
  auto all = shim::exchange(&mine, sizeof mine);
  auto of = [&](unsigned lane) { return reinterpret_cast<const AllHalves<M, N, Q>*>(all[lane]); };
  auto number = [](unsigned word, unsigned k) { return double(__uint_as_float(k % 2 ? word & 0xffff0000u : word << 16)); };
  unsigned lane = shim::lane();
  for (int n = 0; n < N; n++)
    for (int i = 0; i < 2; i++) {
      unsigned column = 2 * (lane % 4) + i, some = 0;
      for (unsigned t = 0; t < 4; t++)
        for (int q = 0; q < Q; q++) some |= of(column * 4 + t)->b[n][q][0] | of(column * 4 + t)->b[n][q][1];
      if ((some & 0x7fff7fffu) == 0) continue;
      for (int m = 0; m < M; m++)
        for (int high = 0; high < 2; high++)
          for (int q = 0; q < Q; q++) {
            double sum = 0;
            for (unsigned k = 0; k < 16; k++) {
              unsigned t = k % 8 / 2;
              sum += number(of(lane / 4 * 4 + t)->a[m][high + 2 * (k >= 8)], k) * number(of(column * 4 + t)->b[n][q][k >= 8], k);
            }
            float& to = c[m][first + n][2 * high + i];
            to = float(double(to) + sum);
          }
    }
}
}  // namespace twin
static inline void mma_s8(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  twin::bytes<32>(c, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
}
static inline void mma_s8_half(int (&c)[4], unsigned a0, unsigned a1, unsigned b) { twin::bytes<16>(c, {{a0, a1, 0, 0}, {b, 0}}); }
static inline void mma_s8_from(int (&d)[4], int begin, const unsigned (&a)[4], const unsigned (&b)[2]) {
  for (int& sum : d) sum = begin;
  mma_s8(d, a, b);
}
static inline void mma_s8_half_from(int (&d)[4], int begin, unsigned a0, unsigned a1, unsigned b) {
  for (int& sum : d) sum = begin;
  mma_s8_half(d, a0, a1, b);
}
typedef char* Place;
static inline Place place_in_shared(void* at) { return static_cast<char*>(at); }
template <int BYTES> static inline void copy_ahead(Place to, const void* from, int some) { shim::begin_copy(to, from, unsigned(some), BYTES); }
template <int BYTES> static inline void copy_ahead(Place to, const void* from) { shim::begin_copy(to, from, BYTES, BYTES); }
template <int LINE> static inline void bring_16(void* shared, const void* from, bool there) { shim::begin_copy(shared, from, there ? 16 : 0, 16); }
static inline void close_group() { shim::close_group(); }
template <int N> static inline void await_groups() { shim::await_groups(N); }
static inline int anew(int number) { return number; }
static inline void copied() { shim::await_all(); }
static inline void load_matrices(unsigned (&to)[4], const void* row) {
  auto all = shim::exchange(&row, sizeof row);
  unsigned lane = shim::lane();
  for (unsigned i = 0; i < 4; i++) {
    const char* from;
    memcpy(&from, all[8 * i + lane / 4], sizeof from);
    memcpy(&to[i], from + 4 * (lane % 4), 4);
  }
}
template <int N> static inline void mma_bf16(float (&c)[4], const unsigned (&a)[N][4], const unsigned (&b)[N][2]) {
  static_assert(sizeof(twin::Halves<N>) <= shim::SHOWN * 8, "as much as a lane shows at once");
  twin::Halves<N> mine;
  memcpy(mine.a, a, sizeof mine.a), memcpy(mine.b, b, sizeof mine.b);
  twin::halves(c, mine);
}
template <bool UPPER> static inline unsigned signed_pair(unsigned bytes) {
  unsigned low = unsigned(int(int8_t(bytes >> (UPPER ? 16 : 0)))), high = unsigned(int(int8_t(bytes >> (UPPER ? 24 : 8))));
  return (low & 0xffffu) | high << 16;
}
template <int M, int N, int Q, int WIDTH> static inline void mma_bf16_all(float (*c)[WIDTH][4], int first, const unsigned (&a)[M][4], const unsigned (&b)[N][Q][2]) {
  static_assert(sizeof(twin::AllHalves<M, N, Q>) <= shim::SHOWN * 8, "as much as a lane shows at once");
  twin::AllHalves<M, N, Q> mine;
  memcpy(mine.a, a, sizeof mine.a), memcpy(mine.b, b, sizeof mine.b);
  twin::all_halves(c, first, mine);
}
static inline unsigned times_2_120(unsigned pair) {
  float more = __uint_as_float(0x7b800000u), low = __uint_as_float(pair << 16) * more, high = __uint_as_float(pair & 0xffff0000u) * more;
  return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
}
static inline unsigned add_none_of(unsigned pair, unsigned sum) {
  for (unsigned half : {0x7f80u, 0x7f800000u})
    if ((pair & half) == half) sum |= half | half >> 1;
  return sum;
}
static inline unsigned by_itself(unsigned word) { return word; }
static inline void keep(int&) {}
static inline float lower_half(unsigned halves) { return half_to_f32(halves & 0xffffu); }
static inline float upper_half(unsigned halves) { return half_to_f32(halves >> 16); }
static inline void copy_16(void* to, const void* from) { shim::begin_copy(to, from, 16, 16); }
static inline void copy_16_if(bool wanted, void* to, const void* from) {
  if (wanted) copy_16(to, from);
}
static inline unsigned permuted(unsigned a, unsigned b, unsigned select) {
  unsigned value = __byte_perm(a, b, select);
  for (int i = 0; i < 4; i++)
    if (select >> 4 * i & 8) value = (value & ~(0xffu << 8 * i)) | (value >> 8 * i & 0x80u ? 0xffu << 8 * i : 0);
  return value;
}
static inline void keep(const uint8_t*&) {}
static inline int dot_unsigned(unsigned a, unsigned b, int start) {
  for (int i = 0; i < 4; i++) start += int(a >> 8 * i & 0xffu) * int(int8_t(b >> 8 * i & 0xffu));
  return start;
}

#endif
