#include "emulator/block.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace fastattn::emulator {
namespace {

constexpr size_t kMaxSharedBytes = 227 << 10;
constexpr size_t kGuardBytes = 4 << 10;                    // before and after a block's shared memory
constexpr int kRegisters = 64 << 10, kMaxRegisters = 256;  // of a multiprocessor, of a thread
constexpr unsigned char kPoison = 0xff;                    // NaN in every floating-point type
constexpr unsigned char kGuard = 0xa5;

struct alignas(1024) SharedArena {
  unsigned char guard[kGuardBytes], bytes[kMaxSharedBytes + kGuardBytes];
};

// Two for each resident block.
unsigned char* shared_arena(int which) {
  static thread_local const std::unique_ptr<SharedArena[]> arenas(new SharedArena[2 * kMaxResident]);
  return arenas[which].bytes;
}

thread_local std::array<std::vector<Stack>, kMaxResident> stacks;

const Stack& stack_of(int place, int thread) {
  while (static_cast<int>(stacks[place].size()) <= thread) stacks[place].emplace_back();
  return stacks[place][thread];
}

std::vector<std::string> listed(const char* variable, const char* otherwise) {
  const char* const value = std::getenv(variable);
  std::istringstream text(value != nullptr && *value != '\0' ? value : otherwise);
  std::vector<std::string> entries;
  for (std::string entry; std::getline(text, entry, ',');) entries.push_back(entry);
  return entries;
}

}  // namespace

void release_stacks() { stacks = {}; }

thread_local Block* Block::current = nullptr;

std::vector<Order> Order::from_environment() {
  const auto names = listed("FASTATTN_EMULATOR_ORDER", "forward");
  const auto completions = listed("FASTATTN_EMULATOR_ASYNC", "lazy");
  std::vector<Order> orders;
  for (size_t i = 0; i < names.size() * completions.size(); i++)
    orders.emplace_back(names[i % names.size()], completions[i % completions.size()]);
  return orders;
}

Order::Order(const std::string& name, const std::string& completion) {
  if (completion != "lazy" && completion != "eager" && completion != "crossed")
    throw std::runtime_error("FASTATTN_EMULATOR_ASYNC must be lazy, eager or crossed, got " + completion);
  writes_early_ = completion != "lazy", reads_early_ = completion == "eager";
  if (name == "forward") return;
  kind_ = name == "reverse" ? Kind::reverse : Kind::random;
  if (kind_ == Kind::random) {
    char* end = nullptr;
    state_ = static_cast<uint32_t>(std::strtoul(name.c_str(), &end, 10));
    if (name.empty() || *end != '\0')
      throw std::runtime_error("FASTATTN_EMULATOR_ORDER must be forward, reverse or a number, got " + name);
    groups_meet_ = state_ % 2 == 0;
  }
}

uint32_t Order::next_random() {
  state_ = state_ * 1664525u + 1013904223u;
  return state_ >> 8;
}

std::vector<uint64_t> Order::permutation(uint64_t count) {
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  if (kind_ == Kind::reverse) std::reverse(order.begin(), order.end());
  if (kind_ == Kind::random)
    for (uint64_t i = count; i > 1; i--) std::swap(order[i - 1], order[next_random() % i]);
  return order;
}

int Order::lane(uint32_t ready) {
  const bool high = kind_ == Kind::reverse || (kind_ == Kind::random && next_random() % 2 == 1);
  return high ? 31 - __builtin_clz(ready) : __builtin_ctz(ready);
}

size_t Order::pick(size_t count) {
  return kind_ == Kind::forward ? 0 : kind_ == Kind::reverse ? count - 1 : next_random() % count;
}

size_t Order::first_warp(size_t last, size_t count) { return kind_ == Kind::random ? next_random() % count : last; }

bool Order::groups_stay() { return kind_ != Kind::random || next_random() % 2 == 1; }

Block::Block(dim3 grid, dim3 dim, uint3 index, int place, size_t shared_bytes, Order& order,
             const std::function<void()>& body)
    : grid(grid), dim(dim), index(index), place(place), shared(shared_arena(2 * place)),
      async_view(shared_arena(2 * place + 1)), shared_bytes_(shared_bytes), order_(order), body_(body),
      threads_(dim.x * dim.y * dim.z), alive_(static_cast<int>(threads_.size())) {
  if (threads_.empty() || threads_.size() > kMaxThreads)
    throw std::runtime_error("emulator: a block has 1 to 1024 threads");
  if (shared_bytes > kMaxSharedBytes)
    throw std::runtime_error("emulator: a block has at most 227 KiB of shared memory");
  std::memset(shared, kPoison, shared_bytes);
  std::memset(async_view, kPoison, shared_bytes);
  for (unsigned char* guard : {shared - kGuardBytes, shared + shared_bytes}) std::memset(guard, kGuard, kGuardBytes);
  const int warps = (alive_ + kLanes - 1) / kLanes;
  ready_.resize(warps);
  meetings_.resize(warps);
  warpgroups_.resize((alive_ + kGroupThreads - 1) / kGroupThreads);
  for (Warpgroup& group : warpgroups_) group.registers = std::min(kRegisters / alive_ / 8 * 8, kMaxRegisters);
  warp_order_ = order.permutation(warps);
  for (int i = 0; i < alive_; i++) {
    Thread& thread = threads_[i];
    thread.linear = i;
    thread.index = {i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)};
    thread.fiber.start(stack_of(place, i), enter);
    wake(thread.warp(), 1u << thread.lane());
  }
}

