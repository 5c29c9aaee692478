// Products of bfloat16 where no instruction multiplies it: both sides are widened to float32. Rows of x are widened first. A
// panel is widened in registers for few rows, and once into the caches for many. Sums of an output are one chain in the order
// of the inputs, whichever way they are made.
#pragma once

#include "forms.h"
#include "vector.h"

#define KVF_WIDENS

namespace kvferry {
namespace {

constexpr int kParts = kPanel / kLanes;
constexpr int kAhead = 8192;  // bytes of weights prefetched ahead

// Registers of 16 lanes are enough to widen a panel for as many rows as are multiplied at once, and for tiles of 64 outputs: these
// take 10 loads for 24 products, where a vector of 64 bytes may be loaded only once a cycle and two products are made.
constexpr bool kWide = kLanes == 16;
constexpr int kFewRows = kWide ? 12 : 2;       // rows that are multiplied at once by a panel that is widened meanwhile
constexpr int kTileRows = 6;                   // and by one that is widened already
constexpr int kTogether = kWide ? kParts : 1;  // vectors of outputs that one number of x is multiplied with
constexpr int kWidePanels = kWide ? 2 : 1, kOutputs = kWidePanels * kPanel;  // of panels that are widened side by side
constexpr int64_t kInputs = kWide ? 192 : 128;  // inputs of rows that are widened at a time
constexpr int64_t kPanelInputs = 96;            // and of panels side by side: half a first-level cache
constexpr int64_t kChunk = 16;                  // inputs of a row that lie together

// Where rows of x lie: input i of row r at r * row + i / kChunk * chunk + i % kChunk.
template <int Row, int Chunk>
struct RowLayout {
  static constexpr int row = Row, chunk = Chunk;
};
using RowByRow = RowLayout<kInputs, kChunk>;
using RowTiles = RowLayout<kChunk, kTileRows * kChunk>;  // kTileRows rows take turns: no two lie in one set of a cache

// Sums of rows, which are `step` floats apart. They begin at zero where they are new, else at what is there, times
// kept[row] where that is given.
struct Sums {
  float* out;
  int64_t step;
  const float* kept;
  bool fresh;

  Sums from(int64_t row) const { return {out + row * step, step, kept == nullptr ? kept : kept + row, fresh}; }

  template <int Rows, int Parts>
  KVF_INLINE void begin(int column, Floats (&total)[Rows][Parts]) const {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
      for (int c = 0; c < Parts; ++c) total[r][c] = fresh ? Floats{} : load(out + r * step + column + c * kLanes);
    if (kept == nullptr) return;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
      for (int c = 0; c < Parts; ++c) total[r][c] = total[r][c] * kept[r];
  }

  template <int Rows, int Parts>
  KVF_INLINE void end(int column, const Floats (&total)[Rows][Parts]) const {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
      for (int c = 0; c < Parts; ++c) store(out + r * step + column + c * kLanes, total[r][c]);
  }
};

// What is fetched while rows are multiplied: a line with each input, `step` bytes further on.
struct Fetched {
  const uint8_t* data;
  int64_t step;
};

// sums += the products of `Rows` rows of x with `inputs` inputs of a panel in bfloat16.
template <class Layout, int Rows>
inline __attribute__((noinline)) void few_tile(const float* x, const uint8_t* panel, int64_t inputs, Sums sums) {
  Floats total[Rows][kParts];
  sums.begin(0, total);
  for (int64_t i = 0; i < inputs; i += kChunk, x += Layout::chunk) {
    const int64_t count = inputs - i < kChunk ? inputs - i : kChunk;
    for (int64_t j = 0; j < count; j += 2, panel += kPanel * 4) {
      __builtin_prefetch(panel + kAhead);
      __builtin_prefetch(panel + kAhead + 64);
#pragma GCC unroll 16
      for (int first = 0; first < kParts; first += kTogether) {
        Words both[kTogether];
#pragma GCC unroll 16
        for (int c = 0; c < kTogether; ++c) both[c] = load_as<Words>(panel + (first + c) * kLanes * 4);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
          const Floats even = splat(x[r * Layout::row + j]), odd = splat(x[r * Layout::row + j + 1]);
#pragma GCC unroll 16
          for (int c = 0; c < kTogether; ++c) {
            total[r][first + c] = total[r][first + c] + even_of(both[c]) * even;
            total[r][first + c] = total[r][first + c] + odd_of(both[c]) * odd;
          }
        }
      }
    }
  }
  sums.end(0, total);
}

// The same of `Width` outputs (kPanel or kOutputs) of widened panels, wide [inputs][kOutputs].
template <class Layout, int Width, int Rows>
inline __attribute__((noinline)) void wide_tile(const float* x, const float* wide, int64_t inputs, Sums sums, Fetched ahead) {
  constexpr int kVectors = kWide ? Width / kLanes : 2;
  for (int part = 0; part < Width; part += kVectors * kLanes) {
    Floats total[Rows][kVectors];
    sums.begin(part, total);
    const float *row = x, *weights = wide + part;
    for (int64_t i = 0; i < inputs; i += kChunk, row += Layout::chunk) {
      const int64_t count = inputs - i < kChunk ? inputs - i : kChunk;
      for (int64_t j = 0; j < count; ++j, weights += kOutputs) {
        if (part == 0) __builtin_prefetch(ahead.data + (i + j) * ahead.step);
        Floats values[kVectors];
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) values[c] = load(weights + c * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
          const Floats number = splat(row[r * Layout::row + j]);
#pragma GCC unroll 4
          for (int c = 0; c < kVectors; ++c) total[r][c] = total[r][c] + values[c] * number;
        }
      }
    }
    sums.end(part, total);
  }
}

