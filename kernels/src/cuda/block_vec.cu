// Products of few rows with weights of block types: mul_mat and mul_mat_id in decoding.
//
// Order of summation: that of kernels/src/cpu/matmul.rs, with the same bits. Each output is one chain over the blocks in ascending order from +0.0; the sums of
// products within a block are integers, so how threads share them changes nothing. block_tile.cu has the same order, so a row's result
// depends neither on the number of rows nor on which of the two computes it.
//
// mul_vec_TYPE_ROWS(w, q, da, sums, out, out_stride, n, k, rows, further, ids, order, experts, used, per_token, bad, scales):
//   w      weights [n, k] as in GGUF, at any address; of `experts` such matrices, close together, where `ids` is given
//   q, da, sums   activations as quantize.cu makes them for the type, q at a multiple of 16; sums are made here of q
//   out    f32, row r at out + r · out_stride
//   further   without ids, up to two more matrices [n, k] whose results are close together; gridDim.x is then the sum of theirs
//   ids    null, or i32 [rows]: the expert of each row (−1 is the last one); one out of range is reported, and its row is zeros. Row r
//          then reads activation r / used · per_token + r % used · (per_token > 1): `per_token` is 1 (a token's experts share one) or `used`
//   scales what outputs are multiplied with (scales.cuh), of which there are none side by side
//   order  null, or where there are ids groups of ROWS rows that have one expert, −1 for none (experts.cu); a group whose first is none is empty
// Blocks of 128 threads. ROWS is 1 or 4: rows that share one reading of the weights (4 with ids only in an order). gridDim.x = ⌈n / 8⌉, gridDim.y = ⌈rows / ROWS⌉, or
// groups.
//
// A warp has every fourth chunk of k, of all eight outputs, so that it reads activations once for them. Weights are on their way while others are computed with: a warp's
// lanes copy those of two outputs at a time, some such pairs ahead. Its terms go to shared memory, and when all warps have done a chunk each (a panel), one of them has the chains.
#include "block_lanes.cuh"
#include "chosen.cuh"
#include "scales.cuh"

constexpr int WARPS = 4, OUTPUTS = 8, PAIRS = OUTPUTS / 2;

/// What is staged of a type's weights. Blocks are those of a scale.
template <class F, int ROWS> struct Cut {
  static constexpr bool LARGE = F::LEN == 256, MINIMA = !LARGE && F::MINIMUM;
  /// Blocks that a warp takes at a time, and those between two rounds of chains.
  static constexpr int CHUNK = LARGE ? 4 : F::LEN == 16 && ROWS == 1 ? 64 : 32, PANEL = WARPS * CHUNK;
  /// Of an output, with up to 15 bytes before.
  static constexpr int BYTES = (CHUNK * F::BYTES + 15 + 15) / 16 * 16;
  /// Pairs of outputs that a warp has at once: as many as leave room for blocks side by side.
  static constexpr int AHEAD = !LARGE && (BYTES > 1000 || (ROWS > 1 && MINIMA)) ? 3 : 4;
  /// Words of a warp, and one after the end that is read and not used.
  static constexpr int STAGE = AHEAD * 2 * BYTES / 4 + 4;
};

/// What chains are made of. To an output is added `v` times `d`, and then `s` times `m` in types with a minimum; of blocks of 256 `v` times `s`.
template <class F, int ROWS> struct Terms {
  typedef Cut<F, ROWS> C;
  // Lines begin in different banks, at multiples of four numbers.
  static constexpr int LINE = C::PANEL + 4;
  float v[OUTPUTS * ROWS][LINE];
  float d[C::LARGE ? 1 : OUTPUTS][C::LARGE ? 4 : LINE];
  float m[C::MINIMA ? OUTPUTS : 1][C::MINIMA ? LINE : 4];
  float s[C::LARGE || C::MINIMA ? ROWS : 1][C::LARGE || C::MINIMA ? LINE : 4];

  /// Of an output's line, for a row.
  __device__ __forceinline__ void add(float& acc, int output, int r, int b) const {
    if (C::LARGE) {
      acc = fmaf(v[output * ROWS + r][b], s[r][b], acc);
    } else {
      acc = fmaf(v[output * ROWS + r][b], d[output][b], acc);
      if (C::MINIMA) acc = fmaf(s[r][b], m[output][b], acc);
    }
  }
  /// The same of four, from a multiple of four on.
  __device__ __forceinline__ void add_four(float& acc, int output, int r, int b) const {
    auto four = [&](const float* from) { return *reinterpret_cast<const float4*>(from + b); };
    float4 x = four(v[output * ROWS + r]), y = four(C::LARGE ? s[r] : d[output]), z = {}, w = {};
    if (C::MINIMA) z = four(s[r]), w = four(m[output]);
    acc = fmaf(x.x, y.x, acc);
    if (C::MINIMA) acc = fmaf(z.x, w.x, acc);
    acc = fmaf(x.y, y.y, acc);
    if (C::MINIMA) acc = fmaf(z.y, w.y, acc);
    acc = fmaf(x.z, y.z, acc);
    if (C::MINIMA) acc = fmaf(z.z, w.z, acc);
    acc = fmaf(x.w, y.w, acc);
    if (C::MINIMA) acc = fmaf(z.w, w.w, acc);
  }
};

