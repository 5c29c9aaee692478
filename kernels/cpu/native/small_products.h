// Products of small float32 matrices that lie in a core's caches, and their transposition: what the chunked forms of
// recurrent layers are made of.
#pragma once

#include "stream.h"

namespace kvferry {
namespace {

// Sums of a tile, kTileHeight rows by vectors, stay in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileHeight = 8;
#else
constexpr int kTileHeight = 4;
#endif
constexpr int kTileVecs = 2, kTileWidth = kTileVecs * kLanes;

// total [kTileHeight][Vecs] += a [height, depth] * b [depth, width]. Elements of a are `a_row` and `a_step` floats apart, rows
// of b `b_step`.
template <int Vecs>
KVF_INLINE void add_product(Floats (&total)[kTileHeight][Vecs], const float* a, int64_t a_row, int64_t a_step, const float* b,
                            int64_t b_step, int64_t depth) {
  for (int64_t k = 0; k < depth; ++k, a += a_step, b += b_step) {
    Floats right[Vecs];
#pragma GCC unroll 2
    for (int j = 0; j < Vecs; ++j) right[j] = load(b + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kTileHeight; ++r) {
      const Floats left = splat(a[r * a_row]);
#pragma GCC unroll 2
      for (int j = 0; j < Vecs; ++j) total[r][j] = total[r][j] + left * right[j];
    }
  }
}

template <int Step, size_t... Lane>
KVF_INLINE void exchange(Floats& upper, Floats& lower, std::index_sequence<Lane...>) {
  const Floats a = upper, b = lower;
  upper = __builtin_shufflevector(a, b, ((Lane & Step) ? kLanes + (Lane & ~Step) : Lane)...);
  lower = __builtin_shufflevector(a, b, ((Lane & Step) ? kLanes + Lane : (Lane | Step))...);
}

// values [kLanes], vectors of as many lanes, transposed.
template <int Step = kLanes / 2>
KVF_INLINE void transpose(Floats* values) {
  for (int i = 0; i < kLanes; ++i)
    if ((i & Step) == 0) exchange<Step>(values[i], values[i + Step], std::make_index_sequence<kLanes>());
  if constexpr (Step > 1) transpose<Step / 2>(values);
}

// to [cols, rows] = the transpose of from [rows, cols]; rows of each are `*_step` floats apart.
inline __attribute__((noinline)) void transpose_all(const float* from, int64_t from_step, int64_t rows, int64_t cols,
                                                    float* to, int64_t to_step) {
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t c = 0; c < cols; c += kLanes) {
      Floats block[kLanes] = {};
      for (int64_t i = 0; i < kLanes && r + i < rows; ++i) block[i] = load_part(from + (r + i) * from_step + c, cols - c);
      transpose(block);
      for (int64_t i = 0; i < kLanes && c + i < cols; ++i) store_part(to + (c + i) * to_step + r, block[i], rows - r);
    }
}

}  // namespace
}  // namespace kvferry
