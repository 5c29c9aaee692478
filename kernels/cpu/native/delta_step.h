// The gated delta rule token by token: for decodes, which wait for memory. With S the state of a head, k and q of length one,
// S' = e S and d = beta (v - k S'), a token gives q S' + (q k) d and leaves S' + k d. One pass over a run of columns of S, as
// many as a core's first cache holds, finds k S and q S; the next one, from that cache, writes S and asks for the next run.
#pragma once

#include "recurrence.h"
#include "stream.h"

namespace kvferry {
namespace {

constexpr float kUnitEps = 1e-6f;  // kernels.recurrent_layers.L2_EPS
constexpr int64_t kStateAhead = 16;  // rows of a state prefetched ahead

// to [dim] = from * scale / length.
template <class T>
KVF_INLINE void load_unit(const T* from, int64_t dim, float scale, float* to) {
  Floats squares{};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Floats value = load_part(from + i, dim - i);
    squares = squares + value * value;
    store_part(to + i, value, dim - i);
  }
  const float factor = scale / __builtin_sqrtf(sum(squares) + kUnitEps);
  for (int64_t i = 0; i < dim; i += kLanes) store_part(to + i, load_part(to + i, dim - i) * factor, dim - i);
}

// A token of a head.
struct DeltaToken {
  const float *k, *q;
  float decay, beta, product;  // of q and k
};

// Vecs vectors of columns. from: the state before, null for zeros; to: the state after, null if nobody needs it.
template <int Vecs, bool Stream, class T>
KVF_INLINE void delta_columns(const DeltaToken& token, int64_t k_dim, int64_t v_dim, const float* from, float* to, const T* v,
                              T* out) {
  Floats of_k[Vecs] = {}, of_q[Vecs] = {}, change[Vecs];
  for (int64_t i = 0; from != nullptr && i < k_dim; ++i) {
    const float* row = from + i * v_dim;
#pragma GCC unroll 4
    for (int j = 0; j < Vecs; ++j) {
      if (j * kLanes % 16 == 0) __builtin_prefetch(row + kStateAhead * v_dim + j * kLanes);
      const Floats state = load(row + j * kLanes);
      of_k[j] = of_k[j] + state * token.k[i];
      of_q[j] = of_q[j] + state * token.q[i];
    }
  }
  for (int j = 0; j < Vecs; ++j) {
    change[j] = (load(v + j * kLanes) - of_k[j] * token.decay) * token.beta;
    store(out + j * kLanes, of_q[j] * token.decay + change[j] * token.product);
  }
  for (int64_t i = 0; to != nullptr && i < k_dim; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vecs; ++j) {
      if (from != nullptr && j * kLanes % 16 == 0) __builtin_prefetch(from + i * v_dim + (Vecs + j) * kLanes);
      const Floats added = change[j] * token.k[i];
      const Floats kept = from == nullptr ? Floats{} : load(from + i * v_dim + j * kLanes) * token.decay;
      put<Stream>(to + i * v_dim + j * kLanes, kept + added);
    }
  }
}

// One column, of those that fill no vector.
template <class T>
KVF_INLINE void delta_column(const DeltaToken& token, int64_t k_dim, int64_t v_dim, const float* from, float* to, const T* v,
                             T* out) {
  float of_k = 0, of_q = 0;
  for (int64_t i = 0; from != nullptr && i < k_dim; ++i) {
    of_k += from[i * v_dim] * token.k[i];
    of_q += from[i * v_dim] * token.q[i];
  }
  const float change = (load_one(v) - of_k * token.decay) * token.beta;
  store_one(out, of_q * token.decay + change * token.product);
  for (int64_t i = 0; to != nullptr && i < k_dim; ++i)
    to[i * v_dim] = (from == nullptr ? 0.0f : from[i * v_dim] * token.decay) + token.k[i] * change;
}

template <bool Stream, class T>
inline __attribute__((noinline)) void delta_token(const DeltaToken& token, int64_t k_dim, int64_t v_dim, const float* from,
                                                  float* to, const T* v, T* out) {
  const auto plus = [](auto* base, int64_t column) { return base == nullptr ? nullptr : base + column; };
  int64_t column = 0;
  for (; column + 4 * kLanes <= v_dim; column += 4 * kLanes)
    delta_columns<4, Stream>(token, k_dim, v_dim, plus(from, column), plus(to, column), v + column, out + column);
  for (; column + kLanes <= v_dim; column += kLanes)
    delta_columns<1, Stream>(token, k_dim, v_dim, plus(from, column), plus(to, column), v + column, out + column);
  for (; column < v_dim; ++column)
    delta_column(token, k_dim, v_dim, plus(from, column), plus(to, column), v + column, out + column);
}

// One sequence of one head. alone: no other sequence of the batch reads what this one leaves.
template <class T>
KVF_INLINE void delta_tokens(const DeltaTask& t, int64_t head, int64_t seq, bool alone, float* memory) {
  const int64_t size = t.k_dim * t.v_dim, key = head / (t.v_heads / t.k_heads), begin = t.seqs.starts[seq];
  const int64_t end = t.seqs.starts[seq + 1];
  const auto own = [&](float* row) { return row == nullptr ? nullptr : row + head * size; };
  float *k = memory, *q = k + padded_to(t.k_dim, 16), *spare = q + padded_to(t.k_dim, 16);
  const float* from = own(t.states.row(t.seqs.before[seq]));
  float* to = own(t.states.row(t.seqs.after[seq]));
  if (begin == end) return copy_state(from, size, to);
  for (int64_t at = begin; at < end; ++at) {
    load_unit(static_cast<const T*>(t.k) + at * t.k_step + key * t.k_dim, t.k_dim, 1.0f, k);
    load_unit(static_cast<const T*>(t.q) + at * t.q_step + key * t.k_dim, t.k_dim,
              1.0f / __builtin_sqrtf(static_cast<float>(t.k_dim)), q);
    Floats product{};
    for (int64_t i = 0; i < t.k_dim; i += kLanes)
      product = product + load_part(k + i, t.k_dim - i) * load_part(q + i, t.k_dim - i);
    const DeltaToken token{k, q, exponential(splat(t.decay[at * t.decay_step + head]))[0],
                           t.beta[at * t.beta_step + head], sum(product)};
    const T* v = static_cast<const T*>(t.v) + at * t.v_step + head * t.v_dim;
    T* out = static_cast<T*>(t.out) + (at * t.v_heads + head) * t.v_dim;
    float* next = to != nullptr || at + 1 == end ? to : spare;
    if (alone && begin + 1 == end && to != nullptr && streams(to, t.v_dim))
      delta_token<true>(token, t.k_dim, t.v_dim, from, next, v, out);
    else
      delta_token<false>(token, t.k_dim, t.v_dim, from, next, v, out);
    from = next;
  }
}

}  // namespace
}  // namespace kvferry
