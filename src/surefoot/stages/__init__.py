"""The training objectives. To add one: write its file, add its line."""

from typing import Any

from ..extensions import Extended
from ._classify import Classify
from ._distill import Distill
from ._dpo import DPO
from ._grpo import GRPO
from ._kto import KTO
from ._ppo import PPO
from ._pt import PT
from ._rm import RM
from ._sft import SFT

__all__ = ["DPO", "GRPO", "KTO", "PPO", "PT", "RM", "SFT", "STAGES", "Classify", "Distill"]

STAGES: Extended[type[Any]] = Extended(
    "stages",
    {
        **{"pt": PT, "sft": SFT, "dpo": DPO, "rm": RM, "kto": KTO},
        **{"grpo": GRPO, "ppo": PPO, "distill": Distill, "classify": Classify},
    },
)
