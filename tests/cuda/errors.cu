// Small kernels with one classic error each, and the same without it: what test_emulator.py expects the CPU runner to
// catch. A kernel writes its result to `out`, one float a thread; `bug` is numbered as in the test's table.
#include "../tests/cuda/kernel_table.h"
#include "common/launch.cuh"

using namespace fastattn;

namespace {

struct Row {
  float at[128];
};

// out[i] = i's right neighbour's value, by way of shared memory.
__global__ void neighbour(float* out, int bug) {
  Row& row = shared_memory<Row>();
  row.at[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (!bug) __syncthreads();
  out[threadIdx.x] = row.at[(threadIdx.x + 1) % blockDim.x];
}

// What would hang, or is undefined, on a GPU. The last one is for a sanitizer.
__global__ void misuse(float* out, int bug) {
  Row& row = shared_memory<Row>();
  const unsigned thread = threadIdx.x;
  switch (bug) {
    case 1:  // a barrier in a branch
      if (thread < 64) __syncthreads();
      break;
    case 2:  // in both branches
      if (thread < 64)
        __syncthreads();
      else
        __syncthreads();
      break;
    case 3:  // a shuffle with absent lanes
      if (thread % 32 < 16) out[thread] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
      break;
    case 4: row.at[thread + 1] = 1.0f; break;  // past the end of shared memory
    case 5: out[thread + 1] = 0.0f; break;     // past the end of out
  }
}

template <void (*kKernel)(float*, int)>
void run(const Call& call) {
  launch(kKernel, dim3(1), dim3(128), sizeof(Row), nullptr, call.tensor<float>(0), call.bug);
}

// numbers: the bytes of shared memory of a block, on each of these devices.
void run_launch(const Call& call) {
  for (const int device : {0, 1, 1, 0}) {
    cudaSetDevice(device);
    launch(neighbour, dim3(1), dim3(128), call.numbers[0], nullptr, call.tensor<float>(0), 0);
  }
}

constexpr Named kKernels[] = {
    {"neighbour", run<neighbour>},
    {"misuse", run<misuse>},
    {"launch", run_launch},
};

}  // namespace

EXPORT_KERNELS(kKernels)
