"""Tensor sources: lazy tensors in files, and views of them."""
