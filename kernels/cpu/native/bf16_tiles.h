// Products of bfloat16 activations with bfloat16 panels by AMX tiles. A panel's pairs of inputs are a tile's layout as
// they lie: sixteen of them by sixteen outputs, 128 bytes apart.
//
// A tile instruction sums the even and the odd inputs of its sixteen pairs apart, then adds both to the output's sum
// (Intel SDM, TDPBF16PS), denormals being zeros. Tiles of any height agree, and row_products() does the same with vectors.
#pragma once

#include "tiles.h"

namespace kvferry {
namespace {

constexpr int64_t kTileAhead = 8192;  // bytes of weights prefetched ahead

// Which side of a product passes through the first-level cache and leaves the other one there.
enum class Passing { none, rows, panel };

// The tile is named in the instruction, so it can be no parameter of a function.
#define KVF_LOAD_TILE(passes, tile, from, step) \
  if constexpr (passes)                         \
    _tile_stream_loadd(tile, from, step);       \
  else                                          \
    _tile_loadd(tile, from, step)

// One step: the sums += products of as many pairs of inputs as the shape is deep. both: there are lower rows.
template <Passing passing = Passing::none>
KVF_INLINE void tile_step(const bf16* x, int64_t step, const uint8_t* panel, bool both) {
  constexpr bool kRows = passing == Passing::rows, kOutputs = passing == Passing::panel;
  KVF_LOAD_TILE(kOutputs, 6, panel, kTileStride);
  KVF_LOAD_TILE(kRows, 4, x, 2 * step);
  _tile_dpbf16ps(0, 4, 6);
  KVF_LOAD_TILE(kOutputs, 7, panel + 64, kTileStride);
  _tile_dpbf16ps(1, 4, 7);
  if (!both) return;
  KVF_LOAD_TILE(kRows, 5, x + kTileRows * step, 2 * step);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

KVF_INLINE void zero_sums(bool both) {
  _tile_zero(0);
  _tile_zero(1);
  if (!both) return;
  _tile_zero(2);
  _tile_zero(3);
}

// sums: of rows `step` floats apart.
KVF_INLINE void load_sums(const float* sums, bool both, int64_t step = kPanel) {
  Tiles::settle(sums);
  _tile_loadd(0, sums, 4 * step);
  _tile_loadd(1, sums + kTileRows, 4 * step);
  if (!both) return;
  _tile_loadd(2, sums + kTileRows * step, 4 * step);
  _tile_loadd(3, sums + kTileRows * step + kTileRows, 4 * step);
}

KVF_INLINE void store_sums(float* sums, bool both, int64_t step = kPanel) {
  _tile_stored(0, sums, 4 * step);
  _tile_stored(1, sums + kTileRows, 4 * step);
  if (both) {
    _tile_stored(2, sums + kTileRows * step, 4 * step);
    _tile_stored(3, sums + kTileRows * step + kTileRows, 4 * step);
  }
  Tiles::settle(sums);
}

constexpr int64_t kTileBatch = 96;  // rows whose sums are held at once

// sums [rows][kPanel] = the panel's outputs of 1 to kTileBatch rows of x (`step` elements apart).
inline __attribute__((noinline)) void tile_products(const bf16* x, int64_t step, int64_t rows, const uint8_t* panel,
                                                    int64_t pairs, float* sums) {
  Tiles tiles;
  Tiles::settle(x);
  for (int64_t base = 0; base < rows; base += kTwoTiles) {
    const int64_t count = rows - base < kTwoTiles ? rows - base : kTwoTiles;
    const bool both = count > kTileRows;
    const bf16* from = x + base * step;
    float* to = sums + base * kPanel;
    for (int64_t k = 0; k < pairs; k += kTileDepth) {
      const int64_t depth = pairs - k < kTileDepth ? pairs - k : kTileDepth;
      if (tiles.shape(count, depth) && k > 0) load_sums(to, both);
      if (k == 0) zero_sums(both);
      tile_step(from + 2 * k, step, panel + k * kTileStride, both);
      if (k + 2 * kTileDepth > pairs) store_sums(to, both);  // another depth follows, or nothing
    }
  }
}

// Denormals are zeros and rounding is to nearest even on this thread, as in tiles. What computes under it is not inlined.
class TileRounding {
 public:
  TileRounding() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
  ~TileRounding() { _mm_setcsr(before_); }
  TileRounding(const TileRounding&) = delete;
  TileRounding& operator=(const TileRounding&) = delete;

 private:
  const unsigned before_;
};

constexpr int kVectorRows = 2;  // up to so many rows wait for memory, and vectors keep it busier than tiles

KVF_INLINE Floats fused(Floats a, float b, Floats sum) {
  return (Floats)_mm512_fmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)sum);
}

// The sums of tile_products() of a few rows by vectors, under TileRounding.
template <int Rows>
inline __attribute__((noinline)) void row_products(const bf16* x, int64_t step, const uint8_t* panel, int64_t pairs,
                                                   float* out) {
  Floats total[Rows][2] = {};
  for (int64_t k = 0; k < pairs; k += kTileDepth) {
    const int64_t depth = pairs - k < kTileDepth ? pairs - k : kTileDepth;
    alignas(64) float inputs[Rows][2 * kTileDepth];
    for (int r = 0; r < Rows; ++r) {
      const bf16* from = x + r * step + 2 * k;
      for (int64_t i = 0; depth == kTileDepth && i < 2 * kTileDepth; i += kLanes) store(inputs[r] + i, load(from + i));
      for (int64_t i = 0; depth < kTileDepth && i < 2 * depth; ++i) inputs[r][i] = widen(from[i]);
    }
    Floats even[Rows][2] = {}, odd[Rows][2] = {};
    for (int64_t i = 0; i < depth; ++i, panel += kTileStride) {
      __builtin_prefetch(panel + kTileAhead);
      __builtin_prefetch(panel + kTileAhead + 64);
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        const Words both = load_as<Words>(panel + 64 * c);
#pragma GCC unroll 2
        for (int r = 0; r < Rows; ++r) {
          even[r][c] = fused(even_of(both), inputs[r][2 * i], even[r][c]);
          odd[r][c] = fused(odd_of(both), inputs[r][2 * i + 1], odd[r][c]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int c = 0; c < 2; ++c) total[r][c] = total[r][c] + (even[r][c] + odd[r][c]);
  }
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < 2; ++c) store(out + r * kPanel + c * kLanes, total[r][c]);
}

KVF_INLINE void vector_products(const bf16* x, int64_t step, int64_t rows, const uint8_t* panel, int64_t pairs, float* out) {
  const TileRounding rounding;
  rows == 1 ? row_products<1>(x, step, panel, pairs, out) : row_products<2>(x, step, panel, pairs, out);
}

// Whether vectors give the bits of this processor's tiles on numbers near each other, and on such whose products and sums
// are denormal.
inline __attribute__((noinline)) bool try_vectors() {
  constexpr int64_t kPairs = 200;
  alignas(64) bf16 x[kVectorRows * 2 * kPairs], panel[kPairs * 2 * kPanel];
  uint32_t noise = 1;
  for (const uint32_t exponent : {121u, 62u}) {
    const auto draw = [&] {
      noise = noise * 1664525 + 1013904223;
      return static_cast<bf16>((noise >> 16 & 0x807f) | (exponent + (noise >> 8 & 7)) << 7);
    };
    for (bf16& value : x) value = draw();
    for (bf16& value : panel) value = draw();
    alignas(64) float tiled[kVectorRows * kPanel], other[kVectorRows * kPanel];
    const auto* bytes = reinterpret_cast<const uint8_t*>(panel);
    tile_products(x, 2 * kPairs, kVectorRows, bytes, kPairs, tiled);
    vector_products(x, 2 * kPairs, kVectorRows, bytes, kPairs, other);
    if (std::memcmp(tiled, other, sizeof tiled) != 0) return false;
  }
  return true;
}

// Intel's manual and its intrinsics guide name different orders of sums, so the processor is asked, once.
inline bool vectors_agree() {
  static const bool agree = try_vectors();
  return agree;
}

// Calls emit(row, values [kPanel]) for each of `rows` rows of x (`step` elements apart), without bias.
template <class Emit>
KVF_INLINE void panel_product(const bf16* x, int64_t step, int64_t rows, const uint8_t* panel, int64_t pairs, Emit emit) {
  alignas(64) float sums[kTileBatch * kPanel];
  for (int64_t base = 0; base < rows; base += kTileBatch) {
    const int64_t count = rows - base < kTileBatch ? rows - base : kTileBatch;
    const bf16* from = x + base * step;
    if (count <= kVectorRows && vectors_agree())
      vector_products(from, step, count, panel, pairs, sums);
    else
      tile_products(from, step, count, panel, pairs, sums);
    for (int64_t r = 0; r < count; ++r) emit(base + r, sums + r * kPanel);
  }
}

}  // namespace
}  // namespace kvferry
