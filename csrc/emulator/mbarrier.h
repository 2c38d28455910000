// CPU version of common/sm90/barrier.cuh.
#pragma once
#include "emulator/block.h"
#include "emulator/intrinsics.h"

namespace fastattn::sm90 {

class Barrier {
 public:
  void init(int arrivals, FASTATTN_EMULATOR_PLACE) {
    auto& block = check(FASTATTN_EMULATOR_SITE, false);
    if (arrivals < 1 || arrivals > emulator::kMaxThreads)
      block.fail(FASTATTN_EMULATOR_SITE.text() + ": a barrier is for 1 to 1024 arrivals, got " +
                 std::to_string(arrivals));
    state_ = static_cast<uint16_t>(kTag | arrivals);
    pending_ = static_cast<uint16_t>(arrivals);
    bytes_ = 0;
    block.barriers_initialised = false;
  }
  void arrive(FASTATTN_EMULATOR_PLACE) {
    check(FASTATTN_EMULATOR_SITE).thread->proxy_fenced = false;
    pending_--;
    settle();
  }
  void arrive_if(bool condition, FASTATTN_EMULATOR_PLACE) {
    if (condition) arrive(file, line);
  }
  void arrive_expect(int bytes, FASTATTN_EMULATOR_PLACE) {
    auto& block = check(FASTATTN_EMULATOR_SITE);
    if (bytes < 0 || bytes > kMaxBytes)
      block.fail(FASTATTN_EMULATOR_SITE.text() + ": cannot expect " + std::to_string(bytes) + " bytes");
    bytes_ += bytes;
    pending_--;
    settle();
  }
  void wait(int parity, FASTATTN_EMULATOR_PLACE) {
    auto& block = check(FASTATTN_EMULATOR_SITE);
    if (parity != 0 && parity != 1) block.fail(FASTATTN_EMULATOR_SITE.text() + ": a parity is 0 or 1");
    while (state_ >> kPhaseBit == parity) block.sleep(FASTATTN_EMULATOR_SITE);
  }
  // Announced bytes have arrived. Called by TMA and bulk copies only.
  void complete(int bytes) {
    bytes_ -= bytes;
    settle();
  }
  // Fails unless TMA may signal this barrier.
  emulator::Block& check(emulator::Site site, bool initialised = true) const {
    auto& block = *emulator::Block::current;
    if (block.shared_offset(this, sizeof *this, site.what) % sizeof *this != 0)
      block.fail(site.text() + ": the barrier is not at a multiple of 8 bytes");
    if (initialised && (state_ & kTagMask) != kTag) block.fail(site.text() + ": the barrier was never initialised");
    return block;
  }

 private:
  static constexpr int kTag = 5 << 11, kTagMask = 15 << 11, kPhaseBit = 15;
  static constexpr int kMaxBytes = (1 << 20) - 1;

  // Ends the phase if nothing is missing.
  void settle() {
    auto& block = *emulator::Block::current;
    const int expected = state_ & 0x7ff;
    if (pending_ > expected) block.fail("mbarrier: more arrivals than it was initialised for");
    if (bytes_ > kMaxBytes || bytes_ < -kMaxBytes) block.fail("mbarrier: too many bytes under way");
    if (pending_ != 0 || bytes_ != 0) return;
    pending_ = static_cast<uint16_t>(expected);
    state_ ^= 1 << kPhaseBit;
    block.wake_sleepers();
  }

  uint16_t state_;    // arrivals of a phase (11 bits), the tag of an initialised barrier, the phase in progress
  uint16_t pending_;  // arrivals that are missing
  int32_t bytes_;     // announced and missing
};
static_assert(sizeof(Barrier) == 8);

inline void fence_barrier_init() { emulator::Block::current->barriers_initialised = true; }
inline void fence_async_proxy() { emulator::Block::current->fence_async_proxy(); }
inline void fence_async_proxy_after_reads() {}  // reads are in program order here

inline void wait_for_count(const int* counter, int count, FASTATTN_EMULATOR_PLACE) {
  emulator::Block::current->wait_for_count(counter, count, FASTATTN_EMULATOR_SITE);
}
inline void raise_count(int* counter, FASTATTN_EMULATOR_PLACE) {
  auto& block = *emulator::Block::current;
  if (!block.thread->stores.idle())
    block.fail(FASTATTN_EMULATOR_SITE.text() + ": no bulk_wait() for a store or an addition of this thread");
  ++*counter;
  block.yield();
}

}  // namespace fastattn::sm90
