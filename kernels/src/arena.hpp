// Memory for weights, which are read once per pass and never from a cache: in large pages where the system has them, so
// that the processor looks up few addresses and prefetches beyond 4 kB.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace eagle {

uint8_t* allocate_weights(size_t bytes);  // aligned to a cache line; null: out of memory
void release_weights(void* p);            // of allocate_weights, or null

}  // namespace eagle
