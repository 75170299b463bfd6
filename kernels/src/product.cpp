// RowExactMatMul: one input times up to three weights of 4 or 8 bits in blocks of input channels, with what surrounds
// such products in a transformer.
//
//   inputs    x [.., K] fp32; for each of three weights levels [N, blocks, bytes] uint8, steps [N, blocks] fp16, and zero
//             levels [N, bytes] uint8 or nothing, in the layout of ONNX Runtime's MatMulNBits, as initializers; then,
//             each optional: norm [K] fp32, an initializer; up [.., K] fp32; added [.., N] fp32; for each weight a bias
//             [N] fp32, an initializer
//   outputs   [.., N] fp32 for each weight
//   attributes  K; bits, N and block of each weight, as bits_0, N_0, block_0, ...; first_0, ...: which row of levels its
//               columns begin with (0), so that parts of one weight may be several; epsilon, of the norm; activation
//
// With norm, x / root(mean(x^2) + epsilon) * norm takes the place of x; with up, activation(x) * up does (1: SiLU, 2: GELU
// by tanh). A bias is added to its product; then `added` is, to the product of the only weight.
#include <string.h>

#include "arena.hpp"
#include "kernels.hpp"
#include "operators.hpp"
#include "steps.hpp"

namespace eagle {
namespace {
constexpr int MOST = 3;  // weights of one operator
constexpr int NORM = 3 * MOST + 1, UP = NORM + 1, ADDED = UP + 1, BIAS = ADDED + 1,
              INPUTS = BIAS + MOST;       // places of inputs
constexpr int64_t MANY = 8192;            // inputs that are worth several threads' quantising
constexpr int64_t GATED = 4;              // inputs that take as long to quantise as one that is gated first, about
constexpr int64_t EARLY = 4096;           // bytes of weights between those that are read and those that are fetched
constexpr int64_t CHUNK = 256;            // inputs of a row that one thread quantises: blocks have no more
constexpr int64_t FEW = 50000;            // multiply-adds that one thread computes as fast as several: two microseconds
constexpr int64_t INPUTS_AT_ONCE = 1024;  // whose levels of one panel stay in the first cache while rows change

struct Product {
  int count = 0;
  const Kernels* kernels = nullptr;
  Before before;
  float* norm = nullptr;  // before.norm
  Weight weights[MOST] = {};
  float* biases[MOST] = {};
  ~Product() {
    for (Weight& w : weights) release_weights(w.levels), release_weights(w.meta);
    for (float* bias : biases) release(bias);
    release(norm);
  }
};

uint8_t zero_of(const ort::Tensor& t, const Weight& w, int64_t n, int64_t b) {
  if (t.data == nullptr) return w.bits == 8 ? 128 : 8;
  const uint8_t* p = static_cast<const uint8_t*>(t.data) + n * t.dims[1];
  return w.bits == 8 ? p[b] : b % 2 ? p[b / 2] >> 4 : p[b / 2] & 15;
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
  const uint8_t flip = w.bits == 8 && kernels.signed_levels ? 128 : 0;
  const int64_t group = w.bits == 4 ? 4 : kernels.group, bytes = w.block * PANEL * w.bits / 8;
  uint8_t columns[PANEL][256];
  for (int64_t panel = 0; panel < w.panels; panel++)
    for (int64_t b = 0; b < w.blocks; b++) {
      uint8_t* out = w.levels + panel * w.panel_bytes() + b * bytes;
      uint8_t* meta = w.meta + (panel * w.blocks + b) * META;
      for (int64_t c = 0; c < PANEL; c++) {
        const int64_t column = panel * PANEL + c, n = first + column;
        const bool real = column < w.columns;
        uint16_t step = 0;
        if (real) memcpy(&step, static_cast<const uint8_t*>(steps.data) + 2 * (n * w.blocks + b), 2);
        memcpy(meta + 2 * c, &step, 2);
        meta[32 + c] = real ? zero_of(zeros, w, n, b) ^ flip : 0;
        if (real) read_block(levels, w, n, b, columns[c]);
        else memset(columns[c], 0, sizeof columns[c]);
      }
      if (w.bits == 4)
        for (int64_t k = 0; k < w.block; k += 4)
          for (int64_t c = 0; c < 8; c++)
            for (int64_t i = 0; i < 4; i++)
              *out++ = static_cast<uint8_t>(columns[c][k + i] | columns[c + 8][k + i] << 4);
      else
        for (int64_t k = 0; k < w.block; k += group)
          for (int64_t c = 0; c < PANEL; c++)
            for (int64_t i = 0; i < group; i++) *out++ = columns[c][k + i] ^ flip;
    }
}

ort::Status read_weight(const Source& source, int index, int64_t inputs, const Kernels& kernels, Weight* w) {
  char name[16] = "bits_0";
  const char last = static_cast<char>('0' + index);
  int64_t bits = 0, block = 0, columns = 0, first = 0;
  name[5] = last;
  const bool has_bits = source.attribute(name, &bits);
  memcpy(name, "N_0", 4), name[2] = last;
  const bool has_columns = source.attribute(name, &columns);
  memcpy(name, "block_0", 8), name[6] = last;
  const bool has_block = source.attribute(name, &block);
  memcpy(name, "first_0", 8), name[6] = last;
  source.attribute(name, &first);
  if (!has_bits || !has_columns || !has_block)
    return ort::error("RowExactMatMul: bits, N or block of a weight is missing");
  if ((bits != 4 && bits != 8) || block < 16 || block > 256 || (block & (block - 1)) || columns < 1 ||
      columns > (int64_t(1) << 31) || first < 0 || first > (int64_t(1) << 31))
    return ort::error("RowExactMatMul: bits must be 4 or 8, and block a power of two from 16 to 256");
  *w = {inputs,    columns, block,  (inputs + block - 1) / block, (columns + PANEL - 1) / PANEL,
        int(bits), nullptr, nullptr};
  ort::Tensor levels, steps, zeros;
  RETURN_IF_ERROR(source.constant(3 * index + 1, &levels));
  RETURN_IF_ERROR(source.constant(3 * index + 2, &steps));
  source.constant_if_given(3 * index + 3, &zeros);
  const int64_t rows = levels.dims[0];
  const bool sound = levels.is(ort::UINT8, 3) && rows >= first + columns && levels.dims[1] == w->blocks &&
                     levels.dims[2] == block * bits / 8 && steps.is(ort::FLOAT16, 2) && steps.dims[0] == rows &&
                     steps.dims[1] == w->blocks;
  const bool sound_zeros = zeros.data == nullptr || (zeros.is(ort::UINT8, 2) && zeros.dims[0] == rows &&
                                                     zeros.dims[1] == (w->blocks * bits + 7) / 8);
  if (!sound || !sound_zeros)
    return ort::error("RowExactMatMul: a weight's levels, steps or zero levels have another shape or type");
  w->levels = allocate_weights(static_cast<size_t>(w->panels * w->panel_bytes()) + 64);
  w->meta = allocate_weights(static_cast<size_t>(w->panels * w->blocks * META) + 64);
  if (w->levels == nullptr || w->meta == nullptr) return ort::error(NO_MEMORY);
  pack(kernels, levels, steps, zeros, first, w);
  return nullptr;
}

// A copy of a constant's fp32 numbers; null if the node has none there.
ort::Status read_numbers(const Source& source, int input, int64_t count, const char* message, float** out) {
  ort::Tensor numbers;
  source.constant_if_given(input, &numbers);
  if (numbers.data == nullptr) return nullptr;
  if (!numbers.is(ort::FLOAT, 1) || numbers.dims[0] != count) return ort::error(message);
  *out = reinterpret_cast<float*>(allocate(static_cast<size_t>(count) * 4));
  if (*out == nullptr) return ort::error(NO_MEMORY);
  memcpy(*out, numbers.data, static_cast<size_t>(count) * 4);
  return nullptr;
}

ort::Status read_before(const Source& source, int64_t channels, Product* p) {
  int64_t activation = NONE;
  source.attribute("activation", &activation);
  if (activation < NONE || activation > GELU) return ort::error("RowExactMatMul: activation must be 0, 1 or 2");
  p->before.activation = static_cast<int>(activation);
  constexpr const char* UNSOUND = "RowExactMatMul: norm, epsilon or activation do not fit each other or K";
  RETURN_IF_ERROR(read_numbers(source, NORM, channels, UNSOUND, &p->norm));
  p->before.norm = p->norm;
  const bool sound = p->norm == nullptr ||
                     (source.attribute("epsilon", &p->before.epsilon) && p->before.epsilon >= 0 && activation == NONE);
  return !sound || (p->before.any() && channels % 8) ? ort::error(UNSOUND) : nullptr;
}

ort::Status create(const Source& source, void** what) {
  int64_t channels = 0;
  if (!source.attribute("K", &channels) || channels < 1 || channels > (1 << 24))
    return ort::error("RowExactMatMul: K must be from 1 to 2^24");
  if (source.outputs < 1 || source.outputs > MOST) return ort::error("RowExactMatMul has one to three weights");
  Product* p = make<Product>();
  if (p == nullptr) return ort::error(NO_MEMORY);
  p->kernels = &chosen();
  p->count = source.outputs;
  ort::Status status = read_before(source, channels, p);
  for (int i = 0; i < p->count && status == nullptr; i++)
    if (!(status = read_weight(source, i, channels, *p->kernels, &p->weights[i])))
      status = read_numbers(source, BIAS + i, p->weights[i].columns, "RowExactMatMul: a bias has another shape or type",
                            &p->biases[i]);
  if (status) unmake(p);
  else *what = p;
  return status;
}

// Rows of a tile, quantised for one size of blocks and one layout, and the tiles that they make.
struct Input {
  int64_t block = 0, blocks = 0;
  bool wide = false;
  int most = 1;               // rows of a tile
  uint8_t* values = nullptr;  // [rows, blocks * block], tile by tile
  float* scales = nullptr;
  int32_t* sums = nullptr;
  int64_t row_bytes() const { return blocks * block * (wide ? 2 : 1); }
  int64_t tiles(int64_t rows) const { return (rows + most - 1) / most; }
};

// Rows of the tile that begins at `row`: as many as fit, but halves where one tile would be nearly empty.
int tile_rows(int64_t row, int64_t rows, int most) {
  const int64_t left = rows - row;
  if (left <= most) return static_cast<int>(left);
  return static_cast<int>(left < 2 * most ? (left + 1) / 2 : most);
}

void interleave(const int8_t* row, int64_t n, int rows, int r, uint8_t* tile, bool wide) {
  if (!wide) {
    for (int64_t k = 0; k < n; k += 4) memcpy(tile + (k / 4 * rows + r) * 4, row + k, 4);
    return;
  }
  for (int64_t k = 0; k < n; k += 2) {
    const int16_t pair[2] = {row[k], row[k + 1]};
    memcpy(tile + (k / 2 * rows + r) * 4, pair, 4);
  }
}

constexpr size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Quantises inputs first .. last - 1 of n rows from row t on, which make one tile. first: a multiple of CHUNK. work: K
// floats, and blocks * block bytes after them.
void read_tile(const Product& p, const float* x, const float* up, int64_t t, int n, const Input& in, int64_t first,
               int64_t last, float* work) {
  const int64_t channels = p.weights[0].inputs, count = last - first, blocks = (count + in.block - 1) / in.block;
  int8_t* bytes = reinterpret_cast<int8_t*>(work + channels);
  uint8_t* tile = in.values + t * in.row_bytes() + first * n * (in.wide ? 2 : 1);
  for (int r = 0; r < n; r++) {
    const int64_t from = (t + r) * channels + first, at = (t + r) * in.blocks + first / in.block;
    const float* row = x + from;
    if (p.before.any()) {
      p.kernels->before(p.before, row, up == nullptr ? nullptr : up + from, count, work);
      row = work;
    }
    p.kernels->quantise(row, count, in.block, blocks, bytes, in.scales + at, in.sums + at);
    interleave(bytes, blocks * in.block, n, r, tile, in.wide);
  }
}

// Panels first .. last - 1 of one weight for all rows. bias: [N] to add, or null; added: [rows, N] to add then, or null.
void panels(const Kernels& kernels, const Weight& w, const Input& in, int64_t rows, int64_t first, int64_t last,
            const float* bias, const float* added, float* y) {
  const int64_t tiles = in.tiles(rows), some = tiles == 1 ? w.blocks : INPUTS_AT_ONCE / w.block;
  const int64_t block_bytes = w.block * PANEL * w.bits / 8, unit = w.block * (in.wide ? 2 : 1);
  float edge[8 * PANEL];
  for (int64_t panel = first; panel < last; panel++) {
    const int64_t column = panel * PANEL, left = w.columns - column;
    const uint8_t* levels = w.levels + panel * w.panel_bytes();
    for (int64_t b = 0; b < w.blocks; b += some) {
      const int64_t count = b + some < w.blocks ? some : w.blocks - b, bytes = count * block_bytes;
      const uint8_t* here = levels + b * block_bytes;
      for (int64_t t = 0, tile = 0; t < rows; tile++) {
        const int n = tile_rows(t, rows, in.most);
        const Ahead ahead = {here + (tiles == 1 ? EARLY : bytes + bytes * tile / tiles), tiles};
        const Rows x = {in.values + t * in.row_bytes() + b * unit * n, in.scales + t * in.blocks,
                        in.sums + t * in.blocks};
        float* out = y + t * w.columns + column;
        if (left >= PANEL) kernels.product(w, panel, b, count, n, x, out, w.columns, ahead);
        else {
          for (int r = 0; r < n && b; r++) memcpy(edge + r * PANEL, out + r * w.columns, size_t(left) * 4);
          kernels.product(w, panel, b, count, n, x, edge, PANEL, ahead);
          for (int r = 0; r < n; r++) memcpy(out + r * w.columns, edge + r * PANEL, size_t(left) * 4);
        }
        const int64_t real = b + count < w.blocks ? 0 : left < PANEL ? left : PANEL;  // columns that are complete
        for (int r = 0; r < n && real && bias != nullptr; r++)
          for (int64_t c = 0; c < real; c++) out[r * w.columns + c] += bias[column + c];
        for (int r = 0; r < n && real && added != nullptr; r++)
          for (int64_t c = 0; c < real; c++) out[r * w.columns + c] += added[(t + r) * w.columns + column + c];
        t += n;
      }
    }
  }
}

struct Work {  // of one pass
  const Product* product;
  const float *x, *up, *added;
  int64_t rows, total;  // panels of all weights
  int64_t chunks;       // that the inputs of a row are quantised in
  int count;            // of inputs
  Input inputs[MOST];
  int reads[MOST];  // which of them a weight reads
  float* out[MOST];
};

// Quantises some pieces: chunks of the tiles that begin in a range of rows. The last two of all rows share them evenly.
void read_tiles(const void* work, int64_t from, int64_t to, uint8_t* scratch) {
  const Work& w = *static_cast<const Work*>(work);
  const int64_t channels = w.product->weights[0].inputs;
  for (int64_t piece = from; piece < to; piece++) {
    const int64_t number = piece / w.chunks, begin = piece % w.chunks * CHUNK;
    const int64_t end = w.chunks == 1 || begin + CHUNK > channels ? channels : begin + CHUNK;
    for (int i = 0; i < w.count; i++) {
      const Input& in = w.inputs[i];
      const int64_t first = number * in.most, last = first + in.most < w.rows ? first + in.most : w.rows;
      for (int64_t t = 0; t < last; t += tile_rows(t, w.rows, in.most))
        if (t >= first)
          read_tile(*w.product, w.x, w.up, t, tile_rows(t, w.rows, in.most), in, begin, end,
                    reinterpret_cast<float*>(scratch));
    }
  }
}

// Panels first .. last - 1, those of all weights being numbered one after the other.
void multiply(const void* work, int64_t first, int64_t last, uint8_t*) {
  const Work& work_of = *static_cast<const Work*>(work);
  const Product& p = *work_of.product;
  for (int i = 0; i < p.count; i++) {
    const Weight& w = p.weights[i];
    if (first < w.panels && last > 0)
      panels(*p.kernels, w, work_of.inputs[work_of.reads[i]], work_of.rows, first < 0 ? 0 : first,
             last < w.panels ? last : w.panels, p.biases[i], work_of.added, work_of.out[i]);
    first -= w.panels, last -= w.panels;
  }
}

// Finds which inputs the weights read, and memory for them.
ort::Status lay_out_inputs(const Product& p, Pass* pass, Work* work) {
  size_t needed = 0;
  for (int i = 0; i < p.count; i++) {
    const Weight& w = p.weights[i];
    const bool wide = w.bits == 8 && p.kernels->wide_inputs;
    const int most = p.kernels->tile_rows[w.bits == 8];
    int n = 0;
    while (n < work->count &&
           !(work->inputs[n].block == w.block && work->inputs[n].wide == wide && work->inputs[n].most == most))
      n++;
    work->reads[i] = n;
    if (n < work->count) continue;
    Input& in = work->inputs[work->count++];
    in.block = w.block, in.blocks = w.blocks, in.wide = wide, in.most = most;
    needed += rounded(size_t(work->rows * in.row_bytes())) + 2 * rounded(size_t(work->rows * in.blocks) * 4);
    pass->needs(size_t(w.inputs * 4 + in.blocks * in.block));
  }
  uint8_t* at = pass->memory_at(&pass->work, needed);
  if (at == nullptr) return ort::error(NO_MEMORY);
  for (int i = 0; i < work->count; i++) {
    Input& in = work->inputs[i];
    const size_t each = rounded(size_t(work->rows * in.blocks) * 4);
    in.values = at;
    in.scales = reinterpret_cast<float*>(at + rounded(size_t(work->rows * in.row_bytes())));
    in.sums = reinterpret_cast<int32_t*>(reinterpret_cast<uint8_t*>(in.scales) + each);
    at = reinterpret_cast<uint8_t*>(in.sums) + each;
  }
  return nullptr;
}

ort::Status plan(const void* what, Pass* pass) {
  const Product& p = *static_cast<const Product*>(what);
  const ort::Tensor &x = pass->input(0), &up = pass->input(UP), &added = pass->input(ADDED);
  const int64_t channels = p.weights[0].inputs;
  if (x.type != ort::FLOAT || x.rank < 1 || x.dims[x.rank - 1] != channels)
    return ort::error("RowExactMatMul: x is not fp32 with K as its last dimension");
  const int64_t rows = x.count() / channels;
  const bool gates = p.before.activation != NONE;
  if (gates != (up.data != nullptr) || (gates && (up.type != ort::FLOAT || up.count() != x.count())))
    return ort::error("RowExactMatMul: up has another shape or type, or stands without an activation");
  if (added.data != nullptr &&
      (p.count > 1 || added.type != ort::FLOAT || added.count() != rows * p.weights[0].columns))
    return ort::error("RowExactMatMul: added has another shape or type");
  Work* work = pass->memory.get_zeros<Work>(1);
  if (work == nullptr) return ort::error(NO_MEMORY);
  *work = Work{};
  work->product = &p, work->rows = rows;
  work->x = static_cast<const float*>(x.data), work->up = static_cast<const float*>(up.data);
  work->added = static_cast<const float*>(added.data);
  int64_t dims[6];
  memcpy(dims, x.dims, sizeof dims);
  for (int i = 0; i < p.count; i++) {
    dims[x.rank - 1] = p.weights[i].columns;
    RETURN_IF_ERROR(pass->output(i, dims, x.rank, &work->out[i]));
    work->total += p.weights[i].panels;
  }
  if (rows == 0) return nullptr;
  RETURN_IF_ERROR(lay_out_inputs(p, pass, work));
  // Each input has tiles of its own size; pieces are those of the first, whose ranges of rows all of them take.
  int64_t tiles = 1;
  for (int i = 0; i < work->count; i++) {
    const int64_t of_input = work->inputs[i].tiles(rows);
    tiles = of_input > tiles ? of_input : tiles;
  }
  work->chunks = p.norm != nullptr ? 1 : (channels + CHUNK - 1) / CHUNK;  // a norm needs all inputs
  const int64_t inputs = rows * channels * (gates ? GATED : 1);
  pass->add(read_tiles, work, tiles * work->chunks, inputs < MANY || tiles * work->chunks == 1);
  const bool few = work->total * PANEL * channels * ((rows + 3) / 4) < FEW;
  pass->add(multiply, work, work->total, few, p.weights[0].levels, p.weights[0].panels * p.weights[0].panel_bytes());
  return nullptr;
}

constexpr Operator DECLARED = {"RowExactMatMul",
                               INPUTS,
                               3,
                               MOST,
                               1,
                               [](size_t i) {
                                 return int(i == 0 || i >= NORM ? ort::FLOAT : i % 3 == 2 ? ort::FLOAT16 : ort::UINT8);
                               },
                               false};
constexpr ort::CustomOp OPERATOR =
    declaration<DECLARED>([](const ort::CustomOp*, const void*, const void* info, void** kernel) {
      return create_one(PRODUCT, info, kernel);
    });
}  // namespace

const Kind PRODUCT = {INPUTS, [](int i) { return i == 0 || i == UP || i == ADDED; }, create,
                      [](void* what) { unmake(static_cast<Product*>(what)); }, plan};

const ort::CustomOp* product_operator() { return &OPERATOR; }
}  // namespace eagle
