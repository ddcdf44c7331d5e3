"""Checkpoints in a store.

They are listed from one listing, verified where they are, and downloaded to a temporary folder,
verified, then renamed. An upload sends the files, then the manifest, which commits them there: only
files in the manifest, not a user's notes, all of whose lengths are compared with a listing of the
store before. The manifest is created, never replaced: an existing checkpoint is not overwritten by
another of its name. Which of them count, ``lineage`` decides.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ...checkpoint.disk import strict_json
from ...checkpoint.disk.commit import check_step, step_of, temporary_folder
from ...checkpoint.disk.folder import (
    TRAINER_STATE,
    CheckpointFolder,
    TrainerStateFile,
    open_checkpoint,
)
from ...checkpoint.disk.manifest import MANIFEST, Manifest, parse
from ...checkpoint.looking.listing import CheckpointLine, line_of
from ...checkpoint.verification import Report, problems_in, verify_checkpoint
from ...errors import CheckpointError
from ...storage import files
from ...storage.files import digest
from ...storage.parallel_work import in_parallel
from ...storage.remote import Address
from ...terminal_text import in_bytes
from ...training.callbacks.launches import NAME as RECORD
from .lineage import (
    FIRST,
    LAUNCHES,
    MAX_CLAIM,
    OTHERS,
    Lineage,
    Stored,
    StoredLaunch,
    claims,
    local_name,
    name_of,
    stored_of,
)
from .store import MissingError, Store, StoreError

logger = logging.getLogger(__name__)
RUN_ID = ".run-id"  # a file of a run, here and there, that says which run it is
_MAX_ID = 64  # bytes of it
MAX_RUN_FILE = 1 << 30  # bytes of a file of a run that is no checkpoint's
WORKERS = 4  # files that are uploaded or deleted at a time
_DAMAGED = "manifest.damaged.json"  # what the manifest of a damaged checkpoint is renamed to
_READERS = 8  # parts of files that are downloaded at a time
_RANGE = 16 << 20  # bytes asked for at a time


class AnotherRunError(CheckpointError):
    """The folder in the store is another run's, or a later launch has taken over this run."""


class StoredDamageError(CheckpointError):
    """The checkpoint in the store is incomplete or damaged."""


@dataclass(frozen=True)
class Contents:
    """Names and lengths of all files of a run, as one listing has them."""

    files: Mapping[str, int]
    launches: Mapping[int, StoredLaunch] = field(default_factory=dict)

    @classmethod
    def of(cls, store: Store) -> Contents:
        """Those of the run in ``store``, with the claims of its launches."""
        listed, launches = store.list(), dict[int, StoredLaunch]()

        def read(claim: tuple[int, str]) -> None:
            number, name = claim
            if listed[name] > MAX_CLAIM:
                raise CheckpointError(f"{store.address}/{name}: too large for a claim")
            launches[number] = StoredLaunch.parse(number, store.read(name))

        in_parallel(read, claims(listed).items(), _READERS)
        return cls(listed, launches)

    @cached_property
    def lineage(self) -> Lineage:
        """Which checkpoints count."""
        return Lineage(self.launches, self._folders(with_manifest=True))

    @property
    def committed(self) -> dict[int, str]:
        """The folders of the checkpoints of the run, by step, oldest first."""
        return {step: name_of(stored) for step, stored in self.lineage.valid.items()}

    @property
    def void(self) -> list[Stored]:
        """Those that a launch has stored after another one had taken over."""
        valid = self.lineage.valid.values()
        return [stored for stored in self.lineage.committed if stored not in valid]

    @property
    def uncommitted(self) -> list[Stored]:
        """Those without a manifest: half uploaded, or half deleted."""
        return self._folders(with_manifest=False)

    def folder_of(self, name: str) -> str:
        """The folder of the checkpoint that is called ``name``: that of its step which counts."""
        stored = stored_of(name)
        return name if stored is None else self.committed.get(stored[0], name)

    def _folders(self, *, with_manifest: bool) -> list[Stored]:
        names = sorted({name.partition("/")[0] for name in self.files if "/" in name})
        return sorted(
            stored
            for name in names
            if (stored := stored_of(name)) is not None
            and (f"{name}/{MANIFEST}" in self.files) == with_manifest
        )

    def inside(self, folder: str) -> dict[str, int]:
        """The files of a checkpoint by their name in it."""
        start = f"{folder}/"
        return {
            n.removeprefix(start): size for n, size in self.files.items() if n.startswith(start)
        }

    @property
    def has_id(self) -> bool:
        """Whether there is the id of the run."""
        return 0 < self.files.get(RUN_ID, 0) <= _MAX_ID

    @cached_property
    def of_the_run(self) -> dict[str, str]:
        """The files outside of checkpoints (recipe, metrics, plots), and what each is called here:
        those of the latest launch that has sent all of its own, the record of launches last."""
        latest = self.lineage.latest or StoredLaunch(FIRST)
        numbers = latest.number, *(number for _, number in reversed(latest.history))
        places = [StoredLaunch(number).place for number in numbers]
        place = next((place for place in places if place + RECORD in self.files), "")
        names = {n.removeprefix(place): n for n in self.files if n.startswith(place)}
        return {name: there for name, there in names.items() if not name.startswith(OTHERS)}


