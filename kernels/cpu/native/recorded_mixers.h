// Recurrent mixers of a recorded step, as Python describes them, checked, and their buffers.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "recurrent.h"
#include "step_task.h"

namespace kvferry {

using SharedPacked = std::shared_ptr<Packed>;

// A mixer, and what it was made of. state: floats before its states in a row of the states.
class NativeMixer {
 public:
  static std::shared_ptr<NativeMixer> short_conv(SharedPacked inputs, Array conv, MaybeArray bias, SharedPacked out,
                                                 int64_t state) {
    auto made = std::make_shared<NativeMixer>(StepMixer::kShortConv, inputs, out, state);
    made->set_conv(conv, bias, false);
    const int64_t channels = made->view.conv.channels;
    require(inputs->dense.out == 3 * channels && out->dense.in == channels, kShape);
    return made;
  }

  static std::shared_ptr<NativeMixer> delta(SharedPacked inputs, SharedPacked rates, Array conv, Array decay, Array dt_bias,
                                            Array norm, SharedPacked out, int64_t k_heads, int64_t v_heads, int64_t k_dim,
                                            int64_t v_dim, float eps, int64_t state) {
    auto made = std::make_shared<NativeMixer>(StepMixer::kDelta, inputs, out, state);
    StepMixer& view = made->view;
    made->set_conv(conv, std::nullopt, true);
    made->packed.push_back(rates);
    const int64_t channels = 2 * k_heads * k_dim + v_heads * v_dim;
    require(k_heads > 0 && v_heads % k_heads == 0 && view.conv.channels == channels && rates->dense.out == 2 * v_heads &&
                rates->dense.in == inputs->dense.in && inputs->dense.out == channels + v_heads * v_dim &&
                out->dense.in == v_heads * v_dim && elements(norm) == v_dim, kShape);
    view.rates = rates->dense;
    view.delta.k_heads = k_heads, view.delta.v_heads = v_heads, view.delta.k_dim = k_dim, view.delta.v_dim = v_dim;
    view.delta.together = 1;
    view.gates.rate = made->hold(decay, v_heads), view.gates.bias = made->hold(dt_bias, v_heads);
    view.gate_first = channels;
    view.norm.weight = made->hold(norm, v_dim), view.norm.heads = v_heads, view.norm.dim = v_dim;
    view.norm.eps = eps, view.norm.norm_first = true;
    return made;
  }

  static std::shared_ptr<NativeMixer> scan(SharedPacked inputs, Array conv, MaybeArray bias, Array decay, Array skip,
                                           Array dt_bias, Array norm, SharedPacked out, int64_t heads, int64_t dim,
                                           int64_t groups, int64_t numbers, bool norm_first, float low, float high, float eps,
                                           int64_t state) {
    auto made = std::make_shared<NativeMixer>(StepMixer::kScan, inputs, out, state);
    StepMixer& view = made->view;
    made->set_conv(conv, bias, true);
    const int64_t inner = heads * dim, channels = inner + 2 * groups * numbers;
    require(groups > 0 && heads % groups == 0 && view.conv.channels == channels && out->dense.in == inner &&
                inputs->dense.out == inner + channels + heads, kShape);
    view.conv_first = inner, view.steps_first = inner + channels;
    view.scan.heads = view.scan.together = heads, view.scan.dim = dim, view.scan.groups = groups, view.scan.n = numbers;
    view.scan.a = made->hold(decay, heads), view.scan.d = made->hold(skip, heads);
    view.steps.bias = made->hold(dt_bias, heads), view.steps.heads = heads, view.steps.low = low, view.steps.high = high;
    view.norm.weight = made->hold(norm, inner), view.norm.heads = groups, view.norm.dim = view.norm.weight_step = inner / groups;
    view.norm.eps = eps, view.norm.norm_first = norm_first;
    return made;
  }

  NativeMixer(StepMixer::Kind kind, const SharedPacked& inputs, const SharedPacked& out, int64_t state)
      : packed{inputs, out} {
    view.kind = kind, view.inputs = inputs->dense, view.state = state;
  }

  const Dense& out() const { return packed[1]->dense; }

  // Floats of a row of the states up to the end of its own.
  int64_t end() const {
    const DeltaTask& d = view.delta;
    const ScanTask& s = view.scan;
    return view.heads_state() + d.v_heads * d.k_dim * d.v_dim + s.heads * s.dim * s.n;
  }

  StepMixer view{};
  std::vector<SharedPacked> packed;

 private:
  static constexpr const char* kShape = "a recurrent mixer of an unsupported shape";

  const float* hold(const Array& a, int64_t count) {
    require(elements(a) == count, kShape);
    held_.push_back(a);
    return static_cast<const float*>(whole(a, 0, a.ndim()));
  }

  void set_conv(const Array& weight, const MaybeArray& bias, bool silu) {
    ConvTask& conv = view.conv;
    require(weight.ndim() == 2, kShape);
    conv.channels = weight.shape(0), conv.width = weight.shape(1);
    require(conv.width >= 1 && conv.width <= kMaxConvWidth, "a convolution is too wide");
    conv.weight = hold(weight, elements(weight)), conv.silu = silu;
    if (bias) conv.bias = hold(*bias, conv.channels);
  }

  std::vector<Array> held_;
};

// Memory of the mixers of a step, for `rows` decodes and so many threads.
class MixerMemory {
 public:
  MixerScratch allocate(const std::vector<std::shared_ptr<NativeMixer>>& mixers, int64_t rows, int64_t threads) {
    int64_t inputs = 0, convolved = 0, found = 0, heads = 0;
    MixerScratch view{};
    for (const auto& each : mixers) {
      const StepMixer& own = each->view;
      inputs = std::max(inputs, own.inputs.out), convolved = std::max(convolved, own.conv.channels);
      if (own.kind != StepMixer::kShortConv) found = std::max(found, each->out().in);
      heads = std::max({heads, own.delta.v_heads, own.scan.heads});
      view.memory_step = std::max({view.memory_step, delta_floats(own.delta.k_dim, own.delta.v_dim), scan_floats(own.scan.n)});
    }
    const auto apart = [&](int64_t width) { return padded_to(rows * width + 64, 64); };
    narrow_.resize(apart(inputs) + apart(convolved) + apart(found));
    view.inputs = narrow_.data();
    view.convolved = view.inputs + apart(inputs);
    view.found = view.convolved + apart(convolved);
    wide_.resize(2 * apart(2 * heads) + threads * view.memory_step + 16);
    view.memory = wide_.data() + (64 - reinterpret_cast<uintptr_t>(wide_.data()) % 64) % 64 / sizeof(float);
    view.rates = view.memory + threads * view.memory_step;
    view.gates = view.rates + apart(2 * heads);
    return view;
  }

 private:
  std::vector<uint16_t> narrow_;
  std::vector<float> wide_;
};

}  // namespace kvferry
