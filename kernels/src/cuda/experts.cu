// The experts that tokens choose, as the products of block_vec.cu, half_vec.cu and plain_mat.cu take them.
#include "elements.cuh"

/// out[i] is the number of ids[i], of any integer dtype and counted from the end if it is negative, or one that no expert has, after a report. Blocks of 256 threads, as many
/// as the host likes.
extern "C" __global__ void __launch_bounds__(256) experts_of(unsigned dtype, int* out, const void* ids, word64 count, word64 experts, word64* bad) {
  for (word64 i = first_element(); i < count; i += element_step()) {
    long long expert = wrapped(index_at(dtype, ids, i), experts, bad);
    out[i] = expert < 0 ? int(0x80000000u) : int(expert);
  }
}

constexpr int THREADS = 256, MOST_EXPERTS = 1024;

/// Groups of `size` choices of one expert, in ascending order of experts and choices: order[g · size …], of `groups` groups that may be needed; what is left over is −1.
/// `ids` [choices] are those of experts_of. Up to 1024 experts. One block of 256 threads.
extern "C" __global__ void __launch_bounds__(256) group_choices(const int* ids, int* order, int choices, int experts, int size, int groups) {
  // Of each expert, and of those that are none, the first group.
  __shared__ int first[MOST_EXPERTS + 1];
  int tid = threadIdx.x;
  for (int i = tid; i < groups * size; i += THREADS) order[i] = -1;
  auto is_of = [&](int choice, int expert) { return (ids[choice] < 0 ? experts : ids[choice]) == expert; };
  for (int expert = tid; expert <= experts; expert += THREADS) {
    int count = 0;
    for (int choice = 0; choice < choices; choice++) count += is_of(choice, expert);
    first[expert] = (count + size - 1) / size;
  }
  __syncthreads();
  if (tid == 0) {
    int all = 0;
    for (int expert = 0; expert <= experts; expert++) {
      int own = first[expert];
      first[expert] = all;
      all += own;
    }
  }
  __syncthreads();
  for (int expert = tid; expert <= experts; expert += THREADS) {
    int at = first[expert] * size;
    for (int choice = 0; choice < choices; choice++)
      if (is_of(choice, expert)) order[at++] = choice;
  }
}
