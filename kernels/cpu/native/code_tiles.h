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

constexpr int kTiledGroups = 4;  // groups that are multiplied, then scaled at once, with their scales in registers
constexpr int64_t kTileSums = kTwoTiles * kPanel;

// out [rows][kPanel] += the sums [Groups][kTileSums] of groups from `index` on, of rows of x from `row` on.
template <class C, int Groups>
KVF_INLINE void scale_groups(const Quantised& x, int64_t row, int64_t rows, int64_t index, const uint8_t* group,
                             const int32_t* sums, float* out) {
  GroupScale<C> scales[Groups][2];
#pragma GCC unroll 4
  for (int g = 0; g < Groups; ++g)
    for (int half = 0; half < 2; ++half) scales[g][half] = GroupScale<C>(group + g * C::bytes, half * kLanes);
  for (int64_t r = 0; r < rows; ++r, sums += kPanel, out += kPanel) {
    Floats total[2] = {load(out), load(out + kLanes)};
#pragma GCC unroll 4
    for (int g = 0; g < Groups; ++g)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        total[half] =
            scales[g][half].added(x, row + r, index + g, load_as<Ints>(sums + g * kTileSums + half * kLanes), total[half]);
    store(out, total[0]);
    store(out + kLanes, total[1]);
  }
}

// The same with the products of `Groups` groups.
template <class C, int Groups>
KVF_INLINE void add_groups(const Quantised& x, int64_t row, int64_t rows, int64_t index, const uint8_t* group, float* out) {
  alignas(64) uint8_t codes[Groups][C::steps * kTileStride];
  alignas(64) int32_t sums[Groups * kTileSums];
  for (int g = 0; g < Groups; ++g) {
#pragma GCC unroll 20
    for (int ahead = 0; ahead < C::bytes; ahead += 64) __builtin_prefetch(group + g * C::bytes + 4096 + ahead);
    signed_codes<C>(group + g * C::bytes, codes[g]);
  }
  Tiles::settle(codes);
  for (int g = 0; g < Groups; ++g) {
    const int8_t* from = x.codes + row * x.in + (index + g) * C::group;
    rows > kTileRows ? tile_sums<true>(from, x.in, codes[g], sums + g * kTileSums)
                     : tile_sums<false>(from, x.in, codes[g], sums + g * kTileSums);
  }
  Tiles::settle(sums);
  scale_groups<C, Groups>(x, row, rows, index, group, sums, out);
}

// out [rows][kPanel] = the panel's outputs of rows [row, row + rows) of x, 1 to kTwoTiles.
template <class C>
inline __attribute__((noinline)) void code_tiles(const Quantised& x, int64_t row, int64_t rows, const uint8_t* panel,
                                                 float* out) {
  Tiles tiles;
  tiles.shape(rows, C::steps);
  std::memset(out, 0, rows * kPanel * sizeof(float));
  const int64_t groups = x.in / C::group, whole = groups / kTiledGroups * kTiledGroups;
  const uint8_t* group = panel + C::head;
  int64_t index = 0;
  for (; index < whole; index += kTiledGroups, group += kTiledGroups * C::bytes)
    add_groups<C, kTiledGroups>(x, row, rows, index, group, out);
  for (; index < groups; ++index, group += C::bytes) add_groups<C, 1>(x, row, rows, index, group, out);
  scale_outputs<C>(panel, rows, out);
}

}  // namespace
}  // namespace kvferry
