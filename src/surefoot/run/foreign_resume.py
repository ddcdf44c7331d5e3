"""Resume from another trainer's checkpoint: detect the trainer that wrote it, call its loader.

Plugins name the trainers. What their loaders share is here, too."""

from __future__ import annotations

import contextlib
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from .. import schema
from ..checkpoint.disk.commit import named
from ..checkpoint.disk.manifest import MANIFEST
from ..checkpoint.layouts.detection import detect_layout
from ..checkpoint.sources import Shape, TensorSource
from ..checkpoint.state.states import local_box_of
from ..errors import CheckpointError, RunError, counted
from ..extensions import Extended
from ..model.base_identity import BaseModel
from ..network.method import Weights
from ..optim import OPTIMIZERS
from ..optim.bf16_weights import rule_of
from ..recipe.files import read_adapter
from ..storage import files
from ..training.trainer import Trainer


class ForeignTrainer(ABC):
    """Another trainer, from whose checkpoints a run can resume."""

    title: ClassVar[str]
    """The trainer, for people."""

    needs_base: ClassVar[bool]
    """Whether the weights of the base must be loaded before its checkpoint is."""

    optimizer: ClassVar[str] = "adamw"
    """The optimizer whose moments it saves."""

    @abstractmethod
    def recognise(self, folder: Path) -> bool:
        """Whether it wrote ``folder``. From names alone."""

    def latest_in(self, run: Path) -> Path | None:
        """The latest complete checkpoint in the folder of a run of its own; None if there is none,
        or if it has no such folders."""
        return None

    def pickles_in(self, folder: Path) -> list[str]:
        """The pickles that ``load`` reads."""
        return []

    def check(self, folder: Path, *, trust_pickle: bool, pp: int) -> None:
        """Refuse what shows without a model; by default nothing."""
        return

    def check_weights(self, folder: Path, base: BaseModel) -> None:
        """Refuse what headers show, before the data is encoded; by default nothing."""
        return

    def trained_with(self, folder: Path, optim: Any, method: Any) -> tuple[Any, Any]:
        """Optimizer and method with the settings that its checkpoint says it was trained with: it
        has the moments of one optimizer, and an adapter acts by some of its settings."""
        kind = OPTIMIZERS[self.optimizer]
        optim = optim if type(optim) is kind else kind()
        adapter = read_adapter(folder)
        with contextlib.suppress(ValueError, TypeError):  # of another kind: its weights are refused
            continued = method if adapter is None else method.continued(adapter)
            cls: type = type(method)
            kept = [name for name, each in schema.settings(cls).items() if each.kept]
            method = replace(method, **{name: getattr(continued, name) for name in kept})
        return optim, method

    @abstractmethod
    def load(self, folder: Path, trainer: Trainer, *, base: BaseModel, trust_pickle: bool) -> None:
        """Make ``trainer`` what the other trainer was."""


TRAINERS: Mapping[str, ForeignTrainer] = Extended("trainers", {})


def writer_of(folder: Path) -> ForeignTrainer | None:
    """The other trainer that wrote ``folder``; None if it is Surefoot's, or nobody's."""
    if files.exists(folder / MANIFEST):
        return None
    return next((trainer for trainer in TRAINERS.values() if trainer.recognise(folder)), None)


def detect_trainer(folder: Path, *, trust_pickle: bool, pp: int) -> ForeignTrainer | None:
    """The other trainer that wrote ``folder``; None if Surefoot did.

    Raises for what shows without a model: ``CheckpointError`` for pickles that are not trusted, or
    mere weights, ``RecipeError`` for a pipeline, which cannot resume from a Trainer's checkpoint.
    """
    with files.raising(CheckpointError):
        writer = writer_of(folder)
        layout = None if writer is not None else detect_layout(folder)
    if writer is not None:
        writer.check(folder, trust_pickle=trust_pickle, pp=pp)
        return writer
    if layout is not None and not layout.has_manifest:
        where = "adapter" if layout.is_adapter else "path"
        raise CheckpointError(
            f"{folder}: only weights ({layout.name}), without training state, so it cannot be "
            "resumed; to start from them, remove checkpoint.resume and set "
            f"model.{where}={shlex.quote(str(folder))}"
        )
    return None


def refuse_output_dir(folder: Path) -> None:
    """Raise ``RunError`` if a new run's ``folder`` has checkpoints of another trainer."""
    # The Hugging Face Trainer writes into checkpoint-N itself: such a folder may be half written
    # and still parse, so it is taken only where its path is named (docs/decisions/0013).
    for path in reversed(named(folder)):
        if (writer := writer_of(path)) is not None:
            raise RunError(
                f"train.output_dir: {folder} contains {path.name} of {writer.title}; choose "
                f"another folder, and resume with checkpoint.resume={path}"
            )


def latest_foreign(run: Path) -> tuple[ForeignTrainer, Path] | None:
    """The trainer that the folder ``run`` is of, and its latest complete checkpoint."""
    if all(files.exists(path / MANIFEST) for path in named(run)):
        return None
    for trainer in TRAINERS.values():
        if (latest := trainer.latest_in(run)) is not None:
            return trainer, latest
    return None


def other_model(shapes: Mapping[str, Shape], weights: Weights) -> str | None:
    """Why tensors of these ``shapes`` are not those of ``weights``, if they are not."""
    own_shapes = {name: tuple(t.shape) for name, t in weights.state_dict().items()}
    odd = sorted(own_shapes.keys() ^ shapes.keys())
    odd = odd or [name for name, shape in own_shapes.items() if shape != shapes[name]]
    if not odd:
        return None
    here, there = (
        f"of shape {list(side[odd[0]])}" if odd[0] in side else "missing"
        for side in (own_shapes, shapes)
    )
    return (
        f"a checkpoint of another model: {counted(len(odd), 'tensor differs', 'tensors differ')}; "
        f"{odd[0]} is {there} in it, {here} in this run"
    )


@torch.no_grad()
def fill_weights(source: TensorSource, weights: Weights) -> None:
    """Read box by box into the existing tensors, so that no second model is in memory."""
    current = weights.state_dict()
    for name, tensor in current.items():
        local_box_of(name, tensor, weights.cuts_of(name)).fill(partial(source.read, name))
    weights.load_state_dict(current)


def expect_adamw(optimizer: torch.optim.Optimizer, where: Path) -> None:
    """Reject an optimizer to which the moments in ``where`` do not belong."""
    if not isinstance(rule_of(optimizer), torch.optim.AdamW):
        raise CheckpointError(
            f"{where}: it contains AdamW's moments, but the recipe's optimizer is "
            f"{type(rule_of(optimizer)).__name__}; set optim to adamw"
        )
