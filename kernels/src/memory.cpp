#include "memory.hpp"

#include <stdlib.h>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
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

void let_go(const void* data, size_t bytes) {
#if defined(__linux__)
  // Of each page, in /proc/self/pagemap: whether it is present, swapped out, and a file's (Linux' admin-guide/mm/pagemap).
  constexpr uint64_t PRESENT = uint64_t(1) << 63, SWAPPED = uint64_t(1) << 62, FILE = uint64_t(1) << 61;
  constexpr size_t MOST = 512;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<uintptr_t>(data);
  const size_t last = (begin + bytes) / page;
  const int pages = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pages < 0) return;
  for (size_t first = (begin + page - 1) / page; first < last; first += MOST) {
    uint64_t states[MOST];
    const size_t count = last - first < MOST ? last - first : MOST;
    if (pread(pages, states, count * 8, static_cast<off_t>(first * 8)) != static_cast<ssize_t>(count * 8)) break;
    bool own = false;
    for (size_t i = 0; i < count; i++) own |= (states[i] & SWAPPED) || (states[i] & (PRESENT | FILE)) == PRESENT;
    if (!own) madvise(reinterpret_cast<void*>(first * page), count * page, MADV_DONTNEED);
  }
  close(pages);
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}

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
