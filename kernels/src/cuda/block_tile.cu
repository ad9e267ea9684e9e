// Products of many rows with weights of block types, by tensor cores on integers: mul_mat in prefill.
//
// Order of summation: that of kernels/src/cpu/matmul.rs and of block_vec.cu, with the same bits: the tensor cores sum the products within a block, which are
// integers, and each output is one chain over the blocks in ascending order.
//
// mul_tile_TYPE(w, q, da, sums, out, out_stride, n, k, rows): as mul_vec_TYPE_ROWS in block_vec.cu, without experts.
// A block of 128 threads has 64 outputs of 64 rows. gridDim.x = ⌈n / 64⌉, gridDim.y = ⌈rows / 64⌉.
#include "formats.cuh"
#include "ptx.cuh"

constexpr int OUTPUTS = 64, ROWS = 64, THREADS = 128, STAGE = 128;
/// Words from row to row in shared memory: the eight rows and four words that a fragment is read from lie in different banks.
constexpr int STRIDE = STAGE / 4 + 4;

/// 128 numbers of each output and row. Blocks of 32 have a scale each; blocks of 256 come in two halves, of four runs of 32 or eight of 16.
struct Tile {
  uint32_t w[OUTPUTS][STRIDE], x[ROWS][STRIDE];
  float d[OUTPUTS][4], m[OUTPUTS][4], da[ROWS][4];
  int sums[ROWS][4];
  int scales[OUTPUTS][8];
  int minima[OUTPUTS][4];
};

/// A warp has 16 outputs (g and g + 8 of a lane) of all 64 rows: eight tiles of eight rows, of which a lane has rows 2t and 2t + 1.
struct Lane {
  int output, row;
  DEVICE Lane mine() {
    int lane = threadIdx.x % 32;
    return {int(threadIdx.x) / 32 * 16 + lane / 4, lane % 4 * 2};
  }
};

DEVICE void load_rows(Tile& tile, const signed char* q, int first_row, int rows, int k, int at) {
  for (int e = threadIdx.x; e < ROWS * (STAGE / 16); e += THREADS) {
    int r = e / (STAGE / 16), i = e % (STAGE / 16) * 16;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (first_row + r < rows && at + i < k) v = *reinterpret_cast<const uint4*>(q + size_t(first_row + r) * k + at + i);
    uint32_t* to = &tile.x[r][i / 4];
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
}

/// The integer products of run `run` of 32 with eight rows.
DEVICE void dot(const Tile& tile, const Lane& lane, int run, int eight, int (&s)[4]) {
  int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4, base = run * 8 + t;
  const unsigned a[4] = {tile.w[lane.output][base], tile.w[lane.output + 8][base], tile.w[lane.output][base + 4], tile.w[lane.output + 8][base + 4]};
  const unsigned b[2] = {tile.x[eight * 8 + g][base], tile.x[eight * 8 + g][base + 4]};
  mma_s8(s, a, b);
}

template <class F> DEVICE void store(const float (&acc)[8][4], const Lane& lane, float* out, long long out_stride, int first, int n, int first_row, int rows) {
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int output = first + lane.output + i / 2 * 8, row = first_row + j * 8 + lane.row + i % 2;
      if (output < n && row < rows) out[row * out_stride + output] = plain(acc[j][i]);
    }
}

template <class F> DEVICE void tile_of_32(const uint8_t* w, const signed char* q, const float* da, const int* sums, float* out, long long out_stride, int n, int k, int rows) {
  __shared__ Tile tile;
  int first = blockIdx.x * OUTPUTS, first_row = blockIdx.y * ROWS, blocks = k / 32;
  Lane lane = Lane::mine();
  float acc[8][4] = {};
#pragma unroll 1
  for (int start = 0; start < blocks; start += 4) {
    load_rows(tile, q, first_row, rows, k, start * 32);
    for (int e = threadIdx.x; e < OUTPUTS * 4; e += THREADS) {
      int o = e / 4, b = e % 4;
      bool some = start + b < blocks;
      uint32_t words[8] = {};
      float d = 0.0f, m = 0.0f;
      if (some && first + o < n) F::unpack(AnyPlace<F::BYTES>{w + (size_t(first + o) * blocks + start + b) * F::BYTES}, words, d, m);
#pragma unroll
      for (int i = 0; i < 8; i++) tile.w[o][b * 8 + i] = words[i];
      tile.d[o][b] = d, tile.m[o][b] = m;
      size_t at = size_t(first_row + o) * blocks + start + b;
      tile.da[o][b] = some && first_row + o < rows ? da[at] : 0.0f;
      tile.sums[o][b] = F::MINIMUM && some && first_row + o < rows ? sums[at] : 0;
    }
    __syncthreads();
    int count = min(4, blocks - start);
#pragma unroll 1
    for (int b = 0; b < count; b++) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        int s[4] = {};
        dot(tile, lane, b, j, s);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int o = lane.output + i / 2 * 8, r = j * 8 + lane.row + i % 2;
          acc[j][i] = fmaf(float(s[i]) * tile.da[r][b], tile.d[o][b], acc[j][i]);
          if (F::MINIMUM) acc[j][i] = fmaf(float(tile.sums[r][b]) * tile.da[r][b], tile.m[o][b], acc[j][i]);
        }
      }
    }
    __syncthreads();
  }
  store<F>(acc, lane, out, out_stride, first, n, first_row, rows);
}

