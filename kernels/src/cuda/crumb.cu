// Where the device is, told to the host: what an execution leaves behind when it hangs or faults.
//
// leave_crumb(at, mark): one thread writes `mark` to a word of the host's memory, as gpu.rs has it.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(32) leave_crumb(word64* at, word64 mark) {
  *(volatile word64*)at = mark;
  __threadfence_system();
}
