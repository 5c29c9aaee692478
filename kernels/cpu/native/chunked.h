// The gated delta rule and the state-space scan of prompts, in chunks whose work is products of matrices (Yang et al. 2024,
// section 3; Dao and Gu 2024, section 6). Both are one recurrence: with keys k, queries q, changes d and the product g of a
// token's decays since the chunk began, a head's state S gives
//
//   y_t = g_t q_t S + sum over s <= t of (g_t / g_s) (q_t k_s) d_s        S' = g_C S + sum of (g_C / g_s) k_s d_s
//
// A scan's changes are dt x. The delta rule's are d_t = beta_t (v_t - g_t k_t S - sum over s < t of (g_t / g_s) (k_t k_s) d_s),
// found from the first to the last. Quotients are powers of sums of logarithms, which are kept in double, so that a token that
// forgets everything leaves those after it exact; none is above 1.
#pragma once

#include <algorithm>

#include "chunk_memory.h"
#include "delta_step.h"
#include "small_products.h"
#include "transposed.h"

namespace kvferry {
namespace {

// A chunk's tokens of a head.
struct ChunkHead {
  int64_t count;                    // tokens there are
  const float *decay, *beta;        // logarithms of decays, steps apart; beta null: a scan
  int64_t decay_step, beta_step;
  float rate;                       // what decays are multiplied with
};

// scale / the lengths of kLanes vectors, of which `squares` has sums.
KVF_INLINE Floats lengths_of(Floats* squares, float scale) {
  float factors[kLanes];
  store(factors, sums(squares));
  for (int i = 0; i < kLanes; ++i) factors[i] = scale / __builtin_sqrtf(factors[i] + kUnitEps);
  return load(factors);
}

// The same of rows, padded with zeros to whole vectors.
KVF_INLINE Floats lengths_to(const float* rows, int64_t padded, float scale) {
  Floats squares[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    Floats total{};
    for (int64_t at = 0; at < padded; at += kLanes) {
      const Floats value = load(rows + i * padded + at);
      total = total + value * value;
    }
    squares[i] = total;
  }
  return lengths_of(squares, scale);
}

// to [padded dim, kChunkTokens] = the vectors of `count` tokens, transposed; zeros behind them. unit: with length `scale`.
template <class T>
KVF_INLINE void load_columns(const T* from, int64_t step, int64_t count, int64_t dim, bool unit, float scale, float* rows,
                             float* to) {
  const int64_t padded = padded_to(dim, kDepthUnit);
  for (int64_t first = 0; first < kChunkTokens; first += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      float* row = rows + i * padded;
      const bool there = first + i < count;
      prefetch_all(from + (first + i + kChunkTokens) * step, dim);
      if (there) widen_all(from + (first + i) * step, dim, row);
      std::fill(row + (there ? dim : 0), row + padded, 0.0f);
    }
    const Floats factors = unit ? lengths_to(rows, padded, scale) : splat(scale);
    for (int64_t at = 0; at < padded; at += kLanes) {
      Floats block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = load(rows + i * padded + at);
      transpose(block);
      for (int i = 0; i < kLanes; ++i) store(to + (at + i) * kChunkTokens + first, block[i] * factors);
    }
  }
}

// to [s, t] = the products of the vectors of tokens s of a and t >= s of b, both as load_columns() leaves them.
inline __attribute__((noinline)) void products_of_tokens(const float* a, const float* b, int64_t depth, int64_t rows,
                                                         float* to) {
  const auto tile = [&](auto& total, int64_t s, int64_t t) {
    constexpr int kVecs = sizeof(total[0]) / sizeof(Floats);
    add_product<kVecs>(total, a + s, 1, kChunkTokens, b + t, kChunkTokens, depth);
    for (int r = 0; r < kTileHeight; ++r)
      for (int j = 0; j < kVecs; ++j) store(to + (s + r) * kChunkTokens + t + j * kLanes, total[r][j]);
  };
  for (int64_t s = 0; s < rows; s += kTileHeight) {
    int64_t t = s / kLanes * kLanes;
    for (; t + kTileWidth <= kChunkTokens; t += kTileWidth) {
      Floats total[kTileHeight][kTileVecs] = {};
      tile(total, s, t);
    }
    for (; t < kChunkTokens; t += kLanes) {
      Floats total[kTileHeight][1] = {};
      tile(total, s, t);
    }
  }
}

// What a head makes of the products of tokens: mixed [s, t] = (g_t / g_s) (q_t k_s) for s <= t, and of the delta rule minus
// beta_t (g_t / g_s) (k_t k_s) for s < t; with the decays of each token since the chunk began, and from there to its end.
inline __attribute__((noinline)) void weigh_tokens(const ChunkHead& head, int64_t rows, ChunkMemory& m) {
  alignas(64) double logs[kChunkTokens];
  double log = 0;
  for (int64_t t = 0; t < kChunkTokens; ++t) {
    const float own = t < head.count ? head.decay[t * head.decay_step] * head.rate : 0.0f;
    log += own < kForgotten ? kForgotten : own;
    logs[t] = log;
    m.gained[t] = static_cast<float>(log);
    m.beta[t] = t < head.count && head.beta != nullptr ? head.beta[t * head.beta_step] : 0.0f;
  }
  for (int64_t t = 0; t < kChunkTokens; ++t) m.left[t] = static_cast<float>(log - logs[t]);
  for (int64_t t = 0; t < kChunkTokens; t += kLanes) {
    store(m.gained + t, exponential(load(m.gained + t)));
    store(m.left + t, exponential(load(m.left + t)));
  }
  for (int64_t s = 0; s < rows; ++s) {
    alignas(64) float quotient[kChunkTokens];
    for (int64_t t = 0; t < kChunkTokens; ++t) quotient[t] = t < s ? -1e30f : static_cast<float>(logs[t] - logs[s]);
    const float* of_keys = m.keys_keys + s * kChunkTokens;
    for (int64_t t = s / kLanes * kLanes; t < kChunkTokens; t += kLanes) {
      const Floats share = exponential(load(quotient + t));
      store(m.mixed + s * kChunkTokens + t, share * load(m.queries_keys + s * kChunkTokens + t));
      if (head.beta != nullptr) store(m.solved + s * kChunkTokens + t, -(share * load(of_keys + t)) * load(m.beta + t));
    }
  }
}

// The changes of a tile of tokens: what lies in m.changes are values v. found(total, t, column) adds k S.
template <class Found>
KVF_INLINE void solve_changes(const ChunkMemory& m, Found found, int64_t t, int64_t column) {
  Floats total[kTileHeight][kTileVecs] = {};
  float* changes = m.changes + column;
  found(total, t, column);
#pragma GCC unroll 8
  for (int r = 0; r < kTileHeight; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < kTileVecs; ++j)
      total[r][j] = (load(changes + (t + r) * m.step + j * kLanes) - total[r][j] * m.gained[t + r]) * m.beta[t + r];
  add_product<kTileVecs>(total, m.solved + t, 1, kChunkTokens, changes, m.step, t);
#pragma GCC unroll 8
  for (int r = 0; r < kTileHeight; ++r) {
#pragma GCC unroll 8
    for (int before = 0; before < r; ++before)
#pragma GCC unroll 2
      for (int j = 0; j < kTileVecs; ++j)
        total[r][j] = total[r][j] + total[before][j] * m.solved[(t + before) * kChunkTokens + t + r];
#pragma GCC unroll 2
    for (int j = 0; j < kTileVecs; ++j) store(changes + (t + r) * m.step + j * kLanes, total[r][j]);
  }
}

// What a tile of tokens gives, of the changes up to its own. found(total, t, column) adds q S.
template <class Found>
KVF_INLINE void give_outputs(const ChunkMemory& m, Found found, int64_t t, int64_t column) {
  Floats total[kTileHeight][kTileVecs] = {};
  found(total, t, column);
#pragma GCC unroll 8
  for (int r = 0; r < kTileHeight; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < kTileVecs; ++j) total[r][j] = total[r][j] * m.gained[t + r];
  add_product<kTileVecs>(total, m.mixed + t, 1, kChunkTokens, m.changes + column, m.step, t + kTileHeight);
  for (int r = 0; r < kTileHeight; ++r)
    for (int j = 0; j < kTileVecs; ++j) store(m.outputs + (t + r) * m.step + column + j * kLanes, total[r][j]);
}

// What a chunk changes and gives in kTileWidth columns of a head's state.
template <class OfKeys, class OfQueries>
KVF_INLINE void run_columns(const ChunkHead& head, const ChunkMemory& m, int64_t column, OfKeys of_keys, OfQueries of_queries) {
  for (int64_t t = 0; t < padded_to(head.count, kTileHeight); t += kTileHeight) {
    if (head.beta != nullptr) solve_changes(m, of_keys, t, column);
    give_outputs(m, of_queries, t, column);
  }
}

// The tokens of a sequence of `heads` heads that share keys, chunk by chunk. keys(at, count) loads keys and queries;
// values(head, at, count) returns the head's chunk and loads its rows of m.changes, behind which zeros are filled in;
// results(head, at, count) takes m.outputs.
template <class Chunks, class Keys, class Values, class Results>
KVF_INLINE void run_chunks(Chunks& c, int64_t heads, int64_t begin, int64_t end, bool solve, Keys keys, Values values,
                           Results results) {
  ChunkMemory& m = c.m;
  c.begin();
  for (int64_t at = begin; at < end; at += kChunkTokens) {
    const int64_t count = end - at < kChunkTokens ? end - at : kChunkTokens;
    keys(at, count);
    c.multiply_tokens(count, solve);
    for (int64_t head = 0; head < heads; ++head) {
      const ChunkHead own = values(head, at, count);
      std::fill(m.changes + count * m.step, m.changes + kChunkTokens * m.step, 0.0f);
      c.run(own, head);
      results(head, at, count);
    }
  }
}

}  // namespace
}  // namespace kvferry
