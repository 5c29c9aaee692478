// Causal attention of a run of query tokens in bfloat16, on the panel product of dense layers: K and V of the sequence
// are packed once per layer, then tiles of query rows (all heads that share a K/V head) pass over blocks of positions
// with an online softmax. Weights are rounded to bfloat16 before they meet V. Blocks begin at multiples of kBlock, so a
// token's result does not depend on how its prompt was cut into chunks.
#pragma once

#include "attention.h"
#include "product.h"

namespace kvferry {
namespace {

constexpr int64_t kBlock = kPrefillBlock;

struct PrefillBuffers {
  float *scores, *total, *highest, *weight, *kept;
  bf16 *q, *weights;

  PrefillBuffers(uint8_t* memory, int64_t rows, int64_t dim) {
    scores = reinterpret_cast<float*>(memory);
    total = scores + rows * kBlock;
    highest = total + rows * dim;
    weight = highest + rows;
    kept = weight + rows;
    q = reinterpret_cast<bf16*>(kept + rows);
    weights = q + rows * dim;
  }
};

// K of 32 positions: for each pair of dimensions, the pairs of 32 positions.
KVF_INLINE void pack_k(const bf16* const* rows, int64_t count, int64_t dim, uint8_t* panel) {
  auto* to = reinterpret_cast<uint32_t*>(panel);
  for (int64_t j = 0; j < kPanel; ++j)
    for (int64_t d = 0; d < dim / 2; ++d) to[d * kPanel + j] = j < count ? word<uint32_t>(rows[j] + 2 * d) : 0;
}

// V of 32 positions: for each 32 dimensions (`step` bytes apart) and each pair of positions, the pairs of 32 dimensions.
KVF_INLINE void pack_v(const bf16* const* rows, int64_t count, int64_t dim, uint8_t* panel, int64_t step) {
  static constexpr bf16 kNothing[kMaxDim] = {};
  for (int64_t j = 0; j < kPanel; j += 2) {
    const bf16* a = j < count ? rows[j] : kNothing;
    const bf16* b = j + 1 < count ? rows[j + 1] : kNothing;
    for (int64_t p = 0; p < dim / kPanel; ++p) {
      auto* to = reinterpret_cast<uint32_t*>(panel + p * step) + j / 2 * kPanel;
      for (int64_t d = 0; d < kPanel; ++d)
        to[d] = a[p * kPanel + d] | static_cast<uint32_t>(b[p * kPanel + d]) << 16;
    }
  }
}

struct PackedKV {
  const PrefillTask& task;
  int64_t first, positions;  // first: a multiple of kBlock; positions: of whole panels from there

  explicit PackedKV(const PrefillTask& t)
      : task(t), first(prefill_first(t.total_len - t.query_len, t.window)),
        positions((t.total_len - first + kPanel - 1) / kPanel * kPanel) {}

  int64_t head_bytes() const { return positions * task.kv.dim * 2; }
  uint8_t* k(int64_t head, int64_t position) const {
    return task.packed + head * 2 * head_bytes() + (position - first) * task.kv.dim * 2;
  }
  // 32 dimensions from 32 * part on
  uint8_t* v(int64_t head, int64_t part, int64_t position) const {
    return task.packed + (head * 2 + 1) * head_bytes() + part * v_step() + (position - first) * kPanel * 2;
  }
  int64_t v_step() const { return positions * kPanel * 2; }

