// Stands in for AVX-VNNI on processors without it: the one intrinsic that the kernels use.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define __AVXVNNI__ 1

namespace {
namespace emulated {

inline __m256i add_products8(__m256i sums, __m256i a, __m256i b) {
  uint8_t x[32];
  int8_t y[32];
  int32_t to[8];
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  std::memcpy(to, &sums, sizeof to);
  for (int i = 0; i < 32; ++i) to[i / 4] += x[i] * y[i];
  std::memcpy(&sums, to, sizeof to);
  return sums;
}

}  // namespace emulated
}  // namespace

#define _mm256_dpbusd_avx_epi32 emulated::add_products8
