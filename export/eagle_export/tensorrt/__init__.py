"""TensorRT engines of a finished bundle."""
