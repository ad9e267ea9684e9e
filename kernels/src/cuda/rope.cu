// Rotary positions, and writing keys and values into a paged cache. Nothing is summed; the bits are those of kernels/src/cpu/ops/rope.rs and
// kernels/src/cpu/ops/attention/write.rs, up to the last bit of a sine or cosine (see rope_table).
#include "common.cuh"

/// For each row the cosines, then the sines, of position · frequency: `table` f32 [rows, 2 · half]. The angle is exact in f64 (31 + 24 bits), the functions
/// are the library's for f64, rounded to f32: two libraries differ in the rare case of a result on the edge between two f32. Serves all layers of a
/// step. Blocks of 128 threads, gridDim.x = ⌈rows · half / 128⌉.
extern "C" __global__ void __launch_bounds__(128) rope_table(const int* positions, const float* frequencies, float* table, int rows, int half) {
  long long i = (long long)blockIdx.x * 128 + threadIdx.x;
  if (i >= (long long)rows * half) return;
  long long row = i / half;
  int pair = int(i % half);
  double angle = double(positions[row]) * double(frequencies[pair]);
  table[row * 2 * half + pair] = float(cos(angle));
  table[row * 2 * half + half + pair] = float(sin(angle));
}

/// A pair of a head turned: pair i is (i, i + half), or (2i, 2i + 1) when interleaved.
DEVICE void turn(const float* x, const float* table, int half, int pair, bool interleaved, float& a, float& b, int& first, int& second) {
  first = interleaved ? 2 * pair : pair;
  second = interleaved ? 2 * pair + 1 : pair + half;
  float p = x[first], q = x[second], c = table[pair], s = table[half + pair];
  a = fmaf(p, c, -(q * s));
  b = fmaf(p, s, q * c);
}

/// Pair `i` of all heads of `x`, of which there are rows · heads · half.
DEVICE void turn_pair(const float* x, const float* table, float* out, long long i, int rows, int heads, int half, bool interleaved) {
  if (i >= (long long)rows * heads * half) return;
  long long head = i / half;
  float a, b;
  int first, second;
  turn(x + head * 2 * half, table + head / heads * 2 * half, half, int(i % half), interleaved, a, b, first, second);
  out[head * 2 * half + first] = a;
  out[head * 2 * half + second] = b;
}

/// The op rope: `x` and `out` f32 [rows, heads, 2 · half], `out` may be `x`. Blocks of 128 threads, gridDim.x = ⌈rows · heads · half / 128⌉.
extern "C" __global__ void __launch_bounds__(128) rope_f32(const float* x, const float* table, float* out, int rows, int heads, int half, int interleaved) {
  turn_pair(x, table, out, (long long)blockIdx.x * 128 + threadIdx.x, rows, heads, half, interleaved != 0);
}

// cache_write_TYPE(keys, values, table, cache, slots, rows, kv_heads, d, blocks, block_len, interleaved, bad): keys and values f32 [rows, kv_heads, d] rounded to
// the cache, at `slots` i32 [rows]; −1 writes nothing, one out of range is reported and writes nothing. The cache is [2, blocks, kv_heads, block_len, d].
// Where `table` is not null, keys are turned by it first, as rope_f32 does; the op cache_write by itself has none. Where two rows name one slot, the last of them wins: each row looks whether a later one does.
// A warp makes 32 numbers. Blocks of 128 threads, gridDim.x = ⌈rows · kv_heads · ⌈d / 32⌉ · 2 / 4⌉.
// rope_write_TYPE(queries, turned, heads, first, …): rope_f32 of queries by the first blocks, and what cache_write_TYPE does with the rest, which is told behind it, by those
// from block `first` on.

/// Stores a number per lane: number `i` of the head at `head`, of which there are `d`.
template <class E> DEVICE void put(E, uint8_t* head, int i, int d, float v) {
  if (i < d) E::store(reinterpret_cast<typename E::Stored*>(head) + i, v);
}
struct Q8 {};
DEVICE void put(Q8, uint8_t* head, int i, int, float v) {
  unsigned top = __float_as_uint(v) & 0x7fffffffu;
  for (int d = 16; d > 0; d >>= 1) top = max(top, __shfl_xor_sync(ALL, top, d));
  float amax = __uint_as_float(top), inverse = 127.0f / amax, scale = amax / 127.0f;
  int q = 0;
  if (top >= 0x7f800000u) {
    scale = quiet_nan();
  } else if (!(inverse < INFINITY_F)) {
    scale = 0.0f;
  } else {
    float r = rintf(v * inverse);
    q = int(r > 127.0f ? 127.0f : r < -127.0f ? -127.0f : r);
  }
  uint8_t* block = head + i / 32 * 34;
  if (i % 32 == 0) *reinterpret_cast<uint16_t*>(block) = uint16_t(f32_to_half(scale));
  block[2 + i % 32] = uint8_t(q);
}

