// Causal attention over a paged cache, for any mix of prefill and decode rows: the op paged_attention.
//
// Order of summation: that of kernels/src/cpu/ops/attention.rs, with the same bits. A score is one chain over the head's numbers; keys come in tiles of 64,
// counted from the sequence's start, each raising the running maximum once; weights are summed in sixteen lanes; each number of the result is one chain
// over the keys; spans of 512 keys are summed by themselves and added in ascending order. Nothing depends on other rows, nor on which of the two ways is taken:
//
//   attention_whole_TYPE_D   a block of threads has all spans of its heads: where there are rows enough.
//                            Blocks of 256 threads, gridDim = (rows, kv_heads · ⌈heads / kv_heads / 8⌉, 1)
//   attention_spans_TYPE_D   a block has one span and leaves its sums in `records`, f32 [rows, heads, spans, 2 + d]; then attention_add. Decoding.
//                            gridDim = (rows, as above, spans); `spans` = ⌈max_blocks · block_len / 512⌉, or as many as the longest position of these rows needs
//   attention_add            adds the records: blocks of 128 threads, gridDim = (rows, heads, 1)
//
// TYPE is how the cache stores numbers (f32, f16, bf16, q8_0); D is 128 for heads of up to 128 numbers and 256 up to 256. Arguments:
//   queries, out   f32 [rows, heads, d]
//   cache          keys then values, each [blocks, kv_heads, block_len, d]
//   tables         i32 [max_sequences, max_blocks]; sequences, positions i32 [rows]
//   sinks          null, or f32 [heads]: a score that takes part in the softmax and has no value
//   window, soft_cap   0: none
// A row whose sequence or position is out of range is reported and becomes zeros; a wrong block is reported and read as zeros.
#include "common.cuh"

constexpr int THREADS = 256, TILE = 64, SPAN = 512, TILES = SPAN / TILE, QUERIES = 8;

/// Numbers of values that are together in shared memory.
constexpr int STAGED = 4096;

/// Numbers of a head in the cache: one, and eight that are asked for before they are needed.
template <class E> struct Stored {
  static constexpr int LEN = 1, BYTES = sizeof(typename E::Stored), WORDS = 8 * BYTES / 16;
  struct Eight {
    uint4 words[WORDS];
  };
  DEVICE float at(const uint8_t* head, int i) { return E::load(reinterpret_cast<const typename E::Stored*>(head) + i); }
  DEVICE void ask(const uint8_t* head, int i, Eight& eight) {
#pragma unroll
    for (int w = 0; w < WORDS; w++) eight.words[w] = reinterpret_cast<const uint4*>(head + i * BYTES)[w];
  }
  DEVICE void take(const Eight& eight, float (&x)[8]) {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      const uint32_t words[4] = {eight.words[w].x, eight.words[w].y, eight.words[w].z, eight.words[w].w};
#pragma unroll
      for (int i = 0; i < 16 / BYTES; i++) {
        typename E::Stored one;
        if constexpr (BYTES == 4) one = __uint_as_float(words[i]);
        else one = typename E::Stored(words[i / 2] >> i % 2 * 16);
        x[w * (16 / BYTES) + i] = E::load(&one);
      }
    }
  }
};
struct Q8 {
  static constexpr int LEN = 32, BYTES = 34;
  struct Eight {
    uint16_t scale, pairs[4];
  };
  DEVICE float at(const uint8_t* head, int i) {
    const uint8_t* block = head + i / 32 * 34;
    return float(int8_t(block[2 + i % 32])) * half_to_f32(*reinterpret_cast<const uint16_t*>(block));
  }
  DEVICE void ask(const uint8_t* head, int i, Eight& eight) {
    const uint16_t* block = reinterpret_cast<const uint16_t*>(head + i / 32 * 34);
    eight.scale = block[0];
#pragma unroll
    for (int p = 0; p < 4; p++) eight.pairs[p] = block[1 + i % 32 / 2 + p];
  }
  DEVICE void take(const Eight& eight, float (&x)[8]) {
    float scale = half_to_f32(eight.scale);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = float(int8_t(eight.pairs[i / 2] >> i % 2 * 8)) * scale;
  }
};

struct Shape {
  int heads, kv_heads, d, blocks, block_len, max_sequences, max_blocks, window;
};