Block::State Block::run() {
  current = this;
  yields_ = false;
  bool waits = false;
  while (alive_ > 0 && failure_.empty() && !yields_ && !waits) {
    if (Thread* const ready = next(); ready != nullptr) {
      thread = ready;
      in_fiber_ = true;
      Fiber::switch_between(scheduler_, thread->fiber);
      in_fiber_ = false;
    } else if (wake_counted()) {
      continue;
    } else if (!in_flight_.empty()) {
      complete_one();
    } else if (!count_waits_.empty()) {
      waits = true;
    } else {
      failure_ = "deadlock: " + whereabouts();
    }
  }
  current = nullptr;
  if (failure_.empty() && alive_ > 0) return waits ? State::waits : State::yields;
  if (failure_.empty()) failure_ = left_undone();
  const auto broken = [](const unsigned char* guard) {
    return guard[0] != kGuard || std::memcmp(guard, guard + 1, kGuardBytes - 1) != 0;
  };
  if (failure_.empty() && broken(shared + shared_bytes_))
    failure_ = "a write past the end of shared memory (" + std::to_string(shared_bytes_) + " bytes)";
  if (failure_.empty() && broken(shared - kGuardBytes)) failure_ = "a write before the start of shared memory";
  if (!failure_.empty()) report();
  return State::finished;
}

void Block::report() {
  throw std::runtime_error("emulator: block (" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
                           std::to_string(index.z) + "): " + failure_);
}

void Block::report_wait() {
  const CountWait& wait = count_waits_.front();
  failure_ = wait.thread->waits_at.text() + ": waits for a count of " + std::to_string(wait.count) + " at " +
             std::to_string(*wait.counter) + ", which no resident block will raise";
  report();
}

void Block::complete_one() {
  const auto place = in_flight_.begin() + static_cast<std::ptrdiff_t>(order_.pick(in_flight_.size()));
  const Work work = std::move(*place);
  in_flight_.erase(place);
  try {
    work();
  } catch (const Failure&) {  // from fail(), outside the fibers
  }
}

// The first function of every fiber.
void Block::enter() {
  Block& block = *current;
  block.body_();
  Thread& thread = *block.thread;
  thread.finished = true;
  block.ready_[thread.warp()] &= ~(1u << thread.lane());
  block.alive_--;
  Fiber::switch_between(thread.fiber, block.scheduler_);
}

// A ready thread of the warp that ran last, else of the next warp that has one, first of the same warpgroup; null if
// every thread waits.
Thread* Block::next() {
  const int last = thread != nullptr ? thread->warp() : static_cast<int>(warp_order_[0]);
  if (ready_[last] != 0) return &threads_[last * kLanes + order_.lane(ready_[last])];
  const size_t count = warp_order_.size();
  const auto place =
      std::find(warp_order_.begin(), warp_order_.end(), static_cast<uint64_t>(last)) - warp_order_.begin();
  const size_t first = order_.first_warp(static_cast<size_t>(place), count);
  for (const bool same_group : {true, false}) {
    if (same_group && !order_.groups_stay()) continue;
    for (size_t i = 0; i < count; i++) {
      const int warp = static_cast<int>(warp_order_[(first + i) % count]);
      if (same_group && warp / kGroupWarps != last / kGroupWarps) continue;
      if (ready_[warp] != 0) return &threads_[warp * kLanes + order_.lane(ready_[warp])];
    }
  }
  return nullptr;
}

void Block::wait(Site site) {
  Thread& me = *thread;
  me.waits_at = site;
  ready_[me.warp()] &= ~(1u << me.lane());
  Fiber::switch_between(me.fiber, scheduler_);
}

void Block::barrier(Site site) {
  if (at_barrier_ > 0 && !(site == barrier_site_))
    fail("threads of one block meet at different barriers: " + barrier_site_.text() + " and " + site.text());
  barrier_site_ = site;
  come_to(fenced_);
  if (++at_barrier_ < static_cast<int>(threads_.size())) return wait(site);
  at_barrier_ = 0;
  check_fences(std::bitset<kMaxThreads>().set(), fenced_, site);
  for (const Thread& other : threads_) wake(other.warp(), 1u << other.lane());
}

