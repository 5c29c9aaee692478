// Vectors to and from memory that the kernels of recurrent layers share: parts of vectors, and stores past the caches.
#pragma once

#include "vector.h"

namespace kvferry {
namespace {

// The first `count` of kLanes numbers, then zeros.
template <class T>
KVF_INLINE Floats load_part(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = load_one(from + i);
  return load(lanes);
}

template <class T>
KVF_INLINE void store_part(T* to, Floats value, int64_t count) {
  if (count >= kLanes) return store(to, value);
  float lanes[kLanes];
  store(lanes, value);
  for (int64_t i = 0; i < count; ++i) store_one(to + i, lanes[i]);
}

// Whether vectors at `to`, and at multiples of `step` floats from there, may be stored past the caches. A state is written
// once a step, and what it displaces would have been of use before it is read again.
KVF_INLINE bool streams([[maybe_unused]] const float* to, [[maybe_unused]] int64_t step) {
#if defined(__AVX2__)
  return reinterpret_cast<uintptr_t>(to) % sizeof(Floats) == 0 && step % kLanes == 0;
#else
  return false;
#endif
}

template <bool Stream>
KVF_INLINE void put(float* to, Floats value) {
#if defined(__AVX512F__)
  if constexpr (Stream) return _mm512_stream_ps(to, (__m512)value);
#elif defined(__AVX2__)
  if constexpr (Stream) return _mm256_stream_ps(to, (__m256)value);
#endif
  store(to, value);
}

// Before others may read what was stored past the caches.
KVF_INLINE void settle_streams() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

template <class T>
KVF_INLINE void widen_all(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) store_part(to + i, load_part(from + i, count - i), count - i);
}

template <class T>
KVF_INLINE void narrow_all(const float* from, int64_t count, T* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) store_part(to + i, load_part(from + i, count - i), count - i);
}

// Asks for the numbers of a token well before they are read: those of neighbouring tokens lie on pages of their own, where
// processors do not look ahead.
template <class T>
KVF_INLINE void prefetch_all(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + i);
}

// Copies a state, or zeros where there is none.
KVF_INLINE void copy_state(const float* from, int64_t count, float* to) {
  if (from == to || to == nullptr) return;
  if (from == nullptr)
    std::memset(to, 0, sizeof(float) * static_cast<size_t>(count));
  else
    std::memcpy(to, from, sizeof(float) * static_cast<size_t>(count));
}

}  // namespace
}  // namespace kvferry
