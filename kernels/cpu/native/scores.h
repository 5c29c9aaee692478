// Scores of attention before they are weights: soft caps.
#pragma once

#include "types.h"
#include "vector.h"

namespace kvferry {
namespace {

// cap * tanh(score / cap), of which tanh(x) is 1 - 2 / (e^2x + 1).
KVF_INLINE Floats capped(Floats score, float cap) {
  return cap - 2.0f * cap / (exponential(score * (2.0f / cap)) + 1.0f);
}

// Scores [width] (whole vectors) times the scale, and those of K in int8 where it has such, then capped where they are.
KVF_INLINE void scale_scores(float* scores, int64_t width, const Scoring& scoring, const float* k_scales) {
  for (int64_t j = 0; j < width; j += kLanes) {
    Floats score = load(scores + j) * scoring.scale;
    if (k_scales != nullptr) score = score * load(k_scales + j);
    store(scores + j, scoring.cap > 0 ? capped(score, scoring.cap) : score);
  }
}

// Of `count` scores; behind them, up to a whole vector, -inf.
KVF_INLINE void cap_scores(float* scores, int64_t count, float cap) {
  for (int64_t j = 0; j < count; j += kLanes) store(scores + j, capped(load(scores + j), cap));
  for (int64_t j = count; j % kLanes != 0; ++j) scores[j] = -__builtin_inff();
}

}  // namespace
}  // namespace kvferry
