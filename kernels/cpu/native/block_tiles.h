// Products of query rows with packed K, and of their weights with packed V, by AMX tiles. K and V pass through the first-level
// cache, and leave there the rows of a group.
#pragma once

#include "bf16_tiles.h"
#include "packed_positions.h"
#include "prompts.h"

namespace kvferry {
namespace {

// Rows whose scores and weights stay in the first-level cache. The weights of a row take the place of its scores.
constexpr int64_t kGroupRows = kTwoTiles, kScoreStep = kPrefillBlock + 16, kWeightStep = 2 * kScoreStep;

// A packed block's positions, as rows are multiplied with them.
class BlockOperands {
 public:
  BlockOperands(const PackedPositions& block, HeadDims dims, int64_t, int64_t, float*) : block_(block), dims_(dims) {}

  // scores [rows][kScoreStep] = products of q [rows][dims.k] with the first `width` positions (whole panels).
  void multiply_keys(const bf16* q, int64_t rows, int64_t width, float* scores) {
    const bool both = rows > kTileRows;
    tiles_.shape(rows, kTileDepth);
    Tiles::settle(q);
    for (int64_t j = 0; j < width; j += kPanel) {
      zero_sums(both);
      for (int64_t d = 0; d < dims_.k; d += kPanel)
        tile_step<Passing::panel>(q + d, dims_.k, block_.k + (j * dims_.k + d * kPanel) * 2, both);
      store_sums(scores + j, both, kScoreStep);
    }
  }

  // total [rows][dims.v] = kept[row] * total + products of weights [rows][kWeightStep] of `width` positions (whole panels) with
  // their V.
  void multiply_values(const bf16* weights, int64_t rows, int64_t width, float* total, const float* kept) {
    const bool both = rows > kTileRows;
    const int64_t dim = dims_.v;
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t d = 0; d < dim; d += kLanes) store(total + row * dim + d, load(total + row * dim + d) * kept[row]);
    tiles_.shape(rows, kTileDepth);
    Tiles::settle(weights);
    const uint8_t* v = block_.v;
    for (int64_t part = 0; part < dim; part += kPanel, v += block_.v_step) {
      load_sums(total + part, both, dim);
      for (int64_t j = 0; j < width; j += kPanel) tile_step<Passing::panel>(weights + j, kWeightStep, v + j * kPanel * 2, both);
      store_sums(total + part, both, dim);
    }
  }

 private:
  Tiles tiles_;
  const PackedPositions& block_;
  const HeadDims dims_;
};

}  // namespace
}  // namespace kvferry
