// One block of a launch on the CPU: its threads as fibers, its barrier, its warps' collectives, its shared memory.
//
// A thread runs until it waits; then the next ready thread of its warp runs, and only when its warp can do no more, another
// warp. Warps thus run as far ahead of each other as the barriers allow, in an order (Order) that tests vary: a missing
// barrier shows as a wrong or NaN result in one order or another, because shared memory starts as NaN in every block.
// What cannot go on, or is undefined on a GPU, is reported as an exception: threads that wait for each other for ever, a
// barrier reached from two places of the source, lanes that a collective names but that have left or wait elsewhere, a
// shuffle that reads a lane outside its mask, and a write past the end of shared memory.
// Not modelled: memory fences and caches (all accesses are in program order), bank conflicts, time.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "host/fiber.h"

namespace fastattn::host {

constexpr int kLanes = 32;

// Where in the source a thread waits.
struct Site {
  const char* what;
  const char* file;
  int line;

  bool operator==(const Site& other) const { return line == other.line && file == other.file && what == other.what; }
  std::string text() const { return std::string(what) + " (" + file + ":" + std::to_string(line) + ")"; }
};

// The order in which warps, lanes and blocks get their turn: FASTATTN_HOST_ORDER = forward (default), reverse, or the seed
// of a random order. Read at each launch.
class Order {
 public:
  static Order from_environment();
  std::vector<uint64_t> permutation(uint64_t count);
  int lane(uint32_t ready);  // one of the set bits

 private:
  enum class Kind { forward, reverse, random };
  uint32_t next_random();

  Kind kind_ = Kind::forward;
  uint32_t state_ = 0;
};

struct Thread {
  Fiber fiber;
  uint3 index;
  int linear;
  bool finished = false;
  Site waits_at = {};

  int warp() const { return linear / kLanes; }
  int lane() const { return linear % kLanes; }
};

class Block {
 public:
  // What the last thread to arrive computes for all: slots[lane] is what each lane of the mask brought.
  using Exchange = std::function<void(void* const* slots)>;

  Block(dim3 grid, dim3 dim, uint3 index, size_t shared_bytes, Order& order, const std::function<void()>& body);
  void run();  // throws std::runtime_error with what went wrong

  void barrier(Site site);
  void collective(uint32_t mask, void* slot, Site site, const Exchange& exchange);
  [[noreturn]] void fail(const std::string& what);

  const dim3 grid, dim;
  const uint3 index;
  Thread* thread = nullptr;  // the one that runs
  unsigned char* const shared;

  static thread_local Block* current;

 private:
  struct Meeting {
    uint32_t mask, arrived;
    Site site;
    void* slots[kLanes];
  };

  static void enter();
  Thread* next();
  void wait(Site site);
  void wake(int warp, uint32_t lanes) { ready_[warp] |= lanes; }
  std::string whereabouts() const;

  const size_t shared_bytes_;
  Order& order_;
  const std::function<void()>& body_;
  Fiber scheduler_;
  std::vector<Thread> threads_;
  std::vector<uint64_t> warp_order_;
  std::vector<uint32_t> ready_;                 // a bit for each lane of a warp
  std::vector<std::vector<Meeting>> meetings_;  // of each warp
  int alive_, at_barrier_ = 0;
  Site barrier_site_ = {};
  std::string failure_;
};

}  // namespace fastattn::host
