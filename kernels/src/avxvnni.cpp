// AVX2 with VNNI in 256 bits: Intel's desktop and laptop processors since 2021.
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include <string.h>

#include "kernels.hpp"
#include "x86.hpp"

#define LANES_AVX2

namespace eagle {
namespace {
#include "lanes.hpp"
#include "rows.inl"
#include "attention.inl"
#include "vnni.inl"
}  // namespace

const Kernels* vnni_kernels() {
  static const Kernels kernels = {"vnni",  4,       false,   false, 6,    before,    quantise,
                                  product, prepare, scratch, part,  join, whole_rows};
  return has_avx_vnni(features()) ? &kernels : nullptr;
}
}  // namespace eagle
#endif
