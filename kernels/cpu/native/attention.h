// Attention of one query token over a span of the paged cache, read in place: each K and V is read from memory once for
// all query heads that share it. Online softmax over tiles (Milakov and Gimelshein 2018).
#pragma once

#include <type_traits>

#include "paired_heads.h"
#include "types.h"

namespace kvferry {
namespace {

constexpr int kColumns = kLanes == 16 ? 4 : 2;

// total [Heads] = lane-wise products of each head's q (`dim` apart) and k [dim], summed over groups of lanes. k is read
// once for all heads.
template <int Heads, class S>
KVF_INLINE void dots(const float* q, const S* k, int64_t dim, Floats (&total)[Heads]) {
  for (int h = 0; h < Heads; ++h) total[h] = Floats{};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Floats value = load(k + d);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) total[h] = total[h] + load(q + h * dim + d) * value;
  }
}

// The scales of K and V [kTile] of a tile, 1 behind its positions.
KVF_INLINE void read_scales(const Tile<int8_t>& tile, HeadDims dims, float* k, float* v) {
  for (int64_t j = 0; j < tile.count; ++j) k[j] = scale_of(tile.k[j], dims.k), v[j] = scale_of(tile.v[j], dims.v);
  for (int64_t j = tile.count; j < kTile; ++j) k[j] = v[j] = 1;
}

KVF_INLINE void scale_all(float* values, const float* scales, int64_t count) {
  for (int64_t j = 0; j < count; j += kLanes) store(values + j, load(values + j) * load(scales + j));
}

// scores [Heads][kTile] = scale * q[head] . k[j] of the tile's positions, -inf behind them, up to a whole vector. The
// rows of `ahead` are fetched meanwhile: blocks lie apart, which no hardware prefetcher foresees.
template <class S, int Dim, int Heads>
inline __attribute__((noinline)) void score_heads(const float* q, const Tile<S>& tile, const Tile<S>& ahead, int64_t dim,
                                                  float scale, float* scores) {
  const int64_t width = Dim > kPairs ? Dim : dim, count = tile.count;
  for (int64_t j = 0; j < count; j += kLanes) {
    for (int64_t i = j; i < j + kLanes && i < ahead.count; ++i) fetch(ahead.k[i], width);
    Floats parts[Heads][kLanes];
    for (int i = 0; i < kLanes; ++i) {
      Floats total[Heads]{};
      if (j + i < count) dots<Heads>(q, tile.k[j + i], width, total);
      for (int h = 0; h < Heads; ++h) parts[h][i] = total[h];
    }
    for (int h = 0; h < Heads; ++h) {
      store(scores + h * kTile + j, sums(parts[h]) * scale);
      for (int64_t i = count; i < j + kLanes; ++i) scores[h * kTile + i] = -__builtin_inff();
    }
  }
}

// total [Heads][dim] (columns from `column` on) += sum over j of weights[head][j] * v[j].
template <class S, int Heads, int Columns>
KVF_INLINE void weigh(const Tile<S>& tile, const Tile<S>* ahead, const float* weights, int64_t dim, int64_t column,
                      float* total) {
  Floats sum[Heads][Columns];
  for (int h = 0; h < Heads; ++h)
    for (int c = 0; c < Columns; ++c) sum[h][c] = load(total + h * dim + column + c * kLanes);
  for (int64_t j = 0; j < tile.count; ++j) {
    const S* row = tile.v[j] + column;
    if (ahead != nullptr && j < ahead->count) fetch(ahead->v[j], dim);
#pragma GCC unroll 4
    for (int c = 0; c < Columns; ++c) {
      const Floats value = load(row + c * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < Heads; ++h) sum[h][c] = sum[h][c] + value * weights[h * kTile + j];
    }
  }
  for (int h = 0; h < Heads; ++h)
    for (int c = 0; c < Columns; ++c) store(total + h * dim + column + c * kLanes, sum[h][c]);
}

template <class S, int Heads>
inline __attribute__((noinline)) void weigh_heads(const Tile<S>& tile, const Tile<S>* ahead, const float* weights,
                                                  int64_t dim, float* total) {
  int64_t column = 0;
  for (; column + kColumns * kLanes <= dim; column += kColumns * kLanes, ahead = nullptr)
    weigh<S, Heads, kColumns>(tile, ahead, weights, dim, column, total);
  for (; column < dim; column += kLanes, ahead = nullptr)
    weigh<S, Heads, 1>(tile, ahead, weights, dim, column, total);
}

// Some of a sequence's positions, for one K/V head.
struct Span {
  const int32_t* table;
  int64_t head, begin, end;
};

// Calls visit(the number of heads, 1 to 4, as a constant).
template <class Visit>
KVF_INLINE void with_heads(int64_t heads, Visit visit) {
  switch (heads) {
    case 1: return visit(std::integral_constant<int, 1>{});
    case 2: return visit(std::integral_constant<int, 2>{});
    case 3: return visit(std::integral_constant<int, 3>{});
    default: return visit(std::integral_constant<int, 4>{});
  }
}

