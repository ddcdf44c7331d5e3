"""The checkpoint from which a run in a store resumes: the latest valid one, local or in the store.

One that is only in the store is downloaded and verified. Damaged ones, local or remote, are logged
and skipped. If the store cannot be reached, the launch fails, so that a run never resumes from an
older checkpoint because of a network failure.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint.disk.commit import committed, named, step_of
from ..checkpoint.reading.latest import refuse_damaged, set_aside
from ..checkpoint.reading.verification import Found, verify_checkpoint
from ..errors import CheckpointError
from ..recipe.files import RUN_RECIPE
from ..storage import files
from ..storage.address import Address, default_cache, is_address
from .downloading import DamagedError, download
from .remote_folder import Contents
from .run_files import pull
from .store import Store

logger = logging.getLogger(__name__)


@dataclass
class RemoteRun:
    """The part of a run that is in a store, as it was found at the launch."""

    store: Store
    folder: Path  # where the run works
    there: Contents
    damaged: set[int] = field(default_factory=set)  # steps that are there, but not whole

    @property
    def steps(self) -> set[int]:
        """The steps that exist there, as far as is known."""
        return set(self.there.committed) - self.damaged

    def newest_sound(self) -> Path | None:
        """The local folder to resume from; None if there is no checkpoint anywhere. Raises
        ``CheckpointError`` if there are some, none of which is valid."""
        self._tell_of_uncommitted()
        passed_over: list[tuple[Path, str]] = []  # local ones
        lost: list[tuple[Path, str]] = []  # those in the store
        here, path = {step_of(path): path for path in named(self.folder)}, None
        for step in sorted(here.keys() | self.steps, reverse=True):
            path = self._kept(here[step], passed_over) if step in here else None
            if path is None and step in self.steps:
                if step in here:  # the one in the store takes its place
                    set_aside(Found(None, [passed_over.pop()]))
                path = self._downloaded(step, lost)
            if path is not None:
                break
        if path is None:
            everything = Found(None, [*passed_over, *lost])
            refuse_damaged(str(self.store.address), everything, "choose another train.output_dir")
        set_aside(Found(path, passed_over))
        return path

    def get(self, name: str) -> Path:
        """One checkpoint of the run, downloaded unless a local copy exists. It must be valid."""
        path = self.folder / name
        if step_of(path) in {step_of(p) for p in committed(self.folder)}:
            report = verify_checkpoint(path, full=True)
            if report.ok:
                return path
            raise CheckpointError(report.problems[0])
        return download(self.store, name, self.folder)

    def bring_recipe(self) -> None:
        """Download the run's recipe, unless the run has already saved locally."""
        is_here = committed(self.folder) and files.exists(self.folder / RUN_RECIPE)
        if RUN_RECIPE in self.there.files and not is_here:
            only = Contents({RUN_RECIPE: self.there.files[RUN_RECIPE]})
            pull(self.store, self.folder, only, keep=lambda _: False)

    def _kept(self, path: Path, passed_over: list[tuple[Path, str]]) -> Path | None:
        report = verify_checkpoint(path, full=True)
        if report.ok:
            return path
        passed_over.append((path, report.problems[0]))
        return None

    def _downloaded(self, step: int, lost: list[tuple[Path, str]]) -> Path | None:
        name = self.there.committed[step]
        try:
            found = download(self.store, name, self.folder)
        except DamagedError as error:
            self.damaged.add(step)
            lost.append((Path(name), str(error)))
            logger.warning("checkpoint-%d is skipped: %s", step, error)
            return None
        self.bring_run_files()
        return found

    def bring_run_files(self) -> None:
        """Download the run's logs, so that they continue."""
        pull(self.store, self.folder, self.there, keep=lambda name: name == RUN_RECIPE)

    def _tell_of_uncommitted(self) -> None:
        newest = max(self.steps, default=-1)
        for step, name in self.there.uncommitted.items():
            if step > newest:
                logger.info(
                    "%s was never committed in %s (its upload was interrupted): skipped",
                    name,
                    self.store.address,
                )


def open_remote_run(address: Address, folder: Path, *, seconds: float) -> RemoteRun:
    """Open the remote run. Raises ``StoreError`` if the store cannot be used."""
    store = Store(address, seconds=seconds)
    return RemoteRun(store, folder, Contents(store.list()))


def is_within(resume: str, output_dir: Path | Address) -> bool:
    """Whether ``resume`` is the URL of a checkpoint of the run in ``output_dir``."""
    return (
        isinstance(output_dir, Address)
        and is_address(resume)
        and Address(resume).parent == output_dir
    )


def fetch(checkpoint: Address, cache: Path | None = None, *, seconds: float = 600) -> Path:
    """The local copy of a checkpoint of any run, downloaded unless a valid one exists."""
    if step_of(Path(checkpoint.name)) < 0:
        raise CheckpointError(f"{checkpoint}: expected the URL of a checkpoint, …/checkpoint-N")
    return _cached_run(checkpoint.parent, cache, seconds).get(checkpoint.name)


def fetch_newest(run: Address, cache: Path | None = None, *, seconds: float = 600) -> Path:
    """The local copy of the latest checkpoint of a run, which must be valid."""
    found = _cached_run(run, cache, seconds)
    if not found.steps:
        raise CheckpointError(f"{run}: it contains no checkpoint")
    return found.get(f"checkpoint-{max(found.steps)}")


def _cached_run(run: Address, cache: Path | None, seconds: float) -> RemoteRun:
    folder = (cache or default_cache()) / run.slug
    with files.raising(CheckpointError):
        files.make_folder(folder)
    return open_remote_run(run, folder, seconds=seconds)
