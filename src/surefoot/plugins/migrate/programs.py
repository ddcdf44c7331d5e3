"""The programs whose files are converted."""

from __future__ import annotations

from .arguments import ARGUMENTS, TRAINERS, TRANSFORMERS
from .axolotl import AXOLOTL_RULES
from .given import Program, RenamingRule
from .trl import DPO, GRPO, KTO, REWARD, SFT, TRANSFORMERS_RULES

LLAMAFACTORY = Program("LLaMA-Factory", ARGUMENTS)
_SHARED = TRAINERS["TRL's ModelConfig, ScriptArguments and DatasetMixtureConfig"]


def _trl(
    title: str, rules: tuple[tuple[str, RenamingRule], ...], stage: str = "sft", **options: bool
) -> Program:
    arguments = {**TRANSFORMERS, **_SHARED, **TRAINERS[title]}
    return Program(title, arguments, rules, stage, **options)


PROGRAMS = {
    "trl-sft": _trl("TRL's SFTConfig", SFT),
    "trl-dpo": _trl("TRL's DPOConfig", DPO, "dpo", has_own_stage=True, without_dropout=True),
    "trl-kto": _trl("TRL's KTOConfig", KTO, "kto", has_own_stage=True, without_dropout=True),
    "trl-reward": _trl(
        "TRL's RewardConfig", REWARD, "rm", has_own_stage=True, without_dropout=True
    ),
    "trl-grpo": _trl("TRL's GRPOConfig", GRPO, has_own_stage=True, truncates=False),
    "transformers": Program(
        *("transformers' TrainingArguments", TRANSFORMERS, TRANSFORMERS_RULES),
        names_data=False,
        truncates=False,
    ),
    "axolotl": Program("axolotl", TRAINERS["axolotl"], AXOLOTL_RULES, truncates=False),
}