def upload(store: Store, folder: Path, *, launch: int | None = None, replace: bool = False) -> int:
    """Upload the checkpoint ``folder`` of ``launch``; when this returns, it exists in the store.
    The bytes sent.

    An existing one of its name is an error, unless it is the same, or damaged and to ``replace``.
    Raises ``AnotherRunError`` if a later launch has begun.
    """
    name = folder.name if launch is None else name_of((step_of(folder), launch))
    name_taken = CheckpointError(
        f"{store.address.inside(name)}: another checkpoint of this name exists there, and a "
        "checkpoint is never overwritten; does another process train with the same output_dir?"
    )
    # Every byte is verified before the manifest makes a checkpoint of them there (decisions/0015).
    report = verify_checkpoint(folder, full=True)
    if not report.ok:
        raise CheckpointError(f"{report.problems[0]}; it is not uploaded")
    with files.raising(CheckpointError):
        manifest = files.read_inside(folder, MANIFEST, strict_json.MAX_BYTES)
    if f"{name}/{MANIFEST}" in store.list(name):
        stored = store.read(f"{name}/{MANIFEST}")
        if stored == manifest:
            return 0  # the very same checkpoint, from an earlier try
        if not replace:
            raise name_taken
        # A copy first: create() below replaces nothing, and the damage can still be looked at.
        store.write(f"{name}/{_DAMAGED}", stored)
        store.delete(f"{name}/{MANIFEST}")
    sizes = open_checkpoint(folder).manifest.files
    # So that no large file begins when all others have ended.
    largest_first = sorted(sizes, key=lambda file: (-sizes[file], file))
    with files.raising(CheckpointError):
        in_parallel(lambda file: store.put(f"{name}/{file}", folder / file), largest_first, WORKERS)
    # One listing proves that all files are there, at full length, before the manifest is.
    if wrong := _wrong_length(sizes, Contents(store.list(name)).inside(name)):
        raise StoreError(f"{store.address.inside(name)}/{wrong} after the upload")
    if launch is not None:
        refuse_late(store, launch)
    # The commit. If its answer is lost, the next try finds these very bytes (decisions/0015).
    if not store.create(f"{name}/{MANIFEST}", manifest):
        raise name_taken
    return sum(sizes.values()) + len(manifest)


def run_id(folder: Path, stored: bytes = b"") -> bytes:
    """The id of the run in a local ``folder``. One that has none gets the ``stored`` id, or a new
    one."""
    if not files.exists(folder / RUN_ID):
        files.make_folder(folder)
        files.write_aside(folder / RUN_ID, stored or secrets.token_hex(16).encode())
    return files.read_inside(folder, RUN_ID, _MAX_ID)


