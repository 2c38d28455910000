// A block of a launch on the CPU: its threads as fibers, its barrier, its warps' collectives, its shared memory.
//
// A thread runs until it waits; then the next ready thread of its warp runs. If its whole warp waits, another warp
// runs, first one of its warpgroup. So warps and warpgroups run as far ahead of each other as the barriers allow, in an
// order (Order) that tests vary. Shared memory starts as NaN in every block, so a missing barrier gives a wrong or NaN
// result in some order. Asynchronous work is done as early or as late as possible: async.h.
// Up to three blocks are resident at once. A block yields after atomicAdd on global memory and raise_count(), before a
// bulk store or addition, and when all its threads wait and one of them in wait_for_count(). Then the next block starts
// if fewer than three are resident; else, of those that can continue, the one that started last does. So later blocks
// overtake earlier ones unless they wait for them, and a wait for a block that has not started is a deadlock. A kernel
// without these calls runs one block after the other. A loop that polls memory in any other way does not end.
// Deadlocks, and what is undefined on a GPU, raise an exception: a barrier reached from two places of the source, lanes
// in the mask of a collective that have left or wait elsewhere, a shuffle that reads a lane outside its mask,
// asynchronous work without a wait, and a write to the 4 KiB before or after shared memory.
// The asynchronous proxy (TMA, wgmma) sees what threads wrote to shared memory only after fence.proxy.async: it reads a
// second copy of shared memory, which that fence updates. PTX's rules for that fence, for wgmma's fence, for the
// barriers after them and for registers are checked, even if results are right.
// Not modelled: other memory fences and caches (all accesses are in program order), bank conflicts, time.
#pragma once
#include <cuda_runtime.h>

#include <array>
#include <bitset>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "emulator/async.h"
#include "emulator/fiber.h"

namespace fastattn::emulator {

constexpr int kLanes = 32, kGroupWarps = 4, kGroupThreads = kLanes * kGroupWarps;
constexpr int kMaxThreads = 1024;
constexpr int kMaxResident = 3;  // blocks

// The source line at which a thread waits.
struct Site {
  const char* what;
  const char* file;
  int line;

  bool operator==(const Site& other) const { return line == other.line && file == other.file && what == other.what; }
  std::string text() const { return std::string(what) + " (" + file + ":" + std::to_string(line) + ")"; }
};

// The order of warps, lanes, blocks and asynchronous work: FASTATTN_EMULATOR_ORDER = forward (default), reverse, or the
// seed of a random order. FASTATTN_EMULATOR_ASYNC = lazy (default), eager or crossed: async.h. Both may be lists, such
// as forward,reverse,1, whose entries the blocks of a launch use in turn. Both are read at each launch.
class Order {
 public:
  Order(const std::string& name, const std::string& completion);
  static std::vector<Order> from_environment();  // of block 0, 1, ..; then the first again
  std::vector<uint64_t> permutation(uint64_t count);
  int lane(uint32_t ready);                          // one of the set bits
  size_t pick(size_t count);                         // which of `count` asynchronous works is done first
  size_t first_warp(size_t last, size_t count);      // where in the permutation the search for a ready warp begins
  bool groups_stay();                                // whether warps of the same warpgroup run first
  bool groups_meet() const { return groups_meet_; }  // at fences and waits of wgmma: not where the seed is odd
  bool writes_early() const { return writes_early_; }
  bool reads_early() const { return reads_early_; }

 private:
  enum class Kind { forward, reverse, random };
  uint32_t next_random();

  Kind kind_ = Kind::forward;
  uint32_t state_ = 0;
  bool writes_early_ = false, reads_early_ = false, groups_meet_ = true;
};

struct Thread {
  Fiber fiber;
  uint3 index;
  int linear;
  bool finished = false;
  Site waits_at = {};
  AsyncGroups copies = {};                    // cp.async
  AsyncGroups store_reads = {}, stores = {};  // of TMA and bulk copies: reads of the source, and writes
  bool proxy_fenced = false;                  // by fence.proxy.async, since its last barrier

  int warp() const { return linear / kLanes; }
  int lane() const { return linear % kLanes; }
  int warpgroup() const { return linear / kGroupThreads; }
};

// Four warps that issue wgmma together.
struct Warpgroup {
  int arrived = 0;
  Site site = {};
  void* slots[kGroupThreads];
  AsyncGroups products = {};
  std::bitset<kGroupWarps> fenced = {};   // by wgmma.fence, since the warp's last wait
  std::bitset<kGroupWarps> waiting = {};  // for products
  int registers = 0;                      // of each thread: from the launch, and then by setmaxnreg
};

// bar.sync and bar.arrive with a number of threads.
struct NamedBarrier {
  int count = 0;
  std::bitset<kMaxThreads> arrived, waiting, fenced;  // fenced: by fence.proxy.async, before they arrived
  std::array<Site, kMaxThreads / kLanes> sites;       // of each warp
};

// Frees the stacks of the threads of all blocks so far.
void release_stacks();

class Block {
 public:
  // Computed by the last thread to arrive, for all: slots[lane] is the argument of each lane in the mask.
  using Exchange = std::function<void(void* const* slots)>;
  static constexpr int kNamedBarriers = 16;

