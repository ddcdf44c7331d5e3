"""States of a run as named tensors and plain data."""
