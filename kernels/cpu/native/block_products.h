// Products of query rows with packed K, and of their weights with packed V.
#pragma once

#include "packed_positions.h"
#include "product.h"
#include "prompts.h"

#if defined(__AMX_BF16__)
#include "block_tiles.h"
#elif defined(KVF_WIDENS)
#include "float_blocks.h"
#else

namespace kvferry {
namespace {

constexpr int64_t kGroupRows = kScoredRows, kScoreStep = kPrefillBlock, kWeightStep = kPrefillBlock;

#if defined(__AVX512BF16__)

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

#else

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

// A packed block's positions, as rows are multiplied with them.
class BlockOperands {
 public:
  BlockOperands(const PackedPositions& block, HeadDims dims, int64_t, int64_t, float*) : block_(block), dims_(dims) {}

  void multiply_keys(const bf16* q, int64_t rows, int64_t width, float* scores) const {
    for (int64_t j = 0; j < width; j += kPanel)
      panel_sums(q, dims_.k, rows, block_.k + j * dims_.k * 2, dims_.k / 2, scores + j, kScoreStep, nullptr);
  }

  void multiply_values(const bf16* weights, int64_t rows, int64_t width, float* total, const float* kept) const {
    for (int64_t d = 0; d < dims_.v; d += kPanel)
      panel_sums(weights, kWeightStep, rows, block_.v + d / kPanel * block_.v_step, width / 2, total + d, dims_.v, kept);
  }

 private:
  const PackedPositions& block_;
  const HeadDims dims_;
};

}  // namespace
}  // namespace kvferry

#endif
