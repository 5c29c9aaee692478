// The kernels of one instruction set with their threads and packed weights: what Python calls, checked.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

#include "arrays.h"
#include "pack.h"
#include "select.h"

namespace kvferry {

class NativeKernels {
 public:
  NativeKernels(const std::string& name, int threads)
      : table_(kernels_named(name)), team_(threads), arena_(std::make_shared<Arena>()) {}

  std::string name() const { return table_->name; }
  int threads() const { return team_.size(); }
  const Kernels& table() const { return *table_; }

  // Runs without the GIL; what is smaller than `worth` elements stays on this thread.
  void run(Team::Function function, void* task, int64_t work, int64_t worth) {
    nb::gil_scoped_release released;
    if (work < worth || team_.size() == 1) {
      Barrier alone(1);
      function(task, 0, 1, alone);
    } else {
      team_.run(function, task);
    }
  }

  void rms_norm(Array x, MaybeArray residual, Array weight, Array out, MaybeArray total, float eps) {
    const int kind = kind_of(x);
    require(x.ndim() >= 1 && residual.has_value() == total.has_value(), "a residual needs a total");
    const int64_t dim = x.shape(x.ndim() - 1), rows = dim ? elements(x) / dim : 0;
    const bool flat = dense_from(x, 0);
    require(flat || (x.ndim() == 2 && dense_from(x, 1)), "rows of a norm must be contiguous");
    require(elements(weight) == dim && elements(out) == elements(x), "a norm's tensors differ in shape");
    NormTask task{x.data(), nullptr, whole(weight, kind, 1), whole(out, kind, out.ndim()), nullptr, rows, dim,
                  flat ? dim : x.stride(0), eps};
    if (residual) {
      require(elements(*residual) == elements(x) && elements(*total) == elements(x), "a norm's tensors differ in shape");
      task.residual = whole(*residual, kind, residual->ndim());
      task.total = whole(*total, kind, total->ndim());
    }
    run(table_->rms_norm[kind], &task, elements(x), kSmall);
  }

  void layer_norm(Array x, Array weight, MaybeArray bias, Array out, float eps) {
    const int kind = kind_of(x);
    require(x.ndim() == 2 && dense_from(x, 1), "rows of a norm must be contiguous");
    const int64_t rows = x.shape(0), dim = x.shape(1);
    require(elements(weight) == dim && elements(out) == elements(x) && (!bias || elements(*bias) == dim),
            "a norm's tensors differ in shape");
    LayerNormTask task{x.data(), whole(weight, kind, 1), bias ? whole(*bias, kind, 1) : nullptr, whole(out, kind, 2),
                       rows, dim, x.stride(0), eps};
    run(table_->layer_norm[kind], &task, elements(x), kSmall);
  }

  void activate(Array x, Array out, int which, float positive, float negative, float beta, float bound) {
    const int kind = kind_of(x);
    require(Activation::kRelu2 <= which && which <= Activation::kXielu, "an unknown activation");
    ActivationTask task{whole(x, kind, 2), whole(out, kind, 2), x.shape(0),
                        x.shape(1), {which, positive, negative, beta, bound}};
    require(elements(x) == elements(out), "an activation's result has another shape");
    run(table_->activate[kind], &task, elements(out), kSmall);
  }

  void gate_mul(Array gate_up, Array out, float slope, float cubic, float limit, float offset) {
    const int kind = kind_of(gate_up);
    GateTask task{whole(gate_up, kind, 2), whole(out, kind, 2), out.shape(0),
                  out.shape(1), {slope, cubic, limit, offset}};
    require(elements(gate_up) == 2 * elements(out), "gate_up must be twice as wide as the result");
    run(table_->gate_mul[kind], &task, elements(out), kSmall);
  }

