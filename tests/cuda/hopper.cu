// A kernel with all that Hopper's kernels are made of, and the same with one classic error each, for test_hopper.py.
//
//   out_h = round(q_h k_h^T) v_h for each head h; q (H, 64, Dx), k and v (H, Lk, Dx), out (H, 64, Dx), any strides of
//   rows
//
// One block: a producer warp loads by TMA, a warpgroup multiplies, stages the result in shared memory and stores it by
// TMA. It takes Dx as D >= Dx columns, and may begin before the first key and end behind the last: boxes then lie
// outside, partly or as a whole.
#include <stdexcept>
#include <string>

#include "common/mma.cuh"
#include "common/philox.cuh"
#include "common/sm90/tma.cuh"
#include "common/sm90/wgmma.cuh"

using namespace fastattn;
using namespace fastattn::sm90;

namespace {

enum Bug {
  kSound,
  kNoFullWait,
  kWrongParity,
  kNoRelease,
  kReleasedTwice,
  kNoEmptyWait,
  kReleaseBeforeWait,
  kNoProductWait,
  kOperandOverwritten,
  kNoProductFence,
  kNoProxyFence,
  kFenceBehindBarrier,
  kNoStoreBarrier,
  kNoReadWait,
  kNoStoreWait,
  kWrongBytes,
  kNoInitFence,
  kNotInitialised,
  kHalfABarrier,
  kTwoCounts,
  kDescriptorOutside,
};

constexpr int kRows = 64, kStages = 2;

template <int D, int N>
struct alignas(1024) Shared {
  static constexpr int kPanels = (D + 63) / 64;
  unsigned char q[kPanels * kRows * 128], out[kPanels * kRows * 128], k[kStages][kPanels * N * 128],
      v[kStages][kPanels * N * 128];
  Barrier full_q, empty_q, full[kStages], empty[kStages];
};

struct Arguments {
  TensorMap q, k, v, out;
  int heads, first, tiles;  // first: the key that the first tile begins with, 0 or less
};

// d += a B with 96 columns of a transposed B in two products, of 64 and of 32. One product reads one and a half
// patterns of the swizzle, which PTX's rule for addresses covers and CUTLASS never does; no kernel of ours does it
// either (csrc/attention/sm90.cuh). If a chip gets "bf16 96 64" wrong and this right, tiles of 96 may come back by this
// way.
template <class T>
__device__ __forceinline__ void multiply_in_two(float (&d)[48], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  const uint64_t next_panel = b >> 16 & 0x3fff;
  wgmma<T, 64, true>(reinterpret_cast<float (&)[32]>(d[0]), a, b, accumulate);
  wgmma<T, 32, true>(reinterpret_cast<float (&)[16]>(d[32]), a, b + next_panel, accumulate);
}

template <class T, int D, int N, Bug kBug, bool kInTwo>
__global__ void __launch_bounds__(256, 1) products(const __grid_constant__ Arguments p) {
  using S = Shared<D, N>;
  S& shared = shared_memory<S>();
  if (threadIdx.x == 0) {
    if (kBug != kNotInitialised) shared.full_q.init(1);
    shared.empty_q.init(1);
    for (int stage = 0; stage < kStages; stage++) shared.full[stage].init(1), shared.empty[stage].init(1);
    if (kBug != kNoInitFence) fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    fewer_registers<24>();
    if (threadIdx.x > 0) return;
    for (int head = 0, i = 0; head < p.heads; head++) {
      shared.empty_q.wait(head % 2 ^ 1);
      shared.full_q.arrive_expect(kBug == kWrongBytes ? 16 : sizeof shared.q);
      for (int panel = 0; panel < S::kPanels; panel++)
        tma_load(shared.q + panel * kRows * 128, p.q, shared.full_q, 64 * panel, 0, head, 0);
      for (int tile = 0; tile < p.tiles; tile++, i++) {
        const int stage = i % kStages;
        if (kBug != kNoEmptyWait) shared.empty[stage].wait(i / kStages % 2 ^ 1);
        shared.full[stage].arrive_expect(2 * sizeof shared.k[0]);
        for (int panel = 0; panel < S::kPanels; panel++) {
          tma_load(shared.k[stage] + panel * N * 128, p.k, shared.full[stage], 64 * panel, p.first + tile * N, head, 0);
          tma_load(shared.v[stage] + panel * N * 128, p.v, shared.full[stage], 64 * panel, p.first + tile * N, head, 0);
        }
      }
    }
    return;
  }
  more_registers<256>();
  const int thread = threadIdx.x - 128, warp = thread / 32, lane = thread % 32;
  for (int head = 0, i = 0; head < p.heads; head++) {
    float out[D / 2], s[N / 2];
    uint32_t words[N / 16][4];
    shared.full_q.wait(head % 2);
    for (int tile = 0; tile < p.tiles; tile++, i++) {
      const int stage = i % kStages;
      if (kBug != kNoFullWait) shared.full[stage].wait(i / kStages % 2 ^ (kBug == kWrongParity));
      if (kBug != kNoProductFence) wgmma_fence();
      for (int step = 0; step < D / 16; step++)
        wgmma<T, N, false, false>(s, along_columns<kRows>(shared.q, 0, 16 * step),
                                  along_columns<N>(shared.k[stage], kBug == kDescriptorOutside ? 512 : 0, 16 * step),
                                  step > 0);
      wgmma_commit();
      if (kBug != kNoProductWait) wgmma_wait<0>(s);
      for (int step = 0; step < N / 16; step++)
        for (int word = 0; word < 4; word++)
          words[step][word] = pack_word<T>(s[8 * step + 2 * word], s[8 * step + 2 * word + 1]);
      wgmma_fence(words);
      for (int step = 0; step < N / 16; step++) {
        const uint64_t v = along_lines<N>(shared.v[stage], 16 * step, 0);
        if constexpr (kInTwo)
          multiply_in_two<T>(out, words[step], v, tile + step > 0);
        else
          wgmma<T, D, true>(out, words[step], v, tile + step > 0);
      }
      wgmma_commit();
      if (kBug == kReleaseBeforeWait && thread == 0) shared.empty[stage].arrive();
      if (kBug == kOperandOverwritten) words[0][0] = 0;
      // Here nothing but the wait keeps the next tile from overwriting what the product still reads.
      if (kBug != kReleaseBeforeWait || tile + 1 == p.tiles) wgmma_wait<0>(out);
      if (kBug != kReleaseBeforeWait && kBug != kNoRelease && thread == 0) shared.empty[stage].arrive();
      if (kBug == kReleasedTwice && thread == 1) shared.empty[stage].arrive();
    }
    if (thread == 0) shared.empty_q.arrive();
    if (kBug == kHalfABarrier && thread < 32) continue;
    if (kBug == kTwoCounts && thread < 32) {
      named_barrier_sync(1, 64);
    } else {
      named_barrier_sync(1, 128);  // the last store has read what is overwritten now
    }
    for (int column = 0; column < D; column += 16) {  // four matrices: rows 0 and 8, columns 0 and 8
      uint32_t four[4];
      for (int word = 0; word < 4; word++)
        four[word] = pack_word<T>(out[column / 2 + 2 * word], out[column / 2 + 2 * word + 1]);
      const int line = warp * 16 + lane % 16, chunk = column % 64 / 8 + lane / 16;
      stmatrix(shared.out + column / 64 * kRows * 128 + swizzled(line, chunk), four);
    }
    if (kBug != kNoProxyFence && kBug != kFenceBehindBarrier) fence_async_proxy();
    if (kBug != kNoStoreBarrier) named_barrier_sync(2, 128);
    if (thread == 0) {
      if (kBug == kFenceBehindBarrier) fence_async_proxy();
      for (int panel = 0; panel < S::kPanels; panel++)
        tma_store(p.out, shared.out + panel * kRows * 128, 64 * panel, 0, head, 0);
      bulk_commit();
      if (kBug != kNoReadWait && kBug != kNoStoreWait) bulk_wait_read<0>();
    }
    __syncwarp();
  }
  if (thread == 0 && kBug != kNoStoreWait) bulk_wait<0>();
}

// 384 threads start with 168 registers each, 64512 in all.
template <int kFewer, int kMore>
__global__ void __launch_bounds__(384, 1) registers() {
  if (threadIdx.x < 128) return fewer_registers<kFewer>();
  more_registers<kMore>();
}
template <int kFewer, int kMore>
void run_registers() {
  launch(registers<kFewer, kMore>, dim3(1), dim3(384), 0, nullptr);
}

// A product of a tile that the threads have written, and a word from each warp to the next one: out[i] = 0.
enum Slip { kNone, kNoBarrier, kOneFence, kWaitIsNoBarrier, kInsideAPattern, kUnevenOperand };
struct alignas(1024) SlipShared {
  unsigned char tile[72 * 128];
  float row[128];
};
template <Slip kSlip>
__global__ void __launch_bounds__(128, 1) slip(float* out) {
  SlipShared& shared = shared_memory<SlipShared>();
  const int thread = threadIdx.x;
  for (int i = thread; i < 72 * 8; i += 128) *reinterpret_cast<uint4*>(shared.tile + 16 * i) = make_uint4(0, 0, 0, 0);
  if (kSlip != kOneFence || thread == 0) fence_async_proxy();
  if (kSlip != kNoBarrier) __syncthreads();
  const uint64_t x = along_columns<72>(shared.tile, kSlip == kInsideAPattern ? 1 : 0, kSlip == kUnevenOperand ? 4 : 0);
  float d[32];
  wgmma_fence();
  wgmma<__nv_bfloat16, 64, false, false>(d, x, along_columns<72>(shared.tile, 0, 0), false);
  wgmma_commit();
  shared.row[thread] = static_cast<float>(thread);
  wgmma_wait<0>(d);
  if (kSlip != kWaitIsNoBarrier) __syncthreads();
  const int other = (thread + 32) % 128;
  out[thread] = d[0] + shared.row[other] - static_cast<float>(other);
}
template <Slip kSlip>
void run_slip(float* out) {
  launch(slip<kSlip>, dim3(1), dim3(128), sizeof(SlipShared), nullptr, out);
}
constexpr void (*kSlips[])(float*) = {run_slip<kNone>,           run_slip<kNoBarrier>,
                                      run_slip<kOneFence>,       run_slip<kWaitIsNoBarrier>,
                                      run_slip<kInsideAPattern>, run_slip<kUnevenOperand>};

// What named barriers are misused for, by the first warp of two.
enum Misuse { kTwice, kDiverged, kNoSuchBarrier, kNotWholeWarps };
template <Misuse kMisuse>
__global__ void __launch_bounds__(64, 1) misuse() {
  if (kMisuse == kTwice) return named_barrier_arrive(1, 96), named_barrier_sync(1, 96);
  if (threadIdx.x >= 32) return named_barrier_sync(1, 64);
  if (kMisuse == kDiverged && threadIdx.x < 16) return named_barrier_sync(2, 64);
  if (kMisuse == kDiverged) return named_barrier_sync(2, 64);
  named_barrier_sync(kMisuse == kNoSuchBarrier ? 16 : 1, kMisuse == kNotWholeWarps ? 40 : 64);
}
TensorMap map_of(void* data, int columns, int rows, int heads, int stride, int lines) {
  const uint64_t row = static_cast<uint64_t>(stride) * 2;
  return make_tensor_map({data,
                          {uint64_t(columns), uint64_t(rows), uint64_t(heads), 1},
                          {row, row * rows, row * rows * heads},
                          {64, uint32_t(lines), 1, 1}});
}

// margin: of keys, before the first and behind the last.
struct Problem {
  void *q, *k, *v, *out;
  int heads, keys, columns, margin, stride;
};

template <class T, int D, int N, Bug kBug = kSound, bool kInTwo = false>
void run(const Problem& p) {
  const auto map = [&](void* data, int rows, int lines) {
    return map_of(data, p.columns, rows, p.heads, p.stride, lines);
  };
  const int tiles = (p.keys + 2 * p.margin + N - 1) / N;
  const Arguments arguments{map(p.q, kRows, kRows),
                            map(p.k, p.keys, N),
                            map(p.v, p.keys, N),
                            map(p.out, kRows, kRows),
                            p.heads,
                            -p.margin,
                            tiles};
  launch(products<T, D, N, kBug, kInTwo>, dim3(1), dim3(256), sizeof(Shared<D, N>), nullptr, arguments);
}

// out (64, 64) = x^T y of bfloat16 tiles (64, 64): both operands along the lines of their tiles. Then `sums` (64, 64)
// floats += out, by a bulk copy.
struct Transposed {
  TensorMap x;
  const void* y;
  float *out, *sums;
};
struct alignas(1024) TransposedShared {
  unsigned char x[64 * 128], y[64 * 128], loaded[64 * 128];
  float out[64][64];
  Barrier full;
};
__global__ void __launch_bounds__(128, 1) transposed(const __grid_constant__ Transposed p) {
  TransposedShared& shared = shared_memory<TransposedShared>();
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread == 0) {
    shared.full.init(1);
    fence_barrier_init();
    shared.full.arrive_expect(2 * sizeof shared.x);
    tma_load(shared.x, p.x, shared.full, 0, 0, 0, 0);
    bulk_load(shared.loaded, p.y, sizeof shared.loaded, shared.full);
  }
  __syncthreads();
  shared.full.wait(0);
  for (int i = thread; i < 64 * 8; i += 128)  // a bulk copy does not swizzle
    *reinterpret_cast<uint4*>(shared.y + swizzled(i / 8, i % 8)) =
        *reinterpret_cast<const uint4*>(shared.loaded + 16 * i);
  fence_async_proxy();
  __syncthreads();
  float out[32];
  wgmma_fence();
  for (int line = 0; line < 64; line += 16)
    wgmma<__nv_bfloat16, 64, true, true>(out, along_lines<64>(shared.x, line, 0), along_lines<64>(shared.y, line, 0),
                                         line > 0);
  wgmma_commit();
  wgmma_wait<0>(out);
  for (int i = 0; i < 32; i++) {
    const int row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    shared.out[row][column] = out[i];
  }
  fence_async_proxy();
  __syncthreads();
  if (thread > 0) return;
  bulk_store(p.out, shared.out, sizeof shared.out);
  bulk_add(p.sums, &shared.out[0][0], sizeof shared.out);
  bulk_commit();
  bulk_wait<0>();
}

