// Cross-entropy of rows of logits, and its gradient in their place.
// Formula, shapes and limits: linear_cross_entropy.h
//
// Grid: a block a row, with a warp for every 1024 classes up to 16 warps; up to 1024 classes a warp a row, four rows a
//   block. The row is read twice, in chunks of eight; a thread has kAhead loads in flight. In the first pass a thread
//   has a running maximum, a sum of exponentials relative to it and a sum of logits, which are exchanged once, at the
//   row's end. The second pass computes the gradient. Powers are of 2, and log2(e) is part of the scale.
// Shared memory: the row, or as much of it as a block can have, from its beginning on (163 KiB on an A100, 227 on an
//   H100: 83k and 116k classes in 16 bits). A thread reads only what it wrote itself, so that no barrier is needed. The
//   rest is read from memory again, before the others, as it may still be in L2. Also the warps' partial sums.
//   Estimated, 128256 classes in bf16 on an H100: 9 % of a row are read again, 3 MB of all blocks, so that memory moves
//   2.0 to 2.1 times the logits in place of 3. Two blocks a multiprocessor with half of the memory each would read 55 %
//   again, 36 MB, and move 2.0 to 2.6 times; one block has 32 KiB of loads in flight, where 20 fill its share.
// Traffic: a logit is read and written, 4 bytes in 16-bit types; without a gradient only read. bias stays in L2.
// H200, bf16, 8192 x 512 -> 32000 with all products, 1.01 ms of them at 794 TFLOP/s: 1.43 ms, by Triton's kernel 1.58.
// Unaligned rows or an unaligned bias are read and written element by element, and so are the last up to seven classes
//   if their number is no multiple of eight. fastattn/backends/cuda/linear_cross_entropy.py aligns rows.
// Dropped before measuring: the row in registers, which needs a kernel for each of some widths; cp.async, for whose
//   data its own thread would have to wait as well.
#include "common/reduce.cuh"
#include "common/softmax.cuh"
#include "common/vec.cuh"
#include "linear_cross_entropy/linear_cross_entropy.h"

namespace fastattn::linear_cross_entropy {
namespace {

constexpr int kMaxThreads = kMaxWarps * kWarp;
constexpr int kWarpClasses = 1024;  // least of a warp: four chunks a lane
constexpr int kBlockRows = 4;       // if a row is one warp

struct Shared {
  float peak[kMaxWarps], total[kMaxWarps], level[kMaxWarps];
};  // after it the block's rows, in chunks

// The sums of a row's logits v = logits + bias: total = the sum of 2^(k (v - peak)), level = the sum of v, where k =
// logit_scale * log2(e) and peak is the highest v, or the lowest if k < 0: exact for high and low logits.
struct Sums {
  float k, peak, total = 0.0f, level = 0.0f;

  // The peak is finite: a single -inf then adds 2^-inf, not 2^(-inf + inf).
  __device__ __forceinline__ explicit Sums(float k) : k(k), peak(k < 0.0f ? 3.0e38f : -3.0e38f) {}