// Of `group` query heads (q, `dim` apart): partial results over the span, each `partial_step` floats apart. `after`:
// what this thread attends to next, or null. K and V are stored as S: the scales of int8 multiply scores and weights.
// Dim: the head's, kPairs where it is some other multiple of that, or 0.
template <class T, class S, int Dim>
inline __attribute__((noinline)) void attend(const T* q, int64_t group, const KVLayer& kv, const Span& span,
                                             const Span* after, const Scoring& scoring, float* partial,
                                             int64_t partial_step) {
  constexpr bool kScaled = sizeof(S) == 1;
  constexpr bool kPaired = kBf16Products && std::is_same_v<T, bf16> && std::is_same_v<S, bf16> && Dim > 0;
  using Number = std::conditional_t<kPaired, bf16, float>;
  const int64_t dim = kv.dim, v_dim = kv.v_dim;
  const auto power = [](Floats x) { return kPaired ? rough_power_of_two(x * kLog2E) : exponential(x); };
  Tile<S> tiles[2];
  alignas(64) float k_scales[kTile], v_scales[kTile];
  alignas(64) float scores[4 * kTile];
  alignas(64) Number weights[4 * kTile];
  alignas(64) float total[4 * kMaxDim];
  alignas(64) Number queries[4 * kMaxDim];
  for (int64_t first = 0; first < group; first += 4) {
    const int64_t heads = group - first < 4 ? group - first : 4;
    float highest[4], weight[4];
    for (int64_t h = 0; h < heads; ++h) {
      highest[h] = -__builtin_inff();
      weight[h] = 0;
    }
    for (int64_t i = 0; i < heads * v_dim; i += kLanes) store(total + i, Floats{});
    for (int64_t i = 0; i < heads * dim; i += kLanes) store(queries + i, load(q + first * dim + i));
    Tile<S>*tile = tiles, *ahead = tiles + 1;
    tile->find(kv, span.head, span.table, span.begin, span.end);
    for (int64_t at = span.begin; at < span.end; at += kTile) {
      if (at + kTile < span.end)
        ahead->find(kv, span.head, span.table, at + kTile, span.end);
      else if (after != nullptr)
        ahead->find(kv, after->head, after->table, after->begin, after->end);
      else
        ahead->count = 0;
      if constexpr (kScaled) read_scales(*tile, kv.dims(), k_scales, v_scales);
      with_heads(heads, [&](auto count) {
        if constexpr (kPaired)
          score_pairs<Dim, count>(queries, *tile, *ahead, dim, scoring.scale, scores);
        else
          score_heads<S, Dim, count>(queries, *tile, *ahead, dim, scoring.scale, scores);
      });
      for (int64_t h = 0; h < heads; ++h) {
        float* row = scores + h * kTile;
        if constexpr (kScaled) scale_all(row, k_scales, tile->count);
        if (scoring.cap > 0) cap_scores(row, tile->count, scoring.cap);
        Floats top = load(row);
        for (int64_t j = kLanes; j < tile->count; j += kLanes) top = larger(top, load(row + j));
        const float peak = largest(top), higher = peak > highest[h] ? peak : highest[h];
        Floats added{};
        for (int64_t j = 0; j < tile->count; j += kLanes) {
          const Floats e = power(load(row + j) - higher);
          added = added + e;
          store(weights + h * kTile + j, kScaled ? e * load(v_scales + j) : e);
        }
        if (at == span.begin) {
          weight[h] = sum(added);
        } else {
          const Floats kept = power(splat(highest[h] - higher));
          weight[h] = weight[h] * kept[0] + sum(added);
          float* of_head = total + h * v_dim;
          for (int64_t d = 0; d < v_dim; d += kLanes) store(of_head + d, load(of_head + d) * kept);
        }
        highest[h] = higher;
      }
      with_heads(heads, [&](auto count) {
        if constexpr (kPaired)
          weigh_pairs<Dim, count>(*tile, ahead, weights, v_dim, total);
        else
          weigh_heads<S, count>(*tile, ahead, weights, v_dim, total);
      });
      std::swap(tile, ahead);
    }
    for (int64_t h = 0; h < heads; ++h) {
      float* out = partial + (first + h) * partial_step;
      out[0] = highest[h];
      out[1] = weight[h];
      for (int64_t d = 0; d < v_dim; d += kLanes) store(out + 16 + d, load(total + h * v_dim + d));
    }
  }
}

template <class T, class S>
KVF_INLINE void attend_stored(const T* q, int64_t group, const KVLayer& kv, const Span& span, const Span* after,
                              const Scoring& scoring, float* partial, int64_t partial_step) {
  if (kv.dim == 64 && kv.v_dim == 64)
    attend<T, S, 64>(q, group, kv, span, after, scoring, partial, partial_step);
  else if (kv.dim == 128 && kv.v_dim == 128)
    attend<T, S, 128>(q, group, kv, span, after, scoring, partial, partial_step);
  else if (kv.dim % kPairs == 0 && kv.v_dim % kPairs == 0)
    attend<T, S, kPairs>(q, group, kv, span, after, scoring, partial, partial_step);
  else
    attend<T, S, 0>(q, group, kv, span, after, scoring, partial, partial_step);
}

template <class T>
KVF_INLINE void attend_any(const T* q, int64_t group, const KVLayer& kv, const Span& span, const Span* after,
                           const Scoring& scoring, float* partial, int64_t partial_step) {
  if (kv.int8)
    attend_stored<T, int8_t>(q, group, kv, span, after, scoring, partial, partial_step);
  else
    attend_stored<T, T>(q, group, kv, span, after, scoring, partial, partial_step);
}

}  // namespace
}  // namespace kvferry
