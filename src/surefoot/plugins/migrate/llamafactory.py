"""Rules of LLaMA-Factory's arguments that no row of ``rules.yaml`` can say, section by section.

All other trainers have transformers' training arguments, too, so these rules hold for them as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ...data.rows.registry import FILE, read_registry
from ...errors import DataError, RecipeError, did_you_mean
from ...parallel.section import launched
from ...recipe.files import read_text
from ...recipe.yaml import parse
from ...storage.remote import is_repository_name
from ...training.section import TrackerName
from .arguments import ARGUMENTS, FILES, RefusedError
from .optimizer_arguments import optimizer, optimizer_name
from .rules import GivenArguments, Program, Rules, Settings
from .templates import TEMPLATES, eos_of, next_roles, same_template

_TRACKERS = get_args(TrackerName)
_FEW_PIXELS = 1024  # the default of image_min_pixels, by which next to no picture becomes larger
_FREEZES = {  # part of a model that reads pictures -> the argument by which it is frozen
    "tower": "freeze_vision_tower",
    "projector": "freeze_multi_modal_projector",
}
_TOKENIZED = ("dataset_dict.json", "state.json")  # of a dataset that LLaMA-Factory has tokenized


_LONGEST_SIDE = 8192  # of a picture; a larger `image_resolution` is a number of pixels


def with_present_meaning(name: str, value: Any) -> Any:
    """The value of a former argument as its present one has it: ``image_resolution`` was the side
    of a square in 0.9.0, and a number of pixels in 0.9.1."""
    is_side = name == "image_resolution" and value <= _LONGEST_SIDE
    return value * value if is_side else value


def _adapters(arguments: GivenArguments) -> Settings:
    """All but the last are merged into the base there, and frozen here."""
    adapters = arguments["adapter_name_or_path"] or []
    num_frozen = len(adapters) if arguments["create_new_adapter"] else len(adapters) - 1
    frozen, trained = adapters[: max(0, num_frozen)], adapters[max(0, num_frozen) :]
    settings: Settings = {"model.frozen_adapters": frozen} if frozen else {}
    return settings | ({"model.adapter": trained[0]} if trained else {})


def _dataset_dir(arguments: GivenArguments) -> Settings:
    folder = str(arguments["dataset_dir"])
    if folder.startswith("REMOTE:"):
        repository = folder.removeprefix("REMOTE:")
        raise RefusedError(
            "dataset_dir",
            f"{folder!r} is a folder on a hub; download it: `hf download {repository} "
            "--repo-type dataset --local-dir data`, and write dataset_dir: data",
        )
    no_ids = [name for name in arguments["dataset"] or () if "/" not in name]
    if folder == "ONLINE" and no_ids:
        message = f"{no_ids[0]!r} is no hub id, as dataset_dir is ONLINE; write owner/name"
        raise RefusedError("dataset", message)
    return {}


def _pictures(arguments: GivenArguments) -> Settings:
    """Where pictures are, how large they may be and which parts of the model are frozen, if an
    entry of a dataset names a column of pictures. Every picture is made smaller there before the
    model's processor sees it."""
    try:
        registry = read_registry(Path(str(arguments["dataset_dir"])) / FILE)
    except DataError:  # opening the datasets says what is wrong
        return {}
    names = [*(arguments["dataset"] or ()), *(arguments["eval_dataset"] or ())]
    entries = [entry for name in names if isinstance(entry := registry.get(name), Mapping)]
    columns = [entry.get("columns") for entry in entries]
    if not any(isinstance(each, Mapping) and each.get("images") for each in columns):
        return {}
    if arguments["image_min_pixels"] > _FEW_PIXELS:
        message = (
            "the model's own processor alone makes small pictures larger; set its min_pixels in "
            "preprocessor_config.json of the model, and remove this one"
        )
        raise RefusedError("image_min_pixels", message)
    settings: Settings = {"data.media.max_pixels": arguments["image_max_pixels"]}
    if folder := arguments["media_dir"]:
        settings["data.media.folder"] = folder
    frozen = [part for part, name in _FREEZES.items() if arguments[name]]
    if arguments["train_mm_proj_only"]:
        if arguments["finetuning_type"] != "full":
            raise RefusedError("train_mm_proj_only", "needs finetuning_type: full, as there")
        frozen = ["tower", "language"]
    if arguments["finetuning_type"] == "full" and not arguments["use_badam"]:
        return settings | {"method": {"full": {"frozen_modules": frozen}}}
    if arguments["use_badam"]:
        message = "its blocks have the tower, too, which is frozen there; remove it"
        raise RefusedError("use_badam", message)
    return settings | _adapted_parts(arguments, [part for part in _FREEZES if part not in frozen])


