// Attention of a batch of single query tokens, in two arithmetics: each row's positions in chunks that threads share and
// merge at the end, or block by block as in prefill.
#pragma once

#include "attention.h"
#include "blocks.h"
#include "types.h"

namespace kvferry {
namespace {

// out [dim] of the chunks' partial results, which lie one after the other, and of the head's sink.
template <class T>
KVF_INLINE void merge(const float* partial, int64_t chunks, int64_t dim, float sink, T* out) {
  const int64_t step = partial_floats(dim);
  float highest = partial[0] < sink ? sink : partial[0];
  for (int64_t c = 1; c < chunks; ++c) highest = partial[c * step] > highest ? partial[c * step] : highest;
  alignas(64) float shares[kMaxChunks];
  float weight = exponential(splat(sink - highest))[0];
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
    attend_any(static_cast<const T*>(t.q) + (piece.row * t.heads + head) * dim, group, t.kv, piece.span, after, t.scoring,
               partial_of(t.partial, piece.row, head, t.heads, dim) + piece.chunk * step, kMaxChunks * step);
  });
  barrier.wait(member);
  const Share rows = share(t.batch.rows * t.heads, member, size);
  for (int64_t i = rows.begin; i < rows.end; ++i)
    merge(t.partial + i * kMaxChunks * step, chunks_of(t.batch.total_len[i / t.heads], t.window).count, dim,
          t.scoring.sink(i % t.heads), static_cast<T*>(t.out) + i * dim);
}

// Row by row in the arithmetic of prefill: a token's result is the same, bit for bit, as in a chunk of its prompt.
void run_decode_blocks(void* argument, int member, int, Barrier& barrier) {
  const DecodeTask& t = *static_cast<DecodeTask*>(argument);
  const int64_t dim = t.kv.dim, group = t.heads / t.kv.heads;
  barrier.each(t.batch.rows * t.kv.heads, member, [&](int64_t item) {
    const int64_t row = item / t.kv.heads, head = item % t.kv.heads;
    const int64_t at = (row * t.heads + head * group) * dim;
    const Sequence sequence{t.kv, t.batch.block_table + row * t.batch.table_step, head, t.window, t.scoring};
    attend_token(sequence, t.batch.total_len[row] - 1, static_cast<const bf16*>(t.q) + at, group,
                 t.memory + member * t.memory_step, static_cast<bf16*>(t.out) + at);
  });
}

}  // namespace
}  // namespace kvferry
