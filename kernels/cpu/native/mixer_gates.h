// Gates and norms around recurrent layers, as the operations and a recorded step compute them: once, so that bits agree.
#pragma once

#include "recurrence.h"
#include "stream.h"

namespace kvferry {
namespace {

// ln(1 + e^x), exact enough in float32 where e^x would swallow the one.
inline float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

inline float logistic(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }

// beta [heads] = the logistic function of the first rates, decay [heads] = rate * softplus of the others and their bias.
inline __attribute__((noinline)) void delta_gates_row(const float* rates, const float* rate, const float* bias, int64_t heads,
                                                      float* decay, float* beta) {
  for (int64_t head = 0; head < heads; ++head) {
    beta[head] = logistic(rates[head]);
    decay[head] = rate[head] * softplus(rates[heads + head] + bias[head]);
  }
}

template <class T>
inline __attribute__((noinline)) void time_steps_row(const T* x, const float* bias, int64_t heads, float low, float high,
                                                     float* out) {
  for (int64_t head = 0; head < heads; ++head) {
    const float step = softplus(load_one(x + head) + bias[head]);
    out[head] = step < low ? low : step > high ? high : step;
  }
}

// out [dim] = the RMS norm of x, times silu(gate) before it, or where `norm_first` behind it, times the weight.
template <class T>
inline __attribute__((noinline)) void gated_norm_row(const T* x, const T* gate, const float* weight, int64_t dim, float eps,
                                                     bool norm_first, T* out) {
  Floats squares{};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Floats value = load_part(x + i, dim - i);
    const Floats inner = norm_first ? value : value * silu(load_part(gate + i, dim - i));
    squares = squares + inner * inner;
  }
  const float scale = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(dim) + eps);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int64_t left = dim - i;
    const Floats opened = load_part(x + i, left) * silu(load_part(gate + i, left));
    const Floats value = norm_first ? load_part(x + i, left) * scale * load_part(weight + i, left) *
                                          silu(load_part(gate + i, left))
                                    : opened * scale * load_part(weight + i, left);
    store_part(out + i, value, left);
  }
}

// out [dim] = x times the logistic function of the gate; out may be x.
template <class T>
inline __attribute__((noinline)) void sigmoid_mul_row(const T* x, const T* gate, int64_t dim, T* out) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int64_t left = dim - i;
    store_part(out + i, load_part(x + i, left) / (1.0f + exponential(-load_part(gate + i, left))), left);
  }
}

template <class T>
void run_gated_norm(void* argument, int member, int, Barrier& barrier) {
  const GatedNormTask& t = *static_cast<GatedNormTask*>(argument);
  barrier.each_run(t.tokens * t.heads, member, [&](Share rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const int64_t token = row / t.heads, head = row % t.heads;
      gated_norm_row(static_cast<const T*>(t.x) + row * t.dim, static_cast<const T*>(t.gate) + token * t.gate_step + head * t.dim,
                     t.weight + head * t.weight_step, t.dim, t.eps, t.norm_first, static_cast<T*>(t.out) + row * t.dim);
    }
  });
}

template <class T>
void run_sigmoid_mul(void* argument, int member, int, Barrier& barrier) {
  const SigmoidTask& t = *static_cast<SigmoidTask*>(argument);
  barrier.each_run(t.tokens * t.heads, member, [&](Share rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
      sigmoid_mul_row(static_cast<const T*>(t.x) + row * t.dim,
                      static_cast<const T*>(t.gate) + row / t.heads * t.gate_step + row % t.heads * t.head_step, t.dim,
                      static_cast<T*>(t.out) + row * t.dim);
  });
}

template <class T>
void run_time_steps(void* argument, int member, int, Barrier& barrier) {
  const TimeStepsTask& t = *static_cast<TimeStepsTask*>(argument);
  barrier.each_run(t.tokens, member, [&](Share rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
      time_steps_row(static_cast<const T*>(t.x) + row * t.x_step, t.bias, t.heads, t.low, t.high, t.out + row * t.heads);
  });
}

template <class T>
void run_delta_gates(void* argument, int member, int, Barrier& barrier) {
  const DeltaGatesTask& t = *static_cast<DeltaGatesTask*>(argument);
  barrier.each_run(t.tokens, member, [&](Share rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
      delta_gates_row(t.rates + row * 2 * t.heads, t.rate, t.bias, t.heads, t.decay + row * t.heads, t.beta + row * t.heads);
  });
}

}  // namespace
}  // namespace kvferry
