// Products of bfloat16 activations with bfloat16 panels by AMX tiles. A panel's pairs of inputs are a tile's layout as
// they lie: sixteen of them by sixteen outputs, 128 bytes apart.
//
// A tile instruction sums the even and the odd inputs of its sixteen pairs apart, then adds both to the output's sum
// (Intel SDM, TDPBF16PS), denormals being zeros. Tiles of any height agree, and row_products() does the same with vectors.
#pragma once

#include <immintrin.h>

#include "forms.h"
#include "vector.h"

namespace kvferry {
namespace {

constexpr int kTileRows = 16, kTileDepth = 16;  // depth: pairs of inputs, or groups of four
constexpr int kTileStride = kPanel * 4;          // bytes between rows of sums, and between pairs of a panel
constexpr int64_t kTwoTiles = 2 * kTileRows;

// The thread's tile registers. 0 to 3: sums of upper, then of lower rows, with outputs 0 to 15 and 16 to 31; 4 and 5: upper
// and lower rows of x; 6 and 7: the weights of outputs 0 to 15 and 16 to 31. Nothing may be left in them between tasks:
// the system would save it at every switch.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }

  // For `rows` (1 to 32) rows of x and `depth` (1 to 16) groups of four bytes of each. Clears all registers if it changes.
  void shape(int64_t rows, int64_t depth) {
    if (rows == rows_ && depth == depth_) return;
    rows_ = rows, depth_ = depth;
    const auto upper = static_cast<uint8_t>(rows < kTileRows ? rows : kTileRows), lower = static_cast<uint8_t>(rows - upper);
    const auto deep = static_cast<uint8_t>(depth);
    Shape shape;
    const uint8_t heights[8] = {upper, upper, lower, lower, upper, lower, deep, deep};
    for (int tile = 0; tile < 8; ++tile) {
      shape.rows[tile] = heights[tile];
      shape.bytes[tile] = heights[tile] == 0 ? 0 : tile == 4 || tile == 5 ? 4 * deep : 64;
    }
    settle(&shape);
    _tile_loadconfig(&shape);
  }

  // Makes memory what it should be before tiles are loaded, whose intrinsics do not say that they read it.
  static KVF_INLINE void settle(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

 private:
  struct alignas(64) Shape {
    uint8_t palette = 1, first_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };
  int64_t rows_ = 0, depth_ = 0;
};

constexpr int64_t kTileAhead = 8192;   // bytes of weights prefetched ahead
constexpr int64_t kTileRun = 12 * 16;  // pairs of a panel that stay in the first-level cache while rows pass by
constexpr int64_t kTileBatch = 96;     // rows whose sums are held at once

// out [16 or up to 32][kPanel] = or += the products of rows of x with `steps` times the shape's depth of pairs. Both: there
// are lower rows; fresh: the sums begin here; far: the panel comes from memory.
template <bool Both>
KVF_INLINE void tile_block(const bf16* x, int64_t step, const uint8_t* panel, int64_t steps, bool fresh, bool far, float* out) {
  const bf16* lower = x + kTileRows * step;
  float* lower_out = out + kTileRows * kPanel;
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    if (Both) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, out, kTileStride);
    _tile_loadd(1, out + kTileRows, kTileStride);
    if (Both) {
      _tile_loadd(2, lower_out, kTileStride);
      _tile_loadd(3, lower_out + kTileRows, kTileStride);
    }
  }
  for (int64_t s = 0; s < steps; ++s, x += 2 * kTileDepth, lower += 2 * kTileDepth, panel += kTileDepth * kTileStride) {
    if (far)
      for (int i = 0; i < kTileDepth * kTileStride; i += 64) __builtin_prefetch(panel + kTileAhead + i);
    _tile_loadd(6, panel, kTileStride);
    _tile_loadd(4, x, 2 * step);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 64, kTileStride);
    _tile_dpbf16ps(1, 4, 7);
    if (Both) {
      _tile_loadd(5, lower, 2 * step);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, kTileStride);
  _tile_stored(1, out + kTileRows, kTileStride);
  if (Both) {
    _tile_stored(2, lower_out, kTileStride);
    _tile_stored(3, lower_out + kTileRows, kTileStride);
  }
}

// out [rows][kPanel] = the panel's outputs of up to kTileBatch rows of x (`step` elements apart).
inline __attribute__((noinline)) void tile_products(const bf16* x, int64_t step, int64_t rows, const uint8_t* panel,
                                                    int64_t pairs, float* out) {
  Tiles tiles;
  Tiles::settle(x);
  for (int64_t k = 0; k < pairs;) {
    const int64_t left = pairs - k, depth = left < kTileDepth ? left : kTileDepth;
    const int64_t run = rows > kTwoTiles && left > kTileRun ? kTileRun : left, steps = run / depth;
    for (int64_t base = 0; base < rows; base += kTwoTiles) {
      const int64_t count = rows - base < kTwoTiles ? rows - base : kTwoTiles;
      const bf16* from = x + base * step + 2 * k;
      float* to = out + base * kPanel;
      tiles.shape(count, depth);
      if (count > kTileRows)
        tile_block<true>(from, step, panel + k * kTileStride, steps, k == 0, base == 0, to);
      else
        tile_block<false>(from, step, panel + k * kTileStride, steps, k == 0, base == 0, to);
    }
    k += steps * depth;
  }
  Tiles::settle(out);
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

// tile_products() of a few rows by vectors, under TileRounding.
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
  alignas(64) float out[kTileBatch * kPanel];
  for (int64_t base = 0; base < rows; base += kTileBatch) {
    const int64_t count = rows - base < kTileBatch ? rows - base : kTileBatch;
    const bf16* from = x + base * step;
    if (count <= kVectorRows && vectors_agree())
      vector_products(from, step, count, panel, pairs, out);
    else
      tile_products(from, step, count, panel, pairs, out);
    for (int64_t r = 0; r < count; ++r) emit(base + r, out + r * kPanel);
  }
}

}  // namespace
}  // namespace kvferry
