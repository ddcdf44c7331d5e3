"""The sections ``parallel``, and the batch sizes, which depend on the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import RecipeError
from ....parallel.section import launched
from ....recipe.files import read_text
from ....recipe.yaml import parse
from ..arguments import FILES, RefusedError
from ..given import GivenArguments, Settings
from .optim import optimizer_of

_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD"}
_ZERO = "zero_optimization"


@dataclass(frozen=True)
class Sharding:
    """How ranks hold a model."""

    is_sharded: bool = False
    reshards: bool = True
    tp: int = 1
    offloads: bool = False


def _mesh(given: GivenArguments) -> Settings:
    """Ranks, how they hold the model, and the batch of all of them."""
    sharding, count = _sharding(given), given.num_ranks
    data, rest = divmod(count, sharding.tp)
    if rest:
        message = f"autotp_size {sharding.tp} does not divide the {count} ranks"
        raise RefusedError("deepspeed", message)
    found = _batches(given, data)
    if count == 1:
        offload = {f"optim.{optimizer_of(given)}.offload_state": True}
        return found | (offload if sharding.offloads else {})
    if launched(given.environment) is None:
        found["parallel.num_processes"] = count
    if sharding.tp > 1:
        found["parallel.tp"] = sharding.tp
    if not sharding.is_sharded:
        return found | {"parallel.dp_replicate": data, "parallel.dp_shard": 1}
    found |= {} if sharding.reshards else {"parallel.reshard_after_forward": False}
    return found | {"parallel.dp_shard": data}


def _batches(given: GivenArguments, data_ranks: int) -> Settings:
    micro, steps = given["per_device_train_batch_size"], given["gradient_accumulation_steps"]
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if given[name] < 1:
            raise RefusedError(name, f"must be at least 1, got {given[name]}")
    buffered = given["ppo_buffer_size"] if given["stage"] == "ppo" else 1
    return {
        "train.micro_batch_size": "auto" if given["auto_find_batch_size"] else micro,
        "train.global_batch_size": micro * steps * data_ranks * buffered,
    }


def _sharding(given: GivenArguments) -> Sharding:
    if given["deepspeed"]:
        return _of_deepspeed(_content("deepspeed", given["deepspeed"]))
    if given["fsdp"] or given["fsdp_config"]:
        return _of_fsdp(given)
    return Sharding()


def _content(argument: str, value: object) -> Mapping[str, Any]:
    """The content of a file that an argument names, or of the argument itself."""
    if isinstance(value, Mapping):
        return value
    text = str(value)
    try:
        is_file = not text.lstrip().startswith("{")
        found = parse(read_text(Path(text)) if is_file else text, text if is_file else "").data
    except RecipeError as error:
        raise RefusedError(argument, str(error)) from None
    if not isinstance(found, Mapping):
        raise RefusedError(argument, f"{text}: expected a mapping")
    return found


def _of_deepspeed(content: Mapping[str, Any]) -> Sharding:
    zero = content.get(_ZERO) or {}
    if not isinstance(zero, Mapping):
        raise RefusedError("deepspeed", f"{_ZERO}: expected a mapping, got {zero!r}")
    keys = {key: value for key, value in content.items() if key != "_comment"}
    _check("deepspeed", "DeepSpeed files", keys | {f"{_ZERO}.{k}": v for k, v in zero.items()})
    stage, tensor = zero.get("stage", 0), content.get("tensor_parallel") or {}
    if stage not in (0, 1, 2, 3):
        raise RefusedError("deepspeed", f"{_ZERO}.stage: expected 0 to 3, got {stage!r}")
    offload = zero.get("offload_optimizer") or {}
    return Sharding(
        is_sharded=stage > 1,
        reshards=stage == 3,
        tp=int(tensor.get("autotp_size", 1)),
        offloads=offload.get("device", "none") != "none",
    )


def _of_fsdp(given: GivenArguments) -> Sharding:
    words = given["fsdp"] or []
    words = words.split() if isinstance(words, str) else list(words)
    options = [str(word) for word in words if word not in (True, "auto_wrap")]
    if "offload" in options:
        message = "offload: weights stay on the GPU; use quantization_bit, badam or more ranks"
        raise RefusedError("fsdp", message)
    config = dict(_content("fsdp_config", given["fsdp_config"])) if given["fsdp_config"] else {}
    inner = config.get("fsdp_config")
    config |= inner if isinstance(inner, Mapping) else {}
    named = {key if key in _FSDP else f"fsdp_{key}": value for key, value in config.items()}
    _check("fsdp_config", "FSDP files of accelerate", named)
    strategy = options[0] if options else str(named.get("fsdp_sharding_strategy", "FULL_SHARD"))
    strategy = _STRATEGIES.get(strategy, strategy.upper())
    reshards = str(named.get("fsdp_reshard_after_forward", True)).lower() not in (
        "false",
        "shard_grad_op",
    )
    if strategy.startswith("HYBRID"):
        message = "hybrid sharding: set parallel.dp_replicate and parallel.dp_shard by overrides"
        raise RefusedError("fsdp", message)
    is_full = strategy != "SHARD_GRAD_OP" and reshards
    return Sharding(is_sharded=strategy != "NO_SHARD", reshards=is_full)


_FSDP = FILES["FSDP files of accelerate"]


def _check(argument: str, kind: str, keys: Mapping[str, object]) -> None:
    """Raises ``RefusedError``: a key of a file is unknown, or not supported."""
    for key, value in keys.items():
        known = FILES[kind].get(key)
        if known is None:
            raise RefusedError(argument, f"{key}: no key of {kind} that is known")
        is_off = isinstance(value, Mapping) and value.get("device", "none") == "none"
        if known.refuses(value) and not is_off:
            raise RefusedError(argument, f"{key}: {known.says}")


PARALLEL = (("per_device_train_batch_size", _mesh),)
