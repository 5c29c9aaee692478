// The arithmetic of causal attention in bfloat16 on the panel product of dense layers: query rows pass over packed
// blocks of kBlock positions with an online softmax. Weights are rounded to bfloat16 before they meet V. Blocks begin at
// multiples of kBlock and positions that a row does not see weigh nothing, so a row's result depends on its own query
// and positions alone.
#pragma once

#include "cache.h"
#include "product.h"
#include "prompts.h"
#include "scores.h"

namespace kvferry {
namespace {

constexpr int64_t kBlock = kPrefillBlock;

// What query rows carry from block to block: total [rows][dims.v], highest and weight, one behind the other.
struct BlockBuffers {
  HeadDims dims;
  float *scores, *total, *highest, *weight, *kept;
  bf16 *q, *weights;

  BlockBuffers(uint8_t* memory, int64_t rows, HeadDims of) : dims(of) {
    scores = reinterpret_cast<float*>(memory);
    total = scores + rows * kBlock;
    highest = total + rows * dims.v;
    weight = highest + rows;
    kept = weight + rows;
    q = reinterpret_cast<bf16*>(kept + rows);
    weights = q + rows * dims.k;
  }
};

// K and V of some positions under one head, packed; scales: of int8, null otherwise.
struct PackedPositions {
  uint8_t *k, *v;
  int64_t v_step;  // bytes between 32 dimensions and the next
  float *k_scales, *v_scales;

