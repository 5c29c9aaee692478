// The state-space scan of a batch. An item of work is, of a chain of sequences, some rows of the state or, where it goes in
// chunks, some heads of a group.
#pragma once

#include "chunk_tiles.h"
#include "scan_step.h"

namespace kvferry {
namespace {

// One sequence of heads [first, first + count) of a group, in chunks: b are keys, c queries, and dt x the changes. States are
// transposed on their way in and out.
template <class T>
KVF_INLINE void scan_chunks(const ScanTask& t, int64_t first, int64_t count, int64_t seq, ChunksOf<T>& chunks) {
  ChunkMemory& m = chunks.m;
  const int64_t size = t.dim * t.n, group = first / (t.heads / t.groups);
  const float* before = t.states.row(t.seqs.before[seq]);
  float* after = t.states.row(t.seqs.after[seq]);
  std::fill(m.states, m.states + count * m.state_floats(), 0.0f);
  for (int64_t head = 0; before != nullptr && head < count; ++head)
    transpose_all(before + (first + head) * size, t.n, t.dim, t.n, m.states + head * m.state_floats(), m.step);
  const auto keys = [&](int64_t at, int64_t tokens) {
    chunks.load_keys(static_cast<const T*>(t.b) + at * t.b_step + group * t.n, t.b_step, tokens, t.n, false);
    chunks.load_queries(static_cast<const T*>(t.c) + at * t.c_step + group * t.n, t.c_step, tokens, t.n, false, 1.0f);
  };
  const auto values = [&](int64_t head, int64_t at, int64_t tokens) {
    const float* dt = t.dt + at * t.dt_step + first + head;
    for (int64_t i = 0; i < tokens; ++i) {
      const T* x = static_cast<const T*>(t.x) + (at + i) * t.x_step + (first + head) * t.dim;
      float* row = m.changes + i * m.step;
      prefetch_all(x + kChunkTokens * t.x_step, t.dim);
      for (int64_t j = 0; j < m.width; j += kLanes)
        store(row + j, (j < t.dim ? load_part(x + j, t.dim - j) : Floats{}) * dt[i * t.dt_step]);
    }
    return ChunkHead{tokens, dt, nullptr, t.dt_step, 0, t.a[first + head]};
  };
  const auto results = [&](int64_t head, int64_t at, int64_t tokens) {
    const float direct = t.d == nullptr ? 0.0f : t.d[first + head];
    for (int64_t i = 0; i < tokens; ++i) {
      const T* x = static_cast<const T*>(t.x) + (at + i) * t.x_step + (first + head) * t.dim;
      T* out = static_cast<T*>(t.out) + ((at + i) * t.heads + first + head) * t.dim;
      for (int64_t j = 0; j < t.dim; j += kLanes)
        store_part(out + j, load(m.outputs + i * m.step + j) + load_part(x + j, t.dim - j) * direct, t.dim - j);
    }
  };
  run_chunks(chunks, count, t.seqs.starts[seq], t.seqs.starts[seq + 1], false, keys, values, results);
  for (int64_t head = 0; after != nullptr && head < count; ++head)
    transpose_all(m.states + head * m.state_floats(), m.step, t.n, t.dim, after + (first + head) * size, t.n);
}

// One sequence of an item's rows of a group.
template <class T>
KVF_INLINE void scan_run(const ScanTask& t, int64_t number, int64_t seq, bool alone, float* memory) {
  const int64_t rows = t.heads / t.groups * t.dim, runs = scan_runs(t), group = number / runs;
  const int64_t most = scan_item_rows(t.n), skipped = number % runs * most, left = rows - skipped;
  const ScanRows own{group * rows + skipped, left < most ? left : most, nullptr, nullptr, nullptr, nullptr};
  scan_tokens<T>(t, own, group, seq, alone, memory);
}

template <class T>
void run_state_space(void* argument, int member, int, Barrier& barrier) {
  const ScanTask& t = *static_cast<ScanTask*>(argument);
  float* memory = t.memory + member * t.memory_step;
  const int64_t runs = t.groups * scan_runs(t), parts = t.heads / t.together, of_chain = runs > parts ? runs : parts;
  barrier.each(t.seqs.chain_count * of_chain, member, [&] {
    return [&](int64_t item) {
      const int64_t number = item / of_chain, part = item % of_chain;
      const int64_t* chain = t.seqs.chains + number;
      const bool chunks = !t.each_state && !t.by_token && t.dim > 1 && goes_in_chunks(t.seqs, number);
      if (part >= (chunks ? parts : runs)) return;
      ChunksOf<T> work(memory, t.n, t.dim);
      for (int64_t seq = chain[0]; seq < chain[1]; ++seq)
        chunks ? scan_chunks<T>(t, part * t.together, t.together, seq, work)
               : scan_run<T>(t, part, seq, chain[1] - chain[0] == 1, memory);
      settle_streams();
    };
  });
}

}  // namespace
}  // namespace kvferry