def claim(store: Store, folder: Path) -> None:
    """Say in the store which run it is of, that in the local ``folder``: before anything is sent or
    deleted. Raises ``AnotherRunError``."""
    with files.raising(CheckpointError):
        own = run_id(folder)
    if not store.create(RUN_ID, own):
        raise AnotherRunError(
            f"{store.address}: another run stores its checkpoints there; nothing of it was "
            f"replaced or deleted. What this run has is in {folder}: set another "
            "train.output_dir, and start from there"
        )


def refuse_late(store: Store, launch: int) -> None:
    """Raise ``AnotherRunError`` if a launch after ``launch`` has begun: nothing more is to be
    committed or deleted. One that begins right after this call is not harmed by either."""
    if (later := StoredLaunch(launch + 1)).file not in store.list(LAUNCHES):
        return
    later = StoredLaunch.parse(later.number, store.read(later.file))
    at = "the beginning" if later.base is None else f"step {later.base[0]}"
    raise AnotherRunError(
        f"{store.address}: another launch (on {later.host}, process {later.process}) has taken "
        f"over this run from {at}; nothing more is saved there by this one"
    )


def remove(store: Store, name: str) -> None:
    """Delete a checkpoint in the store: its manifest first, then its files."""
    store.delete(f"{name}/{MANIFEST}")
    # After the manifest: what is half deleted is then uncommitted, and not damaged.
    in_parallel(store.delete, sorted(store.list(name)), WORKERS)
    store.delete_folder(name)


def download(store: Store, name: str, root: Path) -> Path:
    """Download the checkpoint in the folder ``name`` of the run to ``root``, and return its folder
    there, ``checkpoint-N``.

    Raises ``StoredDamageError`` if it is incomplete, or its hashes do not match.
    """
    text, manifest = whole_manifest(store, name)
    target = root / f"checkpoint-{manifest.step}"
    size = sum(manifest.files.values())
    logger.info("downloading %s (%s) from %s", name, in_bytes(size), store.address)
    doing = f"cannot download {name} to {root}"
    with files.raising(CheckpointError, doing):
        files.make_folder(root)
    with files.raising(CheckpointError, doing), temporary_folder(target) as part:
        for file, num_bytes in manifest.files.items():  # so that a full disk shows at once
            files.make_folder((part.folder / file).parent)
            with files.create(part.folder / file) as created:
                created.reserve(num_bytes)
        _download_files(store, name, CheckpointFolder(part.folder, manifest))
        part.commit(target, text)
    return target


def _download_files(store: Store, name: str, checkpoint: CheckpointFolder) -> None:
    """Download all files; those whose hashes do not match once more, as they may have been damaged
    on their way. Raises ``StoredDamageError``."""
    damaged, problems = sorted(checkpoint.manifest.files), list[str]()
    for _ in range(2):
        try:
            _fetch(store, name, checkpoint, damaged)
        except MissingError as error:
            raise StoredDamageError(str(error)) from error
        problems_of = {file: list(problems_in(checkpoint, file)) for file in damaged}
        damaged = [file for file in damaged if problems_of[file]]
        problems = [problems_of[file][0] for file in damaged]
        if not damaged:
            return
    # The temporary folder of the message is gone when somebody reads it.
    in_store = str(store.address.inside(name))
    raise StoredDamageError(problems[0].replace(str(checkpoint.path), in_store))


def _fetch(store: Store, name: str, checkpoint: CheckpointFolder, names: Sequence[str]) -> None:
    """Write files of a checkpoint, which exist and are blank, range by range."""
    ranges = [
        (file, start, min(start + _RANGE, checkpoint.manifest.files[file]))
        for file in names
        for start in range(0, checkpoint.manifest.files[file], _RANGE)
    ]
    with contextlib.ExitStack() as stack:
        opened = {
            file: stack.enter_context(files.open_file(checkpoint.path / file, write=True))
            for file in names
        }

        def fetch(part: tuple[str, int, int]) -> None:
            file, start, stop = part
            opened[file].write_at(start, store.read_range(f"{name}/{file}", start, stop))

        in_parallel(fetch, ranges, _READERS)
        for file in opened.values():
            file.sync()


