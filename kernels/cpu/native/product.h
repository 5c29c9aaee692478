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
#define KVF_BF16_TILES

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

#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define KVF_BF16_TILES
#endif

#if defined(KVF_BF16_TILES)

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

#else

// Without products of bfloat16 both sides are widened, a run of inputs at a time: x to float rows in the first-level
// cache, the panel in registers for few rows, once into the cache for many. Registers of 16 lanes are enough to widen it
// for as many rows as are multiplied at once.
constexpr bool kWide = kLanes == 16;
constexpr int64_t kInputs = kWide ? 192 : 64;
constexpr int kFewRows = kWide ? 12 : 2, kManyRows = 6, kMostRows = kWide ? kFewRows : kManyRows;
constexpr int kTogether = kWide ? kParts : 1;  // vectors of outputs that one number of x is multiplied with
constexpr int64_t kProductRows = 48;           // rows whose sums are held at once

KVF_INLINE void widen_rows(const bf16* x, int64_t step, int64_t rows, int64_t inputs, float* out) {
  const int64_t whole = inputs / kLanes * kLanes;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < whole; i += kLanes) store(out + r * kInputs + i, load(x + r * step + i));
    for (int64_t i = whole; i < inputs; ++i) out[r * kInputs + i] = widen(x[r * step + i]);
  }
}

// out [Rows][kPanel] += the products of x [Rows][kInputs] with `pairs` pairs of inputs of a panel.
template <int Rows>
inline __attribute__((noinline)) void few_tile(const float* x, const uint8_t* panel, int64_t pairs, float* out) {
  Floats total[Rows][kParts];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < kParts; ++c) total[r][c] = load(out + r * kPanel + c * kLanes);
  for (int64_t k = 0; k < pairs; ++k, panel += kPanel * 4) {
    __builtin_prefetch(panel + kAhead);
    __builtin_prefetch(panel + kAhead + 64);
#pragma GCC unroll 16
    for (int first = 0; first < kParts; first += kTogether) {
      Words both[kTogether];
#pragma GCC unroll 16
      for (int c = 0; c < kTogether; ++c) both[c] = load_as<Words>(panel + (first + c) * kLanes * 4);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const Floats even = splat(x[r * kInputs + 2 * k]), odd = splat(x[r * kInputs + 2 * k + 1]);
#pragma GCC unroll 16
        for (int c = 0; c < kTogether; ++c) {
          total[r][first + c] = total[r][first + c] + even_of(both[c]) * even;
          total[r][first + c] = total[r][first + c] + odd_of(both[c]) * odd;
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < kParts; ++c) store(out + r * kPanel + c * kLanes, total[r][c]);
}

// The same with a widened panel, wide [inputs][kPanel], two vectors of outputs at a time.
template <int Rows>
inline __attribute__((noinline)) void many_tile(const float* x, const float* wide, int64_t inputs, float* out) {
  for (int part = 0; part < kPanel; part += 2 * kLanes) {
    Floats total[Rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      total[r][0] = load(out + r * kPanel + part);
      total[r][1] = load(out + r * kPanel + part + kLanes);
    }
    for (int64_t i = 0; i < inputs; ++i) {
      const Floats first = load(wide + i * kPanel + part), second = load(wide + i * kPanel + part + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        total[r][0] = total[r][0] + first * x[r * kInputs + i];
        total[r][1] = total[r][1] + second * x[r * kInputs + i];
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      store(out + r * kPanel + part, total[r][0]);
      store(out + r * kPanel + part + kLanes, total[r][1]);
    }
  }
}

template <int... Rows>
KVF_INLINE void few_rows(int rows, const float* x, const uint8_t* panel, int64_t pairs, float* out,
                         std::integer_sequence<int, Rows...>) {
  static constexpr void (*table[])(const float*, const uint8_t*, int64_t, float*) = {few_tile<Rows + 1>...};
  table[rows - 1](x, panel, pairs, out);
}

template <int... Rows>
KVF_INLINE void many_rows(int rows, const float* x, const float* wide, int64_t inputs, float* out,
                          std::integer_sequence<int, Rows...>) {
  static constexpr void (*table[])(const float*, const float*, int64_t, float*) = {many_tile<Rows + 1>...};
  table[rows - 1](x, wide, inputs, out);
}

inline __attribute__((noinline)) void add_products(const bf16* x, int64_t step, int64_t rows, const uint8_t* panel,
                                                   int64_t pairs, float* out) {
  alignas(64) float wide[kWide ? kLanes : kInputs * kPanel], of_x[kMostRows * kInputs];
  const bool few = kWide || rows <= 8;
  if (!few)
    for (int64_t k = 0; k < pairs; ++k)
      for (int c = 0; c < kPanel; c += kLanes) {
        const Words both = load_as<Words>(panel + (k * kPanel + c) * 4);
        store(wide + 2 * k * kPanel + c, even_of(both));
        store(wide + (2 * k + 1) * kPanel + c, odd_of(both));
      }
  const int64_t height = few ? kFewRows : kManyRows, tiles = (rows + height - 1) / height;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
    widen_rows(x + first * step, step, count, 2 * pairs, of_x);
    float* to = out + first * kPanel;
    if (few)
      few_rows(static_cast<int>(count), of_x, panel, pairs, to, std::make_integer_sequence<int, kFewRows>());
    else if constexpr (!kWide)
      many_rows(static_cast<int>(count), of_x, wide, 2 * pairs, to, std::make_integer_sequence<int, kManyRows>());
  }
}

// Calls emit(row, values [kPanel]) for each of `rows` rows of x (`step` elements apart), without bias.
template <class Emit>
KVF_INLINE void panel_product(const bf16* x, int64_t step, int64_t rows, const uint8_t* panel, int64_t pairs,
                              Emit emit) {
  alignas(64) float out[kProductRows * kPanel];
  for (int64_t base = 0; base < rows; base += kProductRows) {
    const int64_t count = rows - base < kProductRows ? rows - base : kProductRows;
    std::memset(out, 0, count * kPanel * sizeof(float));
    for (int64_t k = 0; k < pairs; k += kInputs / 2)
      add_products(x + base * step + 2 * k, step, count, panel + k * kPanel * 4,
                   pairs - k < kInputs / 2 ? pairs - k : kInputs / 2, out);
    for (int64_t r = 0; r < count; ++r) emit(base + r, out + r * kPanel);
  }
}

#endif

}  // namespace
}  // namespace kvferry

#endif
