// The part of ONNX Runtime's C interface that the operators use, declared by hand: the table of functions only grows at
// its end, and the layout of a custom operator is fixed by the version that it names.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ort {

using Function = void (*)();
using Status = void*;  // null: success

constexpr uint32_t API_VERSION = 17;  // the first with KernelContext_ParallelFor
constexpr uint32_t OP_VERSION = 16;   // the first in which creation and computation return a status

enum Entry : int {  // places in the table, from 0
  CREATE_STATUS = 0,
  ERROR_MESSAGE = 2,
  CREATE_DOMAIN = 26,
  DOMAIN_ADD = 27,
  OPTIONS_ADD_DOMAIN = 28,
  TENSOR_DATA = 51,
  ELEMENT_TYPE = 60,
  DIMENSION_COUNT = 61,
  DIMENSIONS = 62,
  TYPE_AND_SHAPE = 65,
  ATTRIBUTE_FLOAT = 85,
  ATTRIBUTE_INT = 86,
  INPUT_COUNT = 88,
  OUTPUT_COUNT = 89,
  INPUT = 90,
  OUTPUT = 91,
  RELEASE_STATUS = 93,
  RELEASE_TYPE_AND_SHAPE = 99,
  INFO_INPUT_COUNT = 230,
  INFO_OUTPUT_COUNT = 231,
  CONSTANT_INPUT = 249,
  PARALLEL_FOR = 274,
};

enum Type : int { ANY = 0, FLOAT = 1, UINT8 = 2, INT8 = 3, INT64 = 7, FLOAT16 = 10 };
enum Code : int { FAIL = 1, INVALID_ARGUMENT = 2 };

struct ApiBase {
  const Function* (*get_api)(uint32_t);
  const char* (*version)();
};

struct CustomOp {  // OrtCustomOp up to KernelComputeV2
  uint32_t version;
  void* (*create_without_status)(const CustomOp*, const void*, const void*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  int (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  int (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute_without_status)(void*, void*);
  void (*destroy)(void*);
  int (*input_kind)(const CustomOp*, size_t);  // 0 required, 1 optional
  int (*output_kind)(const CustomOp*, size_t);
  int (*input_memory)(const CustomOp*, size_t);
  int (*variadic_input_least)(const CustomOp*);
  int (*variadic_input_alike)(const CustomOp*);
  int (*variadic_output_least)(const CustomOp*);
  int (*variadic_output_alike)(const CustomOp*);
  Status (*create)(const CustomOp*, const void* api, const void* info, void** kernel);
  Status (*compute)(void* kernel, void* context);
};

extern const Function* api;  // null until the library is registered

template <class... A>
Status call(Entry entry, A... arguments) {
  return reinterpret_cast<Status (*)(A...)>(api[entry])(arguments...);
}

// Never null, so that a function that fails is seen to fail.
__attribute__((returns_nonnull)) inline Status error(const char* message) {
  return call(CREATE_STATUS, int(INVALID_ARGUMENT), message);
}

// A tensor that the engine owns. data is null for an optional input that is absent.
struct Tensor {
  const void* data = nullptr;
  int type = 0;
  size_t rank = 0;
  int64_t dims[6] = {0, 0, 0, 0, 0, 0};
  // Whether it is there, with this type and these dimensions.
  template <class... D>
  bool is(int wanted, D... sizes) const {
    const int64_t right[] = {sizes...};
    if ((data == nullptr && count() > 0) || type != wanted || rank != sizeof...(D)) return false;
    for (size_t i = 0; i < rank; i++)
      if (dims[i] != right[i]) return false;
    return true;
  }
  bool is_rows(int64_t width) const { return type == FLOAT && rank > 0 && dims[rank - 1] == width; }
  bool is_absent_or(int64_t numbers) const { return data == nullptr || (type == FLOAT && count() == numbers); }
  int64_t count() const {
    int64_t n = 1;
    for (size_t i = 0; i < rank; i++) n *= dims[i];
    return n;
  }
};

Status describe(void* value, Tensor* tensor);  // the tensor of an OrtValue; of null, an absent one
Status input(void* context, size_t index, Tensor* tensor);
Status constant(const void* info, size_t index, Tensor* tensor);  // fails if the input is no initializer
Status output(void* context, size_t index, const int64_t* dims, size_t rank, float** data);
bool attribute(const void* info, const char* name, int64_t* value);  // false: absent
bool attribute(const void* info, const char* name, float* value);

#define RETURN_IF_ERROR(expression) \
  if (ort::Status status_ = (expression)) return status_

}  // namespace ort