/// Bytes of shared memory of a block of threads, and how many are side by side on a multiprocessor with 228 KB, of which each takes one more, and as many registers as a thread may have.
template <class F, int ROWS> constexpr int SHARED = int(sizeof(Terms<F, ROWS>)) + WARPS * Cut<F, ROWS>::STAGE * 4 + 64;
template <class F, int ROWS> constexpr int REGISTERS = ROWS > 1 ? F::BYTES == Q4_K::BYTES || F::BYTES == Q5_0::BYTES ? 96 : 128 : Cut<F, 1>::MINIMA ? 96 : (F::LEN == 32 && F::BYTES <= 18) || (F::LEN == 256 && F::MINIMUM) ? 72 : 80;
template <class F, int ROWS> constexpr int SIDE_BY_SIDE = (228 << 10) / (SHARED<F, ROWS> + 1024) < 512 / REGISTERS<F, ROWS> ? (228 << 10) / (SHARED<F, ROWS> + 1024) : 512 / REGISTERS<F, ROWS>;

struct Activations {
  const signed char* q;
  const float* da;
  int k;
};

/// A block's weights: rows of `row_bytes`, so many of them. `low` is how far the first one begins behind a multiple of sixteen, `mine` where that begins which a lane copies of the
/// first two. `whole`: sixteens with any of the matrix' bytes are within it. `even`: rows begin equally far behind a multiple of sixteen. `steady`: both.
struct Weights {
  const uint8_t* mine;
  unsigned low, row_bytes;
  int outputs;
  bool whole, even, steady;
  /// How far behind a multiple of sixteen bytes begin.
  __device__ __forceinline__ unsigned skip(int output, unsigned byte) const { return (low + output * row_bytes + byte) % 16; }
};

/// What a warp copies of a chunk: a pair of outputs at a time, half of its lanes one of them. BYTES is a chunk's, STAGED what there is room for.
template <int BYTES, int STAGED> struct Source {
  unsigned byte;
  /// Of the first output from the lane's first sixteen on, and how many bytes it has there, 0 or fewer if none.
  const uint8_t* from;
  int left;

  DEVICE int half() { return threadIdx.x % 32 / 16; }
  DEVICE int at() { return threadIdx.x % 16 * 16; }
  __device__ __forceinline__ void begin(const Weights& w, int chunk, bool some) {
    byte = some ? unsigned(chunk) * BYTES : w.row_bytes;
    size_t place = reinterpret_cast<size_t>(w.mine + byte);
    from = reinterpret_cast<const uint8_t*>(place & ~size_t(15));
    keep(from);
    left = some ? int(unsigned(place) % 16) + int(min(unsigned(BYTES), w.row_bytes - byte)) - at() : 0;
  }
  /// Where `w.steady`.
  __device__ __forceinline__ void bring(const Weights& w, int output, uint32_t* to) const {
    int mine = output + half() < w.outputs ? left : 0;
    const uint8_t* place = from + size_t(unsigned(output)) * w.row_bytes;
    to += (half() * STAGED + at()) / 4;
#pragma unroll
    for (int i = 0; i < STAGED; i += 256) copy_16_if(i < mine, to + i / 4, place + i);
  }
  /// Where a pair's bytes have a place of their own, or not all that is around them is the matrix'.
  __device__ __forceinline__ void unequal(const Weights& w, int output, uint32_t* to) const {
    if (output + half() >= w.outputs || byte >= w.row_bytes) return;
    to += (half() * STAGED + at()) / 4;
    size_t place = reinterpret_cast<size_t>(w.mine + size_t(unsigned(output)) * w.row_bytes + byte);
    const uint8_t* from = reinterpret_cast<const uint8_t*>(place & ~size_t(15));
    int skip = int(unsigned(place) % 16), left = skip + int(min(unsigned(BYTES), w.row_bytes - byte)) - at();
#pragma unroll 1
    for (int i = 0; i < left; i += 256) {
      int begin = i + at() == 0 && !w.whole ? skip : 0, end = w.whole ? 16 : min(16, left - i);
      if (end - begin == 16) copy_16(to + i / 4, from + i);
#pragma unroll 1
      for (int j = end - begin == 16 ? end : begin; j < end; j++) reinterpret_cast<uint8_t*>(to)[i + j] = from[i + j];
    }
  }
};

