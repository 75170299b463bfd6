// ExactSinCos: cosines and sines of the angles that heads are rotated by. C's libraries and ONNX Runtime on other
// processors differ in the last bit; this has sums, products and whole numbers of fp64 alone, which are the same everywhere.
//
//   inputs    angles [..] fp32
//   outputs   cosines, sines, as angles: fp32, each multiplied by factor; right for angles below 2^20, beyond
//             them less and less, and the same everywhere
//   attributes  factor (1 where absent)
#include "kernels.hpp"
#include "operators.hpp"
#include "steps.hpp"

namespace eagle {
namespace {
constexpr int64_t MANY = 4096;  // angles that are worth several threads
// pi / 2 in two parts: 33 bits, so that a whole number below 2^20 times it is exact, and the rest.
constexpr double QUARTER = 0x1.921fb544p0, QUARTER_REST = 0x1.0b4611a626331p-34;
constexpr double WHOLE = 0x1.8p52;  // added and taken away again, it rounds to a whole number

struct SinCos {
  float factor = 1;
};

struct Work {  // of one pass
  const float* angles;
  float *cosines, *sines, factor;
};

ort::Status read(const Source& source, SinCos* p) {
  source.attribute("factor", &p->factor);
  return source.outputs == 2 ? nullptr : ort::error("ExactSinCos: it has two outputs, cosines and sines");
}

void compute(const void* work, int64_t first, int64_t last, uint8_t*) {
  const Work& w = *static_cast<const Work*>(work);
  for (int64_t i = first; i < last; i++) {
    const double x = double(w.angles[i]);
    const double quarters = (x * 0x1.45f306dc9c883p-1 + WHOLE) - WHOLE;  // x / (pi / 2), rounded
    const double r = (x - quarters * QUARTER) - quarters * QUARTER_REST, z = r * r;
    // The series of Taylor up to r^13 and r^14: |r| <= pi / 4, so what is left out is below 1e-13.
    double sine = z * (1.0 / 6227020800) - 1.0 / 39916800;
    sine = sine * z + 1.0 / 362880;
    sine = sine * z - 1.0 / 5040;
    sine = sine * z + 1.0 / 120;
    sine = sine * z - 1.0 / 6;
    sine = sine * z * r + r;
    double cosine = 1.0 / 479001600 - z * (1.0 / 87178291200);
    cosine = cosine * z - 1.0 / 3628800;
    cosine = cosine * z + 1.0 / 40320;
    cosine = cosine * z - 1.0 / 720;
    cosine = cosine * z + 1.0 / 24;
    cosine = cosine * z - 1.0 / 2;
    cosine = cosine * z + 1;
    const double turn = quarters - 4 * (((quarters * 0.25 - 0.375) + WHOLE) - WHOLE);  // of 0, 1, 2, 3
    const bool odd = turn == 1 || turn == 3;
    const double up = odd ? cosine : sine, along = odd ? sine : cosine;
    w.sines[i] = float(turn >= 2 ? -up : up) * w.factor;
    w.cosines[i] = float(turn == 1 || turn == 2 ? -along : along) * w.factor;
  }
}

ort::Status plan(const void* what, Pass* pass) {
  const ort::Tensor& angles = pass->input(0);
  if (angles.type != ort::FLOAT) return ort::error("ExactSinCos: the angles are not fp32");
  Work* work = pass->memory.get_zeros<Work>(1);
  if (work == nullptr) return ort::error(NO_MEMORY);
  *work = {static_cast<const float*>(angles.data), nullptr, nullptr, static_cast<const SinCos*>(what)->factor};
  RETURN_IF_ERROR(pass->output(0, angles.dims, angles.rank, &work->cosines));
  RETURN_IF_ERROR(pass->output(1, angles.dims, angles.rank, &work->sines));
  if (angles.count() > 0) pass->add(compute, work, angles.count(), angles.count() < MANY);
  return nullptr;
}

constexpr Operator DECLARED = {"ExactSinCos", 1, 1, 2, 2, [](size_t) { return int(ort::FLOAT); }, false};
constexpr ort::CustomOp OPERATOR = declaration<DECLARED>(create_node<SINCOS>);
}  // namespace

const Kind SINCOS = {1, [](int) { return true; }, create_kind<SinCos, read>, plan};

const ort::CustomOp* sincos_operator() { return &OPERATOR; }
}  // namespace eagle
