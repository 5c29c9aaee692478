// A whole decode step recorded: what Python calls, checked.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "attending.h"
#include "chunks.h"
#include "recorded_mixers.h"
#include "step_task.h"

namespace kvferry {

constexpr int64_t kPackedTogether = int64_t{1} << 23;  // bytes of prompts' packed K and V, but for a longer one

// A decoder recorded for batches of decodes and of chunks of prompts, or, with recurrent mixers or gates of attention, of
// decodes alone. Holds what it was made of.
class NativeStep {
 public:
  NativeStep(std::shared_ptr<NativeKernels> kernels, SharedPacked embedding, SharedPacked head,
             Array norm, Array cos, Array sin, int64_t heads, int64_t kv_heads, int64_t dim, float eps, float scale,
             bool batch_invariant, bool gated, std::pair<float, float> factors, int64_t max_rows, int64_t max_decodes)
      : kernels_(std::move(kernels)), held_{norm, cos, sin}, packed_{embedding, head}, max_rows_(max_rows),
        max_decodes_(max_decodes) {
    require(heads % kv_heads == 0 && heads / kv_heads <= 16 && dim % 32 == 0 && dim <= 512, "heads of an unsupported shape");
    model_.embedding = embedding->dense, model_.head = head->dense;
    model_.norm = whole(norm, 1, 1);
    model_.hidden = embedding->dense.in;
    model_.heads = heads, model_.kv_heads = kv_heads, model_.dim = dim;
    model_.eps = eps, model_.scoring.scale = scale, model_.batch_invariant = batch_invariant;
    model_.embedding_factor = factors.first, model_.head_factor = factors.second;
    model_.gated = gated, model_.recurrent = kernels_->table().recurrent;
    require(!gated || !batch_invariant, "gates of attention need attention in chunks");
    model_.rope = rope_of(cos, sin, dim);
    require(model_.hidden % kPanel == 0 && elements(norm) == model_.hidden && model_.head.in == model_.hidden,
            "a hidden size of an unsupported shape");
  }

  using HowActivated = std::tuple<int, float, float, float, float>;

  // factors: of the results of o, and of down.
  void add_layer(Array input_norm, MaybeArray q_norm, MaybeArray k_norm, Array post_norm, SharedPacked qkv, SharedPacked o,
                 SharedPacked gate_up, SharedPacked down, bool rotated, int64_t window, const HowActivated& activation,
                 std::pair<float, float> factors) {
    require(q_norm.has_value() == k_norm.has_value(), "q_norm and k_norm come together");
    require(qkv->dense.in == model_.hidden && qkv->dense.out == qkv_size() && o->dense.in == model_.heads * model_.dim, kShape);
    StepLayer layer{};
    layer.qkv = qkv->dense, layer.rotated = rotated, layer.window = window, layer.cached = cached_++;
    for (const MaybeArray* norm : {&q_norm, &k_norm})
      if (*norm) {
        require(elements(**norm) == model_.dim, "a norm of heads does not fit them");
        held_.push_back(**norm);
      }
    if (q_norm) layer.q_norm = whole(*q_norm, 1, 1), layer.k_norm = whole(*k_norm, 1, 1);
    packed_.push_back(qkv);
    packed_.push_back(o);
    finish_layer(layer, input_norm, post_norm, o->dense, gate_up, down, activation, factors);
  }

  // A layer with a recurrent mixer in place of attention.
  void add_mixer(Array input_norm, Array post_norm, std::shared_ptr<NativeMixer> mixer, SharedPacked gate_up,
                 SharedPacked down, const HowActivated& activation, std::pair<float, float> factors) {
    require(mixer->view.inputs.in == model_.hidden, kShape);
    StepLayer layer{};
    layer.mixer = &mixer->view;
    mixers_.push_back(mixer);
    finish_layer(layer, input_norm, post_norm, mixer->out(), gate_up, down, activation, factors);
  }