  void pack(int64_t head, int64_t position) const {
    Tile<bf16> tile;
    const int64_t end = position + kPanel < task.total_len ? position + kPanel : task.total_len;
    tile.find(task.kv, head, task.table, position, end);
    pack_k(tile.k, tile.count, task.kv.dim, k(head, position));
    pack_v(tile.v, tile.count, task.kv.dim, v(head, 0, position), v_step());
  }
};

// One row's weights of a block from its scores; positions outside [low, high) of the block weigh nothing.
KVF_INLINE void soften(const PrefillBuffers& b, int64_t row, int64_t low, int64_t high, int64_t width) {
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
    store(weights + j, e);
  }
  b.kept[row] = exponential(splat(b.highest[row] - higher))[0];
  b.weight[row] = b.weight[row] * b.kept[row] + sum(added);
  b.highest[row] = higher;
}

// Tokens [begin, end) of the query, under one K/V head.
inline __attribute__((noinline)) void attend_tile(const PackedKV& packed, int64_t head, int64_t begin, int64_t end,
                                                  uint8_t* memory) {
  const PrefillTask& t = packed.task;
  const int64_t dim = t.kv.dim, group = t.heads / t.kv.heads, rows = (end - begin) * group;
  const int64_t computed = t.total_len - t.query_len, seen = computed + end;
  const PrefillBuffers b(memory, prefill_rows(group), dim);
  for (int64_t token = begin; token < end; ++token)
    copy(b.q + (token - begin) * group * dim,
         static_cast<const bf16*>(t.q) + (token * t.heads + head * group) * dim, group * dim);
  for (int64_t i = 0; i < rows * dim; i += kLanes) store(b.total + i, Floats{});
  for (int64_t row = 0; row < rows; ++row) b.highest[row] = -__builtin_inff(), b.weight[row] = 0;
  for (int64_t at = prefill_first(computed + begin, t.window); at < seen; at += kBlock) {
    const int64_t count = seen - at < kBlock ? seen - at : kBlock, width = (count + kPanel - 1) / kPanel * kPanel;
    for (int64_t j = 0; j < width; j += kPanel)
      panel_product(b.q, dim, rows, packed.k(head, at + j), dim / 2, [&](int64_t row, const float* values) {
        for (int c = 0; c < kPanel; c += kLanes) store(b.scores + row * kBlock + j + c, load(values + c) * t.scale);
      });
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = computed + begin + row / group;
      const int64_t high = position + 1 - at, low = t.window > 0 ? high - t.window : 0;
      soften(b, row, low < 0 ? 0 : low, high < width ? high : width, width);
    }
    for (int64_t part = 0; part < dim / kPanel; ++part)
      panel_product(b.weights, kBlock, rows, packed.v(head, part, at), width / 2,
                    [&](int64_t row, const float* values) {
                      float* to = b.total + row * dim + part * kPanel;
                      for (int c = 0; c < kPanel; c += kLanes)
                        store(to + c, load(to + c) * b.kept[row] + load(values + c));
                    });
  }
  for (int64_t row = 0; row < rows; ++row) {
    bf16* out = static_cast<bf16*>(t.out) + ((begin + row / group) * t.heads + head * group + row % group) * dim;
    const float inverse = 1.0f / b.weight[row];
    for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(b.total + row * dim + d) * inverse);
  }
}

void run_prefill(void* argument, int member, int size, Barrier& barrier) {
  const PrefillTask& t = *static_cast<PrefillTask*>(argument);
  const PackedKV packed(t);
  const int64_t panels = packed.positions / kPanel;
  const Share own = share(t.kv.heads * panels, member, size);
  for (int64_t i = own.begin; i < own.end; ++i) packed.pack(i / panels, packed.first + i % panels * kPanel);
  barrier.wait(member);
  const int64_t tokens = prefill_rows(t.heads / t.kv.heads) / (t.heads / t.kv.heads);
  const int64_t tiles = (t.query_len + tokens - 1) / tokens, computed = t.total_len - t.query_len;
  int64_t all = 0, done = 0;
  const auto cost = [&](int64_t tile) {
    const int64_t end = computed + (tile + 1) * tokens;
    return end - prefill_first(computed + tile * tokens, t.window);
  };
  for (int64_t tile = 0; tile < tiles; ++tile) all += cost(tile) * t.kv.heads;
  for (int64_t head = 0; head < t.kv.heads; ++head)
    for (int64_t tile = 0; tile < tiles; done += cost(tile++))
      if (done * size / all == member) {
        const int64_t begin = tile * tokens, end = begin + tokens < t.query_len ? begin + tokens : t.query_len;
        attend_tile(packed, head, begin, end, t.memory + member * t.memory_step);
      }
}

}  // namespace
}  // namespace kvferry
