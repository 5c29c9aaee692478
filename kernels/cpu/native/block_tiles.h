// Products of query rows with packed K, and of their weights with packed V, by AMX tiles. K and V pass through the first-level
// cache, and leave there the rows of a group.
#pragma once

#include "bf16_tiles.h"
#include "prompts.h"

namespace kvferry {
namespace {

// Rows whose scores and weights stay in the first-level cache. The weights of a row take the place of its scores.
constexpr int64_t kGroupRows = kTwoTiles, kScoreStep = kPrefillBlock + 16, kWeightStep = 2 * kScoreStep;

// scores [rows][kScoreStep] = products of q [rows][dim] with `width` packed positions (whole panels).
KVF_INLINE void multiply_keys(Tiles& tiles, const bf16* q, int64_t dim, int64_t rows, const uint8_t* k, int64_t width,
                              float* scores) {
  const bool both = rows > kTileRows;
  tiles.shape(rows, kTileDepth);
  Tiles::settle(q);
  for (int64_t j = 0; j < width; j += kPanel) {
    zero_sums(both);
    for (int64_t d = 0; d < dim; d += kPanel) tile_step<Passing::panel>(q + d, dim, k + (j * dim + d * kPanel) * 2, both);
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
    for (int64_t j = 0; j < width; j += kPanel) tile_step<Passing::panel>(weights + j, kWeightStep, v + j * kPanel * 2, both);
    store_sums(total + part, both, dim);
  }
}

}  // namespace
}  // namespace kvferry
