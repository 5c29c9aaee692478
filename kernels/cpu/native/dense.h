// Dense layers: y = x @ weight.T + bias of bfloat16 x, over panels of any form (see forms.h).
#pragma once

#include "code_product.h"
#include "product.h"

#if defined(__AMX_BF16__)
#include "dense_tiles.h"
#endif

namespace kvferry {
namespace {

// Rows of x as the panels of a layer take them: bfloat16 (`step` elements apart), and quantised or as tiles where panels need
// it.
struct Inputs {
  const bf16* x;
  int64_t step;
  Quantised codes;
  const bf16* tiled;
};

#if defined(__AMX_BF16__)
constexpr bool kTakesTiles = true;
static_assert(kStepInputs == kPanel);
#else
constexpr bool kTakesTiles = false;
#endif

// Whether the rows are multiplied by tiles that read them in an order of their own, in whole steps.
KVF_INLINE bool takes_tiles(const Dense& dense, int64_t rows) {
  return kTakesTiles && rows > kUntiledRows && !dense.quantised && dense.in % kPanel == 0;
}

// Whether inputs_of() does more than name the rows.
KVF_INLINE bool prepares(const Dense& dense, int64_t rows) { return dense.quantised || takes_tiles(dense, rows); }

// The rows `own` are quantised or tiled into `memory` (inputs_bytes() of all rows); all rows must be before a product.
KVF_INLINE Inputs inputs_of(const Dense& dense, const bf16* x, int64_t step, int64_t rows, uint8_t* memory, Share own) {
  auto* tiled = takes_tiles(dense, rows) ? reinterpret_cast<bf16*>(memory) : nullptr;
  const Inputs inputs{x, step, Quantised(memory, rows, dense.in), tiled};
  for (int64_t row = own.begin; dense.quantised && row < own.end; ++row) inputs.codes.quantise(row, x + row * step);
#if defined(__AMX_BF16__)
  for (int64_t row = own.begin; tiled != nullptr && row < own.end; ++row) tile_row(x + row * step, dense.in, row, tiled);
#endif
  return inputs;
}

// Calls emit(row, values [kPanel]) for rows [first, first + rows) of the inputs, without bias. place(row): where that row will
// be stored, of which tiles ask for the line beforehand.
template <class Place, class Emit>
KVF_INLINE void multiply(const Inputs& inputs, int64_t first, int64_t rows, const Dense& dense, int64_t panel, Place place,
                         Emit emit) {
  const Panel &weights = dense.panels[panel], &next = dense.panels[panel + 1 < dense.count() ? panel + 1 : panel];
  const auto shifted = [&](int64_t row, float* values) { emit(first + row, values); };
#if defined(__AMX_BF16__)
  if (inputs.tiled != nullptr)
    return tiled_products(inputs.tiled + first * dense.in, dense.in, rows, weights.data, next.data, shifted,
                          [&](int64_t row) { return place(first + row); });
#endif
  (void)place;
  if (weights.form == Form::bf16)
    panel_product(inputs.x + first * inputs.step, inputs.step, rows, weights.data, dense.in / 2, shifted);
  else
    code_product(inputs.codes, first, rows, weights, next.data, emit);
}

KVF_INLINE Floats biased(const Dense& dense, int64_t column, Floats value) {
  return dense.bias == nullptr ? value : value + load(dense.bias + column);
}

// Rows of x that stay in the second-level cache while the panels pass by.
KVF_INLINE int64_t row_block(int64_t in) {
#if defined(__AMX_BF16__)  // as many as a mebibyte holds, for tiles ask much of the memory that weights come from
  const int64_t rows = (int64_t{1} << 19) / in / kTwoTiles * kTwoTiles;
  return rows < 64 ? 64 : rows > 512 ? 512 : rows;
#else
  (void)in;
  return 192;
#endif
}

// to = values + bias of the layer's outputs from `column` on: the panel's, or `left` of them where those are fewer.
template <class T>
KVF_INLINE void put_out(const Dense& dense, int64_t column, int64_t left, float* values, T* to) {
  const bool whole = left >= kPanel;
  for (int c = 0; c < kPanel && (whole || c < left); c += kLanes) {
    const Floats value = biased(dense, column + c, load(values + c));
    if (whole || c + kLanes <= left) {
      store(to + c, value);
    } else {
      store(values + c, value);
      for (int i = c; i < left; ++i) store_one(to + i, values[i]);
    }
  }
}

// A phase whose items are panels, the first `panels` of a layer, for as many of `rows` rows at a time as stay in the cache.
struct PanelItems {
  int64_t rows, block, panels;
  PanelItems(int64_t all, int64_t in, int64_t count) : rows(all), block(row_block(in)), panels(count) {}
  int64_t count() const { return (rows + block - 1) / block * panels; }
  int64_t panel(int64_t item) const { return item % panels; }
  int64_t first(int64_t item) const { return item / panels * block; }
  int64_t height(int64_t item) const { return rows - first(item) < block ? rows - first(item) : block; }
};

// One item of y [rows, out] (`y_step` elements apart) = the dense layer.
template <class T>
KVF_INLINE void dense_item(const Dense& dense, const Inputs& inputs, const PanelItems& items, int64_t item, T* y, int64_t y_step) {
  const int64_t left = items.panel(item) * kPanel;
  const auto place = [&](int64_t row) { return y + row * y_step + left; };
  const int64_t first = items.first(item), end = inputs.tiled != nullptr ? first : first + items.height(item);
  for (int64_t row = first; row < end; ++row) __builtin_prefetch(place(row), 1);  // far apart
  multiply(inputs, first, items.height(item), dense, items.panel(item), place, [&](int64_t row, float* values) {
    put_out(dense, left, dense.out - left, values, place(row));
  });
}

template <class T>
void run_dense(void* argument, int member, int, Barrier& barrier) {
  const DenseTask& t = *static_cast<DenseTask*>(argument);
  const auto inputs = [&](Share rows) {
    return inputs_of(t.dense, static_cast<const bf16*>(t.x), t.x_step, t.rows, t.memory, rows);
  };
  if (prepares(t.dense, t.rows)) {
    barrier.each_run(t.rows, member, inputs);
    barrier.wait(member);
  }
  const PanelItems items(t.rows, t.dense.in, t.dense.count());
  barrier.each(items.count(), member, [&] {
    return [&, all = inputs({0, 0})](int64_t item) {
      dense_item(t.dense, all, items, item, static_cast<T*>(t.y), t.dense.out);
    };
  });
}

void run_dense_of_heads(void* argument, int member, int, Barrier& barrier) {
  const HeadsTask& t = *static_cast<HeadsTask*>(argument);
  const PanelItems items(t.rows, t.dense.in, t.heads * t.panels());
  const auto visit = [&](int64_t item) {
    const int64_t base = items.first(item), panel = items.panel(item);
    const int64_t head = panel / t.panels(), left = panel % t.panels() * kPanel;
    bf16* y = static_cast<bf16*>(t.y) + (base * t.heads + head) * t.out + left;
    panel_product(static_cast<const bf16*>(t.x) + base * t.x_step + head * t.head_step, t.x_step, items.height(item),
                  t.dense.panels[panel].data, t.dense.in / 2, [&](int64_t row, float* values) {
                    put_out(t.dense, panel * kPanel, t.out - left, values, y + row * t.heads * t.out);
                  });
  };
  barrier.each(items.count(), member, [&] { return visit; });
}

}  // namespace
}  // namespace kvferry
