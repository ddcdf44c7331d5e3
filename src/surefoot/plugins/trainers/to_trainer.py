"""Write a Surefoot checkpoint as one from which Hugging Face's Trainer resumes.

Weights and companions unchanged, the moments by number, the schedule's position, the generators of
each rank and ``trainer_state.json``. ``training_args.bin`` is omitted: the Trainer never reads it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...checkpoint.converting.targets import Done, Origin, Target
from ...checkpoint.disk import strict_json
from ...checkpoint.disk.commit import new_folder
from ...checkpoint.disk.folder import CheckpointFolder, open_checkpoint
from ...checkpoint.disk.manifest import STATE as OURS
from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.loading import load
from ...checkpoint.sources import Progress, TensorsInMemory, TensorSource, copy
from ...checkpoint.state.roles import FileRole
from ...checkpoint.verification import ConcurrentCheck
from ...errors import CheckpointError, counted
from ...model.adapters import TRAINED
from ...model.config import auto_class
from ...model.numerics import LossScaler, derive
from ...network.draft import MetaTensors, NetworkOptions
from ...network.network import Network
from ...network.open import open_network
from ...optim.bf16_weights import MASTER
from ...optim.optimizer import Optimizer
from ...optim.plateau import Plateau, Reductions
from ...parallel.sharding import DATA_AXES
from ...parallel.world import ALONE
from ...recipe.files import RUN_RECIPE
from ...recipe.recipe import Recipe, greater_is_better
from ...recipe.recipe import load as load_recipe
from ...storage import files
from .pickles import write_pickle
from .trainer_folder import (
    OPTIMIZER,
    SCALER,
    SCHEDULER,
    STATE,
    moments_by_number,
    trainer_groups,
)

_LEFT_OUT = {OURS, STATE, "recipe.yaml"}
_MOST_GPUS = 8  # of one machine; the Trainer logs an error for states of more than there are
_INTERVAL = 500  # the Trainer's own default of steps; it divides by them


@dataclass(frozen=True)
class TrainerCheckpoint(Target):
    """A checkpoint that ``Trainer.train(resume_from_checkpoint=DST)`` resumes from."""

    base: str | None = None
    """The base model of an adapter if it moved, or of foreign weights (DCP, DeepSpeed)."""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Weights, moments, schedule and log of a Surefoot checkpoint."""
        open_checkpoint(origin.folder)  # ours; nobody else's holds what it takes
        base = origin.adapter_base()
        if not (origin.folder / RUN_RECIPE).is_file():
            raise CheckpointError(
                f"{origin.folder}: it has no {RUN_RECIPE}, which contains the settings "
                "of its optimizer"
            )
        recipe = load_recipe(origin.folder / RUN_RECIPE, is_saved=True)
        arguments = save_trainer_checkpoint(origin.folder, target, run=recipe, base=base)
        words = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        return Done(
            {"training_arguments": arguments},
            f"resume with TrainingArguments(output_dir=..., {words})\n"
            f"and trainer.train(resume_from_checkpoint={str(target)!r})",
        )


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
    model = replace(
        run.model,
        adapter=checkpoint if is_adapter else None,
        frozen_adapters=(),
        # The network is built for its names and shapes; nothing is computed.
        gradient_checkpointing="none",
    )
    options = NetworkOptions(method=run.method)
    network = open_network(base or checkpoint, model, None, ALONE, options, MetaTensors())
    if network.blocks.changes:
        raise CheckpointError(
            f"{checkpoint}: its method trains blocks of parameters in turn, which the Trainer does "
            "not; write a plain model with --to huggingface"
        )
    states = _read_states(opened)
    progress = states["trainer"]
    settings = _group_settings(run.optim, progress)
    with new_folder(target) as folder:
        _write_weights(opened, network, folder)
        moments = _moments(opened, network, states.pop("optimizer"))
        numbered = moments_by_number(moments, trainer_groups(network.module), settings)
        write_pickle(folder / OPTIMIZER, numbered)
        write_pickle(folder / SCHEDULER, _scheduler(run, settings, progress))
        if run.train.precision == "fp16":
            write_pickle(folder / SCALER, _scaler(states["scaler"]))
        _write_generators(opened, run, progress["global_step"], folder)
        files.write_new(folder / STATE, _state(opened, run, progress))
    return training_arguments(run, progress["max_steps"])


@dataclass
class _PlainState:
    state: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _read_states(opened: CheckpointFolder) -> dict[str, dict[str, Any]]:
    names = opened.skeleton().keys()
    if missing := sorted({"optimizer", "trainer", "scaler"} - names):
        raise CheckpointError(
            f"{opened.path}: it was not saved by a run: it has no state {missing[0]!r}"
        )
    # without the optimizers of other models
    states = {n: _PlainState() for n in names if n == "optimizer" or not FileRole(n).is_optimizer}
    load(opened.path, states)
    return {name: plain.state for name, plain in states.items()}