  void rope_and_cache(Array q, Array k, Array v, MaybeArray cos, MaybeArray sin, Array kv, Array positions, Array slots,
                      Array out) {
    const int kind = kind_of(q);
    for (const Array* a : {&q, &k, &v})
      require(a->ndim() == 3 && kind_of(*a) == kind && dense_from(*a, 1), "heads of q, k and v must be contiguous");
    RopeTask task{};
    task.kv = kv_layer(kv, kind);
    task.rows = q.shape(0);
    task.heads = q.shape(1);
    for (const Array* a : {&k, &v})
      require(a->shape(0) == q.shape(0) && a->shape(1) == task.kv.heads, "k and v differ in shape");
    for (const Array* a : {&q, &k, &v})
      require(a->shape(2) == task.kv.dim, "q, k and v have another head dim than the cache");
    task.q = q.data(), task.k = k.data(), task.v = v.data();
    task.q_step = q.stride(0), task.k_step = k.stride(0), task.v_step = v.stride(0);
    task.out = whole(out, kind, 3);
    task.positions = typed<int64_t>(positions, 1);
    task.slots = typed<int64_t>(slots, 1);
    require(elements(slots) == task.rows && elements(positions) == task.rows, "positions and slots are one per token");
    task.rope = rope_of(cos, sin, task.kv.dim);
    run(table_->rope_and_cache[kind], &task, elements(q), kSmall);
  }

  // blocks: in the arithmetic of prefill, whatever else is in the batch.
  void decode(Array q, Array kv, Array block_table, Array total_len, int64_t rows, float scale, int64_t window,
              float cap, MaybeArray sinks, bool blocks, Array out);

  // One sequence: q [query_len, heads, dim], its row of the block table. Of a cache of one plane V are the last dims of
  // what is stored, as many as `out` has. see_until: int32 [query_len], see PrefillTask.
  void prefill(Array q, Array kv, Array blocks, int64_t total_len, float scale, int64_t window, float cap,
               MaybeArray sinks, MaybeArray see_until, Array out);

  // One sequence over a cache of one plane and head, [rotated key, latent], of which `expand` makes K and V of each
  // head: q [query_len, heads, rotated + plain], out [query_len, heads, value]. span: positions, and bytes, that are held
  // at a time, of as many heads as fit.
  void expanded(const Packed& expand, Array q, Array kv, Array blocks, int64_t total_len, float scale, int64_t span,
                int64_t bytes, Array out);

  // Recurrent layers (kernels.recurrent_layers). lens: query tokens of each sequence; before, after: rows of the states.
  void causal_conv(Array x, Array weight, MaybeArray bias, Array states, const std::vector<int64_t>& lens, Array before,
                   Array after, bool silu, bool gated, Array out);
  void delta_rule(Array q, Array k, Array v, Array decay, Array beta, Array states, const std::vector<int64_t>& lens,
                  Array before, Array after, bool by_token, Array out);
  void state_space(Array x, Array dt, Array a, Array b, Array c, MaybeArray d, Array states,
                   const std::vector<int64_t>& lens, Array before, Array after, bool by_token, Array out);
  void gated_norm(Array x, Array gate, Array weight, float eps, bool norm_first, Array out);
  void sigmoid_mul(Array x, Array gate, Array out);
  void time_steps(Array x, Array bias, float low, float high, Array out);
  void delta_gates(Array rates, Array rate, Array bias, Array decay, Array beta);

  // parts: (kind, bytes [rows, row_bytes(kind, in)]) laid under each other; bias float32.
  std::shared_ptr<Packed> pack(const std::vector<std::pair<std::string, Array>>& parts, int64_t in, MaybeArray bias) {
    auto packed = std::make_shared<Packed>();
    packed->arena = arena_;
    std::vector<StoredRows> stored;
    for (const auto& [kind, rows] : parts) {
      require(stored.empty() || stored.back().count % kPanel == 0, "all parts but the last need a multiple of 32 rows");
      require(row_bytes(kind, in) > 0, "the kind or the number of inputs is not packed");
      require(static_cast<int64_t>(rows.ndim() == 2 ? rows.shape(1) : 0) == row_bytes(kind, in), "rows of another length");
      stored.push_back({kind, typed<uint8_t>(rows, 2), rows.shape(0)});
    }
    {
      nb::gil_scoped_release released;
      pack_panels(*packed, stored, in, team_);
    }
    Dense& dense = packed->dense;
    if (bias) {
      require(bias->dtype() == nb::dtype<float>() && elements(*bias) == dense.out, "a bias is float32 [out]");
      auto* to = static_cast<float*>(arena_->take(dense.count() * kPanel * 4));
      std::copy_n(static_cast<const float*>(bias->data()), dense.out, to);
      dense.bias = to;
    }
    return packed;
  }