// kept (rows, 32): the halves of pair_mask() in the order of their columns. A quad has a row.
__global__ void __launch_bounds__(128, 1) kept_columns(const Dropout dropout, uint32_t (*kept)[16], int rows) {
  const DropoutMask mask(dropout);
  for (int row = threadIdx.x / 4; row < rows; row += 32) {
    const uint32_t words = mask.kept_in_quad(row, 0);
    for (int k = 0; k < 4; k++) kept[row][4 * k + threadIdx.x % 4] = DropoutMask::pair_mask(words, k);
  }
}

// Each block adds its item + 1 to `sums`, in turn; item 0 stores it. seen[item]: a sum when its terms had been read.
enum TurnBug { kInTurn, kNoTurn, kRaisedBeforeWait, kWrongTurn, kReadWaitOnly };
struct TurnShared {
  float terms[32];
  int item;
};
struct Turns {
  float *sums, *seen;
  int *next_item, *count;
};
template <TurnBug kBug>
__global__ void __launch_bounds__(32, 1) turns(const Turns p) {
  TurnShared& shared = shared_memory<TurnShared>();
  if (threadIdx.x == 0) shared.item = atomicAdd(p.next_item, 1);
  __syncthreads();
  const int item = shared.item;
  shared.terms[threadIdx.x] = static_cast<float>(item + 1);
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x > 0) return;
  if (kBug != kNoTurn) wait_for_count(p.count, kBug == kWrongTurn ? gridDim.x - 1 - item : item);
  if (item == 0)
    bulk_store(p.sums, shared.terms, sizeof shared.terms);
  else
    bulk_add(p.sums, shared.terms, sizeof shared.terms);
  bulk_commit();
  bulk_wait_read<0>();
  p.seen[item] = p.sums[31];
  if (kBug == kReadWaitOnly) return;
  if (kBug != kRaisedBeforeWait) bulk_wait<0>();
  raise_count(p.count);
  bulk_wait<0>();
}
template <TurnBug kBug>
void run_turns(const Turns& p, unsigned blocks) {
  launch(turns<kBug>, dim3(blocks), dim3(32), sizeof(TurnShared), nullptr, p);
}
constexpr void (*kTurns[])(const Turns&, unsigned) = {run_turns<kInTurn>, run_turns<kNoTurn>,
                                                      run_turns<kRaisedBeforeWait>, run_turns<kWrongTurn>,
                                                      run_turns<kReadWaitOnly>};

