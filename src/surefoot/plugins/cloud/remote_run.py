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
from .checkpoints import (
    MAX_RUN_FILE,
    RUN_ID,
    Contents,
    StoredDamageError,
    claim,
    download,
    list_store,
    run_id,
    verify,
)
from .mirror import Mirror
from .store import Store

logger = logging.getLogger(__name__)


@dataclass
class StoredRun:
    """The part of a run that is in a store, as it was found at the launch; see ``RemoteRun``."""

    store: Store
    folder: Path  # where the run works
    contents: Contents
    seconds: float  # of failures in a row, before an upload has failed
    damaged: set[int] = field(default_factory=set)  # steps that are in the store, but not whole

    @property
    def address(self) -> Address:
        """The URL of the run."""
        return self.store.address

    @property
    def steps(self) -> set[int]:
        """The steps that exist there, as far as is known."""
        return set(self.contents.committed) - self.damaged

    def newest_sound(self) -> Path | None:
        """The local folder to resume from; None if there is no checkpoint anywhere. Raises
        ``CheckpointError`` if there are some, none of which is valid."""
        newest = max(self.steps, default=-1)
        for step, name in self.contents.uncommitted.items():
            if step > newest:
                message = "%s was never committed in %s (its upload was interrupted): skipped"
                logger.info(message, name, self.address)
        local = {step_of(path): path for path in named(self.folder)}
        damaged_here: list[tuple[Path, str]] = []
        damaged_there: list[tuple[Path, str]] = []
        for step in sorted(local.keys() | self.steps, reverse=True):
            is_stored = step in self.steps
            if step in local:
                report = verify_checkpoint(local[step], full=True)
                if report.ok:
                    set_aside(Found(local[step], damaged_here))
                    return local[step]
                if is_stored:  # the one in the store takes its place
                    set_aside(Found(None, [(local[step], report.problems[0])]))
                else:
                    damaged_here.append((local[step], report.problems[0]))
            if not is_stored:
                continue
            name = self.contents.committed[step]
            try:
                path = download(self.store, name, self.folder)
            except StoredDamageError as error:
                self.damaged.add(step)
                damaged_there.append((Path(name), str(error)))
                logger.warning("checkpoint-%d is skipped: %s", step, error)
                continue
            self._download_run_files()
            set_aside(Found(path, damaged_here))
            return path
        nothing_sound = Found(None, [*damaged_here, *damaged_there])
        refuse_damaged(str(self.address), nothing_sound, "choose another train.output_dir")
        return None

    def get(self, name: str) -> Path:
        """One checkpoint and the logs of the run, downloaded unless a local copy exists."""
        self._download_run_files()
        return self.load(name)

    def load(self, name: str) -> Path:
        """One checkpoint, downloaded unless a local copy exists. It must be valid."""
        path = self.folder / name
        if step_of(path) in {step_of(p) for p in committed(self.folder)}:
            report = verify_checkpoint(path, full=True)
            if report.ok:
                return path
            raise CheckpointError(report.problems[0])
        return download(self.store, name, self.folder)

    def identify(self) -> None:
        """Give the local folder the id of the stored run; of a new one, a new id, which its first
        upload claims there. Raises ``RunError``: the two are different runs."""
        stored = self.store.read(RUN_ID) if self.contents.has_id else b""
        with files.raising(RunError):
            local = run_id(self.folder, stored)
        if stored not in (b"", local):
            raise RunError(
                f"{self.address}: another run is stored there than the one whose copy is in "
                f"{self.folder}; set another train.output_dir, or move that folder away to resume "
                "the stored run"
            )

    def write(self, name: str, data: bytes) -> None:
        """Upload a small file of the run. Raises ``AnotherRunError``."""
        claim(self.store, self.folder)
        self.store.write(name, data)

    def mirror(self) -> Mirror:
        """What uploads while the run trains."""
        there, damaged = self.steps, self.damaged
        return Mirror(self.store, self.folder, there=there, damaged=damaged, seconds=self.seconds)

    def download_recipe(self) -> None:
        """Download the run's recipe, unless the run has already saved locally."""
        is_local = committed(self.folder) and files.exists(self.folder / RUN_RECIPE)
        if RUN_RECIPE in self.contents.files and not is_local:
            self._download([RUN_RECIPE])

    def _download_run_files(self) -> None:
        """Download the run's logs, so that they continue."""
        has_recipe = files.exists(self.folder / RUN_RECIPE)
        names = self.contents.of_the_run
        self._download(name for name in names if not (has_recipe and name == RUN_RECIPE))

    def _download(self, names: Iterable[str]) -> None:
        for name in names:
            # A listing may have any names, and must not lead out of the folder.
            if is_plain_name(name) and self.contents.files[name] <= MAX_RUN_FILE:
                data = self.store.read(name)
                with files.raising(RunError, f"cannot copy {self.address}/{name}"):
                    files.make_folder((self.folder / name).parent)
                    files.write_aside(self.folder / name, data)


class ObjectStores:
    """Every store that fsspec knows; see ``RemoteStores``."""

    def open_run(self, address: Address, folder: Path, *, seconds: float) -> StoredRun:
        """Open a run. Raises ``StoreError`` if the store cannot be used."""
        run = _open(address, folder, seconds)
        run.identify()
        run.download_recipe()
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
        """The checkpoints of a run, or one of them; ``verified``: every byte checked."""
        lines = list_store(address)
        for i, line in enumerate(lines):
            if verified and line.problem is None:
                is_itself = address.name == line.path.name
                checkpoint = address if is_itself else address.inside(line.path.name)
                report = self.verify(checkpoint, full=True)
                if report.ok:
                    lines[i] = replace(line, verified="every byte")
                else:
                    problem = report.problems[0].removeprefix(f"{checkpoint}/")
                    lines[i] = replace(line, problem=problem)
        return lines

    def verify(self, checkpoint: Address, *, full: bool) -> Report:
        """Check a checkpoint where it is stored."""
        if step_of(Path(checkpoint.name)) < 0:
            raise CheckpointError(f"{checkpoint}: expected the URL of a checkpoint, …/checkpoint-N")
        return verify(Store(checkpoint.parent, seconds=60), checkpoint.name, full=full)


def _open(address: Address, folder: Path, seconds: float) -> StoredRun:
    store = Store(address, seconds=seconds)
    return StoredRun(store, folder, Contents(store.list()), seconds)


STORES = ObjectStores()
