#include "threads.h"

#include <chrono>

#if defined(__linux__)
#include <sched.h>
#endif

namespace kvferry {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpin = 600000;                     // nanoseconds: waking up, on a virtual machine, costs most of them
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

void Signal::wait_beyond(uint32_t seen, int spin) {
  if (spin > 0) {
    const auto end = Clock::now() + std::chrono::nanoseconds(spin);
    do {
      for (int i = 0; i < 8; ++i) {
        if (value() != seen) return;
        relax();
      }
    } while (Clock::now() < end);
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    woken_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != seen; });
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
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

void Barrier::reset() {
  for (Seat& seat : seats_) seat.begun.store(0, std::memory_order_relaxed);
}

void Barrier::wait(int member) {
  if (count_ == 1) return reset();
  seats_[member].core.store(current_core(), std::memory_order_relaxed);
  const uint32_t seen = phase_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
    arrived_.store(0, std::memory_order_relaxed);
    reset();
    phase_.advance();
  } else {
    phase_.wait_beyond(seen, shares_core(member) ? 0 : kSpin);
    spread(member);
  }
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
  start_.advance();
  function(argument, 0, size_, barrier_);
  barrier_.wait(0);
}

void Team::serve(int member) {
  uint32_t seen = 0;
  bool busy = true;
  while (true) {
    const auto begun = Clock::now();
    start_.wait_beyond(seen, busy ? kSpin : 0);
    busy = Clock::now() - begun < kPause;
    ++seen;
    if (closing_) return;
    barrier_.spread(member);
    function_(argument_, member, size_, barrier_);
    barrier_.wait(member);
  }
}

}  // namespace kvferry
