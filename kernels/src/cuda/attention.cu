// Causal attention over a paged cache, for any mix of prefill and decode rows: the op paged_attention.
//
// Order of summation: that of kernels/src/cpu/ops/attention.rs, with the same bits. A score is one chain over the head's numbers; keys come in tiles of 64,
// counted from the sequence's start, each raising the running maximum once; weights are summed in sixteen lanes; each number of the result is one chain
// over the keys; spans of 512 keys are summed by themselves and added in ascending order. Nothing depends on other rows, nor on which of the two ways is taken:
//
//   attention_whole_TYPE_D   a block of threads has all spans of its heads: where there are rows enough.
//                            Blocks of 128 threads, gridDim = (rows, kv_heads · ⌈heads / kv_heads / 8⌉, 1)
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

constexpr int THREADS = 128, TILE = 64, SPAN = 512, QUERIES = 8, SLICE = 32;

/// One number of a head in the cache.
template <class E> struct Stored {
  static constexpr int LEN = 1, BYTES = sizeof(typename E::Stored);
  DEVICE float at(const uint8_t* head, int i) { return E::load(reinterpret_cast<const typename E::Stored*>(head) + i); }
};
struct Q8 {
  static constexpr int LEN = 32, BYTES = 34;
  DEVICE float at(const uint8_t* head, int i) {
    const uint8_t* block = head + i / 32 * 34;
    return float(int8_t(block[2 + i % 32])) * half_to_f32(*reinterpret_cast<const uint16_t*>(block));
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

template <class E, int D, bool SPANS>
DEVICE void attend(const float* queries, const uint8_t* cache, const int* tables, const int* sequences, const int* positions, const float* sinks, float* out, float* records,
                   const Shape& s, float scale, float soft_cap, int spans, word64* bad) {
  constexpr int PARTS = D / THREADS;
  __shared__ float query[QUERIES][D], key_slice[TILE][SLICE + 1], scores[QUERIES][TILE], shrinks[QUERIES], highests[QUERIES], totals[QUERIES];
  __shared__ long long places[TILE];
  int tid = threadIdx.x, row = blockIdx.x, d = s.d, group = s.heads / s.kv_heads, chunks = (group + QUERIES - 1) / QUERIES;
  int kv_head = blockIdx.y / chunks, chunk = blockIdx.y % chunks;
  int head = kv_head * group + chunk * QUERIES, count = min(QUERIES, group - chunk * QUERIES);
  size_t at = (size_t(row) * s.heads + head) * d;
  // Read once: what was checked is what is used.
  int sequence = sequences[row], position = positions[row], first = 0, last = 0;
  if (!range_of(s, sequence, position, first, last, bad, tid == 0 && blockIdx.y == 0 && blockIdx.z == 0)) {
    if (!SPANS)
      for (int i = tid; i < count * d; i += THREADS) out[at + i] = 0.0f;
    return;
  }
  int start = SPANS ? max(int(blockIdx.z), first / SPAN) : first / SPAN, end = SPANS ? min(int(blockIdx.z), last / SPAN) + 1 : last / SPAN + 1;
  if (start >= end) return;
  const int* table = tables + size_t(sequence) * s.max_blocks;
  size_t head_bytes = size_t(d / E::LEN) * E::BYTES;
  const uint8_t* values = cache + size_t(s.blocks) * s.kv_heads * s.block_len * head_bytes;
  for (int i = tid; i < QUERIES * d; i += THREADS) query[i / d][i % d] = i / d < count ? queries[at + i] : 0.0f;

  // Sums of all spans so far, and the thread's lane of weights: query tid / 16, keys of remainder tid % 16.
  float all[PARTS][QUERIES] = {}, all_highest = -INFINITY_F, all_total = 0.0f;
  int q = tid / 16, lane = tid % 16;
#pragma unroll 1
  for (int span = start; span < end; span++) {
    float sums[PARTS][QUERIES] = {}, highest = -INFINITY_F, total = 0.0f;
#pragma unroll 1
    for (int tile = span * SPAN; tile < (span + 1) * SPAN; tile += TILE) {
      int from = max(first - tile, 0), to = min(last + 1 - tile, TILE);
      if (from >= to) continue;
      __syncthreads();
      if (tid < TILE) {
        long long place = -1;
        if (tid >= from && tid < to) {
          int key = tile + tid, block = table[key / s.block_len];
          if (block >= 0 && block < s.blocks) {
            place = (((long long)block * s.kv_heads + kv_head) * s.block_len + key % s.block_len) * (long long)head_bytes;
          } else {
            report(bad, block, word64(max(s.blocks, 1)));
          }
        }
        places[tid] = place;
      }
      // Scores: a key per thread, half of the queries each.
      float score[QUERIES / 2] = {};
      int key = tid % TILE, half = tid / TILE * (QUERIES / 2);
#pragma unroll 1
      for (int slice = 0; slice < d; slice += SLICE) {
        __syncthreads();
#pragma unroll 1
        for (int e = tid; e < TILE * SLICE; e += THREADS) {
          int i = slice + e % SLICE;
          long long place = places[e / SLICE];
          key_slice[e / SLICE][e % SLICE] = place >= 0 && i < d ? E::at(cache + place, i) : 0.0f;
        }
        __syncthreads();
        int width = min(SLICE, d - slice);
#pragma unroll 1
        for (int i = 0; i < width; i++) {
          float k = key_slice[key][i];
#pragma unroll
          for (int j = 0; j < QUERIES / 2; j++) score[j] = fmaf(query[half + j][slice + i], k, score[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < QUERIES / 2; j++) {
        float v = score[j] * scale;
        if (soft_cap > 0.0f) v = tanh_f32(v / soft_cap) * soft_cap;
        scores[half + j][key] = key >= from && key < to ? v : -INFINITY_F;
      }
      __syncthreads();
      // Weights.
      float mine[TILE / 16], most = -INFINITY_F;
#pragma unroll
      for (int i = 0; i < TILE / 16; i++) {
        mine[i] = scores[q][lane + 16 * i];
        most = larger(most, mine[i]);
      }
      for (int distance = 8; distance > 0; distance >>= 1) most = larger(most, __shfl_xor_sync(ALL, most, distance));
      float before = highest;
      highest = most > before ? most : before;
      float against = reference(highest), shrink = exp_f32(before - against);
      total *= shrink;
#pragma unroll
      for (int i = 0; i < TILE / 16; i++) {
        float weight = exp_f32(mine[i] - against);
        total += weight;
        scores[q][lane + 16 * i] = weight;
      }
      if (lane == 0) shrinks[q] = shrink;
      __syncthreads();
      // Weighted values: a number of the head per thread.
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        int i = p * THREADS + tid;
        if (i >= d) continue;
#pragma unroll
        for (int j = 0; j < QUERIES; j++) sums[p][j] *= shrinks[j];
#pragma unroll 1
        for (int k = from; k < to; k++) {
          float v = places[k] >= 0 ? E::at(values + places[k], i) : 0.0f;
#pragma unroll
          for (int j = 0; j < QUERIES; j++) sums[p][j] = fmaf(scores[j][k], v, sums[p][j]);
        }
      }
    }
    for (int distance = 8; distance > 0; distance >>= 1) total += __shfl_xor_sync(ALL, total, distance);
    __syncthreads();
    if (SPANS) {
      size_t record = ((size_t(row) * s.heads + head) * spans + span) * (2 + d), step = size_t(spans) * (2 + d);
      if (lane == 0 && q < count) records[record + q * step] = highest, records[record + q * step + 1] = total;
#pragma unroll
      for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int j = 0; j < QUERIES; j++)
          if (j < count && p * THREADS + tid < d) records[record + j * step + 2 + p * THREADS + tid] = sums[p][j];
      return;
    }
    float old = 0.0f, new_ = 1.0f;
    if (span == start) {
      all_highest = highest, all_total = total;
    } else {
      join(all_highest, all_total, highest, total, old, new_);
    }
    if (lane == 0) shrinks[q] = old, highests[q] = new_;
    __syncthreads();
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
      for (int j = 0; j < QUERIES; j++) all[p][j] = span == start ? sums[p][j] : fmaf(sums[p][j], highests[j], all[p][j] * shrinks[j]);
  }
  __syncthreads();
  if (lane == 0) highests[q] = all_highest, totals[q] = all_total;
  __syncthreads();
#pragma unroll
  for (int p = 0; p < PARTS; p++)
#pragma unroll
    for (int j = 0; j < QUERIES; j++)
      if (j < count && p * THREADS + tid < d) out[at + size_t(j) * d + p * THREADS + tid] = finished(all[p][j], highests[j], totals[j], sinks, head + j);
}

/// Adds the sums of spans.
extern "C" __global__ void __launch_bounds__(128) attention_add(const float* records, const int* sequences, const int* positions, const float* sinks, float* out, int heads, int d,
                                                               int blocks, int block_len, int max_sequences, int max_blocks, int window, int spans) {
  Shape s = {heads, 1, d, blocks, block_len, max_sequences, max_blocks, window};
  int row = blockIdx.x, head = blockIdx.y, first = 0, last = 0;
  size_t at = (size_t(row) * heads + head) * d;
  bool some = range_of(s, sequences[row], positions[row], first, last, nullptr, false);
  const float* record = records + (size_t(row) * heads + head) * spans * (2 + d);
  for (int i = threadIdx.x; i < d; i += THREADS) {
    if (!some || last / SPAN >= spans) {
      out[at + i] = 0.0f;
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
  extern "C" __global__ void __launch_bounds__(128, 4) name(const float* queries, const uint8_t* cache, const int* tables, const int* sequences, const int* positions, \
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
