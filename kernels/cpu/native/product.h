// Dense layers: y = x @ weight.T + bias, bfloat16 in, float32 sums, over weights packed once.
//
// A panel holds 32 rows of the weight [out, in]: for each pair of inputs, 32 pairs of bfloat16, so that one vector
// register is a pair of inputs of 16 outputs, and a thread reads its panels as one stream. Each output is one chain of
// sums in the order of the inputs, whatever the number of rows of x: a row's result does not depend on its batch.
#pragma once

#include "types.h"
#include "vector.h"

namespace kvferry {
namespace {

constexpr int kParts = kPanel / kLanes;
constexpr int kAhead = 8192;  // bytes of weights prefetched ahead
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kTileRows = 2;
#else
constexpr int kTileRows = 1;
#endif

template <class T>
KVF_INLINE T word(const bf16* pair) {
  T bits;
  std::memcpy(&bits, pair, sizeof bits);
  return bits;
}

// out [Rows][kPanel] = the panel's outputs of `Rows` rows of x (`step` elements apart).
template <int Rows>
inline __attribute__((noinline)) void panel_tile(const bf16* x, int64_t step, const uint8_t* panel, int64_t pairs,
                                                 float* out) {
  Floats total[Rows][kParts];
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < kParts; ++c) total[r][c] = Floats{};
  for (int64_t k = 0; k < pairs; ++k, panel += kPanel * 4) {
    __builtin_prefetch(panel + kAhead);
    __builtin_prefetch(panel + kAhead + 64);
#if defined(__AVX512BF16__)
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel), w1 = (__m512bh)_mm512_loadu_si512(panel + 64);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(word<int32_t>(x + r * step + 2 * k));
      total[r][0] = (Floats)_mm512_dpbf16_ps((__m512)total[r][0], w0, pair);
      total[r][1] = (Floats)_mm512_dpbf16_ps((__m512)total[r][1], w1, pair);
    }
#else
#pragma GCC unroll 16
    for (int c = 0; c < kParts; ++c) {
      const Words both = load_as<Words>(panel + c * kLanes * 4);
      const Floats even = reinterpret_cast<Floats>(both << 16);
      const Floats odd = reinterpret_cast<Floats>(both & 0xffff0000u);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const bf16* pair = x + r * step + 2 * k;
        total[r][c] = total[r][c] + even * widen(pair[0]);
        total[r][c] = total[r][c] + odd * widen(pair[1]);
      }
    }
#endif
  }
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < kParts; ++c) store(out + r * kPanel + c * kLanes, total[r][c]);
}

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

KVF_INLINE const uint8_t* panel_of(const Dense& dense, int64_t index) {
  return dense.packed + index * dense.pairs() * kPanel * 4;
}

KVF_INLINE Floats biased(const Dense& dense, int64_t column, Floats value) {
  return dense.bias == nullptr ? value : value + load(dense.bias + column);
}

constexpr int64_t kRowBlock = 192;  // rows of x that stay in the second-level cache while the panels pass by

// y [rows, out] (`y_step` elements apart) = the dense layer of x [rows, in], for a share of its panels.
KVF_INLINE void dense_share(const Dense& dense, const bf16* x, int64_t x_step, int64_t rows, bf16* y, int64_t y_step,
                            Share panels) {
  for (int64_t base = 0; base < rows; base += kRowBlock) {
    const int64_t count = rows - base < kRowBlock ? rows - base : kRowBlock;
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      const int64_t left = p * kPanel;
      const bool whole = left + kPanel <= dense.out;
      panel_product(x + base * x_step, x_step, count, panel_of(dense, p), dense.pairs(),
                    [&](int64_t row, float* values) {
                      bf16* to = y + (base + row) * y_step + left;
                      for (int c = 0; c < kPanel && (whole || left + c < dense.out); c += kLanes) {
                        const Floats value = biased(dense, left + c, load(values + c));
                        if (whole || left + c + kLanes <= dense.out) {
                          store(to + c, value);
                        } else {
                          store(values + c, value);
                          for (int i = c; left + i < dense.out; ++i) store_one(to + i, values[i]);
                        }
                      }
                    });
    }
  }
}

}  // namespace
}  // namespace kvferry
