#pragma once

#include <nanobind/nanobind.h>

namespace prefixkv {

void bind_cache(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_attention(nanobind::module_& m);

}  // namespace prefixkv