template <class Layout, int... Rows>
KVF_INLINE void few_rows(int64_t rows, const float* x, const uint8_t* panel, int64_t inputs, const Sums& sums,
                         std::integer_sequence<int, Rows...>) {
  static constexpr void (*table[])(const float*, const uint8_t*, int64_t, Sums) = {few_tile<Layout, Rows + 1>...};
  table[rows - 1](x, panel, inputs, sums);
}

template <class Layout, int Width, int... Rows>
KVF_INLINE void wide_rows(int64_t rows, const float* x, const float* wide, int64_t inputs, const Sums& sums, Fetched ahead,
                          std::integer_sequence<int, Rows...>) {
  static constexpr void (*table[])(const float*, const float*, int64_t, Sums, Fetched) = {wide_tile<Layout, Width, Rows + 1>...};
  table[rows - 1](x, wide, inputs, sums, ahead);
}

// Up to kTileRows rows by `outputs` (kPanel or kOutputs) of widened panels.
template <class Layout>
KVF_INLINE void multiply_wide(int64_t rows, const float* x, const float* wide, int64_t outputs, int64_t inputs, const Sums& sums,
                              Fetched ahead) {
  constexpr std::make_integer_sequence<int, kTileRows> heights;
  if (outputs == kOutputs)
    wide_rows<Layout, kOutputs>(rows, x, wide, inputs, sums, ahead, heights);
  else
    wide_rows<Layout, kPanel>(rows, x, wide, inputs, sums, ahead, heights);
}

// Columns of wide [inputs][kOutputs] = a panel of bfloat16.
KVF_INLINE void widen_panel(const uint8_t* panel, int64_t inputs, float* wide) {
  for (int64_t i = 0; i < inputs; i += 2, panel += kPanel * 4, wide += 2 * kOutputs)
#pragma GCC unroll 16
    for (int c = 0; c < kPanel; c += kLanes) {
      const Words both = load_as<Words>(panel + c * 4);
      store(wide + c, even_of(both));
      store(wide + kOutputs + c, odd_of(both));
    }
}

// Row `row` of `in` inputs (a multiple of kChunk) takes its place in `tiles`, as RowTiles has it.
KVF_INLINE void widen_row(const bf16* x, int64_t in, int64_t row, float* tiles) {
  float* to = tiles + row / kTileRows * kTileRows * in + row % kTileRows * kChunk;
  for (int64_t i = 0; i < in; i += kChunk, to += RowTiles::chunk)
#pragma GCC unroll 16
    for (int64_t lane = 0; lane < kChunk; lane += kLanes) store(to + lane, load(x + i + lane));
}

constexpr int64_t kWidenedRows = 192, kWidenedStep = 24;  // rows whose sums are held at once; whole tiles of them
static_assert(kWidenedRows % kWidenedStep == 0 && kWidenedStep % kTileRows == 0);

