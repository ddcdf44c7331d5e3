"""Quantized weights in compressed-tensors' form, by name."""

from ...extensions import Plugin

PLUGIN = Plugin(
    name="quantize",
    exporters={"compressed-tensors": f"{__package__}.exporters:COMPRESSED_TENSORS"},
)
