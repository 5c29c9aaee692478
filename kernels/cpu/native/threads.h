// A team of threads that run one function together, and the barrier between the phases of that function.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace kvferry {

// A counter that threads wait on: they spin for some nanoseconds, then sleep.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void advance();
  void wait_beyond(uint32_t seen, int spin);

 private:
  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
};

// Member's share of `count` items, in runs of neighbours; shares differ by at most one item.
struct Share {
  int64_t begin, end;
};
inline Share share(int64_t count, int member, int size) { return {count * member / size, count * (member + 1) / size}; }

// Members wait for each other by spinning, for what they wait for takes microseconds (or as long as another process has
// the member's core), but not for a member that was last seen on their own core: that one runs only once they sleep.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count), seats_(count) {}
  void wait(int member);

  // Members that wake up on another's core move on: the scheduler wakes a thread beside the one that woke it, and may
  // leave both there with other cores idle. To be called by a member that has slept.
  void spread(int member);

  // Calls visit(item) for items of `count` until none is left: first those of the member's share, then what others have
  // not begun, for a member may have lost its core. Once between two waits, by all members with the same count.
  template <class Visit>
  void each(int64_t count, int member, Visit visit) {
    for (int turn = 0; turn < count_; ++turn) {
      const int owner = member + turn < count_ ? member + turn : member + turn - count_;
      const Share items = share(count, owner, count_);
      for (int64_t at = items.begin; at < items.end;) {
        at = items.begin + seats_[owner].begun.fetch_add(1, std::memory_order_relaxed);
        if (at < items.end) visit(at);
      }
    }
  }

 private:
  struct alignas(64) Seat {
    std::atomic<int> core{-1};
    std::atomic<int64_t> begun{0};
  };
  void reset();
  bool shares_core(int member) const;

  const int count_;
  std::vector<Seat> seats_;
  alignas(64) std::atomic<int> arrived_{0};
  Signal phase_;
};

// The caller of run() is member 0; the others sleep between runs. One run at a time.
class Team {
 public:
  explicit Team(int size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  using Function = void (*)(void* argument, int member, int size, Barrier& barrier);
  void run(Function function, void* argument);
  int size() const { return size_; }

 private:
  void serve(int member);

  const int size_;
  Function function_ = nullptr;
  void* argument_ = nullptr;
  bool closing_ = false;
  Signal start_;
  Barrier barrier_;
  std::vector<std::thread> threads_;
};

}  // namespace kvferry
