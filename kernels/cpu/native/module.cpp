// The module kernels.cpu._native: kernels of one instruction set with their threads, packed weights, recorded steps.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "arrays.h"
#include "pack.h"
#include "select.h"

namespace kvferry {

class NativeKernels {
 public:
  NativeKernels(const std::string& name, int threads) : team_(threads), arena_(std::make_shared<Arena>()) {
    for (const Kernels* kernels : runnable_kernels())
      if (name == kernels->name) table_ = kernels;
    if (table_ == nullptr) throw nb::value_error(("this processor does not run " + name).c_str());
  }

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
    const int64_t dim = static_cast<int64_t>(x.shape(x.ndim() - 1)), rows = dim ? elements(x) / dim : 0;
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

  void silu_mul(Array gate_up, Array out) {
    const int kind = kind_of(gate_up);
    SiluTask task{whole(gate_up, kind, 2), whole(out, kind, 2), static_cast<int64_t>(out.shape(0)),
                  static_cast<int64_t>(out.shape(1))};
    require(elements(gate_up) == 2 * elements(out), "gate_up must be twice as wide as the result");
    run(table_->silu_mul[kind], &task, elements(out), kSmall);
  }

  void rope_and_cache(Array q, Array k, Array v, MaybeArray cos, MaybeArray sin, Array kv, Array positions, Array slots,
                      Array out) {
    const int kind = kind_of(q);
    for (const Array* a : {&q, &k, &v})
      require(a->ndim() == 3 && kind_of(*a) == kind && dense_from(*a, 1), "heads of q, k and v must be contiguous");
    RopeTask task{};
    task.kv = kv_layer(kv, kind);
    task.rows = static_cast<int64_t>(q.shape(0));
    task.heads = static_cast<int64_t>(q.shape(1));
    for (const Array* a : {&k, &v})
      require(a->shape(0) == q.shape(0) && static_cast<int64_t>(a->shape(1)) == task.kv.heads, "k and v differ in shape");
    for (const Array* a : {&q, &k, &v})
      require(static_cast<int64_t>(a->shape(2)) == task.kv.dim, "q, k and v have another head dim than the cache");
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
              bool blocks, Array out) {
    const int kind = kind_of(q);
    DecodeTask task{};
    task.kv = kv_layer(kv, kind);
    task.q = whole(q, kind, 3);
    task.out = whole(out, kind, 3);
    task.heads = static_cast<int64_t>(q.shape(1));
    task.scale = scale;
    task.window = window;
    require(task.heads % task.kv.heads == 0 && static_cast<int64_t>(q.shape(2)) == task.kv.dim, "q does not fit the cache");
    require(rows <= static_cast<int64_t>(q.shape(0)) && rows <= static_cast<int64_t>(total_len.shape(0)) &&
                rows <= static_cast<int64_t>(block_table.shape(0)), "more rows than the batch has");
    task.batch = {rows, nullptr, nullptr, typed<int32_t>(block_table, 2), static_cast<int64_t>(block_table.shape(1)),
                  typed<int32_t>(total_len, 1)};
    if (blocks) {
      require(kind == 1 && task.kv.dim % kPanel == 0 && task.kv.dim <= 512, "q does not fit the cache");
      task.memory_step = token_memory(task.heads / task.kv.heads, task.kv.dim);
      task.memory = aligned_bytes(threads() * task.memory_step);
    } else {
      partial_.resize(decode_floats(rows, task.heads, task.kv.dim));
      task.partial = partial_.data();
    }
    run(blocks ? table_->decode_blocks : table_->decode[kind], &task, kSmall, 0);
  }

  // One sequence: q [query_len, heads, dim], its row of the block table.
  void prefill(Array q, Array kv, Array blocks, int64_t total_len, float scale, int64_t window, Array out) {
    PrefillTask task{};
    task.kv = kv_layer(kv, 1);
    task.q = whole(q, 1, 3);
    task.out = whole(out, 1, 3);
    task.query_len = static_cast<int64_t>(q.shape(0));
    task.heads = static_cast<int64_t>(q.shape(1));
    task.total_len = total_len;
    task.window = window;
    task.scale = scale;
    task.table = typed<int32_t>(blocks, 1);
    require(task.heads % task.kv.heads == 0 && static_cast<int64_t>(q.shape(2)) == task.kv.dim &&
                task.kv.dim % kPanel == 0 && task.kv.dim <= 512, "q does not fit the cache");
    require(elements(out) == elements(q) && task.query_len <= total_len &&
                total_len <= elements(blocks) * task.kv.block_size, "a sequence is longer than its blocks");
    task.memory_step = prefill_memory(task.heads / task.kv.heads, task.kv.dim);
    const int64_t packed = (prefill_bytes(task) + 63) / 64 * 64;
    task.packed = aligned_bytes(packed + threads() * task.memory_step);
    task.memory = task.packed + packed;
    run(table_->prefill, &task, elements(q), kSmall);
  }

