// Aligned memory and objects without exceptions. No part of C++'s library is used, so that compilers for other systems
// need none of it.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

inline void* operator new(size_t, void* place) noexcept { return place; }

namespace eagle {

constexpr size_t ALIGNMENT = 64;
constexpr size_t rounded(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

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
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_ = nullptr;
};

// With AddressSanitizer every piece of memory is an allocation of its own: it sees no access beyond one inside of another.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool APART = true;
#else
constexpr bool APART = false;
#endif

// Many pieces of memory that are released together. `kept`, if given, lends a first chunk and gets the largest one back:
// memory that is taken from the system anew has to be cleared by it.
class Memory {
 public:
  explicit Memory(void** kept = nullptr) : kept_(kept) {
    if (kept != nullptr) newest_ = static_cast<Chunk*>(__atomic_exchange_n(kept, nullptr, __ATOMIC_ACQUIRE));
    if (newest_ != nullptr) newest_->before = nullptr;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    Chunk* largest = nullptr;
    while (newest_ != nullptr) {
      Chunk* before = newest_->before;
      const bool better = kept_ != nullptr && newest_->size <= MOST_KEPT && (!largest || newest_->size > largest->size);
      release(better ? largest : newest_);
      if (better) largest = newest_;
      newest_ = before;
    }
    if (largest != nullptr) release(__atomic_exchange_n(kept_, largest, __ATOMIC_ACQ_REL));
  }
  uint8_t* get(size_t bytes) {  // aligned; null: out of memory
    if (bytes > SIZE_MAX / 4) return nullptr;
    if (!APART) bytes = rounded(bytes);
    if (APART || newest_ == nullptr || newest_->size - used_ < bytes) {
      const size_t least = APART                           ? 0
                           : newest_ == nullptr            ? LEAST
                           : 2 * newest_->size < MOST_KEPT ? 2 * newest_->size
                                                           : MOST_KEPT;
      const size_t size = bytes + ALIGNMENT > least ? bytes + ALIGNMENT : least;
      Chunk* chunk = reinterpret_cast<Chunk*>(allocate(size));
      if (chunk == nullptr) return nullptr;
      *chunk = {newest_, size};
      newest_ = chunk;
      used_ = ALIGNMENT;
    }
    uint8_t* p = reinterpret_cast<uint8_t*>(newest_) + used_;
    used_ += bytes;
    return p;
  }
  template <class T>
  T* get_zeros(size_t count) {
    void* p = get(count * sizeof(T));
    return p == nullptr ? nullptr : static_cast<T*>(memset(p, 0, count * sizeof(T)));
  }

 private:
  static constexpr size_t LEAST = size_t(1) << 14, MOST_KEPT = size_t(1) << 20;
  struct Chunk {
    Chunk* before;
    size_t size;
  };
  void** kept_;
  Chunk* newest_ = nullptr;
  size_t used_ = ALIGNMENT;
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
