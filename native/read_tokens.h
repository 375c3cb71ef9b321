// Token ids out of whatever Python holds them in.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "hash.h"

namespace prefixkv {

// Appends the token ids of a list, tuple, array, bytes (a token a byte), or an integer NumPy array or
// torch tensor of one dimension. Throws CacheError naming the first that is not a whole number from
// 0 to 2^31 - 1, and `out` is as before then. `noun` is what an error calls one of them.
void read_tokens(nanobind::handle source, std::vector<Token>& out, const char* noun = "token id");

}  // namespace prefixkv
