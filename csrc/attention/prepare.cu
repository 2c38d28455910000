// From masks to spans, bits, seen keys and tile lists.   Formats and limits: prepare.h, attention.h
//
// Without a bool mask everything takes memory of the size of the sequences, but for the tiles and their lists.
// Traffic: pack_bits reads a bool mask once, 1 byte an element, and writes an eighth of it; whatever comes after reads
//   bits. A mask of 2048 x 2048 for 8 samples is 33 MB, 8 us at 4 TB/s, its bits are 4 MB.
// Parallel over rows: a warp makes the words of a row by ballots, lane i being bit i of a word. At most 40 registers.
#include "attention/prepare.h"

#include "attention/mask.cuh"
#include "common/reduce.cuh"

namespace fastattn::attention {
namespace {

constexpr int kWarps = 8;  // of a block
constexpr uint32_t kAll = 0xffffffffu;

__device__ __forceinline__ int64_t warp_index() { return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y; }

template <class... Parameters, class... Arguments>
void launch_warps(void (*kernel)(Parameters...), int64_t warps, cudaStream_t stream, const Arguments&... arguments) {
  const int64_t blocks = (warps + kWarps - 1) / kWarps;
  if (blocks > 0) launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kWarp, kWarps), 0, stream, arguments...);
}

// The segment of a position, the last one that begins at or before it; -1, or `sequences`, outside of all.
__device__ __forceinline__ int segment_of(const int32_t* offsets, int sequences, int position) {
  int before = 0, after = sequences + 1;  // so many offsets, at least and at most, are not beyond it
  while (before < after) {
    const int middle = (before + after) / 2;
    offsets[middle] <= position ? before = middle + 1 : after = middle;
  }
  return before - 1;
}

// One thread a row.
__global__ void make_spans_kernel(const Spans p) {
  const int64_t place = static_cast<int64_t>(blockIdx.x) * (kWarps * kWarp) + threadIdx.y * kWarp + threadIdx.x;
  if (place >= static_cast<int64_t>(p.batch) * p.rows) return;
  const int row = place % p.rows, b = place / p.rows;
  int2 own = {0, p.rows}, other = {0, p.columns};  // the sequence, along the rows and along the columns
  if (p.row_offsets != nullptr) {
    const int segment = segment_of(p.row_offsets, p.sequences, row);
    own = other = {0, 0};
    if (segment >= 0 && segment < p.sequences) {
      own = {p.row_offsets[segment], p.row_offsets[segment + 1]};
      other = {p.column_offsets[segment], min(p.column_offsets[segment + 1], p.columns)};
    }
  }
  const int64_t at = row - own.x + other.x, at_from_end = row - own.y + other.y;
  const int64_t begin = max(max(at + p.low, at_from_end + p.low_from_end), int64_t{other.x});
  const int64_t end = min(min(at + p.high, at_from_end + p.high_from_end) + 1, int64_t{other.y});
  const bool real = p.padding == nullptr || p.padding[b * p.padding_stride_b + row];
  p.spans[place] = real && begin < end ? int2{static_cast<int>(begin), static_cast<int>(end)} : int2{0, 0};
}

// One warp a row. Blocks of keys that its interval misses cost no read.
__global__ void pack_bits_kernel(const Mask mask, int heads, const BitMatrix bits) {
  const int64_t row = warp_index();
  const int lane = threadIdx.x;
  if (row >= static_cast<int64_t>(bits.matrices) * bits.rows) return;
  const int m = row % bits.rows, h = row / bits.rows % heads, b = row / bits.rows / heads;
  const int2 span = mask.spans[b * mask.spans_stride_b + m];
  const int words = words_of_row(bits.columns);
  for (int i = 0; i < words; i++) {
    const int block = i / kBitWords * kBitBlock, n = block + column_of_bit(i % kBitWords, lane);
    bool keep = n >= span.x && n < span.y;
    if (keep && mask.key_padding != nullptr) keep = mask.key_padding[b * mask.key_padding_stride_b + n];
    if (keep) keep = mask.attn_mask[b * mask.stride_b + h * mask.stride_h + m * mask.stride_m + n * mask.stride_n];
    const uint32_t word = __ballot_sync(kAll, keep);
    if (lane == 0) bits.words[row * words + i] = word;
  }
}

// One warp a key: its words say which queries see it. Neighbouring keys read the same words, from the L1 cache.
__global__ void transpose_bits_kernel(const BitMatrix bits, uint32_t* transposed) {
  const int64_t row = warp_index();
  const int lane = threadIdx.x;
  if (row >= static_cast<int64_t>(bits.matrices) * bits.columns) return;
  const int n = row % bits.columns, row_words = words_of_row(bits.columns), words = words_of_row(bits.rows);
  const uint32_t* from = bits.words + row / bits.columns * bits.rows * row_words + n / kBitBlock * kBitWords;
  for (int i = 0; i < words; i++) {
    const int m = i / kBitWords * kBitBlock + column_of_bit(i % kBitWords, lane);
    const uint32_t word = m < bits.rows ? from[static_cast<int64_t>(m) * row_words + word_of_column(n % kBitBlock)] : 0;
    const uint32_t out = __ballot_sync(kAll, word >> bit_of_column(n % kBitBlock) & 1);
    if (lane == 0) transposed[row * words + i] = out;
  }
}

