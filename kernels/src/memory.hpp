// Aligned memory and objects without exceptions. No part of C++'s library is used, so that compilers for other systems
// need none of it.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

inline void* operator new(size_t, void* place) noexcept { return place; }

namespace eagle {

constexpr size_t ALIGNMENT = 64;

inline uint8_t* allocate(size_t bytes) {
#if defined(_WIN32)
  return static_cast<uint8_t*>(_aligned_malloc(bytes, ALIGNMENT));
#else
  void* p = nullptr;
  return posix_memalign(&p, ALIGNMENT, bytes) == 0 ? static_cast<uint8_t*>(p) : nullptr;
#endif
}

inline void release(void* p) {
#if defined(_WIN32)
  _aligned_free(p);
#else
  free(p);
#endif
}

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(data_); }
  uint8_t* get(size_t bytes) {  // null: out of memory
    release(data_);
    return data_ = allocate(bytes);
  }

 private:
  uint8_t* data_ = nullptr;
};

template <class T>
T* make() {
  void* p = malloc(sizeof(T));
  return p == nullptr ? nullptr : new (p) T();
}
template <class T>
void unmake(T* p) {
  if (p == nullptr) return;
  p->~T();
  free(p);
}

}  // namespace eagle
