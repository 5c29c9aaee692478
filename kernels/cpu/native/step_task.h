// What a step of a whole decoder takes, and the memory that it needs.
#pragma once

#include "prompts.h"

namespace kvferry {

struct StepLayer {
  const void *input_norm, *post_norm, *q_norm, *k_norm;
  Dense qkv, o, gate_up, down;
  bool rotated;
  int64_t window;
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
};
constexpr int64_t kOwnRows = 16;

// Layers [first, last) of `tokens`, of which those of `batch` come first; the layers before them have run. With the last
// layer out [rows, hidden] = their hidden states after the final norm, or logits [rows, vocabulary] and best [rows], where
// each row's largest lies; what is not made is null. layer_step: bytes between layers of kv. chained: some rows of `batch`, which has positions and slots of all rows, read what others write in
// this step. prompts: of the other rows, in order, with queries and results in scratch.qkv; each packs its K and V behind
// those of the one before it, or where the first one does, when those were used.
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
};

}  // namespace kvferry