def _moments(
    opened: CheckpointFolder, network: Network, saved: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, Mapping[str, torch.Tensor]]:
    """The optimizer's state by the parameters' names in the model."""
    # next to frozen adapters, parameters have their names in the model instead of those in files
    if any(f".{TRAINED}." in name for name in saved):
        raise CheckpointError(
            f"{opened.path}: frozen adapters of its run (model.frozen_adapters, method.lora.init) "
            "are part of its adapter, which the Trainer would train in full; write an adapter "
            "alone with --to peft"
        )
    in_files = {id(parameter): name for name, parameter in network.named.items()}
    names = {n: in_files[id(p)] for n, p in network.module.named_parameters() if p.requires_grad}
    if odd := sorted(saved.keys() ^ set(names.values())) if saved else []:
        raise CheckpointError(
            f"{opened.path}: its optimizer state does not belong to the parameters that its "
            f"recipe trains: {counted(len(odd), 'differs', 'differ')}, for example {odd[0]}"
        )
    return {  # the Trainer knows no master copies
        name: {key: tensor for key, tensor in saved[in_file].items() if key != MASTER}
        for name, in_file in names.items()
        if in_file in saved
    }


def _write_weights(opened: CheckpointFolder, network: Network, folder: Path) -> None:
    """The weights and their companions.

    The Trainer resumes by ``load_state_dict`` into its modules. If files and modules have different
    names (experts that are fused in memory), those of the modules are written: otherwise the
    Trainer would not load these weights, with no more than a warning. ``from_pretrained`` reads
    both.
    """
    source: TensorSource = open_folder(opened.path)
    if network.weights.is_converted:
        # from_pretrained compares no digests, so they are compared while it reads.
        with ConcurrentCheck([opened.path]) as check:
            opener = auto_class(network.inner.config)
            model = opener.from_pretrained(opened.path, dtype="auto")
            if (damage := check.wait()) is not None:
                raise damage
        tied = model.all_tied_weights_keys
        source = TensorsInMemory({n: t for n, t in model.state_dict().items() if n not in tied})
    is_adapter = opened.manifest.is_adapter
    # PEFT reads an adapter from one file only.
    stem, limit = ("adapter_model", None) if is_adapter else ("model", 5_000_000_000)
    copy(source, folder, stem=stem, max_shard_size=limit)
    for name in opened.manifest.companions:
        if not name.endswith(".safetensors.index.json") and name not in _LEFT_OUT:
            files.make_folder((folder / name).parent)
            files.write_new(folder / name, opened.small(name))


def _scheduler(
    run: Recipe, settings: list[dict[str, object]], progress: Mapping[str, Any]
) -> dict[str, object]:
    """torch's LambdaLR after the steps so far. Its shape comes from the Trainer's arguments. Or its
    ReduceLROnPlateau, which has its settings in its state."""
    step, rule = progress["global_step"], run.optim.schedule_over(1).plateau
    if rule is not None:
        made, rates = _plateau(run, rule), [group["lr"] for group in settings]
        lowest = made.pop("min_lr")
        reductions = _reductions(progress)
        worst = -math.inf if greater_is_better(run) else math.inf
        best = reductions.best
        num_evals = sum(run.train.metric_for_best_model in r for r in progress["log_history"])
        return {
            **made,
            "default_min_lr": lowest,
            "min_lrs": [lowest for _ in settings],
            "eps": 1e-8,
            "mode_worse": worst,
            "best": worst if best is None else best,
            "num_bad_epochs": reductions.num_bad,
            "cooldown_counter": reductions.cooldown,
            "last_epoch": num_evals,
            "_last_lr": rates,
        }
    return {
        "base_lrs": [group["initial_lr"] for group in settings],
        "last_epoch": step,
        # torch counts the call in its constructor, too.
        "_step_count": step + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": [group["lr"] for group in settings],
        "lr_lambdas": [None for _ in settings],
    }


def _reductions(progress: Mapping[str, Any]) -> Reductions:
    reductions = Reductions()
    reductions.load_state_dict(progress.get("reductions") or {})
    return reductions


def _plateau(run: Recipe, rule: Plateau) -> dict[str, Any]:
    """The keywords of torch's ReduceLROnPlateau."""
    lowest = run.optim.min_lr_ratio * run.optim.learning_rate
    mode = "max" if greater_is_better(run) else "min"
    return {**asdict(rule), "mode": mode, "min_lr": lowest}


def _scaler(saved: Mapping[str, Any]) -> dict[str, object]:
    scaler = LossScaler(enabled=True)
    scaler.load_state_dict(saved)
    return {
        "scale": scaler.scale,
        # torch's defaults, with which the Trainer makes its scaler.
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": scaler.calm_steps,
    }


def _write_generators(opened: CheckpointFolder, run: Recipe, step: int, folder: Path) -> None:
    """The generators of a process alone, and of each of several, as they are when the run begins
    its next step: not those that are saved, because each micro-batch of a run seeds them."""
    count = math.prod(opened.manifest.mesh.get(axis, 1) for axis in DATA_AXES)
    for rank in range(count):
        seed = derive(run.train.seed, step, 0, rank)
        state: dict[str, object] = {
            "python": random.Random(seed).getstate(),
            "numpy": np.random.RandomState(seed % 2**32).get_state(),
            "cpu": torch.Generator().manual_seed(seed).get_state(),
            # of a generator on a GPU: its seed, and how far it is
            "cuda": torch.tensor([seed, 0]).view(torch.uint8),
        }
        if rank == 0:
            write_pickle(folder / "rng_state.pth", state)
        if count > 1:
            state["cuda"] = [state["cuda"]] * min(count, _MOST_GPUS)
            write_pickle(folder / f"rng_state_{rank}.pth", state)


