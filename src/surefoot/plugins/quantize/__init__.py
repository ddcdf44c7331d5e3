"""Quantized weights in the format of compressed-tensors, by rounding or calibrated on data."""
