// The kernels for one instruction set, chosen by the compiler's flags; KVFERRY_ISA is its name. Everything but the table
// is local to this translation unit: code for a newer processor must never be merged into what older ones run.
#include "activation.h"
#include "decode.h"
#include "dense.h"
#include "draw.h"
#include "elementwise.h"
#include "expanded.h"
#include "lookup.h"
#include "peak.h"
#include "prefill.h"
#include "rope.h"
#include "step.h"
#include "types.h"

#define KVF_JOIN_(a, b) a##b
#define KVF_JOIN(a, b) KVF_JOIN_(a, b)
#define KVF_TEXT_(a) #a
#define KVF_TEXT(a) KVF_TEXT_(a)

namespace kvferry {

extern const RecurrentKernels KVF_JOIN(recurrent_, KVFERRY_ISA);  // recurrent.cpp

extern const Kernels KVF_JOIN(kernels_, KVFERRY_ISA);
const Kernels KVF_JOIN(kernels_, KVFERRY_ISA) = {
    KVF_TEXT(KVFERRY_ISA),
    {run_norm<float>, run_norm<bf16>},
    {run_layer_norm<float>, run_layer_norm<bf16>},
    {run_gate<float>, run_gate<bf16>},
    {run_activation<float>, run_activation<bf16>},
    {run_rope<float>, run_rope<bf16>},
    {run_decode<float>, run_decode<bf16>},
    {run_dense<float>, run_dense<bf16>},
    run_dense_of_heads,
    run_decode_wide,
    run_decode_blocks,
    run_lookup,
    run_prefill,
    run_expanded,
    run_step,
    run_draw,
    run_read,
    run_multiply,
    kLaidOutBytes,
    kRoundWork,
    &KVF_JOIN(recurrent_, KVFERRY_ISA),
};

}  // namespace kvferry
