// Products of one input and up to three weights: what a node holds of them, and what a pass computes.
#pragma once
#include "kernels.hpp"
#include "steps.hpp"

namespace eagle {

constexpr int MOST = 3;         // weights of one input
constexpr int64_t MANY = 8192;  // inputs that are worth several threads' quantising
constexpr int64_t GATED = 4;    // inputs that take as long to quantise as one that is gated first, about
constexpr int64_t FEW = 50000;  // multiply-adds that one thread computes as fast as several: two microseconds

struct Product {
  int count = 0;
  const Kernels* kernels = nullptr;
  Before before;
  Weight weights[MOST] = {};
  const float* biases[MOST] = {};
};

// Rows quantised for one size of blocks, tile by tile.
struct Input {
  int64_t block = 0, blocks = 0;
  int8_t* values = nullptr;  // [rows, blocks * block], tile by tile
  float* scales = nullptr;
  int32_t* sums = nullptr;
  int64_t row_bytes() const { return blocks * block; }
};

struct Work {  // of one pass
  const Product* product;
  const float *x, *up, *added;
  const int32_t* which;  // row of x that each row is; null: the same
  int64_t rows, total;   // panels of all weights
  int64_t chunks;        // that the inputs of a row are quantised in
  int count;             // of inputs
  Input inputs[MOST];
  int reads[MOST];  // which of them a weight reads
  float* out[MOST];
};

// Reads the attributes activation, alpha and limit. Returns whether they have values that are known.
bool read_activation(const Source& source, Before* before);

// A copy of `count` fp32 numbers that lasts as long as the node; null where there are none.
ort::Status copy_numbers(const Source& source, const ort::Tensor& numbers, int64_t count, const char* message,
                         const float** out);

// A weight as it is stored, in the layout of ONNX Runtime's MatMulNBits. zeros: without data, all are the middle one; of
// four bits they may be [N, blocks, 1], in sixteenths of a level.
struct Stored {
  ort::Tensor levels, steps, zeros;  // [N, blocks, bytes] uint8, [N, blocks] fp16, [N, bytes] uint8
};

// Packs columns first .. first + columns - 1.
ort::Status read_weight(const Stored& stored, int64_t bits, int64_t block, int64_t first, int64_t inputs,
                        int64_t columns, const Kernels& kernels, Memory* memory, Weight* weight);

// Finds which inputs the weights read, and counts panels and chunks. Returns the bytes that the inputs take.
size_t find_inputs(Work* work, Pass* pass);
uint8_t* place_inputs(Work* work, uint8_t* memory);  // returns what is behind them
int64_t pieces_of_inputs(const Work& work);          // that `read_tiles` has

// Phases of a pass: they quantise inputs, and multiply panels first .. last - 1, all weights' one after the other.
void read_tiles(const void* work, int64_t first, int64_t last, uint8_t* scratch);
void multiply(const void* work, int64_t first, int64_t last, uint8_t* scratch);

}  // namespace eagle
