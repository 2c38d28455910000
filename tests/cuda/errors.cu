// Small kernels with one classic error each, and the same without it: what test_emulator.py expects the CPU runner to
// catch. A kernel writes its result to `out`, one float a thread.
#include <cmath>
#include <stdexcept>
#include <string>

#include "common/cp_async.cuh"

using fastattn::launch;
using fastattn::shared_memory;

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
  fastattn::cp_async(&row.at[4], nullptr, false);
  out[blockIdx.x] = row.at[0] + (std::isnan(row.at[4]) ? 0.0f : 10.0f);
  fastattn::cp_async_commit();
  fastattn::cp_async_wait<0>();
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

void run(const std::string& name, float* out) {
  const auto with = [&](void (*kernel)(float*), unsigned blocks = 1) {
    launch(kernel, dim3(blocks), dim3(128), sizeof(Row), nullptr, out);
  };
  if (name == "neighbour") return with(neighbour<true>);
  if (name == "neighbour without barrier") return with(neighbour<false>);
  if (name == "neighbour again") return with(neighbour_again<true>);
  if (name == "neighbour again without barrier") return with(neighbour_again<false>);
  if (name == "barrier in a branch") return with(barrier_in_a_branch);
  if (name == "barrier in both branches") return with(barrier_in_both_branches);
  if (name == "shuffle with absent lanes") return with(shuffle_with_absent_lanes);
  if (name == "shuffle from outside the mask") return with(shuffle_from_outside_the_mask);
  if (name == "shuffle without own lane") return with(shuffle_without_own_lane);
  if (name == "different collectives") return with(different_collectives);
  if (name == "past the end") return with(past_the_end);
  if (name == "before the start") return with(before_the_start);
  if (name == "too much shared memory") return launch(neighbour<true>, dim3(1), dim3(128), 164 << 10, nullptr, out);
  if (name == "shared memory on two devices") {
    for (const int device : {0, 1, 1, 0}) {
      cudaSetDevice(device);
      for (const size_t kib : {64, 80, 64}) launch(neighbour<true>, dim3(1), dim3(128), kib << 10, nullptr, out);
    }
    return;
  }
  if (name == "blocks in order") return with(blocks_in_order, 8);
  if (name == "last block") return with(last_block<true>, 8);
  if (name == "last block without barrier") return with(last_block<false>, 8);
  if (name == "settings") return with(settings, 6);
  if (name == "too many threads") return launch(shuffle, dim3(1), dim3(1056), 0, nullptr, out);
  if (name == "no blocks") return with(shuffle, 0);
  if (name == "shuffle") return with(shuffle);
  if (name == "shuffle xor") return with(shuffle_xor);
  if (name == "ballot") return with(ballot);
  if (name == "half warps") return with(half_warps);
  if (name == "count") return with(count);
  if (name == "past out") return with(past_out);
  if (name == "signed overflow") return with(signed_overflow);
  if (name == "odd address") return with(odd_address);
  if (name == "past an array") return with(past_an_array);
  throw std::runtime_error("no kernel " + name);
}

}  // namespace

// The error's text, or an empty string.
extern "C" __attribute__((visibility("default"))) const char* run_kernel(const char* name, float* out) {
  static std::string message;
  message.clear();
  try {
    run(name, out);
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}
