// Small kernels with one classic error each, and the same without it: what test_emulator.py expects the CPU runner to
// catch. A kernel writes its result to `out`, one float a thread; `bug` is numbered as in the test's tables. The last
// ones are mma, ldmatrix and cp.async.
#include <cmath>

#include "../tests/cuda/kernel_table.h"
#include "common/fragment.cuh"
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

// Three times the same through one buffer, with or without the barrier that protects what is still being read.
__global__ void neighbour_again(float* out, int bug) {
  Row& row = shared_memory<Row>();
  float value = static_cast<float>(threadIdx.x);
  for (int i = 0; i < 3; i++) {
    row.at[threadIdx.x] = value;
    __syncthreads();
    value = row.at[(threadIdx.x + 33) % blockDim.x];
    if (!bug) __syncthreads();
  }
  out[threadIdx.x] = value;
}

// What would hang, or is undefined, on a GPU. The last four are for a sanitizer.
__global__ void misuse(float* out, int bug) {
  Row& row = shared_memory<Row>();
  const unsigned thread = threadIdx.x;
  float values[8] = {};
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
    case 4:  // a shuffle from outside the mask
      if (thread % 32 < 16) out[thread] = __shfl_sync(0x0000ffffu, 1.0f, 20);
      break;
    case 5: out[thread] = __shfl_sync(0x0000ffffu, 1.0f, 0); break;  // without its own lane
    case 6:  // different collectives
      out[thread] = thread % 2 ? __ballot_sync(0xffffffffu, 1) : __shfl_xor_sync(0xffffffffu, 1.0f, 2);
      break;
    case 7: row.at[thread + 1] = 1.0f; break;             // past the end of shared memory
    case 8: (&row - 1)->at[thread] = 1.0f; break;         // before its start
    case 9: out[thread + 1] = 0.0f; break;                // past the end of out
    case 10: out[thread] = 2147483600 + int(thread); break;  // a signed overflow
    case 11: out[thread] = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(out) + 1); break;
    case 12: out[thread] = values[thread & 15]; break;  // past an array on the stack
  }
}

__global__ void blocks_in_order(float* out, int) {
  if (threadIdx.x == 0) out[blockIdx.x] = blockIdx.x == 0 ? 0.0f : out[blockIdx.x - 1] + 1.0f;
}

// out[1] = how many warps of all blocks had written when the last block came; out[0] counts blocks.
__global__ void last_block(float* out, int bug) {
  if (threadIdx.x % 32 == 0) out[8 + blockIdx.x * 4 + threadIdx.x / 32] = 1.0f;
  if (!bug) __syncthreads();
  const bool is_last = threadIdx.x == 0 && atomicAdd(out, 1.0f) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  for (unsigned i = 0; i < gridDim.x * 4; i++) out[1] += out[8 + i];
}

// out[block] = the warp that came first, and 10 where a copy was done before it was waited for.
__global__ void settings(float* out, int) {
  Row& row = shared_memory<Row>();
  if (threadIdx.x % 32 == 0 && std::isnan(row.at[0])) row.at[0] = static_cast<float>(threadIdx.x / 32);
  __syncthreads();
  if (threadIdx.x > 0) return;
  cp_async(&row.at[4], nullptr, false);
  out[blockIdx.x] = row.at[0] + (std::isnan(row.at[4]) ? 0.0f : 10.0f);
  cp_async_commit();
  cp_async_wait<0>();
}

// What a collective gives, to be compared with CUDA's definitions.
__global__ void collective(float* out, int which) {
  const unsigned thread = threadIdx.x, half = thread % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  float value = static_cast<float>(thread);
  switch (which) {
    case 1: value = __shfl_sync(0xffffffffu, value, 5); break;
    case 2: value = __shfl_xor_sync(0xffffffffu, value, 3); break;
    case 3:
      __syncwarp();
      value = __ballot_sync(0xffffffffu, thread % 3 == 0) >> (thread % 32) & 1;
      break;
    case 4:
      for (int step = 8; step > 0; step /= 2) value += __shfl_xor_sync(half, value, step);
      break;
    case 5:
      __threadfence();
      atomicAdd(out + thread % 4, __ldg(out + 4) + 1.0f);
      return;
  }
  out[thread] = value;
}

// A warp's product by way of the fragment loads: out = (a b^T) c, a (16, d), b (n, d), c (n, e), all float32 in memory,
// converted to T where they enter shared memory, of which a row is padded as the kernels' tiles are.
constexpr int kDepth = 32, kKeys = 48, kColumns = 32;

template <class T>
struct Tiles {
  static constexpr int kStride = kDepth * sizeof(T) + 16;
  alignas(16) unsigned char a[16 * kStride], b[kKeys * kStride], c[kKeys * kStride];
};