template <class E> DEVICE size_t bytes_of(E, int d) { return size_t(d) * sizeof(typename E::Stored); }
DEVICE size_t bytes_of(Q8, int d) { return size_t(d / 32) * 34; }

template <class E>
DEVICE void write(long long block, const float* keys, const float* values, const float* table, uint8_t* cache, const int* slots, int rows, int kv_heads, int d, int blocks, int block_len, bool interleaved,
                  word64* bad) {
  int lane = threadIdx.x % 32, parts = (d + 31) / 32;
  long long task = block * 4 + threadIdx.x / 32;
  if (task >= (long long)rows * kv_heads * parts * 2) return;
  bool is_value = task % 2 != 0;
  int part = int(task / 2 % parts), head = int(task / 2 / parts % kv_heads), row = int(task / 2 / parts / kv_heads);
  int slot = slots[row];
  if (slot == -1) return;
  long long all = (long long)blocks * block_len;
  if (slot < 0 || slot >= all) {
    if (task % (2ll * parts * kv_heads) == 0 && lane == 0) report(bad, slot, word64(max(all, 1ll)));
    return;
  }
  int later = 0;
  for (int r = row + 1 + lane; r < rows; r += 32) later |= slots[r] == slot;
  if (__any_sync(ALL, later)) return;
  const float* x = (is_value ? values : keys) + (size_t(row) * kv_heads + head) * d;
  int i = part * 32 + lane;
  float v = i < d ? x[i] : 0.0f;
  if (!is_value && table && i < d) {
    int half = d / 2, pair = interleaved ? i / 2 : i % half, first, second;
    float a, b;
    turn(x, table + size_t(row) * d, half, pair, interleaved, a, b, first, second);
    v = i == first ? a : b;
  }
  size_t bytes = bytes_of(E(), d), place = (size_t(slot / block_len) * kv_heads + head) * block_len + slot % block_len;
  if (is_value) place += size_t(all) * kv_heads;
  put(E(), cache + place * bytes, i, d, v);
}

#define KERNEL_OF(name, type)                                                                                                                             \
  extern "C" __global__ void __launch_bounds__(128) name(const float* keys, const float* values, const float* table, uint8_t* cache, const int* slots, int rows, \
                                                         int kv_heads, int d, int blocks, int block_len, int interleaved, word64* bad) {                   \
    write<type>(blockIdx.x, keys, values, table, cache, slots, rows, kv_heads, d, blocks, block_len, interleaved != 0, bad);                               \
  }
KERNEL_OF(cache_write_f32, F32)
KERNEL_OF(cache_write_f16, F16)
KERNEL_OF(cache_write_bf16, BF16)
KERNEL_OF(cache_write_q8_0, Q8)
#undef KERNEL_OF

#define KERNEL_OF(name, type)                                                                                                                             \
  extern "C" __global__ void __launch_bounds__(128) name(const float* queries, float* turned, int heads, int first, const float* keys, const float* values,      \
                                                         const float* table, uint8_t* cache, const int* slots, int rows, int kv_heads, int d, int blocks,  \
                                                         int block_len, int interleaved, word64* bad) {                                                    \
    long long block = (long long)blockIdx.x - first;                                                                                                       \
    if (block < 0) turn_pair(queries, table, turned, (long long)blockIdx.x * 128 + threadIdx.x, rows, heads, d / 2, interleaved != 0);                      \
    else write<type>(block, keys, values, table, cache, slots, rows, kv_heads, d, blocks, block_len, interleaved != 0, bad);                                \
  }
KERNEL_OF(rope_write_f32, F32)
KERNEL_OF(rope_write_f16, F16)
KERNEL_OF(rope_write_bf16, BF16)
KERNEL_OF(rope_write_q8_0, Q8)