template <Misuse kMisuse>
void run_misuse(const Problem&) {
  launch(misuse<kMisuse>, dim3(1), dim3(64), 0, nullptr);
}

using B = __nv_bfloat16;
struct Named {
  const char* name;
  void (*run)(const Problem&);
};
constexpr Named kKernels[] = {
    {"bf16 64 64", run<B, 64, 64>},
    {"bf16 64 128", run<B, 64, 128>},
    {"fp16 64 64", run<__half, 64, 64>},
    {"bf16 96 64", run<B, 96, 64>},
    {"bf16 96 64 in two", run<B, 96, 64, kSound, true>},
    {"bf16 128 64", run<B, 128, 64>},
    {"no full wait", run<B, 64, 64, kNoFullWait>},
    {"wrong parity", run<B, 64, 64, kWrongParity>},
    {"no release", run<B, 64, 64, kNoRelease>},
    {"released twice", run<B, 64, 64, kReleasedTwice>},
    {"no empty wait", run<B, 64, 64, kNoEmptyWait>},
    {"release before wait", run<B, 64, 64, kReleaseBeforeWait>},
    {"no product wait", run<B, 64, 64, kNoProductWait>},
    {"operand overwritten", run<B, 64, 64, kOperandOverwritten>},
    {"no product fence", run<B, 64, 64, kNoProductFence>},
    {"no proxy fence", run<B, 64, 64, kNoProxyFence>},
    {"fence behind barrier", run<B, 64, 64, kFenceBehindBarrier>},
    {"no store barrier", run<B, 64, 64, kNoStoreBarrier>},
    {"no read wait", run<B, 64, 64, kNoReadWait>},
    {"no store wait", run<B, 64, 64, kNoStoreWait>},
    {"wrong bytes", run<B, 64, 64, kWrongBytes>},
    {"no init fence", run<B, 64, 64, kNoInitFence>},
    {"not initialised", run<B, 64, 64, kNotInitialised>},
    {"half a barrier", run<B, 64, 64, kHalfABarrier>},
    {"two counts", run<B, 64, 64, kTwoCounts>},
    {"too many registers", [](const Problem&) { run_registers<32, 240>(); }},
    {"more is fewer", [](const Problem&) { run_registers<24, 160>(); }},
    {"no context", run<B, 64, 64>},
    {"arrives twice", run_misuse<kTwice>},
    {"diverged", run_misuse<kDiverged>},
    {"no such barrier", run_misuse<kNoSuchBarrier>},
    {"not whole warps", run_misuse<kNotWholeWarps>},
    {"descriptor outside", run<B, 64, 64, kDescriptorOutside>},
};