  PackedPositions from(int64_t position, HeadDims dims) const {
    return {k + position * dims.k * 2, v + position * kPanel * 2, v_step, k_scales == nullptr ? nullptr : k_scales + position,
            v_scales == nullptr ? nullptr : v_scales + position};
  }
};

KVF_INLINE PackedPositions packed_at(uint8_t* memory, int64_t positions, HeadDims dims, bool scaled) {
  auto* scales = reinterpret_cast<float*>(memory + positions * (dims.k + dims.v) * 2);
  return {memory, memory + positions * dims.k * 2, positions * kPanel * 2, scaled ? scales : nullptr,
          scaled ? scales + positions : nullptr};
}

template <int Step, size_t... Lane>
KVF_INLINE void exchange(Words& a, Words& b, std::index_sequence<Lane...>) {
  const Words low = __builtin_shufflevector(a, b, ((Lane & Step) ? kLanes + (Lane & ~Step) : Lane)...);
  b = __builtin_shufflevector(a, b, ((Lane & Step) ? kLanes + Lane : (Lane | Step))...);
  a = low;
}

// Transposes a square of words.
template <int Step = kLanes / 2>
KVF_INLINE void transpose(Words* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (!(i & Step)) exchange<Step>(rows[i], rows[i + Step], std::make_index_sequence<kLanes>());
  if constexpr (Step > 1) transpose<Step / 2>(rows);
}

// K of 32 positions: for each pair of dimensions, the pairs of 32 positions.
KVF_INLINE void pack_k(const bf16* const* rows, int64_t dim, uint8_t* panel) {
  for (int64_t j = 0; j < kPanel; j += kLanes)
    for (int64_t d = 0; d < dim / 2; d += kLanes) {
      Words square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = load_as<Words>(rows[j + i] + 2 * d);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        std::memcpy(panel + ((d + i) * kPanel + j) * 4, &square[i], sizeof square[i]);
    }
}

// V of 32 positions: for each 32 dimensions (`step` bytes apart) and each pair of positions, the pairs of 32 dimensions.
KVF_INLINE void pack_v(const bf16* const* rows, int64_t dim, uint8_t* panel, int64_t step) {
  for (int64_t j = 0; j < kPanel; j += 2)
    for (int64_t p = 0; p < dim / kPanel; ++p) {
      const bf16 *a = rows[j] + p * kPanel, *b = rows[j + 1] + p * kPanel;
      auto* to = reinterpret_cast<uint32_t*>(panel + p * step) + j / 2 * kPanel;
      for (int64_t d = 0; d < kPanel; ++d) to[d] = a[d] | static_cast<uint32_t>(b[d]) << 16;
    }
}

// Rows in bfloat16: as they are, or int8 without their scales, which bfloat16 holds exactly.
KVF_INLINE void widen_rows(const bf16* const* rows, int64_t count, int64_t, bf16*, const bf16** out, float*) {
  for (int64_t j = 0; j < count; ++j) out[j] = rows[j];
}

KVF_INLINE void widen_rows(const int8_t* const* rows, int64_t count, int64_t dim, bf16* memory, const bf16** out,
                           float* scales) {
  for (int64_t j = 0; j < count; ++j, memory += dim) {
    for (int64_t d = 0; d < dim; d += kLanes) store_exact(memory + d, load(rows[j] + d));
    scales[j] = scale_of(rows[j], dim);
    out[j] = memory;
  }
  for (int64_t j = count; j < kPanel; ++j) scales[j] = 0;
}

template <class S>
inline __attribute__((noinline)) void pack_stored(const Tile<S>& tile, HeadDims dims, const PackedPositions& to) {
  static constexpr bf16 kNothing[kMaxDim] = {};
  alignas(64) bf16 memory[sizeof(S) == 1 ? kPanel * kMaxDim : 1];
  const bf16* rows[kPanel];
  for (int64_t j = tile.count; j < kPanel; ++j) rows[j] = kNothing;
  widen_rows(tile.k, tile.count, dims.k, memory, rows, to.k_scales);
  pack_k(rows, dims.k, to.k);
  widen_rows(tile.v, tile.count, dims.v, memory, rows, to.v_scales);
  pack_v(rows, dims.v, to.v, to.v_step);
}

// Packs positions [begin, end), at most 32 of them; the panel's others are zeros.
KVF_INLINE void pack_panel(const KVLayer& kv, HeadDims dims, int64_t head, const int32_t* table, int64_t begin,
                           int64_t end, const PackedPositions& to) {
  if (kv.int8) {
    Tile<int8_t> tile;
    tile.find(kv, head, table, begin, end);
    pack_stored(tile, dims, to);
  } else {
    Tile<bf16> tile;
    tile.find(kv, head, table, begin, end);
    pack_stored(tile, dims, to);
  }
}

// One row's weights of a block from its scores; positions outside [low, high) of the block weigh nothing.
KVF_INLINE void soften(const BlockBuffers& b, int64_t row, int64_t low, int64_t high, int64_t width,
                       const float* v_scales) {
  float* scores = b.scores + row * kBlock;
  bf16* weights = b.weights + row * kBlock;
  b.kept[row] = 1;
  if (low >= high) {
    for (int64_t j = 0; j < width; j += kLanes) store(weights + j, Floats{});
    return;
  }
  for (int64_t j = 0; j < low; ++j) scores[j] = -__builtin_inff();
  for (int64_t j = high; j < width; ++j) scores[j] = -__builtin_inff();
  Floats top = load(scores);
  for (int64_t j = kLanes; j < width; j += kLanes) top = larger(top, load(scores + j));
  const float peak = largest(top), higher = peak > b.highest[row] ? peak : b.highest[row];
  Floats added{};
  for (int64_t j = 0; j < width; j += kLanes) {
    const Floats e = exponential(load(scores + j) - higher);
    added = added + e;
    store(weights + j, v_scales == nullptr ? e : e * load(v_scales + j));
  }
  b.kept[row] = exponential(splat(b.highest[row] - higher))[0];
  b.weight[row] = b.weight[row] * b.kept[row] + sum(added);
  b.highest[row] = higher;
}

// Which positions of a block, which begins at `begin`, the query rows see: row r (token r / group, from `token` on) those
// in its window up to its own, or up to the last one of the tokens' that is named.
struct Sight {
  int64_t group, begin, token, window;
  const int32_t* see_until = nullptr;
};

// The rows' next block, of `width` positions (whole panels). One machine code for all callers: how the compiler fuses
// products and sums must not differ between them.
inline __attribute__((noinline)) void attend_block(const BlockBuffers& b, int64_t rows, const PackedPositions& block,
                                                   int64_t width, const Sight& sight, const Scoring& scoring) {
  for (int64_t j = 0; j < width; j += kPanel)
    panel_product(b.q, b.dims.k, rows, block.k + j * b.dims.k * 2, b.dims.k / 2, [&](int64_t row, const float* values) {
      for (int c = 0; c < kPanel; c += kLanes) {
        Floats score = load(values + c) * scoring.scale;
        if (block.k_scales != nullptr) score = score * load(block.k_scales + j + c);
        store(b.scores + row * kBlock + j + c, scoring.cap > 0 ? capped(score, scoring.cap) : score);
      }
    });
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t number = row / sight.group, token = sight.token + number;
    const int64_t high = (sight.see_until == nullptr ? token : sight.see_until[number]) + 1 - sight.begin;
    const int64_t low = first_seen(token, sight.window) - sight.begin;
    soften(b, row, low < 0 ? 0 : low, high < width ? high : width, width, block.v_scales);
  }
  for (int64_t part = 0; part < b.dims.v / kPanel; ++part)
    panel_product(b.weights, kBlock, rows, block.v + part * block.v_step, width / 2,
                  [&](int64_t row, const float* values) {
                    float* to = b.total + row * b.dims.v + part * kPanel;
                    for (int c = 0; c < kPanel; c += kLanes)
                      store(to + c, load(to + c) * b.kept[row] + load(values + c));
                  });
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
  copy(b.q, q, group * s.kv.dim);
  begin_rows(b, group, s.scoring, s.head * group, group);
  attend_positions(s, block_first(position, s.window), position + 1, b, group, packed);
  for (int64_t row = 0; row < group; ++row) end_row(b, row, out + row * s.kv.v_dim);
}

}  // namespace
}  // namespace kvferry
