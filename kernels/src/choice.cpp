// Which instruction set is used.
#include <string.h>

#include "kernels.hpp"

namespace eagle {
namespace {
using Provider = const Kernels* (*)();
// From the best.
constexpr Provider PROVIDERS[] = {
#if defined(__x86_64__) || defined(_M_X64)
    avx512_kernels,
    vnni_kernels,
    avx2_kernels,
#elif defined(__aarch64__)
    neon_kernels,
#endif
    plain_kernels,
};

const Kernels* current = nullptr;
}  // namespace

const Kernels& chosen() {
  if (current == nullptr) choose(nullptr);
  return *current;
}

int choose(const char* name) {
  for (Provider provider : PROVIDERS) {
    const Kernels* kernels = provider();
    if (kernels == nullptr || (name != nullptr && strcmp(kernels->name, name) != 0)) continue;
    current = kernels;
    return 1;
  }
  return 0;
}
}  // namespace eagle