/// First and last key of a row; says what is wrong with it.
DEVICE bool range_of(const Shape& s, int sequence, int position, int& first, int& last, word64* bad, bool speaks) {
  long long tokens = (long long)s.max_blocks * s.block_len, slots = (long long)s.blocks * s.block_len;
  if (sequence < 0 || sequence >= s.max_sequences) {
    if (speaks) report(bad, sequence, word64(max(s.max_sequences, 1)));
    return false;
  }
  if (position < 0 || position >= tokens) {
    if (speaks) report(bad, position, word64(max(tokens, 1ll)));
    return false;
  }
  last = position;
  first = s.window > 0 && last + 1 > s.window ? last + 1 - s.window : 0;
  // More keys than the cache has are blocks named twice: work that no memory bounds.
  if (last - first >= slots) {
    if (speaks) report(bad, position, word64(max(first + slots, 1ll)));
    return false;
  }
  return true;
}

/// What exponents are taken against: no score at all, or only −∞, gives weights of 0 and not NaN.
DEVICE float reference(float highest) { return highest == -INFINITY_F ? 0.0f : highest; }

/// Adds a sum to what there is. `old` and `new_` are what both are multiplied by.
DEVICE void join(float& highest, float& total, float next, float next_total, float& old, float& new_) {
  float top = next > highest ? next : highest;
  old = exp_f32(highest - reference(top));
  new_ = exp_f32(next - reference(top));
  highest = top;
  total = fmaf(next_total, new_, total * old);
}

/// The result: the sum times 1 / Σ weights, a sink among them.
DEVICE float finished(float value, float highest, float total, const float* sinks, int head) {
  if (sinks) {
    float old, new_;
    join(highest, total, sinks[head], 1.0f, old, new_);
    value *= old;
  }
  return plain(value * (1.0f / total));
}

/// What the threads of a block share.
template <int D> struct Room {
  float scores[QUERIES][SPAN];
  __align__(16) float query[QUERIES][D];
  __align__(16) float staged[STAGED];
  long long places[SPAN];
  float tops[QUERIES][TILES], shrinks[QUERIES][TILES];
  // Of all spans so far, and what the sums of these and of the last one are multiplied by.
  float highests[QUERIES], totals[QUERIES], olds[QUERIES], news[QUERIES];
};

/// Scores of four queries with a key, as far as there is one; `place` is below 0 where it has zeros.
template <class E, int D, bool SPANS> DEVICE void score_key(const uint8_t* cache, long long place, const float (&query)[QUERIES][D], int first, int d, bool wide, float (&score)[4]) {
  // As many as registers are there for.
  constexpr int AT_ONCE = sizeof(typename E::Eight) > 16 ? SPANS ? 4 : 1 : SPANS ? 8 : 2;
  if (!wide) {
#pragma unroll 1
    for (int i = 0; i < d; i++) {
      float k = place >= 0 ? E::at(cache + place, i) : 0.0f;
#pragma unroll
      for (int j = 0; j < 4; j++) score[j] = fmaf(query[first + j][i], k, score[j]);
    }
    return;
  }
#pragma unroll 1
  for (int start = 0; start < d; start += 8 * AT_ONCE) {
    typename E::Eight eights[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      eights[u] = {};
      if (place >= 0 && start + 8 * u < d) E::ask(cache + place, start + 8 * u, eights[u]);
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      if (start + 8 * u >= d) break;
      float k[8];
      E::take(eights[u], k);
#pragma unroll
      for (int i = 0; i < 8; i += 4)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          float4 q = *reinterpret_cast<const float4*>(&query[first + j][start + 8 * u + i]);
          score[j] = fmaf(q.x, k[i], score[j]);
          score[j] = fmaf(q.y, k[i + 1], score[j]);
          score[j] = fmaf(q.z, k[i + 2], score[j]);
          score[j] = fmaf(q.w, k[i + 3], score[j]);
        }
    }
  }
}

/// What comes of the values of a span while others are used: eights of a thread, of one stage after another.
template <class E, int D> struct Coming {
  static constexpr int KEYS = STAGED / D, EACH = STAGED / 8 / THREADS;

  /// Asks for keys `key` … of the span.
  DEVICE void ask(typename E::Eight (&eights)[EACH], const uint8_t* values, const long long* places, int key, int to, int d) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      int at = e * THREADS + int(threadIdx.x), k = key + at / (D / 8), i = at % (D / 8) * 8;
      eights[e] = {};
      if (k < to && i < d && places[k] >= 0) E::ask(values + places[k], i, eights[e]);
    }
  }
  DEVICE void put(const typename E::Eight (&eights)[EACH], float* staged) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      int at = e * THREADS + int(threadIdx.x);
      float x[8];
      E::take(eights[e], x);
      *reinterpret_cast<float4*>(staged + at * 8) = make_float4(x[0], x[1], x[2], x[3]);
      *reinterpret_cast<float4*>(staged + at * 8 + 4) = make_float4(x[4], x[5], x[6], x[7]);
    }
  }
};

