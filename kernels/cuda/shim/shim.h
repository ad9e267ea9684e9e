// The part of CUDA C++ that the kernels use, for a host compiler: unmodified `kernels/src/cuda/*.cu` run on a processor.
//
// A CUDA thread is a fiber with a stack of its own; the fibers of a block take turns on one thread of the host, and give way at
// barriers and warp exchanges only. So what is found here are wrong indices (with -fsanitize=address), undefined
// behaviour, wrong results, and barriers that not all threads reach (719, with a line on standard error). HOTCELL_SHIM_REVERSE=1 has them
// run in the opposite order, which shows most missing barriers. Copies that go on meanwhile (cp.async) come as late as they may, and what is at their place
// until then is nobody's. What it cannot show: races between blocks, the hardware's rounding inside of a matrix instruction, and speed.
//
// Kernels may use: threadIdx, blockIdx, blockDim, gridDim; __shared__ variables inside of kernels; __syncthreads, __syncwarp, the shuffles and votes with
// full warps; the atomics and intrinsics below. Inline PTX has a twin, in `ptx.cuh` beside the kernels. Not: dynamic shared memory,
// textures, launches from the device.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define HOTCELL_SHIM 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local
#define __constant__ static const

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace shim {

constexpr unsigned MAX_THREADS = 1024;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_UNDEFINED__)
constexpr size_t STACK = 256 << 10;
#else
constexpr size_t STACK = 64 << 10;
#endif
/// What cuLaunchKernel answers where a kernel failed, and where a launch has wrong sizes.
constexpr int LAUNCH_FAILED = 719, INVALID_VALUE = 1;

#if defined(__x86_64__)
// Saves what the calling convention keeps, goes over to another stack, and takes up what was saved there.
extern "C" void hotcell_shim_switch(void** from, void* to);
asm(R"(
.text
.weak hotcell_shim_switch
.type hotcell_shim_switch, @function
hotcell_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hotcell_shim_switch, .-hotcell_shim_switch
)");
#endif

/// Words of 64 bits that a lane shows the others at once, at most.
constexpr unsigned SHOWN = 36;

/// A barrier of some threads: who comes last lets all go on.
struct Barrier {
  unsigned waiting, generation, live;
};

struct Fiber {
#if defined(__x86_64__)
  void* sp;
#else
  ucontext_t context;
#endif
  void* fake_stack;
  uint3 index;
  bool done;
};

/// A copy that a thread has begun: of `bytes` the first `some` come from there, and zeros after them.
struct Copy {
  char* to;
  const char* from;
  unsigned some, bytes;
};
/// A thread's copies in the order in which it began them, and where each of its groups ends.
struct Copies {
  std::vector<Copy> begun;
  std::vector<size_t> groups;
};

/// The block that runs on this thread of the host.
struct Block {
  Fiber fibers[MAX_THREADS];
  Barrier all, warps[MAX_THREADS / 32];
  /// What lanes show each other; two sets in turns, so that one barrier per exchange is enough.
  uint64_t shown[2][MAX_THREADS][SHOWN];
  unsigned turn[MAX_THREADS];
  Copies copies[MAX_THREADS];
  unsigned threads, current;
  bool moved;
  Fiber host;
  const void* host_stack;
  size_t host_stack_size;
  void (*body)(void*);
  void* argument;
  std::vector<char*> stacks;
  ~Block() { for (char* s : stacks) free(s); }
};

inline thread_local Block* block_memory = nullptr;
struct BlockOwner { ~BlockOwner() { delete block_memory; block_memory = nullptr; } };
inline thread_local BlockOwner owner;
inline thread_local uint3 thread_index, block_index;
inline thread_local dim3 block_size, grid_size;

inline Block& here() { return *block_memory; }

inline void change(Fiber& from, Fiber& to, const void* stack, size_t size, bool ends) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, stack, size);
#else
  (void)stack, (void)size, (void)ends;
#endif
#if defined(__x86_64__)
  hotcell_shim_switch(&from.sp, to.sp);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

/// Back to the loop over fibers.
inline void give_way(bool ends = false) {
  Block& b = here();
  change(b.fibers[b.current], b.host, b.host_stack, b.host_stack_size, ends);
}

inline void wait_at(Barrier& barrier) {
  Block& b = here();
  unsigned generation = barrier.generation;
  if (++barrier.waiting >= barrier.live) {
    barrier.waiting = 0;
    barrier.generation++;
    b.moved = true;
    return;
  }
  while (barrier.generation == generation) give_way();
}

inline unsigned lane() { return here().current % 32; }
inline Barrier& warp() { return here().warps[here().current / 32]; }

/// Shows `words` words to the lanes of the warp; afterwards `seen(lane)` are those of a lane. Reads before the next exchange.
inline uint64_t (*exchange(const void* mine, size_t bytes))[SHOWN] {
  Block& b = here();
  unsigned turn = b.turn[b.current]++ & 1;
  memcpy(b.shown[turn][b.current], mine, bytes);
  wait_at(warp());
  return &b.shown[turn][b.current / 32 * 32];
}