  // parts: (kind, bytes [rows, row_bytes(kind, in)]) laid under each other; bias float32.
  std::shared_ptr<Packed> pack(const std::vector<std::pair<std::string, Array>>& parts, int64_t in, MaybeArray bias) {
    auto packed = std::make_shared<Packed>();
    packed->arena = arena_;
    std::vector<StoredRows> stored;
    for (const auto& [kind, rows] : parts) {
      require(stored.empty() || stored.back().count % kPanel == 0, "all parts but the last need a multiple of 32 rows");
      require(row_bytes(kind, in) > 0, "the kind or the number of inputs is not packed");
      require(static_cast<int64_t>(rows.ndim() == 2 ? rows.shape(1) : 0) == row_bytes(kind, in), "rows of another length");
      stored.push_back({kind, typed<uint8_t>(rows, 2), static_cast<int64_t>(rows.shape(0))});
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

  void lookup(const Packed& packed, Array rows, Array out) {
    LookupTask task{packed.dense, typed<int64_t>(rows, 1), whole(out, 1, 2), elements(rows)};
    require(elements(out) == task.count * packed.dense.in, "the result does not fit the rows");
    for (int64_t i = 0; i < task.count; ++i)
      require(task.rows[i] >= 0 && task.rows[i] < packed.dense.out, "a row lies outside the weight");
    run(table_->lookup, &task, elements(out), kSmall);
  }

  void dense(const Packed& packed, Array x, Array out) {
    require(x.ndim() == 2 && is_bf16(x) && dense_from(x, 1), "rows of x must be contiguous");
    require(static_cast<int64_t>(x.shape(1)) == packed.dense.in && static_cast<int64_t>(out.shape(1)) == packed.dense.out &&
                x.shape(0) == out.shape(0), "x or the result does not fit the weight");
    const int64_t rows = static_cast<int64_t>(x.shape(0));
    if (packed.dense.quantised) bytes_.resize(std::max<size_t>(bytes_.size(), quantised_bytes(rows, packed.dense.in)));
    DenseTask task{packed.dense, x.data(), whole(out, 1, 2), bytes_.data(), rows, x.stride(0)};
    run(table_->dense, &task, packed.dense.in * packed.dense.out, kSmall);
  }

  // Reads the tensor's memory once with all threads.
  void read(Array a) {
    ReadTask task{a.data(), static_cast<int64_t>(a.nbytes())};
    run(table_->read, &task, 1, 0);
  }

  // Multiplies in registers with all threads; returns the number of floating point operations done.
  int64_t multiply(int64_t rounds) {
    MultiplyTask task{rounds};
    run(table_->multiply, &task, 1, 0);
    return rounds * table_->round_work * threads();
  }

 private:
  uint8_t* aligned_bytes(int64_t count) {
    bytes_.resize(count + 64);
    return bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64;
  }

  static constexpr int64_t kSmall = 16384;  // elements: below, waking a thread costs more than it does

  const Kernels* table_ = nullptr;
  Team team_;
  std::shared_ptr<Arena> arena_;
  std::vector<float> partial_;
  std::vector<uint8_t> bytes_;
};

// A decoder recorded for batches of single tokens. Holds what it was made of.
class NativeStep {
 public:
  NativeStep(std::shared_ptr<NativeKernels> kernels, std::shared_ptr<Packed> embedding, Array norm, Array cos, Array sin,
             int64_t heads, int64_t kv_heads, int64_t dim, float eps, float scale,
             bool batch_invariant, int64_t max_rows)
      : kernels_(std::move(kernels)), held_{norm, cos, sin}, packed_{embedding}, max_rows_(max_rows) {
    require(heads % kv_heads == 0 && heads / kv_heads <= 16 && dim % 32 == 0 && dim <= 512, "heads of an unsupported shape");
    model_.embedding = embedding->dense;
    model_.norm = whole(norm, 1, 1);
    model_.hidden = embedding->dense.in;
    model_.heads = heads, model_.kv_heads = kv_heads, model_.dim = dim;
    model_.eps = eps, model_.scale = scale, model_.batch_invariant = batch_invariant;
    model_.rope = rope_of(cos, sin, dim);
    require(model_.hidden % kPanel == 0 && elements(norm) == model_.hidden, "a hidden size of an unsupported shape");
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

  void run(Array tokens, Array positions, Array slots, Array block_table, Array total_len, Array kv, Array out) {
    const int64_t rows = static_cast<int64_t>(tokens.shape(0));
    require(rows <= max_rows_ && !layers_.empty(), "more rows than the step was made for");
    StepTask task{};
    task.kv = kv_layer(kv, 1);
    require(kv.ndim() == 6 && kv.shape(1) == layers_.size() && task.kv.heads == model_.kv_heads && task.kv.dim == model_.dim,
            "the cache has another layout than the step takes");
    require(elements(positions) == rows && elements(slots) == rows && elements(total_len) == rows &&
                static_cast<int64_t>(block_table.shape(0)) == rows && elements(out) == rows * model_.hidden,
            "the batch has another shape than the step takes");
    task.tokens = typed<int64_t>(tokens, 1);
    for (int64_t i = 0; i < rows; ++i)
      require(task.tokens[i] >= 0 && task.tokens[i] < model_.embedding.out, "a token lies outside the vocabulary");
    if (scratch_.empty()) allocate();
    model_.layers = layers_.data();
    model_.num_layers = static_cast<int64_t>(layers_.size());
    task.model = &model_;
    task.scratch = view_;
    task.batch = {rows, typed<int64_t>(positions, 1), typed<int64_t>(slots, 1), typed<int32_t>(block_table, 2),
                  static_cast<int64_t>(block_table.shape(1)), typed<int32_t>(total_len, 1)};
    task.layer_step = kv.stride(1) * static_cast<int64_t>(kv.itemsize());
    task.out = whole(out, 1, 2);
    kernels_->run(kernels_->table().step, &task, 1, 0);
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
    view_.memory_step = token_memory(model_.heads / model_.kv_heads, model_.dim);
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
  StepModel model_{};
  StepScratch view_{};
  int64_t max_rows_;
};

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : runnable_kernels()) names.emplace_back(kernels->name);
  return names;
}

}  // namespace kvferry

NB_MODULE(_native, m) {
  using namespace kvferry;
  using namespace nb::literals;
  m.def("instruction_sets", &instruction_sets);
  m.def("row_bytes", &row_bytes, "kind"_a, "inputs"_a);
  nb::class_<Packed>(m, "Packed");
  nb::class_<NativeKernels>(m, "Kernels")
      .def(nb::init<const std::string&, int>(), "instruction_set"_a, "threads"_a)
      .def_prop_ro("instruction_set", &NativeKernels::name)
      .def_prop_ro("threads", &NativeKernels::threads)
      .def("rms_norm", &NativeKernels::rms_norm, "x"_a, "residual"_a.none(), "weight"_a, "out"_a, "total"_a.none(), "eps"_a)
      .def("silu_mul", &NativeKernels::silu_mul)
      .def("rope_and_cache", &NativeKernels::rope_and_cache, "q"_a, "k"_a, "v"_a, "cos"_a.none(), "sin"_a.none(), "kv"_a,
           "positions"_a, "slots"_a, "out"_a)
      .def("decode", &NativeKernels::decode)
      .def("prefill", &NativeKernels::prefill)
      .def("pack", &NativeKernels::pack, "parts"_a, "inputs"_a, "bias"_a.none())
      .def("lookup", &NativeKernels::lookup)
      .def("dense", &NativeKernels::dense)
      .def("read", &NativeKernels::read)
      .def("multiply", &NativeKernels::multiply);
  nb::class_<NativeStep>(m, "Step")
      .def(nb::init<std::shared_ptr<NativeKernels>, std::shared_ptr<Packed>, Array, Array, Array, int64_t, int64_t,
                    int64_t, float, float, bool, int64_t>())
      .def("add_layer", &NativeStep::add_layer, "input_norm"_a, "q_norm"_a.none(), "k_norm"_a.none(), "post_norm"_a,
           "qkv"_a, "o"_a, "gate_up"_a, "down"_a, "rotated"_a, "window"_a)
      .def("run", &NativeStep::run)
      .def_prop_ro("max_rows", &NativeStep::max_rows);
}
