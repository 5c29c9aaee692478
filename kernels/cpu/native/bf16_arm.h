// Products of bfloat16 rows with a bfloat16 panel (see product.h) by ARM's instructions: BFDOT for one row, which waits
// for memory, and BFMMLA, which does twice as many products, for two rows and more. Both add a pair of inputs at a time
// in the same order and with the same rounding (Arm Architecture Reference Manual, BFDotAdd and BFMatMulAdd), so a row's
// result does not depend on its batch.
#pragma once

#include <arm_neon.h>

#include "forms.h"
#include "vector.h"

namespace kvferry {
namespace {

constexpr int kTileRows = 6;
constexpr int64_t kPairBytes = kPanel * 4;  // of a panel: a pair of inputs of all its outputs
constexpr int kHalfPanel = kPanel / 2;

KVF_INLINE void one_row(const bf16* x, const uint8_t* panel, int64_t pairs, float* out) {
  float32x4_t total[kPanel / 4] = {};
  for (int64_t k = 0; k < pairs; ++k, panel += kPairBytes) {
    __builtin_prefetch(panel + 4096);
    __builtin_prefetch(panel + 4096 + 64);
    const bfloat16x8_t pair = vreinterpretq_bf16_u32(vdupq_n_u32(load_as<uint32_t>(x + 2 * k)));
#pragma GCC unroll 8
    for (int c = 0; c < kPanel / 4; ++c)
      total[c] = vbfdotq_f32(total[c], load_as<bfloat16x8_t>(panel + 16 * c), pair);
  }
  for (int c = 0; c < kPanel / 4; ++c) vst1q_f32(out + 4 * c, total[c]);
}

// `Inputs` (4, or 2: the others are zeros) of two rows; without a second row, zeros for it.
template <int Inputs, bool Both>
KVF_INLINE bfloat16x8_t two_rows(const bf16* first, const bf16* second) {
  using Bits = std::conditional_t<Inputs == 4, uint64_t, uint32_t>;
  const uint64x2_t bits = {load_as<Bits>(first), Both ? load_as<Bits>(second) : Bits{0}};
  return vreinterpretq_bf16_u64(bits);
}

// total += the products of `Inputs` inputs of Rows rows with sixteen outputs of a panel, two by two.
template <int Rows, int Inputs>
KVF_INLINE void add_inputs(const bf16* x, int64_t step, const uint8_t* panel,
                           float32x4_t (&total)[(Rows + 1) / 2][kHalfPanel / 2]) {
  bfloat16x8_t rows[(Rows + 1) / 2];
#pragma GCC unroll 3
  for (int r = 0; r < Rows; r += 2)
    rows[r / 2] = r + 1 < Rows ? two_rows<Inputs, true>(x + r * step, x + (r + 1) * step)
                               : two_rows<Inputs, false>(x + r * step, x + r * step);
#pragma GCC unroll 4
  for (int c = 0; c < kHalfPanel; c += 4) {
    asm volatile("" : : : "memory");  // else GCC loads all of the panel first, and sums leave their registers
    const auto early = load_as<uint32x4_t>(panel + 4 * c);
    const auto late = Inputs == 4 ? load_as<uint32x4_t>(panel + kPairBytes + 4 * c) : vdupq_n_u32(0);
    const bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(early, late));
    const bfloat16x8_t high = vreinterpretq_bf16_u32(vzip2q_u32(early, late));
#pragma GCC unroll 3
    for (int r = 0; r < (Rows + 1) / 2; ++r) {
      total[r][c / 2] = vbfmmlaq_f32(total[r][c / 2], rows[r], low);
      total[r][c / 2 + 1] = vbfmmlaq_f32(total[r][c / 2 + 1], rows[r], high);
    }
  }
}

template <int Rows>
KVF_INLINE void more_rows(const bf16* x, int64_t step, const uint8_t* panel, int64_t pairs, float* out) {
  float32x4_t total[(Rows + 1) / 2][kHalfPanel / 2] = {};
  int64_t k = 0;
  for (; k + 2 <= pairs; k += 2, panel += 2 * kPairBytes) {
    __builtin_prefetch(panel + 4096);
    __builtin_prefetch(panel + 4096 + kPairBytes);
    add_inputs<Rows, 4>(x + 2 * k, step, panel, total);
  }
  if (k < pairs) add_inputs<Rows, 2>(x + 2 * k, step, panel, total);
#pragma GCC unroll 3
  for (int r = 0; r < Rows; r += 2)
#pragma GCC unroll 4
    for (int c = 0; c < kHalfPanel; c += 4) {
      const float32x4_t left = total[r / 2][c / 2], right = total[r / 2][c / 2 + 1];
      vst1q_f32(out + r * kPanel + c, vcombine_f32(vget_low_f32(left), vget_low_f32(right)));
      if (r + 1 < Rows)
        vst1q_f32(out + (r + 1) * kPanel + c, vcombine_f32(vget_high_f32(left), vget_high_f32(right)));
    }
}

// out [Rows][kPanel] = the panel's outputs of `Rows` rows of x (`step` elements apart).
template <int Rows>
inline __attribute__((noinline)) void panel_tile(const bf16* x, int64_t step, const uint8_t* panel, int64_t pairs,
                                                 float* out) {
  if constexpr (Rows == 1) {
    one_row(x, panel, pairs, out);
  } else {
    more_rows<Rows>(x, step, panel, pairs, out);
    more_rows<Rows>(x, step, panel + kPairBytes / 2, pairs, out + kHalfPanel);
  }
}

}  // namespace
}  // namespace kvferry
