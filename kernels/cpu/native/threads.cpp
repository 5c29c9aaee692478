#include "threads.h"

#include <chrono>

namespace kvferry {
namespace {

constexpr int kLongestSpin = 32000, kShortestSpin = 500;  // nanoseconds

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

void Signal::wait_beyond(uint32_t seen) {
  const int budget = spin_.load(std::memory_order_relaxed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(budget);
  do {
    for (int i = 0; i < 8; ++i) {
      if (value() != seen) {
        if (budget < kLongestSpin) spin_.store(budget * 2, std::memory_order_relaxed);
        return;
      }
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  spin_.store(budget / 4 < kShortestSpin ? kShortestSpin : budget / 4, std::memory_order_relaxed);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    woken_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != seen; });
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Barrier::wait() {
  if (count_ == 1) return;
  const uint32_t seen = phase_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.advance();
  } else {
    phase_.wait_beyond(seen);
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
  barrier_.wait();
}

void Team::serve(int member) {
  uint32_t seen = 0;
  while (true) {
    start_.wait_beyond(seen);
    ++seen;
    if (closing_) return;
    function_(argument_, member, size_, barrier_);
    barrier_.wait();
  }
}

}  // namespace kvferry
