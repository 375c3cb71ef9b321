// SHA-256 (FIPS 180-4), with the x86 SHA instructions where the CPU has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace prefixkv {

using Sha256Digest = std::array<uint8_t, 32>;

Sha256Digest sha256(const uint8_t* data, size_t size);

// The same of data behind which so many bytes may be written over.
constexpr size_t kSha256Padding = 72;
Sha256Digest sha256_in_place(uint8_t* data, size_t size);

}  // namespace prefixkv
