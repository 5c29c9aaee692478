// What this machine can do at most, measured by the same threads as the kernels: reading memory, multiplying bfloat16.
#pragma once

#include "types.h"
#include "vector.h"

#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

namespace kvferry {
namespace {

// Reads the member's share of `bytes` (a multiple of 4096 a member), and leaves something that depends on all of it.
KVF_INLINE void read_pages(const ReadTask& t, Share pages) {
  const char* at = static_cast<const char*>(t.data) + pages.begin * 4096;
  const char* end = static_cast<const char*>(t.data) + pages.end * 4096;
  Words sums[4] = {};
  constexpr int kStep = sizeof(Words);
  for (; at < end; at += 4 * kStep) {
    __builtin_prefetch(at + 4096);
    if constexpr (kStep == 64) {
      __builtin_prefetch(at + 4096 + 64);
      __builtin_prefetch(at + 4096 + 128);
      __builtin_prefetch(at + 4096 + 192);
    }
    for (int i = 0; i < 4; ++i) sums[i] ^= load_as<Words>(at + i * kStep);
  }
  const Words all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  asm volatile("" : : "m"(all));
}

void run_read(void* argument, int member, int, Barrier& barrier) {
  const ReadTask& t = *static_cast<ReadTask*>(argument);
  barrier.each_run(t.bytes / 4096, member, [&](Share pages) { read_pages(t, pages); });
}

#if defined(__AVX512VL__)
#define KVF_OPAQUE(value) asm volatile("" : "+v"(value))
#elif defined(__x86_64__) && !defined(__AVX512F__)
#define KVF_OPAQUE(value) asm volatile("" : "+x"(value))
#elif defined(__aarch64__)
#define KVF_OPAQUE(value) asm volatile("" : "+w"(value))
#else
#define KVF_OPAQUE(value) asm volatile("" : "+m"(value))
#endif

#if defined(__AMX_BF16__)

// `rounds` times the four products of two by two tiles on every member, in registers.
inline void multiply_rounds(const MultiplyTask& t) {
  Tiles tiles;
  tiles.shape(kTwoTiles, kTileDepth);
  for (int64_t round = 0; round < t.rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

constexpr int64_t kRoundWork = kTwoTiles * kPanel * 2 * kTileDepth * 2;

#else

constexpr int kChains = 12;

// `rounds` times kChains multiplications and additions of whole vectors on every member, in registers.
inline void multiply_rounds(const MultiplyTask& t) {
  Floats chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = splat(static_cast<float>(i));
#if defined(__AVX512BF16__)
  __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f80);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  bfloat16x8_t x = vreinterpretq_bf16_f32(vdupq_n_f32(1.0f));
#else
  Floats x = splat(1.0f);
#endif
  for (int64_t round = 0; round < t.rounds; ++round) {
    KVF_OPAQUE(x);
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i)
#if defined(__AVX512BF16__)
      chains[i] = (Floats)_mm512_dpbf16_ps((__m512)chains[i], x, x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
      chains[i] = (Floats)vbfmmlaq_f32((float32x4_t)chains[i], x, x);
#else
      chains[i] = chains[i] * x + x;
#endif
  }
  for (int i = 0; i < kChains; ++i) asm volatile("" : : "m"(chains[i]));
}

#if defined(__AVX512BF16__)
constexpr int64_t kRoundWork = int64_t{kChains} * kLanes * 4;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr int64_t kRoundWork = int64_t{kChains} * kLanes * 8;  // of a lane: four products and their sums
#else
constexpr int64_t kRoundWork = int64_t{kChains} * kLanes * 2;
#endif

#endif

// As many times as there are members.
void run_multiply(void* argument, int member, int size, Barrier& barrier) {
  const MultiplyTask& t = *static_cast<MultiplyTask*>(argument);
  barrier.each(size, member, [&] { return [&](int64_t) { multiply_rounds(t); }; });
}

}  // namespace
}  // namespace kvferry
