// Attention of a batch of single query tokens: each row's positions in chunks that threads share and merge at the end, by
// vectors, or by products of small matrices where many query heads share a K/V head; or block by block as in prefill.
#pragma once

#include "attention.h"
#include "blocks.h"
#include "chunks.h"
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

// Calls visit(piece, the next piece or null) for one of `parts` parts of a batch's work, which is cut where the positions
// read so far pass the part's share of all.
template <class Visit>
KVF_INLINE void visit_part(const Batch& batch, int64_t kv_heads, int64_t window, int64_t part, int64_t parts, Visit visit) {
  int64_t all = 0, done = 0;
  for (int64_t row = 0; row < batch.rows; ++row) {
    const Chunks chunks = chunks_of(batch.total_len[row], window);
    all += kv_heads * chunks.count * chunks.length;
  }
  const int64_t from = (part * all + parts - 1) / parts, to = ((part + 1) * all + parts - 1) / parts;
  Piece held{};
  bool holding = false;
  for (int64_t row = 0; row < batch.rows && done < to; ++row) {
    const Chunks chunks = chunks_of(batch.total_len[row], window);
    if (const int64_t of_row = kv_heads * chunks.count * chunks.length; done + of_row <= from) {
      done += of_row;
      continue;
    }
    const int32_t* table = batch.block_table + row * batch.table_step;
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t c = 0; c < chunks.count; ++c, done += chunks.length) {
        if (done < from || done >= to) continue;
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

// The same for all parts, with the other members.
template <class Visit>
KVF_INLINE void visit_pieces(const Batch& batch, int64_t kv_heads, int64_t window, int member, Barrier& barrier, Visit visit) {
  const int64_t parts = barrier.pieces();
  barrier.each(batch.rows == 0 ? 0 : parts, member, [&] {
    return [&](int64_t part) { visit_part(batch, kv_heads, window, part, parts, visit); };
  });
}

KVF_INLINE float* partial_of(float* partial, int64_t row, int64_t head, int64_t heads, int64_t dim) {
  return partial + (row * heads + head) * kMaxChunks * partial_floats(dim);
}

template <class T>
void run_decode(void* argument, int member, int, Barrier& barrier) {
  const DecodeTask& t = *static_cast<DecodeTask*>(argument);
  const int64_t dim = t.kv.dim, v_dim = t.kv.v_dim, group = t.heads / t.kv.heads, step = partial_floats(v_dim);
  visit_pieces(t.batch, t.kv.heads, t.window, member, barrier, [&](const Piece& piece, const Span* after) {
    const int64_t head = piece.span.head * group;
    attend_any(static_cast<const T*>(t.q) + (piece.row * t.heads + head) * dim, group, t.kv, piece.span, after, t.scoring,
               partial_of(t.partial, piece.row, head, t.heads, v_dim) + piece.chunk * step, kMaxChunks * step);
  });
  barrier.wait(member);
  barrier.each_run(t.batch.rows * t.heads, member, [&](Share heads) {
    for (int64_t i = heads.begin; i < heads.end; ++i)
      merge(t.partial + i * kMaxChunks * step, chunks_of(t.batch.total_len[i / t.heads], t.window).count, v_dim,
            t.scoring.sink(i % t.heads), static_cast<T*>(t.out) + i * v_dim);
  });
}

// Chunks of rows whose K/V heads have wide groups of query heads: partial results of `together` rows at a time.
void run_decode_wide(void* argument, int member, int, Barrier& barrier) {
  const DecodeTask& t = *static_cast<DecodeTask*>(argument);
  const HeadDims dims = t.kv.dims();
  const int64_t group = t.heads / t.kv.heads, step = partial_floats(dims.v);
  uint8_t* memory = t.memory + member * t.memory_step;
  const PackedPositions packed = packed_at(memory, kBlock, dims, t.kv.int8);
  const BlockBuffers b(memory + packed_bytes(kBlock, dims), group, dims);
  Scoring scoring = t.scoring;
  scoring.sinks = nullptr;  // they are merged with the chunks
  for (int64_t first = 0; first < t.batch.rows; first += t.together) {
    const int64_t left = t.batch.rows - first, rows = left < t.together ? left : t.together;
    const auto attend_item = [&](int64_t item) {
      const int64_t chunk = item % kMaxChunks, head = item / kMaxChunks % t.kv.heads, each = item / kMaxChunks / t.kv.heads;
      const int64_t row = first + each, total = t.batch.total_len[row];
      const Chunks chunks = wide_chunks(total, t.window);
      if (chunk >= chunks.count) return;
      const int64_t begin = chunks.first + chunk * chunks.length, end = begin + chunks.length;
      const bf16* q = static_cast<const bf16*>(t.q) + (row * t.heads + head * group) * dims.k;
      for (int64_t h = 0; h < group; ++h) b.ask(h, q + h * dims.k);
      begin_rows(b, group, scoring, 0, group);
      const Sequence sequence{t.kv, t.batch.block_table + row * t.batch.table_step, head, 0, scoring};
      attend_positions(sequence, begin, end < total ? end : total, b, group, packed);
      float* partial = partial_of(t.partial, each, head * group, t.heads, dims.v) + chunk * step;
      for (int64_t h = 0; h < group; ++h, partial += kMaxChunks * step) {
        partial[0] = b.highest[h], partial[1] = b.weight[h];
        copy(partial + 16, b.total + h * dims.v, dims.v);
      }
    };
    barrier.each(rows * t.kv.heads * kMaxChunks, member, [&] { return attend_item; });
    barrier.wait(member);
    barrier.each_run(rows * t.heads, member, [&](Share heads) {
      for (int64_t i = heads.begin; i < heads.end; ++i) {
        const int64_t row = first + i / t.heads, head = i % t.heads;
        merge(t.partial + i * kMaxChunks * step, wide_chunks(t.batch.total_len[row], t.window).count, dims.v,
              t.scoring.sink(head), static_cast<bf16*>(t.out) + (row * t.heads + head) * dims.v);
      }
    });
    barrier.wait(member);
  }
}

// Row by row in the arithmetic of prefill: a token's result is the same, bit for bit, as in a chunk of its prompt.
void run_decode_blocks(void* argument, int member, int, Barrier& barrier) {
  const DecodeTask& t = *static_cast<DecodeTask*>(argument);
  const int64_t group = t.heads / t.kv.heads;
  const auto visit = [&](int64_t item) {
    const int64_t row = item / t.kv.heads, head = item % t.kv.heads;
    const int64_t at = row * t.heads + head * group;
    const Sequence sequence{t.kv, t.batch.block_table + row * t.batch.table_step, head, t.window, t.scoring};
    attend_token(sequence, t.batch.total_len[row] - 1, static_cast<const bf16*>(t.q) + at * t.kv.dim, group,
                 t.memory + member * t.memory_step, static_cast<bf16*>(t.out) + at * t.kv.v_dim);
  };
  barrier.each(t.batch.rows * t.kv.heads, member, [&] { return visit; });
}

}  // namespace
}  // namespace kvferry
