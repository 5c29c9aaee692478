// Attention of one query token per sequence over the paged cache, read in place: each K and V is read from memory once
// for all query heads that share it. Online softmax over tiles (Milakov and Gimelshein 2018), chunks merged at the end.
#pragma once

#include "rope.h"
#include "types.h"
#include "vector.h"

namespace kvferry {
namespace {

constexpr int kTile = 64;  // positions
constexpr int kColumns = kLanes == 16 ? 4 : 2;
constexpr int64_t kMaxDim = 512;

KVF_INLINE Floats dot_step(const float* q, const float* k, Floats total) { return total + load(q) * load(k); }

// Lane-wise products of q and k [dim], summed over groups of lanes.
KVF_INLINE Floats dot(const float* q, const float* k, int64_t dim) {
  Floats total{};
  for (int64_t d = 0; d < dim; d += kLanes) total = dot_step(q + d, k + d, total);
  return total;
}

KVF_INLINE Floats dot(const bf16* q, const bf16* k, int64_t dim) {
  Floats total{};
  int64_t d = 0;
#if defined(__AVX512BF16__)
  for (; d + 32 <= dim; d += 32)
    total = (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_loadu_si512(q + d),
                                     (__m512bh)_mm512_loadu_si512(k + d));
#endif
  for (; d < dim; d += kLanes) total = total + load(q + d) * load(k + d);
  return total;
}

// Where the K and V of up to kTile positions lie.
template <class T>
struct Tile {
  const T *k[kTile], *v[kTile];
  int64_t count = 0;

  void find(const KVLayer& kv, int64_t head, const int32_t* table, int64_t begin, int64_t end) {
    count = end - begin < kTile ? end - begin : kTile;
    int64_t block = begin / kv.block_size, slot = begin % kv.block_size;
    for (int64_t j = 0; j < count; ++j) {
      k[j] = slot_of<T>(kv, table[block], slot, head);
      v[j] = k[j] + kv.kv_step;
      if (++slot == kv.block_size) slot = 0, ++block;
    }
  }
};

template <class T>
KVF_INLINE void fetch(const T* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + d);
}

// scores [kTile] = scale * q . k[j] of the tile's positions, -inf behind them, up to a whole vector. The rows of `ahead`
// are fetched meanwhile: blocks lie apart, which no hardware prefetcher foresees.
template <class T, int Dim>
KVF_INLINE void score_tile(const T* q, const Tile<T>& tile, const Tile<T>* ahead, int64_t dim, float scale,
                           float* scores) {
  const int64_t width = Dim > 0 ? Dim : dim, count = tile.count;
  const T* const* k = tile.k;
  for (int64_t j = 0; j < count; j += kLanes) {
    if (ahead != nullptr)
      for (int64_t i = j; i < j + kLanes && i < ahead->count; ++i) fetch(ahead->k[i], width);
    Floats parts[kLanes];
    if (j + kLanes <= count) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) parts[i] = dot(q, k[j + i], width);
      store(scores + j, sums(parts) * scale);
    } else {
      for (int i = 0; i < kLanes; ++i) parts[i] = j + i < count ? dot(q, k[j + i], width) : Floats{};
      store(scores + j, sums(parts) * scale);
      for (int64_t i = count; i < j + kLanes; ++i) scores[i] = -__builtin_inff();
    }
  }
}

