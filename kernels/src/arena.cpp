#include "arena.hpp"

#include "memory.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace eagle {
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)  // see APART
namespace {
constexpr size_t PAGE = size_t(2) << 20;     // a large page
constexpr size_t REGION = size_t(64) << 20;  // of addresses; pages are provided as they are written

// Allocations lie one after the other in regions, each of which is returned to the system with its last allocation.
struct Region {
  Region* next;
  void* mapped;
  size_t size;  // of what is mapped
  uint8_t *free, *end;
  size_t held;  // allocations that were not released
};

Region* regions = nullptr;  // the newest first
bool busy = false;

struct Lock {
  Lock() {
    while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) {}
  }
  ~Lock() { __atomic_clear(&busy, __ATOMIC_RELEASE); }
};

Region* map_region(size_t bytes) {
  const size_t size = (bytes > REGION ? (bytes + PAGE - 1) / PAGE * PAGE : REGION) + PAGE;
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  Region* region = make<Region>();
  if (region == nullptr) {
    munmap(mapped, size);
    return nullptr;
  }
  const uintptr_t first = (reinterpret_cast<uintptr_t>(mapped) + PAGE - 1) / PAGE * PAGE;
  uint8_t* end = static_cast<uint8_t*>(mapped) + size;
  *region = {regions, mapped, size, reinterpret_cast<uint8_t*>(first), end, 0};
  madvise(region->free, static_cast<size_t>(end - region->free), MADV_HUGEPAGE);  // small ones do as well
  return regions = region;
}
}  // namespace

uint8_t* allocate_weights(size_t bytes) {
  bytes = rounded(bytes);
  const Lock lock;
  Region* region = regions;
  if (region == nullptr || static_cast<size_t>(region->end - region->free) < bytes) region = map_region(bytes);
  if (region == nullptr) return nullptr;
  uint8_t* p = region->free;
  region->free += bytes;
  region->held++;
  return p;
}

void release_weights(void* p) {
  if (p == nullptr) return;
  const Lock lock;
  for (Region** at = &regions; *at != nullptr; at = &(*at)->next) {
    Region* region = *at;
    const uint8_t* start = static_cast<uint8_t*>(region->mapped);
    if (p < start || p >= start + region->size) continue;
    if (--region->held == 0) {
      *at = region->next;
      munmap(region->mapped, region->size);
      unmake(region);
    }
    return;
  }
}
#else
uint8_t* allocate_weights(size_t bytes) { return allocate(bytes); }
void release_weights(void* p) { release(p); }
#endif
}  // namespace eagle
