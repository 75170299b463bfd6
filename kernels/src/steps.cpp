// RowExactSteps: steps one after the other, each of which is what RowExactMatMul, ExactTreeAttention, RowExactNorm or
// ExactSinCos computes, a mixture of experts, a short convolution, a gated delta net or a state space. Threads stay
// together from the first to the last, and what only steps read is not a tensor of the graph.
//
//   inputs   plan [steps, 20 or 17] int64, an initializer: per step its kind (0: RowExactMatMul, 1: ExactTreeAttention,
//            2: RowExactNorm, 3: RowExactExperts, see experts.cpp, 4: ExactSinCos, 5: RowExactConvolution, see
//            convolution.cpp, 6: RowExactDelta, 7: RowExactScan, see delta.cpp), the places of its 16 inputs, or of
//            the first 13, and those of its 3 outputs. An input is -1 (absent), the number of an input of the node, or
//            -2 - n, n being an output of an earlier step, of which each has three numbers: 3 * step + output. An output
//            is the number of one of the node, -1 (read by steps alone), or -2 (the step has no such output)
//            then whatever the steps read
//   outputs  fp32
//   attributes  those of step i with the prefix "s<i>_"
#include "steps.hpp"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "operators.hpp"

namespace eagle {
namespace {
constexpr int64_t PLAN_WIDTH = 1 + STEP_INPUTS + STEP_OUTPUTS, MOST_STEPS = 4096, MOST_NODE_INPUTS = 1 << 17;
constexpr int WITHOUT_BIASES = 13;  // inputs of a step
constexpr size_t NAME = 40;         // bytes of an attribute's name
constexpr int64_t KIND_COUNT = 8;
const Kind* const KINDS[KIND_COUNT] = {&PRODUCT, &ATTENTION, &NORMS, &EXPERTS, &SINCOS, &CONVOLUTION, &DELTA, &SCAN};

// The node, or a node of one step. Values are numbered: first what the node gets, then what steps compute.
struct Steps {
  int64_t count = 0, given = 0, places = 0;  // steps; inputs of the node that are read in a pass; places of values
  Step* steps = nullptr;
  int64_t* inputs = nullptr;   // [given]: the node's number of it
  int64_t* outputs = nullptr;  // [3 * count]: the node's number of an output; negative: -1 - its place
  Memory memory{Use::NODE}, weights{Use::WEIGHTS};
  int64_t values() const { return given + count * STEP_OUTPUTS; }
  bool make_room(int64_t steps_count, int64_t most_inputs) {
    steps = memory.get_zeros<Step>(size_t(steps_count));
    inputs = memory.get_zeros<int64_t>(size_t(most_inputs));
    outputs = memory.get_zeros<int64_t>(size_t(steps_count * STEP_OUTPUTS));
    count = steps_count;
    return steps != nullptr && inputs != nullptr && outputs != nullptr;
  }
  // The value that is an input of the node.
  int64_t value_of(int64_t input) {
    for (int64_t i = 0; i < given; i++)
      if (inputs[i] == input) return i;
    inputs[given] = input;
    return given++;
  }
};

// Gives every value that only steps see a place that no other has as long as it is read.
bool find_places(Steps* all, Memory* memory) {
  const int64_t n = all->count * STEP_OUTPUTS;
  int64_t *last = memory->get_zeros<int64_t>(size_t(n)), *until = memory->get_zeros<int64_t>(size_t(n) + 1);
  if (last == nullptr || until == nullptr) return false;
  for (int64_t s = 0; s < all->count; s++)
    for (int64_t v : all->steps[s].in)
      if (v >= all->given) last[v - all->given] = s;
  for (int64_t v = 0; v < n; v++) {
    const int64_t step = v / STEP_OUTPUTS;
    if (all->outputs[v] != -1) continue;
    int64_t place = 0;
    while (place < all->places && until[place] >= step) place++;
    if (place == all->places) all->places++;
    until[place] = last[v] > step ? last[v] : step;
    all->outputs[v] = -1 - place;
  }
  return true;
}

ort::Status read_plan(const void* info, const ort::Tensor& plan, int64_t node_inputs, int64_t node_outputs,
                      Steps* all) {
  const int64_t *rows = static_cast<const int64_t*>(plan.data), width = plan.dims[1];
  const int known_inputs = static_cast<int>(width - 1 - STEP_OUTPUTS);
  const int64_t n = all->count * STEP_OUTPUTS;
  Memory memory(Use::PASS);
  bool* given = memory.get_zeros<bool>(size_t(node_outputs) + 1);
  if (given == nullptr) return ort::error(NO_MEMORY);
  // Numbers of outputs of steps follow those of inputs, which are counted first.
  for (int64_t s = 0; s < all->count; s++) {
    const int64_t* row = rows + s * width;
    if (row[0] < 0 || row[0] >= KIND_COUNT) return ort::error("RowExactSteps: the plan has a step of an unknown kind");
    Step& step = all->steps[s];
    step.kind = KINDS[row[0]];
    for (int i = 0; i < STEP_INPUTS; i++) {
      const int64_t at = i < known_inputs ? row[1 + i] : -1;
      const bool known = at == -1 || (at > 0 && at < node_inputs) || (at < -1 && -2 - at < s * STEP_OUTPUTS);
      if (!known || (i >= step.kind->inputs && at != -1))
        return ort::error("RowExactSteps: the plan has an input that is not there");
      if (at < -1 && all->outputs[-2 - at] == -2)
        return ort::error("RowExactSteps: the plan has an input that is not there");
      step.in[i] = at == -1 || !step.kind->read(i) ? -1 : at > 0 ? all->value_of(at) : at;
      if (at < -1 && step.in[i] == -1) return ort::error("RowExactSteps: a weight is not an initializer of the graph");
    }
    for (int i = 0; i < STEP_OUTPUTS; i++) {
      const int64_t to = row[1 + known_inputs + i];
      if (to < -2 || to >= node_outputs || (to >= 0 && given[to]) || (i > 0 && to != -2 && row[known_inputs + i] == -2))
        return ort::error("RowExactSteps: the plan has an output that is not there, or one twice");
      if (to >= 0) given[to] = true;
      all->outputs[s * STEP_OUTPUTS + i] = to;
    }
  }
  for (int64_t i = 0; i < node_outputs; i++)
    if (!given[i]) return ort::error("RowExactSteps: an output is no step's");
  for (int64_t s = 0; s < all->count; s++) {
    Step& step = all->steps[s];
    for (int64_t& v : step.in)
      if (v < -1) v = all->given + (-2 - v);
    int outputs = 0;
    for (int i = 0; i < STEP_OUTPUTS; i++) {
      const bool has = all->outputs[s * STEP_OUTPUTS + i] != -2;
      step.out[i] = has ? all->given + s * STEP_OUTPUTS + i : -1;
      outputs += has;
    }
    const Source source{info, s, rows + s * width + 1, outputs, known_inputs, &all->memory, &all->weights};
    RETURN_IF_ERROR(step.kind->create(source, &step.what));
  }
  for (int64_t v = 0; v < n; v++)
    if (all->outputs[v] == -2) all->outputs[v] = 0;  // read by none, provided by none
  return find_places(all, &memory) ? nullptr : ort::error(NO_MEMORY);
}

ort::Status read_steps(const void* info, Steps* all) {
  size_t inputs = 0, outputs = 0;
  ort::Tensor plan;
  RETURN_IF_ERROR(ort::call(ort::INFO_INPUT_COUNT, info, &inputs));
  RETURN_IF_ERROR(ort::call(ort::INFO_OUTPUT_COUNT, info, &outputs));
  RETURN_IF_ERROR(ort::constant(info, 0, &plan));
  const int64_t count = plan.dims[0], width = plan.dims[1];
  if (!plan.is(ort::INT64, count, width) || count < 1 || count > MOST_STEPS || inputs > size_t(MOST_NODE_INPUTS) ||
      (width != PLAN_WIDTH && width != PLAN_WIDTH - STEP_INPUTS + WITHOUT_BIASES))
    return ort::error("RowExactSteps: the plan has another shape or type");
  if (!all->make_room(count, int64_t(inputs))) return ort::error(NO_MEMORY);
  return read_plan(info, plan, int64_t(inputs), int64_t(outputs), all);
}

// Makes a kernel of the steps that `read` fills.
template <class Read>
ort::Status create_steps(void** kernel, Read read) {
  void* place = malloc(sizeof(Steps));
  if (place == nullptr) return ort::error(NO_MEMORY);
  Steps* all = new (place) Steps();
  ort::Status status = read(all);
  if (status) destroy_steps(all);
  else *kernel = all;
  return status;
}

ort::Status create(const ort::CustomOp*, const void*, const void* info, void** kernel) {
  return create_steps(kernel, [&](Steps* all) { return read_steps(info, all); });
}

}  // namespace

bool Source::attribute(const char* name, int64_t* value) const {
  char full[NAME];
  return ort::attribute(info, named(name, full), value);
}
bool Source::attribute(const char* name, float* value) const {
  char full[NAME];
  return ort::attribute(info, named(name, full), value);
}
const char* Source::named(const char* name, char* full) const {
  if (number < 0) return name;
  snprintf(full, NAME, "s%lld_%s", static_cast<long long>(number), name);
  return full;
}
ort::Status Source::constant(int input, ort::Tensor* tensor) const {
  const int64_t at = places == nullptr ? input : input < inputs ? places[input] : -1;
  if (at < 0) return ort::error("a weight is missing");
  return ort::constant(info, size_t(at), tensor);
}
void Source::constant_if_given(int input, ort::Tensor* tensor) const {
  *tensor = ort::Tensor{};
  if (ort::Status absent = constant(input, tensor)) {
    ort::call(ort::RELEASE_STATUS, absent);
    *tensor = ort::Tensor{};
  }
}

ort::Status Source::copy(const ort::Tensor& numbers, const float** out) const {
  const size_t bytes = size_t(numbers.count()) * sizeof(float);
  uint8_t* place = memory->get(bytes);
  if (place == nullptr) return ort::error(NO_MEMORY);
  memcpy(place, numbers.data, bytes);
  *out = reinterpret_cast<float*>(place);
  return nullptr;
}

const ort::Tensor& Pass::input(int i) const {
  static const ort::Tensor absent{};
  return step->in[i] < 0 ? absent : values[step->in[i]];
}

ort::Status Pass::output(int i, const int64_t* dims, size_t rank, float** data) {
  const int64_t value = step->out[i], to = outputs[value - given];
  ort::Tensor& t = values[value];
  t.type = ort::FLOAT, t.rank = rank;
  memcpy(t.dims, dims, rank * sizeof(int64_t));
  if (to >= 0) {
    RETURN_IF_ERROR(ort::output(context, size_t(to), dims, rank, data));
  } else {
    *data = reinterpret_cast<float*>(memory_at(&places[-1 - to], size_t(t.count()) * sizeof(float)));
  }
  t.data = *data;
  return *data == nullptr && t.count() > 0 ? ort::error(NO_MEMORY) : nullptr;
}

uint8_t* Pass::memory_at(Place* place, size_t bytes) {
  if (place->data == nullptr || place->size < bytes) *place = {memory.get(bytes), bytes};
  return place->data;
}

ort::Status create_one(const Kind& kind, const void* info, void** kernel) {
  return create_steps(kernel, [&](Steps* all) {
    size_t outputs = 0;
    RETURN_IF_ERROR(ort::call(ort::INFO_OUTPUT_COUNT, info, &outputs));
    if (!all->make_room(1, STEP_INPUTS)) return ort::error(NO_MEMORY);
    Step& step = all->steps[0];
    step.kind = &kind;
    for (int i = 0; i < STEP_INPUTS; i++) step.in[i] = i < kind.inputs && kind.read(i) ? all->value_of(i) : -1;
    for (int i = 0; i < STEP_OUTPUTS; i++) {
      step.out[i] = size_t(i) < outputs ? all->given + i : -1;
      all->outputs[i] = i;
    }
    return kind.create({info, -1, nullptr, static_cast<int>(outputs), 0, &all->memory, &all->weights}, &step.what);
  });
}

void destroy_steps(void* kernel) {
  static_cast<Steps*>(kernel)->~Steps();
  free(kernel);
}

ort::Status compute_steps(void* kernel, void* context) {
  Steps& all = *static_cast<Steps*>(kernel);
  Pass pass;
  pass.context = context;
  pass.outputs = all.outputs, pass.given = all.given;
  pass.values = pass.memory.get_zeros<ort::Tensor>(size_t(all.values()));
  pass.places = pass.memory.get_zeros<Pass::Place>(size_t(all.places));
  pass.phases = reinterpret_cast<Phase*>(pass.memory.get(size_t(all.count) * STEP_PHASES * sizeof(Phase)));
  if (pass.values == nullptr || pass.places == nullptr || pass.phases == nullptr) return ort::error(NO_MEMORY);
  size_t given = 0;
  RETURN_IF_ERROR(ort::call(ort::INPUT_COUNT, context, &given));
  for (int64_t i = 0; i < all.given; i++)
    if (size_t(all.inputs[i]) < given) RETURN_IF_ERROR(ort::input(context, size_t(all.inputs[i]), &pass.values[i]));
  for (int64_t s = 0; s < all.count; s++) {
    pass.step = &all.steps[s];
    RETURN_IF_ERROR(pass.step->kind->plan(pass.step->what, &pass));
  }
  uint8_t* mine = pass.memory.get(pass.scratch);
  return mine == nullptr ? ort::error(NO_MEMORY) : run_phases(context, pass.phases, pass.count, pass.scratch, mine);
}

namespace {
constexpr Operator DECLARED = {
    "RowExactSteps", 2, 1, 1, 1, [](size_t i) { return int(i == 0 ? ort::INT64 : ort::ANY); }, true};
constexpr ort::CustomOp OPERATOR = declaration<DECLARED>(create);
}  // namespace

const ort::CustomOp* steps_operator() { return &OPERATOR; }
}  // namespace eagle
