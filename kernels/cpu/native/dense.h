// Dense layers: y = x @ weight.T + bias of bfloat16 x, over panels of any form (see forms.h).
#pragma once

#include "code_product.h"
#include "product.h"

#if defined(__AMX_BF16__)
#include "dense_tiles.h"
#endif

namespace kvferry {
namespace {

// Many rows in bfloat16 are laid out before they are multiplied: in the order of tiles, or widened to float32.
#if defined(__AMX_BF16__)
using LaidOut = bf16;
constexpr int64_t kLaidOutBytes = sizeof(bf16);
static_assert(kStepInputs == kPanel);
constexpr bool kFetchesPlaces = true;  // products of laid out rows ask for where they will be stored
constexpr int64_t kPanelsTogether = 1, kBlockStep = kTwoTiles;
KVF_INLINE void lay_out(const bf16* x, int64_t in, int64_t row, bf16* to) { tile_row(x, in, row, to); }
#elif defined(KVF_WIDENS)
using LaidOut = float;
constexpr int64_t kLaidOutBytes = sizeof(float);
static_assert(kPanel % kChunk == 0);
constexpr bool kFetchesPlaces = false;
constexpr int64_t kPanelsTogether = kWidePanels, kBlockStep = kWidenedStep;
KVF_INLINE void lay_out(const bf16* x, int64_t in, int64_t row, float* to) { widen_row(x, in, row, to); }
#else
using LaidOut = bf16;
constexpr int64_t kLaidOutBytes = 0;
constexpr bool kFetchesPlaces = false;
constexpr int64_t kPanelsTogether = 1, kBlockStep = 1;
KVF_INLINE void lay_out(const bf16*, int64_t, int64_t, bf16*) {}
#endif

// Rows of x as the panels of a layer take them: bfloat16 (`step` elements apart), and quantised or laid out where panels need
// it.
struct Inputs {
  const bf16* x;
  int64_t step;
  Quantised codes;
  const LaidOut* laid_out;
};

KVF_INLINE bool lays_out(const Dense& dense, int64_t rows) {
  return kLaidOutBytes > 0 && rows > kUnpreparedRows && !dense.quantised && dense.in % kPanel == 0;
}

// Whether inputs_of() does more than name the rows.
KVF_INLINE bool prepares(const Dense& dense, int64_t rows) { return dense.quantised || lays_out(dense, rows); }

// The rows `own` are quantised or laid out in `memory` (inputs_bytes() of all rows); all rows must be before a product.
KVF_INLINE Inputs inputs_of(const Dense& dense, const bf16* x, int64_t step, int64_t rows, uint8_t* memory, Share own) {
  auto* laid_out = lays_out(dense, rows) ? reinterpret_cast<LaidOut*>(memory) : nullptr;
  const Inputs inputs{x, step, Quantised(memory, rows, dense.in), laid_out};
  for (int64_t row = own.begin; dense.quantised && row < own.end; ++row) inputs.codes.quantise(row, x + row * step);
  for (int64_t row = own.begin; laid_out != nullptr && row < own.end; ++row) lay_out(x + row * step, dense.in, row, laid_out);
  return inputs;
}

// One panel of a layer, or two that are multiplied side by side; second: below 0 where there is none.
struct PanelPair {
  int64_t first, second;
  int64_t count() const { return second < 0 ? 1 : 2; }
  int64_t at(int64_t which) const { return which == 0 ? first : second; }
};

// Calls emit(which, row, values [kPanel]) for rows [first, first + rows) of the inputs and each of the panels, without bias.
// place(which, row): where that row will be stored, of which tiles ask for the line beforehand.
template <class Place, class Emit>
KVF_INLINE void multiply(const Inputs& inputs, int64_t first, int64_t rows, const Dense& dense, PanelPair pair, Place place,
                         Emit emit) {
  const auto data = [&](int64_t panel) { return dense.panels[panel < dense.count() ? panel : panel - 1].data; };
#if defined(KVF_WIDENS)
  if (inputs.laid_out != nullptr) {
    for (int64_t which = 0, count; which < pair.count(); which += count) {
      count = pair.count() - which < kWidePanels ? pair.count() - which : kWidePanels;
      const uint8_t* panels[] = {data(pair.at(which)), data(pair.at(which + count - 1))};
      widened_products(inputs.laid_out + first * dense.in, dense.in, rows, panels, count, data(pair.at(which + count - 1) + 1),
                       [&](int64_t p, int64_t row, float* values) { emit(which + p, first + row, values); });
    }
    return;
  }
#endif
  for (int64_t which = 0; which < pair.count(); ++which) {
    const Panel& weights = dense.panels[pair.at(which)];
    const uint8_t* next = data(pair.at(which) + 1);
    const auto shifted = [&](int64_t row, float* values) { emit(which, first + row, values); };
#if defined(__AMX_BF16__)
    if (inputs.laid_out != nullptr) {
      tiled_products(inputs.laid_out + first * dense.in, dense.in, rows, weights.data, next, shifted,
                     [&](int64_t row) { return place(which, first + row); });
      continue;
    }
#endif
    (void)place;
    if (weights.form == Form::bf16)
      panel_product(inputs.x + first * inputs.step, inputs.step, rows, weights.data, dense.in / 2, shifted);
    else
      code_product(inputs.codes, first, rows, weights, next, [&](int64_t row, float* values) { emit(which, row, values); });
  }
}

KVF_INLINE Floats biased(const Dense& dense, int64_t column, Floats value) {
  return dense.bias == nullptr ? value : value + load(dense.bias + column);
}

// Rows of x that stay in the second-level cache while the panels pass by.
KVF_INLINE int64_t row_block(int64_t in) {
#if defined(__AMX_BF16__)  // as many as a mebibyte holds, for tiles ask much of the memory that weights come from
  const int64_t rows = (int64_t{1} << 19) / in / kTwoTiles * kTwoTiles;
  return rows < 64 ? 64 : rows > 512 ? 512 : rows;
#elif defined(KVF_WIDENS)  // the same
  const int64_t rows = (int64_t{1} << 18) / in / kWidenedStep * kWidenedStep;
  return rows < 72 ? 72 : rows > kWidenedRows ? kWidenedRows : rows;
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

// A phase whose items are panels, the first `panels` of a layer, side by side where `together` is 2, for as many of `rows` rows at
// a time as stay in the cache.
struct PanelItems {
  int64_t rows, block, panels, together;

  PanelItems(int64_t all, const Dense& dense, int64_t count, bool side_by_side)
      : rows(all), block(row_block(dense.in)), panels(count),
        together(side_by_side && kPanelsTogether > 1 && lays_out(dense, all) ? kPanelsTogether : 1) {
    if (together > 1 && groups() < kFewGroups && block >= rows && rows >= 2 * kBlockStep)  // else threads' shares would differ
      block = ((rows + 1) / 2 + kBlockStep - 1) / kBlockStep * kBlockStep;
  }
  int64_t groups() const { return (panels + together - 1) / together; }
  int64_t count() const { return (rows + block - 1) / block * groups(); }
  int64_t panel(int64_t item) const { return item % groups() * together; }
  PanelPair pair(int64_t item) const {
    const int64_t first = panel(item);
    return {first, together > 1 && first + 1 < panels ? first + 1 : -1};
  }
  int64_t first(int64_t item) const { return item / groups() * block; }
  int64_t height(int64_t item) const { return rows - first(item) < block ? rows - first(item) : block; }

 private:
  static constexpr int64_t kFewGroups = 16;
};

// One item of y [rows, out] (`y_step` elements apart) = the dense layer.
template <class T>
KVF_INLINE void dense_item(const Dense& dense, const Inputs& inputs, const PanelItems& items, int64_t item, T* y, int64_t y_step) {
  const int64_t left = items.panel(item) * kPanel;
  const auto place = [&](int64_t which, int64_t row) { return y + row * y_step + left + which * kPanel; };
  const int64_t first = items.first(item), end = inputs.laid_out != nullptr && kFetchesPlaces ? first : first + items.height(item);
  for (int64_t row = first; row < end; ++row) __builtin_prefetch(place(0, row), 1);  // far apart
  multiply(inputs, first, items.height(item), dense, items.pair(item), place, [&](int64_t which, int64_t row, float* values) {
    const int64_t column = left + which * kPanel;
    put_out(dense, column, dense.out - column, values, place(which, row));
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
  const PanelItems items(t.rows, t.dense, t.dense.count(), true);
  barrier.each(items.count(), member, [&] {
    return [&, all = inputs({0, 0})](int64_t item) {
      dense_item(t.dense, all, items, item, static_cast<T*>(t.y), t.dense.out);
    };
  });
}

void run_dense_of_heads(void* argument, int member, int, Barrier& barrier) {
  const HeadsTask& t = *static_cast<HeadsTask*>(argument);
  const PanelItems items(t.rows, t.dense, t.heads * t.panels(), false);
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
