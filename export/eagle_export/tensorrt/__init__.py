"""Builds TensorRT engines from the graphs of a bundle."""
