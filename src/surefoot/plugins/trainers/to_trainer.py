"""Write a Surefoot checkpoint as one from which Hugging Face's Trainer resumes.

Weights and companions unchanged, the moments by number, the schedule's position, the generators and
``trainer_state.json``. ``training_args.bin`` is omitted: the Trainer never reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from ...checkpoint.disk import strict_json
from ...checkpoint.disk.commit import new_folder
from ...checkpoint.disk.folder import CheckpointFolder, open_checkpoint
from ...checkpoint.disk.manifest import STATE as OURS
from ...checkpoint.disk.manifest import is_safetensors
from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.loading import load
from ...checkpoint.sources.copying import copy
from ...checkpoint.sources.source import TensorsInMemory, TensorSource
from ...checkpoint.state.roles import FileRole
from ...checkpoint.verification import ConcurrentCheck
from ...errors import CheckpointError, counted
from ...model.adapters import TRAINED
from ...model.section import ModelSection
from ...network.draft import NetworkOptions
from ...network.method import Method
from ...network.network import Network
from ...network.open import open_network
from ...network.tensors import MetaTensors
from ...optim.bf16_weights import MASTER
from ...parallel.world import ALONE
from ...recipe.recipe import Recipe
from ...storage import files
from ...training.callbacks.early_stop import EarlyStop
from .arguments import group_settings, training_arguments
from .moments import moments_by_number, trainer_groups
from .pickles import write_pickle
from .trainer_folder import OPTIMIZER, RANDOM, SCALER, SCHEDULER, STATE

LEFT_OUT = {OURS, STATE, "recipe.yaml"}
LOGGING_STEPS, SAVE_STEPS = 500, 500  # the Trainer's own defaults; it divides by them


def save_trainer_checkpoint(
    checkpoint: Path, target: Path, *, run: Recipe, base: Path | None = None
) -> dict[str, object]:
    """Write ``checkpoint``, which ``run`` saved, into the new folder ``target``, which appears when
    all of it is written. ``base`` is the model below an adapter.

    Returns the ``TrainingArguments`` with which the Trainer resumes from ``target``.
    """
    opened = open_checkpoint(checkpoint)
    is_adapter = opened.manifest.is_adapter
    if is_adapter and base is None:
        raise CheckpointError(f"{checkpoint}: the checkpoint of an adapter; name its base")
    adapter = checkpoint if is_adapter else None
    skeleton = open_skeleton(base or checkpoint, adapter, run.model, run.method)
    if skeleton.blocks.changes:
        raise CheckpointError(
            f"{checkpoint}: its method trains blocks of parameters in turn, which the Trainer does "
            "not; write a plain model with --to huggingface"
        )
    states = _read_states(checkpoint)
    progress = states["trainer"]
    groups = trainer_groups(skeleton.module)
    settings = group_settings(run.optim, progress)
    with new_folder(target) as folder:
        _write_weights(opened, skeleton, folder)
        moments = _moments(opened, skeleton, states.pop("optimizer"))
        write_pickle(folder / OPTIMIZER, moments_by_number(moments, groups, settings))
        write_pickle(folder / SCHEDULER, _scheduler(settings, progress["global_step"]))
        write_pickle(folder / RANDOM, _generators(states["random"]))
        if run.train.precision == "fp16":
            write_pickle(folder / SCALER, _scaler(states["scaler"]))
        text = _state(opened, run, progress, states.get("callbacks", {}))
        files.write_new(folder / STATE, text)
    return training_arguments(run, progress["max_steps"])


@dataclass
class _Kept:
    state: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _read_states(checkpoint: Path) -> dict[str, dict[str, Any]]:
    names = open_checkpoint(checkpoint).skeleton()
    if missing := sorted({"optimizer", "trainer", "random", "scaler"} - names.keys()):
        raise CheckpointError(
            f"{checkpoint}: it was not saved by a run: it has no state {missing[0]!r}"
        )
    apart = {name for name in names if name != "optimizer" and FileRole(name).is_optimizer}
    kept = {name: _Kept() for name in names if name not in apart}
    load(checkpoint, kept)
    return {name: keeper.state for name, keeper in kept.items()}


def _moments(
    opened: CheckpointFolder, skeleton: Network, saved: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, Mapping[str, torch.Tensor]]:
    """The optimizer's state by the parameters' names in the model."""
    refuse_frozen_adapters(opened.path, saved)
    names = optimizer_names(skeleton)
    if odd := sorted(saved.keys() ^ set(names.values())) if saved else []:
        raise CheckpointError(
            f"{opened.path}: its optimizer state does not belong to the parameters that its "
            f"recipe trains: {counted(len(odd), 'differs', 'differ')}, for example {odd[0]}"
        )
    kept = {name: saved[ours] for name, ours in names.items() if ours in saved}
    # the Trainer knows no master copies
    return {n: {key: t for key, t in s.items() if key != MASTER} for n, s in kept.items()}


def _write_weights(opened: CheckpointFolder, skeleton: Network, folder: Path) -> None:
    """The weights and their companions.

    The Trainer resumes by ``load_state_dict`` into its modules. If files and modules have different
    names (experts that are fused in memory), those of the modules are written: otherwise the
    Trainer would not load these weights, with no more than a warning. ``from_pretrained`` reads
    both.
    """
    source: TensorSource = open_folder(opened.path)
    if skeleton.weights.is_converted:
        with ConcurrentCheck([opened.path]) as check:
            model = AutoModelForCausalLM.from_pretrained(opened.path, dtype="auto")
            if (damage := check.wait()) is not None:
                raise damage
        tied = model.all_tied_weights_keys
        source = TensorsInMemory({n: t for n, t in model.state_dict().items() if n not in tied})
    is_adapter = opened.manifest.is_adapter
    stem, limit = ("adapter_model", None) if is_adapter else ("model", 5_000_000_000)
    copy(source, folder, stem=stem, max_shard_size=limit)
    for name in opened.manifest.files:
        is_weights = is_safetensors(name) or name.endswith(".safetensors.index.json")
        if not is_weights and name not in LEFT_OUT:
            files.make_folder((folder / name).parent)
            files.write_new(folder / name, opened.small(name))


def _scheduler(settings: list[dict[str, object]], step: int) -> dict[str, object]:
    """torch's LambdaLR after ``step`` steps. Its shape comes from the Trainer's arguments."""
    return {
        "base_lrs": [group["initial_lr"] for group in settings],
        "last_epoch": step,
        "_step_count": step + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": [group["lr"] for group in settings],
        "lr_lambdas": [None for _ in settings],
    }


def _generators(saved: Mapping[str, Any]) -> dict[str, object]:
    version, words, gauss = saved["python"]
    numpy = saved["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    place = (numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"])
    found: dict[str, object] = {
        "python": (version, tuple(words), gauss),
        "numpy": (numpy["bit_generator"], key, *place),
        "cpu": saved["torch"],
    }
    return found | ({"cuda": saved["cuda"]} if "cuda" in saved else {})


def _scaler(saved: Mapping[str, Any]) -> dict[str, object]:
    return {
        "scale": float(saved["scale"]),
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": int(saved["calm_steps"]),
    }


def _state(
    opened: CheckpointFolder, run: Recipe, progress: Mapping[str, Any], callbacks: Any
) -> bytes:
    """``trainer_state.json`` as the Trainer needs it: it takes its intervals from here, and
    fails at its next save if its own flags are not among the callbacks.
    """
    content = strict_json.parse_object(opened.small(STATE), str(opened.path / STATE))
    content |= {
        "logging_steps": run.train.log_steps or LOGGING_STEPS,
        "eval_steps": run.train.eval_steps or run.train.log_steps or LOGGING_STEPS,
        "save_steps": run.checkpoint.save_steps or SAVE_STEPS,
        "best_model_checkpoint": None,
    }
    if (best := progress.get("best_global_step")) is not None:
        folder = opened.path.absolute().with_name(f"checkpoint-{best}")
        content["best_model_checkpoint"] = str(folder) if files.is_folder(folder) else None
    flags = ("training_stop", "epoch_stop", "save", "evaluate", "log")
    control = {"args": {f"should_{flag}": False for flag in flags}, "attributes": {}}
    known: dict[str, object] = {"TrainerControl": control}
    if stopper := callbacks.get(EarlyStop.__name__):
        known["EarlyStoppingCallback"] = {
            "args": {
                "early_stopping_patience": run.train.early_stopping_patience,
                "early_stopping_threshold": run.train.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": stopper["num_worse"]},
        }
    content["stateful_callbacks"] = known
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def open_skeleton(
    folder: Path, adapter: Path | None, section: ModelSection, method: Method
) -> Network:
    """A run's network on the meta device, from ``config.json`` in ``folder`` and, if the run trains
    one, the configuration of its ``adapter``."""
    plain = replace(section, adapter=adapter, frozen_adapters=(), gradient_checkpointing="none")
    return open_network(folder, plain, None, ALONE, NetworkOptions(method=method), MetaTensors())


def optimizer_names(network: Network) -> dict[str, str]:
    """The trainable parameters' names in the model -> in the optimizer's state."""
    in_files = {id(parameter): name for name, parameter in network.named.items()}
    return {
        name: in_files[id(parameter)]
        for name, parameter in network.module.named_parameters()
        if parameter.requires_grad
    }


def refuse_frozen_adapters(checkpoint: Path, trained: Iterable[str]) -> None:
    """Raise ``CheckpointError`` if an adapter consists of others than the ``trained`` one, whose
    parameters then have their names in the model instead of those in files."""
    if any(f".{TRAINED}." in name for name in trained):
        raise CheckpointError(
            f"{checkpoint}: frozen adapters of its run (model.frozen_adapters, method.lora.init) "
            "are part of its adapter, which the Trainer would train in full; write an adapter "
            "alone with --to peft"
        )
