// The arithmetic of causal attention in bfloat16 on the panel product of dense layers: query rows pass over packed
// blocks of kBlock positions with an online softmax. Weights are rounded to bfloat16 before they meet V where products are
// of bfloat16. Blocks begin at
// multiples of kBlock and positions that a row does not see weigh nothing, so a row's result depends on its own query
// and positions alone.
#pragma once

#include "block_products.h"
#include "packed_positions.h"
#include "prompts.h"
#include "softmax.h"

namespace kvferry {
namespace {

constexpr int64_t kBlock = kPrefillBlock;
static_assert(kGroupRows % kLanes == 0, "the state of rows is written in whole vectors");
constexpr bool kWeightsInPlace = kWeightStep * sizeof(Weight) == kScoreStep * sizeof(float);  // of scores
static_assert(kGroupRows * kScoreStep * (kWeightsInPlace ? 4 : 6) <= scored_bytes(), "a group's scores and weights have room");

// What query rows carry from block to block: total [rows][dims.v], highest and weight, one behind the other.
struct BlockBuffers {
  HeadDims dims;
  float *scores, *total, *highest, *weight, *kept;
  Weight *weights, *q;
  float* wide;

  BlockBuffers(uint8_t* memory, int64_t rows, HeadDims of) : dims(of) {
    const int64_t states = padded_rows(rows);
    scores = reinterpret_cast<float*>(memory);
    weights = reinterpret_cast<Weight*>(kWeightsInPlace ? scores : scores + kGroupRows * kScoreStep);
    total = reinterpret_cast<float*>(memory + scored_bytes());
    highest = total + rows * dims.v;
    weight = highest + states;
    kept = weight + states;
    q = reinterpret_cast<Weight*>(kept + states);
    wide = reinterpret_cast<float*>(q + queries(rows) * dims.k);
  }

  // The query of a row.
  void ask(int64_t row, const bf16* query) const {
#if defined(KVF_WIDENS)
    widen_row(query, dims.k, row, q);
#else
    copy(q + row * dims.k, query, dims.k);
#endif
  }
};

// The rows' next block, of `width` positions (whole panels). One machine code for all callers: how the compiler fuses
// products and sums must not differ between them. Scores and weights of a few rows at a time stay in the first-level cache.
inline __attribute__((noinline)) void attend_block(const BlockBuffers& b, int64_t rows, const PackedPositions& block,
                                                   int64_t width, const Sight& sight, const Scoring& scoring) {
  const bool plain = block.k_scales == nullptr && scoring.cap == 0;
  const int64_t seen = (sight.near(rows - 1, width) + kPanel - 1) / kPanel * kPanel;
  BlockOperands operands(block, b.dims, rows, seen, b.wide);
  for (int64_t first = 0; first < rows; first += kGroupRows) {
    const int64_t height = rows - first < kGroupRows ? rows - first : kGroupRows, last = first + height - 1;
    const int64_t near = sight.near(last, width);
    operands.multiply_keys(b.q + first * b.dims.k, height, near, b.scores);
    for (int64_t row = 0; !plain && row < height; ++row)
      scale_scores(b.scores + row * kScoreStep, near, scoring, block.k_scales);
    if (sight.partial(first, near))
      for (int64_t row = 0; row < height; ++row) sight.hide(first + row, b.scores + row * kScoreStep, near);
    for (int64_t row = 0; row < height; row += kLanes) {
      const RowState state{b.highest + first + row, b.weight + first + row, b.kept + first + row};
      const auto weigh = block.v_scales == nullptr ? weigh_rows<false> : weigh_rows<true>;
      weigh(b.scores + row * kScoreStep, kScoreStep, height - row < kLanes ? height - row : kLanes, near,
            plain ? scoring.scale : 1.0f, block.v_scales, state, b.weights + row * kWeightStep, kWeightStep);
    }
    operands.multiply_values(b.weights, height, near, b.total + first * b.dims.v, b.kept + first);
  }
}

// Rows are of `group` query heads from `head` on, in turns, and begin with their sinks.
KVF_INLINE void begin_rows(const BlockBuffers& b, int64_t rows, const Scoring& scoring, int64_t head, int64_t group) {
  for (int64_t i = 0; i < rows * b.dims.v; i += kLanes) store(b.total + i, Floats{});
  for (int64_t row = 0; row < rows; ++row) {
    b.highest[row] = scoring.sink(head + row % group);
    b.weight[row] = scoring.sinks == nullptr ? 0 : 1;
  }
}

KVF_INLINE void end_row(const BlockBuffers& b, int64_t row, bf16* out) {
  const float inverse = 1.0f / b.weight[row];
  const float* total = b.total + row * b.dims.v;
  for (int64_t d = 0; d < b.dims.v; d += kLanes) store(out + d, load(total + d) * inverse);
}

// A sequence under one K/V head.
struct Sequence {
  const KVLayer& kv;
  const int32_t* table;
  int64_t head, window;
  const Scoring& scoring;
};

// The rows of `group` query heads, in b.q, over positions [begin, end), packed block by block.
KVF_INLINE void attend_positions(const Sequence& s, int64_t begin, int64_t end, const BlockBuffers& b, int64_t group,
                                 const PackedPositions& packed) {
  const HeadDims dims = s.kv.dims();
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = end - at < kBlock ? end - at : kBlock, width = (count + kPanel - 1) / kPanel * kPanel;
    for (int64_t j = 0; j < width; j += kPanel)
      pack_panel(s.kv, dims, s.head, s.table, at + j, at + j + kPanel < end ? at + j + kPanel : end, packed.from(j, dims));
    attend_block(b, group, packed, width, {group, at, end - 1, s.window}, s.scoring);
  }
}

// The token at `position`: its `group` query heads q [group, dims.k] and their results, which may be the same memory.
// memory: token_memory().
KVF_INLINE void attend_token(const Sequence& s, int64_t position, const bf16* q, int64_t group, uint8_t* memory,
                             bf16* out) {
  const PackedPositions packed = packed_at(memory, kBlock, s.kv.dims(), s.kv.int8);
  const BlockBuffers b(memory + packed_bytes(kBlock, s.kv.dims()), group, s.kv.dims());
  for (int64_t row = 0; row < group; ++row) b.ask(row, q + row * s.kv.dim);
  begin_rows(b, group, s.scoring, s.head * group, group);
  attend_positions(s, block_first(position, s.window), position + 1, b, group, packed);
  for (int64_t row = 0; row < group; ++row) end_row(b, row, out + row * s.kv.v_dim);
}

}  // namespace
}  // namespace kvferry
