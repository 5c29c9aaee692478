// A whole decode step recorded: what Python calls, checked.
#pragma once

#include <memory>
#include <vector>

#include "attending.h"
#include "chunks.h"

namespace kvferry {

// A decoder recorded for batches of single tokens. Holds what it was made of.
class NativeStep {
 public:
  NativeStep(std::shared_ptr<NativeKernels> kernels, std::shared_ptr<Packed> embedding, std::shared_ptr<Packed> head,
             Array norm, Array cos, Array sin, int64_t heads, int64_t kv_heads, int64_t dim, float eps, float scale,
             bool batch_invariant, int64_t max_rows)
      : kernels_(std::move(kernels)), held_{norm, cos, sin}, packed_{embedding, head}, max_rows_(max_rows) {
    require(heads % kv_heads == 0 && heads / kv_heads <= 16 && dim % 32 == 0 && dim <= 512, "heads of an unsupported shape");
    model_.embedding = embedding->dense, model_.head = head->dense;
    model_.norm = whole(norm, 1, 1);
    model_.hidden = embedding->dense.in;
    model_.heads = heads, model_.kv_heads = kv_heads, model_.dim = dim;
    model_.eps = eps, model_.scoring.scale = scale, model_.batch_invariant = batch_invariant;
    model_.rope = rope_of(cos, sin, dim);
    require(model_.hidden % kPanel == 0 && elements(norm) == model_.hidden && model_.head.in == model_.hidden,
            "a hidden size of an unsupported shape");
  }

  void add_layer(Array input_norm, MaybeArray q_norm, MaybeArray k_norm, Array post_norm, std::shared_ptr<Packed> qkv,
                 std::shared_ptr<Packed> o, std::shared_ptr<Packed> gate_up, std::shared_ptr<Packed> down, bool rotated,
                 int64_t window) {
    const int64_t hidden = model_.hidden, q_size = model_.heads * model_.dim;
    const int64_t inner = down->dense.in;
    require(elements(input_norm) == hidden && elements(post_norm) == hidden, "a norm does not fit the hidden size");
    require(q_norm.has_value() == k_norm.has_value(), "q_norm and k_norm come together");
    require(qkv->dense.in == hidden && qkv->dense.out == q_size + 2 * model_.kv_heads * model_.dim &&
                o->dense.in == q_size && o->dense.out == hidden && gate_up->dense.in == hidden &&
                gate_up->dense.out == 2 * inner && down->dense.out == hidden && inner % kPanel == 0 &&
                (layers_.empty() || model_.inner == inner), "a dense layer of an unsupported shape");
    model_.inner = inner;
    StepLayer layer{whole(input_norm, 1, 1), whole(post_norm, 1, 1), nullptr, nullptr, qkv->dense, o->dense,
                    gate_up->dense, down->dense, rotated, window};
    for (const MaybeArray* norm : {&q_norm, &k_norm})
      if (*norm) {
        require(elements(**norm) == model_.dim, "a norm of heads does not fit them");
        held_.push_back(**norm);
      }
    if (q_norm) layer.q_norm = whole(*q_norm, 1, 1), layer.k_norm = whole(*k_norm, 1, 1);
    layers_.push_back(layer);
    held_.push_back(input_norm);
    held_.push_back(post_norm);
    for (auto& packed : {qkv, o, gate_up, down}) packed_.push_back(packed);
  }

  int64_t max_rows() const { return max_rows_; }

  // The batch that the following runs are of: they read these arrays anew, which may change in between, and write `out`:
  // hidden states, or logits where it is float32.
  void bind(Array tokens, Array positions, Array slots, Array block_table, Array total_len, bool chained, Array kv, Array out) {
    const int64_t rows = elements(positions);
    require(rows <= max_rows_ && !layers_.empty(), "more rows than the step was made for");
    StepTask task{};
    task.kv = kv_layer(kv, 1);
    require(kv.ndim() == 6 && kv.shape(1) == layers_.size() && task.kv.heads == model_.kv_heads && task.kv.dim == model_.dim,
            "the cache has another layout than the step takes");
    require(elements(tokens) == rows && elements(slots) == rows && elements(total_len) == rows &&
                static_cast<int64_t>(block_table.shape(0)) == rows &&
                elements(out) == rows * (kind_of(out) == 0 ? model_.head.out : model_.hidden),
            "tokens, batch and result do not fit each other");
    if (scratch_.empty()) allocate();
    model_.layers = layers_.data();
    model_.num_layers = static_cast<int64_t>(layers_.size());
    task.model = &model_;
    task.scratch = view_;
    task.batch = {rows, typed<int64_t>(positions, 1), typed<int64_t>(slots, 1), typed<int32_t>(block_table, 2),
                  static_cast<int64_t>(block_table.shape(1)), typed<int32_t>(total_len, 1)};
    task.chained = chained;
    task.layer_step = kv.stride(1) * static_cast<int64_t>(kv.itemsize());
    task.tokens = typed<int64_t>(tokens, 1);
    if (kind_of(out) == 0) {
      best_.resize(rows);
      task.logits = static_cast<float*>(whole(out, 0, 2)), task.best = best_.data();
    } else {
      best_.clear();
      task.out = whole(out, 1, 2);
    }
    task_ = task;
    bound_ = {tokens, positions, slots, block_table, total_len, kv, out};
  }

  // Where the largest of each row's logits lies, kNoToken where it is no finite number; nothing where there are no logits.
  const std::vector<int64_t>& run() {
    require(!bound_.empty(), "no batch is bound");
    for (int64_t i = 0; i < task_.batch.rows; ++i)
      require(task_.tokens[i] >= 0 && task_.tokens[i] < model_.embedding.out, "a token lies outside the vocabulary");
    kernels_->run(kernels_->table().step, &task_, 1, 0);
    return best_;
  }

 private:
  void allocate() {
    const int64_t qkv = (model_.heads + 2 * model_.kv_heads) * model_.dim, q = model_.heads * model_.dim;
    const int64_t widest = model_.hidden > q ? model_.hidden : q;
    view_.local_step = (max_rows_ * widest + 127) / 64 * 64;
    view_.codes_step = (quantised_bytes(max_rows_, std::max(widest, model_.inner)) + 127) / 64 * 64;
    codes_.resize(kernels_->threads() * view_.codes_step);
    view_.codes = codes_.data();
    const int64_t shared = max_rows_ * (model_.hidden + qkv + model_.inner) + 192;
    scratch_.resize(shared + 64 + kernels_->threads() * view_.local_step);
    view_.memory_step = token_memory(model_.heads / model_.kv_heads, {model_.dim, model_.dim});
    memory_.resize(kernels_->threads() * view_.memory_step + 64);
    view_.memory = memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64;
    partial_.resize(decode_floats(max_rows_, model_.heads, model_.dim));
    view_.partial = partial_.data();
    view_.residual = scratch_.data();
    view_.qkv = view_.residual + max_rows_ * model_.hidden + 64;
    view_.act = view_.qkv + max_rows_ * qkv + 64;
    view_.local = scratch_.data() + shared;
  }

  std::shared_ptr<NativeKernels> kernels_;
  std::vector<Array> held_;
  std::vector<std::shared_ptr<Packed>> packed_;
  std::vector<StepLayer> layers_;
  std::vector<uint16_t> scratch_;
  std::vector<uint8_t> codes_;
  std::vector<float> partial_;
  std::vector<uint8_t> memory_;
  std::vector<Array> bound_;
  std::vector<int64_t> best_;
  StepTask task_{};
  StepModel model_{};
  StepScratch view_{};
  int64_t max_rows_;
};

}  // namespace kvferry
