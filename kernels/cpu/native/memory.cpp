#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvferry {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{64} << 20;

size_t rounded(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

// Pages are touched, and so become resident, only where pieces are written.
char* zeroed(size_t bytes) {
#if defined(__linux__)
  void* raw = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* begin = static_cast<char*>(raw);
  char* aligned = reinterpret_cast<char*>(rounded(reinterpret_cast<size_t>(begin), kHugePage));
  if (aligned > begin) munmap(begin, aligned - begin);
  if (size_t rest = begin + kHugePage - aligned) munmap(aligned + bytes, rest);
  madvise(aligned, bytes, MADV_HUGEPAGE);
  return aligned;
#else
  void* data = nullptr;
  if (posix_memalign(&data, kHugePage, bytes) != 0) throw std::bad_alloc();
  std::memset(data, 0, bytes);
  return static_cast<char*>(data);
#endif
}

}  // namespace

Arena::~Arena() {
  for (const Chunk& chunk : chunks_) {
#if defined(__linux__)
    munmap(chunk.data, chunk.size);
#else
    std::free(chunk.data);
#endif
  }
}

void* Arena::take(size_t bytes) {
  bytes = rounded(bytes, 64);
  if (chunks_.empty() || chunks_.back().size - chunks_.back().used < bytes) {
    const size_t size = bytes > kChunk ? rounded(bytes, kHugePage) : kChunk;
    chunks_.push_back({zeroed(size), size, 0});
  }
  Chunk& chunk = chunks_.back();
  void* piece = chunk.data + chunk.used;
  chunk.used += bytes;
  return piece;
}

}  // namespace kvferry
