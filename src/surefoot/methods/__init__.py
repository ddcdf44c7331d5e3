"""The ways of tuning weights. To add one: write its file, add its line."""

from typing import Any

from ..extensions import Extended
from .badam import LISA, BAdam, BAdamRatio
from .full import Freeze, Full, LLaMAPro
from .lora import LoRA
from .oft import OFT
from .vera import VeRA

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
