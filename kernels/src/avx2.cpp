// AVX2 and FMA: products of bytes, of which one has no sign, are added up in pairs in 16 bits.
#if defined(__x86_64__) || defined(_M_X64)
#include "x86.hpp"

namespace eagle {
namespace {
#include "forms.inl"

constexpr bool SIGNED = true;  // levels of eight bits
constexpr bool PUTS_APART = true;
#include "x86.inl"

// Compilers that reorder the integer additions keep every product in a register of its own, and run out of them.
#define IN_ORDER(v) asm volatile("" : "+x"(v))

// Levels of eight bits, minus 128: two products of 128 * 127 fit 16 bits, and no more.
INLINE __m256i dots_of_eight(__m256i sums, __m256i levels, __m256i four) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(levels), _mm256_sign_epi8(four, levels));
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  IN_ORDER(sums);
  return sums;
}
INLINE Ints dots(Ints sums, Ints levels, Ints four) {
  return {dots_of_eight(sums.a, levels.a, four.a), dots_of_eight(sums.b, levels.b, four.b)};
}
#include "dots.inl"

// Levels of four bits, as they are: products of 4 * GROUPS inputs are added up in 16 bits, which 8 * 2 * 15 * 127 fits.
template <int R, bool APART>
struct Block<R, 4, APART> {
  INLINE static Ints levels(const uint8_t* p) {
    if (APART) return four_levels<8>(p);
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), low = _mm256_set1_epi8(15);
    return {_mm256_and_si256(v, low), _mm256_and_si256(_mm256_srli_epi16(v, 4), low)};
  }
  template <int GROUPS, class Before, class After>
  INLINE static void add_groups(Cursor& at, int64_t step, Before before, After after) {
    constexpr int READ = APART ? 64 : 32;           // bytes of the levels of four inputs
    const __m256i sixteen = _mm256_set1_epi16(16);  // what levels are times, as their zero levels are
    Ints a[R];
    UNROLLED for (int j = 0; j < GROUPS; j++) {
      const Ints w = levels(at.levels + READ * j);
      if (j % 2 == 0) __builtin_prefetch(at.ahead + 32 * j);
      UNROLLED for (int r = 0; r < R; r++) {
        const __m256i x = each(at.x + (j * R + r) * 4).a;
        const __m256i p = _mm256_maddubs_epi16(w.a, x), q = _mm256_maddubs_epi16(w.b, x);
        a[r].a = j ? _mm256_add_epi16(a[r].a, p) : p;
        a[r].b = j ? _mm256_add_epi16(a[r].b, q) : q;
        IN_ORDER(a[r].a);
        IN_ORDER(a[r].b);
      }
    }
    at.levels += READ * GROUPS, at.ahead += GROUPS / 4 * step, at.x += 4 * GROUPS * R;
    UNROLLED for (int r = 0; r < R; r++) {
      const Ints sum = before(r);
      after(r, Ints{_mm256_add_epi32(sum.a, _mm256_madd_epi16(a[r].a, sixteen)),
                    _mm256_add_epi32(sum.b, _mm256_madd_epi16(a[r].b, sixteen))});
    }
  }
  template <class Fold>
  INLINE static void add(int64_t inputs, int64_t step, Cursor& at, Fold fold) {
    auto none = [](int) { return Ints{}; };
    if (inputs == 16) return add_groups<4>(at, step, none, fold);
    if (inputs == 32) return add_groups<8>(at, step, none, fold);
    Ints sums[R];
    UNROLLED for (int r = 0; r < R; r++) sums[r] = Ints{};
    auto before = [&](int r) { return sums[r]; };
    auto after = [&](int r, Ints sum) { sums[r] = sum; };
    for (int64_t k = 0; k < inputs; k += 32) add_groups<8>(at, step, before, after);
    UNROLLED for (int r = 0; r < R; r++) fold(r, sums[r]);
  }
};

#include "tile.inl"
}  // namespace

const Kernels avx2_kernels = {"avx2", true, PUTS_APART, TILE_ROWS, FORMS};
}  // namespace eagle
#endif
