// AVX2 and FMA: products of bytes are added up in pairs in 16 bits, which four-bit levels cannot exceed. Eight-bit ones
// are multiplied as 16-bit numbers.
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include <string.h>

#include "kernels.hpp"
#include "x86.hpp"

#define LANES_AVX2
// Compilers that reorder the integer additions keep every product in a register of its own, and run out of them.
#define IN_ORDER(v) asm volatile("" : "+x"(v))

namespace eagle {
namespace {
#include "lanes.hpp"
#include "rows.inl"
#include "attention.inl"

INLINE __m256i four_bytes(const void* p) {
  int value;
  memcpy(&value, p, 4);
  return _mm256_set1_epi32(value);
}

// The sums of one block join the fold: f = fma(sum - zero * rows' sum, step * scale, f). Both factors of a zero level fit
// 16 bits, and so does their product's other half, which is 0.
template <int R, bool SIGNED>
INLINE void join_block(const uint8_t* meta, const __m256i* i0, const __m256i* i1, const float* scales,
                       const int32_t* sums, int64_t blocks, __m256* f0, __m256* f1) {
  const __m256 s0 = load(reinterpret_cast<const uint16_t*>(meta)),
               s1 = load(reinterpret_cast<const uint16_t*>(meta + 16));
  const __m128i zeros = _mm_loadu_si128(reinterpret_cast<const __m128i*>(meta + 32));
  const __m128i upper = _mm_srli_si128(zeros, 8);
  const __m256i word = _mm256_set1_epi32(0xffff);
  const __m256i z0 = SIGNED ? _mm256_and_si256(_mm256_cvtepi8_epi32(zeros), word) : _mm256_cvtepu8_epi32(zeros);
  const __m256i z1 = SIGNED ? _mm256_and_si256(_mm256_cvtepi8_epi32(upper), word) : _mm256_cvtepu8_epi32(upper);
  UNROLLED for (int r = 0; r < R; r++) {
    const __m256i sum = _mm256_set1_epi32(sums[r * blocks]);
    const __m256 scale = _mm256_broadcast_ss(scales + r * blocks);
    const __m256i d0 = _mm256_sub_epi32(i0[r], _mm256_madd_epi16(z0, sum));
    const __m256i d1 = _mm256_sub_epi32(i1[r], _mm256_madd_epi16(z1, sum));
    f0[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(d0), _mm256_mul_ps(s0, scale), f0[r]);
    f1[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(d1), _mm256_mul_ps(s1, scale), f1[r]);
  }
}

struct Tile {  // what a tile of one panel reads and writes; pointers are at its first block
  const uint8_t *levels, *meta;
  Ahead ahead;
  const void* x;
  const float* scales;
  const int32_t* sums;
  float* y;
  int64_t stride, block, count, blocks;
  bool more;
};

template <int R>
INLINE void begin(const Tile& t, __m256* f0, __m256* f1) {
  UNROLLED for (int r = 0; r < R; r++) {
    f0[r] = t.more ? _mm256_loadu_ps(t.y + r * t.stride) : _mm256_setzero_ps();
    f1[r] = t.more ? _mm256_loadu_ps(t.y + r * t.stride + 8) : _mm256_setzero_ps();
  }
}
template <int R>
INLINE void end(const Tile& t, const __m256* f0, const __m256* f1) {
  UNROLLED for (int r = 0; r < R; r++) {
    _mm256_storeu_ps(t.y + r * t.stride, f0[r]);
    _mm256_storeu_ps(t.y + r * t.stride + 8, f1[r]);
  }
}

// STEPS groups of four inputs are added up in 16 bits: 8 * 2 * 15 * 127 fits. ONCE: that is a whole block.
template <int R, int STEPS, bool ONCE>
__attribute__((noinline)) void tile4(Tile t) {
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const uint8_t *w = t.levels, *ahead = t.ahead.at;
  const int64_t step = 32 * STEPS / t.ahead.tiles;
  const int8_t* x = static_cast<const int8_t*>(t.x);
  __m256 f0[R], f1[R];
  begin<R>(t, f0, f1);
  for (int64_t b = 0; b < t.count; b++) {
    __m256i i0[R], i1[R];
    if (!ONCE)
      for (int r = 0; r < R; r++) i0[r] = i1[r] = _mm256_setzero_si256();
    int64_t k = 0;
    do {
      __m256i a0[R], a1[R];
      UNROLLED for (int j = 0; j < STEPS; j++) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
        if (j % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(ahead + 32 * j), _MM_HINT_T0);
        w += 32;
        const __m256i w0 = _mm256_and_si256(v, low), w1 = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
        UNROLLED for (int r = 0; r < R; r++) {
          const __m256i value = four_bytes(x + (j * R + r) * 4);
          const __m256i p0 = _mm256_maddubs_epi16(w0, value), p1 = _mm256_maddubs_epi16(w1, value);
          a0[r] = j ? _mm256_add_epi16(a0[r], p0) : p0;
          a1[r] = j ? _mm256_add_epi16(a1[r], p1) : p1;
          IN_ORDER(a0[r]);
          IN_ORDER(a1[r]);
        }
      }
      x += 4 * STEPS * R;
      ahead += step;
      UNROLLED for (int r = 0; r < R; r++) {
        const __m256i s0 = _mm256_madd_epi16(a0[r], ones), s1 = _mm256_madd_epi16(a1[r], ones);
        i0[r] = ONCE ? s0 : _mm256_add_epi32(i0[r], s0);
        i1[r] = ONCE ? s1 : _mm256_add_epi32(i1[r], s1);
      }
    } while (!ONCE && (k += 4 * STEPS) < t.block);
    join_block<R, false>(t.meta, i0, i1, t.scales + b, t.sums + b, t.blocks, f0, f1);
    t.meta += META;
  }
  end<R>(t, f0, f1);
}

template <int R>
__attribute__((noinline)) void tile8(Tile t) {
  const uint8_t *w = t.levels, *ahead = t.ahead.at;
  const int64_t step = 256 / t.ahead.tiles;
  const int16_t* x = static_cast<const int16_t*>(t.x);
  __m256 f0[R], f1[R];
  begin<R>(t, f0, f1);
  for (int64_t b = 0; b < t.count; b++) {
    __m256i a0[R], a1[R];
    for (int r = 0; r < R; r++) a0[r] = a1[r] = _mm256_setzero_si256();
    _Pragma("GCC unroll 1") for (int64_t k = 0; k < t.block; k += 16) {
      UNROLLED for (int j = 0; j < 8; j++) {
        const __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
        const __m256i w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + 16)));
        if (j % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(ahead + 32 * j), _MM_HINT_T0);
        w += 32;
        UNROLLED for (int r = 0; r < R; r++) {
          const __m256i value = four_bytes(x + (j * R + r) * 2);
          a0[r] = _mm256_add_epi32(a0[r], _mm256_madd_epi16(w0, value));
          a1[r] = _mm256_add_epi32(a1[r], _mm256_madd_epi16(w1, value));
          IN_ORDER(a0[r]);
          IN_ORDER(a1[r]);
        }
      }
      x += 16 * R;
      ahead += step;
    }
    join_block<R, true>(t.meta, a0, a1, t.scales + b, t.sums + b, t.blocks, f0, f1);
    t.meta += META;
  }
  end<R>(t, f0, f1);
}

