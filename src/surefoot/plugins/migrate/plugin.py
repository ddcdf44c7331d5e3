"""What Surefoot knows of LLaMA-Factory, TRL, axolotl and transformers' Trainer, by name."""

from ...extensions import Plugin

_HERE = __package__

PLUGIN = Plugin(
    name="migrate",
    importers={
        "unconverted": f"{_HERE}.importers:UNCONVERTED",  # first: it knows what looks like others
        "llamafactory": f"{_HERE}.importers:LLAMAFACTORY",
        "trl-sft": f"{_HERE}.importers:TRL_SFT",
        "trl-dpo": f"{_HERE}.importers:TRL_DPO",
        "trl-kto": f"{_HERE}.importers:TRL_KTO",
        "trl-reward": f"{_HERE}.importers:TRL_REWARD",
        "trl-grpo": f"{_HERE}.importers:TRL_GRPO",
        "axolotl": f"{_HERE}.importers:AXOLOTL",
        "transformers": f"{_HERE}.importers:TRANSFORMERS",
    },
    hints={"migrate": f"{_HERE}.importers:hints_by_key"},
)