def whole_manifest(store: Store, name: str) -> tuple[bytes, Manifest]:
    """The manifest of a checkpoint, which must match the listed files and their lengths. Raises
    ``StoredDamageError``."""
    there, address = Contents(store.list(name)), store.address.inside(name)
    if MANIFEST not in there.inside(name):
        raise StoredDamageError(f"{address} was never committed: no {MANIFEST}")
    try:
        text, manifest = _read_manifest(store, there, name)
    # Of a store that cannot be reached, nothing is known; it is no damage.
    except StoreError:
        raise
    except CheckpointError as error:
        raise StoredDamageError(str(error)) from error
    if wrong := _wrong_length(manifest.files, there.inside(name)):
        raise StoredDamageError(f"{address}/{wrong}")
    return text, manifest


def _read_manifest(store: Store, there: Contents, name: str) -> tuple[bytes, Manifest]:
    """The manifest of a checkpoint, as bytes and parsed."""
    file = f"{name}/{MANIFEST}"
    where = str(store.address.inside(file))
    if there.files[file] > strict_json.MAX_BYTES:
        raise CheckpointError(f"{where}: {there.files[file]} bytes are too many for a manifest")
    text = store.read(file)
    manifest = parse(text, where)
    check_step(Path(local_name(name)), str(store.address.inside(name)), manifest.step)
    return text, manifest


def _wrong_length(sizes: Mapping[str, int], there: Mapping[str, int]) -> str | None:
    """The first file that is missing in the store, or has another length."""
    for file, size in sizes.items():
        if there.get(file) != size:
            length = f"{there[file]} bytes" if file in there else "missing"
            return f"{file}: {length}, expected {size} bytes"
    return None


def list_store(address: Address) -> list[CheckpointLine]:
    """One line per checkpoint, oldest first; that of a checkpoint is a list of one. No hashes."""
    is_one = stored_of(address.name) is not None
    store = Store(address.parent if is_one else address, seconds=60)
    there = Contents.of(store)
    asked = there.folder_of(address.name)
    names = [name for name in there.committed.values() if not is_one or name == asked]
    rows = [_line(store, there, name) for name in names]
    best = next((state.best_step for line, state in reversed(rows) if line.problem is None), None)
    lines = [replace(line, is_best=line.step == best is not None) for line, _ in rows]
    why = "void: a later launch had taken over the run"
    rest = dict.fromkeys(map(name_of, there.void), why)
    why = "never committed: an interrupted upload or deletion"
    rest |= dict.fromkeys(map(name_of, there.uncommitted), why)
    others = [name for name in rest if not is_one or name == asked]
    return lines + [CheckpointLine(Path(name), problem=rest[name]) for name in others]


def _line(store: Store, there: Contents, name: str) -> tuple[CheckpointLine, TrainerStateFile]:
    path, state = Path(local_name(name)), TrainerStateFile()
    try:
        _, manifest = _read_manifest(store, there, name)
    # As above: a listing must not call it damaged.
    except StoreError:
        raise
    except CheckpointError as error:
        return CheckpointLine(path, step=step_of(path), problem=str(error)), state
    file = TRAINER_STATE
    if 0 < manifest.files.get(file, 0) <= strict_json.MAX_BYTES:
        with contextlib.suppress(CheckpointError):  # a line without a loss is better than none
            data = store.read(f"{name}/{file}")
            if digest(data) == manifest.hashes.get(file):
                state = TrainerStateFile.of(strict_json.parse_object(data, file))
    wrong = _wrong_length(manifest.files, there.inside(name))
    return line_of(path, manifest, state, wrong), state


def verify(store: Store, name: str, *, full: bool) -> Report:
    """Check a checkpoint in the store: its lengths; with ``full`` a temporary download of it."""
    name = Contents.of(store).folder_of(name)
    report = Report(Path(name), checked="every byte checked" if full else "lengths checked")
    try:
        if not full:
            whole_manifest(store, name)
            return report
        with tempfile.TemporaryDirectory(prefix="surefoot-verify-") as folder:
            download(store, name, Path(folder))
    except StoredDamageError as error:
        report.problems.append(str(error))
    return report
