"""The sizes of models and rows, and the operations of a token. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

# arXiv:2204.02311, appendix B, with attention that is causal and stays within documents
FORMULA = (
    "operations a token = 6 x weights (4 x if frozen) + 6 x layers x heads x head width x mean "
    "length of documents, weighted by length; recomputation not counted (arXiv:2204.02311, B)"
)
# TFLOP/s of dense products in bf16 by NVIDIA's data sheets; the name of a device contains the key
PEAKS = {"H100 PCIe": 756.0, "H100": 989.4, "H200": 989.4, "A100": 312.0}


def peak_of(device: str) -> float | None:
    """TFLOP/s by the data sheet of a device; None if it is not listed."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 151_936
    is_tied: bool = True
    head_width: int = 128

    @property
    def num_weights(self) -> int:
        """Elements of all matrices that tokens are multiplied by, the head included."""
        heads = 2 * self.heads + 2 * self.kv_heads
        layer = self.hidden * (heads * self.head_width + 3 * self.intermediate)
        return self.layers * layer + self.hidden * self.vocabulary

    def operations(self, method: str, length: float) -> float:
        """Floating-point operations a token of a forward and backward pass.

        6 a weight, or 4 if the weights are frozen; and causal attention within documents of
        ``length`` (the mean, weighted by length). Recomputation does not count.
        """
        weights = (6 if method == "full" else 4) * self.num_weights
        return weights + 6 * self.layers * self.heads * self.head_width * length


SHAPES = {
    "0.25B": Shape(1024, 10, 8, 4, 3072),
    "0.6B": Shape(1024, 28, 16, 8, 3072),
    "1.7B": Shape(2048, 28, 16, 8, 6144),
    "8B": Shape(4096, 36, 32, 8, 12_288, is_tied=False),
    "tiny": Shape(64, 2, 4, 2, 128, vocabulary=4096, head_width=16),
}