  // What is packed from now on lies in an empty file, or, below 0, in memory of this process.
  void pack_into(int descriptor) { arena_ = std::make_shared<Arena>(descriptor); }

  // Ends the file, and returns its bytes. What was packed lies there as long as something holds it.
  size_t finish() {
    nb::gil_scoped_release released;
    const size_t bytes = arena_->finish();
    arena_ = std::make_shared<Arena>();
    return bytes;
  }

  // The first bytes of a finished file, to be read: `placed` finds weights there.
  void map(int descriptor, size_t bytes) {
    nb::gil_scoped_release released;
    auto arena = std::make_shared<Arena>();
    arena->map(descriptor, bytes);
    arena_ = std::move(arena);
  }

  // Inputs, outputs, where the bias lies (-1: there is none), and of each panel its form and where it lies.
  using Place = std::tuple<int64_t, int64_t, int64_t, std::vector<std::pair<int, int64_t>>>;

  static Place place(const Packed& packed) {
    const Dense& dense = packed.dense;
    const auto offset = [&](const void* piece) { return static_cast<int64_t>(packed.arena->offset_of(piece)); };
    std::vector<std::pair<int, int64_t>> panels;
    for (const Panel& panel : packed.panels) panels.emplace_back(static_cast<int>(panel.form), offset(panel.data));
    return {dense.in, dense.out, dense.bias ? offset(dense.bias) : -1, panels};
  }

  std::shared_ptr<Packed> placed(const Place& place) {
    const auto& [in, out, bias, panels] = place;
    auto packed = std::make_shared<Packed>();
    packed->arena = arena_;
    Dense& dense = packed->dense;
    for (const auto& [number, offset] : panels) {
      require(number >= 0 && number <= static_cast<int>(Form::q6), "no form of a panel");
      const Form form = static_cast<Form>(number);
      packed->panels.push_back({arena_->at(offset, panel_bytes(form, in)), form});
      dense.quantised |= form != Form::bf16;
    }
    dense.panels = packed->panels.data();
    dense.in = in, dense.out = out;
    require(in > 0 && dense.count() == static_cast<int64_t>(panels.size()), "panels of another number than the outputs'");
    if (bias >= 0) dense.bias = reinterpret_cast<const float*>(arena_->at(bias, dense.count() * kPanel * 4));
    return packed;
  }

  void lookup(const Packed& packed, Array rows, Array out) {
    LookupTask task{packed.dense, typed<int64_t>(rows, 1), whole(out, 1, 2), elements(rows)};
    require(elements(out) == task.count * packed.dense.in, "the result does not fit the rows");
    for (int64_t i = 0; i < task.count; ++i)
      require(task.rows[i] >= 0 && task.rows[i] < packed.dense.out, "a row lies outside the weight");
    run(table_->lookup, &task, elements(out), kSmall);
  }

  void dense(const Packed& packed, Array x, Array out) {
    require(x.ndim() == 2 && is_bf16(x) && dense_from(x, 1), "rows of x must be contiguous");
    require(x.shape(1) == packed.dense.in && out.shape(1) == packed.dense.out &&
                x.shape(0) == out.shape(0), "x or the result does not fit the weight");
    const int64_t rows = x.shape(0);
    const bool prepared = packed.dense.quantised || (table_->laid_out > 0 && rows > kUnpreparedRows);
    uint8_t* memory = prepared ? aligned_bytes(inputs_bytes(rows, packed.dense.in, table_->laid_out)) : nullptr;
    const int kind = kind_of(out);
    DenseTask task{packed.dense, x.data(), whole(out, kind, 2), memory, rows, x.stride(0)};
    run(table_->dense[kind], &task, packed.dense.in * packed.dense.out, kSmall);
  }

