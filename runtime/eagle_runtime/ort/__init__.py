"""ONNX Runtime, on the CPU and on NVIDIA GPUs."""
