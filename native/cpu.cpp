#include "cpu.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace prefixkv {
namespace {

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
#endif
  return Isa::kBase;
}

}  // namespace

Isa best_isa() {
  static const Isa isa = [] {
    const Isa found = detect();
    const char* asked = std::getenv("PREFIXKV_ISA");
    if (asked == nullptr) return found;
    for (Isa lower : {Isa::kBase, Isa::kAvx2, Isa::kAvx512}) {
      if (std::strcmp(asked, isa_name(lower)) == 0 && lower < found) return lower;
    }
    return found;
  }();
  return isa;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx2: return "avx2";
    default: return "base";
  }
}

bool cpu_has_bfloat16() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace prefixkv
