// Products of activations in int8 with packed codes (see forms.h). Activations are quantised per row and 32 inputs:
// x = scale * q, q the nearest integer, scale = max |x| / 127. Integer sums are exact within a group; groups are added
// in float32 in their order, whatever the number of rows: a row's result does not depend on its batch.
#pragma once

#include "dot.h"
#include "forms.h"
#include "types.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "i8mm_arm.h"
#endif

namespace kvferry {
namespace {

#if defined(__AVX512F__) || defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kCodeRows = 8;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kCodeRows = 4;
#else
constexpr int kCodeRows = 2;
#endif

// Rows of x of `in` inputs (`runs` times 32): codes [rows][in]; of each run of 32 its scale, the sum of its codes and
// scale * sum [rows][in / 32]; of each half of a run the sum [rows][in / 16].
struct Quantised {
  int8_t* codes;
  float* scales;
  float* weighed_sums;
  int32_t* sums;
  int32_t* half_sums;
  int64_t in, runs;

  Quantised(uint8_t* memory, int64_t rows, int64_t width)
      : codes(reinterpret_cast<int8_t*>(memory)), scales(reinterpret_cast<float*>(memory + rows * width)),
        weighed_sums(scales + rows * width / kRun), sums(reinterpret_cast<int32_t*>(weighed_sums + rows * width / kRun)),
        half_sums(sums + rows * width / kRun), in(width), runs(width / kRun) {}

  // These rows from `row` on.
  Quantised from(int64_t row) const {
    Quantised rest = *this;
    rest.codes += row * in, rest.scales += row * runs, rest.weighed_sums += row * runs;
    rest.sums += row * runs, rest.half_sums += 2 * row * runs;
    return rest;
  }

  void quantise(int64_t row, const bf16* x) const {
    for (int64_t at = 0; at < in; at += kRun) {
      Floats top{};
      for (int64_t i = at; i < at + kRun; i += kLanes) {
        const Floats value = load(x + i);
        top = larger(top, larger(value, -value));
      }
      const float peak = across(top, larger)[0], inverse = peak > 0 ? 127.0f / peak : 0.0f;
      int32_t both = 0;
      for (int64_t half = at; half < at + kRun; half += kHalfRun) {
        Ints total{};
        for (int64_t i = half; i < half + kHalfRun; i += kLanes) {
          constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
          const Ints code = reinterpret_cast<Ints>(load(x + i) * inverse + kRound) - 0x4b400000;
          total = total + code;
          store_codes(codes + row * in + i, code);
        }
        const int32_t sum = across(total, [](Ints a, Ints b) { return a + b; })[0];
        half_sums[(row * in + half) / kHalfRun] = sum;
        both += sum;
      }
      const int64_t run = (row * in + at) / kRun;
      scales[run] = peak / 127.0f;
      sums[run] = both;
      weighed_sums[run] = scales[run] * static_cast<float>(both);
    }
  }

 private:
  static KVF_INLINE void store_codes(int8_t* to, Ints code) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)code));
#else
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    const Bytes bytes = __builtin_convertvector(code, Bytes);
    std::memcpy(to, &bytes, sizeof bytes);
#endif
  }
};

// Codes of one step for outputs from `lane` on (low) and 16 further (high), as bytes.
template <class C>
KVF_INLINE void unpack(const uint8_t* group, int step, int lane, Words upper_low, Words upper_high, Words& low,
                       Words& high) {
  const uint8_t* at = group + step * C::step_bytes + lane * 4;
  if constexpr (C::bits == 8) {
    low = load_as<Words>(at);
    high = load_as<Words>(at + 64);
    return;
  }
  const Words both = load_as<Words>(at);
  low = both & 0x0f0f0f0fu;
  high = (both >> 4) & 0x0f0f0f0fu;
  if constexpr (C::bits > 4) {
    constexpr uint32_t mask = C::bits == 5 ? 0x10101010u : 0x30303030u;
    const int shift = 4 - step * (C::bits - 4);
    low |= (shift >= 0 ? upper_low << shift : upper_low >> -shift) & mask;
    high |= (shift >= 0 ? upper_high << shift : upper_high >> -shift) & mask;
  }
}

// Integer sums of `Rows` rows of x over one group, for kLanes outputs from `lane` on and as many from lane + 16 on.
template <class C, int Rows>
KVF_INLINE void group_sums(const Quantised& x, const uint8_t* group, int64_t index, int lane,
                           Ints (&sums)[Rows][2]) {
  using D = Dot<C::bits>;
  constexpr int kOff = C::offset - D::kOffset;
  const int8_t* codes = x.codes + index * C::group;
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    Ints start{};
    if constexpr (kOff > 0) {
      const int32_t* of = C::group == kRun ? x.sums : x.half_sums;
      start = start - (Ints{} + of[r * x.runs * (kRun / C::group) + index]) * kOff;
    }
    sums[r][0] = sums[r][1] = start;
  }
  Words upper_low{}, upper_high{};
  if constexpr (C::bits == 5 || C::bits == 6) {
    upper_low = load_as<Words>(group + C::upper + lane * 4);
    upper_high = load_as<Words>(group + C::upper + 64 + lane * 4);
  }