  // The batch that the following runs are of: they read these arrays anew, which may change in between but for
  // query_start, and write `out`: hidden states, or logits where it is float32. The first `decodes` sequences have a row each.
  // What is refused leaves no batch bound.
  void bind(Array tokens, Array positions, Array slots, Array block_table, Array query_start, Array total_len,
            int64_t decodes, bool chained, Array kv, Array out) {
    const int64_t rows = elements(positions), sequences = elements(total_len);
    bound_.clear();
    bound_states_.clear();
    require(rows <= max_rows_ && decodes <= max_decodes_ && !layers_.empty(), "more rows than the step was made for");
    StepTask task{};
    task.kv = kv_layer(kv, 1);
    require(kv.ndim() == 6 && kv.shape(1) == cached_ && task.kv.heads == model_.kv_heads && task.kv.dim == model_.dim,
            "the cache has another layout than the step takes");
    require(elements(tokens) == rows && elements(slots) == rows && decodes <= sequences && decodes <= rows &&
                block_table.shape(0) == sequences && elements(query_start) == sequences + 1 &&
                elements(out) == rows * (kind_of(out) == 0 ? model_.head.out : model_.hidden),
            "tokens, batch and result do not fit each other");
    if (scratch_.empty()) allocate();
    model_.layers = layers_.data();
    model_.num_layers = static_cast<int64_t>(layers_.size());
    task.model = &model_;
    task.scratch = view_;
    task.batch = {decodes, typed<int64_t>(positions, 1), typed<int64_t>(slots, 1), typed<int32_t>(block_table, 2),
                  block_table.shape(1), typed<int32_t>(total_len, 1)};
    task.rows = rows;
    task.chained = chained;
    task.layer_step = kv.stride(1) * kv.itemsize();
    task.tokens = typed<int64_t>(tokens, 1);
    if (kind_of(out) == 0) {
      best_.resize(rows);
      task.logits = static_cast<float*>(whole(out, 0, 2)), task.best = best_.data();
    } else {
      best_.clear();
      task.out = whole(out, 1, 2);
    }
    place_prompts(task, typed<int32_t>(query_start, 1), sequences);
    task_ = task;
    bound_ = {tokens, positions, slots, block_table, query_start, total_len, kv, out};
  }

  // The rows of states that the batch's sequences read and write, which may change between runs.
  void bind_states(Array states, Array before, Array after) {
    require(!bound_.empty() && task_.rows == task_.batch.rows, "a model with recurrent layers takes decodes alone");
    require(kind_of(states) == 0 && states.ndim() == 2 && dense_from(states, 1), "states are float32 and dense after their rows");
    for (const auto& mixer : mixers_)
      require(mixer->end() <= states.shape(1), "states of another shape");
    task_.states = {static_cast<float*>(states.data()), states.stride(0)};
    bound_states_ = {states, before, after};
  }

  // Layers [first, last), the next ones. Where the largest of each row's logits lies, kNoToken where it is no finite number; nothing where there are no logits.
  const std::vector<int64_t>& run(int64_t first, int64_t last) {
    require(!bound_.empty() && first >= 0 && first < last && last <= model_.num_layers, "no batch or no layer to run");
    require(mixers_.empty() || !bound_states_.empty(), "a batch of a recurrent model needs states");
    task_.first = first, task_.last = last;
    if (!mixers_.empty()) {
      sequences_.emplace(std::vector<int64_t>(task_.rows, 1), bound_states_[1], bound_states_[2], bound_states_[0]);
      task_.sequences = sequences_->view();
    }
    for (int64_t i = 0; first == 0 && i < task_.rows; ++i)
      require(task_.tokens[i] >= 0 && task_.tokens[i] < model_.embedding.out, "a token lies outside the vocabulary");
    kernels_->run(kernels_->table().step, &task_, 1, 0);
    return best_;
  }

  // out [rows, hidden] = what the next layer adds to.
  void residual(Array out) const {
    require(!bound_.empty() && elements(out) == task_.rows * model_.hidden, "the result does not fit the batch");
    std::memcpy(whole(out, 1, 2), view_.residual, elements(out) * sizeof(uint16_t));
  }

 private:
  // The chunks of prompts behind the decodes. Those whose packed K and V fit beside each other are attended to together.
  void place_prompts(StepTask& task, const int32_t* query_start, int64_t sequences) {
    const int64_t width = qkv_size();
    prompts_.clear();
    std::vector<int64_t> places;
    int64_t place = 0, most = 0;
    for (int64_t i = task.batch.rows; i < sequences; ++i) {
      PrefillTask prompt{};
      prompt.q = prompt.out = view_.qkv + query_start[i] * width;
      prompt.q_step = prompt.out_step = width;
      prompt.heads = model_.heads, prompt.scoring = model_.scoring;
      prompt.query_len = query_start[i + 1] - query_start[i], prompt.total_len = task.batch.total_len[i];
      prompt.table = task.batch.block_table + i * task.batch.table_step;
      prompt.kv = task.kv, prompt.dims = task.kv.dims();
      prompt.memory = view_.memory, prompt.memory_step = view_.memory_step;
      require(prompt.query_len > 0 && query_start[i + 1] <= task.rows && prompt.query_len <= prompt.total_len &&
                  prompt.total_len <= task.batch.table_step * task.kv.block_size, "a sequence is longer than its blocks");
      const int64_t bytes = (prefill_bytes(prompt) + 63) / 64 * 64;
      if (place + bytes > kPackedTogether) place = 0;
      places.push_back(place);
      place += bytes;
      most = std::max(most, place);
      prompts_.push_back(prompt);
    }
    require(prompts_.empty() || (mixers_.empty() && !model_.gated), "a recurrent or gated model takes decodes alone");
    require(query_start[sequences] == task.rows && query_start[task.batch.rows] == task.batch.rows,
            "tokens, batch and result do not fit each other");
    if (static_cast<int64_t>(packed_kv_.size()) < most + 64) packed_kv_.resize(most + 64);
    for (size_t i = 0; i < prompts_.size(); ++i) prompts_[i].packed = aligned(packed_kv_) + places[i];
    task.prompts = prompts_.data(), task.num_prompts = static_cast<int64_t>(prompts_.size());
  }

