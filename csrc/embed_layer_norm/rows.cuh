// Shared by forward and backward: a gathered row of z.
#pragma once
#include "common/norm.cuh"
#include "embed_layer_norm/embed_layer_norm.h"

#include <cmath>

namespace fastattn::embed_layer_norm {

using norm::column;

// One row of z at a time.
class Embedded {
 public:
  __device__ __forceinline__ explicit Embedded(const Source& source)
      : source_(source), mask_(source.dropout), word_(source.embedding), spot_(source.position_table) {}

  // Sets the row for the other functions; live: it exists.
  __device__ __forceinline__ void begin(int64_t row, int hidden, bool live) {
    row_ = row;
    const int64_t token = live ? at(source_.tokens, row) : 0;
    const int64_t place = !live ? 0 : source_.position.at ? at(source_.position, row) : row % source_.length;
    known_ = token >= 0 && token < source_.vocabulary && place >= 0 && place < source_.n_position;
    token_ = known_ ? token : 0;
    word_ = source_.embedding + token_ * hidden;
    spot_ = source_.position_table + (known_ ? place : 0) * hidden;
  }

  // The row of embedding; 0 if it, or the position, is out of range.
  __device__ __forceinline__ int64_t token() const { return token_; }

  // The chunk of embedding and of the table at column `col`, of `count` columns. A row out of range is not read.
  template <bool kAligned>
  __device__ __forceinline__ void load(Chunk<DynamicDtype>& word, Chunk<DynamicDtype>& spot, int col, int count) const {
    word.template load<kAligned>(word_ + col, known_ ? count : 0);
    spot.template load<kAligned>(spot_ + col, known_ ? count : 0);
  }

  // z of that chunk, zero past the row's end.
  __device__ __forceinline__ void combine(float (&z)[kChunk], const Chunk<DynamicDtype>& word,
                                          const Chunk<DynamicDtype>& spot, int col) const {
    float places[kChunk];
    word.unpack(z);
    spot.unpack(places);
#pragma unroll
    for (int j = 0; j < kChunk; j++) z[j] = z[j] * source_.scale + places[j];
    drop(z, col);
  }

  // The gradient of the embedding's chunk from that of z.
  __device__ __forceinline__ void differentiate(float (&grad)[kChunk], int col) const {
#pragma unroll
    for (int j = 0; j < kChunk; j++) grad[j] *= source_.scale;
    drop(grad, col);
  }

 private:
  __device__ __forceinline__ static int64_t at(const Indices& indices, int64_t row) {
    return indices.wide ? static_cast<const int64_t*>(indices.at)[row] : static_cast<const int*>(indices.at)[row];
  }

  // Dropout; all NaN for a row out of range.
  __device__ __forceinline__ void drop(float (&values)[kChunk], int col) const {
    mask_.apply(values, row_, col);
#pragma unroll
    for (int j = 0; j < kChunk; j++) values[j] = known_ ? values[j] : NAN;
  }

  const Source& source_;
  const DropoutMask mask_;
  int64_t row_ = 0, token_ = 0;
  bool known_ = false;
  Array word_, spot_;
};

}  // namespace fastattn::embed_layer_norm