template <class T>
__device__ void store(unsigned char* tile, int row, int column, float value) {
  T element;
  if constexpr (sizeof(T) == 4)
    element = T{value};
  else
    element = T(value);
  memcpy(tile + row * Tiles<T>::kStride + column * sizeof(T), &element, sizeof(T));
}

template <class T, bool kShuffles>
__global__ void product(const float* a, const float* b, const float* c, float* scores, float* out) {
  Tiles<T>& shared = shared_memory<Tiles<T>>();
  constexpr int kStride = Tiles<T>::kStride, kStep = kMmaDepth<T>;
  const int lane = threadIdx.x % 32;
  for (int i = lane; i < kKeys * kDepth; i += 32) {
    if (i < 16 * kDepth) store<T>(shared.a, i / kDepth, i % kDepth, a[i]);
    store<T>(shared.b, i / kDepth, i % kDepth, b[i]);
    store<T>(shared.c, i / kDepth, i % kDepth, c[i]);
  }
  __syncthreads();
  const auto multiply = [](float (&d)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
    if constexpr (kShuffles)
      mma_exact(d, left, right);
    else
      mma<T>(d, left, right);
  };
  float s[kKeys / 8][4] = {}, o[kColumns / 8][4] = {};
  uint32_t left[4], right[2][2];
  for (int k = 0; k < kDepth; k += kStep) {
    load_a<T, kStride>(left, shared.a, 0, k * sizeof(T));
    for (int n = 0; n < kKeys / 8; n += 2) {
      load_b_rows<T, kStride>(right, shared.b, n * 8, k * sizeof(T));
      multiply(s[n], left, right[0]);
      multiply(s[n + 1], left, right[1]);
    }
  }
  for (int step = 0; step < kKeys / kStep; step++) {
    accumulator_as_a<T>(left, s, step);
    for (int n = 0; n < kColumns / 8; n += 2) {
      load_b_columns<T, kStride>(right, shared.c, step * kStep, n * 8);
      multiply(o[n], left, right[0]);
      multiply(o[n + 1], left, right[1]);
    }
  }
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int n = 0; n < kKeys / 8; n++) scores[row * kKeys + 8 * n + column] = s[n][i];
    for (int n = 0; n < kColumns / 8; n++) out[row * kColumns + 8 * n + column] = o[n][i];
  }
}

// out[i] = in[i] by way of two groups of copies, of which the first 128 bytes are kept out.
struct Line {
  alignas(16) float at[256];
};

__global__ void copy(const float* in, float* out, int bug) {
  Line& line = shared_memory<Line>();
  for (int half = 0; half < 2; half++) {
    const int i = half * 128 + threadIdx.x * 4;
    cp_async(line.at + i, in + i, i >= 32);
    cp_async_commit();
  }
  cp_async_wait<1>();
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = line.at[threadIdx.x * 4 + i];
  if (!bug) cp_async_wait<0>();
  for (int i = 128; i < 132; i++) out[threadIdx.x * 4 + i] = line.at[threadIdx.x * 4 + i];
  cp_async_wait<0>();
}

template <void (*kKernel)(float*, int), unsigned kBlocks = 1>
void run(const Call& call) {
  launch(kKernel, dim3(kBlocks), dim3(128), sizeof(Row), nullptr, call.tensor<float>(0), call.bug);
}

// numbers: the blocks, the threads and the bytes of shared memory of a launch, on each of these devices.
void run_launch(const Call& call) {
  for (const int device : {0, 1, 1, 0}) {
    cudaSetDevice(device);
    launch(neighbour, dim3(call.numbers[0]), dim3(call.numbers[1]), call.numbers[2], nullptr, call.tensor<float>(0), 0);
  }
}

// a, b, c, scores, out
template <class T, bool kShuffles = false>
void run_product(const Call& call) {
  launch(product<T, kShuffles>, dim3(1), dim3(32), sizeof(Tiles<T>), nullptr, call.tensor<float>(0),
         call.tensor<float>(1), call.tensor<float>(2), call.tensor<float>(3), call.tensor<float>(4));
}

constexpr Named kKernels[] = {
    {"neighbour", run<neighbour>},
    {"neighbour again", run<neighbour_again>},
    {"last block", run<last_block, 8>},
    {"blocks in order", run<blocks_in_order, 8>},
    {"settings", run<settings, 6>},
    {"misuse", run<misuse>},
    {"collective", run<collective>},
    {"launch", run_launch},
    {"bfloat16", run_product<__nv_bfloat16>},
    {"float16", run_product<__half>},
    {"tf32", run_product<Tf32>},
    {"float32", run_product<float>},
    {"float32 by shuffles", run_product<float, true>},
    {"copy",
     [](const Call& call) {
       launch(copy, dim3(1), dim3(32), sizeof(Line), nullptr, call.tensor<float>(0), call.tensor<float>(1), call.bug);
     }},
};

}  // namespace

EXPORT_KERNELS(kKernels)
