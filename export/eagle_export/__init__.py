"""Write bundles: Hugging Face checkpoints in, traced ONNX graphs and a manifest out."""
