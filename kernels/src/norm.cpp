// RowExactNorm: a norm over the mean square of every W values, as of a head or of a row, and a sum after it.
//
//   inputs    x [.., n * W] fp32; factors [W] fp32, an initializer; added, as x, optional
//   output    as x: x / root(mean(x^2) + epsilon) * factors, then + added
//   attributes  epsilon
#include <string.h>

#include "kernels.hpp"
#include "operators.hpp"
#include "steps.hpp"

namespace eagle {
namespace {
constexpr int FACTORS = 1, ADDED = 2, INPUTS = 3;  // places of inputs
constexpr int64_t MANY = 8192;                     // values that are worth several threads

struct Norm {
  const Kernels* kernels = nullptr;
  Before before;
  int64_t width = 0;
};

ort::Status read(const Source& source, Norm* p) {
  ort::Tensor factors;
  RETURN_IF_ERROR(source.constant(FACTORS, &factors));
  p->width = factors.dims[0];
  if (!factors.is(ort::FLOAT, p->width) || p->width < 1 || p->width % 8 ||
      !source.attribute("epsilon", &p->before.epsilon) || !(p->before.epsilon >= 0))
    return ort::error("RowExactNorm: factors are not fp32 of a multiple of 8, or epsilon is missing");
  p->kernels = &chosen();
  return source.copy(factors, &p->before.norm);
}

struct Work {  // of one pass
  const Norm* norm;
  const float *x, *added;
  float* out;
};

void compute(const void* work, int64_t first, int64_t last, uint8_t*) {
  const Work& w = *static_cast<const Work*>(work);
  const int64_t width = w.norm->width;
  for (int64_t i = first * width; i < last * width; i += width)
    w.norm->kernels->before(w.norm->before, w.x + i, nullptr, width, w.out + i);
  for (int64_t i = first * width; i < last * width && w.added != nullptr; i++) w.out[i] += w.added[i];
}

ort::Status plan(const void* what, Pass* pass) {
  const Norm& p = *static_cast<const Norm*>(what);
  const ort::Tensor &x = pass->input(0), &added = pass->input(ADDED);
  if (x.type != ort::FLOAT || x.rank < 1 || x.dims[x.rank - 1] % p.width)
    return ort::error("RowExactNorm: x is not fp32 with a multiple of the norm's width as its last dimension");
  if (!added.is_absent_or(x.count())) return ort::error("RowExactNorm: added has another shape or type");
  Work* work = pass->memory.get_zeros<Work>(1);
  if (work == nullptr) return ort::error(NO_MEMORY);
  *work = {&p, static_cast<const float*>(x.data), static_cast<const float*>(added.data), nullptr};
  RETURN_IF_ERROR(pass->output(0, x.dims, x.rank, &work->out));
  if (x.count() > 0) pass->add(compute, work, x.count() / p.width, x.count() < MANY);
  return nullptr;
}

constexpr Operator DECLARED = {"RowExactNorm", INPUTS, 2, 1, 1, [](size_t) { return int(ort::FLOAT); }, false};
constexpr ort::CustomOp OPERATOR = declaration<DECLARED>(create_node<NORMS>);
}  // namespace

const Kind NORMS = {INPUTS, [](int i) { return i != FACTORS; }, create_kind<Norm, read>, plan};

const ort::CustomOp* norm_operator() { return &OPERATOR; }
}  // namespace eagle
