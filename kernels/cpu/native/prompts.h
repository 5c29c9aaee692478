// What attention of prompts takes, and the memory that it needs.
#pragma once

#include "types.h"

namespace kvferry {

// out [query_len, heads, dim] = causal attention of one sequence's query tokens, the last of its total_len positions.
// packed: prefill_bytes(); memory: prefill_memory() of each thread, memory_step bytes apart.
struct PrefillTask {
  const void* q;
  void* out;
  uint8_t *packed, *memory;
  int64_t memory_step, heads, query_len, total_len, window;
  Scoring scoring;
  const int32_t* table;
  KVLayer kv;
};

constexpr int64_t kPrefillBlock = 128;  // positions
constexpr int64_t kPrefillRows = 96;

// Query rows of one tile: whole tokens under one K/V head.
inline int64_t prefill_rows(int64_t group) { return group > kPrefillRows ? group : kPrefillRows / group * group; }

// The first position of the first block that a token at `position`, and those after it, attend to.
inline int64_t block_first(int64_t position, int64_t window) {
  const int64_t first = window > 0 && position >= window ? position - window + 1 : 0;
  return first / kPrefillBlock * kPrefillBlock;
}

// Bytes of packed K and V of some positions (whole panels) under one head, with the scales of int8.
inline int64_t packed_bytes(int64_t positions, HeadDims dims) { return positions * ((dims.k + dims.v) * 2 + 8); }

inline int64_t prefill_bytes(const PrefillTask& t) {
  const int64_t seen = t.total_len - block_first(t.total_len - t.query_len, t.window);
  return t.kv.heads * packed_bytes(seen + kPanel, t.kv.dims());
}

inline int64_t rows_memory(int64_t rows, HeadDims dims) {
  return (rows * (6 * kPrefillBlock + 2 * dims.k + 4 * dims.v + 12) + 127) / 64 * 64;
}

inline int64_t prefill_memory(int64_t group, HeadDims dims) { return rows_memory(prefill_rows(group), dims); }

inline int64_t token_memory(int64_t group, HeadDims dims) {
  return packed_bytes(kPrefillBlock, dims) + rows_memory(group, dims);
}

}  // namespace kvferry
