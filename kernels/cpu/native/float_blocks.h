// Products of query rows with packed K, and of their weights with packed V, in float32 (see float_product.h). A block's K and V
// are widened once for all rows of a tile.
#pragma once

#include "float_product.h"
#include "packed_positions.h"
#include "prompts.h"

namespace kvferry {
namespace {

// The weights of a row take the place of its scores. Rows lie so far apart that they do not meet in one set of a cache.
constexpr int64_t kGroupRows = kScoredRows, kScoreStep = kPrefillBlock + kChunk, kWeightStep = kScoreStep;
static_assert(kGroupRows % kTileRows == 0);
using ScoreRows = RowLayout<kScoreStep, kChunk>;

// Up to so many rows are multiplied by K and V that are widened meanwhile.
constexpr int64_t kUnwidenedRows = kWide ? kTileRows : 8, kUnwidenedStep = kWide ? kTileRows : kFewRows;
static_assert(kTileRows % kUnwidenedStep == 0);

// sums = products of up to kUnwidenedRows rows with a panel; tiles of rows lie `tile_step` floats apart.
template <class Layout>
KVF_INLINE void multiply_few(int64_t rows, const float* x, int64_t tile_step, const uint8_t* panel, int64_t inputs,
                             const Sums& sums) {
  for (int64_t row = 0; row < rows; row += kUnwidenedStep)
    few_rows<Layout>(rows - row < kUnwidenedStep ? rows - row : kUnwidenedStep,
                     x + row / kTileRows * tile_step + row % kTileRows * Layout::row, panel, inputs, sums.from(row),
                     std::make_integer_sequence<int, kUnwidenedStep>());
}

// The first `width` positions (whole panels) of a packed block, as `rows` rows are multiplied with them. memory: of a whole block
// in float32.
class BlockOperands {
 public:
  BlockOperands(const PackedPositions& block, HeadDims dims, int64_t rows, int64_t width, float* memory)
      : block_(block), dims_(dims), widened_(rows > kUnwidenedRows), k_(memory), v_(memory + kPrefillBlock * dims.k) {
    if (!widened_) return;
    for (int64_t j = 0; j < width; j += kPanel)
      widen_panel(block.k + j * dims.k * 2, dims.k, k_ + j / kOutputs * kOutputs * dims.k + j % kOutputs);
    for (int64_t d = 0; d < dims.v; d += kPanel)
      widen_panel(block.v + d / kPanel * block.v_step, width, v_ + d / kOutputs * kOutputs * kPrefillBlock + d % kOutputs);
  }

  // scores [rows][kScoreStep] = products of q, as RowTiles has them, with the first `width` positions.
  void multiply_keys(const float* q, int64_t rows, int64_t width, float* scores) const {
    const int64_t tile_step = kTileRows * dims_.k;
    for (int64_t j = 0; !widened_ && j < width; j += kPanel)
      multiply_few<RowTiles>(rows, q, tile_step, block_.k + j * dims_.k * 2, dims_.k, {scores + j, kScoreStep, nullptr, true});
    for (int64_t j = 0; widened_ && j < width; j += kOutputs)
      for (int64_t row = 0; row < rows; row += kTileRows)
        multiply_wide<RowTiles>(rows - row < kTileRows ? rows - row : kTileRows, q + row / kTileRows * tile_step,
                                k_ + j * dims_.k, width - j > kPanel ? kOutputs : kPanel, dims_.k,
                                {scores + row * kScoreStep + j, kScoreStep, nullptr, true}, {block_.k, 0});
  }

  // total [rows][dims.v] = kept[row] * total + products of weights [rows][kWeightStep] of `width` positions with their V.
  void multiply_values(const float* weights, int64_t rows, int64_t width, float* total, const float* kept) const {
    for (int64_t d = 0; !widened_ && d < dims_.v; d += kPanel)
      multiply_few<ScoreRows>(rows, weights, kTileRows * kWeightStep, block_.v + d / kPanel * block_.v_step, width,
                              {total + d, dims_.v, kept, false});
    for (int64_t d = 0; widened_ && d < dims_.v; d += kOutputs)
      for (int64_t row = 0; row < rows; row += kTileRows)
        multiply_wide<ScoreRows>(rows - row < kTileRows ? rows - row : kTileRows, weights + row * kWeightStep,
                                 v_ + d * kPrefillBlock, dims_.v - d > kPanel ? kOutputs : kPanel, width,
                                 {total + row * dims_.v + d, dims_.v, kept + row, false}, {block_.v, 0});
  }

 private:
  const PackedPositions& block_;
  const HeadDims dims_;
  const bool widened_;
  float *k_, *v_;
};

}  // namespace
}  // namespace kvferry
