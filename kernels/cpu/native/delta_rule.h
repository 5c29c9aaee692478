// The gated delta rule of a batch: an item of work is a head of a chain of sequences, or some that share keys.
#pragma once

#include "chunk_tiles.h"

namespace kvferry {
namespace {

// One sequence of heads [first, first + count), in chunks.
template <class T>
KVF_INLINE void delta_chunks(const DeltaTask& t, int64_t first, int64_t count, int64_t seq, ChunksOf<T>& c) {
  ChunkMemory& m = c.m;
  const int64_t size = t.k_dim * t.v_dim, key = first / (t.v_heads / t.k_heads);
  const float* before = t.states.row(t.seqs.before[seq]);
  float* after = t.states.row(t.seqs.after[seq]);
  const auto row_of = [&](int64_t head, int64_t i) { return m.states + head * m.state_floats() + i * m.step; };
  std::fill(m.states, m.states + count * m.state_floats(), 0.0f);
  for (int64_t head = 0; before != nullptr && head < count; ++head)
    for (int64_t i = 0; i < t.k_dim; ++i)
      copy_state(before + (first + head) * size + i * t.v_dim, t.v_dim, row_of(head, i));
  const auto keys = [&](int64_t at, int64_t tokens) {
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(t.k_dim));
    c.load_keys(static_cast<const T*>(t.k) + at * t.k_step + key * t.k_dim, t.k_step, tokens, t.k_dim, true);
    c.load_queries(static_cast<const T*>(t.q) + at * t.q_step + key * t.k_dim, t.q_step, tokens, t.k_dim, true, scale);
  };
  const auto values = [&](int64_t head, int64_t at, int64_t tokens) {
    const T* v = static_cast<const T*>(t.v) + at * t.v_step + (first + head) * t.v_dim;
    for (int64_t i = 0; i < tokens; ++i) {
      prefetch_all(v + (i + kChunkTokens) * t.v_step, t.v_dim);
      widen_all(v + i * t.v_step, t.v_dim, m.changes + i * m.step);
      std::fill(m.changes + i * m.step + t.v_dim, m.changes + i * m.step + m.width, 0.0f);
    }
    return ChunkHead{tokens, t.decay + at * t.decay_step + first + head, t.beta + at * t.beta_step + first + head,
                     t.decay_step, t.beta_step, 1.0f};
  };
  const auto results = [&](int64_t head, int64_t at, int64_t tokens) {
    T* out = static_cast<T*>(t.out) + (at * t.v_heads + first + head) * t.v_dim;
    for (int64_t i = 0; i < tokens; ++i) narrow_all(m.outputs + i * m.step, t.v_dim, out + i * t.v_heads * t.v_dim);
  };
  run_chunks(c, count, t.seqs.starts[seq], t.seqs.starts[seq + 1], true, keys, values, results);
  for (int64_t head = 0; after != nullptr && head < count; ++head)
    for (int64_t i = 0; i < t.k_dim; ++i) copy_state(row_of(head, i), t.v_dim, after + (first + head) * size + i * t.v_dim);
}

template <class T>
void run_delta_rule(void* argument, int member, int, Barrier& barrier) {
  const DeltaTask& t = *static_cast<DeltaTask*>(argument);
  float* memory = t.memory + member * t.memory_step;
  const int64_t of_chain = t.v_heads / t.together;
  barrier.each(t.seqs.chain_count * of_chain, member, [&] {
    return [&](int64_t item) {
      const int64_t number = item / of_chain, first = item % of_chain * t.together;
      const int64_t* chain = t.seqs.chains + number;
      const bool chunks = !t.by_token && goes_in_chunks(t.seqs, number), alone = chain[1] - chain[0] == 1;
      ChunksOf<T> c(memory, t.k_dim, t.v_dim);
      for (int64_t seq = chain[0]; seq < chain[1]; ++seq) {
        if (chunks) delta_chunks<T>(t, first, t.together, seq, c);
        for (int64_t head = first; !chunks && head < first + t.together; ++head)
          delta_tokens<T>(t, head, seq, alone, memory);
      }
      settle_streams();
    };
  });
}

}  // namespace
}  // namespace kvferry