def _adapted_parts(arguments: GivenArguments, trained: Sequence[str]) -> Settings:
    """The parts that have adapters. There ``all`` is the names of all linear layers except those of
    the projector (``find_all_linear_modules``), and each name is one in every part."""
    kind = arguments["finetuning_type"]
    if not trained:
        return {}
    if kind not in ("lora", "oft"):
        message = "only finetuning_type: full, lora and oft train it here"
        raise RefusedError(_FREEZES[trained[0]], message)
    if "projector" in trained and "all" in arguments[f"{kind}_target"]:
        message = (
            f"{kind}_target: all does not adapt the projector of most models there, whatever it "
            "says; write true, or name layers of the projector in place of all"
        )
        raise RefusedError(_FREEZES["projector"], message)
    if arguments["adapter_name_or_path"] and not arguments["create_new_adapter"]:
        return {}  # it is trained further on what it adapts
    return {f"method.{kind}.parts": [*trained, "language"]}


def _template(arguments: GivenArguments) -> Settings:
    """The template of the same name, with their default system message and eos token."""
    name = arguments["template"]
    if name is None or arguments["stage"] == "pt":
        return {}
    if name not in TEMPLATES:
        hint = did_you_mean(name, TEMPLATES)
        message = f"LLaMA-Factory 0.9.5 has no template {name!r}, though former releases may{hint}"
        raise RefusedError("template", f"{message}; without one, the model's own is used")
    template, system = same_template(name)
    settings: Settings = {"data.template": template}
    if system is not None and not arguments.sets("default_system"):
        settings["data.default_system"] = system
    if (eos := eos_of(name)) is not None:
        settings["model.eos_token"] = eos
    return settings


def _tokenized(arguments: GivenArguments) -> Settings:
    """The folder for encoded data, unless LLaMA-Factory has written to it."""
    folder = arguments["tokenized_path"]
    if folder is None or any((Path(folder) / name).exists() for name in _TOKENIZED):
        return {}
    return {"data.cache_dir": folder}


def _ppo(arguments: GivenArguments) -> Settings:
    if arguments["stage"] != "ppo":
        return {}
    return {"stage.ppo.reward": [{"reward_model": {"path": arguments["reward_model"]}}]}


def _logs(arguments: GivenArguments) -> Settings:
    if arguments["logging_strategy"] != "steps":
        return {}
    return {"train.log_steps": _interval(arguments, "logging_steps")}


def _interval(arguments: GivenArguments, name: str) -> int:
    """Steps; below 1 a share of all, which must be known."""
    value: float = arguments[name]
    if value <= 0:
        raise RefusedError(name, f"must be positive, got {value:g}")
    if value >= 1:
        if value % 1:
            raise RefusedError(name, f"expected a whole number of steps, got {value:g}")
        return int(value)
    if arguments["max_steps"] <= 0:
        message = f"{value:g} is a share of all steps; set max_steps, or write a number of steps"
        raise RefusedError(name, message)
    # Rounded as transformers does it.
    return math.ceil(int(arguments["max_steps"]) * value)


def _evaluations(arguments: GivenArguments) -> Settings:
    """By the present name of the strategy; ``conversion`` has read the former one."""
    if arguments["eval_strategy"] != "steps":
        return {}
    name = "logging_steps" if arguments["eval_steps"] is None else "eval_steps"
    return {"train.eval_steps": _interval(arguments, name)}


def _saves(arguments: GivenArguments) -> Settings:
    strategy = arguments["save_strategy"]
    if strategy == "best":  # when it is evaluated
        strategy = arguments["eval_strategy"]
        steps = _evaluations(arguments).get("train.eval_steps")
    else:
        steps = _interval(arguments, "save_steps") if strategy == "steps" else None
    settings: Settings = {"checkpoint.save_steps": steps}
    return settings | ({"checkpoint.save_epoch": True} if strategy == "epoch" else {})


def _best(arguments: GivenArguments) -> Settings:
    name = arguments["metric_for_best_model"]
    if name is None:
        return {}
    full = f"eval_{name.removeprefix('eval_')}"
    here = {"eval_accuracy": "eval_token_accuracy"}
    return {"train.metric_for_best_model": here.get(full, full)}


def _trackers(arguments: GivenArguments) -> Settings:
    """``use_swanlab`` has settings of its own, of which the general ones come first."""
    names = [name for name in arguments["report_to"] if name in _TRACKERS]
    set_names = [name for name in ("project", "run_name") if arguments.sets(name)]
    settings: Settings = {f"train.{name}": arguments[name] for name in set_names}
    if arguments["use_swanlab"] and arguments["swanlab_mode"] != "disabled":
        names = list(dict.fromkeys([*names, "swanlab"]))
        settings = {"train.project": arguments["swanlab_project"]} | settings
        if arguments["swanlab_run_name"] is not None:
            settings = {"train.run_name": arguments["swanlab_run_name"]} | settings
    if names:
        settings["train.report_to"] = names
    if "swanlab" in names and arguments["swanlab_mode"] in ("local", "offline"):
        settings["train.report_offline"] = True
    return settings


