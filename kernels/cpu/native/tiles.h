// AMX tiles: two by two of them hold sums, and two more each rows of x and weights.
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

  // For `rows` (1 to 32) rows of x and `depth` (1 to 16) groups of four bytes of each. If it changes, all registers are
  // cleared, and the result is true.
  bool shape(int64_t rows, int64_t depth) {
    if (rows == rows_ && depth == depth_) return false;
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
    return true;
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

}  // namespace
}  // namespace kvferry
