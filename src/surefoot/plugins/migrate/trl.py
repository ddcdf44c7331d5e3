"""Settings of TRL and transformers that depend on several settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from .arguments import RefusedError
from .given import GivenArguments, RenamedArguments, RenamingRule

PLACE = "MODEL", "DATASET"
_ATTENTION = {
    "eager": "disabled",
    "sdpa": "sdpa",
    "flash_attention_2": "fa2",
    "kernels-community/flash-attn2": "fa2",
}
_LEAST_PAIRS = ("robust", "exo_pair")  # losses that read label_smoothing


def _precision(given: GivenArguments, to: RenamedArguments) -> None:
    bf16 = given["bf16"]
    is_trl = "use_peft" in given.arguments
    to.arguments["bf16"] = (not given["fp16"] if is_trl else False) if bf16 is None else bf16


def _recomputation(given: GivenArguments, to: RenamedArguments) -> None:
    is_on = bool(given["gradient_checkpointing"])
    to.arguments["gradient_checkpointing"] = is_on
    to.arguments["disable_gradient_checkpointing"] = not is_on


def _method(given: GivenArguments, to: RenamedArguments) -> None:
    """LoRA with TRL's settings, or all weights."""
    if not given["use_peft"]:
        to.arguments["finetuning_type"] = "full"
        return
    targets = given["lora_target_modules"]
    if not targets:
        message = (
            "unset, PEFT chooses by architecture, mostly q_proj and v_proj; write the modules, or "
            "all-linear"
        )
        raise RefusedError("lora_target_modules", message)
    to.arguments["finetuning_type"] = "lora"
    to.arguments["lora_target"] = ["all"] if targets == ["all-linear"] else targets
    still = given["disable_dropout"]
    still = given.program.without_dropout if still is None else still
    to.arguments["lora_dropout"] = 0.0 if still else given["lora_dropout"]
    if still and given["lora_dropout"]:
        to.notes.append("disable_dropout disables LoRA's dropout, too, as there")


def _model(given: GivenArguments, to: RenamedArguments) -> None:
    if not given["model_name_or_path"]:
        raise RefusedError("model_name_or_path", "is missing; name a model")
    dtype, is_full = str(given["dtype"] or "auto"), not given["use_peft"]
    if is_full and dtype == "bfloat16":
        to.arguments["pure_bf16"] = True
    elif is_full and dtype != "float32":
        message = f"{dtype}: the type that is trained is not known; write float32 or bfloat16"
        raise RefusedError("dtype", message)
    if (kernel := given["attn_implementation"]) is not None:
        if kernel not in _ATTENTION:
            known = ", ".join(_ATTENTION)
            raise RefusedError("attn_implementation", f"expected one of {known}, got {kernel!r}")
        to.arguments["flash_attn"] = _ATTENTION[kernel]


def _bits(given: GivenArguments, to: RenamedArguments) -> None:
    for name, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if given[name]:
            to.arguments["quantization_bit"] = bits
    if given["load_in_4bit"]:
        to.settings["model.double_quantization"] = bool(given["use_bnb_nested_quant"])
    else:
        to.settings.pop("model.quantization_type", None)


def _length(given: GivenArguments, to: RenamedArguments) -> None:
    if "max_length" not in given.arguments:
        return
    length = given["max_length"]
    if length is None:
        raise RefusedError(
            "max_length", "null truncates nothing; write the most tokens of an example"
        )
    to.arguments["cutoff_len"] = length


def entry(place: str, split: str, subset: str | None = None) -> object:
    """A dataset on the hub or of a folder, as an entry of a recipe."""
    is_path = Path(place).expanduser().exists() or place[:1] in "./~"
    source = {"file_name": place} if is_path else {"hf_hub_url": place}
    found: dict[str, object] = {"name": f"{Path(place).name}_{split}".replace(".", "_"), **source}
    if subset is not None:
        found["subset"] = subset
    return found | ({} if is_path and Path(place).is_file() else {"split": split})


