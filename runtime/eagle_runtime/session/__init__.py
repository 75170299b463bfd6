"""Engines: the protocol they share (protocol.py), ONNX Runtime (ort/) and TensorRT (trt/)."""
