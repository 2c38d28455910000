// A warp's product by way of the fragment loads, for test_fragments.py: out = (a b^T) c, a (16, d), b (n, d), c (n, e),
// all float32 in memory, converted to T where they enter shared memory, of which a row is padded as the kernels' tiles
// are.
#include <stdexcept>
#include <string>

#include "common/fragment.cuh"
#include "common/launch.cuh"

using namespace fastattn;

namespace {

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

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* run_product(  //
    const char* name, const float* a, const float* b, const float* c, float* scores, float* out) {
  static std::string message;
  const std::string which = name;
  const auto run = [&](auto* kernel, size_t bytes) {
    launch(kernel, dim3(1), dim3(32), bytes, nullptr, a, b, c, scores, out);
  };
  const auto run_named = [&] {
    if (which == "bfloat16") return run(product<__nv_bfloat16, false>, sizeof(Tiles<__nv_bfloat16>));
    if (which == "float16") return run(product<__half, false>, sizeof(Tiles<__half>));
    if (which == "tf32") return run(product<Tf32, false>, sizeof(Tiles<Tf32>));
    if (which == "float32") return run(product<float, false>, sizeof(Tiles<float>));
    if (which == "float32 by shuffles") return run(product<float, true>, sizeof(Tiles<float>));
    if (which == "copy") return launch(copy<true>, dim3(1), dim3(32), sizeof(Line), nullptr, a, out);
    if (which == "copy without a wait") return launch(copy<false>, dim3(1), dim3(32), sizeof(Line), nullptr, a, out);
    throw std::invalid_argument("no such kernel: " + which);
  };
  try {
    run_named();
  } catch (const std::exception& error) {
    return (message = error.what()).c_str();
  }
  return nullptr;
}
