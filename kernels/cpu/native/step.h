// One step of a whole decoder: all layers of a batch of decodes and chunks of prompts, in one run of the team. What is cheap
// (norms, the merge of attention) every thread does for itself where rows are few, instead of waiting for another.
#pragma once

#include "activation.h"
#include "dense.h"
#include "draw.h"
#include "lookup.h"
#include "step_attention.h"
#include "step_mixers.h"

namespace kvferry {
namespace {

// A phase of `items` of a dense layer: use(inputs) returns what is called for an item. make(x, rows) writes these rows of x,
// every thread all of them for itself where they are few, else each a part of them in a phase before. made: x, where they
// are there already.
template <class Make, class Use>
KVF_INLINE void through(const StepView& s, const Dense& dense, int64_t items, const bf16* made, Make make, Use use) {
  const StepScratch& scratch = s.task.scratch;
  const int64_t count = s.rows();
  const bool together = count > kOwnRows;
  bf16* own = together ? scratch.x : scratch.own_x + s.member * scratch.own_step;
  uint8_t* codes = together ? scratch.codes : scratch.own_codes + s.member * scratch.own_codes_step;
  const bf16* x = made != nullptr ? made : own;
  const auto inputs = [&](Share rows) {
    if (made == nullptr) make(own, rows);
    return inputs_of(dense, x, dense.in, count, codes, rows);
  };
  if (together && (made == nullptr || prepares(dense, count))) {
    s.barrier.each_run(count, s.member, [&](Share rows) { inputs(rows); });
    s.barrier.wait(s.member);
  }
  s.barrier.each(items, s.member, [&] {
    return use(together ? inputs_of(dense, x, dense.in, count, codes, {0, 0}) : inputs({0, count}));
  });
  s.barrier.wait(s.member);
}

static_assert(kOwnRows <= kUnpreparedRows, "a thread's own rows have no room to be laid out");

constexpr auto kNothing = [](bf16*, Share) {};

// y [rows, out] = the dense layer of what make() makes.
template <class T, class Make>
KVF_INLINE void dense_of(const StepView& s, const Dense& dense, Make make, T* y) {
  const PanelItems items(s.rows(), dense, dense.count(), true);
  through(s, dense, items.count(), nullptr, make, [&](const Inputs& inputs) {
    return [&, inputs](int64_t item) { dense_item(dense, inputs, items, item, y, dense.out); };
  });
}

// residual += the dense layer of x times the factor, all rounded as if stored.
template <class Make>
KVF_INLINE void dense_onto_residual(const StepView& s, const Dense& dense, float factor, const bf16* made, Make make) {
  const PanelItems items(s.rows(), dense, dense.count(), true);
  through(s, dense, items.count(), made, make, [&](const Inputs& inputs) {
    return [&, inputs](int64_t item) {
      const int64_t left = items.panel(item) * kPanel;
      const auto place = [&](int64_t which, int64_t row) {
        return s.task.scratch.residual + row * s.model.hidden + left + which * kPanel;
      };
      const auto add = [&](int64_t which, int64_t row, const float* values) {
        bf16* to = place(which, row);
        for (int c = 0; c < kPanel; c += kLanes) {
          const Floats value = rounded_to(biased(dense, left + which * kPanel + c, load(values + c)), to);
          store(to + c, load(to + c) + (factor == 1.0f ? value : rounded_to(value * factor, to)));
        }
      };
      multiply(inputs, items.first(item), items.height(item), dense, items.pair(item), place, add);
    };
  });
}

// act = silu(gate) * up: the thread that makes columns of the gate makes the same ones of up.
KVF_INLINE void gate_item(const StepView& s, const Dense& dense, const Inputs& inputs, const PanelItems& items, int64_t item) {
  const int64_t inner = s.model.inner, p = items.panel(item), first = items.first(item), height = items.height(item);
  const auto place = [&](int64_t, int64_t row) { return s.task.scratch.act + row * inner + p * kPanel; };
  multiply(inputs, first, height, dense, {p, items.panels + p}, place, [&](int64_t which, int64_t row, const float* values) {
    for (int c = 0; c < kPanel; c += kLanes) {
      bf16* to = place(which, row) + c;
      const Floats value = biased(dense, which * inner + p * kPanel + c, load(values + c));
      if (which == 0)
        store(to, value);
      else
        store(to, silu(load(to)) * rounded_to(value, to));
    }
  });
}

// act = the activation of up, which no gate multiplies.
KVF_INLINE void activation_item(const StepView& s, const StepLayer& layer, const Inputs& inputs, const PanelItems& items,
                                int64_t item) {
  const int64_t inner = s.model.inner, left = items.panel(item) * kPanel;
  const auto place = [&](int64_t which, int64_t row) { return s.task.scratch.act + row * inner + left + which * kPanel; };
  const auto put = [&](int64_t which, int64_t row, const float* values) {
    bf16* to = place(which, row);
    for (int c = 0; c < kPanel; c += kLanes) {
      const Floats value = biased(layer.gate_up, left + which * kPanel + c, load(values + c));
      store(to + c, activated(layer.activation, rounded_to(value, to)));
    }
  };
  multiply(inputs, items.first(item), items.height(item), layer.gate_up, items.pair(item), place, put);
}

constexpr auto kNormed = [](const StepView& s, const void* weight) {
  return [&s, weight](bf16* x, Share rows) { norm_rows(s, weight, x, rows); };
};

KVF_INLINE void attend_layer(const StepView& s, const StepLayer& layer, const KVLayer& kv) {
  dense_of(s, layer.qkv, kNormed(s, layer.input_norm), s.task.scratch.qkv);
  if (s.rows() > s.batch.rows) prepare_prompts(s, layer, kv);
  if (s.task.chained) write_chained(s, layer, kv);
  s.model.batch_invariant ? attend_step_blocks(s, layer, kv) : attend_step(s, layer, kv);
  s.barrier.wait(s.member);
  attend_prompts(s, layer, kv);
  dense_onto_residual(s, layer.o, layer.o_factor, nullptr, [&](bf16* x, Share rows) { gather(s, layer, x, rows); });
}

KVF_INLINE void convolve(const StepView& s, const StepMixer& own) {
  ConvTask conv = convolution(s, own);
  s.model.recurrent->causal_conv[1](&conv, s.member, 0, s.barrier);
  s.barrier.wait(s.member);
}

// The convolution and what follows it, as operations run them by themselves.
KVF_INLINE void recur(const StepView& s, const StepMixer& own) {
  const RecurrentKernels& kernels = *s.model.recurrent;
  convolve(s, own);
  DeltaTask delta = delta_rule_of(s, own);
  ScanTask scan = scan_of(s, own);
  const bool deltas = own.kind == StepMixer::kDelta;
  (deltas ? kernels.delta_rule : kernels.state_space)[1](deltas ? static_cast<void*>(&delta) : &scan, s.member, 0, s.barrier);
  s.barrier.wait(s.member);
}

KVF_INLINE void mix_layer(const StepView& s, const StepLayer& layer) {
  const StepMixer& own = *layer.mixer;
  const MixerScratch& scratch = s.task.scratch.mixer;
  dense_of(s, own.inputs, kNormed(s, layer.input_norm), scratch.inputs);
  if (own.kind == StepMixer::kShortConv) {
    convolve(s, own);
    return dense_onto_residual(s, layer.o, layer.o_factor, scratch.convolved, kNothing);
  }
  if (own.kind == StepMixer::kDelta) dense_of(s, own.rates, kNormed(s, layer.input_norm), scratch.rates);
  s.barrier.each_run(s.rows(), s.member, [&](Share rows) { prepare_mixer(s, own, rows); });
  s.barrier.wait(s.member);
  recur(s, own);
  dense_onto_residual(s, layer.o, layer.o_factor, nullptr, [&](bf16* x, Share rows) { gather_mixed(s, own, x, rows); });
}

KVF_INLINE void run_layer(const StepView& s, const StepLayer& layer, const KVLayer& kv) {
  layer.mixer == nullptr ? attend_layer(s, layer, kv) : mix_layer(s, layer);
  const bool gated = layer.activation.kind == Activation::kGate;  // an item has panels of both already
  const PanelItems gates(s.rows(), layer.gate_up, s.model.inner / kPanel, !gated);
  through(s, layer.gate_up, gates.count(), nullptr, kNormed(s, layer.post_norm), [&](const Inputs& inputs) {
    return [&, inputs](int64_t item) {
      if (gated)
        gate_item(s, layer.gate_up, inputs, gates, item);
      else
        activation_item(s, layer, inputs, gates, item);
    };
  });
  dense_onto_residual(s, layer.down, layer.down_factor, s.task.scratch.act, kNothing);
}

void run_step(void* argument, int member, int, Barrier& barrier) {
  const StepTask& t = *static_cast<StepTask*>(argument);
  const StepModel& m = *t.model;
  const StepView s{t, m, t.batch, barrier, member};
  if (t.first == 0) {
    barrier.each_run(t.rows, member, [&](Share rows) {
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        bf16* to = t.scratch.residual + row * m.hidden;
        read_row(m.embedding, t.tokens[row], to);
        if (m.embedding_factor != 1.0f)
          for (int64_t i = 0; i < m.hidden; i += kLanes) store(to + i, load(to + i) * m.embedding_factor);
      }
    });
    barrier.wait(member);
  }
  for (int64_t index = t.first; index < t.last; ++index) {
    KVLayer kv = t.kv;
    kv.data = static_cast<uint8_t*>(t.kv.data) + m.layers[index].cached * t.layer_step;
    run_layer(s, m.layers[index], kv);
  }
  if (t.last < m.num_layers) return;
  if (t.logits == nullptr) {
    barrier.each_run(t.rows, member, [&](Share rows) { norm_rows(s, m.norm, static_cast<bf16*>(t.out), rows); });
  } else {
    dense_of(s, m.head, [&](bf16* x, Share rows) { norm_rows(s, m.norm, x, rows); }, t.logits);
    barrier.each_run(t.rows, member, [&](Share rows) {
      const DrawRow all_allowed{};
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        float* logits = t.logits + row * m.head.out;
        for (int64_t i = 0; m.head_factor != 1.0f && i < m.head.out; ++i) logits[i] *= m.head_factor;
        t.best[row] = first_largest({logits, m.head.out, all_allowed, kLeast});
      }
    });
  }
}

}  // namespace
}  // namespace kvferry
