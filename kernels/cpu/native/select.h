// The instruction sets compiled in, best first, and which of them this processor runs.
#pragma once

#include <string>
#include <vector>

#include "types.h"

namespace kvferry {

extern const Kernels kernels_portable;
#if defined(KVFERRY_HAS_AVX2)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif
#if defined(KVFERRY_HAS_AVX512_BF16)
extern const Kernels kernels_avx512_bf16;
#endif

inline std::vector<const Kernels*> runnable_kernels() {
  std::vector<const Kernels*> found;
#if defined(KVFERRY_EMULATED)
  found = {&kernels_avx512_bf16, &kernels_avx512};
#endif
#if defined(KVFERRY_HAS_AVX2)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#if defined(KVFERRY_HAS_AVX512_BF16)
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
    found.push_back(&kernels_avx512_bf16);
#endif
  if (avx512) found.push_back(&kernels_avx512);
  if (avx2) found.push_back(&kernels_avx2);
#endif
  found.push_back(&kernels_portable);
  return found;
}

}  // namespace kvferry
