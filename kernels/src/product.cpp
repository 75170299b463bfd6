// RowExactMatMul: one input times up to three weights of 4 or 8 bits in blocks of input channels, with what surrounds
// such products in a transformer.
//
//   inputs    x [.., K] fp32; for each of three weights levels [N, blocks, bytes] uint8, steps [N, blocks] fp16, and zero
//             levels [N, bytes] uint8 or nothing, in the layout of ONNX Runtime's MatMulNBits, as initializers (zero
//             levels of four bits also in sixteenths, [N, blocks, 1] uint8); then, each optional: norm [K] fp32, an initializer; up [.., K] fp32; added [.., N] fp32; for each weight a bias
//             [N] fp32, an initializer
//   outputs   [.., N] fp32 for each weight
//   attributes  K; bits, N and block of each weight, as bits_0, N_0, block_0, ...; first_0, ...: which row of levels its
//               columns begin with (0), so that parts of one weight may be several; epsilon, of the norm; activation
//
// With up, activation(x) * up takes the place of x (1: SiLU, 2: GELU by tanh; 3: see BOUNDED, with attributes alpha and
// limit, and without norm; 4: its sigmoid alone); with norm, x / root(mean(x^2) + epsilon) * norm does after that. A bias is
// added to its product; then `added` is, to the product of the only weight.
#include <stdio.h>
#include <string.h>

#include "operators.hpp"
#include "product.hpp"

namespace eagle {
namespace {
constexpr int NORM = 3 * MOST + 1, UP = NORM + 1, ADDED = UP + 1, BIAS = ADDED + 1,
              INPUTS = BIAS + MOST;  // places of inputs

ort::Status read_weight_of(const Source& source, int index, int64_t inputs, const Kernels& kernels, Weight* w) {
  int64_t bits = 0, block = 0, columns = 0, first = 0;
  auto attribute = [&](const char* name, int64_t* value) {
    char full[16];
    snprintf(full, sizeof full, "%s_%d", name, index);
    return source.attribute(full, value);
  };
  attribute("first", &first);
  if (!attribute("bits", &bits) || !attribute("N", &columns) || !attribute("block", &block))
    return ort::error("RowExactMatMul: bits, N or block of a weight is missing");
  Stored stored;
  RETURN_IF_ERROR(source.constant(3 * index + 1, &stored.levels));
  RETURN_IF_ERROR(source.constant(3 * index + 2, &stored.steps));
  source.constant_if_given(3 * index + 3, &stored.zeros);
  return read_weight(stored, bits, block, first, inputs, columns, kernels, source.weights, w);
}

ort::Status read_numbers(const Source& source, int input, int64_t count, const char* message, const float** out) {
  ort::Tensor numbers;
  source.constant_if_given(input, &numbers);
  return copy_numbers(source, numbers, count, message, out);
}

ort::Status read_before(const Source& source, int64_t channels, Product* p) {
  if (!read_activation(source, &p->before))
    return ort::error("RowExactMatMul: activation, alpha or limit have a value that is not known");
  constexpr const char* UNSOUND = "RowExactMatMul: norm, epsilon or activation do not fit each other or K";
  RETURN_IF_ERROR(read_numbers(source, NORM, channels, UNSOUND, &p->before.norm));
  const bool sound = p->before.norm == nullptr || (source.attribute("epsilon", &p->before.epsilon) &&
                                                   p->before.epsilon >= 0 && p->before.activation != BOUNDED);
  return !sound || (p->before.any() && channels % 8) ? ort::error(UNSOUND) : nullptr;
}

ort::Status read(const Source& source, Product* p) {
  int64_t channels = 0;
  if (!source.attribute("K", &channels) || channels < 1 || channels > (1 << 24))
    return ort::error("RowExactMatMul: K must be from 1 to 2^24");
  if (source.outputs < 1 || source.outputs > MOST) return ort::error("RowExactMatMul has one to three weights");
  p->kernels = &chosen();
  p->count = source.outputs;
  RETURN_IF_ERROR(read_before(source, channels, p));
  for (int i = 0; i < p->count; i++) {
    RETURN_IF_ERROR(read_weight_of(source, i, channels, *p->kernels, &p->weights[i]));
    RETURN_IF_ERROR(read_numbers(source, BIAS + i, p->weights[i].columns,
                                 "RowExactMatMul: a bias has another shape or type", &p->biases[i]));
  }
  return nullptr;
}

ort::Status plan(const void* what, Pass* pass) {
  const Product& p = *static_cast<const Product*>(what);
  const ort::Tensor &x = pass->input(0), &up = pass->input(UP), &added = pass->input(ADDED);
  const int64_t channels = p.weights[0].inputs;
  if (!x.is_rows(channels)) return ort::error("RowExactMatMul: x is not fp32 with K as its last dimension");
  const int64_t rows = x.count() / channels;
  const bool gates = p.before.activation != NONE;
  if (gates != (up.data != nullptr) || !up.is_absent_or(x.count()))
    return ort::error("RowExactMatMul: up has another shape or type, or stands without an activation");
  if (!added.is_absent_or(rows * p.weights[0].columns) || (added.data != nullptr && p.count > 1))
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
  }
  if (rows == 0) return nullptr;
  uint8_t* memory = pass->memory_at(&pass->work, find_inputs(work, pass));
  if (memory == nullptr) return ort::error(NO_MEMORY);
  place_inputs(work, memory);
  const int64_t pieces = pieces_of_inputs(*work), inputs = rows * channels * (gates ? GATED : 1);
  pass->add(read_tiles, work, pieces, inputs < MANY || pieces == 1);
  const bool few = work->total * PANEL * channels * ((rows + 3) / 4) < FEW;
  pass->add(multiply, work, work->total, few, p.weights[0].levels, p.weights[0].panels * p.weights[0].panel_bytes());
  return nullptr;
}

int type_of(size_t i) { return i == 0 || i >= NORM ? ort::FLOAT : i % 3 == 2 ? ort::FLOAT16 : ort::UINT8; }
constexpr Operator DECLARED = {"RowExactMatMul", INPUTS, 3, MOST, 1, type_of, false};
constexpr ort::CustomOp OPERATOR = declaration<DECLARED>(create_node<PRODUCT>);
}  // namespace

bool read_activation(const Source& source, Before* before) {
  int64_t activation = NONE;
  source.attribute("activation", &activation);
  before->activation = static_cast<int>(activation);
  if (activation == BOUNDED)
    return source.attribute("alpha", &before->alpha) && source.attribute("limit", &before->limit) && before->limit >= 0;
  return activation >= NONE && activation <= SIGMOID;
}

const Kind PRODUCT = {INPUTS, [](int i) { return i == 0 || i == UP || i == ADDED; }, create_kind<Product, read>, plan};

const ort::CustomOp* product_operator() { return &OPERATOR; }
}  // namespace eagle
