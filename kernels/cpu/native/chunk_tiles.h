// Chunks of prompts of recurrent layers in bfloat16 by AMX tiles. Keys and queries are numbers of bfloat16 as they came; what
// makes them vectors of length one multiplies sums. Numbers of states and changes are sums of two numbers of bfloat16, which
// have 16 bits together, so a product with a state is two of tiles. What is solved for, and what tokens of a chunk give each
// other, stays in float32, and so do states.
#pragma once

#include <type_traits>

#include "float_chunks.h"
#if defined(__AMX_BF16__)
#include "bf16_tiles.h"
#endif

namespace kvferry {
namespace {

#if defined(__AMX_BF16__)

static_assert(kChunkTokens == kTwoTiles && kTileWidth == kPanel && kDepthUnit == 2 * kTileDepth);

// Pairs of the upper, and of the lower halves of two rows' numbers.
KVF_INLINE void store_halves(Floats a, Floats b, uint32_t* upper, uint32_t* lower) {
  const auto rounded = [](Floats value) { return (reinterpret_cast<Words>(value) + 0x8000) & 0xffff0000u; };
  const auto pair = [](Words first, Words second) { return first >> 16 | second; };
  const auto keep = [](uint32_t* to, Words value) { std::memcpy(to, &value, sizeof value); };
  const Words first = rounded(a), second = rounded(b);
  keep(upper, pair(first, second));
  keep(lower, pair(rounded(a - reinterpret_cast<Floats>(first)), rounded(b - reinterpret_cast<Floats>(second))));
}

// The sums += 32 rows of x (`step` numbers apart) times a panel [pairs, 32] of pairs.
KVF_INLINE void add_tiles(const bf16* x, int64_t step, const uint32_t* panel, int64_t pairs) {
  for (int64_t k = 0; k < pairs; k += kTileDepth, x += 2 * kTileDepth, panel += kTileDepth * kPanel)
    tile_step(x, step, reinterpret_cast<const uint8_t*>(panel), true);
}

// As FloatChunks.
class TileChunks {
 public:
  ChunkMemory m;

  TileChunks(float* memory, int64_t k_dim, int64_t v_dim)
      : m(memory + TileMemory::floats(k_dim), k_dim, v_dim), own_(memory, k_dim) {}

  void begin() { tiles_.shape(kTwoTiles, kTileDepth); }

  void load_keys(const bf16* from, int64_t step, int64_t count, int64_t dim, bool unit) {
    load_vectors(from, step, count, dim, unit, 1.0f, 0);
    for (int64_t pair = 0; pair < m.depth / 2; ++pair)
      for (int64_t t = 0; t < kChunkTokens; t += kLanes) {
        const Words both = load_as<Words>(own_.pairs + pair * kChunkTokens + t);
        store_low(own_.columns + 2 * pair * kChunkTokens + t, both);
        store_low(own_.columns + (2 * pair + 1) * kChunkTokens + t, both >> 16);
      }
  }

  void load_queries(const bf16* from, int64_t step, int64_t count, int64_t dim, bool unit, float scale) {
    load_vectors(from, step, count, dim, unit, scale, 1);
  }

  void multiply_tokens(int64_t, bool solve) {
    if (solve) multiply_with(0, m.keys_keys);
    multiply_with(1, m.queries_keys);
  }

  __attribute__((noinline)) void run(const ChunkHead& head, int64_t number) {
    alignas(64) float found[2][kChunkTokens * kPanel];
    const auto of_state = [&](int which) {
      return [this, &found, which](auto& total, int64_t t, int64_t) {
#pragma GCC unroll 8
        for (int r = 0; r < kTileHeight; ++r)
#pragma GCC unroll 2
          for (int j = 0; j < kTileVecs; ++j)
            total[r][j] = load(found[which] + (t + r) * kPanel + j * kLanes) * own_.factors[which * kChunkTokens + t + r];
      };
    };
    weigh_tokens(head, padded_to(head.count, kTileHeight), m);
    for (int64_t column = 0; column < m.width; column += kPanel) {
      float* state = m.states + number * m.state_floats() + column;
      split(state);
      if (head.beta != nullptr) multiply_state(0, found[0]);
      multiply_state(1, found[1]);
      run_columns(head, m, column, of_state(0), of_state(1));
      update(state, column);
    }
  }

 private:
  uint32_t* lower() const { return own_.halves + m.depth / 2 * kPanel; }

  // Halves of 32 columns of a state.
  void split(const float* state) {
    for (int64_t pair = 0; pair < m.depth / 2; ++pair)
      for (int j = 0; j < kPanel; j += kLanes) {
        const float* from = state + 2 * pair * m.step + j;
        store_halves(load(from), load(from + m.step), own_.halves + pair * kPanel + j, lower() + pair * kPanel + j);
      }
    Tiles::settle(own_.halves);
  }

