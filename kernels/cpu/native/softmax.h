// Weights of attention: an online softmax (Milakov and Gimelshein 2018) of as many query rows at a time as a vector has lanes.
#pragma once

#include "chunks.h"
#include "scores.h"
#include "transposed.h"

namespace kvferry {
namespace {

// 2^x within 9e-5 of itself, a twentieth of what rounding weights to bfloat16 costs; exactly 1 of 0, and 0 of -infinity.
// x: to 126.
KVF_INLINE Floats rough_power_of_two(Floats x) {
#if defined(__AVX512F__)
  const Floats rest = (Floats)_mm512_reduce_ps((__m512)x, 1);  // above the integer below x
#else
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Floats bounded = larger(x, splat(-126.0f)), shifted = bounded - 0.5f + kRound;
  const Floats rest = bounded - (shifted - kRound);
#endif
  Floats p = rest * 7.706713327e-2f + 2.276448658e-1f;
  p = p * rest + 6.951168240e-1f;
  p = p * rest + 1.0f;
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  const Ints exponent = (reinterpret_cast<Ints>(shifted) - 0x4b400000 + 127) << 23;
  return x < splat(-126.0f) ? Floats{} : p * reinterpret_cast<Floats>(exponent);
#endif
}

#if defined(__AMX_BF16__)
constexpr int64_t kSightStep = 32;  // what a tile multiplies at once
#else
constexpr int64_t kSightStep = 16;  // a whole vector of any width
#endif

// Which positions of a block, which begins at `begin`, the query rows see: row r (token r / group, from `token` on) those
// in its window up to its own, or up to the last one of the tokens' that is named.
struct Sight {
  int64_t group, begin, token, window;
  const int32_t* see_until = nullptr;

  // Positions from the block's first on that the row sees, and how many of those its window hides.
  int64_t seen(int64_t row) const {
    const int64_t number = row / group;
    return (see_until == nullptr ? token + number : see_until[number]) + 1 - begin;
  }
  int64_t hidden(int64_t row) const { return first_seen(token + row / group, window) - begin; }

  // Positions of the block's `width` up to the last one that rows to `last` see, in whole steps of products.
  int64_t near(int64_t last, int64_t width) const {
    const int64_t own = see_until == nullptr ? (seen(last) + kSightStep - 1) / kSightStep * kSightStep : width;
    return own < kSightStep ? kSightStep : own < width ? own : width;
  }

  // Whether rows from `first` on may see less than the block's first `width` positions.
  bool partial(int64_t first, int64_t width) const { return window != 0 || token + first / group + 1 - begin < width; }

  // Scores [width] (whole vectors) of the row's positions that it does not see become -infinity.
  void hide(int64_t row, float* scores, int64_t width) const {
    Ints lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    const auto low = static_cast<int32_t>(hidden(row)), high = static_cast<int32_t>(seen(row));
    const auto set = [&](int64_t j) {
      const Ints at = lane + static_cast<int32_t>(j);
      store(scores + j, at >= low && at < high ? load(scores + j) : splat(-__builtin_inff()));
    };
    for (int64_t j = 0; j < low && j < width; j += kLanes) set(j);
    for (int64_t j = high < 0 ? 0 : high / kLanes * kLanes; j < width; j += kLanes) set(j);
  }
};

// Weights meet V in bfloat16 where products are of that, else in float32.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
using Weight = bf16;
#else
using Weight = float;
#endif

// Stores weight(j) of a step of positions.
#if defined(__AMX_BF16__)
constexpr int64_t kStoredLanes = 2 * kLanes;

template <class Make>
KVF_INLINE void store_weights(bf16* to, int64_t j, Make weight) {
  const Floats first = weight(j), second = weight(j + kLanes);
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  std::memcpy(to, &both, sizeof both);
}
#else
constexpr int64_t kStoredLanes = kLanes;

template <class Make>
KVF_INLINE void store_weights(Weight* to, int64_t j, Make weight) {
  store(to, weight(j));
}
#endif

// What rows carry from block to block: their highest score so far, their sum of weights, and how much of what they had is
// kept since the highest score rose.
struct RowState {
  float *highest, *weight, *kept;
};

// The weights [count][weight_step] of `width` positions (whole steps) from their scores [count][step], which are to be multiplied by `scale`; the weights of V
// in int8 are multiplied by its scales. count: 1 to kLanes rows, whose states are padded to so many. The weights of a row may
// begin where its scores do.
template <bool Scaled>
KVF_INLINE void weigh_rows(const float* scores, int64_t step, int64_t count, int64_t width, float scale,
                           const float* v_scales, const RowState& state, Weight* weights, int64_t weight_step) {
  Floats lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = splat(-__builtin_inff());
  for (int64_t i = 0; i < count; ++i) {
    const float* row = scores + i * step;
    Floats top = load(row);
#pragma GCC unroll 2
    for (int64_t j = kLanes; j < width; j += kLanes) top = larger(top, load(row + j));
    lanes[i] = top;
  }
  const Floats before = load(state.highest), higher = larger(maxima(lanes) * scale, before);
  const Floats finite = larger(higher, splat(-1e38f));  // rows that have seen nothing so far
  const Floats origin = finite * kLog2E, kept = rough_power_of_two((before - finite) * kLog2E);
  alignas(64) float origins[kLanes];
  store(origins, origin);
  for (int64_t i = 0; i < count; ++i) {
    const float* row = scores + i * step;
    Weight* to = weights + i * weight_step;
    Floats added{};
    const auto weight = [&](int64_t j) {
      const Floats e = rough_power_of_two(load(row + j) * (scale * kLog2E) - origins[i]);
      added = added + e;
      return Scaled ? e * load(v_scales + j) : e;
    };
    static_assert(kSightStep % kLanes == 0, "weights are made in whole vectors");
#pragma GCC unroll 2
    for (int64_t j = 0; j < width; j += kStoredLanes) store_weights(to + j, j, weight);
    lanes[i] = added;
  }
  store(state.weight, load(state.weight) * kept + sums(lanes));
  store(state.highest, higher);
  store(state.kept, kept);
}

}  // namespace
}  // namespace kvferry