def _uploads(arguments: GivenArguments) -> Settings:
    if not arguments["push_to_hub"]:
        return {}
    name, is_private = arguments["hub_model_id"], arguments["hub_private_repo"]
    if name is None or not is_repository_name(name):
        problem = "is missing" if name is None else f"got {name!r}"
        message = f"{problem}; name the repository to upload to, as owner/name"
        raise RefusedError("hub_model_id", message)
    strategy = arguments["hub_strategy"]
    strategy = "all_checkpoints" if strategy == "checkpoint" else strategy
    settings: Settings = {"train.push_to_hub": name, "train.hub_strategy": strategy}
    return settings if is_private is None else settings | {"train.hub_private_repo": is_private}


def _resume(arguments: GivenArguments) -> Settings:
    place = arguments["resume_from_checkpoint"] or ""
    # Switches there; a run here resumes from its own folder without any.
    is_auto = place.lower() in ("true", "false", "none", "null", "")
    return {} if is_auto else {"checkpoint.resume": place}


# The mesh, and the batch of all ranks

_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD"}
_ZERO = "zero_optimization"


def _mesh(arguments: GivenArguments) -> Settings:
    """Ranks, how they hold the model, and the batch of all of them."""
    num_ranks = arguments.num_ranks
    sharding: Settings = {}
    if arguments["deepspeed"]:
        sharding = _of_deepspeed(_content("deepspeed", arguments["deepspeed"]))
    elif arguments["fsdp"] or arguments["fsdp_config"]:
        sharding = _of_fsdp(arguments)
    offloads, tp = sharding.pop("offloads", False), sharding.get("parallel.tp", 1)
    assert isinstance(tp, int)
    data_ranks, rest = divmod(num_ranks, tp)
    if rest:
        raise RefusedError("deepspeed", f"autotp_size {tp} does not divide the {num_ranks} ranks")
    micro = arguments["per_device_train_batch_size"]
    steps = arguments["gradient_accumulation_steps"]
    buffered = arguments["ppo_buffer_size"] if arguments["stage"] == "ppo" else 1
    settings: Settings = {
        "train.micro_batch_size": "auto" if arguments["auto_find_batch_size"] else micro,
        "train.global_batch_size": micro * steps * data_ranks * buffered,
    }
    if num_ranks == 1:
        offload = {f"optim.{optimizer_name(arguments)}.offload_state": True}
        return settings | (offload if offloads else {})
    if launched(arguments.environment) is None:
        settings["parallel.num_processes"] = num_ranks
    replicas = {"parallel.dp_replicate": data_ranks, "parallel.dp_shard": 1}
    is_sharded = sharding.pop("parallel.dp_shard", False)
    return settings | sharding | ({"parallel.dp_shard": data_ranks} if is_sharded else replicas)


def _timeout(arguments: GivenArguments) -> Settings:
    """As many minutes, if it is set; the default of 1800 seconds waits no longer than auto does."""
    if not arguments.sets("ddp_timeout"):
        return {}
    return {"parallel.timeout": arguments["ddp_timeout"] / 60}


def _of_deepspeed(content: Mapping[str, Any]) -> Settings:
    """``parallel.dp_shard`` is there if weights are sharded."""
    zero = content.get(_ZERO) or {}
    if not isinstance(zero, Mapping):
        raise RefusedError("deepspeed", f"{_ZERO}: expected a mapping, got {zero!r}")
    keys = {key: value for key, value in content.items() if key != "_comment"}
    _check("deepspeed", "DeepSpeed files", keys | {f"{_ZERO}.{k}": v for k, v in zero.items()})
    stage, tensor = zero.get("stage", 0), content.get("tensor_parallel") or {}
    if stage not in (0, 1, 2, 3):
        raise RefusedError("deepspeed", f"{_ZERO}.stage: expected 0 to 3, got {stage!r}")
    offload = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    settings: Settings = {"offloads": True} if offload else {}
    if (tp := int(tensor.get("autotp_size", 1))) > 1:
        settings["parallel.tp"] = tp
    return settings | _shards(is_sharded=stage > 1, reshards=stage == 3)


def _shards(*, is_sharded: bool, reshards: bool) -> Settings:
    if not is_sharded:
        return {}
    resharding = {} if reshards else {"parallel.reshard_after_forward": False}
    return {"parallel.dp_shard": True, **resharding}


