// The form that defines the bits, for any processor.
#include <string.h>

#include "kernels.hpp"

namespace eagle {
namespace {
#include "forms.inl"

int32_t level_of(int bits, const uint8_t* levels, int64_t k, int64_t column) {
  if (bits == 8) return levels[k / 4 * 64 + column * 4 + k % 4];
  const uint8_t pair = levels[k / 4 * 32 + column % 8 * 4 + k % 4];
  return column < 8 ? pair & 15 : pair >> 4;
}

void product(const Tile& t, int bits, int rows) {
  for (int r = 0; r < rows; r++)
    for (int64_t c = 0; c < PANEL; c++) {
      float y = 0;
      for (int64_t b = 0; b < t.blocks; b++) {
        const uint8_t* meta = t.meta + b * META;
        int32_t sum = meta[32 + c] * t.sums[r * t.blocks + b];
        for (int64_t k = b * t.block; k < (b + 1) * t.block; k++)
          sum += level_of(bits, t.levels, k, c) * (bits == 4 ? 16 : 1) * t.x[(k / 4 * rows + r) * 4 + k % 4];
        uint16_t step;
        memcpy(&step, meta + 2 * c, 2);
        const float scale = t.scales[r * t.blocks + b] * (bits == 4 ? 0.0625f : 1);
        y = __builtin_fmaf(static_cast<float>(sum), of_half(step) * scale, y);
      }
      t.y[r * t.stride + c] = y;
    }
}
}  // namespace

const Kernels plain_kernels = {"plain", false, false, 4, FORMS};
}  // namespace eagle
