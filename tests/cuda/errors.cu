// Small kernels with one classic error each, and the same without it: what test_emulator.py expects the CPU runner to
// catch. A kernel writes its result to `out`, one float a thread. The last ones are mma, ldmatrix and cp.async.
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
template <bool kBarrier>
__global__ void neighbour(float* out) {
  Row& row = shared_memory<Row>();
  row.at[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (kBarrier) __syncthreads();
  out[threadIdx.x] = row.at[(threadIdx.x + 1) % blockDim.x];
}

// Three times the same through one buffer, with or without the barrier that protects what is still being read.
template <bool kBarrier>
__global__ void neighbour_again(float* out) {
  Row& row = shared_memory<Row>();
  float value = static_cast<float>(threadIdx.x);
  for (int i = 0; i < 3; i++) {
    row.at[threadIdx.x] = value;
    __syncthreads();
    value = row.at[(threadIdx.x + 33) % blockDim.x];
    if (kBarrier) __syncthreads();
  }
  out[threadIdx.x] = value;
}

// For a sanitizer: the last thread writes past out; adds beyond the largest int; reads an odd address; reads past an
// array on its stack.
__global__ void past_out(float* out) { out[threadIdx.x + 1] = 0.0f; }
__global__ void signed_overflow(float* out) {
  out[threadIdx.x] = static_cast<float>(2147483600 + static_cast<int>(threadIdx.x));
}
__global__ void odd_address(float* out) {
  out[threadIdx.x] = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(out) + 1);
}
__global__ void past_an_array(float* out) {
  float values[8];
  for (int i = 0; i < 8; i++) values[i] = out[i];
  out[threadIdx.x] = values[threadIdx.x & 15];
}

__global__ void barrier_in_a_branch(float* out) {
  if (threadIdx.x < 64) __syncthreads();
  out[threadIdx.x] = 0.0f;
}

__global__ void barrier_in_both_branches(float* out) {
  if (threadIdx.x < 64) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 0.0f;
}

__global__ void shuffle_with_absent_lanes(float* out) {
  if (threadIdx.x % 32 >= 16) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}

__global__ void shuffle_from_outside_the_mask(float* out) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 20);
}

__global__ void shuffle_without_own_lane(float* out) { out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 0); }

__global__ void different_collectives(float* out) {
  if (threadIdx.x % 2 == 0) {
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 2);
  } else {
    out[threadIdx.x] = static_cast<float>(__ballot_sync(0xffffffffu, 1));
  }
}

__global__ void past_the_end(float* out) {
  Row& row = shared_memory<Row>();
  row.at[threadIdx.x + 1] = 1.0f;
  out[threadIdx.x] = 0.0f;
}

__global__ void before_the_start(float* out) {
  Row& row = shared_memory<Row>();
  (&row - 1)->at[threadIdx.x] = 1.0f;
  out[threadIdx.x] = 0.0f;
}

__global__ void blocks_in_order(float* out) {
  if (threadIdx.x == 0) out[blockIdx.x] = blockIdx.x == 0 ? 0.0f : out[blockIdx.x - 1] + 1.0f;
}

// out[1] = how many warps of all blocks had written when the last block came; out[0] counts blocks.
template <bool kBarrier>
__global__ void last_block(float* out) {
  if (threadIdx.x % 32 == 0) out[8 + blockIdx.x * 4 + threadIdx.x / 32] = 1.0f;
  if (kBarrier) __syncthreads();
  const bool is_last = threadIdx.x == 0 && atomicAdd(out, 1.0f) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  for (unsigned i = 0; i < gridDim.x * 4; i++) out[1] += out[8 + i];
}

// out[block] = the warp that came first, and 10 where a copy was done before it was waited for.
__global__ void settings(float* out) {
  Row& row = shared_memory<Row>();
  if (threadIdx.x % 32 == 0 && std::isnan(row.at[0])) row.at[0] = static_cast<float>(threadIdx.x / 32);
  __syncthreads();
  if (threadIdx.x > 0) return;
  cp_async(&row.at[4], nullptr, false);
  out[blockIdx.x] = row.at[0] + (std::isnan(row.at[4]) ? 0.0f : 10.0f);
  cp_async_commit();
  cp_async_wait<0>();
}

