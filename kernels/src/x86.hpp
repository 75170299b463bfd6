// What the forms for x86-64 share: which of them a processor runs, asked of the processor itself. The compilers' own
// question is always answered with no in libraries for Windows.
#pragma once
#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#include "kernels.hpp"

#define LANES_AVX2
#define TARGET  // files have it

namespace eagle {
struct Features {
  unsigned ecx1 = 0, ebx7 = 0, ecx7 = 0, eax71 = 0, saved = 0;  // of leaves 1, 7.0 and 7.1; registers kept for a thread
};

inline Features features() {
  Features f;
  unsigned a, b, c, d, upper;
  if (!__get_cpuid(1, &a, &b, &f.ecx1, &d) || !(f.ecx1 & bit_OSXSAVE)) return Features{};
  asm("xgetbv" : "=a"(f.saved), "=d"(upper) : "c"(0));
  if (__get_cpuid_count(7, 0, &a, &f.ebx7, &f.ecx7, &d) && a >= 1) __get_cpuid_count(7, 1, &f.eax71, &b, &c, &d);
  return f;
}
inline bool has(unsigned word, unsigned bits) { return (word & bits) == bits; }
inline bool has_avx2(const Features& f) {
  return has(f.ecx1, bit_FMA | bit_AVX | bit_F16C) && has(f.saved, 6) && has(f.ebx7, bit_AVX2);
}
inline bool has_avx_vnni(const Features& f) { return has_avx2(f) && has(f.eax71, 1u << 4); }
inline bool has_avx512_vnni(const Features& f) {
  return has_avx2(f) && has(f.saved, 0xe6) && has(f.ebx7, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL) &&
         has(f.ecx7, bit_AVX512VNNI);
}
}  // namespace eagle