/// What a warp has of activations, which is one chunk of blocks: a block per lane, of 64 numbers one or two runs, of 256 an eighth.
template <class F, int ROWS> struct Chunk {
  typedef Terms<F, ROWS> T;
  static constexpr int EACH = Cut<F, ROWS>::CHUNK / 32;
  Held<F> held[ROWS][EACH];

  __device__ __forceinline__ void load(const Activations& x, const int (&rows)[ROWS], int first, int count) {
    int begin = threadIdx.x % 32 * EACH;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        held[r][e] = {};
        if (begin < count && rows[r] >= 0) {
          unsigned at = unsigned(first + begin + e) * F::LEN;
          Held<F>::load(held[r][e], x.q + size_t(rows[r]) * x.k, x.da + size_t(rows[r]) * (unsigned(x.k) / 32), at, at / 32);
        }
      }
    }
  }
  __device__ __forceinline__ void prepare(Terms<F, ROWS>& terms, int place) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (F::MINIMUM) terms.s[r][place + threadIdx.x % 32] = float(held[r][0].sum()) * held[r][0].da;
#pragma unroll
      for (int e = 0; e < EACH; e++) held[r][e].prepare();
    }
  }
  /// Of outputs `output` and the next one.
  __device__ __forceinline__ void pair(const Weights& w, int output, unsigned byte, const uint32_t* staged, int apart, int, Terms<F, ROWS>& terms, int place) {
    int begin = threadIdx.x % 32 * EACH, at = place + begin;
    unsigned mine = (F::LEN == 16 ? begin / 4 * 4 : begin) * F::BYTES;
    float *d = &terms.d[output][at], *m = &terms.m[F::MINIMUM ? output : 0][F::MINIMUM ? at : 0], *v = &terms.v[output * ROWS][at];
    if (w.even) {
      mine += w.skip(0, byte);
#pragma unroll
      for (int i = 0; i < 2; i++) one(staged + i * apart / 4, mine, d + i * T::LINE, m + i * T::LINE, v + i * ROWS * T::LINE);
    } else {
#pragma unroll 1
      for (int i = 0; i < 2; i++) one(staged + i * apart / 4, w.skip(output + i, byte) + mine, d + i * T::LINE, m + i * T::LINE, v + i * ROWS * T::LINE);
    }
  }
  __device__ __forceinline__ void one(const uint32_t* staged, unsigned at, float* to_d, float* to_m, float* v) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      uint32_t words[Run<F>::WORDS];
      float d, m;
      Run<F>::unpack(staged, at, threadIdx.x * EACH % 4 + e, words, d, m);
      to_d[e] = d;
      if (F::MINIMUM) to_m[e] = m;
#pragma unroll
      for (int r = 0; r < ROWS; r++) v[r * T::LINE + e] = held[r][e].term(words);
    }
  }
};

