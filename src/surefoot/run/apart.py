"""A run on machines that have no folder in common, but a store: where a launch of it begins, and
what it cannot do."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.apart import Apart
from ..checkpoint.disk.commit import step_of
from ..checkpoint.section import CheckpointSection
from ..errors import CheckpointError, DamagedFileError, RunError
from ..parallel.world import World
from ..training.restoring import outlined
from ..training.section import TrainSection
from ..training.stage import Stage


class DamagedStartError(CheckpointError):
    """Some rank has found damage in the checkpoint of ``step``, from which all were to begin."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


def refuse_apart(train: TrainSection, saves: CheckpointSection, stage: Stage) -> None:
    """Raise ``RunError`` for what needs a folder that all machines see."""
    place, push = train.output_dir, "run `surefoot push` on its URL when the run has ended"
    reasons = {
        "checkpoint.layout: full has files that all ranks write; leave it unset": (
            saves.layout_in(place) == "full"
        ),
        "the server of the stage reads weights that training writes; sample without it": (
            stage.sampler.server is not None
        ),
        f"train.push_to_hub needs complete checkpoints; {push}": train.push_to_hub is not None,
        "memory:// exists in one process": str(place).startswith("memory:"),
    }
    for why in (why for why, applies in reasons.items() if applies):
        raise RunError(
            "train.output_dir: the machines of this run have no folder in common (each has its "
            f"own {train.folder}), and {why}. Or set train.cache_dir to a folder on a disk "
            "that all of them see"
        )


def start_of(start: Path | None, apart: Apart, world: World) -> Path | None:
    """The folder from which this rank resumes: ``start``, which rank 0 has chosen, or its outline
    on this machine if it is in the store. A collective call. Raises ``DamagedStartError``."""
    is_stored = world.from_main(start is not None and start.parent == Path(apart.folder))
    if start is None or not is_stored:
        return start
    try:
        return outlined(apart, step_of(start), world)
    except DamagedFileError as error:
        raise DamagedStartError(step_of(start), str(error)) from None
