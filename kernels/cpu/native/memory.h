// Memory for packed weights: large zeroed chunks, on huge pages where the system gives them, handed out in order.
#pragma once

#include <cstddef>
#include <vector>

namespace kvferry {

// Pieces live as long as the arena. Not thread-safe.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Zeroed, aligned to a cache line; throws std::bad_alloc.
  void* take(size_t bytes);

 private:
  struct Chunk {
    char* data;
    size_t size, used;
  };
  std::vector<Chunk> chunks_;
};

}  // namespace kvferry