/// Scales, minima and words of four runs of a block of 256.
template <bool FIVE> DEVICE void unpack_half(Mixed<FIVE>, Tile& tile, const AnyPlace<Mixed<FIVE>::BYTES>& from, int o, int half, int run) {
  typedef Mixed<FIVE> F;
  int scale, min;
  F::scale_min(from, half * 4 + run, scale, min);
  tile.scales[o][run] = scale, tile.minima[o][run] = min;
  tile.d[o][0] = F::d(from), tile.m[o][0] = F::dmin(from);
}
DEVICE void unpack_half(Q6_K, Tile& tile, const AnyPlace<Q6_K::BYTES>& from, int o, int half, int run) {
  for (int i = 0; i < 2; i++) tile.scales[o][2 * run + i] = Q6_K::scale(from, half * 8 + 2 * run + i);
  tile.d[o][0] = Q6_K::d(from);
}

template <class F> DEVICE void tile_of_256(const uint8_t* w, const signed char* q, const float* da, const int* sums, float* out, long long out_stride, int n, int k, int rows) {
  __shared__ Tile tile;
  int first = blockIdx.x * OUTPUTS, first_row = blockIdx.y * ROWS, blocks = k / 256, t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
  Lane lane = Lane::mine();
  float acc[8][4] = {};
  int inner[8][4], low[8][4];
#pragma unroll 1
  for (int step = 0; step < 2 * blocks; step++) {
    int block = step / 2, half = step % 2;
    load_rows(tile, q, first_row, rows, k, step * STAGE);
    for (int e = threadIdx.x; e < OUTPUTS * 4; e += THREADS) {
      int o = e / 4, run = e % 4;
      if (first + o < n) {
        AnyPlace<F::BYTES> from{w + (size_t(first + o) * blocks + block) * F::BYTES};
        for (int i = 0; i < 8; i++) tile.w[o][run * 8 + i] = F::word(from, half * 4 + run, i);
        unpack_half(F(), tile, from, o, half, run);
      }
      bool some = first_row + o < rows;
      tile.sums[o][run] = some ? sums[size_t(first_row + o) * (k / 32) + step * 4 + run] : 0;
      if (run == 0) tile.da[o][0] = some ? da[size_t(first_row + o) * blocks + block] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (half == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) inner[j][i] = 0, low[j][i] = 0;
      }
#pragma unroll 1
      for (int run = 0; run < 4; run++) {
        if (F::MINIMUM) {
          int s[4] = {};
          dot(tile, lane, run, j, s);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            int o = lane.output + i / 2 * 8, r = j * 8 + lane.row + i % 2;
            inner[j][i] += tile.scales[o][run] * s[i];
            low[j][i] += tile.minima[o][run] * tile.sums[r][run];
          }
        } else {
#pragma unroll
          for (int sixteen = 0; sixteen < 2; sixteen++) {
            int s[4] = {}, base = run * 8 + sixteen * 4 + t;
            mma_s8_half(s, tile.w[lane.output][base], tile.w[lane.output + 8][base], tile.x[j * 8 + g][base]);
#pragma unroll
            for (int i = 0; i < 4; i++) inner[j][i] += tile.scales[lane.output + i / 2 * 8][2 * run + sixteen] * s[i];
          }
        }
      }
      if (half == 1) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int o = lane.output + i / 2 * 8, r = j * 8 + lane.row + i % 2;
          float v = F::MINIMUM ? fmaf(float(inner[j][i]), tile.d[o][0], -(float(low[j][i]) * tile.m[o][0])) : float(inner[j][i]) * tile.d[o][0];
          acc[j][i] = fmaf(v, tile.da[r][0], acc[j][i]);
        }
      }
    }
    __syncthreads();
  }
  store<F>(acc, lane, out, out_stride, first, n, first_row, rows);
}

#define KERNEL_OF(name, type, tiles)                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(128) name(const uint8_t* w, const signed char* q, const float* da, const int* sums, float* out,          \
                                                         long long out_stride, int n, int k, int rows) {                                               \
    tiles<type>(w, q, da, sums, out, out_stride, n, k, rows);                                                                                          \
  }
KERNEL_OF(mul_tile_q8_0, Q8_0, tile_of_32)
KERNEL_OF(mul_tile_q4_0, Q4_0, tile_of_32)
KERNEL_OF(mul_tile_q4_1, Q4_1, tile_of_32)
KERNEL_OF(mul_tile_q5_0, Q5_0, tile_of_32)
KERNEL_OF(mul_tile_q5_1, Q5_1, tile_of_32)
KERNEL_OF(mul_tile_mxfp4, MXFP4, tile_of_32)
KERNEL_OF(mul_tile_q4_k, Q4_K, tile_of_256)
KERNEL_OF(mul_tile_q5_k, Q5_K, tile_of_256)
KERNEL_OF(mul_tile_q6_k, Q6_K, tile_of_256)
