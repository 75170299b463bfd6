// Products by instructions that add four products of bytes to a 32-bit sum (VNNI). Included once per width of registers,
// after lanes.hpp: avx512.cpp, avxvnni.cpp.

#if defined(__AVX512F__)  // sixteen columns are one register
using Ints = __m512i;
using Floats = __m512;
INLINE Ints each(const void* four) {
  int32_t v;
  memcpy(&v, four, 4);
  return _mm512_set1_epi32(v);
}
INLINE Ints dots(Ints sum, Ints levels, Ints values) { return _mm512_dpbusd_epi32(sum, levels, values); }
INLINE Ints pairs(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
INLINE Floats read(const float* p) { return _mm512_loadu_ps(p); }
INLINE void write(float* p, Floats v) { _mm512_storeu_ps(p, v); }
INLINE Floats zeros() { return _mm512_setzero_ps(); }
INLINE Floats steps_of(const uint8_t* meta) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(meta)));
}
INLINE Ints minus_zeros(const uint8_t* meta) {  // in the lower 16 bits of each column; the upper ones are 0
  const __m512i z = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(meta + 32)));
  return _mm512_and_si512(_mm512_sub_epi32(_mm512_setzero_si512(), z), _mm512_set1_epi32(0xffff));
}
INLINE Floats folded(Ints sums, Floats steps, float scale, Floats f) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(steps, _mm512_set1_ps(scale)), f);
}
template <int BITS>
INLINE Ints four_levels(const uint8_t* p) {
  if (BITS == 8) return _mm512_loadu_si512(p);
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(v), _mm256_srli_epi16(v, 4), 1);
  return _mm512_and_si512(both, _mm512_set1_epi8(15));
}
#else  // two registers
struct Ints {
  __m256i a, b;
};
struct Floats {
  __m256 a, b;
};
INLINE Ints each(const void* four) {
  int32_t v;
  memcpy(&v, four, 4);
  const __m256i all_of = _mm256_set1_epi32(v);
  return {all_of, all_of};
}
INLINE Ints dots(Ints s, Ints l, Ints v) {
  return {_mm256_dpbusd_avx_epi32(s.a, l.a, v.a), _mm256_dpbusd_avx_epi32(s.b, l.b, v.b)};
}
INLINE Ints pairs(Ints a, Ints b) { return {_mm256_madd_epi16(a.a, b.a), _mm256_madd_epi16(a.b, b.b)}; }
INLINE Floats read(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void write(float* p, Floats v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
INLINE Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Floats steps_of(const uint8_t* meta) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(meta);
  return {load(halves), load(halves + 8)};
}
INLINE Ints minus_zeros(const uint8_t* meta) {
  const __m128i z = _mm_loadu_si128(reinterpret_cast<const __m128i*>(meta + 32));
  const __m256i none = _mm256_setzero_si256(), word = _mm256_set1_epi32(0xffff);
  return {_mm256_and_si256(_mm256_sub_epi32(none, _mm256_cvtepu8_epi32(z)), word),
          _mm256_and_si256(_mm256_sub_epi32(none, _mm256_cvtepu8_epi32(_mm_srli_si128(z, 8))), word)};
}
INLINE Floats folded(Ints s, Floats steps, float scale, Floats f) {
  const __m256 factor = _mm256_set1_ps(scale);
  return {_mm256_fmadd_ps(_mm256_cvtepi32_ps(s.a), _mm256_mul_ps(steps.a, factor), f.a),
          _mm256_fmadd_ps(_mm256_cvtepi32_ps(s.b), _mm256_mul_ps(steps.b, factor), f.b)};
}
template <int BITS>
INLINE Ints four_levels(const uint8_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), low = _mm256_set1_epi8(15);
  if (BITS == 8) return {v, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
  return {_mm256_and_si256(v, low), _mm256_and_si256(_mm256_srli_epi16(v, 4), low)};
}
#endif

#define ALL_ROWS _Pragma("GCC unroll 12")

// A block's sum begins at minus its zero level times the row's sum, which fits 16 bits, as the zero level does.
template <int R, int BITS>
__attribute__((noinline)) void tile(const Weight& weight, const uint8_t* levels, const uint8_t* meta, int64_t count,
                                    Rows x, float* y, int64_t stride, bool more, Ahead wanted) {
  constexpr int64_t STEP = 4 * PANEL * BITS / 8;  // bytes of the levels of four inputs
  const int8_t* values = static_cast<const int8_t*>(x.values);
  const uint8_t* ahead = wanted.at;
  const int64_t step = 4 * STEP / wanted.tiles;
  Floats f[R];
  ALL_ROWS for (int r = 0; r < R; r++) f[r] = more ? read(y + r * stride) : zeros();
  for (int64_t b = 0; b < count; b++, meta += META) {
    const Ints zero = minus_zeros(meta);
    Ints sums[R];
    ALL_ROWS for (int r = 0; r < R; r++) sums[r] = pairs(zero, each(x.sums + r * weight.blocks + b));
    _Pragma("GCC unroll 1") for (int64_t k = 0; k < weight.block; k += 16) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), _MM_HINT_T0);
      if (BITS == 8) _mm_prefetch(reinterpret_cast<const char*>(ahead + 128), _MM_HINT_T0);
      if (BITS == 8) _mm_prefetch(reinterpret_cast<const char*>(ahead + 192), _MM_HINT_T0);
      UNROLLED for (int j = 0; j < 4; j++) {
        const Ints w = four_levels<BITS>(levels + j * STEP);
        ALL_ROWS for (int r = 0; r < R; r++) sums[r] = dots(sums[r], w, each(values + (j * R + r) * 4));
      }
      levels += 4 * STEP, ahead += step, values += 16 * R;
    }
    const Floats steps = steps_of(meta);
    ALL_ROWS for (int r = 0; r < R; r++) f[r] = folded(sums[r], steps, x.scales[r * weight.blocks + b], f[r]);
  }
  ALL_ROWS for (int r = 0; r < R; r++) write(y + r * stride, f[r]);
}

void product(const Weight& w, int64_t panel, int64_t first, int64_t count, int rows, Rows x, float* y, int64_t stride,
             Ahead ahead) {
  const uint8_t* levels = w.levels + panel * w.panel_bytes() + first * w.block * PANEL * w.bits / 8;
  const uint8_t* meta = w.meta + (panel * w.blocks + first) * META;
  x.scales += first, x.sums += first;
#define TILE(R)                                                                             \
  case R:                                                                                   \
    return w.bits == 4 ? tile<R, 4>(w, levels, meta, count, x, y, stride, first > 0, ahead) \
                       : tile<R, 8>(w, levels, meta, count, x, y, stride, first > 0, ahead)
  switch (rows) {
    TILE(1);
    TILE(2);
    TILE(3);
    TILE(4);
    TILE(5);
    TILE(6);
#if defined(__AVX512F__)  // with half the registers tiles have six rows at most
    TILE(7);
    TILE(8);
    TILE(9);
    TILE(10);
    TILE(11);
    TILE(12);
#endif
    default:
      return;  // no tile has more rows
  }
#undef TILE
}