  // Keys, or queries, of `count` tokens, zeros behind them, and what makes their lengths `scale`.
  void load_vectors(const bf16* from, int64_t step, int64_t count, int64_t dim, bool unit, float scale, int which) {
    bf16* rows = own_.vectors + which * kChunkTokens * m.depth;
    uint32_t* pairs = own_.pairs + which * kChunkTokens * m.depth / 2;
    for (int64_t first = 0; first < kChunkTokens; first += kLanes) {
      Floats squares[kLanes] = {};
      for (int64_t i = 0; i < kLanes; ++i) {
        bf16* row = rows + (first + i) * m.depth;
        prefetch_all(from + (first + i + kChunkTokens) * step, dim);
        const bf16* own = from + (first + i) * step;
        const int64_t there = first + i < count ? dim : 0;
        int64_t done = 0;
        for (; done + kLanes <= there; done += kLanes) {
          const Halves part = load_as<Halves>(own + done);
          std::memcpy(row + done, &part, sizeof part);
        }
        for (; done < m.depth; ++done) row[done] = done < there ? own[done] : bf16{0};
        for (int64_t at = 0; unit && at < m.depth; at += kLanes) squares[i] = squares[i] + load(row + at) * load(row + at);
      }
      store(own_.factors + which * kChunkTokens + first, unit ? lengths_of(squares, scale) : splat(scale));
      for (int64_t pair = 0; pair < m.depth / 2; pair += kLanes) {
        Words block[kLanes];
        for (int i = 0; i < kLanes; ++i) block[i] = load_as<Words>(rows + (first + i) * m.depth + 2 * pair);
        transpose(block);
        for (int i = 0; i < kLanes; ++i) std::memcpy(pairs + (pair + i) * kChunkTokens + first, &block[i], sizeof block[i]);
      }
    }
  }

  // to [s, t] = the products of the keys of tokens s and the keys, or queries, of tokens t.
  void multiply_with(int which, float* to) {
    Tiles::settle(own_.vectors);
    zero_sums(true);
    add_tiles(own_.vectors, m.depth, own_.pairs + which * kChunkTokens * m.depth / 2, m.depth / 2);
    store_sums(to, true);
    for (int64_t s = 0; s < kChunkTokens; ++s)
      for (int64_t t = 0; t < kChunkTokens; t += kLanes) {
        float* at = to + s * kChunkTokens + t;
        store(at, load(at) * own_.factors[s] * load(own_.factors + which * kChunkTokens + t));
      }
  }

  // to [tokens, 32] = the products of keys, or queries, with the columns that were split.
  void multiply_state(int which, float* to) {
    const bf16* vectors = own_.vectors + which * kChunkTokens * m.depth;
    zero_sums(true);
    for (const uint32_t* half : {own_.halves, lower()}) add_tiles(vectors, m.depth, half, m.depth / 2);
    store_sums(to, true);
  }

  // 32 columns of a state once the chunk's changes are in, of which each is decayed to the chunk's end.
  void update(float* state, int64_t column) {
    alignas(64) uint32_t changes[2][kChunkTokens / 2 * kPanel];
    alignas(64) float added[2][kTwoTiles * kPanel];  // of rows, and of those before, which are added while tiles multiply
    for (int64_t s = 0; s < kChunkTokens; s += 2)
      for (int j = 0; j < kPanel; j += kLanes) {
        const float* from = m.changes + s * m.step + column + j;
        store_halves(load(from) * (m.left[s] * own_.factors[s]), load(from + m.step) * (m.left[s + 1] * own_.factors[s + 1]),
                     changes[0] + s / 2 * kPanel + j, changes[1] + s / 2 * kPanel + j);
      }
    const float kept = m.gained[kChunkTokens - 1];
    Tiles::settle(changes);
    for (int64_t row = 0; row <= m.depth; row += kTwoTiles) {
      if (row < m.depth) {
        zero_sums(true);
        for (const uint32_t* half : {changes[0], changes[1]})
          add_tiles(own_.columns + row * kChunkTokens, kChunkTokens, half, kChunkTokens / 2);
        store_sums(added[row / kTwoTiles % 2], true);
      }
      const float* before = added[(row / kTwoTiles + 1) % 2];
      for (int64_t r = row - kTwoTiles; r >= 0 && r < row; ++r, before += kPanel)
        for (int j = 0; j < kPanel; j += kLanes)
          store(state + r * m.step + j, load(state + r * m.step + j) * kept + load(before + j));
    }
  }

  TileMemory own_;
  Tiles tiles_;
};

template <class T>
using ChunksOf = std::conditional_t<std::is_same_v<T, bf16>, TileChunks, FloatChunks>;

#else

template <class T>
using ChunksOf = FloatChunks;

#endif

}  // namespace
}  // namespace kvferry
