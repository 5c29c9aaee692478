// Float vectors of the width this translation unit is compiled for, bfloat16 in and out, sums and exponentials.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define KVF_INLINE inline __attribute__((always_inline))

namespace kvferry {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using bf16 = uint16_t;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

template <class V>
KVF_INLINE V load_as(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

KVF_INLINE Floats splat(float value) { return value - Floats{}; }

KVF_INLINE float widen(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Rounds to nearest even; every NaN becomes the quiet one.
KVF_INLINE bf16 narrow(float value) {
  if (value != value) return 0x7fc0;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Of pairs of bfloat16: the first of each, the second of each.
KVF_INLINE Floats even_of(Words both) { return reinterpret_cast<Floats>(both << 16); }
KVF_INLINE Floats odd_of(Words both) { return reinterpret_cast<Floats>(both & 0xffff0000u); }

KVF_INLINE Floats load(const float* from) { return load_as<Floats>(from); }

// GCC splits a generic conversion of 16 lanes in halves, so the wide sets name the instruction.
KVF_INLINE Floats load(const bf16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
  return reinterpret_cast<Floats>(__builtin_convertvector(load_as<Halves>(from), Words) << 16);
#endif
}

KVF_INLINE Floats load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector(load_as<Bytes>(from), Floats);
#endif
}

KVF_INLINE void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// Stores the lower halves of words.
KVF_INLINE void store_low(bf16* to, Words whole) {
#if defined(__AVX512F__)
  const __m256i out = _mm512_cvtepi32_epi16((__m512i)whole);
#else
  const Halves out = __builtin_convertvector(whole, Halves);
#endif
  std::memcpy(to, &out, sizeof out);
}

KVF_INLINE void store(bf16* to, Floats value) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
  std::memcpy(to, &rounded, sizeof rounded);
#else
  const Words bits = reinterpret_cast<Words>(value);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  store_low(to, value == value ? rounded : Words{} + 0x7fc0);
#endif
}

// Stores what bfloat16 holds exactly.
KVF_INLINE void store_exact(bf16* to, Floats value) {
  store_low(to, reinterpret_cast<Words>(value) >> 16);
}

KVF_INLINE float load_one(const float* from) { return *from; }
KVF_INLINE float load_one(const bf16* from) { return widen(*from); }
KVF_INLINE void store_one(float* to, float value) { *to = value; }
KVF_INLINE void store_one(bf16* to, float value) { *to = narrow(value); }

// The value as it is once stored in T.
KVF_INLINE Floats rounded_to(Floats value, const float*) { return value; }
KVF_INLINE Floats rounded_to(Floats value, const bf16*) {
  bf16 stored[kLanes];
  store(stored, value);
  return load(stored);
}

KVF_INLINE float sum(Floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  float lanes[kLanes];
  store(lanes, value);
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  return lanes[0];
#endif
}

KVF_INLINE Floats to_floats(Ints value) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps((__m512i)value);
#else
  return __builtin_convertvector(value, Floats);
#endif
}

// Whether some lane of a comparison holds.
KVF_INLINE bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each mask of 8 lanes: the indices of those it holds, a byte each.
struct PackedLanes {
  uint64_t of[256] = {};
  constexpr PackedLanes() {
    for (int mask = 0; mask < 256; ++mask)
      for (int lane = 0, at = 0; lane < 8; ++lane)
        if (mask >> lane & 1) of[mask] |= static_cast<uint64_t>(lane) << (8 * at++);
  }
};
constexpr PackedLanes kPackedLanes;
#endif

// Stores the lanes of a comparison that hold, next to each other, and returns how many; writes kLanes floats.
KVF_INLINE int store_packed(float* to, Floats value, Ints mask) {
#if defined(__AVX512F__)
  const __mmask16 bits = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(bits, (__m512)value));
  return __builtin_popcount(bits);
#elif defined(__AVX2__)
  const int bits = _mm256_movemask_ps((__m256)mask);
  const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)&kPackedLanes.of[bits]));
  _mm256_storeu_ps(to, _mm256_permutevar8x32_ps((__m256)value, lanes));
  return __builtin_popcount(bits);
#else
  int count = 0;
  for (int i = 0; i < kLanes; count -= mask[i++]) to[count] = value[i];
  return count;
#endif
}

KVF_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
KVF_INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

KVF_INLINE float largest(Floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  float lanes[kLanes];
  store(lanes, value);
  float out = lanes[0];
  for (int i = 1; i < kLanes; ++i) out = lanes[i] > out ? lanes[i] : out;
  return out;
#endif
}

constexpr float kLog2E = 1.44269504088896341f;

// e^x within 2 units in the last place (range reduction by ln 2 in two parts, polynomial of Cephes' expf);
// 0 far below, the largest power far above.
KVF_INLINE Floats exponential(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Floats bounded = smaller(larger(x, splat(-87.0f)), splat(88.0f));
  const Floats shifted = bounded * kLog2E + kRound;
  const Floats n = shifted - kRound;
  const Floats r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints exponent = (reinterpret_cast<Ints>(shifted) - 0x4b400000 + 127) << 23;
  const Floats value = p * reinterpret_cast<Floats>(exponent);
  return x < splat(-87.0f) ? Floats{} : value;
}

// 2^x within 2 units in the last place, for x up to 127; 0 below -126. Taylor's polynomial, since x - n is exact.
KVF_INLINE Floats power_of_two(Floats x) {
  constexpr float kRound = 12582912.0f;
  const Floats shifted = x + kRound, n = shifted - kRound, r = x - n;
  Floats p = splat(1.54035304e-4f);
  p = p * r + 1.33335581e-3f;
  p = p * r + 9.61812911e-3f;
  p = p * r + 5.55041087e-2f;
  p = p * r + 2.40226507e-1f;
  p = p * r + 6.93147181e-1f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ), (__m512)p, (__m512)n);
#else
  const Ints exponent = (reinterpret_cast<Ints>(shifted) - 0x4b400000 + 127) << 23;
  return x < splat(-126.0f) ? Floats{} : p * reinterpret_cast<Floats>(exponent);
#endif
}

// x / (1 + e^-x)
KVF_INLINE Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

}  // namespace
}  // namespace kvferry
