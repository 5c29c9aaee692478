// Causal attention of a run of query tokens, in bfloat16, to keys and values that a dense layer makes of cached latents
// (kernels/latent.py): those of some heads and a span of positions are made and packed at a time, in the arithmetic of
// blocks.h, and query rows go on from span to span.
#pragma once

#include "blocks.h"

namespace kvferry {
namespace {

// Heads [head, end_head) and positions [first, end) of the task: a span, or what is left.
struct Expansion {
  const ExpandedTask& task;
  int64_t head, end_head, first, end;

  int64_t heads() const { return end_head - head; }
  int64_t panels() const { return (end - first + kPanel - 1) / kPanel; }
  int64_t blocks() const { return (end - first + kBlock - 1) / kBlock; }
  bool last() const { return end == task.total_len; }

  PackedPositions of(int64_t each, int64_t position) const {
    return packed_at(task.packed + (each - head) * packed_bytes(task.span, task.dims), task.span, task.dims, false)
        .from(position - first, task.dims);
  }

  bf16* latent(int64_t position) const {
    return reinterpret_cast<bf16*>(task.latents) + (position - first) * task.kv.dim;
  }
};

KVF_INLINE void copy_stored(const bf16* row, int64_t dim, bf16* to) { copy(to, row, dim); }

KVF_INLINE void copy_stored(const int8_t* row, int64_t dim, bf16* to) {
  const float scale = scale_of(row, dim);
  for (int64_t d = 0; d < dim; d += kLanes) store(to + d, load(row + d) * scale);
}

// What is cached of the panel's positions; behind the span, zeros.
template <class S>
KVF_INLINE void gather_panel(const Expansion& e, int64_t position) {
  const KVLayer& kv = e.task.kv;
  Tile<S> tile;
  tile.find(kv, 0, e.task.table, position, position + kPanel < e.end ? position + kPanel : e.end);
  for (int64_t j = 0; j < tile.count; ++j) copy_stored(tile.k[j], kv.dim, e.latent(position + j));
  for (int64_t j = tile.count; j < kPanel; ++j) std::memset(e.latent(position + j), 0, kv.dim * sizeof(bf16));
}

// A head's K and V of a block of positions. memory: expanded_memory().
inline __attribute__((noinline)) void expand_block(const Expansion& e, int64_t head, int64_t position, uint8_t* memory) {
  const ExpandedTask& t = e.task;
  const int64_t rows = (e.end - position < kBlock ? e.end - position + kPanel - 1 : kBlock) / kPanel * kPanel;
  const int64_t plain = t.dims.k - t.rotated, made = plain + t.dims.v, row_step = t.rotated + made;
  auto* k = reinterpret_cast<bf16*>(memory);
  for (int64_t row = 0; row < rows; ++row) copy(k + row * row_step, e.latent(position + row), t.rotated);
  for (int64_t column = 0; column < made; column += kPanel)
    panel_product(e.latent(position) + t.rotated, t.kv.dim, rows, t.expand.panels[(head * made + column) / kPanel].data,
                  t.expand.in / 2, [&](int64_t row, const float* values) {
                    bf16* to = k + row * row_step + t.rotated + column;
                    for (int c = 0; c < kPanel; c += kLanes) store(to + c, load(values + c));
                  });
  for (int64_t base = 0; base < rows; base += kPanel) {
    const PackedPositions to = e.of(head, position + base);
    const bf16 *of_k[kPanel], *of_v[kPanel];
    for (int64_t j = 0; j < kPanel; ++j) of_k[j] = k + (base + j) * row_step, of_v[j] = of_k[j] + t.dims.k;
    pack_k(of_k, t.dims.k, to.k);
    pack_v(of_v, t.dims.v, to.v, to.v_step);
  }
}

// A tile of tokens over the span's positions.
inline __attribute__((noinline)) void attend_span(const Expansion& e, int64_t head, int64_t tile, uint8_t* memory) {
  const ExpandedTask& t = e.task;
  const int64_t begin = tile * kPrefillRows, left = t.query_len - begin, rows = left < kPrefillRows ? left : kPrefillRows;
  const int64_t computed = t.total_len - t.query_len, seen = computed + begin + rows, end = seen < e.end ? seen : e.end;
  if (end <= e.first && !e.last()) return;
  const BlockBuffers b(memory, kPrefillRows, t.dims);
  float* carried = t.carried + ((head - e.head) * expanded_tiles(t) + tile) * carried_floats(t.dims);
  if (e.first == 0)
    begin_rows(b, rows, t.scoring, head, 1);
  else
    copy(b.total, carried, carried_floats(t.dims));
  for (int64_t row = 0; row < rows; ++row)
    b.ask(row, static_cast<const bf16*>(t.q) + ((begin + row) * t.heads + head) * t.dims.k);
  for (int64_t at = e.first; at < end; at += kBlock) {
    const int64_t count = end - at < kBlock ? end - at : kBlock, width = (count + kPanel - 1) / kPanel * kPanel;
    attend_block(b, rows, e.of(head, at), width, {1, at, computed + begin, 0}, t.scoring);
  }
  if (!e.last()) {
    copy(carried, b.total, carried_floats(t.dims));
    return;
  }
  for (int64_t row = 0; row < rows; ++row)
    end_row(b, row, static_cast<bf16*>(t.out) + ((begin + row) * t.heads + head) * t.dims.v);
}

void run_expanded(void* argument, int member, int, Barrier& barrier) {
  const ExpandedTask& t = *static_cast<ExpandedTask*>(argument);
  const int64_t groups = (t.heads + t.together - 1) / t.together, tiles = expanded_tiles(t);
  uint8_t* memory = t.memory + member * t.memory_step;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t first = 0; first < t.total_len; first += t.span) {
      const Expansion e{t, t.heads * group / groups, t.heads * (group + 1) / groups, first,
                        first + t.span < t.total_len ? first + t.span : t.total_len};
      barrier.each(e.panels(), member, [&] {
        return [&](int64_t panel) {
          const int64_t position = first + panel * kPanel;
          t.kv.int8 ? gather_panel<int8_t>(e, position) : gather_panel<bf16>(e, position);
        };
      });
      barrier.wait(member);
      barrier.each(e.heads() * e.blocks(), member, [&] {
        return [&](int64_t item) {
          expand_block(e, e.head + item / e.blocks(), first + item % e.blocks() * kBlock, memory);
        };
      });
      barrier.wait(member);
      barrier.each(e.heads() * tiles, member, [&] {
        return [&](int64_t item) {  // late tokens see more: they come first
          attend_span(e, e.head + item % e.heads(), tiles - 1 - item / e.heads(), memory);
        };
      });
      barrier.wait(member);
    }
}

}  // namespace
}  // namespace kvferry
