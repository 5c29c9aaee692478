// Products of many rows with long panels of bfloat16 by AMX tiles, for dense layers. The rows are copied first into the order
// in which tiles read them: sums of a row are those of tile_products().
#pragma once

#include "bf16_tiles.h"

namespace kvferry {
namespace {

constexpr int64_t kStepInputs = 2 * kTileDepth, kStepElements = kTwoTiles * kStepInputs;  // of a step over two by two tiles
constexpr int64_t kStepBytes = kTileDepth * kTileStride;  // of a panel
constexpr int64_t kResidentSteps = 18;   // steps of a panel that stay in the first-level cache while rows pass by
constexpr int64_t kTiledRows = 512;      // rows whose sums are held at once
constexpr int64_t kBlockSums = kTwoTiles * kPanel;

// Row `row` of `in` inputs (whole steps) takes its place in `tiled`: [blocks of 32 rows][steps][32 rows][32 inputs].
KVF_INLINE void tile_row(const bf16* x, int64_t in, int64_t row, bf16* tiled) {
  bf16* to = tiled + row / kTwoTiles * kTwoTiles * in + row % kTwoTiles * kStepInputs;
  for (int64_t i = 0; i < in; i += kStepInputs, to += kStepElements) std::memcpy(to, x + i, sizeof(bf16) * kStepInputs);
}

// Asks for the lines of what comes next, evenly spread over the steps until then.
struct Upcoming {
  const uint8_t* data;
  int64_t lines, steps, step = 0, asked = 0;

  KVF_INLINE void advance() {
    for (const int64_t due = ++step * lines / steps; asked < due; ++asked) _mm_prefetch(data + 64 * asked, _MM_HINT_T1);
  }
};

// Calls emit(row, values [kPanel]) for each of `rows` tiled rows (1 to kTiledRows) of `in` inputs. What is emitted of a block
// of rows is made while tiles multiply the next one, so neither waits for the other. place(row): where it will be stored.
template <class Emit, class Place>
KVF_INLINE void tiled_products(const bf16* tiled, int64_t in, int64_t rows, const uint8_t* panel, const uint8_t* next, Emit emit,
                               Place place) {
  alignas(64) float sums[kTiledRows * kPanel];
  const int64_t steps = in / kStepInputs, blocks = (rows + kTwoTiles - 1) / kTwoTiles;
  const int64_t parts = (steps + kResidentSteps - 1) / kResidentSteps;
  const auto first_of = [&](int64_t part) { return steps * part / parts; };
  Tiles tiles;
  Tiles::settle(tiled);
  const auto sums_of = [&](int64_t block) { return sums + (parts == 1 ? block % 2 : block) * kBlockSums; };
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = first_of(part), end = first_of(part + 1);
    const bool last = part + 1 == parts;
    const int64_t following = last ? first_of(1) : first_of(part + 2) - end;
    Upcoming upcoming{last ? next : panel + end * kStepBytes, following * kStepBytes / 64, (end - first) * blocks};
    for (int64_t block = 0, row = 0, made = 0; block < blocks + last; ++block) {
      const int64_t base = block * kTwoTiles, count = rows - base < kTwoTiles ? rows - base : kTwoTiles;
      const bool works = block < blocks, both = count > kTileRows;
      const int64_t share = (made - row + end - first - 1) / (end - first);  // rows of the block before, with each step
      float* values = sums_of(block == 0 ? 0 : block - 1);
      if (works) {
        tiles.shape(count, kTileDepth);
        part == 0 ? zero_sums(both) : load_sums(sums_of(block), both);
        for (int64_t r = base; last && r < base + count; ++r) __builtin_prefetch(place(r), 1);
      }
      for (int64_t step = first; step < end; ++step) {
        if (works) {
          upcoming.advance();
          tile_step<Passing::rows>(tiled + base * in + step * kStepElements, kStepInputs, panel + step * kStepBytes, both);
        }
        for (const int64_t stop = made - row < share ? made : row + share; row < stop; ++row, values += kPanel) emit(row, values);
      }
      if (!works) break;
      store_sums(sums_of(block), both);
      if (last) row = base, made = base + count;
    }
  }
}

}  // namespace
}  // namespace kvferry
