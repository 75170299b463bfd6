// Registration with ONNX Runtime, and the checks before it.
#include <stdlib.h>
#include <string.h>

#include "kernels.hpp"
#include "operators.hpp"
#include "ort.hpp"

namespace ort {
const Function* api = nullptr;

Status describe(void* value, Tensor* tensor) {
  *tensor = Tensor{};
  if (value == nullptr) return nullptr;
  void* info = nullptr;
  RETURN_IF_ERROR(call(TYPE_AND_SHAPE, value, &info));
  Status status = call(ELEMENT_TYPE, info, &tensor->type);
  if (!status) status = call(DIMENSION_COUNT, info, &tensor->rank);
  if (!status && tensor->rank > 6) status = error("a tensor has more than six dimensions");
  if (!status) status = call(DIMENSIONS, info, tensor->dims, tensor->rank);
  call(RELEASE_TYPE_AND_SHAPE, info);
  if (status) return status;
  return call(TENSOR_DATA, value, &tensor->data);
}

Status input(void* context, size_t index, Tensor* tensor) {
  void* value = nullptr;
  RETURN_IF_ERROR(call(INPUT, context, index, &value));
  return describe(value, tensor);
}

Status constant(const void* info, size_t index, Tensor* tensor) {
  int is_constant = 0;
  void* value = nullptr;
  RETURN_IF_ERROR(call(CONSTANT_INPUT, info, index, &is_constant, &value));
  if (!is_constant || value == nullptr) return error("a weight is not an initializer of the graph");
  return describe(value, tensor);
}

Status output(void* context, size_t index, const int64_t* dims, size_t rank, float** data) {
  void* value = nullptr;
  RETURN_IF_ERROR(call(OUTPUT, context, index, dims, rank, &value));
  if (value == nullptr) return error("an output is missing");
  return call(TENSOR_DATA, value, data);
}

namespace {
bool found(Status status) {
  if (status) call(RELEASE_STATUS, status);
  return status == nullptr;
}
}  // namespace

bool attribute(const void* info, const char* name, int64_t* value) {
  return found(call(ATTRIBUTE_INT, info, name, value));
}
bool attribute(const void* info, const char* name, float* value) {
  return found(call(ATTRIBUTE_FLOAT, info, name, value));
}
}  // namespace ort

// The name of the instruction set that the operators use here.
EXPORTED const char* eagle_instruction_set() { return eagle::chosen().name; }

// 1 if an instruction set of that name exists here and is used from now on; null: the best one. For tests.
EXPORTED int eagle_use_instruction_set(const char* name) { return eagle::choose(name); }

EXPORTED void* RegisterCustomOps(void* options, const ort::ApiBase* base) {
  const ort::Function* api = base->get_api(ort::API_VERSION);
  if (api == nullptr) return nullptr;  // too old: the session will report unknown operators
  ort::api = api;
  // An entry that is known to refuse a null context must do so: the table is as it is thought to be.
  ort::Status status = ort::call(ort::PARALLEL_FOR, static_cast<void*>(nullptr), static_cast<void*>(nullptr), size_t(0),
                                 size_t(0), static_cast<void*>(nullptr));
  if (status == nullptr) return ort::error("ONNX Runtime's table of functions is not as expected");
  ort::call(ort::RELEASE_STATUS, status);
  void* domain = nullptr;
  RETURN_IF_ERROR(ort::call(ort::CREATE_DOMAIN, "eagle", &domain));
  const ort::CustomOp* operators[] = {eagle::attention_operator(), eagle::norm_operator(), eagle::product_operator(),
                                      eagle::sincos_operator(), eagle::steps_operator()};
  for (const ort::CustomOp* op : operators) RETURN_IF_ERROR(ort::call(ort::DOMAIN_ADD, domain, op));
  return ort::call(ort::OPTIONS_ADD_DOMAIN, options, domain);
}
