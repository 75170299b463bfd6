// A step of RowExactSteps: the short convolution of a layer (LFM2), over the same cache as attention's. A row's result
// depends on itself and on the tokens before it that it sees, in their order, and on nothing else.
//
//   inputs   rows [1, T, 3 H] fp32: b, c and x of each
//            past keys, past values, position_ids, tree_mask: as of ExactTreeAttention, in fp32 or fp16, with a head-major
//            past, and heads whose keys and values are H numbers together
//            weights [H, 1, K] fp32, an initializer, those of the row itself last; bias [H], another one, or nothing
//   outputs  [1, T, H]: c times the weighted sum of b * x of the row's last K tokens, itself included; new keys and values:
//            the first half of its own b * x, and the second
//   attributes  kv_heads, width
#include "attention.hpp"

namespace eagle {
namespace {
constexpr int CACHE = 1, WEIGHTS = 5, BIAS = 6, INPUTS = 7;  // places of inputs
constexpr int64_t MANY = 8192;                               // numbers that are worth several threads

struct Layer {
  Heads heads;
  Convolution convolution{};
};

ort::Status read(const Source& source, Layer* layer) {
  Heads& node = layer->heads;
  Convolution& own = layer->convolution;
  ort::Tensor weights, bias;
  RETURN_IF_ERROR(source.constant(WEIGHTS, &weights));
  source.constant_if_given(BIAS, &bias);
  const bool sizes = source.attribute("kv_heads", &node.kv_heads) && source.attribute("width", &node.width);
  if (!sizes || node.kv_heads < 1 || node.kv_heads > 4096 || node.width < 8 || node.width > MOST_WIDTH ||
      node.width % 8 || source.outputs != 3)
    return ort::error("RowExactConvolution: kv_heads or width are missing or wrong");
  node.heads = 2 * node.kv_heads, node.kernels = &chosen();
  const int64_t size = node.heads * node.width;
  own.tokens = weights.dims[2];
  if (own.tokens < 1 || own.tokens > MOST_TOKENS || !weights.is(ort::FLOAT, size, 1, own.tokens) ||
      !bias.is_absent_or(size))
    return ort::error("RowExactConvolution: weights or bias have another shape or type");
  RETURN_IF_ERROR(turn(source, weights, &own.weights));
  return bias.data == nullptr ? nullptr : source.copy(bias, &own.bias);
}

struct Part {  // the rows of one text
  Attention job;
  Convolution layer;
};
struct Work {
  Part* parts;
  const Kernels* kernels;
};

template <auto Kernels::* what>
void each_row(const void* work, int64_t first, int64_t last, uint8_t*) {
  const Work& w = *static_cast<const Work*>(work);
  for (const Part* part = w.parts; last > 0; first -= part->job.rows, last -= part->job.rows, part++)
    for (int64_t t = first < 0 ? 0 : first; t < last && t < part->job.rows; t++)
      (w.kernels->*what)(part->job, part->layer, t);
}

ort::Status plan(const void* what, Pass* pass) {
  const Layer& layer = *static_cast<const Layer*>(what);
  const ort::Tensor& inputs = pass->input(0);
  const int64_t rows = inputs.rank == 3 ? inputs.dims[1] : 0, size = layer.heads.heads * layer.heads.width;
  if (rows < 1 || rows > (1 << 20) || !inputs.is(ort::FLOAT, 1, rows, 3 * size))
    return ort::error("RowExactConvolution: rows have another shape or type");
  Attention all{};
  bool several = false;
  RETURN_IF_ERROR(read_cache(layer.heads, pass, CACHE, rows, &all, &several));
  if (all.numbers == BYTES || all.value_piece == 0)
    return ort::error("RowExactConvolution: past keys or values have another shape or type");
  all.q = all.k = all.v = static_cast<const float*>(inputs.data);
  const Visible& seen = pass->visible;
  Work* work = pass->memory.get_zeros<Work>(1);
  if (work == nullptr) return ort::error(NO_MEMORY);
  *work = {pass->memory.get_zeros<Part>(static_cast<size_t>(seen.count)), layer.heads.kernels};
  if (work->parts == nullptr) return ort::error(NO_MEMORY);
  for (int64_t i = 0; i < seen.count; i++) {
    Part& part = work->parts[i];
    part.layer = layer.convolution;
    part.layer.inputs = static_cast<const float*>(inputs.data) + seen.texts[i].row * 3 * size;
    RETURN_IF_ERROR(text_job(layer.heads, all, seen, i, several, &part.job));
  }
  const bool alone = rows * size < MANY;
  pass->add(each_row<&Kernels::keep>, work, rows, alone);
  pass->add(each_row<&Kernels::convolve>, work, rows, alone);
  return nullptr;
}
}  // namespace

ort::Status turn(const Source& source, const ort::Tensor& weights, const float** out) {
  const int64_t size = weights.dims[0], tokens = weights.dims[2];
  float* turned = reinterpret_cast<float*>(source.memory->get(static_cast<size_t>(size * tokens) * sizeof(float)));
  if (turned == nullptr) return ort::error(NO_MEMORY);
  for (int64_t i = 0; i < size; i++)
    for (int64_t k = 0; k < tokens; k++)
      turned[(tokens - 1 - k) * size + i] = static_cast<const float*>(weights.data)[i * tokens + k];
  *out = turned;
  return nullptr;
}

const Kind CONVOLUTION = {INPUTS, [](int i) { return i < WEIGHTS; }, create_kind<Layer, read>, plan};
}  // namespace eagle
