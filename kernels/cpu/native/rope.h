// The half-split rotary embedding and the writes into the cache.
#pragma once

#include "cache.h"
#include "types.h"
#include "vector.h"

namespace kvferry {
namespace {

// out [dim] = x [dim] turned by the angles of cos, sin [half]; dimensions from 2 * half on are copied.
template <class T>
KVF_INLINE void rotate(const T* x, const float* cos, const float* sin, int64_t half, int64_t dim, T* out) {
  const int64_t whole = half / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(out + i, a * c - b * s);
    store(out + half + i, b * c + a * s);
  }
  for (int64_t i = whole; i < half; ++i) {
    const float a = load_one(x + i), b = load_one(x + half + i);
    store_one(out + i, a * cos[i] - b * sin[i]);
    store_one(out + half + i, b * cos[i] + a * sin[i]);
  }
  for (int64_t i = 2 * half; i < dim; ++i) out[i] = x[i];
}

template <class T>
KVF_INLINE void rotate(const T* x, const Rope& rope, int64_t position, int64_t dim, T* out) {
  rotate(x, rope.cos + position * rope.half, rope.sin + position * rope.half, rope.half, dim, out);
}

template <class T>
KVF_INLINE void rope_rows(const RopeTask& t, Share rows) {
  const int64_t dim = t.kv.dim;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* q = static_cast<const T*>(t.q) + row * t.q_step;
    T* out = static_cast<T*>(t.out) + row * t.heads * dim;
    for (int64_t head = 0; head < t.heads; ++head) {
      if (t.rope.cos != nullptr)
        rotate(q + head * dim, t.rope, t.positions[row], dim, out + head * dim);
      else
        copy(out + head * dim, q + head * dim, dim);
    }
    if (t.slots[row] < 0) continue;
    alignas(64) T turned[kMaxDim];
    for (int64_t head = 0; head < t.kv.heads; ++head) {
      const T* k = static_cast<const T*>(t.k) + row * t.k_step + head * dim;
      if (t.rope.cos != nullptr) {
        rotate(k, t.rope, t.positions[row], dim, turned);
        k = turned;
      }
      write_slot(t.kv, t.slots[row], head, k, static_cast<const T*>(t.v) + row * t.v_step + head * dim);
    }
  }
}

template <class T>
void run_rope(void* argument, int member, int, Barrier& barrier) {
  const RopeTask& t = *static_cast<RopeTask*>(argument);
  barrier.each_run(t.rows, member, [&](Share rows) { rope_rows<T>(t, rows); });
}

}  // namespace
}  // namespace kvferry