  template <int kCount>
  __device__ __forceinline__ void add(const float (&v)[kCount]) {
    const float before = peak;
    if (k < 0.0f) {
#pragma unroll
      for (int j = 0; j < kCount; j++) peak = fminf(peak, v[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; j++) peak = fmaxf(peak, v[j]);
    }
    total *= power(before);
#pragma unroll
    for (int j = 0; j < kCount; j++) total += power(v[j]), level += v[j];
  }

  __device__ __forceinline__ float power(float v) const { return exp2_approximate(k * (v - peak)); }
  __device__ __forceinline__ float higher(float a, float b) const { return k < 0.0f ? fminf(a, b) : fmaxf(a, b); }

  // From a thread's sums to its row's. After this, no thread of the row reads what another may have overwritten.
  __device__ __forceinline__ void reduce(Shared& shared) {
    const float lane_peak = peak;
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) peak = higher(peak, __shfl_xor_sync(0xffffffffu, peak, step));
    total = warp_sum(total * power(lane_peak));
    level = warp_sum(level);
    __syncwarp();
    if (blockDim.x == kWarp) return;
    const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    if (threadIdx.x % kWarp == 0) shared.peak[warp] = peak, shared.total[warp] = total, shared.level[warp] = level;
    __syncthreads();
    for (int i = 0; i < warps; i++) peak = higher(peak, shared.peak[i]);
    total = level = 0.0f;
#pragma unroll 1
    for (int i = 0; i < warps; i++) {
      total += shared.total[i] * power(shared.peak[i]);
      level += shared.level[i];
    }
  }
};

// Copies between shared memory and registers, 16 bytes at a time: nvcc splits an assignment.
template <class T>
__device__ __forceinline__ void copy(Chunk<T>& to, const Chunk<T>& from) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Chunk<T>) / 16); i++)
    reinterpret_cast<uint4*>(&to)[i] = reinterpret_cast<const uint4*>(&from)[i];
}

template <class T>
struct Row {
  static constexpr int kAhead = sizeof(T) == 2 ? 4 : 2;  // 64 bytes a thread

  T* logits;
  const T* bias;
  int classes, chunks;  // chunks: in vectors; the columns after them are read one by one

  // use(index, chunk, v) for each of the thread's chunks from `begin` to `end`: chunk = read(index), and v are its
  // eight elements with bias.
  template <class Read, class Use>
  __device__ __forceinline__ void each_chunk(int begin, int end, Read read, Use use) const {
    for (int first = begin + threadIdx.x; first < end; first += kAhead * blockDim.x) {
      Chunk<T> chunk[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; i++) {
        const int index = first + i * blockDim.x;
        if (index < end) chunk[i] = read(index);
      }
#pragma unroll
      for (int i = 0; i < kAhead; i++) {
        const int index = first + i * blockDim.x;
        if (index >= end) break;
        float v[kChunk];
        chunk[i].unpack(v);
        if (bias != nullptr) {
          Chunk<T> bias_chunk;  // if it were loaded ahead, too, it would spill
          bias_chunk.template load<true>(bias + index * kChunk, kChunk);
          float more[kChunk];
          bias_chunk.unpack(more);
#pragma unroll
          for (int j = 0; j < kChunk; j++) v[j] += more[j];
        }
        use(index, chunk[i], v);
      }
    }
  }

  // use(col) for each of the thread's other columns.
  template <class Use>
  __device__ __forceinline__ void each_other(Use use) const {
    for (int col = chunks * kChunk + threadIdx.x; col < classes; col += blockDim.x) use(col);
  }

  __device__ __forceinline__ Chunk<T> read(int index) const {
    Chunk<T> chunk;
    chunk.template load<true, true>(logits + index * kChunk, kChunk);
    return chunk;
  }

  __device__ __forceinline__ void write(int index, const float (&values)[kChunk]) const {
    Chunk<T> chunk;
    chunk.pack(values);
    chunk.template store<true>(logits + index * kChunk, kChunk);
  }

  __device__ __forceinline__ float with_bias(int64_t col) const {
    return float(logits[col]) + (bias != nullptr ? float(bias[col]) : 0.0f);
  }
};

