// Weights of products: how they are stored, and how they are packed for an instruction set.
#include <string.h>

#include "product.hpp"

namespace eagle {
namespace {
// As in META.
uint8_t zero_of(const ort::Tensor& t, const Weight& w, int64_t n, int64_t b) {
  if (t.data == nullptr) return 128;
  const uint8_t* p = static_cast<const uint8_t*>(t.data) + n * t.dims[1];
  if (w.bits == 8 || t.rank == 3) return p[b];
  return static_cast<uint8_t>(b % 2 ? p[b / 2] & 240 : p[b / 2] << 4);
}

// One column's levels of one block, a byte each.
void read_block(const ort::Tensor& levels, const Weight& w, int64_t n, int64_t b, uint8_t* out) {
  const uint8_t* p = static_cast<const uint8_t*>(levels.data) + (n * w.blocks + b) * levels.dims[2];
  if (w.bits == 8) {
    memcpy(out, p, static_cast<size_t>(w.block));
    return;
  }
  for (int64_t i = 0; i < w.block / 2; i++) {
    out[2 * i] = p[i] & 15;
    out[2 * i + 1] = p[i] >> 4;
  }
}

void pack(const Kernels& kernels, const ort::Tensor& levels, const ort::Tensor& steps, const ort::Tensor& zeros,
          int64_t first, Weight* weight) {
  Weight& w = *weight;
  const uint32_t flip = kernels.signed_levels ? 0x80808080 : 0;
  uint8_t columns[PANEL][256], *out = w.levels;
  for (int64_t panel = 0; panel < w.panels; panel++)
    for (int64_t b = 0; b < w.blocks; b++) {
      uint8_t* meta = w.meta + (panel * w.blocks + b) * META;
      for (int64_t c = 0; c < PANEL; c++) {
        const int64_t column = panel * PANEL + c, n = first + column;
        const bool real = column < w.columns;
        uint16_t step = 0;
        if (real) memcpy(&step, static_cast<const uint8_t*>(steps.data) + 2 * (n * w.blocks + b), 2);
        memcpy(meta + 2 * c, &step, 2);
        meta[32 + c] = real ? zero_of(zeros, w, n, b) : 0;
        if (real) read_block(levels, w, n, b, columns[c]);
        else memset(columns[c], 0, sizeof columns[c]);
      }
      for (int64_t k = 0; k < w.block; k += 4)
        for (int64_t c = 0; c < (w.bits == 4 ? PANEL / 2 : PANEL); c++, out += 4) {
          uint32_t four, upper;
          memcpy(&four, columns[c] + k, 4);
          memcpy(&upper, columns[(c + 8) % PANEL] + k, 4);
          four = w.bits == 8 ? four ^ flip : four | upper << 4;
          memcpy(out, &four, 4);
        }
    }
}
}  // namespace

ort::Status read_weight(const Stored& stored, int64_t bits, int64_t block, int64_t first, int64_t inputs,
                        int64_t columns, const Kernels& kernels, Memory* memory, Weight* w) {
  if ((bits != 4 && bits != 8) || block < 16 || block > 256 || (block & (block - 1)) || columns < 1 ||
      columns > (int64_t(1) << 31) || first < 0 || first > (int64_t(1) << 31))
    return ort::error("RowExactMatMul: bits must be 4 or 8, and block a power of two from 16 to 256");
  *w = {inputs,    columns, block,  (inputs + block - 1) / block, (columns + PANEL - 1) / PANEL,
        int(bits), nullptr, nullptr};
  const auto& [levels, steps, zeros] = stored;
  const int64_t rows = levels.dims[0];
  if (rows < first + columns || !levels.is(ort::UINT8, rows, w->blocks, block * bits / 8) ||
      !steps.is(ort::FLOAT16, rows, w->blocks) ||
      (zeros.data != nullptr && !zeros.is(ort::UINT8, rows, (w->blocks * bits + 7) / 8) &&
       !(bits == 4 && zeros.is(ort::UINT8, rows, w->blocks, 1))))
    return ort::error("RowExactMatMul: a weight's levels, steps or zero levels have another shape or type");
  w->levels = memory->get(static_cast<size_t>(w->panels * w->panel_bytes()) + 64);
  w->meta = memory->get(static_cast<size_t>(w->panels * w->blocks * META) + 64);
  if (w->levels == nullptr || w->meta == nullptr) return ort::error(NO_MEMORY);
  pack(kernels, levels, steps, zeros, first, w);
  const int64_t row = w->blocks * levels.dims[2];
  let_go(static_cast<const uint8_t*>(levels.data) + first * row, static_cast<size_t>(columns * row));
  return nullptr;
}

ort::Status copy_numbers(const Source& source, const ort::Tensor& numbers, int64_t count, const char* message,
                         const float** out) {
  if (numbers.data == nullptr) return nullptr;
  return numbers.is(ort::FLOAT, count) ? source.copy(numbers, out) : ort::error(message);
}
}  // namespace eagle
