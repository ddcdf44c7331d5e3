"""Quantized weights in compressed-tensors' form, by name."""

from ...extensions import Plugin

PLUGIN = Plugin(
    name="quantize",
    targets={"compressed-tensors": f"{__package__}.target:QuantizedFolder"},
)
