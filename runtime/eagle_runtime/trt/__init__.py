"""TensorRT for RTX and TensorRT, on NVIDIA GPUs."""
