// The inner loops of row_ops.h, compiled once for each instruction set. The last elements of a row are
// padded to a vector, so that they get the arithmetic of the others.
#include "row_ops.h"
#include "simd.h"

namespace prefixkv::PREFIXKV_ISA {

extern const RowKernels kRowKernels;

namespace {

inline vfloat load_padded(const float* x, int64_t count) {
  if (count >= kWidth) return load(x);
  float padded[kWidth] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = x[i];
  return load(padded);
}

inline void store_padded(float* out, int64_t count, vfloat x) {
  if (count >= kWidth) return store(out, x);
  float padded[kWidth];
  store(padded, x);
  for (int64_t i = 0; i < count; ++i) out[i] = padded[i];
}

float sum_of_squares(const float* x, int64_t k) {
  constexpr int kSums = 4;  // independent, to hide the latency of the addition
  vfloat sums[kSums] = {};
  for (int64_t i = 0; i < k; i += kSums * kWidth) {
#pragma GCC unroll 4
    for (int s = 0; s < kSums; ++s) {
      const int64_t at = i + s * kWidth;
      if (at >= k) break;
      const vfloat value = load_padded(x + at, k - at);
      sums[s] += value * value;
    }
  }
  const vfloat sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float total = 0;
  for (int lane = 0; lane < kWidth; ++lane) total += sum[lane];
  return total;
}

void rms_norm(const float* x, const float* weight, float eps, float* out, int64_t k) {
  const float mean = sum_of_squares(x, k) / static_cast<float>(k);
  const float scale = 1.0f / __builtin_sqrtf(mean + eps);
  for (int64_t i = 0; i < k; i += kWidth) {
    store_padded(out + i, k - i,
                 load_padded(x + i, k - i) * scale * load_padded(weight + i, k - i));
  }
}

void add(const float* x, float* to, int64_t k) {
  for (int64_t i = 0; i < k; i += kWidth) {
    store_padded(to + i, k - i, load_padded(to + i, k - i) + load_padded(x + i, k - i));
  }
}

void rotate(float* row, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kWidth) {
    const int64_t count = half - i;
    const vfloat a = load_padded(row + i, count), b = load_padded(row + half + i, count);
    const vfloat c = load_padded(cos + i, count), s = load_padded(sin + i, count);
    store_padded(row + i, count, a * c - b * s);
    store_padded(row + half + i, count, b * c + a * s);
  }
}

// Cephes' expf: x = n ln 2 + r, a polynomial for exp(r), and 2^n as two factors, so that the result
// becomes infinite, subnormal and 0 where float32 does. Relative error below 1.2e-7 where it is normal.
inline vfloat exp(vfloat x) {
  constexpr float kLimit = 104.0f;       // exp of it is infinite, of its negative 0
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = x > kLimit ? vfloat{} + kLimit : x;
  x = x < -kLimit ? vfloat{} - kLimit : x;
  const vfloat shifted = x * 1.44269504088896341f + kRound;
  const vfloat n = shifted - kRound;
  const vfloat r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vfloat p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vint exponent = __builtin_bit_cast(vint, shifted) - __builtin_bit_cast(int32_t, kRound);
  const vint half = exponent >> 1;
  const vfloat first = __builtin_bit_cast(vfloat, (half + 127) << 23);
  const vfloat second = __builtin_bit_cast(vfloat, (exponent - half + 127) << 23);
  return p * first * second;
}

void silu_mul(const float* gate, const float* up, float* out, int64_t k) {
  for (int64_t i = 0; i < k; i += kWidth) {
    const vfloat x = load_padded(gate + i, k - i);
    store_padded(out + i, k - i, x / (exp(-x) + 1.0f) * load_padded(up + i, k - i));
  }
}

}  // namespace

const RowKernels kRowKernels = {rms_norm, add, rotate, silu_mul};

}  // namespace prefixkv::PREFIXKV_ISA
