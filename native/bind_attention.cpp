#include "bind.h"

namespace prefixkv {

void bind_attention(nanobind::module_&) {}

}  // namespace prefixkv