template <class T> T shuffled(T value, unsigned from) {
  static_assert(sizeof(T) <= 32);
  auto all = exchange(&value, sizeof value);
  if (here().current / 32 * 32 + from < here().threads) memcpy(&value, all[from], sizeof value);
  return value;
}

/// Begins a copy. Nobody may see what is there until it has been waited for: bytes that are numbers of no format's usual ones.
inline void begin_copy(void* to, const void* from, unsigned some, unsigned bytes) {
  memset(to, 0xa7, bytes);
  here().copies[here().current].begun.push_back({static_cast<char*>(to), static_cast<const char*>(from), some, bytes});
}
inline void close_group() {
  Copies& mine = here().copies[here().current];
  mine.groups.push_back(mine.begun.size());
}
/// Waits for the first `count` copies.
inline void await_copies(Copies& mine, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const Copy& copy = mine.begun[i];
    if (copy.some) memcpy(copy.to, copy.from, copy.some);
    memset(copy.to + copy.some, 0, copy.bytes - copy.some);
  }
  mine.begun.erase(mine.begun.begin(), mine.begun.begin() + std::ptrdiff_t(count));
}
/// Waits for all groups but the last `but`.
inline void await_groups(size_t but) {
  Copies& mine = here().copies[here().current];
  if (mine.groups.size() <= but) return;
  size_t done = mine.groups.size() - but, count = mine.groups[done - 1];
  await_copies(mine, count);
  mine.groups.erase(mine.groups.begin(), mine.groups.begin() + std::ptrdiff_t(done));
  for (size_t& end : mine.groups) end -= count;
}
inline void await_all() {
  Copies& mine = here().copies[here().current];
  await_copies(mine, mine.begun.size());
  mine.groups.clear();
}

inline void leave(Barrier& barrier) {
  // Who ends is waited for no longer.
  if (--barrier.live > 0 && barrier.waiting >= barrier.live) {
    barrier.waiting = 0;
    barrier.generation++;
  }
}

inline void begin() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &here().host_stack, &here().host_stack_size);
#endif
  Block& b = here();
  b.body(b.argument);
  b.fibers[b.current].done = true;
  b.moved = true;
  leave(b.all);
  leave(warp());
  give_way(true);
  abort();
}

inline int run_block() {
  Block& b = here();
  unsigned n = block_size.x * block_size.y * block_size.z;
  b.threads = n;
  b.all = {0, 0, n};
  while (b.stacks.size() < n) b.stacks.push_back(static_cast<char*>(aligned_alloc(64, STACK)));
  for (unsigned i = 0; i < n; i++) {
    Fiber& f = b.fibers[i];
    unsigned first = i / 32 * 32;
    if (i == first) b.warps[i / 32] = {0, 0, n - first < 32 ? n - first : 32};
    f.done = false;
    f.fake_stack = nullptr;
    f.index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
    b.turn[i] = 0;
    b.copies[i].begun.clear(), b.copies[i].groups.clear();
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(b.stacks[i] + STACK - 64);
    // As after a call: eight bytes off sixteen where `begin` starts.
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&begin);
    for (int r = 0; r < 6; r++) *--top = nullptr;
    f.sp = top;
#else
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = b.stacks[i];
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, begin, 0);
#endif
  }
  static const bool reverse = getenv("HOTCELL_SHIM_REVERSE") != nullptr;
  for (;;) {
    b.moved = false;
    unsigned live = 0;
    for (unsigned step = 0; step < n; step++) {
      unsigned i = reverse ? n - 1 - step : step;
      if (b.fibers[i].done) continue;
      live++;
      b.current = i;
      thread_index = b.fibers[i].index;
      change(b.host, b.fibers[i], b.stacks[i], STACK, false);
    }
    if (live == 0) return 0;
    if (!b.moved) {
      fprintf(stderr, "shim: %u threads of block (%u, %u, %u) wait at a barrier that the others never reach\n", live,
              block_index.x, block_index.y, block_index.z);
      return LAUNCH_FAILED;
    }
  }
}

/// An argument as cuLaunchKernel gets it. A fake driver may mark device pointers in their four upper bits.
template <class T> T argument(void* from) {
  T value;
  memcpy(&value, from, sizeof value);
  if constexpr (std::is_pointer_v<T>) value = (T)((uint64_t)value & 0x0FFFFFFFFFFFFFFFull);
  return value;
}

