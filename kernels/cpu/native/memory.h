// Memory for packed weights: large zeroed chunks, on huge pages where the system gives them, handed out in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvferry {

// Pieces live as long as the arena. Not thread-safe.
class Arena {
 public:
  // descriptor: of an empty file that the chunks are of, one after the other; below 0: memory of this process alone.
  explicit Arena(int descriptor = -1) : descriptor_(descriptor) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Zeroed, aligned to a cache line; throws std::bad_alloc.
  void* take(size_t bytes);

  // Of a new arena: maps the first `bytes` of a file, a multiple of 2 MiB, to be read. Throws std::bad_alloc.
  void map(int descriptor, size_t bytes);

  // Of one over a file: lays what was taken on huge pages, ends the file behind it, and returns its bytes, a multiple of
  // 2 MiB. Nothing is taken after.
  size_t finish();

  // Where a piece lies among all chunks, that is, in the file; and the piece there. Throw std::out_of_range.
  size_t offset_of(const void* piece) const;
  const uint8_t* at(size_t offset, size_t bytes) const;

 private:
  struct Chunk {
    char* data;
    size_t size, used;
  };
  void add(size_t size);

  int descriptor_;
  std::vector<Chunk> chunks_;
};

}  // namespace kvferry