// One warp a tile: a lane takes every 32nd row.
__global__ void classify_tiles_kernel(const Classes p, int64_t tiles) {
  const int64_t tile = warp_index();
  if (tile >= tiles) return;
  const Visibility& who = p.visibility;
  const int row_tiles = blocks_of(p.seqlen_q, p.block_m), column_tiles = blocks_of(p.seqlen_k, p.block_n);
  const int m0 = tile / column_tiles % row_tiles * p.block_m, n0 = tile % column_tiles * p.block_n;
  const int h = tile / column_tiles / row_tiles % p.heads, b = tile / column_tiles / row_tiles / p.heads;
  // The bits of a word that lie in the tile.
  const uint32_t inside = p.block_n >= kBitBlock ? kAll : first_bits(p.block_n / 4) << n0 % kBitBlock / 4;
  bool some = false, every = m0 + p.block_m <= p.seqlen_q && n0 + p.block_n <= p.seqlen_k;
  for (int m = m0 + threadIdx.x; m < min(m0 + p.block_m, p.seqlen_q); m += kWarp)
    for (int n = n0 / kBitBlock * kBitBlock; n < min(n0 + p.block_n, p.seqlen_k); n += kBitBlock)
      for (int c = 0; c < kBitWords; c++) {
        const uint32_t word = seen_word<kBitBlock>(who, b, h, m, n, p.seqlen_k, who.band_lo, who.band_hi, c) & inside;
        some |= word != 0;
        every &= word == inside;
      }
  const bool partial = __ballot_sync(kAll, some) != 0, full = __ballot_sync(kAll, every) == kAll;
  if (threadIdx.x == 0) p.classes[tile] = full ? 2 : partial ? 1 : 0;
}

// One warp a list: a turn takes 32 tiles, and puts those of one class behind those before.
__global__ void list_tiles_kernel(const uint8_t* classes, int matrices, int lists, int places, int64_t list_stride,
                                  int64_t place_stride, int2* counts, int32_t* tiles) {
  const int64_t list = warp_index();
  const int lane = threadIdx.x;
  if (list >= static_cast<int64_t>(matrices) * lists) return;
  const uint8_t* from = classes + list / lists * lists * places + list % lists * list_stride;
  int count[2] = {}, total = 0;
  for (int kind = 1; kind <= 2; kind++) {
    for (int first = 0; first < places; first += kWarp) {
      const int place = first + lane;
      const bool mine = place < places && from[place * place_stride] == kind;
      const uint32_t all = __ballot_sync(kAll, mine);
      if (mine) tiles[list * places + total + __popc(all & ((1u << lane) - 1))] = place;
      total += __popc(all);
    }
    count[kind - 1] = total;
  }
  if (lane == 0) counts[list] = {count[0], count[1]};
}

struct SeenShared {
  uint32_t words[kWarps][kBitWords];  // of the bits of all queries, or-ed together
  uint32_t found[kWarps];             // by each warp: bit i is key i of its 32
};

// Has row a bit of columns from .. to - 1?
__device__ __forceinline__ bool has_some(const uint32_t* row, int from, int to) {
  for (int first = from / kBitBlock * kBitBlock; first < to; first += kBitBlock) {
    const int begin = max(from - first, 0), end = min(to - first, kBitBlock);
    for (int c = 0; c < kBitWords; c++)
      if (row[first / kBitBlock * kBitWords + c] & word_between(begin, end, c)) return true;
  }
  return false;
}

