// Causal attention of a run of query tokens in bfloat16 (see blocks.h): K and V of the sequence are packed once per layer,
// then tiles of query rows (all heads that share a K/V head) pass over them.
#pragma once

#include <algorithm>

#include "blocks.h"

namespace kvferry {
namespace {

struct PackedKV {
  const PrefillTask& task;
  int64_t first, positions;  // first: a multiple of kBlock; positions: of whole panels from there

  explicit PackedKV(const PrefillTask& t)
      : task(t), first(block_first(t.total_len - t.query_len, t.window)),
        positions((t.total_len - first + kPanel - 1) / kPanel * kPanel) {}

  PackedPositions of(int64_t head, int64_t position) const {
    const HeadDims dims = task.dims;
    return packed_at(task.packed + head * packed_bytes(positions, dims), positions, dims, task.kv.int8)
        .from(position - first, dims);
  }

  void pack(int64_t head, int64_t position) const {
    const int64_t end = position + kPanel < task.total_len ? position + kPanel : task.total_len;
    pack_panel(task.kv, task.dims, head, task.table, position, end, of(head, position));
  }
};

// Tokens [begin, end) of the query, under one K/V head.
inline __attribute__((noinline)) void attend_tile(const PackedKV& packed, int64_t head, int64_t begin, int64_t end,
                                                  uint8_t* memory) {
  const PrefillTask& t = packed.task;
  const int64_t dim = t.dims.k, group = t.heads / t.kv.heads, rows = (end - begin) * group;
  const int64_t computed = t.total_len - t.query_len;
  const int32_t* until = t.see_until == nullptr ? nullptr : t.see_until + begin;
  const int64_t seen = until == nullptr ? computed + end : *std::max_element(until, until + (end - begin)) + 1;
  const BlockBuffers b(memory, prefill_rows(group), t.dims);
  for (int64_t row = 0; row < rows; ++row)
    b.ask(row, static_cast<const bf16*>(t.q) + (begin + row / group) * t.q_step + (head * group + row % group) * dim);
  begin_rows(b, rows, t.scoring, head * group, group);
  for (int64_t at = block_first(computed + begin, t.window); at < seen; at += kBlock) {
    const int64_t count = seen - at < kBlock ? seen - at : kBlock, width = (count + kPanel - 1) / kPanel * kPanel;
    attend_block(b, rows, packed.of(head, at), width, {group, at, computed + begin, t.window, until}, t.scoring);
  }
  for (int64_t row = 0; row < rows; ++row)
    end_row(b, row,
            static_cast<bf16*>(t.out) + (begin + row / group) * t.out_step + (head * group + row % group) * t.dims.v);
}

// What members share of a prompt, first to pack, then to attend.
KVF_INLINE int64_t panels_of(const PrefillTask& t) { return t.kv.heads * (PackedKV(t).positions / kPanel); }

KVF_INLINE void pack_item(const PrefillTask& t, int64_t item) {
  const PackedKV packed(t);
  const int64_t panels = packed.positions / kPanel;
  packed.pack(item / panels, packed.first + item % panels * kPanel);
}

KVF_INLINE int64_t tile_tokens(const PrefillTask& t) {
  const int64_t group = t.heads / t.kv.heads;
  return prefill_rows(group) / group;
}

KVF_INLINE int64_t tiles_of(const PrefillTask& t) {
  return t.kv.heads * ((t.query_len + tile_tokens(t) - 1) / tile_tokens(t));
}

KVF_INLINE void attend_item(const PrefillTask& t, int64_t item, int member) {
  const int64_t tokens = tile_tokens(t), late = (tiles_of(t) - 1 - item) / t.kv.heads;  // they see more: they come first
  const int64_t begin = late * tokens, end = begin + tokens < t.query_len ? begin + tokens : t.query_len;
  attend_tile(PackedKV(t), item % t.kv.heads, begin, end, t.memory + member * t.memory_step);
}

void run_prefill(void* argument, int member, int, Barrier& barrier) {
  const PrefillTask& t = *static_cast<PrefillTask*>(argument);
  barrier.each(panels_of(t), member, [&] { return [&](int64_t item) { pack_item(t, item); }; });
  barrier.wait(member);
  barrier.each(tiles_of(t), member, [&] { return [&](int64_t item) { attend_item(t, item, member); }; });
}

}  // namespace
}  // namespace kvferry
