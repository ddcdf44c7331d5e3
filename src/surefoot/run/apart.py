"""A run on machines that have no folder in common, but a store: where a launch of it begins, and
what it cannot do."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.disk.commit import step_of
from ..checkpoint.saving._writing import Apart
from ..errors import CheckpointError, RunError
from ..parallel.world import World
from ..recipe.recipe import Recipe
from ..training.restoring import outlined


class DamagedStartError(CheckpointError):
    """Some rank has found damage in the checkpoint of ``step``, from which all were to begin."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


def refuse_apart(recipe: Recipe) -> None:
    """Raise ``RunError`` for what needs a folder that all machines see."""
    place, push = recipe.train.output_dir, "run `surefoot push` on its URL when the run has ended"
    reasons = {
        "checkpoint.layout: full has files that all ranks write; leave it unset": (
            recipe.checkpoint.layout_in(place) == "full"
        ),
        "the server of the stage reads weights that training writes; sample without it": (
            recipe.stage.sampler.server is not None
        ),
        f"train.push_to_hub needs whole checkpoints; {push}": recipe.train.push_to_hub is not None,
        "memory:// exists in one process": str(place).startswith("memory:"),
    }
    for why in (why for why, applies in reasons.items() if applies):
        raise RunError(
            "train.output_dir: the machines of this run have no folder in common (each has its "
            f"own {recipe.train.folder}), and {why}. Or set train.cache_dir to a folder on a disk "
            "that all of them see"
        )


def start_of(start: Path | None, apart: Apart | None, world: World) -> Path | None:
    """The folder from which this rank resumes: ``start``, which rank 0 has chosen, or its outline
    on this machine if it is in the store. A collective call."""
    is_stored = apart is not None and start is not None and start.parent == Path(apart.folder)
    if apart is None or start is None or not is_stored:
        return start
    return outlined(apart, step_of(start), world)