template <int R>
void any_tile(const Tile& t, int bits) {
  if (bits == 8) tile8<R>(t);
  else if (t.block == 32) tile4<R, 8, true>(t);
  else if (t.block < 32) tile4<R, 4, true>(t);
  else tile4<R, 8, false>(t);
}

void product(const Weight& w, int64_t panel, int64_t first, int64_t count, int rows, Rows x, float* y, int64_t stride,
             Ahead ahead) {
  const Tile t = {w.levels + panel * w.panel_bytes() + first * w.block * PANEL * w.bits / 8,
                  w.meta + (panel * w.blocks + first) * META,
                  ahead,
                  x.values,
                  x.scales + first,
                  x.sums + first,
                  y,
                  stride,
                  w.block,
                  count,
                  w.blocks,
                  first > 0};
  switch (rows) {
    case 1:
      return any_tile<1>(t, w.bits);
    case 2:
      return any_tile<2>(t, w.bits);
    case 3:
      return any_tile<3>(t, w.bits);
    case 4:
      return any_tile<4>(t, w.bits);
    case 5:
      return any_tile<5>(t, w.bits);
    default:
      return any_tile<6>(t, w.bits);
  }
}
}  // namespace

const Kernels* avx2_kernels() {
  static const Kernels kernels = {"avx2",  2,       true,    true, 6,    before,    quantise,
                                  product, prepare, scratch, part, join, whole_rows};
  return has_avx2(features()) ? &kernels : nullptr;
}
}  // namespace eagle
#endif
