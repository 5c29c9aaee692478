// Recurrent layers as Python calls them, checked.
#pragma once

#include "chunk_memory.h"
#include "kernels.h"
#include "recurrence.h"

namespace kvferry {

// The rows of a batch's states by sequence, and which sequences follow each other.
class SequenceRows {
 public:
  SequenceRows(const std::vector<int64_t>& lens, const Array& before, const Array& after, const Array& states) {
    before_ = typed<int64_t>(before, 1), after_ = typed<int64_t>(after, 1);
    const auto count = static_cast<int64_t>(lens.size()), rows = states.shape(0);
    require(elements(before) == count && elements(after) == count, "rows of states are one per sequence");
    starts_.push_back(0);
    for (int64_t seq = 0; seq < count; ++seq) {
      require(lens[seq] >= 0 && before_[seq] >= -1 && before_[seq] < rows && after_[seq] >= -1 && after_[seq] < rows,
              "a row lies outside the states");
      starts_.push_back(starts_.back() + lens[seq]);
      if (seq == 0 || before_[seq] < 0 || before_[seq] != after_[seq - 1]) chains_.push_back(seq);
    }
    chains_.push_back(count);
  }
  int64_t tokens() const { return starts_.back(); }
  Sequences view() const {
    return {starts_.data(), before_, after_, chains_.data(), static_cast<int64_t>(chains_.size()) - 1};
  }

