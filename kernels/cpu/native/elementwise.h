// RMSNorm with or without a residual, layer norm, and gates times up. Statistics in float32, one rounding to T at the end.
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
void run_norm(void* argument, int member, int, Barrier& barrier) {
  const NormTask& t = *static_cast<NormTask*>(argument);
  barrier.each_run(t.rows, member, [&](Share rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const int64_t at = row * t.dim;
      const T* residual = t.residual == nullptr ? nullptr : static_cast<const T*>(t.residual) + at;
      T* total = t.total == nullptr ? nullptr : static_cast<T*>(t.total) + at;
      norm_row(static_cast<const T*>(t.x) + row * t.x_step, residual, static_cast<const T*>(t.weight),
               static_cast<T*>(t.out) + at, total, t.dim, t.eps);
    }
  });
}

template <class T>
KVF_INLINE void layer_norm_row(const T* x, const T* weight, const T* bias, T* out, int64_t dim, float eps) {
  const int64_t whole = dim / kLanes * kLanes;
  Floats total{}, squares{};
  float rest = 0, rest_squares = 0;
  for (int64_t i = 0; i < whole; i += kLanes) total = total + load(x + i);
  for (int64_t i = whole; i < dim; ++i) rest += load_one(x + i);
  const float mean = (sum(total) + rest) / static_cast<float>(dim);
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats apart = load(x + i) - mean;
    squares = squares + apart * apart;
  }
  for (int64_t i = whole; i < dim; ++i) rest_squares += (load_one(x + i) - mean) * (load_one(x + i) - mean);
  const float scale = 1.0f / __builtin_sqrtf((sum(squares) + rest_squares) / static_cast<float>(dim) + eps);
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats normed = (load(x + i) - mean) * scale * load(weight + i);
    store(out + i, bias == nullptr ? normed : normed + load(bias + i));
  }
  for (int64_t i = whole; i < dim; ++i) {
    const float normed = (load_one(x + i) - mean) * scale * load_one(weight + i);
    store_one(out + i, bias == nullptr ? normed : normed + load_one(bias + i));
  }
}

template <class T>
void run_layer_norm(void* argument, int member, int, Barrier& barrier) {
  const LayerNormTask& t = *static_cast<LayerNormTask*>(argument);
  barrier.each_run(t.rows, member, [&](Share rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
      layer_norm_row(static_cast<const T*>(t.x) + row * t.x_step, static_cast<const T*>(t.weight),
                     static_cast<const T*>(t.bias), static_cast<T*>(t.out) + row * t.dim, t.dim, t.eps);
  });
}

// slope * g + cubic * g^3, of the gate as it is limited, through the logistic function; times up.
KVF_INLINE Floats gated_by(const Gate& gate, Floats g, Floats up) {
  const Floats limit = splat(gate.limit);
  g = smaller(g, limit), up = smaller(larger(up, -limit), limit);
  return g / (1.0f + exponential(-(g * (gate.slope + gate.cubic * g * g)))) * (up + gate.offset);
}

template <class T, class Value>
KVF_INLINE void gate_rows(const GateTask& t, Share rows, Value value) {
  const int64_t whole = t.dim / kLanes * kLanes;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* gate = static_cast<const T*>(t.gate_up) + row * 2 * t.dim;
    const T* up = gate + t.dim;
    T* out = static_cast<T*>(t.out) + row * t.dim;
    for (int64_t i = 0; i < whole; i += kLanes) store(out + i, value(load(gate + i), load(up + i)));
    for (int64_t i = whole; i < t.dim; ++i)
      store_one(out + i, value(splat(load_one(gate + i)), splat(load_one(up + i)))[0]);
  }
}

template <class T>
void run_gate(void* argument, int member, int, Barrier& barrier) {
  const GateTask& t = *static_cast<GateTask*>(argument);
  const Gate& gate = t.gate;
  barrier.each_run(t.rows, member, [&](Share rows) {
    if (gate.slope == 1 && gate.cubic == 0 && gate.offset == 0 && gate.limit == __builtin_inff())
      gate_rows<T>(t, rows, [](Floats g, Floats up) { return silu(g) * up; });
    else
      gate_rows<T>(t, rows, [&](Floats g, Floats up) { return gated_by(gate, g, up); });
  });
}

}  // namespace
}  // namespace kvferry
