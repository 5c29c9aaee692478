// What recurrent mixers of a step of a whole decoder take and give, for rows that are tokens of sequences.
#pragma once

#include "mixer_gates.h"
#include "step_attention.h"

namespace kvferry {
namespace {

KVF_INLINE States states_behind(const StepView& s, int64_t floats) {
  return {s.task.states.data + floats, s.task.states.step};
}

KVF_INLINE ConvTask convolution(const StepView& s, const StepMixer& own) {
  const MixerScratch& scratch = s.task.scratch.mixer;
  ConvTask task = own.conv;
  task.x = scratch.inputs + own.conv_first, task.x_step = own.inputs.out;
  if (own.kind == StepMixer::kShortConv) task.take_gates(sizeof(bf16));
  task.out = scratch.convolved;
  task.states = states_behind(s, own.state), task.seqs = s.task.sequences;
  return task;
}

KVF_INLINE DeltaTask delta_rule_of(const StepView& s, const StepMixer& own) {
  const MixerScratch& scratch = s.task.scratch.mixer;
  DeltaTask task = own.delta;
  const int64_t keys = task.k_heads * task.k_dim;
  task.q = scratch.convolved, task.k = scratch.convolved + keys, task.v = scratch.convolved + 2 * keys;
  task.q_step = task.k_step = task.v_step = own.conv.channels;
  task.decay = scratch.gates, task.beta = scratch.gates + task.v_heads;
  task.decay_step = task.beta_step = 2 * task.v_heads;
  task.out = scratch.found;
  task.states = states_behind(s, own.heads_state()), task.seqs = s.task.sequences;
  task.memory = scratch.memory, task.memory_step = scratch.memory_step;
  return task;
}

KVF_INLINE ScanTask scan_of(const StepView& s, const StepMixer& own) {
  const MixerScratch& scratch = s.task.scratch.mixer;
  ScanTask task = own.scan;
  const int64_t inner = task.heads * task.dim;
  task.x = scratch.convolved, task.b = scratch.convolved + inner, task.c = scratch.convolved + inner + task.groups * task.n;
  task.x_step = task.b_step = task.c_step = own.conv.channels;
  task.dt = scratch.gates, task.dt_step = task.heads;
  task.out = scratch.found;
  task.states = states_behind(s, own.heads_state()), task.seqs = s.task.sequences;
  task.memory = scratch.memory, task.memory_step = scratch.memory_step;
  return task;
}

// What heads of these rows need beside the outputs of the first dense layer: gates, or time steps.
KVF_INLINE void prepare_mixer(const StepView& s, const StepMixer& own, Share rows) {
  const MixerScratch& scratch = s.task.scratch.mixer;
  const int64_t heads = own.delta.v_heads;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const bf16* inputs = scratch.inputs + row * own.inputs.out;
    if (own.kind == StepMixer::kDelta)
      delta_gates_row(scratch.rates + row * 2 * heads, own.gates.rate, own.gates.bias, heads, scratch.gates + row * 2 * heads,
                      scratch.gates + row * 2 * heads + heads);
    else
      time_steps_row(inputs + own.steps_first, own.steps.bias, own.steps.heads, own.steps.low, own.steps.high,
                     scratch.gates + row * own.steps.heads);
  }
}

// What the last dense layer takes of these rows, of a mixer with heads.
KVF_INLINE void gather_mixed(const StepView& s, const StepMixer& own, bf16* out, Share rows) {
  const MixerScratch& scratch = s.task.scratch.mixer;
  const int64_t dim = own.norm.dim, width = own.norm.heads * dim;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const bf16* inputs = scratch.inputs + row * own.inputs.out;
    for (int64_t head = 0; head < own.norm.heads; ++head)
      gated_norm_row(scratch.found + row * width + head * dim, inputs + own.gate_first + head * dim,
                     own.norm.weight + head * own.norm.weight_step, dim, own.norm.eps, own.norm.norm_first,
                     out + row * width + head * dim);
  }
}

}  // namespace
}  // namespace kvferry
