// Products of bfloat16 activations with bfloat16 panels, float32 sums.
//
// A panel holds 32 rows of the weight [out, in]: for each pair of inputs, 32 pairs of bfloat16, so that one vector
// register is a pair of inputs of 16 outputs, and a thread reads its panels as one stream. Each output is one chain of
// sums in the order of the inputs, whatever the number of rows of x: a row's result does not depend on its batch.
#pragma once

#include "forms.h"
#include "types.h"
#include "vector.h"

#if defined(__AMX_BF16__)
#include "bf16_tiles.h"
#elif !defined(__AVX512BF16__) && !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "float_product.h"
#else

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "bf16_arm.h"
#endif

namespace kvferry {
namespace {

constexpr int kParts = kPanel / kLanes;
constexpr int kAhead = 8192;  // bytes of weights prefetched ahead

template <class T>
KVF_INLINE T word(const bf16* pair) {
  T bits;
  std::memcpy(&bits, pair, sizeof bits);
  return bits;
}

#if defined(__AVX512BF16__)

constexpr int kTileRows = 12;

// total += the panel's outputs of `Rows` rows of x (`step` elements apart), each one chain of sums.
template <int Rows>
KVF_INLINE void add_pairs(const bf16* x, int64_t step, const uint8_t* panel, int64_t pairs, Floats (&total)[Rows][kParts]) {
  for (int64_t k = 0; k < pairs; ++k, panel += kPanel * 4) {
    __builtin_prefetch(panel + kAhead);
    __builtin_prefetch(panel + kAhead + 64);
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel), w1 = (__m512bh)_mm512_loadu_si512(panel + 64);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(word<int32_t>(x + r * step + 2 * k));
      total[r][0] = (Floats)_mm512_dpbf16_ps((__m512)total[r][0], w0, pair);
      total[r][1] = (Floats)_mm512_dpbf16_ps((__m512)total[r][1], w1, pair);
    }
  }
}

// out [Rows][kPanel] = the panel's outputs of `Rows` rows of x.
template <int Rows>
inline __attribute__((noinline)) void panel_tile(const bf16* x, int64_t step, const uint8_t* panel, int64_t pairs,
                                                 float* out) {
  Floats total[Rows][kParts] = {};
  add_pairs<Rows>(x, step, panel, pairs, total);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    store(out + r * kPanel, total[r][0]);
    store(out + r * kPanel + kLanes, total[r][1]);
  }
}

#endif

using TileFunction = void (*)(const bf16*, int64_t, const uint8_t*, int64_t, float*);

template <int... Rows>
KVF_INLINE TileFunction tile_of(int rows, std::integer_sequence<int, Rows...>) {
  static constexpr TileFunction table[] = {panel_tile<Rows + 1>...};
  return table[rows - 1];
}

// Calls emit(row, values [kPanel]) for each of `rows` rows of x, without bias, in tiles of near equal height.
template <class Emit>
KVF_INLINE void panel_product(const bf16* x, int64_t step, int64_t rows, const uint8_t* panel, int64_t pairs,
                              Emit emit) {
  alignas(64) float out[kTileRows * kPanel];
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
    tile_of(static_cast<int>(count), std::make_integer_sequence<int, kTileRows>())(x + first * step, step, panel, pairs,
                                                                                   out);
    for (int64_t r = 0; r < count; ++r) emit(first + r, out + r * kPanel);
  }
}

}  // namespace
}  // namespace kvferry

#endif