void Block::collective(uint32_t mask, void* slot, Site site, const Exchange& exchange) {
  const int warp = thread->warp(), lane = thread->lane();
  if ((mask >> lane & 1) == 0) fail(site.text() + ": lane " + std::to_string(lane) + " is not in its own mask");
  auto& meetings = meetings_[warp];
  auto meeting = std::find_if(meetings.begin(), meetings.end(), [&](const Meeting& m) { return (m.mask & mask) != 0; });
  if (meeting == meetings.end()) meeting = meetings.insert(meetings.end(), Meeting{mask, 0, site, {}});
  if (meeting->mask != mask || !(meeting->site == site))
    fail("lanes of one warp meet at different collectives: " + meeting->site.text() + " and " + site.text());
  meeting->arrived |= 1u << lane;
  meeting->slots[lane] = slot;
  if (meeting->arrived != mask) return wait(site);
  exchange(meeting->slots);
  meetings.erase(meeting);
  wake(warp, mask);
}

void Block::named_barrier(int id, int count, bool waits, Site site) {
  if (id < 1 || id >= kNamedBarriers) fail(site.text() + ": barriers 1 to 15 have a name, got " + std::to_string(id));
  if (count <= 0 || count % kLanes != 0)
    fail(site.text() + ": a barrier is for whole warps, got " + std::to_string(count));
  NamedBarrier& barrier = named_[id];
  const int me = thread->linear, warp = thread->warp(), first = warp * kLanes;
  if (barrier.arrived.none()) barrier.count = count;
  if (barrier.count != count)
    fail(site.text() + ": barrier " + std::to_string(id) + " is for " + std::to_string(barrier.count) +
         " threads and for " + std::to_string(count));
  if (barrier.arrived[me]) fail(site.text() + ": a thread arrives twice at barrier " + std::to_string(id));
  for (int other = first; other < first + kLanes; other++)
    if (barrier.arrived[other] && !(barrier.sites[warp] == site))
      fail("lanes of one warp meet at different barriers: " + barrier.sites[warp].text() + " and " + site.text());
  barrier.sites[warp] = site;
  barrier.arrived.set(me);
  come_to(barrier.fenced);
  if (static_cast<int>(barrier.arrived.count()) < count) {
    if (!waits) return;
    barrier.waiting.set(me);
    return wait(site);
  }
  check_fences(barrier.arrived, barrier.fenced, site);
  for (const Thread& other : threads_)
    if (barrier.waiting[other.linear]) wake(other.warp(), 1u << other.lane());
  barrier.arrived.reset(), barrier.waiting.reset();
}

void Block::warpgroup_collective(void* slot, Site site, const Exchange& exchange) {
  Warpgroup& group = warpgroup();
  const int first = thread->warpgroup() * kGroupThreads;
  if (first + kGroupThreads > static_cast<int>(threads_.size())) fail(site.text() + ": not a whole warpgroup");
  if (group.arrived > 0 && !(group.site == site))
    fail("threads of one warpgroup meet at different collectives: " + group.site.text() + " and " + site.text());
  group.site = site;
  group.slots[thread->linear - first] = slot;
  if (++group.arrived < kGroupThreads) return wait(site);
  group.arrived = 0;
  exchange(group.slots);
  for (int warp = first / kLanes; warp < first / kLanes + kGroupWarps; warp++) wake(warp, 0xffffffffu);
}

void Block::at_products(Site site, const std::function<void(std::bitset<kGroupWarps>)>& act) {
  if (order_.groups_meet()) return warpgroup_collective(nullptr, site, [&](void* const*) { act(0b1111); });
  collective(0xffffffffu, nullptr, site, [&](void* const*) { act(1u << thread->warp() % kGroupWarps); });
}

void Block::wait_for_products(size_t left, Site site) {
  Warpgroup& group = warpgroup();
  const int first = thread->warpgroup() * kGroupWarps;
  at_products(site, [&](std::bitset<kGroupWarps> warps) {
    group.fenced &= ~warps;
    if (order_.reads_early()) return group.products.wait(left);
    group.waiting |= warps;
    in_flight_.push_back([this, &group, warps, left, first] {
      group.products.wait(left);
      group.waiting &= ~warps;
      for (int i = 0; i < kGroupWarps; i++)
        if (warps[i]) wake(first + i, 0xffffffffu);
    });
  });
  while (group.waiting[thread->warp() - first]) wait(site);
}

