"""Optimizers and learning-rate schedules. To add an optimizer: write its file, add its line."""

from typing import Any

from ..extensions import Extended
from .adamw import AdamW
from .variants.adafactor import Adafactor
from .variants.adam_mini import AdamMini
from .variants.adamw_8bit import AdamW4bit, AdamW8bit
from .variants.adamw_bf16 import AdamWBf16
from .variants.ademamix import AdEMAMix
from .variants.apollo import Apollo
from .variants.galore import GaLore
from .variants.lion import Lion
from .variants.muon import Muon
from .variants.schedule_free import ScheduleFree

OPTIMIZERS: Extended[type[Any]] = Extended(
    "optimizers",
    {
        "adamw": AdamW,
        "adamw_bf16": AdamWBf16,
        "adamw_8bit": AdamW8bit,
        "adamw_4bit": AdamW4bit,
        "muon": Muon,
        "lion": Lion,
        "ademamix": AdEMAMix,
        "adafactor": Adafactor,
        "adam_mini": AdamMini,
        "apollo": Apollo,
        "galore": GaLore,
        "schedule_free": ScheduleFree,
    },
)
