// The module kernels.cpu._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include "recorded.h"
#include "recurrent.h"

namespace kvferry {

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
      .def("layer_norm", &NativeKernels::layer_norm, "x"_a, "weight"_a, "bias"_a.none(), "out"_a, "eps"_a)
      .def("gate_mul", &NativeKernels::gate_mul)
      .def("activate", &NativeKernels::activate)
      .def("rope_and_cache", &NativeKernels::rope_and_cache, "q"_a, "k"_a, "v"_a, "cos"_a.none(), "sin"_a.none(), "kv"_a,
           "positions"_a, "slots"_a, "out"_a)
      .def("decode", &NativeKernels::decode, "q"_a, "kv"_a, "block_table"_a, "total_len"_a, "rows"_a, "scale"_a, "window"_a,
           "cap"_a, "sinks"_a.none(), "blocks"_a, "out"_a)
      .def("prefill", &NativeKernels::prefill, "q"_a, "kv"_a, "blocks"_a, "total_len"_a, "scale"_a, "window"_a, "cap"_a,
           "sinks"_a.none(), "see_until"_a.none(), "out"_a)
      .def("expanded", &NativeKernels::expanded, "expand"_a, "q"_a, "kv"_a, "blocks"_a, "total_len"_a, "scale"_a,
           "span"_a, "bytes"_a, "out"_a)
      .def("causal_conv", &NativeKernels::causal_conv, "x"_a, "weight"_a, "bias"_a.none(), "states"_a, "lens"_a, "before"_a,
           "after"_a, "silu"_a, "gated"_a, "out"_a)
      .def("delta_rule", &NativeKernels::delta_rule)
      .def("state_space", &NativeKernels::state_space, "x"_a, "dt"_a, "a"_a, "b"_a, "c"_a, "d"_a.none(), "states"_a,
           "lens"_a, "before"_a, "after"_a, "by_token"_a, "out"_a)
      .def("gated_norm", &NativeKernels::gated_norm)
      .def("sigmoid_mul", &NativeKernels::sigmoid_mul)
      .def("time_steps", &NativeKernels::time_steps)
      .def("delta_gates", &NativeKernels::delta_gates)
      .def("pack", &NativeKernels::pack, "parts"_a, "inputs"_a, "bias"_a.none())
      .def("pack_into", &NativeKernels::pack_into)
      .def("finish", &NativeKernels::finish)
      .def("map", &NativeKernels::map)
      .def_static("place", &NativeKernels::place)
      .def("placed", &NativeKernels::placed)
      .def("lookup", &NativeKernels::lookup)
      .def("dense", &NativeKernels::dense)
      .def("dense_of_heads", &NativeKernels::dense_of_heads)
      .def("draw", &NativeKernels::draw)
      .def("read", &NativeKernels::read)
      .def("multiply", &NativeKernels::multiply);
  nb::class_<NativeMixer>(m, "Mixer")
      .def_static("short_conv", &NativeMixer::short_conv, "inputs"_a, "conv"_a, "bias"_a.none(), "out"_a, "state"_a)
      .def_static("delta", &NativeMixer::delta)
      .def_static("scan", &NativeMixer::scan, "inputs"_a, "conv"_a, "bias"_a.none(), "decay"_a, "skip"_a, "dt_bias"_a,
                  "norm"_a, "out"_a, "heads"_a, "dim"_a, "groups"_a, "numbers"_a, "norm_first"_a, "low"_a, "high"_a, "eps"_a,
                  "state"_a);
  nb::class_<NativeStep>(m, "Step")
      .def(nb::init<std::shared_ptr<NativeKernels>, std::shared_ptr<Packed>, std::shared_ptr<Packed>, Array, Array,
                    Array, int64_t, int64_t, int64_t, float, float, bool, bool, std::pair<float, float>, int64_t, int64_t>())
      .def("add_layer", &NativeStep::add_layer, "input_norm"_a, "q_norm"_a.none(), "k_norm"_a.none(), "post_norm"_a,
           "qkv"_a, "o"_a, "gate_up"_a, "down"_a, "rotated"_a, "window"_a, "activation"_a,
           "factors"_a)
      .def("add_mixer", &NativeStep::add_mixer)
      .def("bind", &NativeStep::bind)
      .def("bind_states", &NativeStep::bind_states)
      .def("run", &NativeStep::run)
      .def("residual", &NativeStep::residual);
}
