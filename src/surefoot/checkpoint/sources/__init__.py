"""Lazy tensors in files, and views of them."""
