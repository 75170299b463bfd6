// The custom operators, as ONNX Runtime sees them.
#pragma once
#include "ort.hpp"

#if defined(_WIN32)
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C" __attribute__((visibility("default")))
#endif

namespace eagle {
const ort::CustomOp* attention_operator();
const ort::CustomOp* norm_operator();
const ort::CustomOp* product_operator();
const ort::CustomOp* sincos_operator();
const ort::CustomOp* steps_operator();
}  // namespace eagle