// The launch gave every thread as many registers as all can have. A request for more waits until others gave some back.
void Block::change_registers(int count, bool more, Site site) {
  Warpgroup& group = warpgroup();
  warpgroup_collective(nullptr, site, [&](void* const*) {
    if (more ? count < group.registers : count > group.registers)
      fail(site.text() + ": a thread has " + std::to_string(group.registers) + ", and asks for " +
           std::to_string(count));
    if (more) return;
    free_registers_ += (group.registers - count) * kGroupThreads;
    group.registers = count;
    wake_sleepers();
  });
  while (group.registers < count) {
    const int wanted = (count - group.registers) * kGroupThreads;
    if (free_registers_ < wanted) {
      sleep(site);
    } else {
      free_registers_ -= wanted;
      group.registers = count;
    }
  }
}

void Block::sleep(Site site) {
  sleepers_.push_back(thread);
  wait(site);
}

void Block::wake_sleepers() {
  for (const Thread* sleeper : sleepers_) wake(sleeper->warp(), 1u << sleeper->lane());
  sleepers_.clear();
}

void Block::yield() {
  yields_ = true;
  Fiber::switch_between(thread->fiber, scheduler_);
}

void Block::wait_for_count(const int* counter, int count, Site site) {
  while (*counter != count) {
    count_waits_.push_back({counter, count, thread});
    wait(site);
  }
}

// Whether a count that a thread waits for is there.
bool Block::wake_counted() {
  const auto there = [&](const CountWait& wait) {
    if (*wait.counter != wait.count) return false;
    wake(wait.thread->warp(), 1u << wait.thread->lane());
    return true;
  };
  const auto left = std::remove_if(count_waits_.begin(), count_waits_.end(), there);
  if (left == count_waits_.end()) return false;
  count_waits_.erase(left, count_waits_.end());
  return true;
}

size_t Block::shared_offset(const void* pointer, size_t bytes, const char* what) {
  if (!is_shared(pointer)) fail(std::string(what) + ": not an address in shared memory");
  const size_t offset = static_cast<const unsigned char*>(pointer) - shared;
  check_shared(offset, bytes, what);
  return offset;
}

void Block::check_shared(size_t offset, size_t bytes, const char* what) {
  if (offset + bytes > shared_bytes_)
    fail(std::string(what) + ": reaches past the end of shared memory (" + std::to_string(shared_bytes_) + " bytes)");
}

void Block::fence_async_proxy() {
  std::memcpy(async_view, shared, shared_bytes_);
  thread->proxy_fenced = true;
}

// Called when this thread arrives at a barrier.
void Block::come_to(std::bitset<kMaxThreads>& fenced) {
  fenced[thread->linear] = std::exchange(thread->proxy_fenced, false);
}

// Called when a barrier is complete. A fence is for the writes of its own thread: all threads of a warpgroup must call
// it, or none.
void Block::check_fences(const std::bitset<kMaxThreads>& arrived, std::bitset<kMaxThreads>& fenced, Site site) {
  for (size_t first = 0; first + kGroupThreads <= threads_.size(); first += kGroupThreads) {
    size_t came = 0, passed = 0;
    for (size_t i = first; i < first + kGroupThreads; i++) came += arrived[i], passed += fenced[i];
    if (came == kGroupThreads && passed > 0 && passed < came)
      fail(site.text() + ": only " + std::to_string(passed) + " threads of a warpgroup passed fence_async_proxy()");
  }
  fenced.reset();
}

void Block::check_barrier_after_fence(Site site) {
  const size_t first = thread->warpgroup() * kGroupThreads;
  for (size_t i = first; i < std::min(first + kGroupThreads, threads_.size()); i++)
    if (threads_[i].proxy_fenced)
      fail(site.text() + ": no barrier since fence_async_proxy(): other warps may be behind it");
}

void Block::fail(const std::string& what) {
  failure_ = what;
  if (!in_fiber_) throw Failure{};
  Fiber::switch_between(thread->fiber, scheduler_);
  std::abort();  // nothing resumes a failed block
}

std::string Block::left_undone() const {
  if (!in_flight_.empty()) return "the block ended before loads without a wait";
  for (const Thread& other : threads_) {
    if (!other.copies.idle()) return "the block ended before a cp.async without a wait";
    if (!other.stores.idle()) return "the block ended before a store from shared memory without a wait";
  }
  for (const Warpgroup& group : warpgroups_)
    if (!group.products.idle()) return "the block ended before a wgmma without a wait";
  return "";
}

std::string Block::whereabouts() const {
  std::map<std::string, int> counts;
  for (const Thread& other : threads_) counts[other.finished ? "have finished" : "wait at " + other.waits_at.text()]++;
  std::string text;
  for (const auto& [place, count] : counts)
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " threads " + place;
  return text;
}

}  // namespace fastattn::emulator
