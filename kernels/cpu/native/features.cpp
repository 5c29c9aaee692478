#include "features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kvferry {

#if defined(__x86_64__) && defined(__linux__)
namespace {

constexpr int kRequest = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr int kTileData = 18;     // XFEATURE_XTILEDATA

bool request_tiles() { return syscall(SYS_arch_prctl, kRequest, kTileData) == 0; }

#if defined(KVFERRY_EMULATED)  // a system that does not know of tiles has no say, one that refuses has
bool ask_for_tiles() { return request_tiles() || errno != EPERM; }
#else
bool ask_for_tiles() {
  constexpr unsigned kWanted = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kWanted) == kWanted && request_tiles();
}
#endif

}  // namespace

bool tiles_permitted() {
  static const bool permitted = ask_for_tiles();
  return permitted;
}
#else
bool tiles_permitted() { return false; }
#endif

#if defined(__x86_64__)
bool has_fast_bf16_products() { return __builtin_cpu_is("intel") == 0; }

bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#else
bool has_fast_bf16_products() { return false; }
bool has_avx_vnni() { return false; }
#endif

#if defined(__aarch64__) && defined(__linux__)
bool has_arm_dotprod() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }

bool has_arm_bf16() {
  constexpr unsigned long kBoth = HWCAP2_BF16 | HWCAP2_I8MM;
  return has_arm_dotprod() && (getauxval(AT_HWCAP2) & kBoth) == kBoth;
}
#else
bool has_arm_dotprod() { return false; }
bool has_arm_bf16() { return false; }
#endif

}  // namespace kvferry
