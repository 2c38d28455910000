// CPU version of common/sm90/wgmma.cuh.
#pragma once
#include <cuda_fp16.h>

#include <type_traits>

#include "emulator/block.h"
#include "emulator/intrinsics.h"

namespace fastattn::emulator {

struct Product {
  float* d;
  const uint32_t* a_words;  // null: A is in shared memory
  uint64_t a, b;            // descriptors
  int n;
  bool is_half, transpose_a, transpose_b, accumulate;
};

void start_product(Product product, Site site);
void store_matrices(void* row, const uint32_t* words, Site site);

}  // namespace fastattn::emulator

namespace fastattn::sm90 {

inline uint32_t descriptor_address(const void* at, uint32_t offset) {
  auto& block = *emulator::Block::current;
  const size_t start = block.shared_offset(at, 1, "descriptor") + offset;
  if (start % 16 != 0) block.fail("descriptor: an operand does not start at a multiple of 16 bytes");
  return static_cast<uint32_t>(start >> 4);
}

// Only nvcc needs the arrays of registers.
template <class A = int, class B = int>
void wgmma_fence(const A& = {}, const B& = {}, FASTATTN_EMULATOR_PLACE) {
  auto& block = *emulator::Block::current;
  block.at_products(FASTATTN_EMULATOR_SITE, [&](auto warps) { block.warpgroup().fenced |= warps; });
}
inline void wgmma_commit(FASTATTN_EMULATOR_PLACE) {
  auto& block = *emulator::Block::current;
  block.warpgroup_collective(nullptr, FASTATTN_EMULATOR_SITE,
                             [&](void* const*) { block.warpgroup().products.commit(); });
}
template <int kUnderWay, class A = int, class B = int>
void wgmma_wait(const A& = {}, const B& = {}, FASTATTN_EMULATOR_PLACE) {
  auto& block = *emulator::Block::current;
  block.wait_for_products(kUnderWay, FASTATTN_EMULATOR_SITE);
}

template <class T, int kN, bool kTransposeA, bool kTransposeB>
void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate, FASTATTN_EMULATOR_PLACE) {
  emulator::start_product({d, nullptr, a, b, kN, std::is_same_v<T, __half>, kTransposeA, kTransposeB, accumulate},
                          FASTATTN_EMULATOR_SITE);
}
template <class T, int kN, bool kTransposeB>
void wgmma(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate, FASTATTN_EMULATOR_PLACE) {
  emulator::start_product({d, a, 0, b, kN, std::is_same_v<T, __half>, false, kTransposeB, accumulate},
                          FASTATTN_EMULATOR_SITE);
}

template <int kRegisters>
void more_registers(FASTATTN_EMULATOR_PLACE) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  emulator::Block::current->change_registers(kRegisters, true, FASTATTN_EMULATOR_SITE);
}
template <int kRegisters>
void fewer_registers(FASTATTN_EMULATOR_PLACE) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  emulator::Block::current->change_registers(kRegisters, false, FASTATTN_EMULATOR_SITE);
}

inline void stmatrix(void* row, const uint32_t (&words)[4], FASTATTN_EMULATOR_PLACE) {
  emulator::store_matrices(row, words, FASTATTN_EMULATOR_SITE);
}

}  // namespace fastattn::sm90
