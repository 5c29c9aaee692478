// What the kernels of every instruction set take: plain structs, so that one table of functions serves them all.
#pragma once

#include <cstdint>

#include "forms.h"
#include "threads.h"

namespace kvferry {

// A dense layer of `in` inputs (even; a multiple of 32 where quantised) and `out` outputs. quantised: some panel is of a
// form that takes int8 activations. bias: float32, padded to whole panels.
struct Dense {
  const Panel* panels = nullptr;
  const float* bias = nullptr;
  int64_t in = 0, out = 0;
  bool quantised = false;
  int64_t count() const { return (out + kPanel - 1) / kPanel; }
};

// The widest head that attention takes: a cached vector of DeepSeek's latent attention.
constexpr int64_t kMaxDim = 576;

// What a head's keys have of dims, and its values.
struct HeadDims {
  int64_t k, v;
};

// One layer of the pool, [block, 2, kv_head, slot, dim]; steps in elements; slots and dims are dense. V's dims are K's but
// where both lie in one vector: there V is its end. int8: see cache.h, else the elements are the model's.
struct KVLayer {
  void* data;
  int64_t block_step, kv_step, head_step, slot_step;
  int64_t block_size, heads, dim, v_dim;
  bool int8;
  HeadDims dims() const { return {dim, v_dim}; }
};

// Rows of one query token each, as kernels/plan.py describes them.
struct Batch {
  int64_t rows;
  const int64_t* positions;
  const int64_t* slots;
  const int32_t* block_table;
  int64_t table_step;
  const int32_t* total_len;
};

// cos and sin [max_len, half]; null: no rotation.
struct Rope {
  const float* cos = nullptr;
  const float* sin = nullptr;
  int64_t half = 0;
};

// out = norm(x), or total = x + residual, out = norm(total). All [rows, dim] and dense but for x_step.
struct NormTask {
  const void *x, *residual, *weight;
  void *out, *total;
  int64_t rows, dim, x_step;
  float eps;
};

// out = (x - mean) / sqrt(variance + eps) * weight + bias of rows; bias may be null. All [rows, dim] and dense but for x_step.
struct LayerNormTask {
  const void *x, *weight, *bias;
  void* out;
  int64_t rows, dim, x_step;
  float eps;
};

// kernels.activation.Activation; kGate: there is none, a gate multiplies instead.
struct Activation {
  enum Kind : int { kGate = -1, kRelu2, kGeluTanh, kGelu, kXielu };
  int kind;
  float positive, negative, beta, bound;
};

// out = the activation of x, both [rows, dim] and dense.
struct ActivationTask {
  const void* x;
  void* out;
  int64_t rows, dim;
  Activation activation;
};

// kernels.gate.Gate.
struct Gate {
  float slope, cubic, limit, offset;
};

// out [rows, dim] = the gate of gate_up [rows, 2 * dim].
struct GateTask {
  const void* gate_up;
  void* out;
  int64_t rows, dim;
  Gate gate;
};

// out [rows, heads, dim] = rotated q; K (rotated) and V go to the cache. Heads are dense, tokens `*_step` apart.
struct RopeTask {
  const void *q, *k, *v;
  void* out;
  int64_t q_step, k_step, v_step;
  int64_t rows, heads;
  const int64_t* positions;
  const int64_t* slots;
  Rope rope;
  KVLayer kv;
};

// What a product of q and k is as a score: times scale, then, where cap > 0, cap * tanh(score / cap). sinks: of each
// query head a score that takes its share of the weights and brings no value; null: there are none.
struct Scoring {
  float scale = 1, cap = 0;
  const float* sinks = nullptr;
  float sink(int64_t head) const { return sinks == nullptr ? -__builtin_inff() : sinks[head]; }
};

// out [rows, heads, V's dim] = attention of q over the rows' cached positions. partial: decode_floats(), in chunks; memory:
// token_memory() of each thread, memory_step bytes apart, block by block or for wide groups, of which partial holds
// `together` rows.
struct DecodeTask {
  const void* q;
  void* out;
  float* partial;
  uint8_t* memory;
  int64_t memory_step;
  int64_t heads, together;
  Scoring scoring;
  int64_t window;
  Batch batch;
  KVLayer kv;
};

// Activations are quantised in runs of kRun inputs; their codes are summed in halves of those.
constexpr int64_t kRun = 32, kHalfRun = 16;
inline int64_t quantised_bytes(int64_t rows, int64_t in) { return rows * (in + in / kRun * 12 + in / kHalfRun * 4); }

constexpr int64_t kUnpreparedRows = 16;  // up to so many rows in bfloat16 are read where they lie

// Bytes of what panels may need of `rows` rows of `in` inputs: their codes, or themselves laid out in tiles of up to 32 rows,
// each number in `laid_out` bytes.
inline int64_t inputs_bytes(int64_t rows, int64_t in, int64_t laid_out) {
  const int64_t tiles = (rows + 31) * in * laid_out;
  return quantised_bytes(rows, in) > tiles ? quantised_bytes(rows, in) : tiles;
}

// y [rows, out] = the dense layer of x [rows, in]. memory: inputs_bytes(), or null for few rows without codes.
struct DenseTask {
  Dense dense;
  const void* x;
  void* y;
  uint8_t* memory;
  int64_t rows, x_step;
};

// y [rows, heads, out] = for each head the dense layer of x [rows, heads, in], rows and heads of it steps apart. dense: of
// all heads, panels() of them of each.
struct HeadsTask {
  Dense dense;
  const void* x;
  void* y;
  int64_t x_step, head_step, rows, heads, out;
  int64_t panels() const { return (out + kPanel - 1) / kPanel; }
};

// out [count, in] = rows of the dense layer's weight in bfloat16.
struct LookupTask {
  Dense dense;
  const int64_t* rows;
  void* out;
  int64_t count;
};

// How a row's token is drawn: kernels.draw's parameters in float32, and the key of its noise. temperature 0: the most
// likely one. top_k: 1 or more. mask: bit t % 32 of word t / 32 is set where token t may be drawn; null: all may.
struct DrawRow {
  float temperature, min_p, top_p;
  int64_t top_k;
  uint64_t key;
  const uint32_t* mask;
};

// out [rows] = token ids drawn from logits [rows, vocab]. memory: 2 * draw_floats(vocab) of each thread.
struct DrawTask {
  const float* logits;
  const DrawRow* how;
  int64_t* out;
  float* memory;
  int64_t rows, vocab;
};

// A vocabulary in whole vectors of any width, four by four.
inline int64_t draw_floats(int64_t vocab) { return (vocab + 63) / 64 * 64; }

struct ReadTask {
  const void* data;
  int64_t bytes;
};

struct MultiplyTask {
  int64_t rounds;
};

struct RecurrentKernels;

struct Kernels {
  const char* name;
  Team::Function rms_norm[2], layer_norm[2], gate_mul[2], activate[2], rope_and_cache[2], decode[2];  // float32, bfloat16
  Team::Function dense[2];                                                // the result: float32, bfloat16
  Team::Function dense_of_heads, decode_wide, decode_blocks, lookup, prefill, expanded, step;  // bfloat16
  Team::Function draw;                                                    // float32
  Team::Function read, multiply;                                          // the machine's limits
  int64_t laid_out;    // bytes of a number of many rows as dense layers take them; 0: as they lie
  int64_t round_work;  // floating point operations of one round of multiply on one thread
  const RecurrentKernels* recurrent;
};

}  // namespace kvferry
