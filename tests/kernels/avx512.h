// Stands in for AVX-512 on processors without it: F and BW, with EMULATED_VNNI, EMULATED_BF16 and EMULATED_AMX what they
// name too. The intrinsics that the kernels use, lane by lane, as Intel's intrinsics guide defines them; only their
// results are like the instructions'.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#if defined(EMULATED_VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(EMULATED_BF16)
#define __AVX512BF16__ 1
#endif

namespace {
namespace emulated {

// A register's lanes, to and from.
template <class L, class V>
struct Lanes {
  L of[sizeof(V) / sizeof(L)];
  static constexpr int count = sizeof(V) / sizeof(L);
  Lanes() : of{} {}
  explicit Lanes(const V& value) { std::memcpy(of, &value, sizeof value); }
  operator V() const {
    V value;
    std::memcpy(&value, of, sizeof value);
    return value;
  }
};

template <class To, class V, class From, class W, class Convert>
inline V each(const W& a, Convert convert) {
  const Lanes<From, W> from(a);
  Lanes<To, V> to;
  for (int i = 0; i < to.count; ++i) to.of[i] = convert(from.of[i]);
  return to;
}

template <class L, class V, class Join>
inline V both(const V& a, const V& b, Join join) {
  Lanes<L, V> to(a);
  const Lanes<L, V> other(b);
  for (int i = 0; i < to.count; ++i) to.of[i] = join(to.of[i], other.of[i]);
  return to;
}

inline int16_t saturated(int value) { return value > 32767 ? 32767 : value < -32768 ? -32768 : value; }

// Denormal bfloat16 counts as zero.
inline float widened(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half & 0x7f80 ? half : half & 0x8000) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t narrowed(uint32_t bits) {
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  if ((bits & 0x7f800000) == 0) return static_cast<uint16_t>(bits >> 16 & 0x8000);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline __m512i load(const void* from) {
  __m512i value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline void store(void* to, __m512 value) { std::memcpy(to, &value, sizeof value); }
inline __m512i zero() { return Lanes<int, __m512i>(); }
inline __m512i splat32(int value) { return each<int, __m512i, int>(zero(), [=](int) { return value; }); }
inline __m512i splat16(int16_t value) { return each<int16_t, __m512i, int16_t>(zero(), [=](int16_t) { return value; }); }
inline __m512i shift_left(__m512i a, unsigned by) {
  return each<uint32_t, __m512i, uint32_t>(a, [=](uint32_t x) { return by > 31 ? 0 : x << by; });
}
inline __m512i from_u16(__m256i a) { return each<int, __m512i, uint16_t>(a, [](uint16_t x) { return x; }); }
inline __m512i from_i8(__m128i a) { return each<int, __m512i, int8_t>(a, [](int8_t x) { return x; }); }
inline __m512 to_float(__m512i a) { return each<float, __m512, int>(a, [](int x) { return static_cast<float>(x); }); }
inline __m512i nearest(__m512 a) {
  return each<int, __m512i, float>(a, [](float x) { return static_cast<int>(std::nearbyint(x)); });
}
inline __m256i to_i16(__m512i a) { return each<int16_t, __m256i, int>(a, [](int x) { return static_cast<int16_t>(x); }); }
inline __m128i to_i8(__m512i a) { return each<int8_t, __m128i, int>(a, [](int x) { return static_cast<int8_t>(x); }); }
inline __m512 from_half(__m256i a) {
  return each<float, __m512, uint16_t>(a, [](uint16_t x) { return _cvtsh_ss(x); });
}
inline __m512i magnitude(__m512i a) {
  return each<int8_t, __m512i, int8_t>(a, [](int8_t x) { return static_cast<int8_t>(x < 0 ? -x : x); });
}
inline __m512i add16(__m512i a, __m512i b) {
  return both<int16_t>(a, b, [](int16_t x, int16_t y) { return static_cast<int16_t>(x + y); });
}

inline float total(__m512 a) {
  Lanes<float, __m512> lanes(a);
  for (int step = 8; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lanes.of[i] += lanes.of[i + step];
  return lanes.of[0];
}

inline float most(__m512 a) {
  const Lanes<float, __m512> lanes(a);
  float out = lanes.of[0];
  for (int i = 1; i < 16; ++i) out = lanes.of[i] > out ? lanes.of[i] : out;
  return out;
}

// What is above the integer below x; of infinities, nothing.
inline __m512 above_integer(__m512 a, int) {
  return each<float, __m512, float>(a, [](float x) { return std::isinf(x) ? 0.0f : x - std::floor(x); });
}
inline __m512 scaled(__m512 a, __m512 powers) {
  const Lanes<float, __m512> by(powers);
  Lanes<float, __m512> of(a);
  for (int i = 0; i < 16; ++i) of.of[i] *= std::exp2(std::floor(by.of[i]));
  return of;
}
inline __m512i four_times(__m128i a) {
  Lanes<int, __m512i> out{zero()};
  for (int i = 0; i < 4; ++i) std::memcpy(out.of + 4 * i, &a, sizeof a);
  return out;
}

inline __mmask16 common_bits(__m512i a, __m512i b) {
  const Lanes<int, __m512i> x(a), y(b);
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>((x.of[i] & y.of[i]) != 0) << i;
  return static_cast<__mmask16>(mask);
}

inline __m512 compressed(__mmask16 mask, __m512 a) {
  const Lanes<float, __m512> from(a);
  Lanes<float, __m512> to;
  for (int i = 0, at = 0; i < 16; ++i)
    if (mask >> i & 1) to.of[at++] = from.of[i];
  return to;
}

inline __mmask64 signs(__m512i a) {
  const Lanes<int8_t, __m512i> lanes(a);
  uint64_t mask = 0;
  for (int i = 0; i < 64; ++i) mask |= static_cast<uint64_t>(lanes.of[i] < 0) << i;
  return mask;
}

inline __m512i subtracted8(__m512i otherwise, __mmask64 mask, __m512i a, __m512i b) {
  Lanes<int8_t, __m512i> to(otherwise);
  const Lanes<int8_t, __m512i> x(a), y(b);
  for (int i = 0; i < 64; ++i)
    if (mask >> i & 1) to.of[i] = static_cast<int8_t>(x.of[i] - y.of[i]);
  return to;
}

inline __m512i products8(__m512i a, __m512i b) {
  const Lanes<uint8_t, __m512i> x(a);
  const Lanes<int8_t, __m512i> y(b);
  Lanes<int16_t, __m512i> to;
  for (int i = 0; i < 32; ++i) to.of[i] = saturated(x.of[2 * i] * y.of[2 * i] + x.of[2 * i + 1] * y.of[2 * i + 1]);
  return to;
}

inline __m512i products16(__m512i a, __m512i b) {
  const Lanes<int16_t, __m512i> x(a), y(b);
  Lanes<int, __m512i> to;
  for (int i = 0; i < 16; ++i) to.of[i] = x.of[2 * i] * y.of[2 * i] + x.of[2 * i + 1] * y.of[2 * i + 1];
  return to;
}

inline __m512i add_products8(__m512i sums, __m512i a, __m512i b) {
  const Lanes<uint8_t, __m512i> x(a);
  const Lanes<int8_t, __m512i> y(b);
  Lanes<int, __m512i> to(sums);
  for (int i = 0; i < 64; ++i) to.of[i / 4] += x.of[i] * y.of[i];
  return to;
}

// The odd product is added first.
inline __m512 add_products_bf16(__m512 sums, __m512bh a, __m512bh b) {
  const Lanes<uint16_t, __m512bh> x(a), y(b);
  Lanes<float, __m512> to(sums);
  for (int i = 0; i < 16; ++i)
    for (int j = 2 * i + 1; j >= 2 * i; --j) to.of[i] = std::fma(widened(x.of[j]), widened(y.of[j]), to.of[i]);
  return to;
}

inline __m512 splat_float(float value) { return each<float, __m512, int>(zero(), [=](int) { return value; }); }
inline __m512 fused(__m512 a, __m512 b, __m512 sums) {
  const Lanes<float, __m512> x(a), y(b);
  Lanes<float, __m512> to(sums);
  for (int i = 0; i < 16; ++i) to.of[i] = std::fma(x.of[i], y.of[i], to.of[i]);
  return to;
}

inline __m256bh to_bf16(__m512 a) { return each<uint16_t, __m256bh, uint32_t>(a, narrowed); }
inline __m512bh to_bf16_pair(__m512 upper, __m512 lower) {
  const __m256bh halves[2] = {to_bf16(lower), to_bf16(upper)};
  __m512bh both;
  std::memcpy(&both, halves, sizeof both);
  return both;
}

inline __mmask16 compared(__m512 a, __m512 b, int predicate) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (predicate == _CMP_GE_OQ ? a[i] >= b[i] : throw predicate) << i;
  return mask;
}

inline __m512 scaled_where(__mmask16 mask, __m512 a, __m512 b) {
  __m512 out = scaled(a, b);
  for (int i = 0; i < 16; ++i) out[i] = mask >> i & 1 ? out[i] : 0;
  return out;
}

}  // namespace emulated
}  // namespace

#define _mm512_loadu_si512 emulated::load
#define _mm512_storeu_ps emulated::store
#define _mm512_stream_ps emulated::store
#define _mm512_setzero_si512 emulated::zero
#define _mm512_set1_epi32 emulated::splat32
#define _mm512_set1_ps emulated::splat_float
#define _mm512_set1_epi16 emulated::splat16
#define _mm512_slli_epi32 emulated::shift_left
#define _mm512_cvtepu16_epi32 emulated::from_u16
#define _mm512_cvtepi8_epi32 emulated::from_i8
#define _mm512_cvtepi32_ps emulated::to_float
#define _mm512_cvtps_epi32 emulated::nearest
#define _mm512_cvtepi32_epi16 emulated::to_i16
#define _mm512_cvtepi32_epi8 emulated::to_i8
#define _mm512_cvtph_ps emulated::from_half
#define _mm512_abs_epi8 emulated::magnitude
#define _mm512_add_epi16 emulated::add16
#define _mm512_reduce_add_ps emulated::total
#define _mm512_reduce_max_ps emulated::most
#define _mm512_reduce_ps emulated::above_integer
#define _mm512_scalef_ps emulated::scaled
#define _mm512_maskz_scalef_ps emulated::scaled_where
#define _mm512_cmp_ps_mask emulated::compared
#define _mm512_broadcast_i32x4 emulated::four_times
#define _mm512_test_epi32_mask emulated::common_bits
#define _mm512_maskz_compress_ps emulated::compressed
#define _mm512_movepi8_mask emulated::signs
#define _mm512_mask_sub_epi8 emulated::subtracted8
#define _mm512_maddubs_epi16 emulated::products8
#define _mm512_madd_epi16 emulated::products16
#define _mm512_dpbusd_epi32 emulated::add_products8
#define _mm512_dpbf16_ps emulated::add_products_bf16
#define _mm512_fmadd_ps emulated::fused
#define _mm512_cvtneps_pbh emulated::to_bf16
#define _mm512_cvtne2ps_pbh emulated::to_bf16_pair

#if defined(EMULATED_AMX)
#include "amx.h"
#endif