// One block for 128 keys. Without a bias its bits say it, a thread or-ing every 256th row. With one, a warp takes 32 of the
// keys and every second query, and stops as soon as all its keys are found, after one turn as a rule.
__global__ void seen_keys_kernel(const Seen p) {
  SeenShared& shared = shared_memory<SeenShared>();
  constexpr int kParts = kBitBlock / kWarp, kTurn = 4;
  const int blocks = blocks_of(p.seqlen_k, kBitBlock), lane = threadIdx.x, warp = threadIdx.y, part = warp % kParts;
  const int block = blockIdx.x % blocks, row = blockIdx.x / blocks, h = row % p.heads, b = row / p.heads;
  const int column = part * kWarp + lane, n = block * kBitBlock + column;
  const int words = words_of_row(p.seqlen_k);
  const uint32_t* bits = p.bits + b * p.bits_stride_b + h * p.bits_stride_h + block * kBitWords;
  const uint32_t* queries = p.queries == nullptr ? nullptr : p.queries + b * p.queries_stride_b;

  // Queries from .. to - 1 see key n but for what padding, bits and the bias hide.
  int from = max(n - p.band_hi, 0), to = min(n - p.band_lo + 1, p.seqlen_q);
  if (p.spans != nullptr && n < p.seqlen_k) {
    const int2 span = p.spans[b * p.spans_stride_b + n];
    from = span.x, to = span.y;
  }
  bool visible = n < p.seqlen_k && from < to;
  if (visible && p.key_padding != nullptr) visible = p.key_padding[b * p.key_padding_stride_b + n];
  if (visible && queries != nullptr) visible = has_some(queries, from, to);
  if (p.bits != nullptr) {
    uint32_t any[kBitWords] = {};
    for (int m = warp * kWarp + lane; m < p.seqlen_q; m += kWarps * kWarp)
      for (int i = 0; i < kBitWords; i++) any[i] |= bits[static_cast<int64_t>(m) * words + i];
    for (int i = 0; i < kBitWords; i++) {
      for (int step = kWarp / 2; step > 0; step /= 2) any[i] |= __shfl_xor_sync(kAll, any[i], step);
      if (lane == 0) shared.words[warp][i] = any[i];
    }
    __syncthreads();
    uint32_t word = 0;
    for (int w = 0; w < kWarps; w++) word |= shared.words[w][word_of_column(column)];
    visible = word >> bit_of_column(column) & 1;
    from = 0, to = p.seqlen_q;
  }

  uint32_t found = __ballot_sync(kAll, visible);
  if (p.bias.data != nullptr) {
    const uint32_t wanted = found;
    found = 0;
    const auto sees = [&](int m) {
      if (m < from || m >= to || (queries != nullptr && !has_bit(queries, m))) return false;
      return p.bits == nullptr || has_bit(bits + static_cast<int64_t>(m) * words, column);
    };
    const BiasMatrix bias(p.bias, b, h);
    const int rows = p.bias.stride_m == 0 ? 1 : p.seqlen_q;  // then all rows mask alike
    for (int m = warp / kParts; m < rows && found != wanted; m += kTurn * kWarps / kParts) {
      bool mine = false;
#pragma unroll
      for (int i = 0; i < kTurn; i++) {
        const int query = m + i * kWarps / kParts;
        if (visible && query < rows && (rows == 1 || sees(query))) mine |= bias(query, n) != -kInfinity;
      }
      found |= __ballot_sync(kAll, mine);
    }
  }
  if (lane == 0) shared.found[warp] = found;
  __syncthreads();
  if (warp >= kBitWords) return;
  const int mine = column_of_bit(warp, lane);
  uint32_t of_part = 0;
  for (int w = mine / kWarp; w < kWarps; w += kParts) of_part |= shared.found[w];
  const uint32_t word = __ballot_sync(kAll, of_part >> mine % kWarp & 1);
  if (lane == 0) p.seen[(static_cast<int64_t>(row) * blocks + block) * kBitWords + warp] = word;
}

}  // namespace

void make_spans(const Spans& p, cudaStream_t stream) {
  launch_warps(make_spans_kernel, (static_cast<int64_t>(p.batch) * p.rows + kWarp - 1) / kWarp, stream, p);
}

void pack_bits(const Mask& mask, int heads, const BitMatrix& bits, cudaStream_t stream) {
  launch_warps(pack_bits_kernel, static_cast<int64_t>(bits.matrices) * bits.rows, stream, mask, heads, bits);
}

void transpose_bits(const BitMatrix& bits, uint32_t* transposed, cudaStream_t stream) {
  launch_warps(transpose_bits_kernel, static_cast<int64_t>(bits.matrices) * bits.columns, stream, bits, transposed);
}

void classify_tiles(const Classes& p, cudaStream_t stream) {
  const int64_t row_tiles = static_cast<int64_t>(p.batch) * p.heads * blocks_of(p.seqlen_q, p.block_m);
  const int64_t tiles = row_tiles * blocks_of(p.seqlen_k, p.block_n);
  launch_warps(classify_tiles_kernel, tiles, stream, p, tiles);
}

void list_tiles(const uint8_t* classes, int matrices, int row_tiles, int column_tiles, bool by_key, int2* counts,
                int32_t* tiles, cudaStream_t stream) {
  const int lists = by_key ? column_tiles : row_tiles, places = by_key ? row_tiles : column_tiles;
  const int64_t list_stride = by_key ? 1 : column_tiles, place_stride = by_key ? column_tiles : 1;
  launch_warps(list_tiles_kernel, static_cast<int64_t>(matrices) * lists, stream, classes, matrices, lists, places,
               list_stride, place_stride, counts, tiles);
}

void seen_keys(const Seen& p, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.batch) * p.heads * blocks_of(p.seqlen_k, kBitBlock);
  if (blocks > 0)
    launch(seen_keys_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kWarp, kWarps), sizeof(SeenShared), stream, p);
}

}  // namespace fastattn::attention
