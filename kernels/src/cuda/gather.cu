// Giving parts to the other members of a communicator, each on a device of its own, through memory that all of them reach.
//
// A member's area has, in its own device's memory:
//   of each member a word, FLAG bytes apart, that says how often that one has given;
//   the member's own words (Own), which nobody else touches;
//   from HEADER on, in two sets of which meetings use one after the other, a slot of each member.
// give_part(areas, mine, bytes, slot, members, rank): writes `bytes` bytes at `mine` to this member's slot in every area, and then the word that says so.
//   Blocks (any number, members).
// take_parts(areas, all, at, bytes, width, slot, members, rank): waits until all have given, and puts what they gave, which is bytes `at` to `at + bytes` of
//   rows of `width`, to `all`, row by row and in each by ranks. Blocks (any number).
// A slot is written again two meetings later, and who writes then has been given what its reader gave in the meeting between: that it had read before.
// Who does not come is waited for: those who lead the members end the process then.
#include "common.cuh"

constexpr int MOST = 16, FLAG = 128, HEADER = 4096;

/// Addresses of the members' areas, by ranks.
struct Areas {
  word64 at[MOST];
};

/// What a member counts for itself: meetings, and of a kernel's blocks those that are done, of each receiver's and of the reader's.
struct Own {
  word64 met;
  unsigned given[MOST], taken;
};

DEVICE uint8_t* area(const Areas& areas, int of) { return led_to<uint8_t>(areas.at[of]); }

DEVICE Own* own_words(const Areas& areas, int members, int rank) {
  return reinterpret_cast<Own*>(area(areas, rank) + members * FLAG);
}

DEVICE bool is_aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % sizeof(uint4) == 0; }

extern "C" __global__ void __launch_bounds__(256) give_part(Areas areas, const uint8_t* mine, word64 bytes, word64 slot, int members, int rank) {
  Own* own = own_words(areas, members, rank);
  int of = int(blockIdx.y);
  word64 met = own->met;
  uint8_t* theirs = area(areas, of);
  uint8_t* to = theirs + HEADER + ((met & 1) * members + rank) * slot;
  word64 first = word64(blockIdx.x) * blockDim.x + threadIdx.x, step = word64(gridDim.x) * blockDim.x;
  word64 whole = is_aligned(mine) ? bytes / sizeof(uint4) : 0;
  for (word64 i = first; i < whole; i += step) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(mine)[i];
  for (word64 i = whole * sizeof(uint4) + first; i < bytes; i += step) to[i] = mine[i];
  // Each thread's bytes come before the word, for the other device as well.
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&own->given[of], 1u) == gridDim.x - 1) {
    own->given[of] = 0;
    __threadfence_system();
    *reinterpret_cast<volatile word64*>(theirs + rank * FLAG) = met + 1;
    __threadfence_system();
  }
}

template <class Unit> DEVICE void take(const uint8_t* slots, uint8_t* all, word64 at, word64 bytes, word64 width, word64 slot, int members) {
  word64 each = bytes / sizeof(Unit), step = word64(gridDim.x) * blockDim.x;
  for (word64 i = word64(blockIdx.x) * blockDim.x + threadIdx.x; i < each * members; i += step) {
    word64 of = i / each, here = i % each * sizeof(Unit);
    word64 row = (at + here) / width, column = (at + here) % width;
    *reinterpret_cast<Unit*>(all + (row * members + of) * width + column) = *reinterpret_cast<const Unit*>(slots + of * slot + here);
  }
}

extern "C" __global__ void __launch_bounds__(256) take_parts(Areas areas, uint8_t* all, word64 at, word64 bytes, word64 width, word64 slot, int members, int rank) {
  Own* own = own_words(areas, members, rank);
  const uint8_t* here = area(areas, rank);
  word64 met = own->met;
  if (threadIdx.x == 0) {
    for (int of = 0; of < members; of++)
      while (*reinterpret_cast<const volatile word64*>(here + of * FLAG) <= met) continue;
    __threadfence_system();
  }
  __syncthreads();
  const uint8_t* slots = here + HEADER + (met & 1) * members * slot;
  word64 mix = at | bytes | width;
  if (is_aligned(all) && mix % sizeof(uint4) == 0) take<uint4>(slots, all, at, bytes, width, slot, members);
  else if (mix % sizeof(uint32_t) == 0 && reinterpret_cast<uintptr_t>(all) % sizeof(uint32_t) == 0)
    take<uint32_t>(slots, all, at, bytes, width, slot, members);
  else take<uint8_t>(slots, all, at, bytes, width, slot, members);
  __syncthreads();
  // Once the last block is done, which every other one of them has read `met` before.
  if (threadIdx.x == 0 && atomicAdd(&own->taken, 1u) == gridDim.x - 1) {
    own->taken = 0;
    own->met = met + 1;
  }
}
