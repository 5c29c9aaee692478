// One decode step of a whole decoder: all layers of a batch of single tokens, in one run of the team. Five barriers a
// layer; what is cheap (norms, the merge of attention) every thread does for itself instead of waiting for another.
#pragma once

#include "decode.h"
#include "dense.h"
#include "draw.h"
#include "elementwise.h"
#include "lookup.h"
#include "rope.h"

namespace kvferry {
namespace {

struct StepView {
  const StepTask& task;
  const StepModel& model;
  const Batch& batch;
  bf16* local;
  uint8_t* codes;
  Barrier& barrier;
  int member;

  int64_t q_size() const { return model.heads * model.dim; }
  int64_t qkv_size() const { return (model.heads + 2 * model.kv_heads) * model.dim; }
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
  const bf16* q = s.task.scratch.qkv + row * s.qkv_size() + kv_head * group * dim;
  for (int64_t h = 0; h < group; ++h)
    prepare_head(s, layer, q + h * dim, layer.q_norm, s.batch.positions[row], out + h * dim);
}

KVF_INLINE void write_new(const StepView& s, const StepLayer& layer, const KVLayer& kv, int64_t row, int64_t head) {
  const bf16* k = s.task.scratch.qkv + row * s.qkv_size() + s.q_size() + head * s.model.dim;
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

KVF_INLINE void gather_heads(const StepView& s) {
  for (int64_t row = 0; row < s.batch.rows; ++row)
    copy(s.local + row * s.q_size(), s.task.scratch.qkv + row * s.qkv_size(), s.q_size());
}

KVF_INLINE void merge_heads(const StepView& s, const StepLayer& layer) {
  for (int64_t row = 0; row < s.batch.rows; ++row) {
    const int64_t count = chunks_of(s.batch.total_len[row], layer.window).count;
    for (int64_t head = 0; head < s.model.heads; ++head)
      merge(partial_of(s.task.scratch.partial, row, head, s.model.heads, s.model.dim), count, s.model.dim,
            s.model.scoring.sink(head), s.local + row * s.q_size() + head * s.model.dim);
  }
}

// Every thread quantises all rows for itself: cheaper than a barrier.
KVF_INLINE Inputs step_inputs(const StepView& s, const Dense& dense, const bf16* x) {
  return inputs_of(dense, x, dense.in, s.batch.rows, s.codes, {0, s.batch.rows});
}

// residual += the dense layer of x(), both rounded as if stored.
template <class Make>
KVF_INLINE void dense_onto_residual(const StepView& s, const Dense& dense, Make x) {
  s.barrier.each(dense.count(), s.member, [&] {
    return [&, inputs = step_inputs(s, dense, x())](int64_t p) {
      multiply(inputs, 0, s.batch.rows, dense, p, [&](int64_t row, const float* values) {
        bf16* to = s.task.scratch.residual + row * s.model.hidden + p * kPanel;
        for (int c = 0; c < kPanel; c += kLanes) {
          const Floats value = rounded_to(biased(dense, p * kPanel + c, load(values + c)), to);
          store(to + c, load(to + c) + value);
        }
      });
    };
  });
}

// act = silu(gate) * up: the thread that makes columns of the gate makes the same ones of up.
KVF_INLINE void gate_panel(const StepView& s, const Dense& dense, const Inputs& inputs, int64_t p) {
  const int64_t inner = s.model.inner, half = inner / kPanel;
  bf16* act = s.task.scratch.act + p * kPanel;
  multiply(inputs, 0, s.batch.rows, dense, p, [&](int64_t row, const float* values) {
    for (int c = 0; c < kPanel; c += kLanes)
      store(act + row * inner + c, biased(dense, p * kPanel + c, load(values + c)));
  });
  multiply(inputs, 0, s.batch.rows, dense, half + p, [&](int64_t row, const float* values) {
    for (int c = 0; c < kPanel; c += kLanes) {
      bf16* to = act + row * inner + c;
      const Floats up = rounded_to(biased(dense, inner + p * kPanel + c, load(values + c)), to);
      store(to, silu(load(to)) * up);
    }
  });
}

KVF_INLINE const bf16* normed(const StepView& s, const void* weight) {
  norm_rows(s, weight, s.local, {0, s.batch.rows});
  return s.local;
}

KVF_INLINE void run_layer(const StepView& s, const StepLayer& layer, const KVLayer& kv) {
  const StepTask& t = s.task;
  dense_together(layer.qkv, [&] { return step_inputs(s, layer.qkv, normed(s, layer.input_norm)); }, s.batch.rows,
                 t.scratch.qkv, s.qkv_size(), s.member, s.barrier);
  s.barrier.wait(s.member);
  if (t.chained) write_chained(s, layer, kv);
  s.model.batch_invariant ? attend_step_blocks(s, layer, kv) : attend_step(s, layer, kv);
  s.barrier.wait(s.member);
  dense_onto_residual(s, layer.o, [&] {
    s.model.batch_invariant ? gather_heads(s) : merge_heads(s, layer);
    return s.local;
  });
  s.barrier.wait(s.member);
  s.barrier.each(s.model.inner / kPanel, s.member, [&] {
    return [&, inputs = step_inputs(s, layer.gate_up, normed(s, layer.post_norm))](int64_t p) {
      gate_panel(s, layer.gate_up, inputs, p);
    };
  });
  s.barrier.wait(s.member);
  dense_onto_residual(s, layer.down, [&] { return t.scratch.act; });
  s.barrier.wait(s.member);
}

void run_step(void* argument, int member, int, Barrier& barrier) {
  const StepTask& t = *static_cast<StepTask*>(argument);
  const StepModel& m = *t.model;
  StepView s{t, m, t.batch, t.scratch.local + member * t.scratch.local_step,
             t.scratch.codes + member * t.scratch.codes_step, barrier, member};
  barrier.each_run(t.batch.rows, member, [&](Share rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
      read_row(m.embedding, t.tokens[row], t.scratch.residual + row * m.hidden);
  });
  barrier.wait(member);
  for (int64_t index = 0; index < m.num_layers; ++index) {
    KVLayer kv = t.kv;
    kv.data = static_cast<uint8_t*>(t.kv.data) + index * t.layer_step;
    run_layer(s, m.layers[index], kv);
  }
  if (t.logits == nullptr) {
    barrier.each_run(t.batch.rows, member, [&](Share rows) { norm_rows(s, m.norm, static_cast<bf16*>(t.out), rows); });
  } else {
    dense_together(m.head, [&] { return step_inputs(s, m.head, normed(s, m.norm)); }, t.batch.rows, t.logits, m.head.out,
                   member, barrier);
    barrier.wait(member);
    barrier.each_run(t.batch.rows, member, [&](Share rows) {
      const DrawRow all_allowed{};
      for (int64_t row = rows.begin; row < rows.end; ++row)
        t.best[row] = first_largest({t.logits + row * m.head.out, m.head.out, all_allowed, kLeast});
    });
  }
}

}  // namespace
}  // namespace kvferry
