// Attention of a step of a whole decoder: new K and V, rotation, decodes in chunks, prompts in tiles.
#pragma once

#include "decode.h"
#include "elementwise.h"
#include "mixer_gates.h"
#include "prefill.h"
#include "rope.h"
#include "step_task.h"

namespace kvferry {
namespace {

struct StepView {
  const StepTask& task;
  const StepModel& model;
  const Batch& batch;  // decodes alone
  Barrier& barrier;
  int member;

  int64_t rows() const { return task.rows; }
  int64_t q_size() const { return model.heads * model.dim; }
  int64_t query_step() const { return model.gated ? 2 * model.dim : model.dim; }
  int64_t k_begin() const { return model.heads * query_step(); }
  int64_t qkv_size() const { return k_begin() + 2 * model.kv_heads * model.dim; }
};

KVF_INLINE void norm_rows(const StepView& s, const void* weight, bf16* out, Share rows) {
  for (int64_t row = rows.begin; row < rows.end; ++row)
    norm_row<bf16>(s.task.scratch.residual + row * s.model.hidden, nullptr, static_cast<const bf16*>(weight),
                   out + row * s.model.hidden, nullptr, s.model.hidden, s.model.eps);
}

// One head of q or k: normed where the model has such a norm, rotated where the layer is.
KVF_INLINE void prepare_head(const StepView& s, const StepLayer& layer, const bf16* x, const void* norm,
                             int64_t position, bf16* out) {
  bf16 normed[kMaxDim];
  if (norm != nullptr) {
    norm_row<bf16>(x, nullptr, static_cast<const bf16*>(norm), normed, nullptr, s.model.dim, s.model.eps);
    x = normed;
  }
  if (layer.rotated)
    rotate(x, s.model.rope, position, s.model.dim, out);
  else
    copy(out, x, s.model.dim);
}

KVF_INLINE void prepare_queries(const StepView& s, const StepLayer& layer, int64_t row, int64_t kv_head, bf16* out) {
  const int64_t dim = s.model.dim, group = s.model.heads / s.model.kv_heads;
  const bf16* q = s.task.scratch.qkv + row * s.qkv_size() + kv_head * group * s.query_step();
  for (int64_t h = 0; h < group; ++h)
    prepare_head(s, layer, q + h * s.query_step(), layer.q_norm, s.batch.positions[row], out + h * dim);
}

KVF_INLINE void write_new(const StepView& s, const StepLayer& layer, const KVLayer& kv, int64_t row, int64_t head) {
  const bf16* k = s.task.scratch.qkv + row * s.qkv_size() + s.k_begin() + head * s.model.dim;
  alignas(64) bf16 turned[kMaxDim];
  prepare_head(s, layer, k, layer.k_norm, s.batch.positions[row], turned);
  write_slot(kv, s.batch.slots[row], head, turned, k + s.model.kv_heads * s.model.dim);
}

// All rows' new K and V, where rows read those of others.
KVF_INLINE void write_chained(const StepView& s, const StepLayer& layer, const KVLayer& kv) {
  s.barrier.each_run(s.batch.rows * s.model.kv_heads, s.member, [&](Share items) {
    for (int64_t i = items.begin; i < items.end; ++i)
      write_new(s, layer, kv, i / s.model.kv_heads, i % s.model.kv_heads);
  });
  s.barrier.wait(s.member);
}

// Where rows are of sequences of their own, the row's last chunk writes the new K and V: no other chunk reads them.
KVF_INLINE void attend_step(const StepView& s, const StepLayer& layer, const KVLayer& kv) {
  const int64_t dim = s.model.dim, group = s.model.heads / s.model.kv_heads, step = partial_floats(dim);
  visit_pieces(s.batch, s.model.kv_heads, layer.window, s.member, s.barrier, [&](const Piece& piece, const Span* after) {
    const int64_t row = piece.row, head = piece.span.head;
    alignas(64) bf16 turned[kMaxGroup * kMaxDim];
    prepare_queries(s, layer, row, head, turned);
    if (piece.last && !s.task.chained) write_new(s, layer, kv, row, head);
    float* partial = partial_of(s.task.scratch.partial, row, head * group, s.model.heads, dim) + piece.chunk * step;
    attend_any<bf16>(turned, group, kv, piece.span, after, s.model.scoring, partial, kMaxChunks * step);
  });
}

// In the arithmetic of prefill; results take the place of the queries.
KVF_INLINE void attend_step_blocks(const StepView& s, const StepLayer& layer, const KVLayer& kv) {
  const int64_t dim = s.model.dim, group = s.model.heads / s.model.kv_heads;
  const auto visit = [&](int64_t item) {
    const int64_t row = item / s.model.kv_heads, head = item % s.model.kv_heads;
    alignas(64) bf16 turned[kMaxGroup * kMaxDim];
    prepare_queries(s, layer, row, head, turned);
    if (!s.task.chained) write_new(s, layer, kv, row, head);
    const Sequence sequence{kv, s.batch.block_table + row * s.batch.table_step, head, layer.window, s.model.scoring};
    attend_token(sequence, s.batch.positions[row], turned, group,
                 s.task.scratch.memory + s.member * s.task.scratch.memory_step,
                 s.task.scratch.qkv + row * s.qkv_size() + head * group * dim);
  };
  s.barrier.each(s.batch.rows * s.model.kv_heads, s.member, [&] { return visit; });
}

// New K and V of the prompts' tokens, and their queries, which stay where they are.
KVF_INLINE void prepare_prompts(const StepView& s, const StepLayer& layer, const KVLayer& kv) {
  const int64_t first = s.batch.rows, kv_heads = s.model.kv_heads, width = s.q_size() / kv_heads;
  s.barrier.each_run((s.rows() - first) * kv_heads, s.member, [&](Share items) {
    for (int64_t i = items.begin; i < items.end; ++i) {
      const int64_t row = first + i / kv_heads, head = i % kv_heads;
      alignas(64) bf16 turned[kMaxGroup * kMaxDim];
      prepare_queries(s, layer, row, head, turned);
      copy(s.task.scratch.qkv + row * s.qkv_size() + head * width, turned, width);
      write_new(s, layer, kv, row, head);
    }
  });
  s.barrier.wait(s.member);
}

// Calls visit(prompt of this layer, item) for the items of prompts [begin, end), of which each has count(prompt).
template <class Count, class Visit>
KVF_INLINE void each_of_prompts(const StepView& s, const StepLayer& layer, const KVLayer& kv, Share prompts, Count count,
                                Visit visit) {
  const auto of_layer = [&](int64_t index) {
    PrefillTask prompt = s.task.prompts[index];
    prompt.kv = kv, prompt.window = layer.window;
    return prompt;
  };
  int64_t all = 0;
  for (int64_t i = prompts.begin; i < prompts.end; ++i) all += count(of_layer(i));
  s.barrier.each(all, s.member, [&] {
    return [&](int64_t item) {
      for (int64_t i = prompts.begin; i < prompts.end; ++i) {
        const PrefillTask prompt = of_layer(i);
        const int64_t own = count(prompt);
        if (item < own) return visit(prompt, item);
        item -= own;
      }
    };
  });
  s.barrier.wait(s.member);
}

// Results take the place of the queries.
KVF_INLINE void attend_prompts(const StepView& s, const StepLayer& layer, const KVLayer& kv) {
  const StepTask& t = s.task;
  for (Share some{0, 0}; some.begin < t.num_prompts; some.begin = some.end) {
    do ++some.end;
    while (some.end < t.num_prompts && t.prompts[some.end].packed != t.prompts[0].packed);
    each_of_prompts(s, layer, kv, some, panels_of, pack_item);
    each_of_prompts(s, layer, kv, some, tiles_of,
                    [&](const PrefillTask& prompt, int64_t item) { attend_item(prompt, item, s.member); });
  }
}

// What attention puts out of these rows: of decodes merged, of all others where their queries were.
KVF_INLINE void gather(const StepView& s, const StepLayer& layer, bf16* out, Share rows) {
  const int64_t merged = s.model.batch_invariant ? 0 : s.batch.rows;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    bf16* to = out + row * s.q_size();
    if (row >= merged) {
      copy(to, s.task.scratch.qkv + row * s.qkv_size(), s.q_size());
      continue;
    }
    const int64_t count = chunks_of(s.batch.total_len[row], layer.window).count, dim = s.model.dim;
    for (int64_t head = 0; head < s.model.heads; ++head) {
      merge(partial_of(s.task.scratch.partial, row, head, s.model.heads, dim), count, dim, s.model.scoring.sink(head),
            to + head * dim);
      const bf16* gate = s.task.scratch.qkv + row * s.qkv_size() + head * s.query_step() + dim;
      if (s.model.gated) sigmoid_mul_row(to + head * dim, gate, dim, to + head * dim);
    }
  }
}

}  // namespace
}  // namespace kvferry
