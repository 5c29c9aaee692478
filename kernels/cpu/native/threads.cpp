#include "threads.h"

#include <chrono>

#if defined(__linux__)
#include <sched.h>
#endif

namespace kvferry {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpin = 600000;                     // nanoseconds: waking up, on a virtual machine, costs most of them
constexpr uint64_t kRun = uint64_t{1} << 32;      // in a barrier's gate
constexpr std::chrono::microseconds kPause{100};  // runs that follow each other more slowly are not worth spinning for

int current_core() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Signal::advance() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    woken_.notify_all();
  }
}

bool Signal::spin_beyond(uint32_t seen, int nanoseconds) const {
  if (nanoseconds <= 0) return value() != seen;
  const auto end = Clock::now() + std::chrono::nanoseconds(nanoseconds);
  do {
    for (int i = 0; i < 8; ++i) {
      if (value() != seen) return true;
      relax();
    }
  } while (Clock::now() < end);
  return false;
}

void Signal::sleep_beyond(uint32_t seen) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    woken_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != seen; });
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Signal::wait_beyond(uint32_t seen, int nanoseconds) {
  if (!spin_beyond(seen, nanoseconds)) sleep_beyond(seen);
}

bool Barrier::shares_core(int member) const {
  const int core = seats_[member].core.load(std::memory_order_relaxed);
  for (int other = 0; other < count_; ++other)
    if (other != member && core >= 0 && seats_[other].core.load(std::memory_order_relaxed) == core) return true;
  return false;
}

void Barrier::spread(int member) {
  seats_[member].core.store(current_core(), std::memory_order_relaxed);
#if defined(__linux__)
  if (!shares_core(member)) return;
  cpu_set_t allowed, free;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  free = allowed;
  for (int other = 0; other < count_; ++other)
    if (const int core = seats_[other].core.load(std::memory_order_relaxed); core >= 0 && core < CPU_SETSIZE)
      CPU_CLR(core, &free);
  if (CPU_COUNT(&free) == 0) return;
  sched_setaffinity(0, sizeof free, &free);
  sched_setaffinity(0, sizeof allowed, &allowed);
  seats_[member].core.store(current_core(), std::memory_order_relaxed);
#endif
}

int64_t Barrier::claim(uint32_t phase, int64_t count, int member, int& turn) {
  for (; turn < count_; ++turn) {
    const int owner = member + turn < count_ ? member + turn : member + turn - count_;
    const Share items = share(count, owner, count_);
    std::atomic<uint64_t>& begun = seats_[owner].begun;
    uint64_t at = begun.load(std::memory_order_acquire);
    while (true) {
      if (at >> 32 != phase) return -1;
      const int64_t item = items.begin + static_cast<uint32_t>(at);
      if (item >= items.end) break;
      if (begun.compare_exchange_weak(at, at + 1, std::memory_order_acq_rel, std::memory_order_acquire)) return item;
    }
  }
  return -1;
}

void Barrier::finish(uint32_t phase, int64_t done, int64_t count) {
  if (done_.fetch_add(done, std::memory_order_acq_rel) + done < count) return;
  done_.store(0, std::memory_order_relaxed);
  for (Seat& seat : seats_) seat.begun.store(static_cast<uint64_t>(phase + 1) << 32, std::memory_order_release);
  phase_.advance();
}

void Barrier::wait(int member) {
  Seat& seat = seats_[member];
  const uint32_t phase = seat.phase - 1;
  if (phase_.value() != phase) return;
  seat.core.store(current_core(), std::memory_order_relaxed);
  if (phase_.spin_beyond(phase, shares_core(member) ? 0 : kSpin)) return;
  if (member > 0) leave();
  phase_.sleep_beyond(phase);
  spread(member);
  if (member > 0 && !enter_run(seat.run)) throw RunOver();
}

void Barrier::open() {
  first_ = seats_[0].phase = phase_.value();
  gate_.fetch_add(kRun, std::memory_order_release);
}

void Barrier::close() {
  const uint32_t seen = empty_.value();
  if (static_cast<uint32_t>(gate_.fetch_add(kRun, std::memory_order_acq_rel)) > 0) empty_.wait_beyond(seen, kSpin);
}

bool Barrier::enter_run(uint32_t run) {
  uint64_t gate = gate_.load(std::memory_order_relaxed);
  while (gate >> 32 == run)
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire, std::memory_order_relaxed)) return true;
  return false;
}

bool Barrier::enter(int member) {
  const auto run = static_cast<uint32_t>(gate_.load(std::memory_order_relaxed) >> 32);
  if (run % 2 == 0 || !enter_run(run)) return false;
  seats_[member].run = run, seats_[member].phase = first_;
  return true;
}

void Barrier::leave() {
  const uint64_t gate = gate_.fetch_sub(1, std::memory_order_acq_rel) - 1;
  if (static_cast<uint32_t>(gate) == 0 && gate / kRun % 2 == 0) empty_.advance();
}

Team::Team(int size) : size_(size < 1 ? 1 : size), barrier_(size_) {
  for (int member = 1; member < size_; ++member) threads_.emplace_back([this, member] { serve(member); });
}

Team::~Team() {
  closing_ = true;
  start_.advance();
  for (auto& thread : threads_) thread.join();
}

void Team::run(Function function, void* argument) {
  function_ = function;
  argument_ = argument;
  barrier_.open();
  start_.advance();
  function(argument, 0, size_, barrier_);
  barrier_.wait(0);
  barrier_.close();
}

void Team::serve(int member) {
  uint32_t seen = 0;
  bool busy = true;
  while (true) {
    const auto begun = Clock::now();
    start_.wait_beyond(seen, busy ? kSpin : 0);
    busy = Clock::now() - begun < kPause;
    seen = start_.value();
    if (closing_) return;
    barrier_.spread(member);
    if (!barrier_.enter(member)) continue;
    try {
      function_(argument_, member, size_, barrier_);
      barrier_.leave();
    } catch (const RunOver&) {
    }
  }
}

}  // namespace kvferry
