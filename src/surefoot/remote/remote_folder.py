"""The contents of the remote folder of a run, from one listing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.disk.commit import step_of
from ..checkpoint.disk.manifest import MANIFEST


@dataclass(frozen=True)
class Contents:
    """Names and lengths of all files of a run."""

    files: Mapping[str, int]

    @property
    def committed(self) -> dict[int, str]:
        """The names of the checkpoints that have a manifest, by step, oldest first."""
        return self._checkpoints(with_manifest=True)

    @property
    def uncommitted(self) -> dict[int, str]:
        """The same for those that have none: half uploaded, or half deleted."""
        return self._checkpoints(with_manifest=False)

    def inside(self, folder: str) -> dict[str, int]:
        """The files of a checkpoint by their name in it."""
        start = f"{folder}/"
        return {
            n.removeprefix(start): size for n, size in self.files.items() if n.startswith(start)
        }

    @property
    def of_the_run(self) -> list[str]:
        """The files outside of checkpoints: recipe, metrics, plots."""
        return [name for name in self.files if not name.startswith((".", "checkpoint-"))]

    def _checkpoints(self, *, with_manifest: bool) -> dict[int, str]:
        folders = {name.partition("/")[0] for name in self.files if "/" in name}
        steps = {step_of(Path(folder)): folder for folder in folders}
        return {
            step: steps[step]
            for step in sorted(steps)
            if step >= 0 and (f"{steps[step]}/{MANIFEST}" in self.files) == with_manifest
        }


def readable(num_bytes: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
