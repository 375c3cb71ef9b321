#include "bind.h"

namespace prefixkv {

void bind_linear(nanobind::module_&) {}

}  // namespace prefixkv