/// Weighted values of keys `from` … `to` of a span, of the thread's two numbers of the head, for QN queries from `first` on.
template <class E, int D, int QN, bool SPANS>
DEVICE void weigh(Room<D>& room, const uint8_t* values, int from, int to, int d, bool wide, int first, float (*sums)[2]) {
  typedef Coming<E, D> Coming;
  // A block that has a span by itself has few beside it to wait with.
  constexpr int KEYS = Coming::KEYS, AHEAD = !SPANS ? 1 : sizeof(typename E::Eight) > 16 ? 2 : 4, UNROLLED = SPANS ? 8 : 4;
  int pair = int(threadIdx.x) % (D / 2) * 2, stages = (to + KEYS - 1) / KEYS, stage = from / KEYS;
  typename E::Eight eights[AHEAD][Coming::EACH];
  if (wide) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++) Coming::ask(eights[a], values, room.places, (stage + a) * KEYS, to, d);
  }
#pragma unroll 1
  for (; stage < stages; stage += AHEAD) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      int begin = (stage + a) * KEYS;
      if (begin >= to) break;
      __syncthreads();
      if (wide) {
        Coming::put(eights[a], room.staged);
        Coming::ask(eights[a], values, room.places, begin + AHEAD * KEYS, to, d);
      } else {
#pragma unroll 1
        for (int e = threadIdx.x; e < STAGED; e += THREADS) {
          int k = begin + e / D, i = e % D;
          room.staged[e] = k < to && i < d && room.places[k] >= 0 ? E::at(values + room.places[k], i) : 0.0f;
        }
      }
      __syncthreads();
      // Where a tile begins, or what is looked at.
      int k = max(from, begin), end = min(to, begin + KEYS);
      if (k == from || k % TILE == 0) {
#pragma unroll
        for (int j = 0; j < QN; j++) sums[j][0] *= room.shrinks[first + j][k / TILE], sums[j][1] *= room.shrinks[first + j][k / TILE];
      }
#pragma unroll UNROLLED
      for (; k < end; k++) {
        float2 v = *reinterpret_cast<const float2*>(room.staged + (k - begin) * D + pair);
#pragma unroll
        for (int j = 0; j < QN; j++) {
          float weight = room.scores[first + j][k];
          sums[j][0] = fmaf(weight, v.x, sums[j][0]);
          sums[j][1] = fmaf(weight, v.y, sums[j][1]);
        }
      }
    }
  }
}

