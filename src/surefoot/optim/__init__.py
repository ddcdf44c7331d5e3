"""Optimizers and learning-rate schedules. To add an optimizer: write its file in ``_variants/``,
add its line.

Doors: ``optimizer`` (the settings that all have), ``state_tensor`` (what one keeps for a parameter,
declared), ``trained`` (the optimizer of the parameters that are trained now), ``blocks`` (which
ones those are), ``bf16_weights`` (how bfloat16 is updated), ``state`` (by names, and how it is
sharded).

A step goes from ``trained`` to ``bf16_weights``, which makes float32 of some parameters at a time,
to ``_rules/rule_optimizer``, which calls the variant's ``update`` with this rank's part of each.
"""

from typing import Any

from ..extensions import Extended
from ._variants.adafactor import Adafactor
from ._variants.adam_mini import AdamMini
from ._variants.adamw import AdamW, AdamW4bit, AdamW8bit, AdamWBf16
from ._variants.ademamix import AdEMAMix
from ._variants.lion import Lion
from ._variants.muon import Muon
from ._variants.projected import Apollo, GaLore
from ._variants.schedule_free import ScheduleFree

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
