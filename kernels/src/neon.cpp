// NEON with products of four bytes (dotprod, of ARMv8.2): Apple's processors, and most others of 64 bits since 2018.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <string.h>

#include "kernels.hpp"
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#endif

#define LANES_NEON
#if defined(__clang__)
#define WITH_DOTPROD __attribute__((target("dotprod")))
#else
#define WITH_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

namespace eagle {
namespace {
#include "lanes.hpp"
#include "rows.inl"
#include "attention.inl"

constexpr int WORDS = PANEL / 4;  // vectors of four columns

// The sums of one block join the fold: f = fma(sum - zero * rows' sum, step * scale, f).
template <bool SIGNED>
inline void join_block(const uint8_t* meta, const int32x4_t* sums, float scale, int32_t rows_sum, float32x4_t* f) {
  const uint8x16_t zeros = vld1q_u8(meta + 32);
  const int16x8_t low =
      SIGNED ? vmovl_s8(vreinterpret_s8_u8(vget_low_u8(zeros))) : vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(zeros)));
  const int16x8_t high =
      SIGNED ? vmovl_s8(vreinterpret_s8_u8(vget_high_u8(zeros))) : vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(zeros)));
  const int32x4_t zero[WORDS] = {vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)),
                                 vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))};
  const V steps[2] = {load(reinterpret_cast<const uint16_t*>(meta)),
                      load(reinterpret_cast<const uint16_t*>(meta + 16))};
  const float32x4_t step[WORDS] = {steps[0].a, steps[0].b, steps[1].a, steps[1].b};
  for (int i = 0; i < WORDS; i++)
    f[i] = vfmaq_f32(f[i], vcvtq_f32_s32(vmlsq_n_s32(sums[i], zero[i], rows_sum)), vmulq_n_f32(step[i], scale));
}

template <int R, int BITS>
WITH_DOTPROD __attribute__((noinline)) void tile(const Weight& weight, const uint8_t* levels, const uint8_t* meta,
                                                 int64_t count, Rows x, float* y, int64_t stride, bool more) {
  const int8_t* values = static_cast<const int8_t*>(x.values);
  float32x4_t f[R][WORDS];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < WORDS; i++) f[r][i] = more ? vld1q_f32(y + r * stride + 4 * i) : vdupq_n_f32(0);
  for (int64_t b = 0; b < count; b++, meta += META) {
    int32x4_t sums[R][WORDS];
    for (int r = 0; r < R; r++)
      for (int i = 0; i < WORDS; i++) sums[r][i] = vdupq_n_s32(0);
    for (int64_t k = 0; k < weight.block; k += 4, levels += 4 * PANEL * BITS / 8, values += 4 * R) {
      int8x16_t w[WORDS];
      if (BITS == 4) {
        const uint8x16_t first = vld1q_u8(levels), second = vld1q_u8(levels + 16), low = vdupq_n_u8(15);
        w[0] = vreinterpretq_s8_u8(vandq_u8(first, low)), w[1] = vreinterpretq_s8_u8(vandq_u8(second, low));
        w[2] = vreinterpretq_s8_u8(vshrq_n_u8(first, 4)), w[3] = vreinterpretq_s8_u8(vshrq_n_u8(second, 4));
      } else {
        for (int i = 0; i < WORDS; i++) w[i] = vreinterpretq_s8_u8(vld1q_u8(levels + 16 * i));
      }
      for (int r = 0; r < R; r++) {
        int32_t four;
        memcpy(&four, values + 4 * r, 4);
        const int8x16_t value = vreinterpretq_s8_s32(vdupq_n_s32(four));
        for (int i = 0; i < WORDS; i++) sums[r][i] = vdotq_s32(sums[r][i], w[i], value);
      }
    }
    for (int r = 0; r < R; r++)
      join_block<BITS == 8>(meta, sums[r], x.scales[r * weight.blocks + b], x.sums[r * weight.blocks + b], f[r]);
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < WORDS; i++) vst1q_f32(y + r * stride + 4 * i, f[r][i]);
}

template <int BITS>
void any_tile(const Weight& w, int64_t panel, int64_t first, int64_t count, int rows, Rows x, float* y,
              int64_t stride) {
  const uint8_t* levels = w.levels + panel * w.panel_bytes() + first * w.block * PANEL * BITS / 8;
  const uint8_t* meta = w.meta + (panel * w.blocks + first) * META;
  x.scales += first, x.sums += first;
  switch (rows) {
    case 1:
      return tile<1, BITS>(w, levels, meta, count, x, y, stride, first > 0);
    case 2:
      return tile<2, BITS>(w, levels, meta, count, x, y, stride, first > 0);
    case 3:
      return tile<3, BITS>(w, levels, meta, count, x, y, stride, first > 0);
    default:
      return tile<4, BITS>(w, levels, meta, count, x, y, stride, first > 0);
  }
}

void product(const Weight& w, int64_t panel, int64_t first, int64_t count, int rows, Rows x, float* y, int64_t stride,
             Ahead) {
  if (w.bits == 4) any_tile<4>(w, panel, first, count, rows, x, y, stride);
  else any_tile<8>(w, panel, first, count, rows, x, y, stride);
}

bool has_dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#elif defined(_WIN32)
  return IsProcessorFeaturePresent(43);  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
#else
  return true;  // all of Apple's
#endif
}
}  // namespace

const Kernels* neon_kernels() {
  static const Kernels kernels = {"neon",  4,       false,   true, 4,    before,    quantise,
                                  product, prepare, scratch, part, join, whole_rows};
  return has_dotprod() ? &kernels : nullptr;
}
}  // namespace eagle
#endif
