// CPU versions of common/mma.cuh and of the ldmatrix of common/fragment.cuh.
#pragma once
#include "emulator/intrinsics.h"

namespace fastattn {
namespace emulator {

// Element i of a word. Of tf32 the low bits are ignored.
template <class T>
float element(uint32_t word, [[maybe_unused]] int i) {
  if constexpr (sizeof(T) == 4) {
    return as_float(word & 0xffffe000u);
  } else {
    T pair[2];
    std::memcpy(static_cast<void*>(pair), &word, 4);
    return static_cast<float>(pair[i]);
  }
}

inline float toward_zero(double x) {
  const float nearest = static_cast<float>(x);
  return !std::isinf(nearest) && std::abs(nearest) > std::abs(x) ? std::nextafterf(nearest, 0.0f) : nearest;
}

}  // namespace emulator

template <class T>
void mma_instruction(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* file = __builtin_FILE(),
                     int line = __builtin_LINE()) {
  struct Operands {
    float* d;
    const uint32_t *a, *b;
  } mine{d, a, b};
  static constexpr int kDepth = kMmaDepth<T>, kWord = kDepth / 8;  // elements of a word
  emulator::Block::current->collective(0xffffffffu, &mine, {"mma", file, line}, [](void* const* slots) {
    float rows[16][kDepth], columns[8][kDepth];
    for (int lane = 0; lane < emulator::kLanes; lane++) {
      const Operands& of = *static_cast<Operands*>(slots[lane]);
      for (int i = 0; i < 4; i++)
        for (int e = 0; e < kWord; e++) {
          const int k = (lane % 4 + i / 2 * 4) * kWord + e;
          rows[lane / 4 + i % 2 * 8][k] = emulator::element<T>(of.a[i], e);
          if (i < 2) columns[lane / 4][(lane % 4 + i * 4) * kWord + e] = emulator::element<T>(of.b[i], e);
        }
    }
    for (int lane = 0; lane < emulator::kLanes; lane++)
      for (int i = 0; i < 4; i++) {
        const float *row = rows[lane / 4 + i / 2 * 8], *column = columns[lane % 4 * 2 + i % 2];
        float& to = static_cast<Operands*>(slots[lane])->d[i];
        double sum = to;
        for (int k = 0; k < kDepth; k++) sum += double{row[k]} * column[k];
        to = emulator::toward_zero(sum);  // as tensor cores round
      }
  });
}

inline uint32_t round_tf32(uint32_t word) {
  const bool finite = (word & 0x7f800000u) != 0x7f800000u;
  return finite ? (word + 0x1000u) & 0xffffe000u : word;
}

template <bool kTransposed>
void ldmatrix(uint32_t (&words)[4], const void* row, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  struct Slot {
    uint32_t* words;
    const unsigned char* row;
  } mine{words, static_cast<const unsigned char*>(row)};
  emulator::Block& block = *emulator::Block::current;
  const emulator::Site site{"ldmatrix", file, line};
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) block.fail(site.text() + ": an address is not a multiple of 16");
  block.collective(0xffffffffu, &mine, site, [](void* const* slots) {
    const auto row_of = [&](int matrix, int i) { return static_cast<Slot*>(slots[8 * matrix + i])->row; };
    for (int lane = 0; lane < emulator::kLanes; lane++)
      for (int matrix = 0; matrix < 4; matrix++) {
        uint32_t word;
        if (kTransposed) {
          uint16_t pair[2];
          for (int e = 0; e < 2; e++) std::memcpy(&pair[e], row_of(matrix, lane % 4 * 2 + e) + lane / 4 * 2, 2);
          std::memcpy(&word, pair, 4);
        } else {
          std::memcpy(&word, row_of(matrix, lane / 4) + lane % 4 * 4, 4);
        }
        static_cast<Slot*>(slots[lane])->words[matrix] = word;
      }
  });
}

}  // namespace fastattn
