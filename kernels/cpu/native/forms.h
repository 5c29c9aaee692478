// Forms in which a panel stores its 32 rows of a weight.
//
// bf16: for each pair of inputs, 32 pairs of bfloat16. All others are codes of a few bits for integer products with
// activations in int8: a run of `group` inputs lies together, for each four of them the codes of 16 + 16 outputs:
//   8 bits   outputs 0-15, then 16-31: 4 bytes an output
//   4 bits   4 bytes an output: low halves for outputs 0-15, high halves for 16-31
//   5, 6     as 4 bits; then, once a group, 64 + 64 bytes with the codes' upper bits: those of the group's n-th four
//            inputs are the n-th bit or pair of bits
// then the group's scales, and minima where the form has them: float16, 32 of each. A weight is
// scale * (code - offset), or scale * code + minimum. int8 has one float32 scale per output instead, at the panel's head.
#pragma once

#include <cstdint>

namespace kvferry {

constexpr int kPanel = 32;  // outputs of one panel of a packed weight

enum class Form : uint8_t { bf16, int8, q8, q4, q4_min, q4_half, q4_half_min, q5, q5_min, q6 };

template <int Bits, int Group, int Offset>
struct Codes {
  static constexpr int bits = Bits, group = Group, steps = Group / 4, offset = Offset;
  static constexpr bool per_channel = false, minimum = Offset == 0;
  static constexpr int step_bytes = Bits == 8 ? 128 : 64;
  static constexpr int upper = steps * step_bytes;  // where a group's upper bits begin
  static constexpr int scales = upper + (Bits == 5 || Bits == 6 ? 128 : 0);
  static constexpr int minima = scales + 2 * kPanel;
  static constexpr int bytes = minima + (minimum ? 2 * kPanel : 0);
  static constexpr int head = 0;
};

struct Int8 : Codes<8, 32, 128> {
  static constexpr bool per_channel = true;
  static constexpr int bytes = scales;
  static constexpr int head = 4 * kPanel;
};
using Q8 = Codes<8, 32, 128>;
using Q4 = Codes<4, 32, 8>;
using Q4Min = Codes<4, 32, 0>;
using Q4Half = Codes<4, 16, 8>;
using Q4HalfMin = Codes<4, 16, 0>;
using Q5 = Codes<5, 32, 16>;
using Q5Min = Codes<5, 32, 0>;
using Q6 = Codes<6, 16, 32>;

// Calls visit(T{}) with the layout T of a form other than bf16.
template <class Visit>
inline void with_codes(Form form, Visit visit) {
  switch (form) {
    case Form::int8: return visit(Int8{});
    case Form::q8: return visit(Q8{});
    case Form::q4: return visit(Q4{});
    case Form::q4_min: return visit(Q4Min{});
    case Form::q4_half: return visit(Q4Half{});
    case Form::q4_half_min: return visit(Q4HalfMin{});
    case Form::q5: return visit(Q5{});
    case Form::q5_min: return visit(Q5Min{});
    default: return visit(Q6{});
  }
}

inline int64_t panel_bytes(Form form, int64_t in) {
  int64_t bytes = in * kPanel * 2;
  if (form != Form::bf16)
    with_codes(form, [&](auto codes) { bytes = codes.head + in / codes.group * codes.bytes; });
  return bytes;
}

struct Panel {
  const uint8_t* data;
  Form form;
};

}  // namespace kvferry
