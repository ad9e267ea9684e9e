// Products of few rows with weights of block types: mul_mat and mul_mat_id in decoding.
//
// Order of summation: that of kernels/src/cpu/matmul.rs, with the same bits. Each output is one chain over the blocks in ascending order from +0.0; the sums of
// products within a block are integers, so how threads share them changes nothing. block_tile.cu has the same order, so a row's result
// depends neither on the number of rows nor on which of the two computes it.
//
// mul_vec_TYPE_ROWS(w, q, da, sums, out, out_stride, n, k, rows, further, ids, order, experts, used, per_token, bad, scales):
//   w      weights [n, k] as in GGUF, at any address; of `experts` such matrices, close together, where `ids` is given
//   q, da, sums   activations as quantize.cu makes them for the type, q at a multiple of 16
//   out    f32, row r at out + r · out_stride
//   further   without ids, up to two more matrices [n, k] whose results are close together; gridDim.x is then the sum of theirs
//   ids    null, or i32 [rows]: the expert of each row (−1 is the last one); one out of range is reported, and its row is zeros. Row r
//          then reads activation r / used · per_token + r % used · (per_token > 1): `per_token` is 1 (a token's experts share one) or `used`
//   scales what outputs are multiplied with (scales.cuh), of which there are none side by side
//   order  null, or where there are ids groups of ROWS rows that have one expert, −1 for none (experts.cu); a group whose first is none is empty
// Blocks of 128 threads. ROWS is 1 or 4: rows that share one reading of the weights (4 with ids only in an order). gridDim.x = ⌈n / 8⌉, gridDim.y = ⌈rows / ROWS⌉, or
// groups.
#include "chosen.cuh"
#include "formats.cuh"
#include "scales.cuh"

constexpr int WARPS = 4, OUTPUTS = 8;

/// Copies bytes from anywhere to words of shared memory, by a warp, reading whole sixteens inside of them only. Where byte 0 goes.
DEVICE unsigned stage(const uint8_t* from, int bytes, uint32_t* to) {
  unsigned lane = threadIdx.x % 32, skip = unsigned(reinterpret_cast<size_t>(from) % 16);
  const uint8_t* start = from - skip;
  int end = int(skip) + bytes;
  for (int at = int(lane) * 16; at < end; at += 512) {
    if (at >= int(skip) && at + 16 <= end) {
      *reinterpret_cast<uint4*>(to + at / 4) = *reinterpret_cast<const uint4*>(start + at);
    } else {
      for (int i = max(at, int(skip)); i < min(at + 16, end); i++) reinterpret_cast<uint8_t*>(to)[i] = start[i];
    }
  }
  __syncwarp();
  return skip;
}

DEVICE Shifted block_at(const uint32_t* staged, unsigned byte) { return {staged + byte / 4, byte % 4 * 8}; }

/// What the chain of an output is made of, for some blocks. `v` is added times `d`; a second product, of types with a minimum, is Σ q · da times `m`.
template <class F, int ROWS, int PANEL> struct Terms {
  // One more than the panel, so that rows lie in different banks.
  float v[OUTPUTS][ROWS][PANEL + 1];
  float d[F::LEN < 256 ? OUTPUTS : 1][PANEL + 1];
  float m[F::LEN < 256 && F::MINIMUM ? OUTPUTS : 1][PANEL + 1];
};

/// Blocks that a warp takes at a time, and those between two rounds of chains.
template <class F> struct Cut {
  static constexpr int CHUNK = F::LEN < 256 ? 32 : 8, PANEL = F::LEN < 256 ? 128 : 32;
  // Up to 15 bytes before, and a word after the end that is read and not used.
  static constexpr int STAGE = (CHUNK * F::BYTES + 15 + 15) / 16 * 4 + 4;
};

struct Activations {
  const signed char* q;
  const float* da;
  const int* sums;
  int k;
};

