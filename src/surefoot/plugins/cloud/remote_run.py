"""The checkpoint from which a run in a store resumes: the latest valid one, local or in the store.

One that is only in the store is downloaded and verified. Damaged ones, local or remote, are logged
and skipped. If the store cannot be reached, the launch fails, so that a run never resumes from an
older checkpoint because of a network failure.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...checkpoint.apart import Apart, RankPart
from ...checkpoint.disk import strict_json
from ...checkpoint.disk.commit import committed, named, step_of
from ...checkpoint.disk.folder import CheckpointFolder
from ...checkpoint.disk.manifest import MANIFEST, Piece, is_plain_name
from ...checkpoint.looking.listing import CheckpointLine
from ...checkpoint.verification import Found, Report, refuse_damaged, set_aside, verify_checkpoint
from ...errors import CheckpointError, RunError
from ...parallel.sharding import Box
from ...recipe.files import RUN_RECIPE
from ...storage import files
from ...storage.remote import Address, default_cache
from .apart import PieceReader, RankUpload, outline, roll_forward
from .checkpoints import (
    MAX_RUN_FILE,
    RUN_ID,
    AnotherRunError,
    Contents,
    StoredDamageError,
    claim,
    download,
    list_store,
    run_id,
    upload,
    verify,
    whole_manifest,
)
from .lineage import FIRST, Stored, StoredLaunch, local_name, name_of, stored_of
from .mirror import Mirror, MirrorOfRanks
from .stopping import stop
from .store import Store, StoreError

logger = logging.getLogger(__name__)
LAUNCH = ".launch"  # a file of a local folder with the number of the launch that was there last
_MAX_NUMBER = 16  # bytes of it


@dataclass
class StoredRun:
    """The part of a run that is in a store, as it was found at the launch; see ``RemoteRun``."""

    store: Store
    folder: Path  # where the run works
    contents: Contents
    seconds: float  # of failures in a row, before an upload has failed
    is_apart: bool = False  # whether its machines have no folder in common
    damaged: set[int] = field(default_factory=set)  # steps that are in the store, but not whole
    launch: StoredLaunch | None = None  # this one, once it has begun

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
        self._roll_forward()
        newest = max(self.steps, default=-1)
        for stored in self.contents.uncommitted:
            if stored[0] > newest:
                message = "%s was never committed in %s (its upload was interrupted): skipped"
                logger.info(message, name_of(stored), self.address)
        if self.is_apart:
            return self._newest_outline()
        local = {step_of(path): path for path in named(self.folder)}
        local = {step: path for step, path in local.items() if self._is_of_the_run(path)}
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

    def _roll_forward(self) -> None:
        """Commit the latest checkpoint that was uploaded whole by ranks of which none has lived to
        commit it."""
        latest = self.contents.lineage.latest
        newest = max(self.steps, default=-1)
        for stored in sorted(self.contents.uncommitted, reverse=True):
            if latest is None or not latest.has(stored) or stored[0] <= newest:
                continue
            try:
                is_done = roll_forward(self.store, stored, self.contents.files)
            except StoreError:
                raise
            except AnotherRunError:
                return  # the claim finds it, too, and lets a start be looked for again
            except CheckpointError as error:
                logger.warning("%s cannot be committed: %s", name_of(stored), error)
                continue
            if is_done:
                self.contents = Contents.of(self.store)
                return

    def _newest_outline(self) -> Path | None:
        """The same where ranks read what they need from the store, each for itself: its place here,
        where there may be nothing. What one machine has saved, and not uploaded, is uploaded."""
        newest = max(self.steps, default=-1)
        for path in reversed(committed(self.folder)):
            if step_of(path) <= newest or not self._is_of_the_run(path):
                continue
            report = verify_checkpoint(path, full=True)
            if report.ok:
                upload(self.store, path, launch=_own_launch(self.folder))
                self.contents = Contents.of(self.store)
                break
            set_aside(Found(None, [(path, report.problems[0])]))
        damaged: list[tuple[Path, str]] = []
        for step in sorted(self.steps, reverse=True):
            try:
                whole_manifest(self.store, self.contents.committed[step])
            except StoredDamageError as error:
                self.damaged.add(step)
                damaged.append((Path(self.contents.committed[step]), str(error)))
                logger.warning("checkpoint-%d is skipped: %s", step, error)
                continue
            self._download_run_files()
            return self.folder / f"checkpoint-{step}"
        nothing_sound = Found(None, damaged)
        refuse_damaged(str(self.address), nothing_sound, "choose another train.output_dir")
        return None

    def give_up(self, step: int) -> None:
        """It is not looked at again by this process."""
        self.damaged.add(step)

    def apart(self) -> Apart:
        """With the history of the launch."""
        assert self.launch is not None
        return Apart(
            url=str(self.address),
            launch=self.launch.number,
            history=self.launch.history,
            folder=str(self.folder.absolute()),
            seconds=self.seconds,
        )

    def _is_of_the_run(self, path: Path) -> bool:
        """Whether a local checkpoint is one of the run, which another launch may have taken over
        since it was saved; one that is not is renamed. An older one than those in the store, which
        is only used if these are damaged, is taken as one."""
        step, valid = step_of(path), self.contents.lineage.valid
        newest = max(valid, default=-1)
        if not files.exists(path / MANIFEST):
            return True  # it is damaged, which is found as of any other
        if step in valid:
            is_one = self._is_stored(path)
        else:
            is_one = step < newest or newest < 0 or self._continues(valid[newest])
        if not is_one:
            why = f"another launch has taken over {self.address}, and has other steps there"
            set_aside(Found(None, [(path, why)]))
        return is_one

    def _continues(self, newest: Stored) -> bool:
        """Whether what was saved here last comes after ``newest``, the latest one in the store."""
        own, launches = _own_launch(self.folder), self.contents.launches
        if own is None:
            return not launches  # an earlier version has saved both
        began = launches.get(own, StoredLaunch(own)).base
        return newest[1] == own or (began is not None and began[0] >= newest[0])

    def _is_stored(self, path: Path) -> bool:
        """Whether a local checkpoint is not another one than that of its step in the store."""
        stored = self.contents.lineage.valid.get(step_of(path))
        if stored is None or stored[1] == _own_launch(self.folder):
            return True
        with files.raising(CheckpointError):
            manifest = files.read_inside(path, MANIFEST, strict_json.MAX_BYTES)
        return self.store.read(f"{name_of(stored)}/{MANIFEST}") == manifest

    def local_name(self, name: str) -> str:
        """What the checkpoint in the folder ``name`` there is called here, ``checkpoint-N``."""
        return local_name(name)

    def get(self, name: str) -> Path:
        """One checkpoint and the logs of the run, downloaded unless a local copy exists."""
        if self.is_apart and self.contents.folder_of(name) in self.contents.committed.values():
            return self.folder / local_name(name)
        self._download_run_files()
        return self.load(name)

    def load(self, name: str) -> Path:
        """One checkpoint, downloaded unless a local copy exists. It must be valid."""
        folder = self.contents.folder_of(name)
        path = self.folder / local_name(name)
        if step_of(path) in {step_of(p) for p in committed(self.folder)}:
            report = verify_checkpoint(path, full=True)
            if not report.ok:
                raise CheckpointError(report.problems[0])
            if not self._is_stored(path):
                raise CheckpointError(
                    f"{path}: {self.address} has another {path.name}, as another launch has taken "
                    "over the run; rename this one, so that the stored one is downloaded"
                )
            return path
        return download(self.store, folder, self.folder)

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
        launch = StoredLaunch(_own_launch(self.folder) or FIRST)
        self.store.write(launch.place + name, data)

    def mirror(self, start: Path | None) -> Mirror | None:
        """What uploads while the run trains from ``start`` on, as a launch of its own, or as the
        one that was here last, if no other has begun since. None: what is there has changed, so
        that ``start`` has to be found again."""
        claim(self.store, self.folder)
        step = -1 if start is None else step_of(start)
        base = max((known for known in self.steps if known <= step), default=None)
        number, launches = _own_launch(self.folder), self.contents.launches
        has_latest = base == max(self.steps, default=None)
        is_another = number != max(launches, default=0) or not has_latest
        if number is None or is_another or self.is_apart:
            number = self._begin(base)
        if number is None:
            return None
        if (stop := StoredLaunch(number).stop) in self.contents.files:
            self.store.delete(stop)  # not of this start
        valid, lineage = self.contents.lineage.valid.values(), self.contents.lineage
        self.launch = lineage.launches[number]
        damaged = [stored for stored in valid if stored[0] in self.damaged]
        leftovers = [each for each in self.contents.uncommitted if each[1] != number]
        kind = MirrorOfRanks if self.is_apart else Mirror
        return kind(
            self.store,
            self.folder,
            there=[stored for stored in valid if stored not in damaged],
            damaged=damaged,
            void=[*self.contents.void, *leftovers],
            launch=self.launch,
            seconds=self.seconds,
        )

    def _begin(self, base: int | None) -> int | None:
        """Claim the next launch, which continues the checkpoint of the step ``base``; its number.
        None: another has begun meanwhile, or has deleted that one."""
        launch = replace(
            self.contents.lineage.next_launch(base),
            host=socket.gethostname(),
            process=os.getpid(),
            nonce=secrets.token_hex(8),
        )
        is_first = self.store.create(launch.file, launch.dump())
        self.contents = Contents.of(self.store)
        is_there = launch.base is None or launch.base in self.contents.lineage.committed
        if not (self.is_apart and is_first and is_there):
            self.damaged = set()
        if not (is_first and is_there):
            return None
        with files.raising(CheckpointError):
            files.write_aside(self.folder / LAUNCH, b"%d" % launch.number)
        return launch.number

    def download_recipe(self) -> None:
        """Download the run's recipe, unless the run has already saved locally."""
        is_local = committed(self.folder) and files.exists(self.folder / RUN_RECIPE)
        if RUN_RECIPE in self.contents.of_the_run and not is_local:
            self._download([RUN_RECIPE])

    def _download_run_files(self) -> None:
        """Download the run's logs, so that they continue."""
        has_recipe = files.exists(self.folder / RUN_RECIPE)
        names = self.contents.of_the_run
        self._download(name for name in names if not (has_recipe and name == RUN_RECIPE))

    def _download(self, names: Iterable[str]) -> None:
        for name in names:
            there = self.contents.of_the_run[name]
            # A listing may have any names, and must not lead out of the folder.
            if is_plain_name(name) and self.contents.files[there] <= MAX_RUN_FILE:
                data = self.store.read(there)
                with files.raising(RunError, f"cannot copy {self.address}/{there}"):
                    files.make_folder((self.folder / name).parent)
                    files.write_aside(self.folder / name, data)


