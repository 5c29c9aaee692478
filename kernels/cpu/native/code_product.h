// Products of a run of quantised rows with a panel of codes, by the means that suit their number.
#pragma once

#include "quantised.h"

#if defined(__AMX_INT8__)
#include "code_tiles.h"
#endif

namespace kvferry {
namespace {

#if defined(__AMX_INT8__)
constexpr int64_t kFromTiles = kTileRows, kMostCodeRows = kTwoTiles;

template <class C>
KVF_INLINE void product_of(const Quantised& x, int64_t row, int64_t rows, bool tiles, const uint8_t* panel, int64_t ahead,
                           float* out) {
  if (tiles)
    code_tiles<C>(x, row, rows, panel, out);
  else
    code_tile_of<C>(static_cast<int>(rows), x, row, panel, ahead, out, std::make_integer_sequence<int, kCodeRows>());
}
#else
constexpr int64_t kFromTiles = INT64_MAX, kMostCodeRows = kCodeRows;

template <class C>
KVF_INLINE void product_of(const Quantised& x, int64_t row, int64_t rows, bool, const uint8_t* panel, int64_t ahead,
                           float* out) {
  code_tile_of<C>(static_cast<int>(rows), x, row, panel, ahead, out, std::make_integer_sequence<int, kCodeRows>());
}
#endif

constexpr int64_t kCodesAhead = 16384;  // bytes of codes prefetched ahead

// Calls emit(row, values [kPanel]) for rows [begin, begin + rows) of x, without bias. The first tile of rows brings the panel
// into the caches; the second, which finds it there, asks for the `next` one meanwhile.
template <class Emit>
KVF_INLINE void code_product(const Quantised& x, int64_t begin, int64_t rows, const Panel& panel, const uint8_t* next,
                             Emit emit) {
  alignas(64) float out[kMostCodeRows * kPanel];
  const bool tiles = rows >= kFromTiles;
  const int64_t height = tiles ? kMostCodeRows : kCodeRows, parts = (rows + height - 1) / height;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = begin + rows * part / parts, count = begin + rows * (part + 1) / parts - first;
    const int64_t ahead = part == 1 ? next - panel.data : kCodesAhead;
    with_codes(panel.form, [&](auto codes) { product_of<decltype(codes)>(x, first, count, tiles, panel.data, ahead, out); });
    for (int64_t r = 0; r < count; ++r) emit(first + r, out + r * kPanel);
  }
}

}  // namespace
}  // namespace kvferry
