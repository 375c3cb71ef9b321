#include "hash_manager.h"
#include "paged_manager.h"
#include "radix_manager.h"

namespace prefixkv {

std::unique_ptr<BlockManager> make_manager(System system, int64_t num_blocks, int64_t num_groups,
                                           std::shared_ptr<const Hasher> hasher, bool events) {
  switch (system) {
    case System::kHash:
      return std::make_unique<HashManager>(num_blocks, num_groups, std::move(hasher), events);
    case System::kRadix:
      return std::make_unique<RadixManager>(num_blocks, num_groups, std::move(hasher), events);
    case System::kPaged:
    case System::kOff: break;
  }
  return std::make_unique<PagedManager>(num_blocks, num_groups, std::move(hasher), events,
                                        system == System::kPaged);
}

}  // namespace prefixkv
