// The custom operators, as ONNX Runtime sees them.
#pragma once
#include "ort.hpp"

namespace eagle {
const ort::CustomOp* attention_operator();
const ort::CustomOp* product_operator();
const ort::CustomOp* steps_operator();
}  // namespace eagle
