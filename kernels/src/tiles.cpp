// Tiles: rows of inputs that are quantised together, and multiplied by panels of weights.
#include <string.h>

#include "product.hpp"

namespace eagle {
namespace {
constexpr int64_t EARLY = 4096;    // bytes of weights between those that are read and those that are fetched
constexpr int64_t APART = 8;       // tiles for which levels are put apart
constexpr int64_t NEAR = 1 << 18;  // bytes of quantised rows that a cache holds while panels are multiplied by them
constexpr int64_t CHUNK = 256;     // inputs of a row that one thread quantises: blocks have no more

struct Part {  // of the rows: those of a tile
  int64_t first;
  int rows;
};

int64_t tiles_of(int64_t rows, const Kernels& kernels) { return (rows + kernels.tile_rows - 1) / kernels.tile_rows; }

Part rows_of(int64_t tile, int64_t tiles, int64_t rows) {
  const int64_t first = rows * tile / tiles;
  return {first, static_cast<int>(rows * (tile + 1) / tiles - first)};
}

// Quantises inputs first .. last - 1 of n rows from row t on, which make one tile. first: a multiple of CHUNK. work: K
// floats, and blocks * block bytes after them.
void read_tile(const Work& all, int64_t t, int n, const Input& in, int64_t first, int64_t last, float* work) {
  const Product& p = *all.product;
  const int64_t channels = p.weights[0].inputs, count = last - first, blocks = (count + in.block - 1) / in.block;
  int8_t* bytes = reinterpret_cast<int8_t*>(work + channels);
  int8_t* tile = in.values + t * in.row_bytes() + first * n;
  for (int r = 0; r < n; r++) {
    const int64_t at = (t + r) * in.blocks + first / in.block;
    const int64_t from = (all.which == nullptr ? t + r : all.which[t + r]) * channels + first;
    const float* row = all.x + from;
    if (p.before.any()) {
      p.kernels->before(p.before, row, all.up == nullptr ? nullptr : all.up + from, count, work);
      row = work;
    }
    p.kernels->quantise(row, count, in.block, blocks, bytes, in.scales + at, in.sums + at);
    for (int64_t k = 0; k < blocks * in.block; k += 4) memcpy(tile + k * n + r * 4, bytes + k, 4);
  }
}

// Tiles whose rows stay near while several panels are multiplied by them.
int64_t tiles_near(const Input& in, const Kernels& kernels) {
  const int64_t tiles = NEAR / (kernels.tile_rows * in.row_bytes());
  return tiles > APART ? tiles : APART;
}

// Whether a panel's levels of four bits are put apart once for all tiles, each of which would do so otherwise.
bool are_apart(const Kernels& kernels, const Weight& w, int64_t tiles) {
  return kernels.puts_apart && w.bits == 4 && tiles >= APART;
}
void put_apart(const uint8_t* levels, int64_t bytes, uint8_t* out) {
  for (int64_t i = 0; i < bytes; i += 32, out += 64)  // of four inputs: columns 0 to 7, and 8 to 15
    for (int j = 0; j < 32; j++) out[j] = levels[i + j] & 15, out[32 + j] = levels[i + j] >> 4;
}

// Panels first .. last - 1 of one weight for some tiles of rows. bias: [N] to add, or null; added: [rows, N] to add then,
// or null. scratch: for levels that are put apart.
void panels(const Kernels& kernels, const Weight& w, const Input& in, int64_t rows, int64_t begin, int64_t end,
            int64_t first, int64_t last, const float* bias, const float* added, float* y, uint8_t* scratch) {
  const int64_t tiles = tiles_of(rows, kernels), bytes = w.panel_bytes(), count = end - begin;
  const bool apart = are_apart(kernels, w, count);
  float edge[MOST_ROWS * PANEL];
  for (int64_t panel = first; panel < last; panel++) {
    const int64_t column = panel * PANEL;
    const bool whole = column + PANEL <= w.columns;
    const int64_t real = whole ? PANEL : w.columns - column;
    const uint8_t *levels = w.levels + panel * bytes, *meta = w.meta + panel * w.blocks * META;
    if (apart) put_apart(levels, bytes, scratch);
    for (int64_t tile = begin; tile < end; tile++) {
      const auto [t, n] = rows_of(tile, tiles, rows);
      float* out = y + t * w.columns + column;
      const uint8_t* ahead = levels + (count == 1 ? EARLY : bytes + bytes * (tile - begin) / count);
      const Tile job = {apart ? scratch : levels,
                        meta,
                        apart,
                        w.block,
                        w.blocks,
                        in.values + t * in.row_bytes(),
                        in.scales + t * in.blocks,
                        in.sums + t * in.blocks,
                        whole ? out : edge,
                        whole ? w.columns : PANEL,
                        ahead,
                        128 / count};
      kernels.product(job, w.bits, n);
      for (int r = 0; r < n; r++, out += w.columns) {
        if (!whole) memcpy(out, edge + r * PANEL, static_cast<size_t>(real) * 4);
        for (int64_t c = 0; c < real && bias != nullptr; c++) out[c] += bias[column + c];
        for (int64_t c = 0; c < real && added != nullptr; c++) out[c] += added[(t + r) * w.columns + column + c];
      }
    }
  }
}
}  // namespace

// Quantises some pieces: chunks of tiles.
void read_tiles(const void* work, int64_t from, int64_t to, uint8_t* scratch) {
  const Work& w = *static_cast<const Work*>(work);
  const int64_t channels = w.product->weights[0].inputs, tiles = tiles_of(w.rows, *w.product->kernels);
  for (int64_t piece = from; piece < to; piece++) {
    const Part tile = rows_of(piece / w.chunks, tiles, w.rows);
    const int64_t begin = piece % w.chunks * CHUNK;
    const int64_t end = w.chunks == 1 || begin + CHUNK > channels ? channels : begin + CHUNK;
    for (int i = 0; i < w.count; i++)
      read_tile(w, tile.first, tile.rows, w.inputs[i], begin, end, reinterpret_cast<float*>(scratch));
  }
}

// Panels first .. last - 1, those of all weights being numbered one after the other.
void multiply(const void* work, int64_t first, int64_t last, uint8_t* scratch) {
  const Work& work_of = *static_cast<const Work*>(work);
  const Product& p = *work_of.product;
  for (int i = 0; i < p.count; i++) {
    const Weight& w = p.weights[i];
    const Input& in = work_of.inputs[work_of.reads[i]];
    const int64_t tiles = tiles_of(work_of.rows, *p.kernels), near = tiles_near(in, *p.kernels);
    for (int64_t begin = 0; first < w.panels && last > 0 && begin < tiles; begin += near)
      panels(*p.kernels, w, in, work_of.rows, begin, begin + near < tiles ? begin + near : tiles, first < 0 ? 0 : first,
             last < w.panels ? last : w.panels, p.biases[i], work_of.added, work_of.out[i], scratch);
    first -= w.panels, last -= w.panels;
  }
}

size_t find_inputs(Work* work, Pass* pass) {
  const Product& p = *work->product;
  size_t needed = 0;
  for (int i = 0; i < p.count; i++) {
    const Weight& w = p.weights[i];
    int n = 0;
    while (n < work->count && work->inputs[n].block != w.block) n++;
    work->reads[i] = n;
    work->total += w.panels;
    if (are_apart(*p.kernels, w, tiles_of(work->rows, *p.kernels))) pass->needs(size_t(2 * w.panel_bytes()));
    if (n < work->count) continue;
    Input& in = work->inputs[work->count++];
    in.block = w.block, in.blocks = w.blocks;
    needed += rounded(size_t(work->rows * in.row_bytes())) + 2 * rounded(size_t(work->rows * in.blocks) * 4);
    pass->needs(size_t(w.inputs * 4 + in.blocks * in.block));
  }
  const int64_t channels = p.weights[0].inputs;
  work->chunks = p.before.norm != nullptr ? 1 : (channels + CHUNK - 1) / CHUNK;  // a norm needs all inputs
  return needed;
}

uint8_t* place_inputs(Work* work, uint8_t* at) {
  for (int i = 0; i < work->count; i++) {
    Input& in = work->inputs[i];
    const size_t each = rounded(size_t(work->rows * in.blocks) * 4);
    in.values = reinterpret_cast<int8_t*>(at);
    in.scales = reinterpret_cast<float*>(at + rounded(size_t(work->rows * in.row_bytes())));
    in.sums = reinterpret_cast<int32_t*>(reinterpret_cast<uint8_t*>(in.scales) + each);
    at = reinterpret_cast<uint8_t*>(in.sums) + each;
  }
  return at;
}

int64_t pieces_of_inputs(const Work& work) { return tiles_of(work.rows, *work.product->kernels) * work.chunks; }
}  // namespace eagle