def _data(given: GivenArguments, to: RenamedArguments) -> None:
    place = given["dataset_name"]
    if not place:
        raise RefusedError(
            "dataset_name", "is missing; name a dataset of the hub, a file or a folder"
        )
    subset = given["dataset_config"]
    split = given["dataset_train_split"]
    to.settings["data.datasets"] = [entry(place, split, subset)]
    to.arguments["dataset"] = [PLACE[1]]
    if given["eval_strategy"] not in (None, "no"):
        to.settings["data.eval_datasets"] = [entry(place, given["dataset_test_split"], subset)]
        to.arguments["eval_dataset"] = [PLACE[1]]
    if given["dataset_streaming"]:
        to.arguments["streaming"] = True


def _labels(given: GivenArguments, to: RenamedArguments) -> None:
    """What is trained on. Unset, TRL decides by the columns of the dataset."""
    if "completion_only_loss" not in given.arguments:
        return
    only = given["completion_only_loss"]
    if given["assistant_only_loss"]:
        to.settings["data.train_on_prompt"] = False
    elif only is None:
        message = (
            "is not set, so TRL trains on all turns of rows with messages, and on the completion "
            "of rows with prompt and completion; write assistant_only_loss: true (all responses), "
            "completion_only_loss: true (the last one) or completion_only_loss: false (all tokens)"
        )
        raise RefusedError("completion_only_loss", message)
    elif only:
        to.settings["data.mask_history"] = True
    else:
        to.settings["data.train_on_prompt"] = True
    if given["packing"]:
        to.notes.append(
            "packing: a batch there has as many packed rows as it has examples here, so an epoch "
            "has more steps; raise train.global_batch_size if you like"
        )


def _pairs(given: GivenArguments, to: RenamedArguments) -> None:
    """The losses of DPO."""
    names, weights = given["loss_type"], given["loss_weights"]
    wants_sft = "sft" in names
    for name in names:
        if name not in ("sft", *_pair_losses(given)):
            known = ", ".join(_pair_losses(given))
            raise RefusedError("loss_type", f"{name!r} is not supported; write one of {known}")
    if len(names) > 1 or weights:
        weights = [1.0] * len(names) if weights is None else weights
        if len(weights) != len(names):
            raise RefusedError("loss_weights", f"expected {len(names)} numbers, got {len(weights)}")
        told = dict(zip(names, map(float, weights), strict=True))
        if wants_sft:
            to.settings["stage.dpo.sft_weight"] = told.pop("sft")
        to.settings["stage.dpo.losses"] = told
    elif wants_sft:
        raise RefusedError(
            "loss_type", "sft alone is supervised fine-tuning: convert it with trl-sft"
        )
    else:
        to.settings["stage.dpo.loss_type"] = names[0]
    if any(name in _LEAST_PAIRS for name in names):
        to.settings["stage.dpo.label_smoothing"] = given["label_smoothing"]
    elif given["label_smoothing"]:
        to.notes.append("label_smoothing has no effect with this loss_type, as there")
    if given["ld_alpha"] is not None:
        to.settings["stage.dpo.ld_alpha"] = given["ld_alpha"]


def _pair_losses(given: GivenArguments) -> tuple[str, ...]:
    return tuple(name.strip() for name in given.arguments["loss_type"].says.split(","))


def _kto(given: GivenArguments, to: RenamedArguments) -> None:
    to.arguments["train_sampling_strategy"] = given["train_sampling_strategy"]


def _reward(given: GivenArguments, to: RenamedArguments) -> None:
    to.settings["stage.rm.center_rewards_coefficient"] = given["center_rewards_coefficient"] or 0.0


_SURROGATES: Mapping[str, tuple[str, str]] = {  # and what tokens are averaged over
    "grpo": ("clip", "responses"),
    "dapo": ("clip", "tokens"),
    "dr_grpo": ("clip", "max_new_tokens"),
    "cispo": ("cispo", "tokens"),
    "sapo": ("sapo", "responses"),
}