  enum class State { yields, waits, finished };  // waits: for other blocks

  // place: of its shared memory and stacks, 0 to kMaxResident - 1. No other block has it.
  Block(dim3 grid, dim3 dim, uint3 index, int place, size_t shared_bytes, Order& order,
        const std::function<void()>& body);
  State run();                      // continues; throws std::runtime_error with the error
  [[noreturn]] void report_wait();  // for a count that no block will raise

  void barrier(Site site);
  void named_barrier(int id, int count, bool waits, Site site);
  void collective(uint32_t mask, void* slot, Site site, const Exchange& exchange);
  void warpgroup_collective(void* slot, Site site, const Exchange& exchange);  // slots of its 128 threads
  // For wgmma.fence and waits: act runs once for each warp, or once for all four together; only some orders do the
  // latter, as PTX does not promise it. act gets the warps of the warpgroup.
  void at_products(Site site, const std::function<void(std::bitset<kGroupWarps>)>& act);
  void wait_for_products(size_t left, Site site);  // unless reads are early, until no thread can continue
  Warpgroup& warpgroup() { return warpgroups_[thread->warpgroup()]; }
  void change_registers(int count, bool more, Site site);  // setmaxnreg, by a whole warpgroup

  // Work that writes shared memory, and ends at its group's wait or at a barrier in shared memory; and work that reads
  // it, and ends at its group's wait.
  void start(AsyncGroups& groups, Work work) {
    order_.writes_early() ? groups.add_done(work) : groups.add(std::move(work));
  }
  void start(Work work) { order_.writes_early() ? work() : in_flight_.push_back(std::move(work)); }
  void start_reading(AsyncGroups& groups, Work work) {
    order_.reads_early() ? groups.add_done(work) : groups.add(std::move(work));
  }
  void sleep(Site site);  // until wake_sleepers(): for a thread that polls a barrier
  void wake_sleepers();
  void yield();  // other blocks may run
  void wait_for_count(const int* counter, int count, Site site);

  bool is_shared(const void* pointer) const { return pointer >= shared && pointer < shared + shared_bytes_; }
  // The offset in shared memory of `bytes` bytes at `pointer`, which must be inside it.
  size_t shared_offset(const void* pointer, size_t bytes, const char* what);
  void check_shared(size_t offset, size_t bytes, const char* what);
  void fence_async_proxy();
  void check_barrier_after_fence(Site site);  // for all threads of this warpgroup
  [[noreturn]] void fail(const std::string& what);

  const dim3 grid, dim;
  const uint3 index;
  const int place;
  Thread* thread = nullptr;  // the one that runs
  unsigned char* const shared;
  unsigned char* const async_view;   // of shared memory, as the asynchronous proxy reads it
  bool barriers_initialised = true;  // false between mbarrier.init and its fence

  static thread_local Block* current;

 private:
  struct Meeting {
    uint32_t mask, arrived;
    Site site;
    void* slots[kLanes];
  };

  struct CountWait {
    const int* counter;
    int count;
    const Thread* thread;
  };

  struct Failure {};  // thrown by fail() outside the fibers

  static void enter();
  void complete_one();
  Thread* next();
  bool wake_counted();
  void wait(Site site);
  void come_to(std::bitset<kMaxThreads>& fenced);
  void check_fences(const std::bitset<kMaxThreads>& arrived, std::bitset<kMaxThreads>& fenced, Site site);
  void wake(int warp, uint32_t lanes) { ready_[warp] |= lanes; }
  std::string whereabouts() const;
  std::string left_undone() const;
  [[noreturn]] void report();

  const size_t shared_bytes_;
  Order& order_;
  const std::function<void()>& body_;
  Fiber scheduler_;
  std::vector<Thread> threads_;
  std::vector<uint64_t> warp_order_;
  std::vector<uint32_t> ready_;                 // a bit for each lane of a warp
  std::vector<std::vector<Meeting>> meetings_;  // of each warp
  std::vector<Warpgroup> warpgroups_;
  std::array<NamedBarrier, kNamedBarriers> named_;
  std::bitset<kMaxThreads> fenced_;  // of those at __syncthreads()
  std::vector<Work> in_flight_;
  std::vector<Thread*> sleepers_;
  std::vector<CountWait> count_waits_;
  int alive_, at_barrier_ = 0, free_registers_ = 0;  // given back and free
  bool in_fiber_ = false, yields_ = false;
  Site barrier_site_ = {};
  std::string failure_;
};

}  // namespace fastattn::emulator
