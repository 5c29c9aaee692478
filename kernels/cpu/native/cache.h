// The paged cache: K and V of a head and slot as the model's numbers, or as int8 with a float32 scale behind them.
#pragma once

#include <algorithm>
#include <cfloat>

#include "types.h"
#include "vector.h"

namespace kvferry {
namespace {

constexpr int kTile = 64;  // positions

template <class T>
KVF_INLINE void copy(T* to, const T* from, int64_t count) {
  std::memcpy(to, from, count * sizeof(T));
}

// to [dim] = x / scale to nearest even, scale = max |x| / 127, which is stored behind them.
template <class T>
KVF_INLINE void quantise(const T* x, int64_t dim, int8_t* to) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const int64_t whole = dim / kLanes * kLanes;
  Floats most{};
  for (int64_t d = 0; d < whole; d += kLanes) most = larger(larger(load(x + d), -load(x + d)), most);
  float highest = largest(most);
  for (int64_t d = whole; d < dim; ++d) {  // no fmaxf: GCC 12 fails on such a reduction for ARM
    const float size = __builtin_fabsf(load_one(x + d));
    highest = size > highest ? size : highest;
  }
  const float scale = __builtin_fmaxf(highest / 127.0f, FLT_MIN);
  for (int64_t d = 0; d < whole; d += kLanes) {
    const Bytes rounded = __builtin_convertvector(reinterpret_cast<Ints>(load(x + d) / scale + kRound), Bytes);
    std::memcpy(to + d, &rounded, sizeof rounded);
  }
  for (int64_t d = whole; d < dim; ++d) to[d] = static_cast<int8_t>(__builtin_rintf(load_one(x + d) / scale));
  std::memcpy(to + dim, &scale, sizeof scale);
}

KVF_INLINE float scale_of(const int8_t* row, int64_t dim) {
  float scale;
  std::memcpy(&scale, row + dim, sizeof scale);
  return scale;
}

KVF_INLINE int64_t offset_of(const KVLayer& kv, int64_t block, int64_t slot, int64_t head) {
  return block * kv.block_step + head * kv.head_step + slot * kv.slot_step;
}

// Writes K and V [dim] of a slot (block * block_size + offset) and head.
template <class T>
KVF_INLINE void write_slot(const KVLayer& kv, int64_t slot, int64_t head, const T* k, const T* v) {
  const int64_t at = offset_of(kv, slot / kv.block_size, slot % kv.block_size, head);
  if (kv.int8) {
    quantise(k, kv.dim, static_cast<int8_t*>(kv.data) + at);
    quantise(v, kv.dim, static_cast<int8_t*>(kv.data) + at + kv.kv_step);
  } else {
    copy(static_cast<T*>(kv.data) + at, k, kv.dim);
    copy(static_cast<T*>(kv.data) + at + kv.kv_step, v, kv.dim);
  }
}

// Where the K and V of up to kTile positions lie, stored as S.
template <class S>
struct Tile {
  const S *k[kTile], *v[kTile];
  int64_t count = 0;

  void find(const KVLayer& kv, int64_t head, const int32_t* table, int64_t begin, int64_t end) {
    count = end - begin < kTile ? end - begin : kTile;
    int64_t block = begin / kv.block_size, slot = begin % kv.block_size;
    for (int64_t j = 0; j < count; slot = 0, ++block) {
      const S* from = static_cast<const S*>(kv.data) + offset_of(kv, table[block], slot, head);
      for (const int64_t end = std::min(count, j + kv.block_size - slot); j < end; ++j, from += kv.slot_step)
        k[j] = from, v[j] = from + kv.kv_step;
    }
    for (int64_t j = count; j % kLanes != 0; ++j) k[j] = k[count - 1], v[j] = v[count - 1];  // for whole vectors of them
  }
};

template <class S>
KVF_INLINE void fetch(const S* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / static_cast<int64_t>(sizeof(S))) __builtin_prefetch(row + d);
  if (sizeof(S) == 1) __builtin_prefetch(row + dim);
}

}  // namespace
}  // namespace kvferry
