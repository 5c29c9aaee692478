// The kernels of recurrent layers for one instruction set, as isa.cpp has all others.
#include "causal_conv.h"
#include "delta_rule.h"
#include "mixer_gates.h"
#include "state_space.h"

#define KVF_JOIN_(a, b) a##b
#define KVF_JOIN(a, b) KVF_JOIN_(a, b)

namespace kvferry {

extern const RecurrentKernels KVF_JOIN(recurrent_, KVFERRY_ISA);
const RecurrentKernels KVF_JOIN(recurrent_, KVFERRY_ISA) = {
    {run_causal_conv<float>, run_causal_conv<bf16>},
    {run_delta_rule<float>, run_delta_rule<bf16>},
    {run_state_space<float>, run_state_space<bf16>},
    {run_gated_norm<float>, run_gated_norm<bf16>},
    {run_sigmoid_mul<float>, run_sigmoid_mul<bf16>},
    {run_time_steps<float>, run_time_steps<bf16>},
    run_delta_gates<float>,
};

}  // namespace kvferry
