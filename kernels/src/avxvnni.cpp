// AVX2 with VNNI in 256 bits: Intel's desktop and laptop processors since 2021.
#if defined(__x86_64__) || defined(_M_X64)
#include "x86.hpp"

namespace eagle {
namespace {
#include "forms.inl"

constexpr bool SIGNED = false;  // levels of eight bits
constexpr bool PUTS_APART = false;
#include "x86.inl"

INLINE Ints dots(Ints sums, Ints levels, Ints four) {
  return {_mm256_dpbusd_avx_epi32(sums.a, levels.a, four.a), _mm256_dpbusd_avx_epi32(sums.b, levels.b, four.b)};
}
#include "dots.inl"
#include "tile.inl"
}  // namespace

const Kernels vnni_kernels = {"vnni", false, PUTS_APART, TILE_ROWS, FORMS};
}  // namespace eagle
#endif