template <class... A, size_t... I>
int launch(void (*kernel)(A...), void** arguments, const unsigned* grid, const unsigned* block, std::index_sequence<I...>) {
  if (!grid[0] || !grid[1] || !grid[2] || !block[0] || !block[1] || !block[2] || grid[1] > 65535 || grid[2] > 65535 ||
      block[0] > MAX_THREADS || block[1] > MAX_THREADS || block[2] > 64 || block[0] * block[1] * block[2] > MAX_THREADS) {
    fprintf(stderr, "shim: grid (%u, %u, %u) of blocks (%u, %u, %u)\n", grid[0], grid[1], grid[2], block[0], block[1], block[2]);
    return INVALID_VALUE;
  }
  if (!block_memory) {
    block_memory = new Block();
    (void)&owner;
  }
  std::tuple<A...> values{argument<A>(arguments[I])...};
  struct Call { void (*kernel)(A...); std::tuple<A...>* values; } call{kernel, &values};
  here().body = [](void* c) { std::apply(static_cast<Call*>(c)->kernel, *static_cast<Call*>(c)->values); };
  here().argument = &call;
  grid_size = dim3(grid[0], grid[1], grid[2]);
  block_size = dim3(block[0], block[1], block[2]);
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) {
        block_index = {x, y, z};
        if (int result = run_block()) return result;
      }
  return 0;
}
template <class... A> int launch(void (*kernel)(A...), void** arguments, const unsigned* grid, const unsigned* block) {
  return launch(kernel, arguments, grid, block, std::index_sequence_for<A...>{});
}
template <class... A> constexpr int count(void (*)(A...)) { return sizeof...(A); }
template <class... A> int size(void (*)(A...), int i) {
  const int sizes[] = {int(sizeof(A))..., 0};
  return i >= 0 && i < int(sizeof...(A)) ? sizes[i] : 0;
}

}  // namespace shim

/// Makes a kernel callable from outside: `fk_NAME(arguments, grid[3], block[3], shared bytes)` gives a CUresult, `fk_NAME_nargs()` the number of arguments,
/// `fk_NAME_size(i)` the bytes of one, 0 behind the last.
#define SHIM_EXPORT(name)                                                                                              \
  extern "C" int fk_##name(void** arguments, const unsigned* grid, const unsigned* block, unsigned) {                  \
    return shim::launch(name, arguments, grid, block);                                                                 \
  }                                                                                                                    \
  extern "C" int fk_##name##_nargs() { return shim::count(name); }                                                     \
  extern "C" int fk_##name##_size(int i) { return shim::size(name, i); }

#define threadIdx shim::thread_index
#define blockIdx shim::block_index
#define blockDim shim::block_size
#define gridDim shim::grid_size
constexpr int warpSize = 32;

inline void __syncthreads() { shim::wait_at(shim::here().all); }
inline void __syncwarp(unsigned = ~0u) { shim::wait_at(shim::warp()); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
template <class T> T __shfl_sync(unsigned, T v, int from, int width = 32) {
  unsigned lane = shim::lane(), base = lane / width * width;
  return shim::shuffled(v, base + unsigned(from) % width);
}
template <class T> T __shfl_xor_sync(unsigned, T v, int mask, int = 32) { return shim::shuffled(v, shim::lane() ^ mask); }
template <class T> T __shfl_down_sync(unsigned, T v, unsigned by, int width = 32) {
  unsigned lane = shim::lane();
  return shim::shuffled(v, lane % width + by < unsigned(width) ? lane + by : lane);
}
template <class T> T __shfl_up_sync(unsigned, T v, unsigned by, int width = 32) {
  unsigned lane = shim::lane();
  return shim::shuffled(v, lane % width >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  unsigned mine = predicate != 0, votes = 0;
  auto all = shim::exchange(&mine, sizeof mine);
  unsigned first = shim::here().current / 32 * 32;
  for (unsigned i = 0; i < 32 && first + i < shim::here().threads; i++)
    if (!shim::here().fibers[first + i].done && uint32_t(all[i][0])) votes |= 1u << i;
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
inline int __syncthreads_or(int predicate) {
  static thread_local int any;
  __syncthreads();
  any = 0;
  __syncthreads();
  if (predicate) any = 1;
  __syncthreads();
  return any;
}

template <class T> T atomicAdd(T* to, T v) {
  T old = *to;
  *to = old + v;
  return old;
}
template <class T> T atomicMax(T* to, T v) {
  T old = *to;
  if (v > old) *to = v;
  return old;
}
template <class T> T atomicMin(T* to, T v) {
  T old = *to;
  if (v < old) *to = v;
  return old;
}
template <class T> T atomicOr(T* to, T v) {
  T old = *to;
  *to = old | v;
  return old;
}
template <class T> T atomicExch(T* to, T v) {
  T old = *to;
  *to = v;
  return old;
}
template <class T> T atomicCAS(T* to, T compare, T v) {
  T old = *to;
  if (old == compare) *to = v;
  return old;
}

template <class To, class From> To shim_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float v) { return shim_bits<unsigned>(v); }
inline int __float_as_int(float v) { return shim_bits<int>(v); }
inline float __uint_as_float(unsigned v) { return shim_bits<float>(v); }
inline float __int_as_float(int v) { return shim_bits<float>(v); }
inline long long __double_as_longlong(double v) { return shim_bits<long long>(v); }
inline double __longlong_as_double(long long v) { return shim_bits<double>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
template <class T> T __ldg(const T* from) { return *from; }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += int(int8_t(unsigned(a) >> 8 * i)) * int(int8_t(unsigned(b) >> 8 * i));
  return c;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  uint64_t both = uint64_t(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= unsigned(both >> 8 * (select >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned((uint64_t(high) << 32 | low) >> (by & 31));
}
template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }
