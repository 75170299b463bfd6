"""GGUF files, the format of llama.cpp, as checkpoints: config, tensors and tokenizer in Hugging Face's terms."""