  // Each head's layer of its own x [rows, heads, in], which may be a part of wider rows: out [rows, heads, outputs]. The
  // layers lie one behind the other, each with outputs of whole panels, of which `out` may take fewer.
  void dense_of_heads(const Packed& packed, Array x, Array out) {
    require(x.ndim() == 3 && is_bf16(x) && dense_from(x, 2), "inputs of a head must be contiguous");
    HeadsTask task{packed.dense, x.data(), whole(out, 1, 3), x.stride(0), x.stride(1)};
    task.rows = x.shape(0), task.heads = x.shape(1);
    task.out = out.shape(2);
    require(!task.dense.quantised && task.dense.bias == nullptr && x.shape(2) == task.dense.in &&
                task.dense.out == task.heads * task.panels() * kPanel &&
                elements(out) == task.rows * task.heads * task.out, "x or the result does not fit the weight");
    run(table_->dense_of_heads, &task, task.dense.in * task.dense.out, kSmall);
  }

  // how: (temperature, min_p, top_k, top_p, key) of each row. masks: of each row, or of none.
  void draw(Array logits, const std::vector<std::tuple<float, float, int64_t, float, uint64_t>>& how,
            const std::vector<MaybeArray>& masks, Array out) {
    DrawTask task{};
    task.logits = static_cast<const float*>(whole(logits, 0, 2));
    task.out = const_cast<int64_t*>(typed<int64_t>(out, 1));
    task.rows = logits.shape(0), task.vocab = logits.shape(1);
    require(task.vocab > 0 && static_cast<int64_t>(how.size()) == task.rows && elements(out) == task.rows &&
                (masks.empty() || masks.size() == how.size()),
            "parameters, masks and results are one per row of logits");
    std::vector<DrawRow> rows;
    for (const auto& [temperature, min_p, top_k, top_p, key] : how) {
      require(temperature >= 0 && top_k > 0, "temperature must not be negative, and top_k positive");
      rows.push_back({temperature, min_p, top_p, top_k, key, nullptr});
      if (masks.empty() || !masks[rows.size() - 1]) continue;
      const Array& mask = *masks[rows.size() - 1];
      require(32 * elements(mask) >= task.vocab, "a mask is shorter than the vocabulary");
      rows.back().mask = reinterpret_cast<const uint32_t*>(typed<int32_t>(mask, 1));
    }
    task.how = rows.data();
    task.memory = reinterpret_cast<float*>(aligned_bytes(threads() * 2 * draw_floats(task.vocab) * sizeof(float)));
    run(table_->draw, &task, task.rows > 1 ? elements(logits) : 0, kSmall);
  }

  // Reads the tensor's memory once with all threads.
  void read(Array a) {
    ReadTask task{a.data(), a.nbytes()};
    run(table_->read, &task, 1, 0);
  }

  // Multiplies in registers with all threads; returns the number of floating point operations done.
  int64_t multiply(int64_t rounds) {
    MultiplyTask task{rounds};
    run(table_->multiply, &task, 1, 0);
    return rounds * table_->round_work * threads();
  }

 private:
  // Of the memory that calls share; it only grows, for growing again would zero it again.
  uint8_t* aligned_bytes(size_t count) {
    if (bytes_.size() < count + 64) bytes_.resize(count + 64);
    return bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64;
  }

  static const Kernels* kernels_named(const std::string& name) {
    for (const Kernels* kernels : runnable_kernels())
      if (name == kernels->name) return kernels;
    throw nb::value_error(("this processor does not run " + name).c_str());
  }

  static constexpr int64_t kSmall = 16384;  // elements: below, waking a thread costs more than it does

  const Kernels* const table_;
  Team team_;
  std::shared_ptr<Arena> arena_;
  std::vector<float> partial_;
  std::vector<uint8_t> bytes_;
};

}  // namespace kvferry
