// DynamicDtype: an element type that is known when a kernel runs, not when it is compiled.
//
// Chunk<DynamicDtype> and Array replace Chunk<T> and T*. Packing a chunk costs a uniform branch, and unpacking it costs
// a select; a kernel that waits for memory does not become slower. An op whose tensors may all have different types
// then needs a few kernels instead of a few hundred.
#pragma once
#include "common/dtype_switch.h"
#include "common/vec.cuh"

namespace fastattn {

struct DynamicDtype {};

__device__ __forceinline__ Array operator+(Array array, int64_t count) {
  return {static_cast<char*>(array.at) + count * (array.dtype == DType::float32 ? 4 : 2), array.dtype};
}

template <>
struct Chunk<DynamicDtype> {
  uint4 words[2];  // the elements; 16-bit ones fill the first
  DType dtype;

  template <bool kAligned>
  __device__ __forceinline__ void load(Array from, int count) {
    dtype = from.dtype;
    words[0] = words[1] = uint4{};
    if (kAligned) {  // no branch: several chunks are loaded at the same time
      const uint4* const vectors = static_cast<const uint4*>(from.at);
      if (count > 0) words[0] = __ldg(vectors);
      if (count > 0 && dtype == DType::float32) words[1] = __ldg(vectors + 1);
    } else if (dtype == DType::float32) {
      load_as<float>(from, count);
    } else {
      load_as<__half>(from, count);  // 16 bits, of either type
    }
  }

  template <bool kAligned>
  __device__ __forceinline__ void store(Array to, int count) const {
    if (dtype == DType::float32)
      as<float>().template store<kAligned>(static_cast<float*>(to.at), count);
    else
      as<__half>().template store<kAligned>(static_cast<__half*>(to.at), count);
  }

  // Selects instead of branches, so that the compiler may load other chunks first.
  __device__ __forceinline__ void unpack(float (&values)[kChunk]) const {
    float as_float[kChunk], as_bfloat16[kChunk], as_half[kChunk];
    as<float>().unpack(as_float);
    as<__nv_bfloat16>().unpack(as_bfloat16);
    as<__half>().unpack(as_half);
#pragma unroll
    for (int j = 0; j < kChunk; j++)
      values[j] = dtype == DType::float32 ? as_float[j] : dtype == DType::bfloat16 ? as_bfloat16[j] : as_half[j];
  }

  // Packs to the dtype `to`.
  __device__ __forceinline__ void pack(const float (&values)[kChunk], DType to) {
    dtype = to;
    if (dtype == DType::float32)
      pack_as<float>(values);
    else if (dtype == DType::bfloat16)
      pack_as<__nv_bfloat16>(values);
    else
      pack_as<__half>(values);
  }

 private:
  template <class T>
  __device__ __forceinline__ Chunk<T> as() const {
    Chunk<T> chunk;
    memcpy(chunk.at, words, sizeof(chunk));
    return chunk;
  }

  template <class T>
  __device__ __forceinline__ void load_as(Array from, int count) {
    Chunk<T> chunk;
    chunk.template load<false>(static_cast<const T*>(from.at), count);
    memcpy(words, chunk.at, sizeof(chunk));
  }

  template <class T>
  __device__ __forceinline__ void pack_as(const float (&values)[kChunk]) {
    Chunk<T> chunk;
    chunk.pack(values);
    memcpy(words, chunk.at, sizeof(chunk));
  }
};

// The pointer to a row of T: a T*, or an Array for DynamicDtype.
template <class T>
__device__ __forceinline__ const T* elements(const void* at) {
  return static_cast<const T*>(at);
}
template <class T>
__device__ __forceinline__ T* elements(void* at) {
  return static_cast<T*>(at);
}
template <class T>
__device__ __forceinline__ Array elements(Array array) {
  return array;
}

template <bool kAligned, class T>
__device__ __forceinline__ void store_chunk(T* to, const float (&values)[kChunk], int count) {
  Chunk<T> chunk;
  chunk.pack(values);
  chunk.template store<kAligned>(to, count);
}
template <bool kAligned>
__device__ __forceinline__ void store_chunk(Array to, const float (&values)[kChunk], int count) {
  Chunk<DynamicDtype> chunk;
  chunk.pack(values, to.dtype);
  chunk.template store<kAligned>(to, count);
}

template <class T>
__device__ __forceinline__ void store_element(T* to, float value) {
  *to = T(value);
}
__device__ __forceinline__ void store_element(Array to, float value) {
  if (to.dtype == DType::float32)
    store_element(static_cast<float*>(to.at), value);
  else if (to.dtype == DType::bfloat16)
    store_element(static_cast<__nv_bfloat16*>(to.at), value);
  else
    store_element(static_cast<__half*>(to.at), value);
}

}  // namespace fastattn
