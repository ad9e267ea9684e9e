// Rows of tables as f32: embeddings. Nothing is summed; each number has the bits of kernels/src/cpu/dequant.rs: a product, then a sum, each rounded.
//
// get_rows_TYPE(table, ids, out, n, k, bad): out[r] = table[ids[r]] as f32, for a table of `n` rows of `k` numbers (whole blocks), stored as in GGUF at any
// address. `ids` i32; one out of range is reported, and its row is zeros. Blocks of 64 threads: gridDim.x = ids, gridDim.y = any number, which share a row.
// With null for `ids`, all rows in turn: gridDim.x = rows.
#include "formats.cuh"

template <bool FIVE, bool MINIMUM, class W> DEVICE void numbers(Nibbles<FIVE, MINIMUM>, const W& w, float* out) {
  uint32_t q[8];
  float d, m;
  Nibbles<FIVE, MINIMUM>::unpack(w, q, d, m);
  for (int i = 0; i < 32; i++) {
    float y = d * float(int8_t(q[i / 4] >> 8 * (i % 4) & 0xffu));
    out[i] = MINIMUM ? y + m : y;
  }
}
template <class F, class W> DEVICE void numbers_of_32(const W& w, float* out) {
  uint32_t q[8];
  float d, m;
  F::unpack(w, q, d, m);
  for (int i = 0; i < 32; i++) out[i] = d * float(int8_t(q[i / 4] >> 8 * (i % 4) & 0xffu));
}
template <class W> DEVICE void numbers(Q8_0, const W& w, float* out) { numbers_of_32<Q8_0>(w, out); }
template <class W> DEVICE void numbers(MXFP4, const W& w, float* out) { numbers_of_32<MXFP4>(w, out); }
template <bool FIVE, class W> DEVICE void numbers(Mixed<FIVE>, const W& w, float* out) {
  typedef Mixed<FIVE> F;
  float d = F::d(w), dmin = F::dmin(w);
  for (int j = 0; j < 8; j++) {
    int scale, min;
    F::scale_min(w, j, scale, min);
    float s = d * float(scale), m = dmin * float(min);
    for (int i = 0; i < 32; i++) out[32 * j + i] = s * float(F::word(w, j, i / 4) >> 8 * (i % 4) & 0xffu) - m;
  }
}
template <class W> DEVICE void numbers(Q6_K, const W& w, float* out) {
  float d = Q6_K::d(w);
  for (int i = 0; i < 256; i++)
    out[i] = d * float(Q6_K::scale(w, i / 16)) * float(int8_t(Q6_K::word(w, i / 32, i % 32 / 4) >> 8 * (i % 4) & 0xffu));
}

/// A whole block of it.
struct WholeNVFP4 {
  static constexpr int LEN = 4 * NVFP4::LEN, BYTES = 4 * NVFP4::BYTES;
};
template <class W> DEVICE void numbers(WholeNVFP4, const W& w, float* out) {
  for (int j = 0; j < 4; j++) {
    uint32_t q[4];
    float d;
    NVFP4::unpack(w, j, q, d);
    for (int i = 0; i < 16; i++) out[16 * j + i] = d * float(int8_t(q[i / 4] >> 8 * (i % 4) & 0xffu));
  }
}

/// Where a row of the table begins, or null for a wrong index.
DEVICE const uint8_t* row_of(const uint8_t* table, const int* ids, int n, size_t bytes, word64* bad) {
  long long id = ids ? ids[blockIdx.x] : (long long)blockIdx.x;
  if (id < 0 || id >= n) {
    if (threadIdx.x == 0 && blockIdx.y == 0) report(bad, id, word64(max(n, 1)));
    return nullptr;
  }
  return table + size_t(id) * bytes;
}

template <class F> DEVICE void block_rows(const uint8_t* table, const int* ids, float* out, int n, int k, word64* bad) {
  out += size_t(blockIdx.x) * k;
  const uint8_t* row = row_of(table, ids, n, size_t(k / F::LEN) * F::BYTES, bad);
  for (int b = blockIdx.y * 64 + threadIdx.x; b < k / F::LEN; b += gridDim.y * 64) {
    if (row) {
      numbers(F(), AnyPlace<F::BYTES>{row + size_t(b) * F::BYTES}, out + size_t(b) * F::LEN);
    } else {
      for (int i = 0; i < F::LEN; i++) out[size_t(b) * F::LEN + i] = 0.0f;
    }
  }
}

/// How e4m3 lies in memory. A half with the same exponent and mantissa is 2^-8 of it, and the one with all ones is a NaN.
struct E4M3 {
  typedef uint8_t Stored;
  DEVICE float load(const Stored* x) {
    unsigned rest = *x & 0x7fu;
    return rest == 0x7fu ? quiet_nan() : half_to_f32((*x & 0x80u) << 8 | rest << 7) * 256.0f;
  }
};

/// Of f32, f16, bf16 and e4m3, at addresses that are multiples of their size.
template <class E> DEVICE void plain_rows(const uint8_t* table, const int* ids, float* out, int n, int k, word64* bad) {
  typedef typename E::Stored Stored;
  out += size_t(blockIdx.x) * k;
  const Stored* row = reinterpret_cast<const Stored*>(row_of(table, ids, n, size_t(k) * sizeof(Stored), bad));
  for (int i = blockIdx.y * 64 + threadIdx.x; i < k; i += gridDim.y * 64) out[i] = row ? E::load(row + i) : 0.0f;
}

#define KERNEL_OF(name, rows)                                                                                             \
  extern "C" __global__ void __launch_bounds__(64) name(const uint8_t* table, const int* ids, float* out, int n, int k, word64* bad) { \
    rows(table, ids, out, n, k, bad);                                                                                      \
  }
KERNEL_OF(get_rows_f32, plain_rows<F32>)
KERNEL_OF(get_rows_f16, plain_rows<F16>)
KERNEL_OF(get_rows_bf16, plain_rows<BF16>)
KERNEL_OF(get_rows_f8_e4m3, plain_rows<E4M3>)
KERNEL_OF(get_rows_q8_0, block_rows<Q8_0>)
KERNEL_OF(get_rows_q4_0, block_rows<Q4_0>)
KERNEL_OF(get_rows_q4_1, block_rows<Q4_1>)
KERNEL_OF(get_rows_q5_0, block_rows<Q5_0>)
KERNEL_OF(get_rows_q5_1, block_rows<Q5_1>)
KERNEL_OF(get_rows_mxfp4, block_rows<MXFP4>)
KERNEL_OF(get_rows_nvfp4, block_rows<WholeNVFP4>)
KERNEL_OF(get_rows_q4_k, block_rows<Q4_K>)
KERNEL_OF(get_rows_q5_k, block_rows<Q5_K>)
KERNEL_OF(get_rows_q6_k, block_rows<Q6_K>)
