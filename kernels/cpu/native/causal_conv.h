// Depthwise convolution over a sequence's last tokens, with the inputs before a step's tokens as state.
#pragma once

#include "recurrence.h"
#include "stream.h"

namespace kvferry {
namespace {

constexpr int64_t kConvBlock = 64;      // channels of an item of work
constexpr int64_t kConvTogether = 512;  // channels of a decode before those of the next: processors read ahead in long runs
constexpr int64_t kConvRun = 16;        // tokens that a vector of channels takes before the next vector

// What neighbouring channels need, with the channels in a vector's lanes: taps, and the inputs before the next token, the
// oldest first.
struct ConvBlock {
  alignas(64) float taps[kMaxConvWidth][kConvTogether];
  alignas(64) float bias[kConvTogether];
  alignas(64) float last[kMaxConvWidth][kConvTogether];
};

// Lane i is what both vectors, one behind the other, have at the i-th place; of places that they lack, anything.
template <int... Place>
KVF_INLINE Floats picked(Floats a, Floats b) {
  return __builtin_shufflevector(a, b, (Place >= 0 && Place < 2 * kLanes ? Place : 0)...);
}

// Lane c is number Columns * c + Column of what lies one behind the other in `rows`.
template <int Columns, int Column, int... Lane>
KVF_INLINE Floats column_of(const Floats* rows, std::integer_sequence<int, Lane...>) {
  const Floats low = picked<(Columns * Lane + Column)...>(rows[0], rows[1]);
  if constexpr (Columns == 2) return low;
  const Floats high = picked<(Columns * Lane + Column - 2 * kLanes)...>(rows[Columns > 2 ? 2 : 0], rows[Columns - 1]);
  return picked<(Columns * Lane + Column < 2 * kLanes ? Lane : kLanes + Lane)...>(low, high);
}

// The other way: lane i is number Row * kLanes + i of the columns' numbers, of which a column's are Columns apart.
template <int Columns, int Row, int... Lane>
KVF_INLINE Floats row_of(const Floats* columns, std::integer_sequence<int, Lane...>) {
  constexpr auto column = [](int lane) { return (Row * kLanes + lane) % Columns; };
  constexpr auto at = [](int lane) { return (Row * kLanes + lane) / Columns; };
  const Floats low = picked<(column(Lane) * kLanes + at(Lane))...>(columns[0], columns[1]);
  if constexpr (Columns == 2) return low;
  const Floats high = picked<((column(Lane) - 2) * kLanes + at(Lane))...>(columns[Columns > 2 ? 2 : 0], columns[Columns - 1]);
  return picked<(column(Lane) < 2 ? Lane : kLanes + Lane)...>(low, high);
}

template <int Columns, class T, int... Column>
KVF_INLINE void load_columns_of(const T* from, Floats* to, std::integer_sequence<int, Column...>) {
  const Floats rows[] = {load(from + Column * kLanes)...};
  ((to[Column] = column_of<Columns, Column>(rows, std::make_integer_sequence<int, kLanes>())), ...);
}

template <int Columns, bool Stream, int... Column>
KVF_INLINE void store_rows_of(const Floats* columns, float* to, std::integer_sequence<int, Column...>) {
  (put<Stream>(to + Column * kLanes, row_of<Columns, Column>(columns, std::make_integer_sequence<int, kLanes>())), ...);
}

// to [columns][kConvTogether] = the transpose of from [count][columns]. Columns: their number, or 0 where only `columns` is it.
template <int Columns, class T>
KVF_INLINE void load_turned(const T* from, int64_t count, int64_t columns, float (*to)[kConvTogether]) {
  int64_t c = 0;
  if constexpr (Columns > 0)
    for (; c + kLanes <= count; c += kLanes) {
      Floats found[Columns];
      load_columns_of<Columns>(from + c * Columns, found, std::make_integer_sequence<int, Columns>());
      for (int i = 0; i < Columns; ++i) store(to[i] + c, found[i]);
    }
  for (; c < count; ++c)
    for (int64_t i = 0; i < columns; ++i) to[i][c] = load_one(from + c * columns + i);
}

// to [count][columns] = the transpose of from [columns][kConvTogether]. Stream: past the caches.
template <int Columns, bool Stream>
KVF_INLINE void store_turned(const float (*from)[kConvTogether], int64_t count, int64_t columns, float* to) {
  int64_t c = 0;
  if constexpr (Columns > 0)
    for (; c + kLanes <= count; c += kLanes) {
      Floats columns[Columns];
      for (int i = 0; i < Columns; ++i) columns[i] = load(from[i] + c);
      store_rows_of<Columns, Stream>(columns, to + c * Columns, std::make_integer_sequence<int, Columns>());
    }
  for (; c < count; ++c)
    for (int64_t i = 0; i < columns; ++i) to[c * columns + i] = from[i][c];
}

// The taps and biases of channels [first, first + count).
template <int Width>
KVF_INLINE void load_taps(const ConvTask& t, int64_t first, int64_t count, ConvBlock& block) {
  const int64_t at = first * t.width;
  if (t.narrow_weight)
    load_turned<Width>(static_cast<const bf16*>(t.weight) + at, count, t.width, block.taps);
  else
    load_turned<Width>(static_cast<const float*>(t.weight) + at, count, t.width, block.taps);
  std::memset(block.bias, 0, sizeof block.bias);
  if (t.bias != nullptr && t.narrow_bias) widen_all(static_cast<const bf16*>(t.bias) + first, count, block.bias);
  if (t.bias != nullptr && !t.narrow_bias) widen_all(static_cast<const float*>(t.bias) + first, count, block.bias);
}

// What the convolution takes of `count` channels of a token, and what it gives. at: where the first of them lies in x.
template <class T, bool Gated>
KVF_INLINE Floats taken(const ConvTask& t, int64_t at, int64_t count) {
  const T* x = static_cast<const T*>(t.x) + at;
  const Floats found = load_part(x, count);
  if constexpr (Gated) return rounded_to(found * load_part(static_cast<const T*>(t.factor) + at, count), x);
  return found;
}

template <class T, bool Gated>
KVF_INLINE void give(const ConvTask& t, int64_t at, int64_t count, Floats total, T* to) {
  if constexpr (Gated)
    store_part(to, rounded_to(total, to) * load_part(static_cast<const T*>(t.gate) + at, count), count);
  else
    store_part(to, t.silu ? silu(total) : total, count);
}

// Tokens [begin, end) of kLanes channels of a block from `c` on, of which `count` there are. Width: of the taps, known to the
// compiler, or 0.
template <class T, int Width, bool Gated>
KVF_INLINE void convolve_lanes(const ConvTask& t, int64_t begin, int64_t end, int64_t first, int64_t c, int64_t count,
                               ConvBlock& block) {
  const int64_t width = Width > 0 ? Width : t.width;
  Floats taps[Width > 0 ? Width : kMaxConvWidth], inputs[Width > 0 ? Width : kMaxConvWidth];
#pragma GCC unroll 4
  for (int64_t i = 0; i < width; ++i) taps[i] = load(block.taps[i] + c), inputs[i] = load(block.last[i] + c);
  const Floats bias = load(block.bias + c);
  for (int64_t at = begin; at < end; ++at) {
    inputs[width - 1] = taken<T, Gated>(t, at * t.x_step + first + c, count);
    Floats total = bias;
#pragma GCC unroll 4
    for (int64_t i = 0; i < width; ++i) total = total + taps[i] * inputs[i];
    give<T, Gated>(t, at * t.x_step + first + c, count, total, static_cast<T*>(t.out) + at * t.channels + first + c);
#pragma GCC unroll 4
    for (int64_t i = 0; i + 1 < width; ++i) inputs[i] = inputs[i + 1];
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i + 1 < width; ++i) store(block.last[i] + c, inputs[i]);
}

// One token of a block of whole vectors of channels, whose state goes from registers to registers.
template <class T, int Width, bool Gated, bool Stream>
inline __attribute__((noinline)) void convolve_token(const ConvTask& t, int64_t first, int64_t count, int64_t token,
                                                     const float* before, float* after, const ConvBlock& block) {
  constexpr auto kColumns = std::make_integer_sequence<int, Width - 1>();
  const int64_t at = token * t.x_step + first;
  T* out = static_cast<T*>(t.out) + token * t.channels + first;
#pragma GCC unroll 4
  for (int64_t c = 0; c < count; c += kLanes) {
    Floats inputs[Width], total = load(block.bias + c);
    load_columns_of<Width - 1>(before + c * (Width - 1), inputs, kColumns);
    inputs[Width - 1] = taken<T, Gated>(t, at + c, kLanes);
#pragma GCC unroll 4
    for (int i = 0; i < Width; ++i) total = total + load(block.taps[i] + c) * inputs[i];
    give<T, Gated>(t, at + c, kLanes, total, out + c);
    store_rows_of<Width - 1, Stream>(inputs + 1, after + c * (Width - 1), kColumns);
  }
}

// One sequence's tokens of one block of channels.
template <class T, int Width, bool Gated>
KVF_INLINE void convolve(const ConvTask& t, int64_t first, int64_t count, int64_t seq, ConvBlock& block) {
  constexpr int kKept = Width > 0 ? Width - 1 : 0;
  const int64_t kept = t.width - 1, last = t.seqs.starts[seq + 1];
  const float* before = t.states.row(t.seqs.before[seq]);
  float* after = t.states.row(t.seqs.after[seq]);
  const bool read_next = seq + 1 < t.seqs.chains[t.seqs.chain_count] && t.seqs.before[seq + 1] == t.seqs.after[seq];
  const bool stream = !read_next && after != nullptr && streams(after, kConvBlock);
  if (before != nullptr) prefetch_all(before + (first + count) * kept, count * kept);  // of the next block
  if constexpr (Width > 0)
    if (before != nullptr && after != nullptr && count % kLanes == 0 && last - t.seqs.starts[seq] == 1) {
      const auto convolve_one = stream ? convolve_token<T, Width, Gated, true> : convolve_token<T, Width, Gated, false>;
      return convolve_one(t, first, count, last - 1, before + first * kept, after + first * kept, block);
    }
  if (before != nullptr)
    load_turned<kKept>(before + first * kept, count, kept, block.last);
  else
    std::memset(block.last, 0, sizeof block.last);
  for (int64_t at = t.seqs.starts[seq]; at < last; at += kConvRun) {
    const int64_t end = at + kConvRun < last ? at + kConvRun : last;
    for (int64_t token = end; token < end + kConvRun && token < last; ++token)
      prefetch_all(static_cast<const T*>(t.x) + token * t.x_step + first, count);
    for (int64_t c = 0; c < count; c += kLanes) convolve_lanes<T, Width, Gated>(t, at, end, first, c, count - c, block);
  }
  if (after == nullptr) return;
  if (stream)
    store_turned<kKept, true>(block.last, count, kept, after + first * kept);
  else
    store_turned<kKept, false>(block.last, count, kept, after + first * kept);
}

// Runs of chains of neighbouring channels, whose taps are loaded once.
template <class T, int Width, bool Gated>
void convolve_chains(const ConvTask& t, Share channels, Share chains) {
  ConvBlock block;
  const int64_t first = channels.begin, count = channels.end - first;
  load_taps<Width>(t, first, count, block);
  for (int64_t seq = t.seqs.chains[chains.begin]; seq < t.seqs.chains[chains.end]; ++seq)
    convolve<T, Width, Gated>(t, first, count, seq, block);
}

// The form that is compiled for the task's width, and its gates.
template <class T>
KVF_INLINE auto convolution_of(const ConvTask& t) {
  if (t.factor != nullptr) return t.width == 3 ? convolve_chains<T, 3, true> : convolve_chains<T, 0, true>;
  if (t.width == 4) return convolve_chains<T, 4, false>;
  return t.width == 3 ? convolve_chains<T, 3, false> : convolve_chains<T, 0, false>;
}

template <class T>
void run_causal_conv(void* argument, int member, int, Barrier& barrier) {
  const ConvTask& t = *static_cast<ConvTask*>(argument);
  const auto convolve_of = convolution_of<T>(t);
  const int64_t blocks = (t.channels + kConvBlock - 1) / kConvBlock, chains = t.seqs.chain_count;
  const int64_t sequences = t.seqs.chains[chains], most = t.seqs.starts[sequences] > sequences ? 1 : kConvTogether / kConvBlock;
  barrier.each_run(chains * blocks, member, [&](Share items) {
    for (int64_t item = items.begin; item < items.end;) {
      const int64_t number = item / chains, begin = item - number * chains, left = items.end - number * chains;
      const int64_t end = left < chains ? left : chains;
      const int64_t whole = begin > 0 || left < chains ? 1 : left / chains < most ? left / chains : most;
      const int64_t last = (number + whole) * kConvBlock;
      convolve_of(t, {number * kConvBlock, last < t.channels ? last : t.channels}, {begin, end});
      item = (number + whole - 1) * chains + end;
    }
    settle_streams();
  });
}

}  // namespace
}  // namespace kvferry