template <class E, int D, bool SPANS>
DEVICE void attend(const float* queries, const uint8_t* cache, const int* tables, const int* sequences, const int* positions, const float* sinks, float* out, float* records,
                   const Shape& s, float scale, float soft_cap, int spans, word64* bad) {
  // Threads have two numbers of the head, and some of the queries: half as many where only half of them are any.
  constexpr int QN = QUERIES / (THREADS / (D / 2));
  __shared__ Room<D> room;
  int tid = threadIdx.x, row = blockIdx.x, d = s.d, group = s.heads / s.kv_heads, chunks = (group + QUERIES - 1) / QUERIES;
  int kv_head = blockIdx.y / chunks, chunk = blockIdx.y % chunks;
  int head = kv_head * group + chunk * QUERIES, count = min(QUERIES, group - chunk * QUERIES);
  // Read once: what was checked is what is used.
  int sequence = sequences[row], position = positions[row], first = 0, last = 0;
  if (!range_of(s, sequence, position, first, last, bad, tid == 0 && blockIdx.y == 0 && blockIdx.z == 0)) {
    if (!SPANS)
      for (int i = tid; i < count * d; i += THREADS) out[(size_t(row) * s.heads + head) * d + i] = 0.0f;
    return;
  }
  int start = SPANS ? max(int(blockIdx.z), first / SPAN) : first / SPAN, end = SPANS ? min(int(blockIdx.z), last / SPAN) + 1 : last / SPAN + 1;
  if (start >= end) return;
  const int* table = tables + size_t(sequence) * s.max_blocks;
  size_t head_bytes = size_t(d / E::LEN) * E::BYTES;
  const uint8_t* values = cache + size_t(s.blocks) * s.kv_heads * s.block_len * head_bytes;
  // Rows of whole eights at multiples of their size.
  bool wide = d % 8 == 0 && (E::LEN > 1 || reinterpret_cast<size_t>(cache) % 16 == 0), few = count <= QUERIES / 2;
  for (int i = tid; i < QUERIES * d; i += THREADS) room.query[i / d][i % d] = i / d < count ? queries[(size_t(row) * s.heads + head) * d + i] : 0.0f;

  // Sums of all spans so far, and, of the first threads, a lane of weights: query tid / 16, keys of remainder tid % 16.
  float all[QN][2] = {};
  int q = tid / 16, lane = tid % 16, looked = few ? QUERIES / 2 : QUERIES, own = few ? QN / 2 : QN, pair = tid % (D / 2) * 2, mine = tid / (D / 2) * own;
  size_t step = size_t(spans) * (2 + d);
#pragma unroll 1
  for (int span = start; span < end; span++) {
    float* record = records + (size_t(row) * s.heads + head) * step + size_t(span) * (2 + d);
    float sums[QN][2] = {};
    int from = max(first - span * SPAN, 0), to = min(last + 1 - span * SPAN, SPAN);
    __syncthreads();
#pragma unroll 1
    for (int key = threadIdx.x; key < SPAN; key += THREADS) {
      long long place = -1;
      if (key >= from && key < to) {
        int number = span * SPAN + key, block = table[number / s.block_len];
        if (block >= 0 && block < s.blocks) {
          place = (((long long)block * s.kv_heads + kv_head) * s.block_len + number % s.block_len) * (long long)head_bytes;
        } else {
          report(bad, block, word64(max(s.blocks, 1)));
        }
      }
      room.places[key] = place;
    }
    __syncthreads();
    // Scores: a key per thread, with half of the queries.
#pragma unroll 1
    for (int task = threadIdx.x; task < SPAN * looked / 4; task += THREADS) {
      int key = task % SPAN, half = task / SPAN * (QUERIES / 2);
      bool is_one = key >= from && key < to;
      float score[4] = {};
      if (is_one) score_key<E, D, SPANS>(cache, room.places[key], room.query, half, d, wide, score);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float v = score[j] * scale;
        if (soft_cap > 0.0f) v = tanh_f32(v / soft_cap) * soft_cap;
        room.scores[half + j][key] = is_one ? v : -INFINITY_F;
      }
    }
    __syncthreads();
    // The highest of each tile; then weights, against the highest so far.
#pragma unroll 1
    for (int i = threadIdx.x / 16; i < looked * TILES; i += THREADS / 16) {
      const float* tile = room.scores[i / TILES] + i % TILES * TILE + threadIdx.x % 16;
      float most = -INFINITY_F;
#pragma unroll
      for (int w = 0; w < TILE; w += 16) most = larger(most, tile[w]);
      for (int distance = 8; distance > 0; distance >>= 1) most = larger(most, __shfl_xor_sync(ALL, most, distance));
      if (lane == 0) room.tops[i / TILES][i % TILES] = most;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x / 16; i < looked * TILES; i += THREADS / 16) {
      float before = -INFINITY_F, now = -INFINITY_F;
#pragma unroll 1
      for (int t = from / TILE; t <= i % TILES; t++) {
        float most = room.tops[i / TILES][t];
        before = now, now = most > before ? most : before;
      }
      float against = reference(now);
      float* tile = room.scores[i / TILES] + i % TILES * TILE + threadIdx.x % 16;
#pragma unroll
      for (int w = 0; w < TILE; w += 16) tile[w] = exp_f32(tile[w] - against);
      if (lane == 0) room.shrinks[i / TILES][i % TILES] = exp_f32(before - against);
    }
    __syncthreads();
    if (q < looked) {
      float highest = -INFINITY_F, total = 0.0f;
#pragma unroll 1
      for (int t = from / TILE; t * TILE < to; t++) {
        float most = room.tops[q][t];
        highest = most > highest ? most : highest;
        total *= room.shrinks[q][t];
#pragma unroll
        for (int w = 0; w < TILE; w += 16) total += room.scores[q][t * TILE + w + lane];
      }
      for (int distance = 8; distance > 0; distance >>= 1) total += __shfl_xor_sync(ALL, total, distance);
      if (SPANS) {
        if (lane == 0 && q < count) record[q * step] = highest, record[q * step + 1] = total;
      } else if (lane == 0) {
        float old = 0.0f, new_ = 1.0f, so_far = highest, of_all = total;
        if (span > start) {
          so_far = room.highests[q], of_all = room.totals[q];
          join(so_far, of_all, highest, total, old, new_);
        }
        room.highests[q] = so_far, room.totals[q] = of_all, room.olds[q] = old, room.news[q] = new_;
      }
    }
    if (few) weigh<E, D, QN / 2, SPANS>(room, values, from, to, d, wide, mine, sums);
    else weigh<E, D, QN, SPANS>(room, values, from, to, d, wide, mine, sums);
#pragma unroll
    for (int j = 0; j < QN; j++)
#pragma unroll
      for (int p = 0; p < 2; p++)
        if (j >= own) continue;
        else if (!SPANS) all[j][p] = span == start ? sums[j][p] : fmaf(sums[j][p], room.news[mine + j], all[j][p] * room.olds[mine + j]);
        else if (mine + j < count && pair + p < d) record[(mine + j) * step + 2 + pair + p] = sums[j][p];
  }
  if constexpr (!SPANS) {
#pragma unroll
    for (int j = 0; j < QN; j++)
#pragma unroll
      for (int p = 0; p < 2; p++)
        if (j < own && mine + j < count && pair + p < d)
          out[(size_t(row) * s.heads + head + mine + j) * d + pair + p] = finished(all[j][p], room.highests[mine + j], room.totals[mine + j], sinks, head + mine + j);
  }
}

