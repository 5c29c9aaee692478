// Activations of MLPs without a gate, in float32.
#pragma once

#include "types.h"
#include "vector.h"

namespace kvferry {
namespace {

// 1 + erf(x) within 2e-7 (Abramowitz and Stegun 1964, formula 7.1.26).
KVF_INLINE Floats one_plus_erf(Floats x) {
  const Floats size = x < Floats{} ? -x : x;
  const Floats t = 1.0f / (1.0f + 0.3275911f * size);
  Floats p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Floats rest = p * t * exponential(-size * size);
  return x < Floats{} ? rest : 2.0f - rest;
}

// e^x - 1 of x up to 0; near 0 a series, where the difference would lose digits.
KVF_INLINE Floats exponential_less_one(Floats x) {
  Floats p = splat(1.0f / 5040);
  p = p * x + 1.0f / 720;
  p = p * x + 1.0f / 120;
  p = p * x + 1.0f / 24;
  p = p * x + 1.0f / 6;
  p = p * x + 0.5f;
  return x > splat(-0.4f) ? p * x * x + x : exponential(x) - 1.0f;
}

// kernels.activation.Activation.
KVF_INLINE Floats activated(const Activation& own, Floats x) {
  const Floats none{};
  switch (own.kind) {
    case Activation::kRelu2:
      return x < none ? none : x * x;
    case Activation::kGeluTanh:
      return x / (1.0f + exponential(-(x * (1.5957691216057308f + 0.07135481627f * x * x))));
    case Activation::kGelu:
      return 0.5f * x * one_plus_erf(x * 0.70710678118654752f);
    default: {
      const Floats below = (exponential_less_one(smaller(x, splat(own.bound))) - x) * own.negative;
      return (x > none ? own.positive * x * x : below) + own.beta * x;
    }
  }
}

template <class T>
void run_activation(void* argument, int member, int, Barrier& barrier) {
  const ActivationTask& t = *static_cast<ActivationTask*>(argument);
  barrier.each_run(t.rows, member, [&](Share rows) {
    const int64_t begin = rows.begin * t.dim, end = rows.end * t.dim;
    const int64_t whole = begin + (end - begin) / kLanes * kLanes;
    const T* x = static_cast<const T*>(t.x);
    T* out = static_cast<T*>(t.out);
    for (int64_t i = begin; i < whole; i += kLanes) store(out + i, activated(t.activation, load(x + i)));
    for (int64_t i = whole; i < end; ++i) store_one(out + i, activated(t.activation, splat(load_one(x + i)))[0]);
  });
}

}  // namespace
}  // namespace kvferry
