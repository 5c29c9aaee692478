// Products of unsigned codes with int8 activations, four inputs to a 32-bit lane.
//
// Dot<Bits>::add() adds products to 32-bit sums, or where kSteps is above 0 to a Part of 16 bits, which takes so many of them
// before drain() makes sums of it. Codes are taken `kOffset` lower where the instruction set multiplies signed bytes.
#pragma once

#include "vector.h"

namespace kvferry {
namespace {

#if defined(__AVX512BW__)
#define KVF_DOT_VECTOR __m512i
#define KVF_DOT(name) _mm512_##name
#elif defined(__AVX2__)
#define KVF_DOT_VECTOR __m256i
#define KVF_DOT(name) _mm256_##name
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

template <int Bits>
struct Dot {
  static constexpr int kSteps = 0, kOffset = 0;
  static KVF_INLINE void add(Ints& sums, Words codes, Words x) {
#if defined(__AVX512VNNI__)
    sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)x);
#else
    sums = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, (__m256i)x);
#endif
  }
};

#elif defined(__ARM_FEATURE_MATMUL_INT8)

template <int Bits>
struct Dot {
  static constexpr int kSteps = 0, kOffset = 0;
  static KVF_INLINE void add(Ints& sums, Words codes, Words x) {
    sums = (Ints)vusdotq_s32((int32x4_t)sums, (uint8x16_t)codes, (int8x16_t)x);
  }
};

#elif defined(__ARM_FEATURE_DOTPROD)

// Both sides are signed: codes of eight bits are taken 128 lower.
template <int Bits>
struct Dot {
  static constexpr int kSteps = 0, kOffset = Bits == 8 ? 128 : 0;
  static KVF_INLINE void add(Ints& sums, Words codes, Words x) {
    if constexpr (Bits == 8) codes ^= 0x80808080u;
    sums = (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)codes, (int8x16_t)x);
  }
};

#elif defined(KVF_DOT_VECTOR)

// Sums of two products fit 16 bits; of how many more depends on the codes: (2^Bits - 1) * 127 * 2 a step.
template <int Bits>
struct Dot {
  using Part = KVF_DOT_VECTOR;
  static constexpr int kSteps = Bits == 4 ? 8 : Bits == 5 ? 4 : 2, kOffset = 0;
  static KVF_INLINE void add(Part& part, Words codes, Words x) {
    part = KVF_DOT(add_epi16)(part, KVF_DOT(maddubs_epi16)((Part)codes, (Part)x));
  }
  static KVF_INLINE Ints drain(Part part) { return (Ints)KVF_DOT(madd_epi16)(part, KVF_DOT(set1_epi16)(1)); }
};

// |code| fits seven bits and more only once the offset is taken off; the sign moves to x.
template <>
struct Dot<8> {
  static constexpr int kSteps = 0, kOffset = 128;
  static KVF_INLINE void add(Ints& sums, Words codes, Words x) {
    const auto w = (KVF_DOT_VECTOR)(codes ^ 0x80808080u);
#if defined(__AVX512BW__)
    const __mmask64 negative = _mm512_movepi8_mask(w);
    const auto turned = _mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
#else
    const auto turned = _mm256_sign_epi8((__m256i)x, w);
#endif
    const auto pairs = KVF_DOT(maddubs_epi16)(KVF_DOT(abs_epi8)(w), turned);
    sums = sums + (Ints)KVF_DOT(madd_epi16)(pairs, KVF_DOT(set1_epi16)(1));
  }
};

#else

template <int Bits>
struct Dot {
  static constexpr int kSteps = 0, kOffset = 0;
  static KVF_INLINE void add(Ints& sums, Words codes, Words x) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      sums = sums + (Ints)((codes >> (8 * i)) & 0xffu) * ((Ints)(x << (24 - 8 * i)) >> 24);
  }
};

#endif

#if defined(KVF_DOT_VECTOR)
#undef KVF_DOT_VECTOR
#undef KVF_DOT
#endif

template <int Step, class V, size_t... Lane>
KVF_INLINE V exchanged(V value, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(value, value, (Lane ^ Step)...);
}

// Joins all lanes; every lane of the result holds what they make. join(a, b): of vectors, the same in any order.
template <int Step = kLanes / 2, class V, class Join>
KVF_INLINE V across(V value, Join join) {
  value = join(value, exchanged<Step>(value, std::make_index_sequence<kLanes>()));
  if constexpr (Step > 1) return across<Step / 2>(value, join);
  return value;
}

KVF_INLINE Words splat_word(const int8_t* four) {
  uint32_t bits;
  std::memcpy(&bits, four, sizeof bits);
  return Words{} + bits;
}

// kLanes float16 values.
KVF_INLINE Floats load_half(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16(load_as<float16x4_t>(from));
#else
  const Words bits = __builtin_convertvector(load_as<Halves>(from), Words);
  const Floats size = reinterpret_cast<Floats>((bits & 0x7fffu) << 13) * 0x1p112f;
  return reinterpret_cast<Floats>(reinterpret_cast<Words>(size) | (bits & 0x8000u) << 16);
#endif
}

}  // namespace
}  // namespace kvferry
