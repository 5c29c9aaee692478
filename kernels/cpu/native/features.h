// What of processor and system the compiler's own question does not cover.
#pragma once

namespace kvferry {

// Whether the processor has AMX tiles for bfloat16 and int8, and the system lets this process keep state in them. Asked for
// once; what is granted holds for every thread of the process, older ones too, and for its forks.
bool tiles_permitted();

// Whether the processor adds products of bfloat16 (VDPBF16PS) faster than products of float32. Intel's takes four times as
// long as a fused multiplication and addition of float32, for twice the work.
bool has_fast_bf16_products();

// Whether the processor adds products of bytes without AVX-512.
bool has_avx_vnni();

// Whether the processor has ARM's dot products of bytes; whether it has the matrix products of bytes and of bfloat16, too.
bool has_arm_dotprod();
bool has_arm_bf16();

}  // namespace kvferry
