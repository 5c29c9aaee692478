// What a step of a whole decoder takes, and the memory that it needs.
#pragma once

#include "prompts.h"
#include "recurrence.h"

namespace kvferry {

// A recurrent mixer in place of attention. inputs: its first dense layer; rates: of the delta rule, float32. conv, delta, scan:
// what is known of their tasks beforehand; conv_first, gate_first, steps_first: where outputs of `inputs` begin that the
// convolution takes, those of the gate, and time steps. Its states lie behind those of `state` floats.
struct StepMixer {
  enum Kind { kShortConv, kDelta, kScan } kind;
  Dense inputs, rates;
  ConvTask conv;
  DeltaTask delta;
  ScanTask scan;
  TimeStepsTask steps;
  DeltaGatesTask gates;
  GatedNormTask norm;
  int64_t conv_first, gate_first, steps_first, state;

  int64_t heads_state() const { return state + conv.channels * (conv.width - 1); }
};

// Factors multiply results of the dense layers, once they are rounded.
// qkv, and norms and rotation of heads: of attention, whose K and V are those of layer `cached` of the cache. o: the last
// dense layer of attention or of the mixer.
struct StepLayer {
  const void *input_norm, *post_norm, *q_norm, *k_norm;
  Dense qkv, o, gate_up, down;
  bool rotated;
  int64_t window;
  Activation activation;
  const StepMixer* mixer;
  int64_t cached;
  float o_factor, down_factor;
};

// A whole decoder.
struct StepModel {
  Dense embedding, head;
  const void* norm;
  const StepLayer* layers;
  int64_t num_layers, hidden, inner, heads, kv_heads, dim;
  Rope rope;
  float eps;
  Scoring scoring;
  bool batch_invariant;  // attention block by block, as in prefill
  bool gated;            // behind each query lies a gate, whose logistic function multiplies the head's output
  const RecurrentKernels* recurrent;
  float embedding_factor, head_factor;
};

// Buffers of a mixer for decodes: outputs of its first layer and of the convolution, what heads found,
// and float32 rates and gates of heads. memory: of each thread, memory_step floats apart.
struct MixerScratch {
  uint16_t *inputs, *convolved, *found;
  float *rates, *gates, *memory;
  int64_t memory_step;
};

// Buffers of a step for up to max_rows rows, of which partial takes decodes alone. x and codes: what a dense layer takes,
// of all rows; own_x and own_codes: the same of kOwnRows, one of each thread, `own_step` elements and `own_codes_step` bytes
// apart, as are `memory_step` bytes (of token_memory() or prefill_memory()).
struct StepScratch {
  uint16_t *residual, *qkv, *act, *x, *own_x;
  uint8_t *codes, *own_codes;
  float* partial;
  uint8_t* memory;
  int64_t own_step, own_codes_step, memory_step;
  MixerScratch mixer;
};
constexpr int64_t kOwnRows = 16;

// Layers [first, last) of `tokens`, of which those of `batch` come first; the layers before them have run. With the last
// layer out [rows, hidden] = their hidden states after the final norm, or logits [rows, vocabulary] and best [rows], where
// each row's largest lies; what is not made is null. layer_step: bytes between layers of kv. chained: some rows of `batch`, which has positions and slots of all rows, read what others write in
// this step. prompts: of the other rows, in order, with queries and results in scratch.qkv; each packs its K and V behind
// those of the one before it, or where the first one does, when those were used. states: of recurrent layers, rows that
// `sequences` name; a model that has some takes decodes alone.
struct StepTask {
  bool chained;
  const StepModel* model;
  StepScratch scratch;
  Batch batch;
  int64_t rows, first, last;
  const PrefillTask* prompts;
  int64_t num_prompts;
  const int64_t* tokens;
  KVLayer kv;
  int64_t layer_step;
  void* out;
  float* logits;
  int64_t* best;
  States states;
  Sequences sequences;
};

}  // namespace kvferry