#if defined(__ARM_FEATURE_MATMUL_INT8)
  if constexpr (Rows > 1) {
    const auto unpacked = [&](int step, Words& low, Words& high) __attribute__((always_inline)) {
      unpack<C>(group, step, lane, upper_low, upper_high, low, high);
    };
    return add_pairs<Rows, C::steps>(codes, x.in, unpacked, sums);
  }
#endif
  const auto add_step = [&](auto& to, int step) __attribute__((always_inline)) {
    Words low, high;
    unpack<C>(group, step, lane, upper_low, upper_high, low, high);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Words four = splat_word(codes + r * x.in + 4 * step);
      D::add(to[r][0], low, four);
      D::add(to[r][1], high, four);
    }
  };
  if constexpr (D::kSteps == 0) {
#pragma GCC unroll 8
    for (int step = 0; step < C::steps; ++step) add_step(sums, step);
  } else {
    constexpr int kRuns = D::kSteps < C::steps ? D::kSteps : C::steps;
#pragma GCC unroll 8
    for (int first = 0; first < C::steps; first += kRuns) {
      typename D::Part part[Rows][2];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) part[r][0] = part[r][1] = typename D::Part{};
#pragma GCC unroll 8
      for (int step = first; step < first + kRuns; ++step) add_step(part, step);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r)
        for (int half = 0; half < 2; ++half) sums[r][half] = sums[r][half] + D::drain(part[r][half]);
    }
  }
}

// Of what row of x has in a group: the sum of its values, as they are quantised.
template <class C>
KVF_INLINE float weighed_sum(const Quantised& x, int64_t row, int64_t index) {
  const int64_t run = row * x.runs + index / (kRun / C::group);
  if constexpr (C::group == kRun) return x.weighed_sums[run];
  return x.scales[run] * static_cast<float>(x.half_sums[row * 2 * x.runs + index]);
}

// What turns a group's integer sums into numbers, for kLanes outputs from `at` on.
template <class C>
struct GroupScale {
  Floats scale, minimum;

  GroupScale() = default;
  KVF_INLINE GroupScale(const uint8_t* group, int at) : scale(splat(1.0f)), minimum{} {
    if constexpr (!C::per_channel) scale = load_half(group + C::scales + 2 * at);
    if constexpr (C::minimum) minimum = load_half(group + C::minima + 2 * at);
  }

  // total + the sums of a row of x, of the group at `index`.
  KVF_INLINE Floats added(const Quantised& x, int64_t row, int64_t index, Ints sums, Floats total) const {
    const int64_t run = row * x.runs + index / (kRun / C::group);
    total = total + to_floats(sums) * (scale * x.scales[run]);
    if constexpr (C::minimum) total = total + minimum * weighed_sum<C>(x, row, index);
    return total;
  }

  KVF_INLINE void add(const Quantised& x, int64_t row, int64_t index, Ints sums, float* out) const {
    store(out, added(x, row, index, sums, load(out)));
  }
};

// Scales of whole outputs, at the end.
template <class C>
KVF_INLINE void scale_outputs(const uint8_t* panel, int64_t rows, float* out) {
  if constexpr (C::per_channel)
    for (int64_t r = 0; r < rows; ++r)
      for (int i = 0; i < kPanel; i += kLanes)
        store(out + r * kPanel + i, load(out + r * kPanel + i) * load(reinterpret_cast<const float*>(panel) + i));
}

// out [Rows][kPanel] = the panel's outputs of rows [row, row + Rows) of x. ahead: bytes from what is multiplied to what is
// prefetched, into the second-level cache: the first one lacks room for it beside the rows.
template <class C, int Rows>
inline __attribute__((noinline)) void code_tile(Quantised all, int64_t row, const uint8_t* panel, int64_t ahead, float* out) {
  const Quantised x = all.from(row);
  for (int i = 0; i < Rows * kPanel; i += kLanes) store(out + i, Floats{});
  const uint8_t* group = panel + C::head;
  for (int64_t index = 0; index < x.in / C::group; ++index, group += C::bytes) {
#pragma GCC unroll 20
    for (int at = 0; at < C::bytes; at += 64) __builtin_prefetch(group + ahead + at, 0, 2);
    for (int lane = 0; lane < 16; lane += kLanes) {
      Ints sums[Rows][2];
      group_sums<C, Rows>(x, group, index, lane, sums);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const int at = half * 16 + lane;
        const GroupScale<C> scale(group, at);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) scale.add(x, r, index, sums[r][half], out + r * kPanel + at);
      }
    }
  }
  scale_outputs<C>(panel, Rows, out);
}

template <class C, int... Rows>
KVF_INLINE void code_tile_of(int rows, const Quantised& x, int64_t row, const uint8_t* panel, int64_t ahead, float* out,
                             std::integer_sequence<int, Rows...>) {
  using Function = void (*)(Quantised, int64_t, const uint8_t*, int64_t, float*);
  static constexpr Function table[] = {code_tile<C, Rows + 1>...};
  table[rows - 1](x, row, panel, ahead, out);
}

}  // namespace
}  // namespace kvferry
