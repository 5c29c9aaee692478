// What attention of prompts takes, and the memory that it needs.
#pragma once

#include "chunks.h"
#include "types.h"

namespace kvferry {

// out [query_len, heads, dims.v] = causal attention of one sequence's query tokens, the last of its total_len positions;
// tokens lie `*_step` elements apart. q and out may be the same memory. packed: prefill_bytes(); memory: prefill_memory() of
// each thread, memory_step bytes apart. see_until: the last position that each token sees, its own or a later one; null: its own.
struct PrefillTask {
  const void* q;
  void* out;
  uint8_t *packed, *memory;
  int64_t q_step, out_step, memory_step, heads, query_len, total_len, window;
  HeadDims dims;
  Scoring scoring;
  const int32_t *table, *see_until;
  KVLayer kv;
};

constexpr int64_t kPrefillBlock = 256;  // positions
constexpr int64_t kPrefillRows = 96;
constexpr int64_t kScoredRows = 48;  // rows whose scores and weights are held at once, whole vectors of them

// Rows' sums and highest scores are read and written in whole vectors.
inline int64_t padded_rows(int64_t rows) { return (rows + 15) / 16 * 16; }

// Query rows of one tile: whole tokens under one K/V head.
inline int64_t prefill_rows(int64_t group) { return group > kPrefillRows ? group : kPrefillRows / group * group; }

// The first position of the first block that a token at `position`, and those after it, attend to.
inline int64_t block_first(int64_t position, int64_t window) {
  return first_seen(position, window) / kPrefillBlock * kPrefillBlock;
}

// Bytes of packed K and V of some positions (whole panels) under one head, with the scales of int8.
inline int64_t packed_bytes(int64_t positions, HeadDims dims) { return positions * ((dims.k + dims.v) * 2 + 8); }

inline int64_t prefill_bytes(const PrefillTask& t) {
  const int64_t seen = t.total_len - block_first(t.total_len - t.query_len, t.window);
  return t.kv.heads * packed_bytes(seen + kPanel, t.dims);
}

// Bytes of scores and weights of kScoredRows rows with a block.
constexpr int64_t scored_bytes() { return 6 * kScoredRows * kPrefillBlock; }

// Rows of queries, of which tiles take whole ones.
inline int64_t queries(int64_t rows) { return rows + 6; }

// Numbers of a block's K and V in float32, dims of V in whole tiles.
inline int64_t block_floats(HeadDims dims) { return kPrefillBlock * (dims.k + (dims.v + 63) / 64 * 64); }

inline int64_t rows_memory(int64_t rows, HeadDims dims) {
  const int64_t floats = queries(rows) * dims.k + rows * dims.v + 3 * padded_rows(rows) + block_floats(dims);
  return (scored_bytes() + 4 * floats + 127) / 64 * 64;
}

inline int64_t prefill_memory(int64_t group, HeadDims dims) { return rows_memory(prefill_rows(group), dims); }

inline int64_t token_memory(int64_t group, HeadDims dims) {
  return packed_bytes(kPrefillBlock, dims) + rows_memory(group, dims);
}

// out [query_len, heads, dims.v] = causal attention of one sequence's query tokens to K and V that `expand` makes of what
// is cached under one head: first `rotated` dims, which K of all heads begin with, then a latent, of which it makes the
// rest of each head's K, then its V. `together` heads are expanded at a time, `span` positions of each (whole blocks). latents:
// those positions as cached; packed: packed_bytes() of each head; carried: carried_floats() of each head and tile of
// tokens; memory: expanded_memory() of each thread, memory_step bytes apart.
struct ExpandedTask {
  const void* q;
  void* out;
  Dense expand;
  int64_t rotated, heads, together, span, query_len, total_len;
  HeadDims dims;
  Scoring scoring;
  const int32_t* table;
  KVLayer kv;
  uint8_t *latents, *packed, *memory;
  float* carried;
  int64_t memory_step;
};

inline int64_t expanded_tiles(const ExpandedTask& t) { return (t.query_len + kPrefillRows - 1) / kPrefillRows; }

// Of a tile of tokens under one head, as BlockBuffers has them: total, highest and weight.
inline int64_t carried_floats(HeadDims dims) { return kPrefillRows * (dims.v + 2); }

// Bytes of one head's packed K and V, and of what its rows carry where there is more than one span.
inline int64_t expanded_bytes(const ExpandedTask& t) {
  const int64_t carried = t.total_len > t.span ? expanded_tiles(t) * carried_floats(t.dims) * 4 : 0;
  return packed_bytes(t.span, t.dims) + carried;
}

// A block's K and V as rows, or rows of queries.
inline int64_t expanded_memory(HeadDims dims) {
  const int64_t expanded = kPrefillBlock * (dims.k + dims.v) * 2, rows = rows_memory(kPrefillRows, dims);
  return expanded > rows ? expanded : rows;
}

}  // namespace kvferry