// total [Heads][dim] (columns from `column` on) += sum over j of weights[head][j] * v[j].
template <class T, int Heads, int Columns>
KVF_INLINE void weigh(const Tile<T>& tile, const Tile<T>* ahead, const float* weights, int64_t dim, int64_t column,
                      float* total) {
  Floats sum[Heads][Columns];
  for (int h = 0; h < Heads; ++h)
    for (int c = 0; c < Columns; ++c) sum[h][c] = load(total + h * dim + column + c * kLanes);
  for (int64_t j = 0; j < tile.count; ++j) {
    const T* row = tile.v[j] + column;
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

template <class T, int Heads>
inline __attribute__((noinline)) void weigh_heads(const Tile<T>& tile, const Tile<T>* ahead, const float* weights,
                                                  int64_t dim, float* total) {
  int64_t column = 0;
  for (; column + kColumns * kLanes <= dim; column += kColumns * kLanes, ahead = nullptr)
    weigh<T, Heads, kColumns>(tile, ahead, weights, dim, column, total);
  for (; column < dim; column += kLanes, ahead = nullptr)
    weigh<T, Heads, 1>(tile, ahead, weights, dim, column, total);
}

// Some of a sequence's positions, for one K/V head.
struct Span {
  const int32_t* table;
  int64_t head, begin, end;
};

// Of `group` query heads (q, `dim` apart): partial results over the span, each `partial_step` floats apart. `after`:
// what this thread attends to next, or null.
template <class T, int Dim>
inline __attribute__((noinline)) void attend(const T* q, int64_t group, const KVLayer& kv, const Span& span,
                                             const Span* after, float scale, float* partial, int64_t partial_step) {
  const int64_t dim = kv.dim;
  Tile<T> tiles[2];
  alignas(64) float weights[4 * kTile];
  alignas(64) float total[4 * kMaxDim];
  for (int64_t first = 0; first < group; first += 4) {
    const int64_t heads = group - first < 4 ? group - first : 4;
    float highest[4], weight[4];
    for (int64_t h = 0; h < heads; ++h) {
      highest[h] = -__builtin_inff();
      weight[h] = 0;
    }
    for (int64_t i = 0; i < heads * dim; i += kLanes) store(total + i, Floats{});
    Tile<T>*tile = tiles, *ahead = tiles + 1;
    tile->find(kv, span.head, span.table, span.begin, span.end);
    for (int64_t at = span.begin; at < span.end; at += kTile) {
      if (at + kTile < span.end)
        ahead->find(kv, span.head, span.table, at + kTile, span.end);
      else if (after != nullptr)
        ahead->find(kv, after->head, after->table, after->begin, after->end);
      else
        ahead->count = 0;
      for (int64_t h = 0; h < heads; ++h) {
        float* scores = weights + h * kTile;
        score_tile<T, Dim>(q + (first + h) * dim, *tile, h == 0 ? ahead : nullptr, dim, scale, scores);
        Floats top = load(scores);
        for (int64_t j = kLanes; j < tile->count; j += kLanes) top = larger(top, load(scores + j));
        const float peak = largest(top), higher = peak > highest[h] ? peak : highest[h];
        Floats added{};
        for (int64_t j = 0; j < tile->count; j += kLanes) {
          const Floats e = exponential(load(scores + j) - higher);
          added = added + e;
          store(scores + j, e);
        }
        if (at == span.begin) {
          weight[h] = sum(added);
        } else {
          const Floats kept = exponential(splat(highest[h] - higher));
          weight[h] = weight[h] * kept[0] + sum(added);
          for (int64_t d = 0; d < dim; d += kLanes) store(total + h * dim + d, load(total + h * dim + d) * kept);
        }
        highest[h] = higher;
      }
      switch (heads) {
        case 1: weigh_heads<T, 1>(*tile, ahead, weights, dim, total); break;
        case 2: weigh_heads<T, 2>(*tile, ahead, weights, dim, total); break;
        case 3: weigh_heads<T, 3>(*tile, ahead, weights, dim, total); break;
        default: weigh_heads<T, 4>(*tile, ahead, weights, dim, total);
      }
      std::swap(tile, ahead);
    }
    for (int64_t h = 0; h < heads; ++h) {
      float* out = partial + (first + h) * partial_step;
      out[0] = highest[h];
      out[1] = weight[h];
      for (int64_t d = 0; d < dim; d += kLanes) store(out + 16 + d, load(total + h * dim + d));
    }
  }
}

template <class T>
KVF_INLINE void attend_any(const T* q, int64_t group, const KVLayer& kv, const Span& span, const Span* after,
                           float scale, float* partial, int64_t partial_step) {
  if (kv.dim == 64)
    attend<T, 64>(q, group, kv, span, after, scale, partial, partial_step);
  else if (kv.dim == 128)
    attend<T, 128>(q, group, kv, span, after, scale, partial, partial_step);
  else
    attend<T, 0>(q, group, kv, span, after, scale, partial, partial_step);
}

// out [dim] of the chunks' partial results, which lie one after the other.
template <class T>
KVF_INLINE void merge(const float* partial, int64_t chunks, int64_t dim, T* out) {
  const int64_t step = partial_floats(dim);
  float highest = partial[0];
  for (int64_t c = 1; c < chunks; ++c) highest = partial[c * step] > highest ? partial[c * step] : highest;
  alignas(64) float shares[kMaxChunks];
  float weight = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    shares[c] = exponential(splat(partial[c * step] - highest))[0];
    weight += shares[c] * partial[c * step + 1];
  }
  const float inverse = 1.0f / weight;
  for (int64_t d = 0; d < dim; d += kLanes) {
    Floats total{};
    for (int64_t c = 0; c < chunks; ++c) total = total + load(partial + c * step + 16 + d) * shares[c];
    store(out + d, total * inverse);
  }
}

// One chunk of a row's positions under one K/V head.
struct Piece {
  Span span;
  int64_t row, chunk;
  bool last;  // of its row and head
};

// Calls visit(piece, the next piece or null) for the member's share of a batch's work, which is cut where the positions
// read so far pass the member's part of all.
template <class Visit>
KVF_INLINE void visit_pieces(const Batch& batch, int64_t kv_heads, int64_t window, int member, int size, Visit visit) {
  int64_t all = 0, done = 0;
  for (int64_t row = 0; row < batch.rows; ++row) {
    const Chunks chunks = chunks_of(batch.total_len[row], window);
    all += kv_heads * chunks.count * chunks.length;
  }
  Piece held{};
  bool holding = false;
  for (int64_t row = 0; row < batch.rows; ++row) {
    const Chunks chunks = chunks_of(batch.total_len[row], window);
    const int32_t* table = batch.block_table + row * batch.table_step;
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t c = 0; c < chunks.count; ++c, done += chunks.length) {
        if (done * size / all != member) continue;
        const int64_t begin = chunks.first + c * chunks.length, end = begin + chunks.length;
        const int64_t total = batch.total_len[row];
        const Piece piece{{table, head, begin, end < total ? end : total}, row, c, c + 1 == chunks.count};
        if (holding) visit(held, &piece.span);
        held = piece;
        holding = true;
      }
  }
  if (holding) visit(held, static_cast<const Span*>(nullptr));
}