def _grpo(given: GivenArguments, to: RenamedArguments) -> None:
    """The surrogate and the advantages of GRPO."""
    kind = given["loss_type"]
    if kind not in _SURROGATES:
        known = ", ".join(_SURROGATES)
        raise RefusedError("loss_type", f"{kind!r} is not supported; write one of {known}")
    surrogate, average = _SURROGATES[kind]
    if given["importance_sampling_level"] == "sequence":
        if kind != "grpo":
            raise RefusedError("importance_sampling_level", "sequence needs loss_type: grpo")
        surrogate = "gspo"
    section = "stage.grpo."
    to.settings |= {f"{section}surrogate": surrogate, f"{section}average_over": average}
    if surrogate == "sapo":
        to.settings[f"{section}sapo_temperature"] = given["sapo_temperature_pos"]
        to.settings[f"{section}sapo_temperature_negative"] = given["sapo_temperature_neg"]
    elif surrogate == "cispo":
        high = given["epsilon"] if given["epsilon_high"] is None else given["epsilon_high"]
        to.settings[f"{section}clip_high"] = high
    else:
        high = given["epsilon"] if given["epsilon_high"] is None else given["epsilon_high"]
        to.settings |= {f"{section}clip": given["epsilon"], f"{section}clip_high": high}
    _advantages(given, to)
    if not given["shuffle_dataset"]:
        to.settings["data.shuffle"] = False


def _advantages(given: GivenArguments, to: RenamedArguments) -> None:
    scale = {True: "group", False: "none"}.get(given["scale_rewards"], given["scale_rewards"])
    kinds = {"group": "group", "none": "dr_grpo"}
    if scale not in kinds:
        raise RefusedError("scale_rewards", f"{scale!r} is not supported; write group or none")
    to.settings["stage.grpo.advantage"] = kinds[str(scale)]
    path = given["reward_model_name_or_path"]
    if path is not None:
        to.settings["stage.grpo.reward"] = [{"reward_model": {"path": path}}]


def _windows(given: GivenArguments, to: RenamedArguments) -> None:
    """A global batch here counts prompts; a batch there, responses."""
    size, group = given["per_device_train_batch_size"], given["num_generations"]
    accumulation = given["gradient_accumulation_steps"]
    steps = given["steps_per_generation"]
    if given["generation_batch_size"] is not None:
        message = "depends on the number of ranks; write steps_per_generation"
        raise RefusedError("generation_batch_size", message)
    steps = accumulation if steps is None else steps
    if steps % accumulation:
        message = f"must be a multiple of gradient_accumulation_steps = {accumulation}"
        raise RefusedError("steps_per_generation", message)
    if size * steps % group:
        message = f"the {size * steps} responses of a window are no multiple of {group}"
        raise RefusedError("num_generations", message)
    to.settings["stage.grpo.mini_batches"] = steps // accumulation
    # the responses of a rank in a window, as the batch of LLaMA-Factory's rule
    to.arguments["per_device_train_batch_size"] = size * steps // group
    to.arguments["gradient_accumulation_steps"] = 1
    # it changes no result, and a global batch, of prompts, is a multiple of it
    to.settings["train.micro_batch_size"] = math.gcd(size, size * steps // group)
    to.notes.append("num_train_epochs and max_steps count optimizer steps of windows, as there")


_COMMON: tuple[tuple[str, RenamingRule], ...] = (
    ("bf16", _precision),
    ("gradient_checkpointing", _recomputation),
)
_TRL: tuple[tuple[str, RenamingRule], ...] = (
    *_COMMON,
    ("model_name_or_path", _model),
    ("use_peft", _method),
    ("load_in_4bit", _bits),
    ("max_length", _length),
    ("dataset_name", _data),
)


def _full(given: GivenArguments, to: RenamedArguments) -> None:
    """transformers' arguments name neither model nor data."""
    to.arguments |= {"finetuning_type": "full", "model_name_or_path": PLACE[0]}
    to.settings["data.datasets"] = [PLACE[1]]
    to.arguments["dataset"] = [PLACE[1]]
    if given["eval_strategy"] not in (None, "no"):
        to.arguments["eval_dataset"] = [PLACE[1]]
        to.settings["data.eval_datasets"] = ["EVALUATION"]
    to.notes.append(
        "model.path, data.datasets, data.cutoff_len and stage are not in the file; write them "
        f"in place of {PLACE[0]} and {PLACE[1]}"
    )


SFT = (*_TRL, ("completion_only_loss", _labels))
DPO = (*_TRL, ("loss_type", _pairs))
KTO = (*_TRL, ("train_sampling_strategy", _kto))
REWARD = (*_TRL, ("center_rewards_coefficient", _reward))
GRPO = (*_TRL, ("loss_type", _grpo), ("steps_per_generation", _windows))
TRANSFORMERS_RULES = (*_COMMON, ("output_dir", _full))
