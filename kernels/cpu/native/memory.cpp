#include "memory.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>

#include <fcntl.h>
#include <unistd.h>
#endif

namespace kvferry {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{64} << 20;

size_t rounded(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

#if defined(__linux__)
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

// Aligned to a huge page; pages are touched, and so become resident, only where pieces are written. descriptor: of the
// file that is mapped from `offset` on, or -1.
char* mapped(size_t bytes, int protection, int descriptor, size_t offset) {
  void* raw = mmap(nullptr, bytes + kHugePage, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE * (descriptor >= 0), -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* begin = static_cast<char*>(raw);
  char* aligned = reinterpret_cast<char*>(rounded(reinterpret_cast<size_t>(begin), kHugePage));
  if (aligned > begin) munmap(begin, aligned - begin);
  if (size_t rest = begin + kHugePage - aligned) munmap(aligned + bytes, rest);
  if (descriptor >= 0 && mmap(aligned, bytes, protection, MAP_SHARED | MAP_FIXED, descriptor,
                              static_cast<off_t>(offset)) == MAP_FAILED) {
    munmap(aligned, bytes);
    throw std::bad_alloc();
  }
  madvise(aligned, bytes, MADV_HUGEPAGE);
  return aligned;
}
#endif

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

void Arena::add(size_t size) {
#if defined(__linux__)
  size_t before = 0;
  for (const Chunk& chunk : chunks_) before += chunk.size;
  if (descriptor_ >= 0 && ftruncate(descriptor_, static_cast<off_t>(before + size)) != 0) throw std::bad_alloc();
  chunks_.push_back({mapped(size, PROT_READ | PROT_WRITE, descriptor_, before), size, 0});
#else
  void* data = nullptr;
  if (descriptor_ >= 0 || posix_memalign(&data, kHugePage, size) != 0) throw std::bad_alloc();
  std::memset(data, 0, size);
  chunks_.push_back({static_cast<char*>(data), size, 0});
#endif
}

void* Arena::take(size_t bytes) {
  bytes = rounded(bytes, 64);
  if (chunks_.empty() || chunks_.back().size - chunks_.back().used < bytes)
    add(bytes > kChunk ? rounded(bytes, kHugePage) : kChunk);
  Chunk& chunk = chunks_.back();
  void* piece = chunk.data + chunk.used;
  chunk.used += bytes;
#if defined(__linux__)
  // a page that the system cannot give is an error here, and would be a signal where it is written
  if (descriptor_ >= 0) {
    const off_t begin = static_cast<off_t>(offset_of(piece));
    int error;
    do error = posix_fallocate(descriptor_, begin, static_cast<off_t>(bytes));
    while (error == EINTR);  // a signal came meanwhile
    if (error != 0) throw std::bad_alloc();
  }
#endif
  return piece;
}

void Arena::map(int descriptor, size_t bytes) {
#if defined(__linux__)
  char* data = mapped(bytes, PROT_READ, descriptor, 0);
  madvise(data, bytes, MADV_COLLAPSE);
  chunks_.push_back({data, bytes, bytes});
#else
  throw std::bad_alloc();
#endif
}

size_t Arena::finish() {
  size_t end = 0;
#if defined(__linux__)
  for (Chunk& chunk : chunks_) {
    const size_t used = rounded(chunk.used, kHugePage);
    madvise(chunk.data, used, MADV_COLLAPSE);
    end += &chunk == &chunks_.back() ? used : chunk.size;
    chunk.used = chunk.size;
  }
  if (ftruncate(descriptor_, static_cast<off_t>(end)) != 0) throw std::bad_alloc();
#endif
  return end;
}

size_t Arena::offset_of(const void* piece) const {
  const char* address = static_cast<const char*>(piece);
  size_t before = 0;
  for (const Chunk& chunk : chunks_) {
    if (address >= chunk.data && address < chunk.data + chunk.size) return before + (address - chunk.data);
    before += chunk.size;
  }
  throw std::out_of_range("no piece of this arena");
}

const uint8_t* Arena::at(size_t offset, size_t bytes) const {
  size_t before = 0;
  for (const Chunk& chunk : chunks_) {
    if (offset >= before && offset - before <= chunk.size && bytes <= chunk.size - (offset - before))
      return reinterpret_cast<const uint8_t*>(chunk.data + (offset - before));
    before += chunk.size;
  }
  throw std::out_of_range("a piece lies outside the arena");
}

}  // namespace kvferry