def _of_fsdp(arguments: GivenArguments) -> Settings:
    words = arguments["fsdp"] or []
    words = str(words).split() if isinstance(words, str | bool) else list(words)
    options = [str(word) for word in words if str(word).lower() not in ("true", "auto_wrap")]
    if "offload" in options:
        message = "offload: weights stay on the GPU; use quantization_bit, badam or more ranks"
        raise RefusedError("fsdp", message)
    given_config = arguments["fsdp_config"]
    config = dict(_content("fsdp_config", given_config)) if given_config else {}
    # accelerate's own files have the keys one level below.
    inner = config.get("fsdp_config")
    config |= inner if isinstance(inner, Mapping) else {}
    fsdp_keys = FILES["FSDP files of accelerate"]
    # transformers takes the keys with and without accelerate's prefix.
    prefixed_config = {
        key if key in fsdp_keys else f"fsdp_{key}": value for key, value in config.items()
    }
    _check("fsdp_config", "FSDP files of accelerate", prefixed_config)
    strategy = str(prefixed_config.get("fsdp_sharding_strategy", "FULL_SHARD"))
    strategy = options[0] if options else strategy
    strategy = _STRATEGIES.get(strategy, strategy.upper())
    if strategy.startswith("HYBRID"):
        message = "hybrid sharding: set parallel.dp_replicate and parallel.dp_shard by overrides"
        raise RefusedError("fsdp", message)
    after_forward = str(prefixed_config.get("fsdp_reshard_after_forward", True)).lower()
    reshards = strategy != "SHARD_GRAD_OP" and after_forward not in ("false", "shard_grad_op")
    return _shards(is_sharded=strategy != "NO_SHARD", reshards=reshards)


def _content(argument: str, value: object) -> Mapping[str, Any]:
    """The content of a file that an argument names, or of the argument itself."""
    if isinstance(value, Mapping):
        return value
    text = str(value)
    try:
        is_file = not text.lstrip().startswith("{")
        content = parse(read_text(Path(text)) if is_file else text, text if is_file else "").data
    except RecipeError as error:
        raise RefusedError(argument, str(error)) from None
    if not isinstance(content, Mapping):
        raise RefusedError(argument, f"{text}: expected a mapping")
    return content


def _check(argument: str, kind: str, keys: Mapping[str, object]) -> None:
    """Raises ``RefusedError``: a key of a file is unknown, or not supported."""
    for key, value in keys.items():
        row = FILES[kind].get(key)
        if row is None:
            raise RefusedError(argument, f"{key}: no key of {kind} that is known")
        # A file of DeepSpeed may name a kind of offloading that it does not use.
        is_off = isinstance(value, Mapping) and value.get("device", "none") == "none"
        if row.refuses(value) and not is_off:
            raise RefusedError(argument, f"{key}: {row.says}")


LLAMAFACTORY = Program(
    "LLaMA-Factory",
    ARGUMENTS,
    Rules(
        "llamafactory",
        functions=(
            ("adapter_name_or_path", _adapters),
            ("dataset_dir", _dataset_dir),
            ("image_max_pixels", _pictures),
            ("template", _template),
            ("tokenized_path", _tokenized),
            ("reward_model", _ppo),
            ("logging_steps", _logs),
            ("eval_strategy", _evaluations),
            ("save_strategy", _saves),
            ("metric_for_best_model", _best),
            ("report_to", _trackers),
            ("push_to_hub", _uploads),
            ("resume_from_checkpoint", _resume),
            ("optim", optimizer),
            ("per_device_train_batch_size", _mesh),
            ("ddp_timeout", _timeout),
        ),
    ),
)


# Notes that no row can say


def template_note(arguments: GivenArguments) -> str | None:
    """How training texts differ by the template."""
    name = arguments["template"]
    if name is None or arguments["stage"] == "pt":
        return None
    template, system = same_template(name)
    if template == "auto":
        return f"template: {name} is the model's own chat template here, which it is served with"
    parts = []
    if system is not None and not arguments.sets("default_system"):
        parts.append("its default system message is in data.default_system")
    if arguments["masks_line_break"]:
        parts.append("the line break after a response is not trained on")
    if ends := next_roles(name):
        parts.append(f"a turn ends in {' or '.join(ends)}, as the released model's; there in eos")
    parts.append("docs/templates.md lists others, if any")
    return f"template: {name}: {'; '.join(parts)}"


def trackers_note(arguments: GivenArguments) -> str | None:
    """Which trackers are not fed."""
    if "all" in arguments["report_to"]:
        return "report_to: all is none of them here; name those that you want"
    others = [name for name in arguments["report_to"] if name not in ("none", *_TRACKERS)]
    return f"report_to: {', '.join(others)} is not written; metrics.jsonl is" if others else None
