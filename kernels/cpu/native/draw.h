// Drawing a token per row of logits. No vocabulary is sorted: min_p, top_k and top_p each amount to the smallest value
// they keep, found by bisection, and noise is made in full only for those that could beat the best so far.
#pragma once

#include "noise.h"
#include "types.h"
#include "vector.h"

namespace kvferry {
namespace {

constexpr float kLeast = -__builtin_inff();
constexpr float kLeastFinite = -3.402823466e38f;
constexpr float kReaches[] = {8, 32, -kLeast};  // below the largest value: how far boundaries are looked for in turn
constexpr int kHalvings = 5;
constexpr int64_t kFourLanes = 4 * kLanes;
constexpr int64_t kNoToken = -1;  // of a row with a NaN, or whose largest value is infinite

struct DrawView {
  const float* logits;
  int64_t vocab;
  const DrawRow& how;
  float top;  // the largest value
};

// The logits from `at` on, a multiple of kLanes; behind the last, where no mask is read, and of what it forbids, -inf.
KVF_INLINE Floats logits_at(const DrawView& row, int64_t at) {
  if (at >= row.vocab) return splat(kLeast);
  const uint32_t* mask = row.how.mask;
  const uint32_t bits = mask == nullptr ? ~0u : mask[at / 32] >> at % 32 & ((1u << kLanes) - 1);
  if (bits == 0) return splat(kLeast);
  float rest[kLanes];
  if (at + kLanes > row.vocab)
    for (int i = 0; i < kLanes; ++i) rest[i] = at + i < row.vocab ? row.logits[at + i] : kLeast;
  const Floats value = load(at + kLanes > row.vocab ? rest : row.logits + at);
  if (mask == nullptr) return value;
  Words places;
  for (int i = 0; i < kLanes; ++i) places[i] = 1u << i;
  return (places & bits) != 0 ? value : splat(kLeast);
}

KVF_INLINE Floats scaled(const DrawView& row, int64_t at) { return logits_at(row, at) / row.how.temperature; }

KVF_INLINE float largest_scaled(const DrawView& row) {
  Floats most[4];
  for (Floats& each : most) each = splat(kLeast);
  for (int64_t at = 0; at < row.vocab; at += kFourLanes)
    for (int i = 0; i < 4; ++i) most[i] = larger(logits_at(row, at + i * kLanes), most[i]);
  return largest(larger(larger(most[0], most[1]), larger(most[2], most[3]))) / row.how.temperature;
}

// Values and what each weighs, padded with values of -inf to a multiple of kFourLanes.
struct Pool {
  float *values, *weights;
  int64_t size;
};

// Appends the lanes of `kept`. May write kLanes behind the last.
KVF_INLINE void append(Pool& pool, Floats values, Floats weights, Ints kept) {
  store_packed(pool.values + pool.size, values, kept);
  pool.size += store_packed(pool.weights + pool.size, weights, kept);
}

KVF_INLINE void pad(Pool& pool) {
  for (; pool.size % kFourLanes != 0; ++pool.size) pool.values[pool.size] = kLeast;
}

// Fills the pool with the values of `least` or more; returns the weight of all of `floor` or more.
template <class Weigh>
KVF_INLINE float gather(const DrawView& row, float floor, float least, Weigh weigh, Pool& pool) {
  Floats total{};
  pool.size = 0;
  for (int64_t at = 0; at < row.vocab; at += kLanes) {
    const Floats value = scaled(row, at), weight = weigh(value);
    total += value >= floor ? weight : Floats{};
    if (any(value >= least)) append(pool, value, weight, value >= least);
  }
  pad(pool);
  return sum(total);
}

KVF_INLINE float weight_above(const Pool& pool, float bound) {
  Floats sums[4] = {};
  for (int64_t at = 0; at < pool.size; at += kFourLanes)
    for (int i = 0; i < 4; ++i) {
      const int64_t here = at + i * kLanes;
      sums[i] += load(pool.values + here) > bound ? load(pool.weights + here) : Floats{};
    }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

KVF_INLINE void narrow(Pool& pool, float least, float most) {
  Pool within{pool.values, pool.weights, 0};
  for (int64_t at = 0; at < pool.size; at += kLanes) {
    const Floats value = load(pool.values + at);
    append(within, value, load(pool.weights + at), (value >= least) & (value <= most));
  }
  pad(within);
  pool = within;
}

// A float's place among all floats, and back: the same exchange of bits.
inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }
inline int64_t place_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return ordered(bits);
}
inline float at_place(int64_t place) {
  const int32_t bits = ordered(static_cast<int32_t>(place));
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The smallest value from `least` to `top` above which the pool holds less than `limit`. Bisection halves distances
// first, which thins the pool, then the floats in between, which ends.
inline __attribute__((noinline)) float boundary(Pool& pool, float least, float top, float limit) {
  int64_t low = place_of(least) - 1, high = place_of(top);
  for (int step = 1; high - low > 1; ++step) {
    const float half = 0.5f * at_place(low + 1) + 0.5f * at_place(high);
    const bool distance = step <= kHalvings && place_of(half) > low && place_of(half) < high;
    const int64_t middle = distance ? place_of(half) : (low + high) >> 1;
    (weight_above(pool, at_place(middle)) < limit ? high : low) = middle;
    if (step % kHalvings == 0) {
      limit -= weight_above(pool, at_place(high));
      narrow(pool, at_place(low + 1), at_place(high));
    }
  }
  return at_place(high);
}

// The smallest of the values of `floor` or more above which less than limit(weight of all those) lies: looked for near
// the largest first.
template <class Weigh, class Limit>
KVF_INLINE float cut(const DrawView& row, float floor, Weigh weigh, Limit limit, Pool& pool) {
  float most = row.top;
  for (const float reach : kReaches) {
    const float least = row.top - reach > floor ? row.top - reach : floor, all = gather(row, floor, least, weigh, pool);
    if (weight_above(pool, kLeast) >= limit(all) || least == floor) return boundary(pool, least, most, limit(all));
    most = least;
  }
  return floor;
}

// The smallest value that can be drawn. What each rule keeps is all the next one sees.
KVF_INLINE float smallest_kept(const DrawView& row, Pool& pool) {
  const DrawRow& how = row.how;
  float floor = how.min_p > 0 ? row.top + __builtin_logf(how.min_p) : kLeast;
  if (how.top_k < row.vocab) {
    const auto one = [](Floats) { return splat(1.0f); };
    floor = cut(row, floor, one, [&](float) { return static_cast<float>(how.top_k); }, pool);
  }
  if (how.top_p < 1) {
    const auto mass = [&](Floats value) { return exponential(value - row.top); };
    floor = cut(row, floor, mass, [&](float total) { return how.top_p * total; }, pool);
  }
  return floor;
}

// The token of `floor` or more with the largest value plus noise, the first of equal ones, or kNoToken.
KVF_INLINE int64_t winner(const DrawView& row, float floor) {
  if (floor < kLeastFinite) floor = kLeastFinite;  // -inf is never drawn
  Words lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  float best = kLeast;
  int64_t found = kNoToken;
  Ints strange{};
  for (int64_t at = 0; at < row.vocab; at += kLanes) {
    const Floats value = scaled(row, at);
    strange |= ~(value < splat(-kLeast));
    const Ints kept = value >= floor;
    if (!any(kept)) continue;
    const Floats chance = uniform(random_bits(row.how.key, lanes + static_cast<uint32_t>(at)));
    const Ints able = kept & (value + gumbel_bound(chance) > best);
    if (!any(able)) continue;
    for (int i = 0; i < kLanes; ++i) {
      const float total = able[i] ? value[i] + gumbel(chance[i]) : kLeast;
      if (total > best) best = total, found = at + i;
    }
  }
  return any(strange) ? kNoToken : found;
}

// The index of the largest logit, the first of equal ones, or kNoToken.
inline __attribute__((noinline)) int64_t first_largest(const DrawView& row) {
  float best = kLeast;
  int64_t found = kNoToken;
  for (int64_t at = 0; at < row.vocab; at += kFourLanes) {
    Floats values[4];
    Ints beyond{};  // NaN is, too
    for (int i = 0; i < 4; ++i) {
      const int64_t here = at + i * kLanes;
      values[i] = logits_at(row, here);
      beyond |= ~(values[i] <= splat(best));
    }
    if (!any(beyond)) continue;
    for (int i = 0; i < kFourLanes; ++i) {
      const float value = values[i / kLanes][i % kLanes];
      if (value <= best) continue;
      if (!(value < -kLeast)) return kNoToken;
      best = value, found = at + i;
    }
  }
  return found;
}

void run_draw(void* argument, int member, int, Barrier& barrier) {
  const DrawTask& t = *static_cast<DrawTask*>(argument);
  const int64_t space = draw_floats(t.vocab);
  float* memory = t.memory + member * 2 * space;
  const auto draw_row = [&](int64_t index) {
    const DrawRow& how = t.how[index];
    DrawView row{t.logits + index * t.vocab, t.vocab, how, kLeast};
    if (how.temperature <= 0) {
      t.out[index] = first_largest(row);
      return;
    }
    const bool whole = how.min_p <= 0 && how.top_k >= t.vocab && how.top_p >= 1;
    Pool pool{memory, memory + space, 0};
    if (!whole) row.top = largest_scaled(row);
    t.out[index] = winner(row, whole ? kLeast : smallest_kept(row, pool));
  };
  barrier.each(t.rows, member, [&] { return draw_row; });
}

}  // namespace
}  // namespace kvferry
