// What tile.inl asks for, in one register of 512 bits or two of 256. Included after lanes.hpp.

INLINE int32_t four_bytes(const void* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return four;
}
#if defined(__AVX512F__)
constexpr int TILE_ROWS = MOST_ROWS;
using Ints = __m512i;
using Floats = __m512;
INLINE Ints each(const void* four) { return _mm512_set1_epi32(four_bytes(four)); }
INLINE Ints dots(Ints sums, Ints levels, Ints four) { return _mm512_dpbusd_epi32(sums, levels, four); }
INLINE Ints times(Ints zeros, Ints sum) { return _mm512_madd_epi16(zeros, sum); }
INLINE Ints plus(Ints sums, Ints more) { return _mm512_add_epi32(sums, more); }
template <int BITS>
INLINE Ints zero_levels(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
template <int BITS>
INLINE Ints four_levels(const uint8_t* p) {
  if (BITS == 8) return _mm512_loadu_si512(p);
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_slli_epi16(v, 4)), v, 1);
  return _mm512_and_si512(both, _mm512_set1_epi8(-16));
}
INLINE Floats steps_of(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE Floats folded(Ints sums, Floats steps, float scale, Floats f) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(steps, _mm512_set1_ps(scale)), f);
}
INLINE void write(float* p, Floats v) { _mm512_storeu_ps(p, v); }
#else
constexpr int TILE_ROWS = 6;
struct Ints {
  __m256i a, b;
};
struct Floats {
  V a, b;
};
INLINE Ints each(const void* four) {
  const __m256i v = _mm256_set1_epi32(four_bytes(four));
  return {v, v};
}
INLINE Ints times(Ints zeros, Ints sum) {
  return {_mm256_madd_epi16(zeros.a, sum.a), _mm256_madd_epi16(zeros.b, sum.b)};
}
INLINE Ints plus(Ints sums, Ints more) { return {_mm256_add_epi32(sums.a, more.a), _mm256_add_epi32(sums.b, more.b)}; }
INLINE __m256i eight_bytes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
template <int BITS>
INLINE Ints zero_levels(const uint8_t* p) {  // in the lower 16 bits; the upper ones are 0
  const Ints zeros = {eight_bytes(p), eight_bytes(p + 8)};
  if (BITS == 4 || !SIGNED) return zeros;
  const __m256i middle = _mm256_set1_epi32(128), word = _mm256_set1_epi32(0xffff);
  return {_mm256_and_si256(_mm256_sub_epi32(zeros.a, middle), word),
          _mm256_and_si256(_mm256_sub_epi32(zeros.b, middle), word)};
}
template <int BITS>
INLINE Ints four_levels(const uint8_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), high = _mm256_set1_epi8(-16);
  if (BITS == 8) return {v, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
  return {_mm256_and_si256(_mm256_slli_epi16(v, 4), high), _mm256_and_si256(v, high)};
}
INLINE Floats steps_of(const uint16_t* p) { return {load(p), load(p + 8)}; }
INLINE Floats folded(Ints sums, Floats steps, float scale, Floats f) {
  return {fma(_mm256_cvtepi32_ps(sums.a), mul(steps.a, all(scale)), f.a),
          fma(_mm256_cvtepi32_ps(sums.b), mul(steps.b, all(scale)), f.b)};
}
INLINE void write(float* p, Floats v) { store(p, v.a), store(p + 8, v.b); }
#endif