 private:
  const int64_t *before_, *after_;
  std::vector<int64_t> starts_, chains_;
};

inline States states_of(const Array& a, std::initializer_list<int64_t> shape) {
  require(!is_bf16(a) && kind_of(a) == 0 && a.ndim() == shape.size() + 1 && dense_from(a, 1),
          "states are float32 and dense after their rows");
  size_t i = 0;
  for (const int64_t size : shape) require(a.shape(++i) == size, "states of another shape");
  return {static_cast<float*>(a.data()), a.stride(0)};
}

// A tensor [tokens, ...] of the kind, dense after its tokens.
inline const void* of_tokens(const Array& a, int kind, std::initializer_list<int64_t> shape) {
  require(kind_of(a) == kind && a.ndim() == shape.size() && dense_from(a, 1), "what a token has must be dense, of one dtype");
  size_t i = 0;
  for (const int64_t size : shape) require(a.shape(i++) == size, "tensors differ in shape");
  return a.data();
}

inline void NativeKernels::causal_conv(Array x, Array weight, MaybeArray bias, Array states,
                                       const std::vector<int64_t>& lens, Array before, Array after, bool silu, bool gated,
                                       Array out) {
  const int kind = kind_of(x);
  const SequenceRows rows(lens, before, after, states);
  ConvTask task{};
  task.channels = weight.shape(0), task.width = weight.shape(1);
  require(task.width >= 1 && task.width <= kMaxConvWidth, "a convolution is too wide");
  task.x = of_tokens(x, kind, {rows.tokens(), gated ? 3 * task.channels : task.channels}), task.x_step = x.stride(0);
  if (gated) task.take_gates(kind == 1 ? sizeof(uint16_t) : sizeof(float));
  task.out = whole(out, kind, 2);
  task.weight = whole(weight, kind_of(weight), 2), task.narrow_weight = kind_of(weight) == 1;
  if (bias) {
    task.bias = whole(*bias, kind_of(*bias), 1), task.narrow_bias = kind_of(*bias) == 1;
    require(elements(*bias) == task.channels, "a bias is one per channel");
  }
  require(elements(out) == rows.tokens() * task.channels, "the result does not fit x");
  task.silu = silu;
  task.states = states_of(states, {task.channels, task.width - 1});
  task.seqs = rows.view();
  run(table_->recurrent->causal_conv[kind], &task, elements(out) * task.width, kSmall);
}

inline void NativeKernels::delta_rule(Array q, Array k, Array v, Array decay, Array beta, Array states,
                                      const std::vector<int64_t>& lens, Array before, Array after, bool by_token, Array out) {
  const int kind = kind_of(v);
  const SequenceRows rows(lens, before, after, states);
  const int64_t tokens = rows.tokens();
  require(v.ndim() == 3 && k.ndim() == 3, "q, k and v have heads");
  DeltaTask task{};
  task.v_heads = v.shape(1), task.v_dim = v.shape(2);
  task.k_heads = k.shape(1), task.k_dim = k.shape(2);
  task.by_token = by_token;
  require(task.k_heads > 0 && task.v_heads % task.k_heads == 0, "heads of keys must divide those of values");
  task.q = of_tokens(q, kind, {tokens, task.k_heads, task.k_dim}), task.q_step = q.stride(0);
  task.k = of_tokens(k, kind, {tokens, task.k_heads, task.k_dim}), task.k_step = k.stride(0);
  task.v = of_tokens(v, kind, {tokens, task.v_heads, task.v_dim}), task.v_step = v.stride(0);
  task.decay = static_cast<const float*>(of_tokens(decay, 0, {tokens, task.v_heads})), task.decay_step = decay.stride(0);
  task.beta = static_cast<const float*>(of_tokens(beta, 0, {tokens, task.v_heads})), task.beta_step = beta.stride(0);
  task.out = whole(out, kind, 3);
  require(elements(out) == elements(v), "the result does not fit v");
  task.states = states_of(states, {task.v_heads, task.k_dim, task.v_dim});
  task.seqs = rows.view();
  task.together = heads_together(task.v_heads / task.k_heads, task.seqs.chain_count * task.v_heads, threads());
  task.memory_step = std::max(delta_floats(task.k_dim, task.v_dim), chunk_floats(task.k_dim, task.v_dim, task.together));
  task.memory = reinterpret_cast<float*>(aligned_bytes(threads() * task.memory_step * sizeof(float)));
  run(table_->recurrent->delta_rule[kind], &task, elements(out) * task.k_dim, kSmall);
}

inline void NativeKernels::state_space(Array x, Array dt, Array a, Array b, Array c, MaybeArray d, Array states,
                                       const std::vector<int64_t>& lens, Array before, Array after, bool by_token, Array out) {
  const int kind = kind_of(x);
  const SequenceRows rows(lens, before, after, states);
  const int64_t tokens = rows.tokens();
  require(x.ndim() == 3 && b.ndim() == 3, "x, b and c have heads or groups");
  ScanTask task{};
  task.heads = x.shape(1), task.dim = x.shape(2);
  task.groups = b.shape(1), task.n = b.shape(2);
  require(task.groups > 0 && task.heads % task.groups == 0, "groups must divide the heads");
  task.x = of_tokens(x, kind, {tokens, task.heads, task.dim}), task.x_step = x.stride(0);
  task.b = of_tokens(b, kind, {tokens, task.groups, task.n}), task.b_step = b.stride(0);
  task.c = of_tokens(c, kind, {tokens, task.groups, task.n}), task.c_step = c.stride(0);
  task.dt = static_cast<const float*>(of_tokens(dt, 0, {tokens, task.heads})), task.dt_step = dt.stride(0);
  task.each_state = a.ndim() == 2, task.by_token = by_token;
  task.a = static_cast<const float*>(whole(a, 0, a.ndim()));
  require(elements(a) == task.heads * (task.each_state ? task.n : 1), "rates are one per head, or per number of a state");
  if (d) {
    task.d = typed<float>(*d, 1);
    require(elements(*d) == task.heads, "d is one per head");
  }
  task.out = whole(out, kind, 3);
  require(elements(out) == elements(x), "the result does not fit x");
  task.states = states_of(states, {task.heads, task.dim, task.n});
  task.seqs = rows.view();
  task.together = heads_together(task.heads / task.groups, task.seqs.chain_count * task.heads, threads());
  task.memory_step = std::max(scan_floats(task.n), chunk_floats(task.n, task.dim, task.together));
  task.memory = reinterpret_cast<float*>(aligned_bytes(threads() * task.memory_step * sizeof(float)));
  run(table_->recurrent->state_space[kind], &task, elements(out) * task.n, kSmall);
}

inline void NativeKernels::gated_norm(Array x, Array gate, Array weight, float eps, bool norm_first, Array out) {
  const int kind = kind_of(x);
  require(x.ndim() == 3, "what a gated norm takes has heads");
  GatedNormTask task{};
  task.tokens = x.shape(0), task.heads = x.shape(1);
  task.dim = x.shape(2);
  task.x = whole(x, kind, 3), task.out = whole(out, kind, 3);
  task.gate = of_tokens(gate, kind, {task.tokens, task.heads, task.dim}), task.gate_step = gate.stride(0);
  task.weight = static_cast<const float*>(whole(weight, 0, weight.ndim()));
  task.weight_step = weight.ndim() == 2 ? task.dim : 0;
  require(elements(weight) == (weight.ndim() == 2 ? task.heads * task.dim : task.dim) && elements(out) == elements(x),
          "a norm's tensors differ in shape");
  task.eps = eps, task.norm_first = norm_first;
  run(table_->recurrent->gated_norm[kind], &task, elements(out), kSmall);
}

inline void NativeKernels::sigmoid_mul(Array x, Array gate, Array out) {
  const int kind = kind_of(x);
  require(x.ndim() == 3 && gate.ndim() == 3 && kind_of(gate) == kind && dense_from(gate, 2), "gates of a head are dense");
  for (size_t i = 0; i < 3; ++i) require(x.shape(i) == gate.shape(i), "tensors differ in shape");
  SigmoidTask task{whole(x, kind, 3), gate.data(), whole(out, kind, 3), x.shape(0),
                   x.shape(1), x.shape(2), gate.stride(0), gate.stride(1)};
  require(elements(out) == elements(x), "the result does not fit x");
  run(table_->recurrent->sigmoid_mul[kind], &task, elements(out), kSmall);
}

inline void NativeKernels::time_steps(Array x, Array bias, float low, float high, Array out) {
  const int kind = kind_of(x);
  const int64_t heads = elements(bias);
  require(x.ndim() == 2 && elements(out) == elements(x), "the result does not fit x");
  TimeStepsTask task{};
  task.tokens = x.shape(0), task.heads = heads;
  task.x = of_tokens(x, kind, {task.tokens, heads}), task.x_step = x.stride(0);
  task.bias = typed<float>(bias, 1), task.low = low, task.high = high;
  task.out = static_cast<float*>(whole(out, 0, 2));
  run(table_->recurrent->time_steps[kind], &task, elements(out), kSmall);
}

inline void NativeKernels::delta_gates(Array rates, Array rate, Array bias, Array decay, Array beta) {
  const int64_t heads = elements(rate);
  DeltaGatesTask task{typed<float>(rates, 2), typed<float>(rate, 1), typed<float>(bias, 1),
                      static_cast<float*>(whole(decay, 0, 2)), static_cast<float*>(whole(beta, 0, 2)),
                      rates.shape(0), heads};
  require(rates.shape(1) == 2 * heads && elements(bias) == heads &&
              elements(decay) == task.tokens * heads && elements(beta) == task.tokens * heads,
          "rates are two per head, and their results one");
  run(table_->recurrent->delta_gates, &task, elements(decay), kSmall);
}

}  // namespace kvferry