/// Eight lanes per block.
template <class F, int ROWS> struct LargeChunk {
  typename Eighth<F>::Held held[ROWS];
  /// Of a row by itself: sums of pairs and fours of outputs that are done in part; and the scales of the lane's own output.
  int two[2], four[2];
  uint32_t head;

  __device__ __forceinline__ void load(const Activations& x, const int (&rows)[ROWS], int first, int count) {
    int block = threadIdx.x % 32 / 8;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      held[r] = {};
      if (block < count && rows[r] >= 0) {
        held[r].load(x.q + size_t(rows[r]) * x.k + unsigned(first + block) * 256);
        held[r].da = x.da[size_t(rows[r]) * (unsigned(x.k) / 256) + first + block];
      }
    }
  }
  __device__ __forceinline__ void prepare(Terms<F, ROWS>& terms, int place) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (threadIdx.x % 8 == 0) terms.s[r][place + threadIdx.x % 32 / 8] = held[r].da;
      held[r].prepare();
    }
  }
  __device__ __forceinline__ void pair(const Weights& w, int output, unsigned byte, const uint32_t* staged, int apart, int pair, Terms<F, ROWS>& terms, int place) {
    int t = threadIdx.x % 8, block = threadIdx.x % 32 / 8;
    int inner[2 * ROWS], total[2 * ROWS] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      unsigned skip = w.skip(output + i, byte);
      Eighth<F> mine;
      mine.unpack(staged, i * apart + skip + block * F::BYTES, skip == 0);
      // The lane that ends up with the output.
      if (t / ROWS == (ROWS == 1 ? output + i : i)) head = mine.head;
#pragma unroll
      for (int r = 0; r < ROWS; r++) mine.products(held[r], inner[i * ROWS + r], total[i * ROWS + r]);
    }
    auto sum = [&](const int (&of)[2 * ROWS], int product) {
      if constexpr (ROWS == 1) {
        int sum = halved(of[0], of[1], 1);
        if (pair % 2 == 0) return two[product] = sum;
        sum = halved(two[product], sum, 2);
        return pair == 1 ? four[product] = sum : halved(four[product], sum, 4);
      } else {
        return halved(halved(halved(of[0], of[1], 1), halved(of[2], of[3], 1), 2), halved(halved(of[4], of[5], 1), halved(of[6], of[7], 1), 2), 4);
      }
    };
    int a = sum(inner, 0), b = Eighth<F>::PRODUCTS > 1 ? sum(total, 1) : 0;
    if (ROWS > 1 || pair == PAIRS - 1) terms.v[(ROWS > 1 ? output * ROWS : 0) + t][place + block] = Eighth<F>::term(head, a, b);
  }
};
template <int ROWS> struct Chunk<Q4_K, ROWS> : LargeChunk<Q4_K, ROWS> {};
template <int ROWS> struct Chunk<Q5_K, ROWS> : LargeChunk<Q5_K, ROWS> {};
template <int ROWS> struct Chunk<Q6_K, ROWS> : LargeChunk<Q6_K, ROWS> {};

/// What rows_of_block gives where a block has one row, of each thread by itself.
DEVICE bool row_of_block(int& from, int& to, int rows, const int* ids, const int* order, int used, int per_token) {
  to = int(blockIdx.y);
  if (order) to = order[to];
  else if (to >= rows) to = -1;
  from = to;
  if (ids && to >= 0) from = to / used * per_token + (per_token > 1 ? to % used : 0);
  return to >= 0;
}
template <int ROWS> DEVICE int (&either(int (&many)[ROWS], int (&one)[1]))[ROWS] {
  if constexpr (ROWS == 1) return one;
  else return many;
}

