// Single rows of a packed weight as bfloat16: what an embedding is asked for.
#pragma once

#include "dot.h"
#include "forms.h"
#include "types.h"

namespace kvferry {
namespace {

KVF_INLINE float one_half(const uint8_t* halves, int64_t index) {
  uint8_t padded[2 * kLanes] = {};
  std::memcpy(padded, halves + 2 * index, 2);
  return load_half(padded)[0];
}

template <class C>
inline __attribute__((noinline)) void read_codes(const uint8_t* panel, int64_t in, int64_t row, bf16* out) {
  const int64_t lane = row % 16, high = row / 16;
  const uint8_t* group = panel + C::head;
  for (int64_t at = 0; at < in; at += C::group, group += C::bytes) {
    float scale = 0, minimum = 0;
    if constexpr (C::per_channel)
      std::memcpy(&scale, panel + 4 * row, 4);
    else
      scale = one_half(group + C::scales, row);
    if constexpr (C::minimum) minimum = one_half(group + C::minima, row);
    for (int step = 0; step < C::steps; ++step)
      for (int i = 0; i < 4; ++i) {
        const int64_t byte = lane * 4 + i;
        int code;
        if constexpr (C::bits == 8) {
          code = group[step * C::step_bytes + high * 64 + byte];
        } else {
          code = group[step * C::step_bytes + byte] >> (4 * high) & 15;
          if constexpr (C::bits > 4)
            code |= (group[C::upper + high * 64 + byte] >> (step * (C::bits - 4)) & ((1 << (C::bits - 4)) - 1)) << 4;
        }
        out[at + 4 * step + i] = narrow(static_cast<float>(code - C::offset) * scale + minimum);
      }
  }
}

// out [in] = row `index` of the weight.
inline void read_row(const Dense& dense, int64_t index, bf16* out) {
  const Panel& panel = dense.panels[index / kPanel];
  const int64_t row = index % kPanel;
  if (panel.form != Form::bf16)
    with_codes(panel.form, [&](auto codes) { read_codes<decltype(codes)>(panel.data, dense.in, row, out); });
  else
    for (int64_t k = 0; k < dense.in / 2; ++k) std::memcpy(out + 2 * k, panel.data + (k * kPanel + row) * 4, 4);
}

void run_lookup(void* argument, int member, int, Barrier& barrier) {
  const LookupTask& t = *static_cast<LookupTask*>(argument);
  barrier.each_run(t.count, member, [&](Share rows) {
    for (int64_t i = rows.begin; i < rows.end; ++i)
      read_row(t.dense, t.rows[i], static_cast<bf16*>(t.out) + i * t.dense.in);
  });
}

}  // namespace
}  // namespace kvferry
