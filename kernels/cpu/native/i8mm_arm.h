// Integer sums of two rows and more by ARM's USMMLA, which multiplies two rows with two outputs, eight inputs at a time:
// twice the products of USDOT. Sums of integers are exact, so rows alone and rows together give the same.
#pragma once

#include <arm_neon.h>

#include "forms.h"
#include "vector.h"

namespace kvferry {
namespace {

// Codes of eight inputs of two outputs each: of outputs 0 and 1 of `first` and `second`, four inputs of four outputs
// each, and of outputs 2 and 3.
struct TwoOutputs {
  uint8x16_t early, late;

  TwoOutputs(Words first, Words second)
      : early((uint8x16_t)vzip1q_u32((uint32x4_t)first, (uint32x4_t)second)),
        late((uint8x16_t)vzip2q_u32((uint32x4_t)first, (uint32x4_t)second)) {}
};

// Sums of two rows over outputs 0 and 1, and over 2 and 3: for each output that of the first row, then of the second.
struct TwoRows {
  int32x4_t early{}, late{};

  KVF_INLINE void add(const TwoOutputs& codes, int8x16_t rows) {
    early = vusmmlaq_s32(early, codes.early, rows);
    late = vusmmlaq_s32(late, codes.late, rows);
  }
  KVF_INLINE Ints first() const { return (Ints)vuzp1q_s32(early, late); }
  KVF_INLINE Ints second() const { return (Ints)vuzp2q_s32(early, late); }
};

// Eight codes of one row, and of the row behind it where there is one.
KVF_INLINE int8x16_t eight_of(const int8_t* row, int64_t step, bool both) {
  return (int8x16_t)uint64x2_t{load_as<uint64_t>(row), both ? load_as<uint64_t>(row + step) : 0};
}

// sums += the products of Rows rows of codes (`step` apart) with `Steps` times four inputs of 2 * kLanes outputs, which
// unpacked(n, low, high) gives, four inputs at a time.
template <int Rows, int Steps, class Unpacked>
KVF_INLINE void add_pairs(const int8_t* codes, int64_t step, Unpacked unpacked, Ints (&sums)[Rows][2]) {
  TwoRows part[(Rows + 1) / 2][2];
#pragma GCC unroll 4
  for (int n = 0; n < Steps; n += 2) {
    asm volatile("" : : : "memory");  // else GCC loads all steps' codes first, and sums leave their registers
    Words low[2], high[2];
    unpacked(n, low[0], high[0]);
    unpacked(n + 1, low[1], high[1]);
    const TwoOutputs halves[2] = {{low[0], low[1]}, {high[0], high[1]}};
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r += 2) {
      const int8x16_t rows = eight_of(codes + r * step + 4 * n, step, r + 1 < Rows);
      for (int half = 0; half < 2; ++half) part[r / 2][half].add(halves[half], rows);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
    for (int half = 0; half < 2; ++half)
      sums[r][half] = sums[r][half] + (r % 2 ? part[r / 2][half].second() : part[r / 2][half].first());
}

}  // namespace
}  // namespace kvferry
