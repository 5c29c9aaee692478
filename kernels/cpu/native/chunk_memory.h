// The memory of chunks of prompts of recurrent layers.
#pragma once

#include <cstdint>

#include "recurrence.h"

namespace kvferry {

// Tokens of a chunk: products among its tokens cost as much a token as it is long, those with the state nothing more.
constexpr int64_t kChunkTokens = 32;
constexpr int64_t kFewTokens = 4;    // sequences with fewer go token by token
constexpr int64_t kDepthUnit = 32;   // keys' dims are padded to whole vectors of any width, and to whole tiles of pairs
constexpr int64_t kWidthUnit = 32;   // values' dims, to two of them
constexpr int64_t kRowApart = 16;    // floats between rows of a state, so that a column's do not share sets of a cache
constexpr float kForgotten = -128;   // the logarithm of a decay: all below is 0 in float32
constexpr int64_t kMaxTogether = 4;  // heads of an item that share keys

// Matrices of one thread: keys, queries [depth, kChunkTokens]; products of tokens [kChunkTokens, kChunkTokens], the first two
// of the vectors alone, the others as a head weighs them; changes, outputs [kChunkTokens, width], `step` apart.
struct ChunkMemory {
  int64_t depth, width, step;
  float *keys, *queries, *keys_keys, *queries_keys, *mixed, *solved, *changes, *outputs, *rows;
  float *gained, *left, *beta;  // [kChunkTokens]: decays since the chunk began, and to its end
  float* states;                // [heads, depth, width], state_floats() each

  int64_t state_floats() const { return depth * step; }

  ChunkMemory(float* memory, int64_t k_dim, int64_t v_dim)
      : depth(padded_to(k_dim, kDepthUnit)), width(padded_to(v_dim, kWidthUnit)), step(width + kRowApart) {
    const auto take = [&](int64_t floats) {  // always a multiple of 16
      float* found = memory;
      memory += floats;
      return found;
    };
    keys = take(depth * kChunkTokens), queries = take(depth * kChunkTokens);
    for (float** each : {&keys_keys, &queries_keys, &mixed, &solved}) *each = take(kChunkTokens * kChunkTokens);
    changes = take(kChunkTokens * step), outputs = take(kChunkTokens * step), rows = take(16 * depth);
    gained = take(kChunkTokens), left = take(kChunkTokens), beta = take(kChunkTokens);
    states = memory;
  }

  // Floats of a thread with so many heads' states.
  static int64_t floats(int64_t k_dim, int64_t v_dim, int64_t heads) {
    const int64_t depth = padded_to(k_dim, kDepthUnit), step = padded_to(v_dim, kWidthUnit) + kRowApart;
    return kChunkTokens * (2 * depth + 4 * kChunkTokens + 2 * step + 3) + 16 * depth + heads * depth * step;
  }
};

// The same of a thread whose chunks go through tiles, beside a ChunkMemory. vectors: keys, then queries of the chunk's tokens
// as they came [2 * kChunkTokens, depth]; pairs: of each, their pairs of dims by token [depth / 2, kChunkTokens]; columns: the
// keys by dim [depth, kChunkTokens]; factors [2, kChunkTokens]: what multiplies keys and queries. halves: of 32 columns of a state
// the upper, then the lower halves of numbers, as pairs of rows [depth / 2, 32].
struct TileMemory {
  uint16_t *vectors, *columns;
  uint32_t *pairs, *halves;
  float* factors;

  TileMemory(float* memory, int64_t k_dim) {
    const int64_t depth = padded_to(k_dim, kDepthUnit);
    const auto take = [&](int64_t floats) {  // always a multiple of 16
      float* found = memory;
      memory += floats;
      return static_cast<void*>(found);
    };
    vectors = static_cast<uint16_t*>(take(kChunkTokens * depth));
    columns = static_cast<uint16_t*>(take(kChunkTokens * depth / 2));
    pairs = static_cast<uint32_t*>(take(kChunkTokens * depth));
    factors = static_cast<float*>(take(2 * kChunkTokens));
    halves = static_cast<uint32_t*>(take(kWidthUnit * depth));
  }

  static int64_t floats(int64_t k_dim) {
    const int64_t depth = padded_to(k_dim, kDepthUnit);
    return kChunkTokens * (2 * depth + depth / 2 + 2) + kWidthUnit * depth;
  }
};

// Floats of a thread for chunks by any instruction set.
inline int64_t chunk_floats(int64_t k_dim, int64_t v_dim, int64_t heads) {
  return TileMemory::floats(k_dim) + ChunkMemory::floats(k_dim, v_dim, heads);
}

// How many neighbouring heads of those that share keys are one item of work, where `items` of one head each are shared by
// `threads`: the products of their tokens are made once.
inline int64_t heads_together(int64_t sharing, int64_t items, int64_t threads) {
  int64_t together = 1;
  for (int64_t count = 2; count <= kMaxTogether; ++count)
    if (sharing % count == 0 && items / count >= 4 * threads) together = count;
  return together;
}

// Whether some sequence of the chain is long enough for chunks.
inline bool goes_in_chunks(const Sequences& seqs, int64_t chain) {
  for (int64_t seq = seqs.chains[chain]; seq < seqs.chains[chain + 1]; ++seq)
    if (seqs.starts[seq + 1] - seqs.starts[seq] >= kFewTokens) return true;
  return false;
}

}  // namespace kvferry
