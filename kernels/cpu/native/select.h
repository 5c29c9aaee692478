// The instruction sets compiled in, best first, and which of them this processor runs.
#pragma once

#include <string>
#include <vector>

#include "features.h"
#include "types.h"

namespace kvferry {

extern const Kernels kernels_portable;
extern const Kernels kernels_avx2, kernels_avx_vnni, kernels_avx512, kernels_avx512_vnni, kernels_avx512_bf16, kernels_amx;
extern const Kernels kernels_neon_bf16, kernels_neon_dotprod;

// Calls add(kernels) with those for x86 that are compiled in and run here, best first.
template <class Add>
inline void add_x86([[maybe_unused]] Add add) {
#if defined(KVFERRY_HAS_AVX2)
#if defined(KVFERRY_EMULATED)
  [[maybe_unused]] const bool avx512 = true, vnni = true, bf16 = true, avx_vnni = true;
#else
  [[maybe_unused]] const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  [[maybe_unused]] const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  [[maybe_unused]] const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  [[maybe_unused]] const bool avx_vnni = has_avx_vnni();
#endif
  [[maybe_unused]] const bool fast = has_fast_bf16_products();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2")) return;
#if defined(KVFERRY_HAS_AMX)
  if (bf16 && tiles_permitted()) add(&kernels_amx);
#endif
#if defined(KVFERRY_HAS_AVX512_BF16)
  if (bf16 && fast) add(&kernels_avx512_bf16);
#endif
#if defined(KVFERRY_HAS_AVX512_VNNI)
  if (vnni) add(&kernels_avx512_vnni);
#endif
#if defined(KVFERRY_HAS_AVX512_BF16)
  if (bf16 && !fast) add(&kernels_avx512_bf16);
#endif
#if defined(KVFERRY_HAS_AVX512)
  if (avx512) add(&kernels_avx512);
#endif
#if defined(KVFERRY_HAS_AVX_VNNI)
  if (avx_vnni) add(&kernels_avx_vnni);
#endif
  add(&kernels_avx2);
#endif
}

// The same for ARM.
template <class Add>
inline void add_arm([[maybe_unused]] Add add) {
#if defined(KVFERRY_HAS_NEON_BF16)
  if (has_arm_bf16()) add(&kernels_neon_bf16);
#endif
#if defined(KVFERRY_HAS_NEON_DOTPROD)
  if (has_arm_dotprod()) add(&kernels_neon_dotprod);
#endif
}

inline std::vector<const Kernels*> runnable_kernels() {
  std::vector<const Kernels*> found;
  add_x86([&](const Kernels* kernels) { found.push_back(kernels); });
  add_arm([&](const Kernels* kernels) { found.push_back(kernels); });
  found.push_back(&kernels_portable);
  return found;
}

}  // namespace kvferry
