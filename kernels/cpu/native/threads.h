// A team of threads that run one function together, in phases whose items they share.
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
  bool spin_beyond(uint32_t seen, int nanoseconds) const;  // whether it is beyond
  void sleep_beyond(uint32_t seen);
  void wait_beyond(uint32_t seen, int nanoseconds);

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

// What leaves a function whose run ended while the member slept.
struct RunOver {};

// Phases of a run: a phase is over when all its items are done, whoever did them, so nobody waits for a member that has no
// core, unless it has begun an item. One that comes late finds nothing to do in phases that are over. What members wait
// for takes microseconds (or as long as another process has the core of one that has begun an item), so they spin, but
// not for a member that was last seen on their own core: that one runs only once they sleep.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count), seats_(count) {}

  // A phase: calls visit(item), visit being what begin() returns, for items of `count` until none is left: first those of
  // the member's share, then what others have not begun. begin() is called once, if the member finds an item at all:
  // what it reads stays as the phase before left it. By all members with the same count, and not without a wait() between.
  template <class Begin>
  void each(int64_t count, int member, Begin begin) {
    if (count == 0) return;
    const uint32_t phase = seats_[member].phase++;
    int turn = 0;
    int64_t item = claim(phase, count, member, turn), done = 0;
    if (item < 0) return;
    const auto visit = begin();
    for (; item >= 0; item = claim(phase, count, member, turn), ++done) visit(item);
    finish(phase, done, count);
  }

  // The same of items that are cheap: calls visit(share) for runs of neighbours.
  template <class Visit>
  void each_run(int64_t count, int member, Visit visit) {
    const int64_t runs = count < pieces() ? count : pieces();
    each(runs, member, [&] {
      return [&](int64_t run) { visit(share(count, static_cast<int>(run), static_cast<int>(runs))); };
    });
  }

  // Into how many items work is cut that could be cut anywhere.
  int pieces() const { return count_ == 1 ? 1 : 4 * count_; }

  // Until the member's phase is over. Throws RunOver where the run is, too, and the member was asleep.
  void wait(int member);

  // Members that wake up on another's core move on: the scheduler wakes a thread beside the one that woke it, and may
  // leave both there with other cores idle. To be called by a member that has slept.
  void spread(int member);

  // Of the one that runs: a run begins and ends. What it reads may go once the latter returns, for nobody is inside.
  void open();
  void close();

  // Of the others: whether a run is open. Between the two the member is inside, but while it sleeps.
  bool enter(int member);
  void leave();

 private:
  struct alignas(64) Seat {
    std::atomic<int> core{-1};
    std::atomic<uint64_t> begun{0};  // the phase, and how many items of the share
    uint32_t phase = 0, run = 0;     // of the member itself: its next phase
  };
  int64_t claim(uint32_t phase, int64_t count, int member, int& turn);
  void finish(uint32_t phase, int64_t done, int64_t count);
  bool enter_run(uint32_t run);
  bool shares_core(int member) const;

  const int count_;
  std::vector<Seat> seats_;
  uint32_t first_ = 0;                         // phase of the run
  alignas(64) std::atomic<int64_t> done_{0};   // items of the phase
  alignas(64) std::atomic<uint64_t> gate_{0};  // the run, odd while it is open, and how many are inside
  Signal phase_, empty_;
};

// The caller of run() is member 0; the others sleep between runs, and may miss some. One run at a time.
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
  std::atomic<bool> closing_{false};
  Signal start_;
  Barrier barrier_;
  std::vector<std::thread> threads_;
};

}  // namespace kvferry
