// What the CPU has, for picking a kernel at load.
#pragma once

namespace prefixkv {

enum class Isa { kBase, kAvx2, kAvx512 };

// The widest of the compiled instruction sets that this CPU runs. PREFIXKV_ISA=base|avx2|avx512 in
// the environment lowers it, never raises it.
Isa best_isa();

const char* isa_name(Isa isa);

// AVX512-BF16 or AMX-BF16: products of bfloat16 in hardware.
bool cpu_has_bfloat16();

}  // namespace prefixkv