KVF_INLINE float* partial_of(float* partial, int64_t row, int64_t head, int64_t heads, int64_t dim) {
  return partial + (row * heads + head) * kMaxChunks * partial_floats(dim);
}

template <class T>
void run_decode(void* argument, int member, int size, Barrier& barrier) {
  const DecodeTask& t = *static_cast<DecodeTask*>(argument);
  const int64_t dim = t.kv.dim, group = t.heads / t.kv.heads, step = partial_floats(dim);
  visit_pieces(t.batch, t.kv.heads, t.window, member, size, [&](const Piece& piece, const Span* after) {
    const int64_t head = piece.span.head * group;
    attend_any(static_cast<const T*>(t.q) + (piece.row * t.heads + head) * dim, group, t.kv, piece.span, after, t.scale,
               partial_of(t.partial, piece.row, head, t.heads, dim) + piece.chunk * step, kMaxChunks * step);
  });
  barrier.wait(member);
  const Share rows = share(t.batch.rows * t.heads, member, size);
  for (int64_t i = rows.begin; i < rows.end; ++i)
    merge(t.partial + i * kMaxChunks * step, chunks_of(t.batch.total_len[i / t.heads], t.window).count, dim,
          static_cast<T*>(t.out) + i * dim);
}

}  // namespace
}  // namespace kvferry
