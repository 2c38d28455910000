// Host twin of common/sm90/tma.cuh.
#pragma once
#include "common/sm90/tensor_map.h"
#include "host/mbarrier.h"

namespace fastattn::host {

enum class Direction { load, store, add };

// A swizzled address: bits 4 to 6 of the offset in shared memory, exclusive or bits 7 to 9.
inline size_t swizzle_128(size_t offset) { return offset ^ (offset >> 7 & 7) << 4; }

// The work of one TMA instruction: every element of the box.
void move_box(Direction direction, const sm90::TensorMap& map, size_t shared_offset, const std::array<int, 4>& corner);
int box_bytes(const sm90::TensorMap& map);
void check_bulk(const void* global, int bytes, Site site);  // of a bulk copy

void start_load(void* to, int bytes, int alignment, sm90::Barrier& barrier, Site site, std::function<void(size_t)> copy);
void start_store(const void* from, int bytes, int alignment, Site site, std::function<void(size_t)> copy);

}  // namespace fastattn::host

namespace fastattn::sm90 {

inline void prefetch(const TensorMap&) {}

inline void tma_load(void* to, const TensorMap& map, Barrier& barrier, int c0, int c1, int c2, int c3, FASTATTN_HOST_PLACE) {
  host::start_load(to, host::box_bytes(map), 128, barrier, FASTATTN_HOST_SITE, [map, c0, c1, c2, c3](size_t offset) {
    host::move_box(host::Direction::load, map, offset, {c0, c1, c2, c3});
  });
}

inline void tma_store(const TensorMap& map, const void* from, int c0, int c1, int c2, int c3, FASTATTN_HOST_PLACE) {
  host::start_store(from, host::box_bytes(map), 128, FASTATTN_HOST_SITE, [map, c0, c1, c2, c3](size_t offset) {
    host::move_box(host::Direction::store, map, offset, {c0, c1, c2, c3});
  });
}

inline void tma_add(const TensorMap& map, const void* from, int c0, int c1, int c2, int c3, FASTATTN_HOST_PLACE) {
  if (!map.layout.is_float) host::Block::current->fail(FASTATTN_HOST_SITE.text() + ": adds floats only");
  host::start_store(from, host::box_bytes(map), 128, FASTATTN_HOST_SITE, [map, c0, c1, c2, c3](size_t offset) {
    host::move_box(host::Direction::add, map, offset, {c0, c1, c2, c3});
  });
}

inline void bulk_load(void* to, const void* from, int bytes, Barrier& barrier, FASTATTN_HOST_PLACE) {
  host::check_bulk(from, bytes, FASTATTN_HOST_SITE);
  host::start_load(to, bytes, 16, barrier, FASTATTN_HOST_SITE, [from, bytes](size_t offset) {
    auto& block = *host::Block::current;
    std::memcpy(block.shared + offset, from, bytes);
    std::memcpy(block.async_view + offset, from, bytes);
  });
}

inline void bulk_store(void* to, const void* from, int bytes, FASTATTN_HOST_PLACE) {
  host::check_bulk(to, bytes, FASTATTN_HOST_SITE);
  host::start_store(from, bytes, 16, FASTATTN_HOST_SITE, [to, bytes](size_t offset) {
    std::memcpy(to, host::Block::current->async_view + offset, bytes);
  });
}

inline void bulk_add(float* to, const float* from, int bytes, FASTATTN_HOST_PLACE) {
  host::check_bulk(to, bytes, FASTATTN_HOST_SITE);
  host::start_store(from, bytes, 16, FASTATTN_HOST_SITE, [to, bytes](size_t offset) {
    for (int i = 0; i < bytes / 4; i++) {
      float term;
      std::memcpy(&term, host::Block::current->async_view + offset + 4 * i, 4);
      to[i] += term;
    }
  });
}

inline void bulk_commit() { host::Block::current->thread->stores.commit(); }
template <int kUnderWay>
void bulk_wait() {
  host::Block::current->thread->stores.wait(kUnderWay);
}
template <int kUnderWay>
void bulk_wait_read() {
  host::Block::current->thread->stores.wait(kUnderWay);
}

}  // namespace fastattn::sm90
