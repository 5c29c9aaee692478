// Products of query rows with packed K, and of their weights with packed V.
#pragma once

#include "product.h"
#include "prompts.h"

namespace kvferry {
namespace {

#if defined(__AMX_BF16__)

// Rows whose scores and weights stay in the first-level cache. The weights of a row take the place of its scores.
constexpr int64_t kGroupRows = kTwoTiles, kScoreStep = kPrefillBlock + 16, kWeightStep = 2 * kScoreStep;

// One step: the sums += products of 32 inputs. Panels pass through the first-level cache and leave the rows there.
KVF_INLINE void passing_step(const bf16* x, int64_t step, const uint8_t* panel, bool both) {
  _tile_stream_loadd(6, panel, kTileStride);
  _tile_loadd(4, x, 2 * step);
  _tile_dpbf16ps(0, 4, 6);
  _tile_stream_loadd(7, panel + 64, kTileStride);
  _tile_dpbf16ps(1, 4, 7);
  if (!both) return;
  _tile_loadd(5, x + kTileRows * step, 2 * step);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// scores [rows][kScoreStep] = products of q [rows][dim] with `width` packed positions (whole panels).
KVF_INLINE void multiply_keys(Tiles& tiles, const bf16* q, int64_t dim, int64_t rows, const uint8_t* k, int64_t width,
                              float* scores) {
  const bool both = rows > kTileRows;
  tiles.shape(rows, kTileDepth);
  Tiles::settle(q);
  for (int64_t j = 0; j < width; j += kPanel) {
    zero_sums(both);
    for (int64_t d = 0; d < dim; d += kPanel) passing_step(q + d, dim, k + (j * dim + d * kPanel) * 2, both);
    store_sums(scores + j, both, kScoreStep);
  }
}

// total [rows][dim] = kept[row] * total + products of weights [rows][kWeightStep] of `width` packed positions (whole panels)
// with their V.
KVF_INLINE void multiply_values(Tiles& tiles, const bf16* weights, int64_t rows, const uint8_t* v, int64_t v_step, int64_t width,
                                float* total, int64_t dim, const float* kept) {
  const bool both = rows > kTileRows;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t d = 0; d < dim; d += kLanes) store(total + row * dim + d, load(total + row * dim + d) * kept[row]);
  tiles.shape(rows, kTileDepth);
  Tiles::settle(weights);
  for (int64_t part = 0; part < dim; part += kPanel, v += v_step) {
    load_sums(total + part, both, dim);
    for (int64_t j = 0; j < width; j += kPanel) passing_step(weights + j, kWeightStep, v + j * kPanel * 2, both);
    store_sums(total + part, both, dim);
  }
}

#else

constexpr int64_t kGroupRows = kScoredRows, kScoreStep = kPrefillBlock, kWeightStep = kPrefillBlock;
struct Tiles {};

#endif

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

// out [Rows] (`out_step` floats apart) = the panel's outputs of rows of x, and kept[row] * out where `kept` is given.
template <int Rows>
inline __attribute__((noinline)) void sum_tile(const bf16* x, int64_t step, const uint8_t* panel, int64_t pairs,
                                               float* out, int64_t out_step, const float* kept) {
  Floats total[Rows][kParts] = {};
  if (kept != nullptr)
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
      for (int c = 0; c < kParts; ++c) total[r][c] = load(out + r * out_step + c * kLanes) * kept[r];
  add_pairs<Rows>(x, step, panel, pairs, total);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < kParts; ++c) store(out + r * out_step + c * kLanes, total[r][c]);
}

using SumFunction = void (*)(const bf16*, int64_t, const uint8_t*, int64_t, float*, int64_t, const float*);

template <int... Rows>
KVF_INLINE SumFunction sum_tile_of(int64_t rows, std::integer_sequence<int, Rows...>) {
  static constexpr SumFunction table[] = {sum_tile<Rows + 1>...};
  return table[rows - 1];
}

// The same of any number of rows.
KVF_INLINE void panel_sums(const bf16* x, int64_t step, int64_t rows, const uint8_t* panel, int64_t pairs, float* out,
                           int64_t out_step, const float* kept) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
    sum_tile_of(count, std::make_integer_sequence<int, kTileRows>())(
        x + first * step, step, panel, pairs, out + first * out_step, out_step, kept == nullptr ? kept : kept + first);
  }
}

#elif !defined(__AMX_BF16__)

// out [rows] (`out_step` floats apart) = the panel's outputs of rows of x, and kept[row] * out where `kept` is given.
KVF_INLINE void panel_sums(const bf16* x, int64_t step, int64_t rows, const uint8_t* panel, int64_t pairs, float* out,
                           int64_t out_step, const float* kept) {
  panel_product(x, step, rows, panel, pairs, [&](int64_t row, const float* values) {
    float* to = out + row * out_step;
    for (int c = 0; c < kPanel; c += kLanes)
      store(to + c, kept == nullptr ? load(values + c) : load(to + c) * kept[row] + load(values + c));
  });
}

#endif

#if !defined(__AMX_BF16__)

KVF_INLINE void multiply_keys(Tiles&, const bf16* q, int64_t dim, int64_t rows, const uint8_t* k, int64_t width, float* scores) {
  for (int64_t j = 0; j < width; j += kPanel)
    panel_sums(q, dim, rows, k + j * dim * 2, dim / 2, scores + j, kScoreStep, nullptr);
}

KVF_INLINE void multiply_values(Tiles&, const bf16* weights, int64_t rows, const uint8_t* v, int64_t v_step, int64_t width,
                                float* total, int64_t dim, const float* kept) {
  for (int64_t part = 0; part < dim; part += kPanel, v += v_step)
    panel_sums(weights, kWeightStep, rows, v, width / 2, total + part, dim, kept);
}

#endif

}  // namespace
}  // namespace kvferry
