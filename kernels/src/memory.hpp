// Memory without exceptions. No part of C++'s library is used, so that compilers for other systems need none of it.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

inline void* operator new(size_t, void* place) noexcept { return place; }

namespace eagle {

constexpr size_t ALIGNMENT = 64;
constexpr size_t rounded(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// What pieces of memory are for: one pass; as long as the node lasts; or, for as long, weights, which are read once per
// pass and never from a cache: in large pages where the system has them, so that the processor looks up few addresses and
// prefetches beyond 4 kB.
enum class Use { PASS, NODE, WEIGHTS };

// Takes the pages of a mapped file that lie within these bytes from the memory of the process, on Linux: what was packed is
// not read there again, and would take as much memory as the packed copy. One that is read again comes from the file. Pages
// that hold anything but the file's content stay.
void let_go(const void* data, size_t bytes);

// Many pieces of memory that are released together.
class Memory {
 public:
  explicit Memory(Use use);
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();
  uint8_t* get(size_t bytes);  // aligned; null: out of memory
  template <class T>
  T* get_zeros(size_t count) {
    void* p = get(count * sizeof(T));
    return p == nullptr ? nullptr : static_cast<T*>(memset(p, 0, count * sizeof(T)));
  }
  // Objects whose destructors nobody calls.
  template <class T>
  T* make(size_t count = 1) {
    T* p = reinterpret_cast<T*>(get(count * sizeof(T)));
    for (size_t i = 0; i < count && p != nullptr; i++) new (p + i) T();
    return p;
  }

 private:
  struct Chunk {
    Chunk* before;
    size_t size;
  };
  const Use use_;
  Chunk* newest_ = nullptr;
  size_t used_ = 0;  // of the newest
};

}  // namespace eagle
