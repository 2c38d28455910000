#include "emulator/wgmma.h"

#include <cuda_bf16.h>

#include "emulator/tma.h"

#pragma GCC optimize("O3")

namespace fastattn::emulator {
namespace {

constexpr int kM = 64, kK = 16, kMaxN = 256;

struct Registers {
  float* d[kGroupThreads];
  const uint32_t* a[kGroupThreads];
};

float to_float(uint16_t bits, bool is_half) {
  if (is_half) return __half2float(__half(__half_raw{bits}));
  return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits}));
}

// Element (line, k) of an operand in shared memory: the descriptor's start, leading and stride byte offsets, as PTX
// defines them for swizzled tiles of 16-bit elements.
float element(uint64_t descriptor, bool transposed, int line, int k, bool is_half) {
  Block& block = *Block::current;
  const size_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const size_t stride = (descriptor >> 32 & 0x3fff) << 4;
  const size_t offset = transposed ? line / 64 * leading + k / 8 * stride + k % 8 * 128 + line % 64 * 2
                                   : line / 8 * stride + line % 8 * 128 + k * 2;
  const size_t place = swizzle_128(start + offset);
  block.check_shared(place, 2, "wgmma");
  uint16_t bits;
  std::memcpy(&bits, block.async_view + place, 2);
  return to_float(bits, is_half);
}

// Without a base offset the pattern of the swizzle, eight lines, begins at a multiple of 1024 bytes. An operand begins
// with a pattern's first line, or anywhere in it if the sum runs along the columns.
void check_descriptor(uint64_t descriptor, bool transposed, Site site) {
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
    Block::current->fail(site.text() + ": a descriptor has a 128-byte swizzle and no base offset");
  if ((descriptor << 4) % 1024 >= (transposed ? 1 : 128))
    Block::current->fail(site.text() + ": an operand does not start with the first of eight swizzled lines");
}

// The row and column of a thread's i-th number of a 64 x n accumulator.
int row_of(int thread, int i) { return thread / kLanes * 16 + thread % kLanes / 4 + i / 2 % 2 * 8; }
int column_of(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

void multiply(const Product& p, const Registers& registers) {
  float a[kM][kK], b[kK][kMaxN], d[kM][kMaxN] = {};
  if (p.a_words == nullptr) {
    for (int m = 0; m < kM; m++)
      for (int k = 0; k < kK; k++) a[m][k] = element(p.a, p.transpose_a, m, k, p.is_half);
  } else {
    for (int thread = 0; thread < kGroupThreads; thread++)
      for (int i = 0; i < 8; i++)  // words 0 to 3 have the values of accumulators 0 to 7
        a[row_of(thread, i)][column_of(thread, i)] =
            to_float(static_cast<uint16_t>(registers.a[thread][i / 2] >> (i % 2 * 16)), p.is_half);
  }
  for (int n = 0; n < p.n; n++)
    for (int k = 0; k < kK; k++) b[k][n] = element(p.b, p.transpose_b, n, k, p.is_half);
  for (int m = 0; m < kM; m++)
    for (int k = 0; k < kK; k++)
      for (int n = 0; n < p.n; n++) d[m][n] += a[m][k] * b[k][n];
  for (int thread = 0; thread < kGroupThreads; thread++)
    for (int i = 0; i < p.n / 2; i++) {
      float& to = registers.d[thread][i];
      to = d[row_of(thread, i)][column_of(thread, i)] + (p.accumulate ? to : 0.0f);
    }
}

}  // namespace

void start_product(Product product, Site site) {
  Block& block = *Block::current;
  block.warpgroup_collective(&product, site, [&](void* const* slots) {
    Registers registers;
    for (int i = 0; i < kGroupThreads; i++) {
      const Product& other = *static_cast<const Product*>(slots[i]);
      if (other.a != product.a || other.b != product.b || other.accumulate != product.accumulate)
        block.fail(site.text() + ": the threads of a warpgroup give different operands");
      registers.d[i] = other.d, registers.a[i] = other.a_words;
    }
    if (!block.warpgroup().fenced.all()) block.fail(site.text() + ": no wgmma_fence() since the last wait");
    block.check_barrier_after_fence(site);
    if (product.a_words == nullptr) check_descriptor(product.a, product.transpose_a, site);
    check_descriptor(product.b, product.transpose_b, site);
    block.start_reading(block.warpgroup().products, [product, registers] { multiply(product, registers); });
  });
}

void store_matrices(void* row, const uint32_t* words, Site site) {
  struct Slot {
    size_t offset;
    const uint32_t* words;
  } mine{Block::current->shared_offset(row, 16, site.what), words};
  if (mine.offset % 16 != 0) Block::current->fail(site.text() + ": a row is not at a multiple of 16 bytes");
  Block::current->collective(0xffffffffu, &mine, site, [](void* const* slots) {
    for (int matrix = 0; matrix < 4; matrix++)
      for (int line = 0; line < 8; line++) {
        const size_t offset = static_cast<const Slot*>(slots[matrix * 8 + line])->offset;
        for (int word = 0; word < 4; word++)
          std::memcpy(Block::current->shared + offset + 4 * word,
                      &static_cast<const Slot*>(slots[line * 4 + word])->words[matrix], 4);
      }
  });
}

}  // namespace fastattn::emulator
