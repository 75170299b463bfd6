"""TensorRT and TensorRT for RTX."""
