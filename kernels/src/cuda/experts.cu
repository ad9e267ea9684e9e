// The experts that tokens choose, as products take them (chosen.cuh).
#include "elements.cuh"

/// out[i] is the number of ids[i], of any integer dtype and counted from the end if it is negative, or one that no expert has, after a report. Blocks of 256 threads, as many
/// as the host likes.
extern "C" __global__ void __launch_bounds__(256) experts_of(unsigned dtype, int* out, const void* ids, word64 count, word64 experts, word64* bad) {
  for (word64 i = first_element(); i < count; i += element_step()) {
    long long expert = wrapped(index_at(dtype, ids, i), experts, bad);
    out[i] = expert < 0 ? int(0x80000000u) : int(expert);
  }
}

constexpr int THREADS = 256, WARPS = THREADS / 32, MOST_EXPERTS = 1024;

/// Groups of `size` choices of one expert, in ascending order of experts and choices: order[g · size …], of `groups` groups that may be needed; what is left over is −1.
/// `ids` [choices] are those of experts_of. Up to 1024 experts. Blocks of 256 threads, one for each expert and one for choices that are none: gridDim.x = experts + 1.
extern "C" __global__ void __launch_bounds__(256) group_choices(const int* ids, int* order, int choices, int experts, int size, int groups) {
  // Choices of each expert and of none; the groups before this block's, of a warp's part of the experts; this block's choices among those that each warp looks at.
  __shared__ int counts[MOST_EXPERTS + 1];
  __shared__ int before[WARPS], found[WARPS];
  int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, own = blockIdx.x;
  auto expert_of = [&](int choice) { return ids[choice] < 0 ? experts : ids[choice]; };
  for (int expert = tid; expert <= experts; expert += THREADS) counts[expert] = 0;
  __syncthreads();
  for (int choice = tid; choice < choices; choice += THREADS) atomicAdd(&counts[expert_of(choice)], 1);
  __syncthreads();
  auto groups_of = [&](int expert) { return (counts[expert] + size - 1) / size; };
  int first = 0;
  for (int expert = tid; expert < own; expert += THREADS) first += groups_of(expert);
  for (int d = 16; d > 0; d >>= 1) first += __shfl_xor_sync(ALL, first, d);
  if (lane == 0) before[warp] = first;
  __syncthreads();
  first = 0;
  for (int i = 0; i < WARPS; i++) first += before[i];
  int at = first * size, end = (first + groups_of(own)) * size;
  for (int start = 0; start < choices; start += THREADS) {
    int choice = start + tid;
    bool mine = choice < choices && expert_of(choice) == own;
    unsigned votes = __ballot_sync(ALL, mine);
    if (lane == 0) found[warp] = __popc(votes);
    __syncthreads();
    int rank = __popc(votes & ((1u << lane) - 1u));
    for (int i = 0; i < WARPS; i++) {
      if (i < warp) rank += found[i];
    }
    if (mine) order[at + rank] = choice;
    for (int i = 0; i < WARPS; i++) at += found[i];
    // What was found may be told anew.
    __syncthreads();
  }
  // The last block has the rest too.
  if (own == experts) end = groups * size;
  for (int i = at + tid; i < end; i += THREADS) order[i] = -1;
}
