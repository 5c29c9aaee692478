// Attention as Python calls it, checked.
#pragma once

#include "chunks.h"
#include "kernels.h"
#include "prompts.h"

namespace kvferry {

inline void NativeKernels::decode(Array q, Array kv, Array block_table, Array total_len, int64_t rows, float scale,
                                  int64_t window, float cap, MaybeArray sinks, bool blocks, Array out) {
  const int kind = kind_of(q);
  DecodeTask task{};
  task.kv = kv_layer_of(kv, kind, out);
  task.q = whole(q, kind, 3);
  task.out = whole(out, kind, 3);
  task.heads = q.shape(1);
  task.scoring = scoring_of(scale, cap, sinks, task.heads);
  task.window = window;
  require(task.heads % task.kv.heads == 0 && q.shape(2) == task.kv.dim, "q does not fit the cache");
  require(elements(out) == elements(q) / task.kv.dim * task.kv.v_dim && task.kv.v_dim % 16 == 0,
          "the result does not fit the cache");
  require(rows <= q.shape(0) && rows <= total_len.shape(0) &&
              rows <= block_table.shape(0), "more rows than the batch has");
  task.batch = {rows, nullptr, nullptr, typed<int32_t>(block_table, 2), block_table.shape(1),
                typed<int32_t>(total_len, 1)};
  const int64_t group = task.heads / task.kv.heads, floats = decode_floats(1, task.heads, task.kv.v_dim);
  const bool panels = kind == 1 && task.kv.dim % kPanel == 0 && task.kv.v_dim % kPanel == 0 && task.kv.dim <= kMaxDim;
  const bool wide = panels && group > kMaxGroup && !blocks;
  require(panels || !blocks, "q does not fit the cache");
  task.together = wide ? std::min(std::max<int64_t>(kPartialFloats / floats, 1), rows) : rows;
  if (blocks || wide) {
    task.memory_step = token_memory(group, task.kv.dims());
    task.memory = aligned_bytes(threads() * task.memory_step);
  }
  if (!blocks) {
    partial_.resize(task.together * floats);
    task.partial = partial_.data();
  }
  run(blocks ? table_->decode_blocks : wide ? table_->decode_wide : table_->decode[kind], &task, kSmall, 0);
}

inline void NativeKernels::prefill(Array q, Array kv, Array blocks, int64_t total_len, float scale, int64_t window,
                                   float cap, MaybeArray sinks, MaybeArray see_until, Array out) {
  PrefillTask task{};
  task.kv = kv_layer_of(kv, 1, out);
  task.q = whole(q, 1, 3);
  task.out = whole(out, 1, 3);
  task.query_len = q.shape(0);
  task.heads = q.shape(1);
  task.q_step = q.stride(0), task.out_step = out.stride(0);
  task.total_len = total_len;
  task.window = window;
  task.scoring = scoring_of(scale, cap, sinks, task.heads);
  task.table = typed<int32_t>(blocks, 1);
  task.dims = task.kv.dims();
  require(task.heads % task.kv.heads == 0 && q.shape(2) == task.kv.dim &&
              task.kv.dim % kPanel == 0 && task.kv.dim <= kMaxDim, "q does not fit the cache");
  require(task.dims.v % kPanel == 0 &&
              elements(out) == task.query_len * task.heads * task.dims.v, "the result does not fit the cache");
  require(task.query_len <= total_len && total_len <= elements(blocks) * task.kv.block_size,
          "a sequence is longer than its blocks");
  if (see_until) {
    task.see_until = typed<int32_t>(*see_until, 1);
    require(elements(*see_until) == task.query_len, "what tokens see is one position each");
    for (int64_t i = 0; i < task.query_len; ++i)
      require(task.see_until[i] >= total_len - task.query_len + i && task.see_until[i] < total_len,
              "a token sees up to its own position or a later one of its sequence");
  }
  task.memory_step = prefill_memory(task.heads / task.kv.heads, task.dims);
  const int64_t packed = (prefill_bytes(task) + 63) / 64 * 64;
  task.packed = aligned_bytes(packed + threads() * task.memory_step);
  task.memory = task.packed + packed;
  run(table_->prefill, &task, elements(q), kSmall);
}

inline void NativeKernels::expanded(const Packed& expand, Array q, Array kv, Array blocks, int64_t total_len,
                                    float scale, int64_t span, int64_t bytes, Array out) {
  ExpandedTask task{};
  task.expand = expand.dense;
  task.kv = kv_layer(kv, 1);
  task.q = whole(q, 1, 3);
  task.out = whole(out, 1, 3);
  task.query_len = q.shape(0);
  task.heads = q.shape(1);
  task.total_len = total_len;
  task.rotated = task.kv.dim - task.expand.in;
  task.dims = {q.shape(2), out.shape(2)};
  task.scoring.scale = scale;
  task.table = typed<int32_t>(blocks, 1);
  const int64_t plain = task.dims.k - task.rotated;
  require(!task.expand.quantised && task.expand.bias == nullptr &&
              task.expand.out == task.heads * (plain + task.dims.v), "the layer does not make K and V of the heads");
  require(task.kv.heads == 1 && task.kv.dim % kPanel == 0 && task.rotated >= 0 && task.dims.k % kPanel == 0 &&
              plain % kPanel == 0 && plain >= 0 && task.dims.v % kPanel == 0, "q does not fit the cache");
  require(elements(out) == task.query_len * task.heads * task.dims.v && task.query_len <= total_len &&
              total_len <= elements(blocks) * task.kv.block_size, "a sequence is longer than its blocks");
  const auto blocks_of = [](int64_t positions) { return (positions + kPrefillBlock - 1) / kPrefillBlock; };
  task.span = std::max<int64_t>(std::min(blocks_of(span), blocks_of(total_len)), 1) * kPrefillBlock;
  task.together = std::min(std::max<int64_t>(bytes / expanded_bytes(task), 1), task.heads);
  task.memory_step = expanded_memory(task.dims);
  const int64_t latents = task.span * task.kv.dim * 2;
  const int64_t packed = (task.together * packed_bytes(task.span, task.dims) + 63) / 64 * 64;
  const int64_t carried = (task.together * expanded_bytes(task) + 127) / 64 * 64 - packed;
  task.latents = aligned_bytes(latents + packed + carried + threads() * task.memory_step);
  task.packed = task.latents + latents;
  task.carried = reinterpret_cast<float*>(task.packed + packed);
  task.memory = task.packed + packed + carried;
  run(table_->expanded, &task, total_len * task.expand.out, kSmall);
}

}  // namespace kvferry
