// The noise of kernels/noise.py: the same bits, and logarithms that may differ in the last one.
#pragma once

#include "vector.h"

namespace kvferry {
namespace {

KVF_INLINE Words random_bits(uint64_t key, Words index) {
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  Words bits = index ^ low;
  bits = (bits ^ bits >> 16) * 0x21f0aaadu;
  bits = ((bits ^ bits >> 15) + high) * 0x735a2d97u;
  bits = bits ^ bits >> 15 ^ high;
  bits *= 0x21f0aaadu;
  return bits ^ bits >> 16;
}

KVF_INLINE Floats uniform(Words bits) {
  const Floats whole = to_floats(reinterpret_cast<Ints>(bits & 0x7fffffffu));
  return smaller((whole + 0.5f) * 0x1p-31f, splat(1 - 0x1p-24f));
}

inline float gumbel(float uniform) { return -__builtin_logf(-__builtin_log1pf(-uniform)); }

// Never below gumbel(), and hardly above it where that is large: -log(u), by a chord of the logarithm between powers of
// two, which is the number's own bits.
KVF_INLINE Floats gumbel_bound(Floats uniform) {
  const Ints below_one = 0x3f800000 - reinterpret_cast<Ints>(uniform);
  return to_floats(below_one) * (0.693147181f * 0x1p-23f) + 1e-4f;
}

}  // namespace
}  // namespace kvferry
