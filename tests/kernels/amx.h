// Stands in for AMX tiles on processors without them: the intrinsics that the kernels use, as Intel's Software Developer's
// Manual defines their instructions (KVFERRY_EMULATED_ORDER=guide: TDPBF16PS sums as the intrinsics guide has it, which
// differs). What would fault ends the process.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

namespace {
namespace emulated {

struct TileState {
  bool configured;
  struct {
    uint8_t palette, first_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape;
  uint8_t data[8][16][64];
};
inline thread_local TileState tile_state;

inline void fault_unless(bool holds) {
  if (!holds) std::abort();
}

inline TileState& tiles_with(int tile) {
  TileState& t = tile_state;
  fault_unless(t.configured && t.shape.rows[tile] > 0);
  return t;
}

inline void tile_configure(const void* shape) {
  TileState& t = tile_state;
  std::memset(&t, 0, sizeof t);
  std::memcpy(&t.shape, shape, sizeof t.shape);
  fault_unless(t.shape.palette == 1 && t.shape.first_row == 0);
  for (int i = 0; i < 16; ++i) {
    const int rows = t.shape.rows[i], bytes = t.shape.bytes[i];
    fault_unless(rows <= 16 && bytes <= 64 && (rows == 0) == (bytes == 0) && (i < 8 || rows == 0));
  }
  t.configured = true;
}

inline void tile_release() { std::memset(&tile_state, 0, sizeof tile_state); }

inline void tile_zero(int tile) { std::memset(tiles_with(tile).data[tile], 0, sizeof tile_state.data[tile]); }

inline void tile_load(int tile, const void* from, int64_t stride) {
  TileState& t = tiles_with(tile);
  std::memset(t.data[tile], 0, sizeof t.data[tile]);
  for (int r = 0; r < t.shape.rows[tile]; ++r)
    std::memcpy(t.data[tile][r], static_cast<const uint8_t*>(from) + r * stride, t.shape.bytes[tile]);
}

inline void tile_store(int tile, void* to, int64_t stride) {
  const TileState& t = tiles_with(tile);
  for (int r = 0; r < t.shape.rows[tile]; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, t.data[tile][r], t.shape.bytes[tile]);
}

// The tiles of a product whose shapes fit each other.
struct Operands {
  TileState& t;
  uint8_t (*sums)[64];
  const uint8_t (*a)[64];
  const uint8_t (*b)[64];
  int rows, columns, depth;

  Operands(int to, int x, int y)
      : t(tiles_with(to)), sums(t.data[to]), a(tiles_with(x).data[x]), b(tiles_with(y).data[y]), rows(t.shape.rows[to]),
        columns(t.shape.bytes[to] / 4), depth(t.shape.rows[y]) {
    fault_unless(to != x && to != y && x != y && rows == t.shape.rows[x] && t.shape.bytes[to] == t.shape.bytes[y] &&
                 t.shape.bytes[x] == 4 * depth && t.shape.bytes[to] % 4 == 0);
  }
};

template <class T>
inline T element(const uint8_t* row, int index) {
  T value;
  std::memcpy(&value, row + index * sizeof(T), sizeof value);
  return value;
}

inline float tile_float(const uint8_t* row, int index) {
  const uint32_t bits = static_cast<uint32_t>(element<uint16_t>(row, index)) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline __attribute__((noinline)) void tile_row_bf16(const uint8_t* a, const Operands& o, bool guide, float* sums) {
  for (int n = 0; n < o.columns; ++n) {
    float even = guide ? sums[n] : 0, odd = 0;
    for (int k = 0; k < o.depth; ++k) {
      even = std::fma(tile_float(a, 2 * k), tile_float(o.b[k], 2 * n), even);
      float& last = guide ? even : odd;
      last = std::fma(tile_float(a, 2 * k + 1), tile_float(o.b[k], 2 * n + 1), last);
    }
    sums[n] = guide ? even : sums[n] + (even + odd);
  }
}

// Rounds to nearest even with denormals as zeros, whatever MXCSR says.
inline void tile_products_bf16(int to, int x, int y) {
  static const char* order = std::getenv("KVFERRY_EMULATED_ORDER");
  const Operands o(to, x, y);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);
  for (int m = 0; m < o.rows; ++m) {
    float sums[16];
    std::memcpy(sums, o.sums[m], sizeof sums);
    tile_row_bf16(o.a[m], o, order != nullptr && std::strcmp(order, "guide") == 0, sums);
    std::memcpy(o.sums[m], sums, sizeof sums);
  }
  _mm_setcsr(before);
}

template <class A, class B>
inline void tile_products8(int to, int x, int y) {
  const Operands o(to, x, y);
  for (int m = 0; m < o.rows; ++m)
    for (int n = 0; n < o.columns; ++n) {
      uint32_t sum = element<uint32_t>(o.sums[m], n);
      for (int k = 0; k < o.depth; ++k)
        for (int i = 0; i < 4; ++i)
          sum += static_cast<uint32_t>(element<A>(o.a[m], 4 * k + i) * element<B>(o.b[k], 4 * n + i));
      std::memcpy(o.sums[m] + 4 * n, &sum, sizeof sum);
    }
}

}  // namespace emulated
}  // namespace

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig emulated::tile_configure
#define _tile_release emulated::tile_release
#define _tile_zero emulated::tile_zero
#define _tile_loadd emulated::tile_load
#define _tile_stream_loadd emulated::tile_load
#define _tile_stored(tile, to, stride) emulated::tile_store(tile, to, stride)
#define _tile_dpbf16ps emulated::tile_products_bf16
#define _tile_dpbssd (emulated::tile_products8<int8_t, int8_t>)
#define _tile_dpbsud (emulated::tile_products8<int8_t, uint8_t>)
