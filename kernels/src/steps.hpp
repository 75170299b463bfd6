// What an operator computes: one step, or steps one after the other. A kind of steps reads its attributes and weights
// when a session is opened; in each pass it checks its inputs, provides its outputs and says what is to be computed.
#pragma once
#include "crew.hpp"
#include "kernels.hpp"
#include "memory.hpp"
#include "ort.hpp"

namespace eagle {

constexpr int STEP_INPUTS = 16, STEP_OUTPUTS = 3;  // at most

constexpr const char* NO_MEMORY = "out of memory (bad allocation)";

// Where a step's attributes and constants lie in a node.
struct Source {
  const void* info;
  int64_t number;         // of a step among others, whose attributes begin with "s<number>_"; -1: of the only one
  const int64_t* places;  // of its inputs among the node's; negative: not among them
  int outputs;
  int inputs;                // that `places` has
  Memory *memory, *weights;  // of the node: for what lasts as long as it does, and for weights

  bool attribute(const char* name, int64_t* value) const;  // false: absent
  bool attribute(const char* name, float* value) const;
  ort::Status constant(int input, ort::Tensor* tensor) const;             // fails if it is no initializer
  void constant_if_given(int input, ort::Tensor* tensor) const;           // without data if it is none
  ort::Status copy(const ort::Tensor& numbers, const float** out) const;  // fp32, into the node's memory

 private:
  const char* named(const char* name, char* full) const;
};

// Which of a tree's rows each row of a text sees; the rows of several texts may make one pass.
struct Seen {
  int64_t row, rows, longest;   // its first row in the pass, its rows, the most that one of them sees
  bool chain;                   // row t sees the tree's rows 0..t; else those in `seen`
  const int32_t *seen, *first;  // row t sees seen[first[t]] .. seen[first[t + 1] - 1], ascending
  Preorder preorder;            // without one until a delta net asks for it
};
struct Visible {
  const float* mask;
  int64_t rows, apart, count;  // rows of the pass; numbers from one to the next in the mask; texts
  Seen* texts;
};

struct Step;

// What the steps of one pass share.
struct Pass {
  void* context = nullptr;
  Memory memory{Use::PASS};
  const Step* step = nullptr;        // the one at hand
  ort::Tensor* values = nullptr;     // that steps read and write; without data until they are known
  const int64_t* outputs = nullptr;  // see Steps
  int64_t given = 0;                 // values that the node gets: the first ones
  struct Place {
    uint8_t* data;
    size_t size;
  };
  Place* places = nullptr;  // of values that only steps see
  Place work{}, rows{};     // of what a step needs until it ends; of new keys and values that only the cache keeps
  Phase* phases = nullptr;
  int64_t count = 0;  // of phases
  size_t scratch = 0;
  Visible visible{};  // of the last mask that was read

  const ort::Tensor& input(int i) const;  // without data where it is absent
  ort::Status output(int i, const int64_t* dims, size_t rank, float** data);
  uint8_t* memory_at(Place* place, size_t bytes);  // which the values before it had; null: out of memory
  // read: memory that the phase reads first, and that pieces of it share
  void add(void (*run)(const void*, int64_t, int64_t, uint8_t*), const void* work, int64_t pieces, bool alone,
           const uint8_t* read = nullptr, int64_t bytes = 0) {
    phases[count++] = Phase{run, work, pieces, alone, read, static_cast<size_t>(bytes), {0, 0}};
  }
  void needs(size_t bytes) { scratch = bytes > scratch ? bytes : scratch; }
};

struct Kind {
  int inputs;
  bool (*read)(int input);  // whether it is read in a pass
  ort::Status (*create)(const Source& source, void** what);
  ort::Status (*plan)(const void* what, Pass* pass);
};
constexpr int STEP_PHASES = 5;  // that a step adds at most

// Kind::create of a T that `read` fills.
template <class T, ort::Status (*read)(const Source&, T*)>
ort::Status create_kind(const Source& source, void** what) {
  T* made = source.memory->make<T>();
  *what = made;
  return made == nullptr ? ort::error(NO_MEMORY) : read(source, made);
}

struct Step {
  const Kind* kind;
  void* what;
  int64_t in[STEP_INPUTS], out[STEP_OUTPUTS];  // numbers of values; negative: none
};

extern const Kind ATTENTION, NORMS, PRODUCT, EXPERTS, SINCOS, CONVOLUTION, DELTA, SCAN;

// Operators: of one step, whose inputs and outputs are the node's.
ort::Status create_one(const Kind& kind, const void* info, void** kernel);
template <const Kind& kind>
ort::Status create_node(const ort::CustomOp*, const void*, const void* info, void** kernel) {
  return create_one(kind, info, kernel);
}
void destroy_steps(void* kernel);
ort::Status compute_steps(void* kernel, void* context);

// An operator as it is declared to ONNX Runtime. Its outputs are fp32.
struct Operator {
  const char* name;
  size_t inputs, required, outputs, certain;  // required, certain: how many inputs and outputs every node has
  int (*type)(size_t input);
  bool variadic;  // the last input and output stand for any number of them
};
template <const Operator& op>
constexpr ort::CustomOp declaration(ort::Status (*create)(const ort::CustomOp*, const void*, const void*, void**)) {
  using Op = const ort::CustomOp*;
  return {ort::OP_VERSION,
          nullptr,
          [](Op) { return op.name; },
          [](Op) -> const char* { return nullptr; },
          [](Op, size_t i) { return op.type(i); },
          [](Op) { return op.inputs; },
          [](Op, size_t) { return int(ort::FLOAT); },
          [](Op) { return op.outputs; },
          nullptr,
          destroy_steps,
          [](Op, size_t i) { return op.variadic && i + 1 == op.inputs ? 2
                                    : i < op.required                 ? 0
                                                                      : 1; },
          [](Op, size_t i) { return op.variadic      ? 2
                                    : i < op.certain ? 0
                                                     : 1; },
          [](Op, size_t) { return 0; },
          [](Op) { return int(op.variadic); },
          [](Op) { return 0; },
          [](Op) { return int(op.variadic); },
          [](Op) { return int(op.variadic); },
          create,
          compute_steps};
}

}  // namespace eagle
