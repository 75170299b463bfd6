#include "memory.hpp"

#include <stdlib.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace eagle {
namespace {
// With AddressSanitizer every piece of memory is an allocation of its own: it sees no access beyond one inside of another.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool APART = true;
#else
constexpr bool APART = false;
#endif
constexpr size_t LEAST = size_t(1) << 14, MOST_KEPT = size_t(1) << 20;  // bytes of a chunk
constexpr size_t SMALL_PAGE = 4096;          // with weights that begin at one a pass over one row took 2 % less time
constexpr size_t PAGE = size_t(2) << 20;     // a large page
constexpr size_t REGION = size_t(64) << 20;  // of addresses; pages are provided as they are written

#if defined(__linux__)
constexpr bool LARGE_PAGES = !APART;

uint8_t* map_pages(size_t size) {  // a multiple of PAGE
  void* mapped = mmap(nullptr, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const size_t before = (PAGE - reinterpret_cast<uintptr_t>(mapped) % PAGE) % PAGE;
  uint8_t* first = static_cast<uint8_t*>(mapped) + before;
  if (before > 0) munmap(mapped, before);
  munmap(first + size, PAGE - before);
  madvise(first, size, MADV_HUGEPAGE);  // small ones do as well
  return first;
}
void unmap_pages(void* p, size_t size) { munmap(p, size); }
#else
constexpr bool LARGE_PAGES = false;
uint8_t* map_pages(size_t) { return nullptr; }
void unmap_pages(void*, size_t) {}
#endif

uint8_t* allocate(size_t bytes) {
#if defined(_WIN32)
  return static_cast<uint8_t*>(_aligned_malloc(bytes, ALIGNMENT));
#else
  void* p = nullptr;
  return posix_memalign(&p, ALIGNMENT, bytes) == 0 ? static_cast<uint8_t*>(p) : nullptr;
#endif
}

void release(void* p) {
#if defined(_WIN32)
  _aligned_free(p);
#else
  free(p);
#endif
}

// A chunk that the last pass had: memory that is taken from the system anew has to be cleared by it.
void* kept = nullptr;
}  // namespace

Memory::Memory(Use use) : use_(use) {
  if (use != Use::PASS || APART) return;
  newest_ = static_cast<Chunk*>(__atomic_exchange_n(&kept, nullptr, __ATOMIC_ACQUIRE));
  if (newest_ == nullptr) return;
  newest_->before = nullptr;
  used_ = ALIGNMENT;
}

Memory::~Memory() {
  if (use_ == Use::PASS && !APART && newest_ != nullptr && newest_->size <= MOST_KEPT) {
    Chunk* before = newest_->before;
    release(__atomic_exchange_n(&kept, newest_, __ATOMIC_ACQ_REL));
    newest_ = before;
  }
  while (newest_ != nullptr) {
    Chunk* chunk = newest_;
    newest_ = chunk->before;
    if (use_ == Use::WEIGHTS && LARGE_PAGES) unmap_pages(chunk, chunk->size);
    else release(chunk);
  }
}

uint8_t* Memory::get(size_t bytes) {
  if (bytes > SIZE_MAX / 4) return nullptr;
  if (!APART) bytes = rounded(bytes);
  if (APART || newest_ == nullptr || newest_->size - used_ < bytes) {
    const bool mapped = use_ == Use::WEIGHTS && LARGE_PAGES;
    const size_t start = mapped ? SMALL_PAGE : ALIGNMENT, exact = start + bytes;
    const size_t twice = newest_ == nullptr ? LEAST : 2 * newest_->size, usual = twice < MOST_KEPT ? twice : MOST_KEPT;
    size_t size = APART || use_ == Use::WEIGHTS || exact > usual ? exact : usual;
    if (mapped) size = exact > REGION ? (exact + PAGE - 1) / PAGE * PAGE : REGION;
    Chunk* chunk = reinterpret_cast<Chunk*>(mapped ? map_pages(size) : allocate(size));
    if (chunk == nullptr) return nullptr;
    *chunk = {newest_, size};
    newest_ = chunk;
    used_ = start;
  }
  uint8_t* p = reinterpret_cast<uint8_t*>(newest_) + used_;
  used_ += bytes;
  return p;
}
}  // namespace eagle