/// Blocks of 32: a block per lane.
template <class F, int ROWS, int PANEL>
DEVICE void chunk_of_32(const uint8_t* row, int first, int count, int output, int place, const Activations& x, const int* rows, uint32_t* staged, Terms<F, ROWS, PANEL>& terms) {
  int lane = threadIdx.x % 32;
  unsigned skip = stage(row + size_t(first) * F::BYTES, count * F::BYTES, staged);
  if (lane < count) {
    uint32_t w[8];
    float d, m;
    F::unpack(block_at(staged, skip + lane * F::BYTES), w, d, m);
    terms.d[output][place + lane] = d;
    if (F::MINIMUM) terms.m[output][place + lane] = m;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (rows[r] < 0) continue;
      const uint4* q = reinterpret_cast<const uint4*>(x.q + size_t(rows[r]) * x.k + size_t(first + lane) * 32);
      uint4 a = q[0], b = q[1];
      int dot = __dp4a(int(w[0]), int(a.x), 0);
      dot = __dp4a(int(w[1]), int(a.y), dot);
      dot = __dp4a(int(w[2]), int(a.z), dot);
      dot = __dp4a(int(w[3]), int(a.w), dot);
      dot = __dp4a(int(w[4]), int(b.x), dot);
      dot = __dp4a(int(w[5]), int(b.y), dot);
      dot = __dp4a(int(w[6]), int(b.z), dot);
      dot = __dp4a(int(w[7]), int(b.w), dot);
      terms.v[output][r][place + lane] = float(dot) * x.da[size_t(rows[r]) * (x.k / 32) + first + lane];
    }
  }
  // The stage is free again.
  __syncwarp();
}

/// Runs of 16: one per lane, of eight blocks of 64.
template <class F, int ROWS, int PANEL>
DEVICE void chunk_of_16(const uint8_t* row, int first, int count, int output, int place, const Activations& x, const int* rows, uint32_t* staged, Terms<F, ROWS, PANEL>& terms) {
  int lane = threadIdx.x % 32;
  unsigned skip = stage(row + size_t(first) * F::BYTES, count * F::BYTES, staged);
  if (lane < count) {
    uint32_t w[4];
    float d;
    F::unpack(block_at(staged, skip + lane / 4 * 4 * F::BYTES), lane % 4, w, d);
    terms.d[output][place + lane] = d;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (rows[r] < 0) continue;
      uint4 a = *reinterpret_cast<const uint4*>(x.q + size_t(rows[r]) * x.k + size_t(first + lane) * 16);
      int dot = __dp4a(int(w[0]), int(a.x), 0);
      dot = __dp4a(int(w[1]), int(a.y), dot);
      dot = __dp4a(int(w[2]), int(a.z), dot);
      dot = __dp4a(int(w[3]), int(a.w), dot);
      terms.v[output][r][place + lane] = float(dot) * x.da[size_t(rows[r]) * (x.k / 32) + (first + lane) / 2];
    }
  }
  __syncwarp();
}

DEVICE int eight_lanes(int v) {
  for (int d = 4; d > 0; d >>= 1) v += __shfl_xor_sync(ALL, v, d);
  return v;
}

