// CPU version of common/sm90/tma.cuh.
#pragma once
#include "common/sm90/tensor_map.h"
#include "emulator/mbarrier.h"

namespace fastattn::emulator {

enum class Direction { load, store };

// A swizzled address: bits 4 to 6 of the offset in shared memory, xor bits 7 to 9.
inline size_t swizzle_128(size_t offset) { return offset ^ (offset >> 7 & 7) << 4; }

// Moves every element of the box, as one TMA instruction does. box: its bytes, which are at `shared_offset` in shared
// memory, as the asynchronous proxy sees them.
void move_box(Direction direction, const sm90::TensorMap& map, size_t shared_offset, unsigned char* box,
              const std::array<int, 4>& corner);
int box_bytes(const sm90::TensorMap& map);
void check_bulk(const void* global, int bytes, Site site);  // of a bulk copy

void start_load(void* to, int bytes, int alignment, sm90::Barrier& barrier, Site site,
                std::function<void(size_t)> copy);
// write(source, offset) gets the source's bytes, which were at this offset in shared memory.
void start_store(const void* from, int bytes, int alignment, Site site,
                 std::function<void(unsigned char*, size_t)> write);

}  // namespace fastattn::emulator

namespace fastattn::sm90 {

inline void prefetch(const TensorMap&) {}

inline void tma_load(void* to, const TensorMap& map, Barrier& barrier, int c0, int c1, int c2, int c3,
                     FASTATTN_EMULATOR_PLACE) {
  emulator::start_load(to, emulator::box_bytes(map), 128, barrier, FASTATTN_EMULATOR_SITE,
                       [map, c0, c1, c2, c3](size_t offset) {
                         emulator::move_box(emulator::Direction::load, map, offset,
                                            emulator::Block::current->async_view + offset, {c0, c1, c2, c3});
                       });
}

inline void tma_store(const TensorMap& map, const void* from, int c0, int c1, int c2, int c3, FASTATTN_EMULATOR_PLACE) {
  emulator::start_store(from, emulator::box_bytes(map), 128, FASTATTN_EMULATOR_SITE,
                        [map, c0, c1, c2, c3](unsigned char* source, size_t offset) {
                          emulator::move_box(emulator::Direction::store, map, offset, source, {c0, c1, c2, c3});
                        });
}

inline void bulk_load(void* to, const void* from, int bytes, Barrier& barrier, FASTATTN_EMULATOR_PLACE) {
  emulator::check_bulk(from, bytes, FASTATTN_EMULATOR_SITE);
  emulator::start_load(to, bytes, 16, barrier, FASTATTN_EMULATOR_SITE, [from, bytes](size_t offset) {
    auto& block = *emulator::Block::current;
    std::memcpy(block.shared + offset, from, bytes);
    std::memcpy(block.async_view + offset, from, bytes);
  });
}

inline void bulk_store(void* to, const void* from, int bytes, FASTATTN_EMULATOR_PLACE) {
  emulator::check_bulk(to, bytes, FASTATTN_EMULATOR_SITE);
  emulator::Block::current->yield();
  emulator::start_store(from, bytes, 16, FASTATTN_EMULATOR_SITE,
                        [to, bytes](unsigned char* source, size_t) { std::memcpy(to, source, bytes); });
}

inline void bulk_add(float* to, const float* from, int bytes, FASTATTN_EMULATOR_PLACE) {
  emulator::check_bulk(to, bytes, FASTATTN_EMULATOR_SITE);
  emulator::Block::current->yield();
  emulator::start_store(from, bytes, 16, FASTATTN_EMULATOR_SITE, [to, bytes](unsigned char* source, size_t) {
    for (int i = 0; i < bytes / 4; i++) {
      float term;
      std::memcpy(&term, source + 4 * i, 4);
      to[i] += term;
    }
  });
}

inline void bulk_commit() {
  emulator::Thread& thread = *emulator::Block::current->thread;
  thread.store_reads.commit(), thread.stores.commit();
}
template <int kUnderWay>
void bulk_wait_read() {
  emulator::Block::current->thread->store_reads.wait(kUnderWay);
}
template <int kUnderWay>
void bulk_wait() {
  bulk_wait_read<kUnderWay>();
  emulator::Block::current->thread->stores.wait(kUnderWay);
}

}  // namespace fastattn::sm90
