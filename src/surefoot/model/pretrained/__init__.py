"""A pretrained model: loading, weights by name, tokenizer, adapter, quantization."""
