// Which instruction set is used. This file is compiled for every processor: the question is not asked by code that is
// compiled for the answer.
#include <string.h>

#include "kernels.hpp"
#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#endif

namespace eagle {
namespace {
#if defined(__x86_64__) || defined(_M_X64)
// The compilers' own question is always answered with no in libraries for Windows.
struct Features {
  unsigned ecx1 = 0, ebx7 = 0, ecx7 = 0, eax71 = 0, saved = 0;  // of leaves 1, 7.0 and 7.1; registers kept for a thread
};

Features features() {
  Features f;
  unsigned a, b, c, d, upper;
  if (!__get_cpuid(1, &a, &b, &f.ecx1, &d) || !(f.ecx1 & bit_OSXSAVE)) return Features{};
  asm("xgetbv" : "=a"(f.saved), "=d"(upper) : "c"(0));
  if (__get_cpuid_count(7, 0, &a, &f.ebx7, &f.ecx7, &d) && a >= 1) __get_cpuid_count(7, 1, &f.eax71, &b, &c, &d);
  return f;
}
bool has(unsigned word, unsigned bits) { return (word & bits) == bits; }
bool has_avx2() {
  const Features f = features();
  return has(f.ecx1, bit_FMA | bit_AVX | bit_F16C) && has(f.saved, 6) && has(f.ebx7, bit_AVX2);
}
bool has_avx_vnni() { return has_avx2() && has(features().eax71, 1u << 4); }
bool has_avx512_vnni() {
  const Features f = features();
  return has_avx2() && has(f.saved, 0xe6) && has(f.ebx7, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL) &&
         has(f.ecx7, bit_AVX512VNNI);
}
#elif defined(__aarch64__)
bool has_dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#elif defined(_WIN32)
  return IsProcessorFeaturePresent(43);  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
#else
  return true;  // all of Apple's
#endif
}
#endif
bool always() { return true; }

struct Form {
  const Kernels& kernels;
  bool (*runs)();
};
// From the best.
constexpr Form FORMS[] = {
#if defined(__x86_64__) || defined(_M_X64)
    {avx512_kernels, has_avx512_vnni},
    {vnni_kernels, has_avx_vnni},
    {avx2_kernels, has_avx2},
#elif defined(__aarch64__)
    {neon_kernels, has_dotprod},
#endif
    {plain_kernels, always},
};

const Kernels* current = nullptr;
}  // namespace

const Kernels& chosen() {
  if (current == nullptr) choose(nullptr);
  return *current;
}

int choose(const char* name) {
  for (const Form& form : FORMS) {
    if (!form.runs() || (name != nullptr && strcmp(form.kernels.name, name) != 0)) continue;
    current = &form.kernels;
    return 1;
  }
  return 0;
}
}  // namespace eagle