// Calls emit(which, row, values [kPanel]) of `count` panels (up to kWidePanels) for each of `rows` widened rows (1 to
// kWidenedRows) of `in` inputs. A run of the panels' inputs stays in the caches while rows pass by, and what follows it is
// fetched meanwhile.
template <class Emit>
KVF_INLINE void widened_products(const float* x, int64_t in, int64_t rows, const uint8_t* const* panels, int64_t count,
                                 const uint8_t* next, Emit emit) {
  alignas(64) float wide[kPanelInputs * kOutputs], out[kWidenedRows * kOutputs];
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, share = (tiles + count - 1) / count;
  for (int64_t first = 0; first < in; first += kPanelInputs) {
    const int64_t left = in - first, inputs = left < kPanelInputs ? left : kPanelInputs, bytes = inputs * kPanel * 2;
    for (int64_t p = 0; p < count; ++p) widen_panel(panels[p] + first * kPanel * 2, inputs, wide + p * kPanel);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = tile * kTileRows, height = rows - row < kTileRows ? rows - row : kTileRows;
      const int64_t p = tile / share;  // whose coming inputs are fetched
      const uint8_t* coming = left > kPanelInputs ? panels[p] + (first + kPanelInputs) * kPanel * 2 : next + p * in * kPanel * 2;
      const Fetched ahead{coming + bytes * (tile % share) / share, kPanel * 2 / share};
      multiply_wide<RowTiles>(height, x + row * in + first * kTileRows, wide, count * kPanel, inputs,
                              {out + row * kOutputs, kOutputs, nullptr, first == 0}, ahead);
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t p = 0; p < count; ++p) emit(p, row, out + row * kOutputs + p * kPanel);
}

constexpr int64_t kProductRows = 48;  // rows of bfloat16 whose sums are held at once

// sums [rows][kPanel] += products of rows in bfloat16 with `inputs` (up to kInputs) inputs of a panel.
inline __attribute__((noinline)) void add_products(const bf16* x, int64_t step, int64_t rows, const uint8_t* panel,
                                                   int64_t inputs, const Sums& sums) {
  constexpr int kMost = kFewRows > kTileRows ? kFewRows : kTileRows;
  alignas(64) float wide[kWide ? kLanes : kInputs * kPanel], of_x[kMost * kInputs];
  const bool few = kWide || rows <= 8;
  if (!few) widen_panel(panel, inputs, wide);
  const int64_t height = few ? kFewRows : kTileRows, tiles = (rows + height - 1) / height, whole = inputs / kLanes * kLanes;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
    for (int64_t r = 0; r < count; ++r) {
      const bf16* from = x + (first + r) * step;
      for (int64_t i = 0; i < whole; i += kLanes) store(of_x + r * kInputs + i, load(from + i));
      for (int64_t i = whole; i < inputs; ++i) of_x[r * kInputs + i] = widen(from[i]);
    }
    if (few)
      few_rows<RowByRow>(count, of_x, panel, inputs, sums.from(first), std::make_integer_sequence<int, kFewRows>());
    else if constexpr (!kWide)
      multiply_wide<RowByRow>(count, of_x, wide, kPanel, inputs, sums.from(first), {panel, 0});
  }
}

// Calls emit(row, values [kPanel]) for each of `rows` rows of x (`step` elements apart), without bias.
template <class Emit>
KVF_INLINE void panel_product(const bf16* x, int64_t step, int64_t rows, const uint8_t* panel, int64_t pairs, Emit emit) {
  alignas(64) float out[kProductRows * kPanel];
  const int64_t in = 2 * pairs;
  for (int64_t base = 0; base < rows; base += kProductRows) {
    const int64_t count = rows - base < kProductRows ? rows - base : kProductRows;
    for (int64_t i = 0; i < in; i += kInputs)
      add_products(x + base * step + i, step, count, panel + i * kPanel * 2, in - i < kInputs ? in - i : kInputs,
                   {out, kPanel, nullptr, i == 0});
    for (int64_t r = 0; r < count; ++r) emit(base + r, out + r * kPanel);
  }
}

}  // namespace
}  // namespace kvferry
