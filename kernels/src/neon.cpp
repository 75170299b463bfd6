// NEON with products of four bytes (dotprod, of ARMv8.2): Apple's processors, and most others of 64 bits since 2018.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <string.h>

#include "kernels.hpp"

#define LANES_NEON
#if defined(__clang__)
#define TARGET __attribute__((target("dotprod")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

namespace eagle {
namespace {
#include "forms.inl"

constexpr int TILE_ROWS = 4;
constexpr bool PUTS_APART = false;
struct Ints {
  int32x4_t v[4];
};
struct Floats {
  V a, b;
};
INLINE Ints each(const void* four) {
  int32_t v;
  memcpy(&v, four, 4);
  return {vdupq_n_s32(v), vdupq_n_s32(v), vdupq_n_s32(v), vdupq_n_s32(v)};
}
TARGET INLINE Ints dots(Ints sums, Ints levels, Ints four) {
  for (int i = 0; i < 4; i++)
    sums.v[i] = vdotq_s32(sums.v[i], vreinterpretq_s8_s32(levels.v[i]), vreinterpretq_s8_s32(four.v[i]));
  return sums;
}
INLINE Ints times(Ints zeros, Ints sum) {
  for (int i = 0; i < 4; i++) zeros.v[i] = vmulq_s32(zeros.v[i], sum.v[i]);
  return zeros;
}
INLINE Ints plus(Ints sums, Ints more) {
  for (int i = 0; i < 4; i++) sums.v[i] = vaddq_s32(sums.v[i], more.v[i]);
  return sums;
}
// Minus 128, as levels are: products are of bytes that both have a sign.
template <int BITS>
INLINE Ints zero_levels(const uint8_t* p) {
  const int16x8_t middle = vdupq_n_s16(128);
  const int16x8_t a = vsubq_s16(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p))), middle);
  const int16x8_t b = vsubq_s16(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p + 8))), middle);
  return {vmovl_s16(vget_low_s16(a)), vmovl_s16(vget_high_s16(a)), vmovl_s16(vget_low_s16(b)),
          vmovl_s16(vget_high_s16(b))};
}
template <int BITS>
INLINE Ints four_levels(const uint8_t* p) {
  Ints levels;
  for (int i = 0; i < 4; i++) {
    const uint8x16_t v = vld1q_u8(p + 16 * (BITS == 8 ? i : i % 2));
    const uint8x16_t sixteen_times = i < 2 ? vshlq_n_u8(v, 4) : vandq_u8(v, vdupq_n_u8(240));
    levels.v[i] = vreinterpretq_s32_u8(BITS == 8 ? v : veorq_u8(sixteen_times, vdupq_n_u8(128)));
  }
  return levels;
}
INLINE Floats steps_of(const uint16_t* p) { return {load(p), load(p + 8)}; }
INLINE V floats(int32x4_t a, int32x4_t b) { return {vcvtq_f32_s32(a), vcvtq_f32_s32(b)}; }
INLINE Floats folded(Ints sums, Floats steps, float scale, Floats f) {
  return {fma(floats(sums.v[0], sums.v[1]), mul(steps.a, all(scale)), f.a),
          fma(floats(sums.v[2], sums.v[3]), mul(steps.b, all(scale)), f.b)};
}
INLINE void write(float* p, Floats v) { store(p, v.a), store(p + 8, v.b); }

#include "dots.inl"
#include "tile.inl"
}  // namespace

const Kernels neon_kernels = {"neon", true, PUTS_APART, TILE_ROWS, FORMS};
}  // namespace eagle
#endif
