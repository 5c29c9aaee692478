// What the kernels of recurrent layers take: plain structs, as in types.h.
#pragma once

#include <cstdint>

#include "threads.h"

namespace kvferry {

// A batch's sequences: their query tokens lie one behind the other, starts [count + 1]. before, after: the row of the states
// with which each begins, -1: with zeros, and where it leaves its own, -1: nowhere. A chain is a run of sequences that begin
// with what the one before left; chains [chain_count + 1]: the first sequence of each.
struct Sequences {
  const int64_t *starts, *before, *after, *chains;
  int64_t chain_count;
};

// A layer's states: of a row the floats are dense, rows are `step` floats apart.
struct States {
  float* data;
  int64_t step;
  float* row(int64_t number) const { return number < 0 ? nullptr : data + number * step; }
};

// out [T, channels] = the convolution of x over each sequence's last `width` tokens. weight [channels, width] and bias
// [channels] (or null) are float32 or bfloat16 each. States: [channels, width - 1]. factor multiplies x, and gate the result,
// once rounded; both are null or lie like x.
struct ConvTask {
  const void *x, *factor, *gate;
  void* out;
  const void *weight, *bias;
  bool narrow_weight, narrow_bias;
  int64_t x_step, channels, width;
  bool silu;
  States states;
  Sequences seqs;

  // Rows of x hold the factor, the gate, and then x itself.
  void take_gates(int64_t bytes) {
    const auto* rows = static_cast<const uint8_t*>(x);
    factor = rows, gate = rows + channels * bytes, x = rows + 2 * channels * bytes;
  }
};

constexpr int64_t kMaxConvWidth = 8;

// out [T, v_heads, v_dim] = the gated delta rule of q, k [T, k_heads, k_dim], v, decay and beta [T, v_heads]. Tokens are
// `*_step` apart, and dense. States: [v_heads, k_dim, v_dim]. memory: delta_floats() of each thread. together: heads of an item.
// by_token: never in chunks, so that a token's bits do not depend on how its prompt is divided.
struct DeltaTask {
  const void *q, *k, *v;
  void* out;
  const float *decay, *beta;
  int64_t q_step, k_step, v_step, decay_step, beta_step;
  int64_t k_heads, v_heads, k_dim, v_dim, together;
  bool by_token;
  States states;
  Sequences seqs;
  float* memory;
  int64_t memory_step;
};

// out [T, heads, dim] = the scan of x, dt [T, heads], b, c [T, groups, n], a [heads], or [heads, n] if `each_state`, and d
// [heads] or null. Tokens are `*_step` apart, and dense. States: [heads, dim, n]. memory: scan_floats() of each thread.
// together: heads of an item of chunks. by_token: as of a DeltaTask.
struct ScanTask {
  const void *x, *b, *c;
  void* out;
  const float *dt, *a, *d;
  int64_t x_step, b_step, c_step, dt_step;
  int64_t heads, dim, groups, n, together;
  bool each_state, by_token;
  States states;
  Sequences seqs;
  float* memory;
  int64_t memory_step;
};

// out [tokens, heads, dim] = the gated RMS norm of x by heads; gates of a token are dense, tokens gate_step apart. weight: of
// a head, weight_step apart.
struct GatedNormTask {
  const void *x, *gate;
  const float* weight;
  void* out;
  int64_t tokens, heads, dim, gate_step, weight_step;
  float eps;
  bool norm_first;
};

// out [tokens, heads, dim] = x times the logistic function of the gate, whose heads are head_step apart.
struct SigmoidTask {
  const void *x, *gate;
  void* out;
  int64_t tokens, heads, dim, gate_step, head_step;
};

// out [tokens, heads] = softplus(x + bias), at least low and at most high.
struct TimeStepsTask {
  const void* x;
  const float* bias;
  float* out;
  int64_t tokens, heads, x_step;
  float low, high;
};

// beta, decay [tokens, heads] of rates [tokens, 2 * heads].
struct DeltaGatesTask {
  const float *rates, *rate, *bias;
  float *decay, *beta;
  int64_t tokens, heads;
};

// Rows of a scan's state [n], of which each belongs to a head's dimension, that one item of work holds: enough bytes to begin
// an item for, in a core's first cache.
inline int64_t scan_item_rows(int64_t n) { return n > 0 && n < 64 ? 4096 / n / 16 * 16 : 64; }

inline int64_t padded_to(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

inline int64_t delta_floats(int64_t k_dim, int64_t v_dim) {
  return 2 * padded_to(k_dim, 16) + padded_to(k_dim * v_dim, 16);
}
inline int64_t scan_floats(int64_t n) { return 2 * padded_to(n, 16) + padded_to(scan_item_rows(n) * n, 16); }

struct RecurrentKernels {
  Team::Function causal_conv[2], delta_rule[2], state_space[2];    // float32, bfloat16
  Team::Function gated_norm[2], sigmoid_mul[2], time_steps[2];     // float32, bfloat16
  Team::Function delta_gates;                                      // float32
};

}  // namespace kvferry