// out[lane] = what each collective gives, to be compared with CUDA's definitions.
__global__ void shuffle(float* out) { out[threadIdx.x] = __shfl_sync(0xffffffffu, 1.0f * threadIdx.x, 5); }
__global__ void shuffle_xor(float* out) { out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f * threadIdx.x, 3); }
__global__ void ballot(float* out) {
  __syncwarp();
  const unsigned third = __ballot_sync(0xffffffffu, threadIdx.x % 3 == 0);
  out[threadIdx.x] = static_cast<float>(third >> (threadIdx.x % 32) & 1);
}
__global__ void half_warps(float* out) {
  const unsigned mask = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  float sum = 1.0f * threadIdx.x;
  for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(mask, sum, step);
  out[threadIdx.x] = sum;
}
__global__ void count(float* out) {
  __threadfence();
  atomicAdd(out + threadIdx.x % 4, __ldg(out + 4) + 1.0f);
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

template <bool kWait>
__global__ void copy(const float* in, float* out) {
  Line& line = shared_memory<Line>();
  for (int half = 0; half < 2; half++) {
    const int i = half * 128 + threadIdx.x * 4;
    cp_async(line.at + i, in + i, i >= 32);
    cp_async_commit();
  }
  cp_async_wait<1>();
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = line.at[threadIdx.x * 4 + i];
  if (kWait) cp_async_wait<0>();
  for (int i = 128; i < 132; i++) out[threadIdx.x * 4 + i] = line.at[threadIdx.x * 4 + i];
  cp_async_wait<0>();
}

template <void (*kKernel)(float*), unsigned kBlocks = 1>
void run(const Call& call) {
  launch(kKernel, dim3(kBlocks), dim3(128), sizeof(Row), nullptr, call.tensor<float>(0));
}

// a, b, c, scores, out
template <class T, bool kShuffles = false>
void run_product(const Call& call) {
  launch(product<T, kShuffles>, dim3(1), dim3(32), sizeof(Tiles<T>), nullptr, call.tensor<float>(0),
         call.tensor<float>(1), call.tensor<float>(2), call.tensor<float>(3), call.tensor<float>(4));
}

template <bool kWait>
void run_copy(const Call& call) {
  launch(copy<kWait>, dim3(1), dim3(32), sizeof(Line), nullptr, call.tensor<float>(0), call.tensor<float>(1));
}

void run_on_two_devices(const Call& call) {
  for (const int device : {0, 1, 1, 0}) {
    cudaSetDevice(device);
    for (const size_t kib : {64, 80, 64})
      launch(neighbour<true>, dim3(1), dim3(128), kib << 10, nullptr, call.tensor<float>(0));
  }
}

constexpr Named kKernels[] = {
    {"neighbour", run<neighbour<true>>},
    {"neighbour without barrier", run<neighbour<false>>},
    {"neighbour again", run<neighbour_again<true>>},
    {"neighbour again without barrier", run<neighbour_again<false>>},
    {"barrier in a branch", run<barrier_in_a_branch>},
    {"barrier in both branches", run<barrier_in_both_branches>},
    {"shuffle with absent lanes", run<shuffle_with_absent_lanes>},
    {"shuffle from outside the mask", run<shuffle_from_outside_the_mask>},
    {"shuffle without own lane", run<shuffle_without_own_lane>},
    {"different collectives", run<different_collectives>},
    {"past the end", run<past_the_end>},
    {"before the start", run<before_the_start>},
    {"too much shared memory",
     [](const Call& call) {
       launch(neighbour<true>, dim3(1), dim3(128), 164 << 10, nullptr, call.tensor<float>(0));
     }},
    {"too many threads",
     [](const Call& call) { launch(shuffle, dim3(1), dim3(1056), 0, nullptr, call.tensor<float>(0)); }},
    {"no blocks", run<shuffle, 0>},
    {"shared memory on two devices", run_on_two_devices},
    {"blocks in order", run<blocks_in_order, 8>},
    {"last block", run<last_block<true>, 8>},
    {"last block without barrier", run<last_block<false>, 8>},
    {"settings", run<settings, 6>},
    {"shuffle", run<shuffle>},
    {"shuffle xor", run<shuffle_xor>},
    {"ballot", run<ballot>},
    {"half warps", run<half_warps>},
    {"count", run<count>},
    {"past out", run<past_out>},
    {"signed overflow", run<signed_overflow>},
    {"odd address", run<odd_address>},
    {"past an array", run<past_an_array>},
    {"bfloat16", run_product<__nv_bfloat16>},
    {"float16", run_product<__half>},
    {"tf32", run_product<Tf32>},
    {"float32", run_product<float>},
    {"float32 by shuffles", run_product<float, true>},
    {"copy", run_copy<true>},
    {"copy without a wait", run_copy<false>},
};

}  // namespace

EXPORT_KERNELS(kKernels)