template <class T>
__global__ void __launch_bounds__(kMaxThreads, 2) rows_kernel(const Params p, const int chunks, const int held) {
  Shared& shared = shared_memory<Shared>();
  Chunk<T>* const kept = reinterpret_cast<Chunk<T>*>(&shared + 1) + threadIdx.y * held;
  const int64_t row_index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row_index >= p.rows) return;  // whole warps, and only if a row is one warp, without barriers
  const Row<T> row{static_cast<T*>(p.logits) + row_index * p.stride, static_cast<const T*>(p.bias), p.classes, chunks};
  const int64_t label = p.target[row_index];

  if (label == p.ignore_index) {  // the logits are not read
    if (threadIdx.x == 0) p.losses[row_index] = 0.0f;
    if (!p.has_gradient) return;
    const float nothing[kChunk] = {};
    for (int index = threadIdx.x; index < chunks; index += blockDim.x) row.write(index, nothing);
    row.each_other([&](int col) { row.logits[col] = T(0.0f); });
    return;
  }

  Sums sums(p.logit_scale * kLog2e);
  const auto read = [&](int index) { return row.read(index); };
  row.each_chunk(0, chunks, read, [&](int index, const Chunk<T>& chunk, const float (&v)[kChunk]) {
    if (index < held) copy(kept[index], chunk);
    sums.add(v);
  });
  row.each_other([&](int col) {
    const float v[1] = {row.with_bias(col)};
    sums.add(v);
  });
  const bool known = label >= 0 && label < p.classes;
  const float wanted = known ? row.with_bias(label) : NAN;
  sums.reduce(shared);

  if (threadIdx.x == 0) {
    float below = sums.peak - wanted;  // exact, and the logarithm is small; lse would be rounded
    if (p.on_each != 0.0f)
      below = fmaf(p.on_target, below, (1.0f - p.on_target) * (sums.peak - sums.level / p.classes));
    p.losses[row_index] = fmaf(p.logit_scale, below, logf(sums.total));
  }

  if (!p.has_gradient) return;
  float rate = known ? p.logit_scale : NAN;
  if (p.dloss != nullptr) rate *= p.dloss[row_index * p.dloss_stride];
  if (p.count != nullptr) rate /= static_cast<float>(*p.count);
  const float share = 1.0f / sums.total;
  const auto write_gradient = [&](int index, const Chunk<T>&, const float (&v)[kChunk]) {
    float grad[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; j++) grad[j] = fmaf(sums.power(v[j]), share, -p.on_each);
    if (label / kChunk == index) {
#pragma unroll
      for (int j = 0; j < kChunk; j++) grad[j] -= label % kChunk == j ? p.on_target : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kChunk; j++) grad[j] *= rate;
    row.write(index, grad);
  };
  row.each_chunk(held, chunks, read, write_gradient);  // first, as they may still be in L2
  const auto read_kept = [&](int index) {
    Chunk<T> chunk;
    copy(chunk, kept[index]);
    return chunk;
  };
  row.each_chunk(0, held, read_kept, write_gradient);
  row.each_other([&](int col) {
    const float grad = fmaf(sums.power(row.with_bias(col)), share, -p.on_each);
    row.logits[col] = T((grad - (col == label ? p.on_target : 0.0f)) * rate);
  });
}

}  // namespace

void cross_entropy_rows(const Params& p, int shared_bytes, cudaStream_t stream) {
  if (p.rows == 0) return;
  const bool aligned =
      p.stride % kChunk == 0 && (reinterpret_cast<uintptr_t>(p.logits) | reinterpret_cast<uintptr_t>(p.bias)) % 16 == 0;
  const int chunks = aligned ? p.classes / kChunk : 0;
  const int warps = min((p.classes + kWarpClasses - 1) / kWarpClasses, kMaxWarps);
  const int rows = warps == 1 ? kBlockRows : 1;
  const dim3 grid(static_cast<unsigned>((p.rows + rows - 1) / rows)), block(warps * kWarp, rows);
  dtype_switch(p.dtype, [&](auto t) {
    using T = decltype(t);
    const int chunk_bytes = sizeof(Chunk<T>) * rows, capacity = (shared_bytes - int{sizeof(Shared)}) / chunk_bytes;
    const int held = p.has_gradient ? min(chunks, capacity) : 0;
    launch(rows_kernel<T>, grid, block, sizeof(Shared) + held * chunk_bytes, stream, p, chunks, held);
  });
}

}  // namespace fastattn::linear_cross_entropy