def _state(opened: CheckpointFolder, run: Recipe, progress: Mapping[str, Any]) -> bytes:
    """``trainer_state.json`` as the Trainer needs it: it takes its intervals from here, and
    fails at its next save if its own flags are not among the callbacks.
    """
    content = strict_json.parse_object(opened.small(STATE), str(opened.path / STATE))
    content |= {
        "logging_steps": run.train.log_steps or _INTERVAL,
        "eval_steps": run.train.eval_steps or run.train.log_steps or _INTERVAL,
        "save_steps": run.checkpoint.save_steps or _INTERVAL,
        "best_model_checkpoint": None,
    }
    if (best := progress.get("best_global_step")) is not None:
        folder = opened.path.absolute().with_name(f"checkpoint-{best}")
        content["best_model_checkpoint"] = str(folder) if files.is_folder(folder) else None
    flags = ("training_stop", "epoch_stop", "save", "evaluate", "log")
    control = {"args": {f"should_{flag}": False for flag in flags}, "attributes": {}}
    content["stateful_callbacks"] = {"TrainerControl": control}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def training_arguments(run: Recipe, max_steps: int) -> dict[str, object]:
    """Keywords of ``TrainingArguments`` to resume the run of AdamW, which its checkpoints do not
    contain; in the warmup it is one step behind."""
    train, optim = run.train, run.optim
    adam = {"beta1", "beta2", "epsilon"} & {setting.name for setting in fields(optim)}
    return {
        "max_steps": max_steps,
        "per_device_train_batch_size": train.fixed_micro_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "max_grad_norm": train.max_grad_norm,
        "seed": train.seed,
        "label_smoothing_factor": run.stage.spec.smoothing,
        "learning_rate": optim.learning_rate,
        "weight_decay": optim.weight_decay,
        **{f"adam_{name}": getattr(optim, name) for name in adam},
        **_schedule(run, max_steps),
        **{name: True for name in ("bf16", "fp16") if name == train.precision},
    }


def _group_settings(optim: Optimizer, progress: Mapping[str, Any]) -> list[dict[str, object]]:
    """The two groups of the Trainer's optimizer after this step."""
    # A matrix, as weight decay is for matrices; only the settings are read.
    optimizer = optim.build([("w", torch.nn.Parameter(torch.zeros(1, 1)))], {})
    if not isinstance(optimizer, torch.optim.AdamW):
        raise CheckpointError(
            f"the run's optimizer is {type(optimizer).__name__}; only AdamW's state can be "
            "converted"
        )
    if optim.learning_rates:
        raise CheckpointError(
            "optim.adamw.learning_rates: the Trainer's optimizer has one learning rate for all "
            "parameters, so this state cannot be converted"
        )
    group = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "names")}
    peak = group["lr"]
    schedule = optim.schedule_over(progress["max_steps"], _reductions(progress))
    factor = schedule.factor(progress["global_step"])
    group |= {"lr": peak * factor, "initial_lr": peak}
    return [group, {**group, "weight_decay": 0.0}]


def _schedule(run: Recipe, max_steps: int) -> dict[str, object]:
    optim = run.optim
    schedule, settings = optim.schedule_over(max_steps), dict[str, object]()
    name: str = schedule.name
    if schedule.plateau is not None:
        every = run.train.eval_steps
        return {
            "lr_scheduler_type": name,
            "lr_scheduler_kwargs": _plateau(run, schedule.plateau),
            "metric_for_best_model": run.train.metric_for_best_model,
            "greater_is_better": bool(greater_is_better(run)),
            **({"eval_strategy": "epoch"} if every is None else {}),
            **({} if every is None else {"eval_strategy": "steps", "eval_steps": every}),
        }
    if name == "constant" and schedule.warmup_steps:
        name = "constant_with_warmup"
    elif name == "cosine" and schedule.min_ratio:
        name, settings = "cosine_with_min_lr", {"min_lr_rate": schedule.min_ratio}
    elif name == "linear" and schedule.min_ratio:
        lowest = optim.learning_rate * schedule.min_ratio
        name, settings = "polynomial", {"lr_end": lowest, "power": 1.0}
    elif name in ("wsd", "wsd_cosine"):
        start = max(schedule.warmup_steps, max_steps - schedule.decay_steps)
        settings = {
            "num_decay_steps": max_steps - start,
            "decay_type": "linear" if name == "wsd" else "cosine",
            "min_lr_ratio": schedule.min_ratio,
        }
        name = "warmup_stable_decay"
    return {
        "lr_scheduler_type": name,
        "warmup_steps": schedule.warmup_steps,
        **({"lr_scheduler_kwargs": settings} if settings else {}),
    }