/// Adds the sums of spans.
extern "C" __global__ void __launch_bounds__(128) attention_add(const float* records, const int* sequences, const int* positions, const float* sinks, float* out, int heads, int d,
                                                               int blocks, int block_len, int max_sequences, int max_blocks, int window, int spans) {
  Shape s = {heads, 1, d, blocks, block_len, max_sequences, max_blocks, window};
  int row = blockIdx.x, head = blockIdx.y, first = 0, last = 0;
  size_t at = (size_t(row) * heads + head) * d;
  bool some = range_of(s, sequences[row], positions[row], first, last, nullptr, false);
  const float* record = records + (size_t(row) * heads + head) * spans * (2 + d);
  for (int i = threadIdx.x; i < d; i += blockDim.x) {
    if (!some || last / SPAN >= spans) {
      out[(size_t(row) * s.heads + head) * d + i] = 0.0f;
      continue;
    }
    const float* next = record + size_t(first / SPAN) * (2 + d);
    float highest = next[0], total = next[1], value = next[2 + i];
    for (int span = first / SPAN + 1; span <= last / SPAN; span++) {
      next += 2 + d;
      float old, new_;
      join(highest, total, next[0], next[1], old, new_);
      value = fmaf(next[2 + i], new_, value * old);
    }
    out[at + i] = finished(value, highest, total, sinks, head);
  }
}

#define KERNEL_OF(name, type, d_most, spans_apart)                                                                                                              \
  extern "C" __global__ void __launch_bounds__(256, spans_apart ? 1 : 2) name(const float* queries, const uint8_t* cache, const int* tables, const int* sequences, const int* positions, \
                                                         const float* sinks, float* out, float* records, int heads, int kv_heads, int d, int blocks,         \
                                                         int block_len, int max_sequences, int max_blocks, float scale, int window, float soft_cap, int spans,  \
                                                         word64* bad) {                                                                                         \
    Shape s = {heads, kv_heads, d, blocks, block_len, max_sequences, max_blocks, window};                                                                       \
    attend<type, d_most, spans_apart>(queries, cache, tables, sequences, positions, sinks, out, records, s, scale, soft_cap, spans, bad);                       \
  }
KERNEL_OF(attention_whole_f32_128, Stored<F32>, 128, false)
KERNEL_OF(attention_whole_f32_256, Stored<F32>, 256, false)
KERNEL_OF(attention_spans_f32_128, Stored<F32>, 128, true)
KERNEL_OF(attention_spans_f32_256, Stored<F32>, 256, true)
KERNEL_OF(attention_whole_f16_128, Stored<F16>, 128, false)
KERNEL_OF(attention_whole_f16_256, Stored<F16>, 256, false)
KERNEL_OF(attention_spans_f16_128, Stored<F16>, 128, true)
KERNEL_OF(attention_spans_f16_256, Stored<F16>, 256, true)
KERNEL_OF(attention_whole_bf16_128, Stored<BF16>, 128, false)
KERNEL_OF(attention_whole_bf16_256, Stored<BF16>, 256, false)
KERNEL_OF(attention_spans_bf16_128, Stored<BF16>, 128, true)
KERNEL_OF(attention_spans_bf16_256, Stored<BF16>, 256, true)
KERNEL_OF(attention_whole_q8_0_128, Q8, 128, false)
KERNEL_OF(attention_whole_q8_0_256, Q8, 256, false)
KERNEL_OF(attention_spans_q8_0_128, Q8, 128, true)
KERNEL_OF(attention_spans_q8_0_256, Q8, 256, true)
