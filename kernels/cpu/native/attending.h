// Attention as Python calls it, checked.
#pragma once

#include "kernels.h"
#include "prompts.h"

namespace kvferry {

inline void NativeKernels::decode(Array q, Array kv, Array block_table, Array total_len, int64_t rows, float scale,
                                  int64_t window, float cap, MaybeArray sinks, bool blocks, Array out) {
  const int kind = kind_of(q);
  DecodeTask task{};
  task.kv = kv_layer(kv, kind);
  task.q = whole(q, kind, 3);
  task.out = whole(out, kind, 3);
  task.heads = static_cast<int64_t>(q.shape(1));
  task.scoring = scoring_of(scale, cap, sinks, task.heads);
  task.window = window;
  require(task.heads % task.kv.heads == 0 && static_cast<int64_t>(q.shape(2)) == task.kv.dim, "q does not fit the cache");
  require(rows <= static_cast<int64_t>(q.shape(0)) && rows <= static_cast<int64_t>(total_len.shape(0)) &&
              rows <= static_cast<int64_t>(block_table.shape(0)), "more rows than the batch has");
  task.batch = {rows, nullptr, nullptr, typed<int32_t>(block_table, 2), static_cast<int64_t>(block_table.shape(1)),
                typed<int32_t>(total_len, 1)};
  if (blocks) {
    require(kind == 1 && task.kv.dim % kPanel == 0 && task.kv.dim <= kMaxDim, "q does not fit the cache");
    task.memory_step = token_memory(task.heads / task.kv.heads, task.kv.dims());
    task.memory = aligned_bytes(threads() * task.memory_step);
  } else {
    partial_.resize(decode_floats(rows, task.heads, task.kv.dim));
    task.partial = partial_.data();
  }
  run(blocks ? table_->decode_blocks : table_->decode[kind], &task, kSmall, 0);
}

inline void NativeKernels::prefill(Array q, Array kv, Array blocks, int64_t total_len, float scale, int64_t window,
                                   float cap, MaybeArray sinks, Array out) {
  PrefillTask task{};
  task.kv = kv_layer(kv, 1);
  task.q = whole(q, 1, 3);
  task.out = whole(out, 1, 3);
  task.query_len = static_cast<int64_t>(q.shape(0));
  task.heads = static_cast<int64_t>(q.shape(1));
  task.total_len = total_len;
  task.window = window;
  task.scoring = scoring_of(scale, cap, sinks, task.heads);
  task.table = typed<int32_t>(blocks, 1);
  require(task.heads % task.kv.heads == 0 && static_cast<int64_t>(q.shape(2)) == task.kv.dim &&
              task.kv.dim % kPanel == 0 && task.kv.dim <= kMaxDim, "q does not fit the cache");
  require(elements(out) == elements(q) && task.query_len <= total_len &&
              total_len <= elements(blocks) * task.kv.block_size, "a sequence is longer than its blocks");
  task.memory_step = prefill_memory(task.heads / task.kv.heads, task.kv.dims());
  const int64_t packed = (prefill_bytes(task) + 63) / 64 * 64;
  task.packed = aligned_bytes(packed + threads() * task.memory_step);
  task.memory = task.packed + packed;
  run(table_->prefill, &task, elements(q), kSmall);
}

}  // namespace kvferry
