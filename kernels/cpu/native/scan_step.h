// The state-space scan token by token: for decodes, which wait for memory, and for states whose numbers each decay at a rate
// of their own (Mamba 1). A row of the state [n] belongs to one dimension of one head; what it gives is a sum over the row,
// and the sums of as many rows as a vector has lanes are made together.
#pragma once

#include "recurrence.h"
#include "stream.h"
#include "transposed.h"

namespace kvferry {
namespace {

constexpr int64_t kScanAhead = 512;  // floats of a state prefetched ahead
constexpr int64_t kTokensAhead = 4;  // tokens
constexpr int kMamba1Numbers = 16;      // of a row in published models

// A token's rows [first, first + count) of one group; b, c [n].
struct ScanRows {
  int64_t first, count;
  const float *b, *c;
  const float *dt, *a;  // of the token [heads]; [heads] or [heads, n]
};

// A vector's rows: of each its head, what it takes in, dt x, and what goes straight out, d x.
struct ScanLanes {
  int64_t heads[kLanes];
  float steps[kLanes], inputs[kLanes], direct[kLanes], decays[kLanes];
};

template <class T>
KVF_INLINE void load_lanes(const ScanTask& t, const ScanRows& rows, int64_t base, int64_t lanes, const T* x, ScanLanes& found) {
  const Floats values = load_part(x + base, lanes);
  const int64_t row = rows.first + base;
  if (t.dim == 1) {
    for (int64_t i = 0; i < kLanes; ++i) found.heads[i] = row + i;
    store(found.steps, load_part(rows.dt + row, lanes));
    store(found.direct, t.d == nullptr ? Floats{} : load_part(t.d + row, lanes));
  } else {
    int64_t head = row / t.dim, left = (head + 1) * t.dim - row;
    for (int64_t i = 0; i < kLanes; ++i, --left) {
      if (left == 0 && i < lanes) ++head, left = t.dim;
      found.heads[i] = head;
      found.steps[i] = rows.dt[head];
      found.direct[i] = t.d == nullptr ? 0.0f : t.d[head];
    }
  }
  store(found.inputs, values * load(found.steps));
  store(found.direct, values * load(found.direct));
  if (t.each_state) return;
  for (int64_t i = 0; i < kLanes; ++i) found.decays[i] = i < lanes ? found.steps[i] * rows.a[found.heads[i]] : 0.0f;
  store(found.decays, exponential(load(found.decays)));
}

// Lane i of the result: the sum over row `base + i` of from, as it is once the token is in, times c. Numbers: of a row, known
// to the compiler, or 0.
template <bool Stream, bool EachState, int Numbers>
KVF_INLINE Floats scan_rows(const ScanTask& t, const ScanRows& rows, int64_t base, int64_t lanes, const ScanLanes& own,
                            const float* from, float* to) {
  const int64_t n = Numbers > 0 ? Numbers : t.n, whole = n / kLanes * kLanes;
  constexpr int kKnown = Numbers > kLanes ? Numbers / kLanes : 1;
  float rest[kLanes];
  Floats values[kLanes], known_b[kKnown], known_c[kKnown];
  for (int j = 0; Numbers > 0 && j < kKnown; ++j) known_b[j] = load(rows.b + j * kLanes), known_c[j] = load(rows.c + j * kLanes);
  for (int64_t i = lanes; i < kLanes; ++i) values[i] = Floats{}, rest[i] = 0;
  for (int64_t i = 0; i < lanes; ++i) {
    const float *before = from == nullptr ? nullptr : from + (base + i) * n, *rates = rows.a + own.heads[i] * n;
    float* next = to == nullptr ? nullptr : to + (base + i) * n;
    const float step = own.steps[i] * kLog2E, decay = own.decays[i], input = own.inputs[i];
    Floats total{};
    for (int64_t k = 0; k < whole; k += kLanes) {
      Floats state = (Numbers > 0 ? known_b[k / kLanes] : load(rows.b + k)) * input;
      if (before != nullptr) {
        __builtin_prefetch(before + k + kScanAhead);
        const Floats kept = EachState ? power_of_two(load(rates + k) * step) : splat(decay);
        state = state + load(before + k) * kept;
      }
      total = total + state * (Numbers > 0 ? known_c[k / kLanes] : load(rows.c + k));
      if (next != nullptr) put<Stream>(next + k, state);
    }
    rest[i] = 0;
    for (int64_t k = whole; k < n; ++k) {
      const float kept = EachState ? power_of_two(splat(rates[k] * step))[0] : decay;
      const float state = rows.b[k] * input + (before == nullptr ? 0.0f : before[k] * kept);
      rest[i] += state * rows.c[k];
      if (next != nullptr) next[k] = state;
    }
    values[i] = total;
  }
  return sums(values) + load(rest);
}

// One token: from and to are the rows' states before and after, null for zeros, and if nobody needs them.
template <bool Stream, bool EachState, int Numbers, class T>
inline __attribute__((noinline)) void scan_token(const ScanTask& t, const ScanRows& rows, const T* x, const float* from,
                                                 float* to, T* out) {
  for (int64_t base = 0; base < rows.count; base += kLanes) {
    const int64_t left = rows.count - base, lanes = left < kLanes ? left : kLanes;
    ScanLanes own;
    load_lanes(t, rows, base, lanes, x, own);
    const Floats found = scan_rows<Stream, EachState, Numbers>(t, rows, base, lanes, own, from, to);
    store_part(out + base, found + load(own.direct), lanes);
  }
}

// One sequence of one item's rows. alone: no other sequence of the batch reads what this one leaves.
template <class T>
KVF_INLINE void scan_tokens(const ScanTask& t, ScanRows rows, int64_t group, int64_t seq, bool alone, float* memory) {
  const int64_t begin = t.seqs.starts[seq], end = t.seqs.starts[seq + 1], padded = padded_to(t.n, 16);
  float *b = memory, *c = b + padded, *spare = c + padded;
  const auto own = [&](float* row) { return row == nullptr ? nullptr : row + rows.first * t.n; };
  const float* from = own(t.states.row(t.seqs.before[seq]));
  float* to = own(t.states.row(t.seqs.after[seq]));
  if (begin == end) return copy_state(from, rows.count * t.n, to);
  rows.b = b, rows.c = c, rows.a = t.a;
  const bool stream = alone && begin + 1 == end && to != nullptr && streams(to, t.n);
  for (int64_t at = begin; at < end; ++at) {
    widen_all(static_cast<const T*>(t.b) + at * t.b_step + group * t.n, t.n, b);
    widen_all(static_cast<const T*>(t.c) + at * t.c_step + group * t.n, t.n, c);
    rows.dt = t.dt + at * t.dt_step;
    const T* x = static_cast<const T*>(t.x) + at * t.x_step + rows.first;
    T* out = static_cast<T*>(t.out) + at * t.heads * t.dim + rows.first;
    float* next = at + 1 == end ? to : spare;
    prefetch_all(x + kTokensAhead * t.x_step, rows.count);
    const auto scan = !t.each_state ? (stream ? scan_token<true, false, 0, T> : scan_token<false, false, 0, T>)
                      : t.n == kMamba1Numbers
                          ? (stream ? scan_token<true, true, kMamba1Numbers, T> : scan_token<false, true, kMamba1Numbers, T>)
                          : (stream ? scan_token<true, true, 0, T> : scan_token<false, true, 0, T>);
    scan(t, rows, x, from, next, out);
    from = next;
  }
}

// Items of work that a group's rows are.
inline int64_t scan_runs(const ScanTask& t) {
  const int64_t rows = scan_item_rows(t.n);
  return (t.heads / t.groups * t.dim + rows - 1) / rows;
}

}  // namespace
}  // namespace kvferry
