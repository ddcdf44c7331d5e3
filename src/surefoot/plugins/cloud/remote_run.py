"""The checkpoint from which a run in a store resumes: the latest valid one, local or in the store.

One that is only in the store is downloaded and verified. Damaged ones, local or remote, are logged
and skipped. If the store cannot be reached, the launch fails, so that a run never resumes from an
older checkpoint because of a network failure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...checkpoint.disk.commit import committed, named, step_of
from ...checkpoint.disk.manifest import is_plain_name
from ...checkpoint.looking.listing import CheckpointLine
from ...checkpoint.verification import Found, Report, refuse_damaged, set_aside, verify_checkpoint
from ...errors import CheckpointError, RunError
from ...recipe.files import RUN_RECIPE
from ...storage import files
from ...storage.remote import Address, default_cache
from .checkpoints import StoredDamageError, download, list_store, verify
from .mirror import Mirror
from .store import MAX_RUN_FILE, Contents, Store

logger = logging.getLogger(__name__)


@dataclass
class StoredRun:
    """The part of a run that is in a store, as it was found at the launch."""

    store: Store
    folder: Path  # where the run works
    there: Contents
    seconds: float  # of failures in a row, before an upload has failed
    damaged: set[int] = field(default_factory=set)  # steps that are there, but not whole

    @property
    def steps(self) -> set[int]:
        """The steps that exist there, as far as is known."""
        return set(self.there.committed) - self.damaged

    def newest_sound(self) -> Path | None:
        """The local folder to resume from; None if there is no checkpoint anywhere. Raises
        ``CheckpointError`` if there are some, none of which is valid."""
        self._tell_of_uncommitted()
        local = {step_of(path): path for path in named(self.folder)}
        damaged_here: list[tuple[Path, str]] = []
        damaged_there: list[tuple[Path, str]] = []
        for step in sorted(local.keys() | self.steps, reverse=True):
            if step in local:
                report = verify_checkpoint(local[step], full=True)
                if report.ok:
                    set_aside(Found(local[step], damaged_here))
                    return local[step]
                damaged_here.append((local[step], report.problems[0]))
            if step in self.steps:
                if step in local:  # the one in the store takes its place
                    set_aside(Found(None, [damaged_here.pop()]))
                if (path := self._downloaded(step, damaged_there)) is not None:
                    set_aside(Found(path, damaged_here))
                    return path
        nothing_sound = Found(None, [*damaged_here, *damaged_there])
        refuse_damaged(str(self.store.address), nothing_sound, "choose another train.output_dir")
        return None

    @property
    def address(self) -> Address:
        """The URL of the run."""
        return self.store.address

    def get(self, name: str) -> Path:
        """One checkpoint and the logs of the run, downloaded unless a local copy exists."""
        self._bring_run_files()
        return self.load(name)

    def write(self, name: str, data: bytes) -> None:
        """Upload a small file of the run."""
        self.store.write(name, data)

    def mirror(self) -> Mirror:
        """What uploads while the run trains."""
        there, damaged = self.steps, self.damaged
        return Mirror(self.store, self.folder, there=there, damaged=damaged, seconds=self.seconds)

    def load(self, name: str) -> Path:
        """One checkpoint, downloaded unless a local copy exists. It must be valid."""
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
            self._bring([RUN_RECIPE])

    def _downloaded(self, step: int, damaged: list[tuple[Path, str]]) -> Path | None:
        name = self.there.committed[step]
        try:
            path = download(self.store, name, self.folder)
        except StoredDamageError as error:
            self.damaged.add(step)
            damaged.append((Path(name), str(error)))
            logger.warning("checkpoint-%d is skipped: %s", step, error)
            return None
        self._bring_run_files()
        return path

    def _bring_run_files(self) -> None:
        """Download the run's logs, so that they continue."""
        has_recipe = files.exists(self.folder / RUN_RECIPE)
        self._bring(n for n in self.there.of_the_run if not (has_recipe and n == RUN_RECIPE))

    def _bring(self, names: Iterable[str]) -> None:
        """Download some of the run's files."""
        for name in names:
            # A listing may have any names, and must not lead out of the folder.
            if is_plain_name(name) and self.there.files[name] <= MAX_RUN_FILE:
                data = self.store.read(name)
                with files.raising(RunError, f"cannot copy {self.address}/{name}"):
                    files.make_folder((self.folder / name).parent)
                    files.write_aside(self.folder / name, data)

    def _tell_of_uncommitted(self) -> None:
        newest = max(self.steps, default=-1)
        for step, name in self.there.uncommitted.items():
            if step > newest:
                logger.info(
                    "%s was never committed in %s (its upload was interrupted): skipped",
                    name,
                    self.store.address,
                )


class ObjectStores:
    """Every store that fsspec knows; see ``RemoteStores``."""

    def open_run(self, address: Address, folder: Path, *, seconds: float) -> StoredRun:
        """Open a run. Raises ``StoreError`` if the store cannot be used."""
        run = _open(address, folder, seconds)
        run.bring_recipe()
        return run

    def fetch(self, address: Address, cache: Path | None = None, *, seconds: float = 600) -> Path:
        """The local copy of a checkpoint, or of the latest one of a run."""
        is_one = step_of(Path(address.name)) >= 0
        run = address.parent if is_one else address
        folder = (cache or default_cache()) / run.slug
        with files.raising(CheckpointError):
            files.make_folder(folder)
        stored = _open(run, folder, seconds)
        if not is_one and not stored.steps:
            raise CheckpointError(f"{run}: it contains no checkpoint")
        return stored.load(address.name if is_one else f"checkpoint-{max(stored.steps)}")

    def lines(self, address: Address, *, verified: bool) -> list[CheckpointLine]:
        """The checkpoints of a run, or one of them."""
        lines = list_store(address)
        return [self._verified(address, line) for line in lines] if verified else lines

    def _verified(self, run: Address, line: CheckpointLine) -> CheckpointLine:
        """The same line, every byte checked. ``run`` may be the address of the checkpoint."""
        if line.problem is not None:
            return line
        is_itself = run.name == line.path.name
        address = run if is_itself else run.inside(line.path.name)
        report = self.verify(address, full=True)
        if report.ok:
            return replace(line, verified="every byte")
        return replace(line, problem=report.problems[0].removeprefix(f"{address}/"))

    def verify(self, checkpoint: Address, *, full: bool) -> Report:
        """Check a checkpoint where it is stored."""
        if step_of(Path(checkpoint.name)) < 0:
            raise CheckpointError(f"{checkpoint}: expected the URL of a checkpoint, …/checkpoint-N")
        return verify(Store(checkpoint.parent, seconds=60), checkpoint.name, full=full)


def _open(address: Address, folder: Path, seconds: float) -> StoredRun:
    store = Store(address, seconds=seconds)
    return StoredRun(store, folder, Contents(store.list()), seconds)


STORES = ObjectStores()
