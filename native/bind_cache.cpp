#include "bind.h"

namespace prefixkv {

void bind_cache(nanobind::module_&) {}

}  // namespace prefixkv
