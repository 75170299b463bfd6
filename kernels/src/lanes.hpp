// Eight floats at a time. Included once per instruction set, inside its own namespace; every form computes the same bits.

static inline float sum_of_eight(const float* t) {
  return ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]));
}

#if defined(LANES_AVX2)

using V = __m256;
static inline V load(const float* p) { return _mm256_loadu_ps(p); }
static inline V load(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline V load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
static inline void store(uint16_t* p, V v) {  // values that fp16 has
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline V all(float x) { return _mm256_set1_ps(x); }
static inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
static inline V add(V a, V b) { return _mm256_add_ps(a, b); }
static inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
static inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
static inline V div(V a, V b) { return _mm256_div_ps(a, b); }
static inline V root(V a) { return _mm256_sqrt_ps(a); }
static inline V larger(V a, V b) { return _mm256_max_ps(a, b); }
static inline V absolute(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), a); }
static inline V largest_size(V m, V a) {  // of m, which has no sign, and a; NaN is above all
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(m), _mm256_castps_si256(absolute(a))));
}
static inline V with_sign(V a, V sign) { return _mm256_or_ps(a, _mm256_and_ps(_mm256_set1_ps(-0.f), sign)); }
static inline V at_sign(V x, V positive, V negative) {  // positive where x >= 0, else negative
  return _mm256_blendv_ps(negative, positive, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GE_OQ));
}
static inline V nearest(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline V power2(V n) {  // of whole numbers from -126 to 127
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline V pair_sums(V a, V b) {  // as hadd, which takes an EPYC (Zen 3) twice as long
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}
static inline void four_sums(V a, V b, V c, V d, float* out) {
  const V t = pair_sums(pair_sums(a, b), pair_sums(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
}
static inline V halved(V a) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}  // to fp16 and back
static inline float largest_number_of(V v) {  // none of which is NaN
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
static inline bool has_nan(V v) { return _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)) != 0; }
// Sixteen values to the nearest whole numbers, -127 to 127; returns their sum.
static inline int32_t narrow(const float* x, V factor, int8_t* out) {
  const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(load(x), factor));
  const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(load(x + 8), factor));
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  const __m256i pairs = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

#elif defined(LANES_NEON)

struct V {
  float32x4_t a, b;
};
static inline V load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline V load(const uint16_t* p) {
  const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
  return {vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))};
}
static inline V load(const int8_t* p) {
  const int16x8_t n = vmovl_s8(vld1_s8(p));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(n))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(n)))};
}
static inline void store(float* p, V v) {
  vst1q_f32(p, v.a);
  vst1q_f32(p + 4, v.b);
}
static inline void store(uint16_t* p, V v) {  // values that fp16 has
  vst1q_u16(p, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(v.a), vcvt_f16_f32(v.b))));
}
static inline V all(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
static inline V fma(V a, V b, V c) { return {vfmaq_f32(c.a, a.a, b.a), vfmaq_f32(c.b, a.b, b.b)}; }
static inline V add(V a, V b) { return {vaddq_f32(a.a, b.a), vaddq_f32(a.b, b.b)}; }
static inline V sub(V a, V b) { return {vsubq_f32(a.a, b.a), vsubq_f32(a.b, b.b)}; }
static inline V mul(V a, V b) { return {vmulq_f32(a.a, b.a), vmulq_f32(a.b, b.b)}; }
static inline V div(V a, V b) { return {vdivq_f32(a.a, b.a), vdivq_f32(a.b, b.b)}; }
static inline V root(V a) { return {vsqrtq_f32(a.a), vsqrtq_f32(a.b)}; }
static inline V larger(V a, V b) {
  return {vbslq_f32(vcgtq_f32(a.a, b.a), a.a, b.a), vbslq_f32(vcgtq_f32(a.b, b.b), a.b, b.b)};
}
static inline V absolute(V a) { return {vabsq_f32(a.a), vabsq_f32(a.b)}; }
static inline V largest_size(V m, V a) { return {vmaxq_f32(m.a, vabsq_f32(a.a)), vmaxq_f32(m.b, vabsq_f32(a.b))}; }
static inline float32x4_t with_sign4(float32x4_t a, float32x4_t s) {
  const uint32x4_t bit = vdupq_n_u32(0x80000000u);
  return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(a), vandq_u32(bit, vreinterpretq_u32_f32(s))));
}
static inline V with_sign(V a, V s) { return {with_sign4(a.a, s.a), with_sign4(a.b, s.b)}; }
static inline V at_sign(V x, V positive, V negative) {
  return {vbslq_f32(vcgezq_f32(x.a), positive.a, negative.a), vbslq_f32(vcgezq_f32(x.b), positive.b, negative.b)};
}
static inline V nearest(V a) { return {vrndnq_f32(a.a), vrndnq_f32(a.b)}; }
static inline float32x4_t power4(float32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
static inline V power2(V n) { return {power4(n.a), power4(n.b)}; }
static inline void four_sums(V a, V b, V c, V d, float* out) {
  const float32x4_t low = vpaddq_f32(vpaddq_f32(a.a, b.a), vpaddq_f32(c.a, d.a));
  const float32x4_t high = vpaddq_f32(vpaddq_f32(a.b, b.b), vpaddq_f32(c.b, d.b));
  vst1q_f32(out, vaddq_f32(low, high));
}
static inline V halved(V a) { return {vcvt_f32_f16(vcvt_f16_f32(a.a)), vcvt_f32_f16(vcvt_f16_f32(a.b))}; }
static inline int32_t narrow(const float* x, V factor, int8_t* out) {
  int32x4_t n[4];
  for (int i = 0; i < 4; i++) n[i] = vcvtnq_s32_f32(vmulq_f32(vld1q_f32(x + 4 * i), factor.a));
  const int16x8_t low = vcombine_s16(vqmovn_s32(n[0]), vqmovn_s32(n[1]));
  const int16x8_t high = vcombine_s16(vqmovn_s32(n[2]), vqmovn_s32(n[3]));
  vst1q_s8(out, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
  return vaddvq_s32(vaddq_s32(vaddq_s32(n[0], n[1]), vaddq_s32(n[2], n[3])));
}

#else  // the plain form, which defines the bits

struct V {
  float x[8];
};
template <class F>
static inline V each(F number) {  // number(i) for each lane i
  V r;
  for (int i = 0; i < 8; i++) r.x[i] = number(i);
  return r;
}
static inline float of_half(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  float value;
  if (exponent == 0) {
    value = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  memcpy(&value, &bits, 4);
  return value;
}
static inline uint16_t to_half(float x) {  // to nearest even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (bits < 0x38800000) {
    const float scaled = __builtin_fabsf(x) * 16777216.0f;  // 2^24
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(__builtin_nearbyintf(scaled)));
  }
  return static_cast<uint16_t>(sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13));
}
static inline V load(const float* p) {
  return each([&](int i) { return p[i]; });
}
static inline V load(const uint16_t* p) {
  return each([&](int i) { return of_half(p[i]); });
}
static inline V load(const int8_t* p) {
  return each([&](int i) { return float(p[i]); });
}
static inline void store(float* p, V v) { memcpy(p, v.x, 32); }
static inline void store(uint16_t* p, V v) {  // values that fp16 has
  for (int i = 0; i < 8; i++) p[i] = to_half(v.x[i]);
}
static inline V halved(V a) {
  return each([&](int i) { return of_half(to_half(a.x[i])); });
}
static inline V all(float x) {
  return each([&](int) { return x; });
}
static inline V fma(V a, V b, V c) {
  return each([&](int i) { return __builtin_fmaf(a.x[i], b.x[i], c.x[i]); });
}
static inline V add(V a, V b) {
  return each([&](int i) { return a.x[i] + b.x[i]; });
}
static inline V sub(V a, V b) {
  return each([&](int i) { return a.x[i] - b.x[i]; });
}
static inline V mul(V a, V b) {
  return each([&](int i) { return a.x[i] * b.x[i]; });
}
static inline V div(V a, V b) {
  return each([&](int i) { return a.x[i] / b.x[i]; });
}
static inline V root(V a) {
  return each([&](int i) { return __builtin_sqrtf(a.x[i]); });
}
static inline V larger(V a, V b) {
  return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
static inline V absolute(V a) {
  return each([&](int i) { return __builtin_fabsf(a.x[i]); });
}
static inline V largest_size(V m, V a) {
  a = absolute(a);
  return each([&](int i) { return a.x[i] > m.x[i] || a.x[i] != a.x[i] ? a.x[i] : m.x[i]; });
}
static inline V with_sign(V a, V s) {
  return each([&](int i) { return __builtin_copysignf(a.x[i], s.x[i]); });
}
static inline V at_sign(V x, V p, V n) {
  return each([&](int i) { return x.x[i] >= 0 ? p.x[i] : n.x[i]; });
}
static inline V nearest(V a) {
  return each([&](int i) { return __builtin_nearbyintf(a.x[i]); });
}
static inline int32_t whole(float x) { return x >= -1e9f && x <= 1e9f ? static_cast<int32_t>(x) : INT32_MIN; }
static inline V power2(V n) {
  return each([&](int i) {
    const uint32_t bits = static_cast<uint32_t>(whole(n.x[i]) + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return power;
  });
}
static inline void four_sums(V a, V b, V c, V d, float* out) {
  out[0] = sum_of_eight(a.x), out[1] = sum_of_eight(b.x), out[2] = sum_of_eight(c.x), out[3] = sum_of_eight(d.x);
}
static inline int32_t narrow(const float* x, V factor, int8_t* out) {
  int32_t total = 0;
  for (int i = 0; i < 16; i++) {
    const int32_t n = whole(__builtin_nearbyintf(x[i] * factor.x[0]));
    const int32_t bound = n > 127 ? 127 : n < -128 ? -128 : n;
    out[i] = static_cast<int8_t>(bound);
    total += bound;
  }
  return total;
}
#endif

// ------------------------------------------------------------------------------------------ the same for all of them

// Where one of two numbers may be NaN, it is the second of `larger`: that is the one which is returned then.

// e^x of x <= 0; below -87 that of -87.
static inline V exponential(V x) {
  x = larger(all(-87.0f), x);
  const V n = nearest(mul(x, all(1.44269504f)));
  V r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  V y = all(1.9875691500e-4f);
  y = fma(y, r, all(1.3981999507e-3f));
  y = fma(y, r, all(8.3334519073e-3f));
  y = fma(y, r, all(4.1665795894e-2f));
  y = fma(y, r, all(1.6666665459e-1f));
  y = fma(y, r, all(5.0000001201e-1f));
  y = fma(y, mul(r, r), add(r, all(1.f)));
  return mul(y, power2(n));
}
static inline V at_most(V v, float most) {
  const V zero = all(0.f);
  return sub(zero, larger(all(-most), sub(zero, v)));
}
static inline float first_of(V v) {
  float t[8];
  store(t, v);
  return t[0];
}
static inline float exponential(float x) { return first_of(exponential(all(x))); }
static inline float sum_of(V v) {
  float t[8];
  store(t, v);
  return sum_of_eight(t);
}
static inline float largest_of(V v) {  // NaN, if one is
#if defined(LANES_AVX2)
  if (!has_nan(v)) return largest_number_of(v);  // comparisons of single numbers are branches that nobody foresees
#endif
  float t[8];
  store(t, v);
  float m = t[0];
  for (int i = 1; i < 8; i++) m = t[i] > m || t[i] != t[i] ? t[i] : m;
  return m;
}

// See Kernels::quantise. Blocks are multiples of 16.
static void quantise(const float* x, int64_t inputs, int64_t block, int64_t blocks, int8_t* q, float* scales,
                     int32_t* sums) {
  for (int64_t b = 0; b < blocks; b++, q += block) {
    const float* p = x + b * block;
    float rest[256];  // the last block, filled up with zeros
    if ((b + 1) * block > inputs) {
      const int64_t left = inputs - b * block;
      memset(rest, 0, sizeof rest);
      memcpy(rest, p, static_cast<size_t>(left) * 4);
      p = rest;
    }
    V m = absolute(load(p));
    for (int64_t i = 8; i < block; i += 8) m = largest_size(m, load(p + i));
    const float a = largest_of(m);
    scales[b] = a / 127.f;
    sums[b] = 0;
    if (!(a > 1e-30f && a < 3e38f)) {  // zeros; or infinities and NaN, whose scale makes the result NaN
      if (a <= 1e-30f) scales[b] = 0;
      memset(q, 0, static_cast<size_t>(block));
      continue;
    }
    const V factor = all(127.f / a);
    int32_t total = 0;
    for (int64_t i = 0; i < block; i += 16) total += narrow(p + i, factor, q + i);
    sums[b] = -total;
  }
}
