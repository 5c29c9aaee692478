// What is made of as many vectors as a vector has lanes: sums and maxima of each, and their transposition.
#pragma once

#include "vector.h"

namespace kvferry {
namespace {

// One step of a transposing sum or maximum: lanes whose index has bit `Step` clear come from a, the others from b, each
// being what join() makes of the two lanes of its vector that differ in that bit.
template <int Step, class Join, size_t... Lane>
KVF_INLINE Floats fold(Floats a, Floats b, Join join, std::index_sequence<Lane...>) {
  const Floats low = __builtin_shufflevector(a, b, ((Lane & Step) ? kLanes + (Lane & ~Step) : Lane)...);
  const Floats high = __builtin_shufflevector(a, b, ((Lane & Step) ? kLanes + Lane : (Lane | Step))...);
  return join(low, high);
}

template <int Step = kLanes / 2, class Join>
KVF_INLINE Floats fold_all(Floats* values, Join join) {
#pragma GCC unroll 16
  for (int i = 0; i < Step; ++i)
    values[i] = fold<Step>(values[i], values[i + Step], join, std::make_index_sequence<kLanes>());
  if constexpr (Step > 1) return fold_all<Step / 2>(values, join);
  return values[0];
}

// Lane i of the result is the sum, or the largest, of values[i]; values [kLanes] is overwritten.
KVF_INLINE Floats sums(Floats* values) {
  return fold_all(values, [](Floats a, Floats b) { return a + b; });
}
KVF_INLINE Floats maxima(Floats* values) { return fold_all(values, larger); }

template <int Step, size_t... Lane>
KVF_INLINE void exchange(Words& a, Words& b, std::index_sequence<Lane...>) {
  const Words low = __builtin_shufflevector(a, b, ((Lane & Step) ? kLanes + (Lane & ~Step) : Lane)...);
  b = __builtin_shufflevector(a, b, ((Lane & Step) ? kLanes + Lane : (Lane | Step))...);
  a = low;
}

// Transposes a square of words.
template <int Step = kLanes / 2>
KVF_INLINE void transpose(Words* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (!(i & Step)) exchange<Step>(rows[i], rows[i + Step], std::make_index_sequence<kLanes>());
  if constexpr (Step > 1) transpose<Step / 2>(rows);
}

}  // namespace
}  // namespace kvferry
