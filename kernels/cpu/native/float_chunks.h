// Chunks of prompts of recurrent layers in products of float32, by any instruction set.
#pragma once

#include "chunked.h"

namespace kvferry {
namespace {

// kTileHeight rows of the state once the chunk's `rows` changes are in, of which each is decayed to the chunk's end.
KVF_INLINE void update_state(const ChunkMemory& m, float* state, int64_t row, int64_t rows, int64_t column) {
  Floats total[kTileHeight][kTileVecs];
  float* at = state + row * m.step + column;
  const float kept = m.gained[kChunkTokens - 1];
  for (int r = 0; r < kTileHeight; ++r)
    for (int j = 0; j < kTileVecs; ++j) total[r][j] = load(at + r * m.step + j * kLanes) * kept;
  add_product<kTileVecs>(total, m.keys + row * kChunkTokens, kChunkTokens, 1, m.changes + column, m.step, rows);
  for (int r = 0; r < kTileHeight; ++r)
    for (int j = 0; j < kTileVecs; ++j) store(at + r * m.step + j * kLanes, total[r][j]);
}

// Chunks of a sequence of heads that share keys.
struct FloatChunks {
  ChunkMemory m;

  FloatChunks(float* memory, int64_t k_dim, int64_t v_dim) : m(memory, k_dim, v_dim) {}

  // Before a sequence, whose states lie in m.states.
  void begin() {}

  // Keys, or queries, of `count` tokens. unit: with length `scale`.
  template <class T>
  void load_keys(const T* from, int64_t step, int64_t count, int64_t dim, bool unit) {
    load_columns(from, step, count, dim, unit, 1.0f, m.rows, m.keys);
  }
  template <class T>
  void load_queries(const T* from, int64_t step, int64_t count, int64_t dim, bool unit, float scale) {
    load_columns(from, step, count, dim, unit, scale, m.rows, m.queries);
  }

  void multiply_tokens(int64_t count, bool solve) {
    const int64_t rows = padded_to(count, kTileHeight);
    if (solve) products_of_tokens(m.keys, m.keys, m.depth, rows, m.keys_keys);
    products_of_tokens(m.keys, m.queries, m.depth, rows, m.queries_keys);
  }

  // A head's chunk: its values lie in m.changes, padded with zeros, and what it gives in m.outputs.
  __attribute__((noinline)) void run(const ChunkHead& head, int64_t number) {
    const int64_t rows = padded_to(head.count, kTileHeight);
    float* state = m.states + number * m.state_floats();
    const auto of_state = [&](const float* vectors) {
      return [this, state, vectors](auto& total, int64_t t, int64_t column) {
        add_product<kTileVecs>(total, vectors + t, 1, kChunkTokens, state + column, m.step, m.depth);
      };
    };
    weigh_tokens(head, rows, m);
    for (int64_t column = 0; column < m.width; column += kTileWidth) {
      run_columns(head, m, column, of_state(m.keys), of_state(m.queries));
      for (int64_t s = 0; s < rows; ++s)
        for (int j = 0; j < kTileVecs; ++j) {
          float* at = m.changes + s * m.step + column + j * kLanes;
          store(at, load(at) * m.left[s]);
        }
      for (int64_t row = 0; row < m.depth; row += kTileHeight) update_state(m, state, row, rows, column);
    }
  }
};

}  // namespace
}  // namespace kvferry
