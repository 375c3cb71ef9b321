// One source, several vector widths. A kernel file (*_kernels.cpp) is compiled once for each
// instruction set, with PREFIXKV_ISA (the namespace, e.g. avx512) and PREFIXKV_WIDTH (floats in a
// vector) defined on the command line; its dispatcher picks one at load by what the CPU has.
//
// Keep templates of the standard library out of kernel files: the linker keeps one copy of an inline
// function, and if that is the AVX-512 one the program dies on a CPU without it.
//
// Contraction to FMA is on (-ffp-contract=fast) and reassociation is off: `acc += a * b` is one
// rounding, in the order written, in every function of one instruction set.
#pragma once

#include <cstdint>

namespace prefixkv::PREFIXKV_ISA {

inline constexpr int kWidth = PREFIXKV_WIDTH;

typedef float vfloat __attribute__((vector_size(PREFIXKV_WIDTH * 4)));
typedef int32_t vint __attribute__((vector_size(PREFIXKV_WIDTH * 4)));
typedef uint32_t vuint __attribute__((vector_size(PREFIXKV_WIDTH * 4)));
typedef uint16_t vhalf __attribute__((vector_size(PREFIXKV_WIDTH * 2)));

typedef float vfloat_u __attribute__((vector_size(PREFIXKV_WIDTH * 4), aligned(4), may_alias));
typedef uint16_t vhalf_u __attribute__((vector_size(PREFIXKV_WIDTH * 2), aligned(2), may_alias));

static inline vfloat splat(float x) { return x - vfloat{}; }

static inline vfloat load(const float* p) { return *reinterpret_cast<const vfloat_u*>(p); }

static inline void store(float* p, vfloat x) { *reinterpret_cast<vfloat_u*>(p) = x; }

// bfloat16 is the upper half of a float32.
static inline float to_float(uint16_t x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16);
}

static inline vfloat load(const uint16_t* p) {
  const vhalf half = *reinterpret_cast<const vhalf_u*>(p);
  return __builtin_bit_cast(vfloat, __builtin_convertvector(half, vuint) << 16);
}

// Round to nearest even; a NaN stays a NaN.
static inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline void store(uint16_t* p, vfloat x) {
  const vuint bits = __builtin_bit_cast(vuint, x);
  const vuint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vuint quiet = (bits >> 16) | 0x40u;
  const vint nan = (bits & 0x7fffffffu) > vuint{} + 0x7f800000u;
  *reinterpret_cast<vhalf_u*>(p) =
      __builtin_convertvector(nan ? quiet : rounded, vhalf);
}

}  // namespace prefixkv::PREFIXKV_ISA