  static constexpr const char* kShape = "a dense layer of an unsupported shape";

  // The MLP of a layer, its norms, and the last dense layer before them.
  void finish_layer(StepLayer layer, Array input_norm, Array post_norm, const Dense& out, const SharedPacked& gate_up,
                    const SharedPacked& down, const HowActivated& activation, std::pair<float, float> factors) {
    const auto [kind, positive, negative, beta, bound] = activation;
    const int64_t hidden = model_.hidden, inner = down->dense.in;
    require(Activation::kGate <= kind && kind <= Activation::kXielu, "an unknown activation");
    require(elements(input_norm) == hidden && elements(post_norm) == hidden, "a norm does not fit the hidden size");
    require(out.out == hidden && gate_up->dense.in == hidden &&
                gate_up->dense.out == (kind == Activation::kGate ? 2 * inner : inner) && down->dense.out == hidden &&
                inner % kPanel == 0 && (layers_.empty() || model_.inner == inner), kShape);
    model_.inner = inner;
    layer.input_norm = whole(input_norm, 1, 1), layer.post_norm = whole(post_norm, 1, 1);
    layer.o = out, layer.gate_up = gate_up->dense, layer.down = down->dense;
    layer.o_factor = factors.first, layer.down_factor = factors.second;
    layer.activation = {kind, positive, negative, beta, bound};
    layers_.push_back(layer);
    held_.push_back(input_norm);
    held_.push_back(post_norm);
    packed_.push_back(gate_up);
    packed_.push_back(down);
  }

  int64_t qkv_size() const { return (model_.heads * (model_.gated ? 2 : 1) + 2 * model_.kv_heads) * model_.dim; }

  static uint8_t* aligned(std::vector<uint8_t>& bytes) {
    return bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64;
  }

  void allocate() {
    int64_t widest = model_.hidden;
    for (const StepLayer& layer : layers_) widest = std::max(widest, layer.o.in);
    const int64_t inner = std::max(widest, model_.inner);
    const int64_t threads = kernels_->threads(), group = model_.heads / model_.kv_heads;
    const auto apart = [](int64_t count) { return (count + 127) / 64 * 64; };
    view_.own_step = apart(kOwnRows * widest);
    view_.own_codes_step = apart(quantised_bytes(kOwnRows, inner));
    const int64_t shared_codes = apart(inputs_bytes(max_rows_, inner, kernels_->table().laid_out));
    codes_.resize(64 + shared_codes + threads * view_.own_codes_step);
    view_.codes = codes_.data() + (64 - reinterpret_cast<uintptr_t>(codes_.data()) % 64) % 64;
    view_.own_codes = view_.codes + shared_codes;
    const int64_t residual = apart(max_rows_ * model_.hidden), qkv = apart(max_rows_ * qkv_size());
    const int64_t act = apart(max_rows_ * model_.inner), x = apart(max_rows_ * widest);
    scratch_.resize(residual + qkv + act + x + threads * view_.own_step);
    view_.residual = scratch_.data();
    view_.qkv = view_.residual + residual;
    view_.act = view_.qkv + qkv;
    view_.x = view_.act + act;
    view_.own_x = view_.x + x;
    const HeadDims dims{model_.dim, model_.dim};
    view_.memory_step = std::max(token_memory(group, dims), prefill_memory(group, dims));
    memory_.resize(threads * view_.memory_step + 64);
    view_.memory = aligned(memory_);
    partial_.resize(decode_floats(max_decodes_, model_.heads, model_.dim));
    view_.partial = partial_.data();
    if (!mixers_.empty()) view_.mixer = mixer_memory_.allocate(mixers_, max_decodes_, threads);
  }

  std::shared_ptr<NativeKernels> kernels_;
  std::vector<Array> held_;
  std::vector<SharedPacked> packed_;
  std::vector<StepLayer> layers_;
  std::vector<uint16_t> scratch_;
  std::vector<uint8_t> codes_;
  std::vector<float> partial_;
  std::vector<uint8_t> memory_, packed_kv_;
  std::vector<PrefillTask> prompts_;
  std::vector<Array> bound_, bound_states_;
  std::vector<std::shared_ptr<NativeMixer>> mixers_;
  MixerMemory mixer_memory_;
  std::optional<SequenceRows> sequences_;
  int64_t cached_ = 0;  // layers with K and V
  std::vector<int64_t> best_;
  StepTask task_{};
  StepModel model_{};
  StepScratch view_{};
  int64_t max_rows_, max_decodes_;
};

}  // namespace kvferry