/// What a block of 256 adds, before its `da`: lanes 8i … 8i+7 have the runs of 32 of one block.
template <bool FIVE> DEVICE float block_term(Mixed<FIVE>, const Shifted& w, const uint32_t (&q)[8], int sum, bool some) {
  typedef Mixed<FIVE> F;
  int j = threadIdx.x % 8, dot = 0, scale = 0, min = 0;
  float d = 0.0f, dmin = 0.0f;
  if (some) {
#pragma unroll
    for (int g = 0; g < 8; g++) dot = __dp4a(int(F::word(w, j, g)), int(q[g]), dot);
    F::scale_min(w, j, scale, min);
    d = F::d(w), dmin = F::dmin(w);
  }
  int total = eight_lanes(min * sum), inner = eight_lanes(scale * dot);
  return fmaf(float(inner), d, -(float(total) * dmin));
}
DEVICE float block_term(Q6_K, const Shifted& w, const uint32_t (&q)[8], int, bool some) {
  int j = threadIdx.x % 8, dots[2] = {0, 0}, scales[2] = {0, 0};
  float d = 0.0f;
  if (some) {
    for (int g = 0; g < 8; g++) dots[g / 4] = __dp4a(int(Q6_K::word(w, j, g)), int(q[g]), dots[g / 4]);
    scales[0] = Q6_K::scale(w, 2 * j), scales[1] = Q6_K::scale(w, 2 * j + 1);
    d = Q6_K::d(w);
  }
  int inner = eight_lanes(scales[0] * dots[0] + scales[1] * dots[1]);
  return float(inner) * d;
}

/// Blocks of 256: eight lanes per block.
template <class F, int ROWS, int PANEL>
DEVICE void chunk_of_256(const uint8_t* row, int first, int count, int output, int place, const Activations& x, const int* rows, uint32_t* staged, Terms<F, ROWS, PANEL>& terms) {
  int lane = threadIdx.x % 32, j = lane % 8;
  unsigned skip = stage(row + size_t(first) * F::BYTES, count * F::BYTES, staged);
  for (int i = 0; i < count; i += 4) {
    int block = i + lane / 8;
    bool some = block < count;
    Shifted w = block_at(staged, skip + (some ? block : 0) * F::BYTES);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      uint32_t q[8] = {};
      int sum = 0;
      bool here = some && rows[r] >= 0;
      if (here) {
        const uint4* from = reinterpret_cast<const uint4*>(x.q + size_t(rows[r]) * x.k + size_t(first + block) * 256 + 32 * j);
        uint4 a = from[0], b = from[1];
        q[0] = a.x, q[1] = a.y, q[2] = a.z, q[3] = a.w, q[4] = b.x, q[5] = b.y, q[6] = b.z, q[7] = b.w;
        sum = x.sums[size_t(rows[r]) * (x.k / 32) + (first + block) * 8 + j];
      }
      float v = block_term(F(), w, q, sum, here);
      if (here && j == 0) terms.v[output][r][place + block] = v;
    }
  }
  __syncwarp();
}

