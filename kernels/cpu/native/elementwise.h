// RMSNorm with or without a residual, and SiLU times up. Statistics in float32, one rounding to T at the end.
#pragma once

#include "types.h"
#include "vector.h"

namespace kvferry {
namespace {

// total may be x itself; residual null: plain norm, and total is not written.
template <class T>
KVF_INLINE void norm_row(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t dim, float eps) {
  Floats squares{};
  float rest = 0;
  const int64_t whole = dim / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Floats value = load(x + i);
    if (residual != nullptr) {
      value = rounded_to(value + load(residual + i), x);
      store(total + i, value);
    }
    squares = squares + value * value;
  }
  for (int64_t i = whole; i < dim; ++i) {
    float value = load_one(x + i);
    if (residual != nullptr) {
      store_one(total + i, value + load_one(residual + i));
      value = load_one(total + i);
    }
    rest += value * value;
  }
  const float scale = 1.0f / __builtin_sqrtf((sum(squares) + rest) / static_cast<float>(dim) + eps);
  const T* from = residual != nullptr ? total : x;
  for (int64_t i = 0; i < whole; i += kLanes) store(out + i, load(from + i) * scale * load(weight + i));
  for (int64_t i = whole; i < dim; ++i) store_one(out + i, load_one(from + i) * scale * load_one(weight + i));
}

template <class T>
void run_norm(void* argument, int member, int size, Barrier&) {
  const NormTask& t = *static_cast<NormTask*>(argument);
  const Share rows = share(t.rows, member, size);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t at = row * t.dim;
    const T* residual = t.residual == nullptr ? nullptr : static_cast<const T*>(t.residual) + at;
    T* total = t.total == nullptr ? nullptr : static_cast<T*>(t.total) + at;
    norm_row(static_cast<const T*>(t.x) + row * t.x_step, residual, static_cast<const T*>(t.weight),
             static_cast<T*>(t.out) + at, total, t.dim, t.eps);
  }
}

template <class T>
void run_silu(void* argument, int member, int size, Barrier&) {
  const SiluTask& t = *static_cast<SiluTask*>(argument);
  const Share rows = share(t.rows, member, size);
  const int64_t whole = t.dim / kLanes * kLanes;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* gate = static_cast<const T*>(t.gate_up) + row * 2 * t.dim;
    const T* up = gate + t.dim;
    T* out = static_cast<T*>(t.out) + row * t.dim;
    for (int64_t i = 0; i < whole; i += kLanes) store(out + i, silu(load(gate + i)) * load(up + i));
    for (int64_t i = whole; i < t.dim; ++i)
      store_one(out + i, silu(splat(load_one(gate + i)))[0] * load_one(up + i));
  }
}

}  // namespace
}  // namespace kvferry
