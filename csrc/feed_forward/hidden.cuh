// The pointwise part of both directions, on a chunk: eight columns of one row of h, as float32 in one thread's
// registers.
#pragma once
#include "common/philox.cuh"
#include "common/vec.cuh"
#include "feed_forward/activation.cuh"

namespace fastattn::feed_forward {

__device__ __forceinline__ int64_t z_columns(const Hidden& hidden) {
  return hidden.gated ? 2 * static_cast<int64_t>(hidden.d_inner) : hidden.d_inner;
}

// The column of z of column `col` of h: of the gate, or, with `up`, of the second half.
template <class T>
__device__ __forceinline__ const T* z_at(const Hidden& hidden, const void* z, int64_t row, int col, bool up = false) {
  return static_cast<const T*>(z) + row * z_columns(hidden) + (up ? hidden.d_inner : 0) + col;
}
template <class T>
__device__ __forceinline__ T* z_at(const Hidden& hidden, void* z, int64_t row, int col, bool up = false) {
  return const_cast<T*>(z_at<T>(hidden, static_cast<const void*>(z), row, col, up));
}

// h of columns col .. col + 7 of a row, from the gate and, gated, `up`.
template <class T, bool kAligned>
__device__ __forceinline__ void forward_chunk(const Forward& p, const DropoutMask& dropout, float (&gate)[kChunk],
                                              float (&up)[kChunk], int64_t row, int col) {
  with_activation<T>(p.hidden.activation, [&](auto activation) {
    float slope;
#pragma unroll
    for (int j = 0; j < kChunk; j++) gate[j] = activation.at(gate[j], slope);
  });
  if (p.hidden.gated) {
#pragma unroll
    for (int j = 0; j < kChunk; j++) gate[j] *= up[j];
  }
  dropout.apply(gate, row, col);
  Chunk<T> h;
  h.pack(gate);
  h.template store<kAligned>(static_cast<T*>(p.h) + row * p.hidden.d_inner + col,
                             columns_inside<kAligned>(col, p.hidden.d_inner));
}

// A chunk of what the forward saved.
template <class T>
struct Saved {
  Chunk<T> gate, up;

  template <bool kAligned>
  __device__ __forceinline__ void load(const Backward& p, int64_t row, int col) {
    const int inside = row < p.hidden.tokens ? columns_inside<kAligned>(col, p.hidden.d_inner) : 0;
    gate.template load<kAligned>(z_at<T>(p.hidden, p.saved, row, col), inside);
    if (p.hidden.gated) up.template load<kAligned>(z_at<T>(p.hidden, p.saved, row, col, true), inside);
  }
};

// dz, and h if it is stored, of a chunk. grad: dout weight2; becomes dz, gated that of the gate; dup: gated that of the
// second half.
template <class T, bool kAligned>
__device__ __forceinline__ void backward_chunk(const Backward& p, const DropoutMask& dropout, const Saved<T>& saved,
                                               float (&grad)[kChunk], float (&dup)[kChunk], int64_t row, int col) {
  const Hidden& hidden = p.hidden;
  const int inside = columns_inside<kAligned>(col, hidden.d_inner);
  float gate[kChunk];
  saved.gate.unpack(gate);
  Chunk<T> chunk;
  if (p.h == nullptr) {  // relu: h is positive if neither relu nor dropout made it 0
#pragma unroll
    for (int j = 0; j < kChunk; j++) grad[j] = gate[j] <= 0.0f ? 0.0f : grad[j] * hidden.dropout.scale;
  } else {
    float h[kChunk], up[kChunk];
    if (hidden.gated) saved.up.unpack(up);
    const uint32_t kept = dropout.active() ? dropout.kept(row, col / kChunk) : 0xff;
    with_activation<T>(hidden.activation, [&](auto activation) {
#pragma unroll
      for (int j = 0; j < kChunk; j++) {
        float slope;
        const float value = activation.at(gate[j], slope), factor = hidden.gated ? up[j] : 1.0f;
        const bool keep = kept >> j & 1;
        h[j] = keep ? value * factor * hidden.dropout.scale : 0.0f;
        grad[j] = keep ? grad[j] * hidden.dropout.scale : 0.0f;
        dup[j] = grad[j] * value;
        grad[j] *= slope * factor;
      }
    });
    chunk.pack(h);
    chunk.template store<kAligned>(static_cast<T*>(p.h) + row * hidden.d_inner + col, inside);
    if (hidden.gated) {
      chunk.pack(dup);
      chunk.template store<kAligned>(z_at<T>(hidden, p.dz, row, col, true), inside);
    }
  }
  chunk.pack(grad);
  chunk.template store<kAligned>(z_at<T>(hidden, p.dz, row, col), inside);
}

}  // namespace fastattn::feed_forward