template <class F, int ROWS>
DEVICE void few_rows(const uint8_t* w, const Activations& x, float* out, long long out_stride, int n, int rows, const Further& further, const int* ids, const int* order, int experts, int used,
                     int per_token, word64* bad, const Scales& scales) {
  constexpr int CHUNK = Cut<F>::CHUNK, PANEL = Cut<F>::PANEL;
  __shared__ Terms<F, ROWS, PANEL> terms;
  __shared__ __align__(16) uint32_t staged[WARPS][Cut<F>::STAGE];
  int warp = threadIdx.x / 32, blocks = x.k / F::LEN;
  int number, first_output = matrix_of(further, OUTPUTS, w, out, out_stride, n, number) * OUTPUTS, outputs = min(OUTPUTS, n - first_output);
  size_t row_bytes = size_t(blocks) * F::BYTES;

  // Activation and result of each row; −1 for none.
  __shared__ int from[ROWS], to[ROWS];
  if (!rows_of_block(from, to, rows, ids, order, used, per_token)) return;
  bool wrong = !to_expert(w, n * row_bytes, ids, to[0], experts, bad);
  const float* values = wrong ? nullptr : scales.of(number);
  if (values) to_expert(values, size_t(scales.each), ids, to[0], experts, bad);

  // The thread that has an output's chain.
  int output = threadIdx.x / ROWS, r = threadIdx.x % ROWS, activation = from[r];
  bool chains = threadIdx.x < OUTPUTS * ROWS && output < outputs && activation >= 0 && !wrong;
  float acc = 0.0f;
  for (int start = 0; start < blocks && !wrong; start += PANEL) {
    int panel = min(PANEL, blocks - start), chunks = (panel + CHUNK - 1) / CHUNK;
    for (int task = warp; task < chunks * outputs; task += WARPS) {
      int o = task % outputs, place = task / outputs * CHUNK, count = min(CHUNK, panel - place);
      const uint8_t* row = w + size_t(first_output + o) * row_bytes;
      if constexpr (F::LEN == 16) {
        chunk_of_16<F, ROWS, PANEL>(row, start + place, count, o, place, x, from, staged[warp], terms);
      } else if constexpr (F::LEN == 32) {
        chunk_of_32<F, ROWS, PANEL>(row, start + place, count, o, place, x, from, staged[warp], terms);
      } else {
        chunk_of_256<F, ROWS, PANEL>(row, start + place, count, o, place, x, from, staged[warp], terms);
      }
    }
    __syncthreads();
    if (chains) {
      const float* da = x.da + size_t(activation) * blocks + start;
      const int* sums = x.sums + size_t(activation) * (x.k / 32) + start;
      for (int b = 0; b < panel; b++) {
        if constexpr (F::LEN < 256) {
          acc = fmaf(terms.v[output][r][b], terms.d[output][b], acc);
          if (F::MINIMUM) acc = fmaf(float(sums[b]) * da[b], terms.m[output][b], acc);
        } else {
          acc = fmaf(terms.v[output][r][b], da[b], acc);
        }
      }
    }
    __syncthreads();
  }
  int row = to[r];
  if (threadIdx.x < OUTPUTS * ROWS && output < outputs && row >= 0) {
    out[row * out_stride + first_output + output] = plain(with_scale(acc, scales, values, first_output + output));
  }
}

#define KERNEL_OF(name, type, count)                                                                                                              \
  extern "C" __global__ void __launch_bounds__(128, 8) name(const uint8_t* w, const signed char* q, const float* da, const int* sums, float* out,     \
                                                         long long out_stride, int n, int k, int rows, Further further, const int* ids,            \
                                                         const int* order, int experts, int used, int per_token, word64* bad, Scales scales) {     \
    Activations x = {q, da, sums, k};                                                                                                              \
    few_rows<type, count>(w, x, out, out_stride, n, rows, further, ids, order, experts, used, per_token, bad, scales);                                      \
  }
KERNEL_OF(mul_vec_q8_0_1, Q8_0, 1)
KERNEL_OF(mul_vec_q8_0_4, Q8_0, 4)
KERNEL_OF(mul_vec_q4_0_1, Q4_0, 1)
KERNEL_OF(mul_vec_q4_0_4, Q4_0, 4)
KERNEL_OF(mul_vec_q4_1_1, Q4_1, 1)
KERNEL_OF(mul_vec_q4_1_4, Q4_1, 4)
KERNEL_OF(mul_vec_q5_0_1, Q5_0, 1)
KERNEL_OF(mul_vec_q5_0_4, Q5_0, 4)
KERNEL_OF(mul_vec_q5_1_1, Q5_1, 1)
KERNEL_OF(mul_vec_q5_1_4, Q5_1, 4)
KERNEL_OF(mul_vec_mxfp4_1, MXFP4, 1)
KERNEL_OF(mul_vec_mxfp4_4, MXFP4, 4)
KERNEL_OF(mul_vec_q4_k_1, Q4_K, 1)
KERNEL_OF(mul_vec_q4_k_4, Q4_K, 4)
KERNEL_OF(mul_vec_q5_k_1, Q5_K, 1)
KERNEL_OF(mul_vec_q5_k_4, Q5_K, 4)
KERNEL_OF(mul_vec_q6_k_1, Q6_K, 1)
KERNEL_OF(mul_vec_q6_k_4, Q6_K, 4)
KERNEL_OF(mul_vec_nvfp4_1, NVFP4, 1)
KERNEL_OF(mul_vec_nvfp4_4, NVFP4, 4)
