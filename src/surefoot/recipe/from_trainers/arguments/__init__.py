"""The settings of each program, with their counterparts, and who reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...from_llamafactory.arguments.argument import Argument
from ...from_llamafactory.arguments.trainer import FORMER, TRAINING
from .axolotl import AXOLOTL
from .trl import DPO, GRPO, GRPO_SCRIPT, KTO, MIXTURE, MODEL, REWARD, SCRIPT, SFT, defaults_of

_TRAINING = {name: one for name, one in {**TRAINING, **FORMER}.items() if name != "do_train"}
DATA: Mapping[str, Argument] = {**MODEL, **SCRIPT, **MIXTURE}


@dataclass(frozen=True)
class TrainerSource:
    """A program, or one of its trainers: its settings and its stage here."""

    title: str
    stage: str
    arguments: Mapping[str, Argument]
    defaults: Mapping[str, object] = field(default_factory=dict)  # of transformers' arguments
    without_dropout: bool = False  # all dropout is disabled unless a setting keeps it
    equivalent: str = "sft"  # the nearest stage of LLaMA-Factory
    has_own_stage: bool = False  # whether the section stage is made of the settings alone


def _trl(
    title: str,
    stage: str,
    own: Mapping[str, Argument],
    *,
    equivalent: str = "sft",
    is_still: bool = False,
) -> TrainerSource:
    everything = {**_TRAINING, **DATA, **own}
    return TrainerSource(
        f"TRL's {title}",
        stage,
        everything,
        defaults_of(own),
        without_dropout=is_still,
        equivalent=equivalent,
        has_own_stage=own is not SFT,
    )


SOURCES: Mapping[str, TrainerSource] = {
    "trl-sft": _trl("SFTConfig", "sft", SFT),
    "trl-dpo": _trl("DPOConfig", "dpo", DPO, equivalent="dpo", is_still=True),
    "trl-kto": _trl("KTOConfig", "kto", KTO, equivalent="kto", is_still=True),
    "trl-reward": _trl("RewardConfig", "rm", REWARD, equivalent="rm", is_still=True),
    "trl-grpo": _trl("GRPOConfig", "grpo", {**GRPO, **GRPO_SCRIPT}),
    "transformers": TrainerSource("transformers' TrainingArguments", "sft", _TRAINING),
    "axolotl": TrainerSource("axolotl", "sft", AXOLOTL),
}
