// K and V of cached positions as panels (see product.h), for attention by products of small matrices.
#pragma once

#include "cache.h"
#include "forms.h"
#include "transposed.h"

namespace kvferry {
namespace {

// K and V of some positions under one head, packed; scales: of int8, null otherwise.
struct PackedPositions {
  uint8_t *k, *v;
  int64_t v_step;  // bytes between 32 dimensions and the next
  float *k_scales, *v_scales;

  PackedPositions from(int64_t position, HeadDims dims) const {
    return {k + position * dims.k * 2, v + position * kPanel * 2, v_step, k_scales == nullptr ? nullptr : k_scales + position,
            v_scales == nullptr ? nullptr : v_scales + position};
  }
};

KVF_INLINE PackedPositions packed_at(uint8_t* memory, int64_t positions, HeadDims dims, bool scaled) {
  auto* scales = reinterpret_cast<float*>(memory + positions * (dims.k + dims.v) * 2);
  return {memory, memory + positions * dims.k * 2, positions * kPanel * 2, scaled ? scales : nullptr,
          scaled ? scales + positions : nullptr};
}

// K of 32 positions: for each pair of dimensions, the pairs of 32 positions.
KVF_INLINE void pack_k(const bf16* const* rows, int64_t dim, uint8_t* panel) {
  for (int64_t j = 0; j < kPanel; j += kLanes)
    for (int64_t d = 0; d < dim / 2; d += kLanes) {
      Words square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = load_as<Words>(rows[j + i] + 2 * d);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        std::memcpy(panel + ((d + i) * kPanel + j) * 4, &square[i], sizeof square[i]);
    }
}

// V of 32 positions: for each 32 dimensions (`step` bytes apart) and each pair of positions, the pairs of 32 dimensions.
KVF_INLINE void pack_v(const bf16* const* rows, int64_t dim, uint8_t* panel, int64_t step) {
  for (int64_t j = 0; j < kPanel; j += 2)
    for (int64_t p = 0; p < dim / kPanel; ++p) {
      const bf16 *a = rows[j] + p * kPanel, *b = rows[j + 1] + p * kPanel;
      auto* to = reinterpret_cast<uint32_t*>(panel + p * step) + j / 2 * kPanel;
      for (int64_t d = 0; d < kPanel; ++d) to[d] = a[d] | static_cast<uint32_t>(b[d]) << 16;
    }
}

// Rows in bfloat16: as they are, or int8 without their scales, which bfloat16 holds exactly.
KVF_INLINE void widen_rows(const bf16* const* rows, int64_t count, int64_t, bf16*, const bf16** out, float*) {
  for (int64_t j = 0; j < count; ++j) out[j] = rows[j];
}

KVF_INLINE void widen_rows(const int8_t* const* rows, int64_t count, int64_t dim, bf16* memory, const bf16** out,
                           float* scales) {
  for (int64_t j = 0; j < count; ++j, memory += dim) {
    for (int64_t d = 0; d < dim; d += kLanes) store_exact(memory + d, load(rows[j] + d));
    scales[j] = scale_of(rows[j], dim);
    out[j] = memory;
  }
  for (int64_t j = count; j < kPanel; ++j) scales[j] = 0;
}

template <class S>
inline __attribute__((noinline)) void pack_stored(const Tile<S>& tile, HeadDims dims, const PackedPositions& to) {
  static constexpr bf16 kNothing[kMaxDim] = {};
  alignas(64) bf16 memory[sizeof(S) == 1 ? kPanel * kMaxDim : 1];
  const bf16* rows[kPanel];
  for (int64_t j = tile.count; j < kPanel; ++j) rows[j] = kNothing;
  widen_rows(tile.k, tile.count, dims.k, memory, rows, to.k_scales);
  pack_k(rows, dims.k, to.k);
  widen_rows(tile.v, tile.count, dims.v, memory, rows, to.v_scales);
  pack_v(rows, dims.v, to.v, to.v_step);
}

// Packs positions [begin, end), at most 32 of them; the panel's others are zeros.
KVF_INLINE void pack_panel(const KVLayer& kv, HeadDims dims, int64_t head, const int32_t* table, int64_t begin,
                           int64_t end, const PackedPositions& to) {
  if (kv.int8) {
    Tile<int8_t> tile;
    tile.find(kv, head, table, begin, end);
    pack_stored(tile, dims, to);
  } else {
    Tile<bf16> tile;
    tile.find(kv, head, table, begin, end);
    pack_stored(tile, dims, to);
  }
}

}  // namespace
}  // namespace kvferry
