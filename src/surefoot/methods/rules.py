"""Settings that a method which trains the model's own weights does not support."""

from __future__ import annotations

from collections.abc import Iterator

from ..model.section import ModelSection
from ..schema import Problem


def problems_of_own_weights(name: str, model: ModelSection) -> Iterator[Problem]:
    """The problems of method ``name`` with an adapter to continue and with quantized or float16
    weights."""
    if model.adapter is not None:
        yield Problem(
            ("model", "adapter"),
            f"method {name} does not train adapters; use method: lora, "
            "or merge it into the model first with `surefoot export`",
        )
    if model.quantization_bit is not None:
        yield Problem(
            ("model", "quantization_bit"),
            f"method {name} trains the weights themselves; use method: lora, or leave it unset",
        )
    if model.dtype == "float16":  # in which the optimizer's epsilon is 0 and small updates vanish
        yield Problem(
            ("model", "dtype"),
            "trainable weights cannot be float16; use auto (and train.precision: fp16)",
        )