def _own_launch(folder: Path) -> int | None:
    """The number of the launch that was in a local folder last; None: none was."""
    with suppress(OSError, ValueError):
        return int(files.read_inside(folder, LAUNCH, _MAX_NUMBER))
    return None


class ObjectStores:
    """Every store that fsspec knows; see ``RemoteStores``."""

    def open_run(
        self, address: Address, folder: Path, *, seconds: float, is_apart: bool = False
    ) -> StoredRun:
        """Open a run. Raises ``StoreError`` if the store cannot be used."""
        run = replace(_open(address, folder, seconds), is_apart=is_apart)
        run.identify()
        run.download_recipe()
        return run

    def fetch(self, address: Address, cache: Path | None = None, *, seconds: float = 600) -> Path:
        """The local copy of a checkpoint, or of the latest one of a run."""
        is_one = stored_of(address.name) is not None
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
        if stored_of(checkpoint.name) is None:
            raise CheckpointError(f"{checkpoint}: expected the URL of a checkpoint, …/checkpoint-N")
        return verify(Store(checkpoint.parent, seconds=60), checkpoint.name, full=full)

    def save_of(self, apart: Apart, part: RankPart, is_orphan: Callable[[], bool]) -> RankUpload:
        """One rank's part of a save."""
        return RankUpload.of(apart, part, is_orphan)

    def outline(self, apart: Apart, step: int, folder: Path) -> None:
        """The small files of a checkpoint."""
        store = _store_of(apart)
        outline(store, name_of((step, apart.launch_of(step))), folder)

    def fetch_file(self, apart: Apart, step: int, folder: Path, name: str) -> None:
        """A file that the outline lacks."""
        store, checkpoint = _store_of(apart), name_of((step, apart.launch_of(step)))
        with files.raising(CheckpointError, f"cannot copy {checkpoint}/{name}"):
            files.make_folder((folder / name).parent)
            files.write_aside(folder / name, store.read(f"{checkpoint}/{name}"))

    def fetch_pieces(
        self, apart: Apart, step: int, folder: CheckpointFolder, parts: Sequence[tuple[Piece, Box]]
    ) -> int:
        """The tensors that a rank needs."""
        reader = PieceReader(_store_of(apart), (step, apart.launch_of(step)), folder, apart)
        reader.fetch(parts)
        return reader.num_bytes

    def stop(self, address: Address, *, wait: bool) -> Iterator[str]:
        """Request that a run stops; what is to be shown meanwhile."""
        return stop(address, wait=wait)


def _store_of(apart: Apart) -> Store:
    return Store(Address(apart.url), seconds=apart.seconds)


def _open(address: Address, folder: Path, seconds: float) -> StoredRun:
    store = Store(address, seconds=seconds)
    return StoredRun(store, folder, Contents.of(store), seconds)


STORES = ObjectStores()