template <class F, int ROWS>
DEVICE void few_rows(const uint8_t* w, const Activations& x, float* out, long long out_stride, int n, int rows, const Further& further, const int* ids, const int* order, int experts, int used,
                     int per_token, word64* bad, const Scales& scales) {
  typedef Cut<F, ROWS> C;
  static_assert(ROWS == 1 || ROWS * 2 == 8, "as many results of a pair as lanes have a block of 256");
  __shared__ __align__(16) Terms<F, ROWS> terms;
  __shared__ __align__(16) uint32_t staged[WARPS][C::STAGE];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = int(unsigned(x.k) / F::LEN);
  int number, first_output = matrix_of(further, OUTPUTS, w, out, out_stride, n, number) * OUTPUTS, outputs = min(OUTPUTS, n - first_output);
  size_t row_bytes = size_t(blocks) * F::BYTES;

  // Activation and result of each row; −1 for none.
  __shared__ int from_of_many[ROWS], to_of_many[ROWS];
  int from_of_one[1], to_of_one[1];
  auto &from = either(from_of_many, from_of_one), &to = either(to_of_many, to_of_one);
  if (ROWS == 1 ? !row_of_block(from_of_one[0], to_of_one[0], rows, ids, order, used, per_token) : !rows_of_block(from, to, rows, ids, order, used, per_token)) return;
  bool wrong = !to_expert(w, n * row_bytes, ids, to[0], experts, bad);

  const uint8_t *first = w + size_t(first_output) * row_bytes, *of_lane = first + (lane / 16) * row_bytes + lane % 16 * 16;
  keep(of_lane);
  bool whole = reinterpret_cast<size_t>(w) % 16 == 0 && unsigned(n) * unsigned(row_bytes) % 16 == 0, even = row_bytes % 16 == 0;
  Weights weights = {of_lane, unsigned(reinterpret_cast<size_t>(first)) % 16, unsigned(row_bytes), outputs, whole, even, whole && even};
  uint32_t* stage = staged[warp];
  int chunks = wrong ? 0 : (blocks + C::CHUNK - 1) / C::CHUNK;
  // What is copied next. A group of copies is closed whether or not there are any.
  Source<C::CHUNK * F::BYTES, C::BYTES> source;
  source.begin(weights, warp, warp < chunks);
  auto bring = [&](int pair, int slot) {
    if (source.byte >= weights.row_bytes) {
    } else if (weights.steady) source.bring(weights, 2 * pair, stage + slot * (C::BYTES / 2));
    else source.unequal(weights, 2 * pair, stage + slot * (C::BYTES / 2));
    close_group();
  };
  if (weights.steady) {
#pragma unroll
    for (int i = 0; i < C::AHEAD; i++) source.bring(weights, 2 * i, stage + i * (C::BYTES / 2)), close_group();
  } else {
#pragma unroll 1
    for (int i = 0; i < C::AHEAD; i++) source.unequal(weights, 2 * i, stage + i * (C::BYTES / 2)), close_group();
  }

  Chunk<F, ROWS> mine;
  auto load = [&](int chunk) {
    if (chunk < chunks) mine.load(x, from, chunk * C::CHUNK, min(C::CHUNK, blocks - chunk * C::CHUNK));
  };
  load(warp);

  // The warp that has the chains, not the same one in all blocks of threads, and of its lanes the output and row.
  int output = lane / ROWS, r = lane % ROWS, slot = 0;
  bool chains = warp == int(blockIdx.x % WARPS) && lane < OUTPUTS * ROWS && output < outputs && to[r] >= 0;
  float acc = 0.0f;
  for (int chunk = warp; chunk - warp < chunks; chunk += WARPS) {
    if (chunk < chunks) {
      mine.prepare(terms, warp * C::CHUNK);
      // Of sums over eight outputs all but their parts are known beforehand.
#pragma unroll(C::LARGE && ROWS == 1 ? PAIRS : 1)
      for (int pair = 0; pair < PAIRS; pair++) {
        await_groups<C::AHEAD - 1>();
        __syncwarp();
        mine.pair(weights, 2 * pair, unsigned(chunk) * (C::CHUNK * F::BYTES), stage + slot * (C::BYTES / 2), C::BYTES, pair, terms, warp * C::CHUNK);
        __syncwarp();
        if (pair + C::AHEAD == PAIRS) source.begin(weights, chunk + WARPS, chunk + WARPS < chunks);
        bring((pair + C::AHEAD) % PAIRS, slot);
        slot = slot + 1 == C::AHEAD ? 0 : slot + 1;
      }
    }
    load(chunk + WARPS);
    __syncthreads();
    if (chains) {
      int panel = min(C::PANEL, blocks - (chunk - warp) * C::CHUNK), b = 0;
#pragma unroll 4
      for (; b + 4 <= panel; b += 4) terms.add_four(acc, output, r, b);
      for (; b < panel; b++) terms.add(acc, output, r, b);
    }
    __syncthreads();
  }
  if (!chains) return;
  const float* values = wrong ? nullptr : scales.of(number);
  if (values) to_expert(values, size_t(scales.each), ids, to[0], experts, bad);
  out[to[r] * out_stride + first_output + output] = plain(with_scale(acc, scales, values, first_output + output));
}

#define KERNEL_OF(name, type, count)                                                                                                              \
  extern "C" __global__ void __launch_bounds__(128, SIDE_BY_SIDE<type, count>) name(const uint8_t* w, const signed char* q, const float* da, const int* sums, float* out,     \
                                                         long long out_stride, int n, int k, int rows, Further further, const int* ids,            \
                                                         const int* order, int experts, int used, int per_token, word64* bad, Scales scales) {     \
    Activations x = {q, da, k};                                                                                                              \
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
