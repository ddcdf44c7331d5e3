"""How MindSpore cuts tensors over its ranks: strategy files, parallel_config, slices."""
