// AVX-512 with VNNI: Intel's servers and laptops since 2019, AMD's processors since Zen 4.
#if defined(__x86_64__) || defined(_M_X64)
#include "x86.hpp"

namespace eagle {
namespace {
#include "forms.inl"

constexpr bool SIGNED = false;  // levels of eight bits
constexpr bool PUTS_APART = false;
#include "x86.inl"
#include "dots.inl"
#include "tile.inl"
}  // namespace

const Kernels avx512_kernels = {"avx512", false, PUTS_APART, TILE_ROWS, FORMS};
}  // namespace eagle
#endif
