"""The training objectives. To add one: write its file, add its line."""

from typing import Any

from ..extensions import Extended
from .distill import Distill
from .dpo import DPO
from .grpo import GRPO
from .kto import KTO
from .ppo import PPO
from .pt import PT
from .rm import RM
from .sft import SFT

STAGES: Extended[type[Any]] = Extended(
    "stages",
    {
        **{"pt": PT, "sft": SFT, "dpo": DPO, "rm": RM, "kto": KTO},
        **{"grpo": GRPO, "ppo": PPO, "distill": Distill},
    },
)
