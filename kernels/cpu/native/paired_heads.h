// Scores and weighted sums of a tile of cached positions in bfloat16, for some query heads, by products of pairs: eights of K
// and pairs of V are brought together in registers, and weights are rounded to bfloat16 as in prefill.
#pragma once

#include <type_traits>

#include "cache.h"
#include "softmax.h"

namespace kvferry {
namespace {

// A head dimension that is a multiple of it goes by pairs.
constexpr int kPairs = 32;

// Processors with tiles make half as many of these products in a cycle as others, and gain: nothing is widened.
#if defined(__AVX512BF16__)
constexpr bool kBf16Products = true;

KVF_INLINE Floats pair_products(Floats sum, Words a, Words b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

KVF_INLINE Words splat_pair(const bf16* pair) {
  uint32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return Words{} + bits;
}

// Eight numbers four times.
KVF_INLINE Words splat_eight(const bf16* eight) {
  return (Words)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)eight));
}

// Lane 4 * i + j of the result is the sum of lanes 4 * j to 4 * j + 3 of values[i].
KVF_INLINE Floats quarter_sums(const Floats (&values)[4]) {
  const auto halved = [](Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  };
  return halved(halved(values[0], values[1]), halved(values[2], values[3]));
}

// Four rows of kPairs numbers each as they are to be multiplied: part i of the result has the i-th eight numbers of each.
KVF_INLINE void gather_eights(const bf16* const* rows, int64_t column, Words (&parts)[4]) {
  Words of[4];
  for (int i = 0; i < 4; ++i) of[i] = load_as<Words>(rows[i] + column);
  const auto halves = [](Words a, Words b, auto high) {
    constexpr int at = high * 8;
    return __builtin_shufflevector(a, b, at, at + 1, at + 2, at + 3, at + 4, at + 5, at + 6, at + 7, at + 16, at + 17, at + 18,
                                   at + 19, at + 20, at + 21, at + 22, at + 23);
  };
  const auto quarters = [](Words a, Words b, auto odd) {
    constexpr int at = odd * 4;
    return __builtin_shufflevector(a, b, at, at + 1, at + 2, at + 3, at + 8, at + 9, at + 10, at + 11, at + 16, at + 17,
                                   at + 18, at + 19, at + 24, at + 25, at + 26, at + 27);
  };
  const std::integral_constant<int, 0> first;
  const std::integral_constant<int, 1> second;
  const Words low01 = halves(of[0], of[1], first), low23 = halves(of[2], of[3], first);
  const Words high01 = halves(of[0], of[1], second), high23 = halves(of[2], of[3], second);
  parts[0] = quarters(low01, low23, first), parts[1] = quarters(low01, low23, second);
  parts[2] = quarters(high01, high23, first), parts[3] = quarters(high01, high23, second);
}

// scores [Heads][kTile] = scale * q[head] . k[j] of the tile's positions, -inf behind them, up to a whole vector; the rows
// of `ahead` are fetched meanwhile.
template <int Dim, int Heads>
inline __attribute__((noinline)) void score_pairs(const bf16* q, const Tile<bf16>& tile, const Tile<bf16>& ahead, int64_t dim,
                                                  float scale, float* scores) {
  const int64_t width = Dim > kPairs ? Dim : dim;
  for (int64_t j = 0; j < tile.count; j += kLanes) {
    Floats sums[Heads][4];
#pragma GCC unroll 4
    for (int some = 0; some < 4; ++some) {
      Floats total[Heads] = {};
      if (j + 4 * some < ahead.count)
        for (int64_t i = j + 4 * some; i < j + 4 * some + 4; ++i) fetch(ahead.k[i], width);
#pragma GCC unroll 4
      for (int64_t d = 0; d < width; d += kPairs) {
        Words parts[4];
        gather_eights(tile.k + j + 4 * some, d, parts);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
          for (int h = 0; h < Heads; ++h)
            total[h] = pair_products(total[h], parts[i], splat_eight(q + h * width + d + 8 * i));
      }
#pragma GCC unroll 4
      for (int h = 0; h < Heads; ++h) sums[h][some] = total[h];
    }
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      store(scores + h * kTile + j, quarter_sums(sums[h]) * scale);
      for (int64_t i = tile.count; i < j + kLanes; ++i) scores[h * kTile + i] = -__builtin_inff();
    }
  }
}

// Pairs of numbers of two rows, kLanes of them from the Part-th kLanes on.
template <int Part, class Row, size_t... Lane>
KVF_INLINE Words interleaved(Row a, Row b, std::index_sequence<Lane...>) {
  return reinterpret_cast<Words>(__builtin_shufflevector(a, b, (Part * kLanes + Lane / 2 + Lane % 2 * kPairs)...));
}

// total [Heads][dim] (`Blocks` times kPairs columns from `column` on) += sum over j of weights[head][j] * v[j]. Behind the
// tile's positions weights are zeros.
template <int Heads, int Blocks>
KVF_INLINE void weigh_columns(const Tile<bf16>& tile, const Tile<bf16>* ahead, const bf16* weights, int64_t dim,
                              int64_t column, float* total) {
  typedef bf16 Row __attribute__((vector_size(2 * kPairs)));
  constexpr auto lanes = std::make_index_sequence<kPairs>();
  Floats sum[Heads][2 * Blocks];
  for (int h = 0; h < Heads; ++h)
    for (int c = 0; c < 2 * Blocks; ++c) sum[h][c] = load(total + h * dim + column + c * kLanes);
  for (int64_t j = 0; j < tile.count; j += 2) {
    if (ahead != nullptr && j < ahead->count) fetch(ahead->v[j], dim), fetch(ahead->v[j + 1], dim);
#pragma GCC unroll 2
    for (int block = 0; block < Blocks; ++block) {
      const Row a = load_as<Row>(tile.v[j] + column + block * kPairs), b = load_as<Row>(tile.v[j + 1] + column + block * kPairs);
      const Words low = interleaved<0>(a, b, lanes), high = interleaved<1>(a, b, lanes);
#pragma GCC unroll 4
      for (int h = 0; h < Heads; ++h) {
        const Words pair = splat_pair(weights + h * kTile + j);
        sum[h][2 * block] = pair_products(sum[h][2 * block], low, pair);
        sum[h][2 * block + 1] = pair_products(sum[h][2 * block + 1], high, pair);
      }
    }
  }
  for (int h = 0; h < Heads; ++h)
    for (int c = 0; c < 2 * Blocks; ++c) store(total + h * dim + column + c * kLanes, sum[h][c]);
}

template <int Dim, int Heads>
inline __attribute__((noinline)) void weigh_pairs(const Tile<bf16>& tile, const Tile<bf16>* ahead, const bf16* weights,
                                                  int64_t dim, float* total) {
  const int64_t width = Dim > kPairs ? Dim : dim;
  int64_t column = 0;
  for (; column + 2 * kPairs <= width; column += 2 * kPairs, ahead = nullptr)
    weigh_columns<Heads, 2>(tile, ahead, weights, width, column, total);
  if (column < width) weigh_columns<Heads, 1>(tile, ahead, weights, width, column, total);
}

#else
constexpr bool kBf16Products = false;

template <int Dim, int Heads>
void score_pairs(const bf16*, const Tile<bf16>&, const Tile<bf16>&, int64_t, float, float*);
template <int Dim, int Heads>
void weigh_pairs(const Tile<bf16>&, const Tile<bf16>*, const bf16*, int64_t, float*);
#endif

}  // namespace
}  // namespace kvferry