template <class Act>
const char* error_of(Act&& act) {
  static std::string message;
  message.clear();
  try {
    act();
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

}  // namespace

// Each returns the error's text, or an empty string.
#define EXPORT extern "C" __attribute__((visibility("default"))) const char*
EXPORT run_products(const char* name, void* q, void* k, void* v, void* out, int heads, int keys, int columns,
                    int margin, int stride) {
  return error_of([&] {
    const std::string wanted = name;
    if (wanted != "no context") cudaSetDevice(0);
    for (const Named& kernel : kKernels)
      if (wanted == kernel.name) return kernel.run({q, k, v, out, heads, keys, columns, margin, stride});
    throw std::runtime_error("no kernel " + wanted);
  });
}

EXPORT run_transposed(void* x, const void* y, float* out, float* sums, int offset) {
  return error_of([&] {
    cudaSetDevice(0);
    char* const data = static_cast<char*>(x) + offset;
    const TensorMap map = make_tensor_map({data, {64, 64, 1, 1}, {128, 8192, 8192}, {64, 64, 1, 1}});
    launch(transposed, dim3(1), dim3(128), sizeof(TransposedShared), nullptr, Transposed{map, y, out, sums});
  });
}

EXPORT run_turns(int which, float* sums, float* seen, int* counters, int blocks) {
  return error_of([&] { kTurns[which]({sums, seen, counters, counters + 1}, static_cast<unsigned>(blocks)); });
}

EXPORT run_slip(int which, float* out) {
  return error_of([&] { kSlips[which](out); });
}

// rows: a multiple of 32.
EXPORT run_kept_columns(const int64_t* rng_state, uint32_t threshold, uint32_t (*kept)[16], int rows) {
  return error_of(
      [&] { launch(kept_columns, dim3(1), dim3(128), 0, nullptr, Dropout{rng_state, threshold, 1.0f}, kept, rows); });
}
