// The form that defines the bits, for any processor.
#include <string.h>

#include "kernels.hpp"

namespace eagle {
namespace {
#include "lanes.hpp"
#include "rows.inl"
#include "attention.inl"

int32_t level_of(const Weight& w, const uint8_t* panel, int64_t k, int64_t column) {
  if (w.bits == 4) {
    const uint8_t pair = panel[k / 4 * 32 + column % 8 * 4 + k % 4];
    return column < 8 ? pair & 15 : pair >> 4;
  }
  return panel[k / 4 * 64 + column * 4 + k % 4];
}

void product(const Weight& w, int64_t panel, int64_t first, int64_t count, int rows, Rows x, float* y, int64_t stride,
             Ahead) {
  const uint8_t* levels = w.levels + panel * w.panel_bytes();
  const uint8_t* meta = w.meta + (panel * w.blocks + first) * META;
  const int8_t* values = static_cast<const int8_t*>(x.values);
  for (int r = 0; r < rows; r++)
    for (int64_t c = 0; c < PANEL; c++) {
      float sum = first ? y[r * stride + c] : 0.f;
      for (int64_t b = first; b < first + count; b++) {
        const uint8_t* m = meta + (b - first) * META;
        int32_t total = 0;
        for (int64_t k = b * w.block; k < (b + 1) * w.block; k++)
          total += level_of(w, levels, k, c) * values[((k - first * w.block) / 4 * rows + r) * 4 + k % 4];
        total -= m[32 + c] * x.sums[r * w.blocks + b];
        uint16_t step;
        memcpy(&step, m + 2 * c, 2);
        sum = __builtin_fmaf(static_cast<float>(total), of_half(step) * x.scales[r * w.blocks + b], sum);
      }
      y[r * stride + c] = sum;
    }
}
}  // namespace

const Kernels* plain_kernels() {
  static const Kernels kernels = {"plain", 4,       false,   false, 4,    before,    quantise,
                                  product, prepare, scratch, part,  join, whole_rows};
  return &kernels;
}
}  // namespace eagle
