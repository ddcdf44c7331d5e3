"""The ways of tuning weights. To add one: write its file, add its line."""

from typing import Any

from ..extensions import Extended
from ._badam import LISA, BAdam, BAdamRatio
from ._full import Freeze, Full, LLaMAPro
from ._lora import LoRA
from ._oft import OFT
from ._vera import VeRA

__all__ = ["LISA", "METHODS", "OFT", "BAdam", "BAdamRatio", "Freeze", "Full", "LLaMAPro"]
__all__ += ["LoRA", "VeRA"]

METHODS: Extended[type[Any]] = Extended(
    "methods",
    {
        "full": Full,
        "freeze": Freeze,
        "lora": LoRA,
        "oft": OFT,
        "vera": VeRA,
        "badam": BAdam,
        "badam_ratio": BAdamRatio,
        "lisa": LISA,
        "llama_pro": LLaMAPro,
    },
)
