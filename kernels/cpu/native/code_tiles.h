// Integer sums of code_tile() by AMX tiles, for many rows: a group's codes are unpacked once, signed, into what a tile is
// loaded from. The sums are the same integers, and scaled in the same order.
#pragma once

#include "quantised.h"
#include "tiles.h"

namespace kvferry {
namespace {

typedef uint8_t Codes8 __attribute__((vector_size(kLanes * 4)));

// A group's codes less their offset, as they lie in a panel of 8 bits: [steps][32 outputs][4].
template <class C>
KVF_INLINE void signed_codes(const uint8_t* group, uint8_t* out) {
  Words upper_low{}, upper_high{};
  if constexpr (C::bits == 5 || C::bits == 6) {
    upper_low = load_as<Words>(group + C::upper);
    upper_high = load_as<Words>(group + C::upper + 64);
  }
#pragma GCC unroll 8
  for (int step = 0; step < C::steps; ++step) {
    Words codes[2];
    unpack<C>(group, step, 0, upper_low, upper_high, codes[0], codes[1]);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Codes8 lower = (Codes8)codes[half] - static_cast<uint8_t>(C::offset);
      std::memcpy(out + (2 * step + half) * 64, &lower, sizeof lower);
    }
  }
}

// sums [rows][kPanel] = of rows of codes x (`step` apart) with a group's codes; Both: there are more than 16 rows.
template <bool Both>
KVF_INLINE void tile_sums(const int8_t* x, int64_t step, const uint8_t* codes, int32_t* sums) {
  _tile_loadd(6, codes, kTileStride);
  _tile_loadd(7, codes + 64, kTileStride);
  _tile_loadd(4, x, step);
  _tile_zero(0);
  _tile_zero(1);
  _tile_dpbssd(0, 4, 6);
  _tile_dpbssd(1, 4, 7);
  if (Both) {
    _tile_loadd(5, x + kTileRows * step, step);
    _tile_zero(2);
    _tile_zero(3);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_stored(0, sums, kTileStride);
  _tile_stored(1, sums + kTileRows, kTileStride);
  if (Both) {
    _tile_stored(2, sums + kTileRows * kPanel, kTileStride);
    _tile_stored(3, sums + kTileRows * kPanel + kTileRows, kTileStride);
  }
}

// out [rows][kPanel] = the panel's outputs of rows [row, row + rows) of x, 1 to kTwoTiles.
template <class C>
inline __attribute__((noinline)) void code_tiles(const Quantised& x, int64_t row, int64_t rows, const uint8_t* panel,
                                                 float* out) {
  alignas(64) uint8_t codes[C::steps * kTileStride];
  alignas(64) int32_t sums[kTwoTiles * kPanel];
  Tiles tiles;
  tiles.shape(rows, C::steps);
  std::memset(out, 0, rows * kPanel * sizeof(float));
  const uint8_t* group = panel + C::head;
  for (int64_t index = 0; index < x.in / C::group; ++index, group += C::bytes) {
#pragma GCC unroll 20
    for (int ahead = 0; ahead < C::bytes; ahead += 64) __builtin_prefetch(group + 4096 + ahead);
    signed_codes<C>(group, codes);
    Tiles::settle(codes);
    const int8_t* from = x.codes + row * x.in + index * C::group;
    rows > kTileRows ? tile_sums<true>(from, x.in, codes, sums) : tile_sums<false>(from, x.in, codes, sums);
    Tiles::settle(sums);
    for (int at = 0; at < kPanel; at += kLanes) {
      const GroupScale<C> scale(group, at);
      for (int64_t r = 0; r < rows; ++r)
        scale.add(x, row + r, index, load_as<Ints>(sums + r * kPanel + at), out + r * kPanel + at);
    }
  }
  scale_outputs<C>(panel, rows, out);
}

}  // namespace
}  // namespace kvferry
