"""A run in a store whose machines have no folder in common: what its ranks save and read there.

A rank uploads its files to the folder of the checkpoint, then ``.reports/00003.NONCE.json``, its
part of the manifest. Rank 0 waits until all are there, and creates the manifest. A checkpoint of
which all reports are there, and no manifest, is whole (``roll_forward``).
"""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ...checkpoint.apart import Apart, RankPart
from ...checkpoint.disk.commit import step_of
from ...checkpoint.disk.folder import CheckpointFolder
from ...checkpoint.disk.grid import BLOCK
from ...checkpoint.disk.manifest import MANIFEST, Piece, parse
from ...checkpoint.disk.tensorfile import TensorFile, header_length, open_path, ranges_of
from ...checkpoint.saving.apart import commit, merged
from ...errors import CheckpointError, DamagedFileError, counted
from ...log import fell_back
from ...parallel.sharding import Box
from ...storage import files
from ...storage.parallel_work import in_parallel
from ...storage.remote import Address
from .checkpoints import WORKERS, StoredDamageError, refuse_late, whole_manifest
from .lineage import Stored, name_of
from .mirror import Uploader
from .store import Store, StoreError

logger = logging.getLogger(__name__)
REPORTS = ".reports"
_REPORT = re.compile(r"(\d{5,9})\.([0-9a-f]+)\.(json|error)")
_PAUSE, _LONGEST = 0.2, 2.0  # seconds between two looks
# Seconds without a report, when those that train are dead: the next launch waits for this process,
# and commits what comes later.
_LAST_CHANCE = 10.0
_LEAST = 60.0  # the same, when they live; also the time that this rank's own upload took, fourfold
_SLOWER = 4.0
_HEAD = 4 << 10  # bytes of a file that are read first
_RANGE = 16 << 20  # bytes that are read at a time
_READERS = 8


@cache
def _uploader(url: str, folder: str, launch: int, seconds: float) -> Uploader:
    """One for a process: it knows which files of the run it has sent."""
    return Uploader(Store(Address(url), seconds=seconds), Path(folder), launch)


@cache
def _say_not_copied(_url: str, reason: str) -> None:
    what = "weights that did not change are uploaded with each checkpoint"
    fell_back(what, reason, "takes longer to save")


@dataclass
class RankUpload:
    """See ``checkpoint.remote.StoredSave``."""

    store: Store
    name: str  # of the checkpoint's folder
    launch: int
    part: RankPart
    seconds: float = 600.0
    is_orphan: Callable[[], bool] = lambda: False
    run_files: Uploader | None = None  # of rank 0
    _began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, apart: Apart, part: RankPart, is_orphan: Callable[[], bool]) -> RankUpload:
        """That of one rank."""
        uploader = _uploader(apart.url, apart.folder, apart.launch, apart.seconds)
        name, run_files = name_of((part.step, apart.launch)), None if part.rank else uploader
        return cls(uploader.store, name, apart.launch, part, apart.seconds, is_orphan, run_files)

    def begin(self) -> None:
        """Delete what this rank has reported of this step: its files are about to be others."""
        for rank, nonce, end in _reports(self.store, self.name):
            if rank == self.part.rank:
                self.store.delete(self._report(rank, nonce, end))

    def send(self, folder: Path, names: Collection[str], equal: Mapping[str, str]) -> None:
        """Upload files, the largest first; what is equal to a stored one is copied there."""

        def send(name: str) -> None:
            target = f"{self.name}/{name}"
            if name not in equal or not self._copied(equal[name], target):
                self.store.put(target, folder / name)

        with files.raising(CheckpointError):
            largest_first = sorted(names, key=lambda name: -(folder / name).stat().st_size)
            in_parallel(send, largest_first, WORKERS)

    def _copied(self, equal: str, target: str) -> bool:
        """Whether the store has made ``target`` from an equal file of a checkpoint of this launch,
        so that its bytes are not sent once more."""
        checkpoint, _, name = equal.partition("/")
        try:
            self.store.copy(f"{name_of((step_of(Path(checkpoint)), self.launch))}/{name}", target)
        except StoreError as error:
            _say_not_copied(str(self.store.address), str(error).partition(": ")[2])
            return False
        return True

    def report(self, part: bytes) -> None:
        """The last file of this rank."""
        self.store.write(self._report(self.part.rank, self.part.nonce, "json"), part)

    def fail(self, why: str) -> None:
        """The same in place of it."""
        self.store.write(self._report(self.part.rank, self.part.nonce, "error"), why.encode())

    def reports(self) -> list[bytes]:
        """Look for them until all are there."""
        patience = max(_LEAST, self.seconds, _SLOWER * (time.monotonic() - self._began))
        most, since, pause = 0, time.monotonic(), _PAUSE
        while len(ranks := self._reported()) < self.part.world_size:
            if len(ranks) > most:
                most, since, pause = len(ranks), time.monotonic(), _PAUSE
            silence = time.monotonic() - since
            if silence > (_LAST_CHANCE if self.is_orphan() else patience):
                missing = min(set(range(self.part.world_size)) - ranks)
                raise CheckpointError(
                    f"cannot save {self.store.address.inside(self.name)}: rank {missing} has not "
                    f"uploaded its part, nor has any other rank for {silence:.0f} s"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)
        return self._read_reports(self.part.nonce, self.part.world_size)

    def _reported(self) -> set[int]:
        """The ranks that have reported their part of this attempt. Raises if one has failed."""
        ranks = set()
        for rank, nonce, end in _reports(self.store, self.name):
            if nonce != self.part.nonce:
                continue
            if end == "error":
                why = self.store.read(self._report(rank, nonce, end)).decode(errors="replace")
                raise CheckpointError(f"rank {rank}: {why}")
            ranks.add(rank)
        return ranks

    def _read_reports(self, nonce: str, count: int) -> list[bytes]:
        reports = dict[int, bytes]()

        def read(rank: int) -> None:
            reports[rank] = self.store.read(self._report(rank, nonce, "json"))

        in_parallel(read, range(count), _READERS)
        return [reports[rank] for rank in range(count)]

    def read(self, name: str) -> bytes:
        """A file of it that is small enough."""
        return self.store.read(f"{self.name}/{name}")

    def commit(self, manifest: bytes, leftovers: Collection[str]) -> None:
        """Behind the files of the run: none of them may lack a step that is committed."""
        refuse_late(self.store, self.launch)
        if self.run_files is not None:
            self.run_files.upload_run_files()
        if not self.store.create(f"{self.name}/{MANIFEST}", manifest):
            raise CheckpointError(
                f"{self.store.address.inside(self.name)}: another checkpoint of this name exists "
                "there, and a checkpoint is never overwritten"
            )
        for name in leftovers:
            with suppress(StoreError):  # they do no harm
                self.store.delete(f"{self.name}/{name}")

    def _report(self, rank: int, nonce: str, end: str) -> str:
        return f"{self.name}/{REPORTS}/{rank:05d}.{nonce}.{end}"


def _reports(store: Store, checkpoint: str) -> Iterator[tuple[int, str, str]]:
    """The rank, nonce and kind of each report about a checkpoint."""
    return _reports_in(store.list(f"{checkpoint}/{REPORTS}"), checkpoint)


def _reports_in(names: Iterable[str], checkpoint: str) -> Iterator[tuple[int, str, str]]:
    start = f"{checkpoint}/{REPORTS}/"
    for name in names:
        if name.startswith(start) and (match := _REPORT.fullmatch(name.removeprefix(start))):
            yield int(match[1]), match[2], match[3]


def roll_forward(store: Store, stored: Stored, listed: Mapping[str, int]) -> bool:
    """Commit a checkpoint that all ranks had uploaded when its launch was killed; False if it was
    not whole. ``listed`` are the files of the run in the store, with their lengths."""
    name = name_of(stored)
    by_nonce = dict[str, set[int]]()
    for rank, nonce, end in _reports_in(listed, name):
        if end == "json":
            by_nonce.setdefault(nonce, set()).add(rank)
    for nonce, ranks in by_nonce.items():
        part = RankPart(step=stored[0], rank=0, world_size=len(ranks), nonce=nonce)
        save = RankUpload(store, name, stored[1], part)
        if 0 not in ranks:
            continue
        first = parse(save._read_reports(nonce, 1)[0], f"{name}: report of rank 0", is_part=True)
        missing = set(range(first.world_size)) - ranks
        if missing:
            have = counted(len(ranks), "rank has", "ranks have")
            logger.info("%s: %s reported, of %d: skipped", name, have, first.world_size)
            continue
        reports = save._read_reports(nonce, first.world_size)
        sizes = merged(reports, name).files
        if any(listed.get(f"{name}/{file}") != size for file, size in sizes.items()):
            continue  # a later attempt has begun to replace them
        with tempfile.TemporaryDirectory(prefix="surefoot-commit-") as folder:
            commit(save, reports, name, Path(folder))
        message = "%s was uploaded but not committed when its launch was killed: committed now"
        logger.info(message, name)
        return True
    return False


def outline(store: Store, name: str, folder: Path) -> None:
    """Download the manifest and the small files of a checkpoint to ``folder``. Raises
    ``DamagedFileError``."""
    try:
        text, manifest = whole_manifest(store, name)
    except StoredDamageError as error:
        raise DamagedFileError(folder, str(error)) from None

    def read(file: str) -> None:
        data = store.read(f"{name}/{file}")
        if files.digest(data) != manifest.hashes[file]:
            raise DamagedFileError(folder, f"{store.address}/{name}/{file}: {_OTHER_HASH}")
        with files.raising(CheckpointError, f"cannot copy {name}/{file}"):
            files.make_folder((folder / file).parent)
            files.write_aside(folder / file, data)

    in_parallel(read, manifest.companions, _READERS)
    with files.raising(CheckpointError, f"cannot copy {name}"):
        files.write_aside(folder / MANIFEST, text)


Part = tuple[Piece, Box]  # a piece, and the box of its tensor that is needed of it
_OF_A_RANK = re.compile(r"rank_(\d{5,9})/")
_OTHER_HASH = "its hash is not the manifest's; it is damaged in the store"


@dataclass
class PieceReader:
    """Brings pieces of a stored checkpoint into its outline ``here``."""

    store: Store
    stored: Stored
    here: CheckpointFolder
    apart: Apart
    num_bytes: int = 0  # that came from the store

    def fetch(self, parts: Sequence[Part]) -> None:
        """Read what is not here yet, range by range, and check its hashes; once more what has
        another one."""
        by_file = sorted({piece.file for piece, _ in parts})
        with files.raising(CheckpointError, f"cannot copy {self.name}"), ExitStack() as stack:
            were_here = {file for file in by_file if self._is_here(file)}
            opened = {file: stack.enter_context(self._open(file)) for file in by_file}
            paths = {file: self.here.path / file for file in by_file}
            heads = {file: stack.enter_context(open_path(path)) for file, path in paths.items()}

            def is_damaged(part: Part) -> bool:
                return _is_damaged(part, heads[part[0].file])

            wanted = [p for p in parts if p[0].file not in were_here or is_damaged(p)]
            for _ in range(2):
                self._read(opened, heads, wanted)
                wanted = [part for part in wanted if is_damaged(part)]
            if wanted:
                raise self._damaged(wanted[0][0].file, repr(wanted[0][0].key))

    @property
    def name(self) -> str:
        """The folder of the checkpoint in the store."""
        return name_of(self.stored)

    def _is_here(self, file: str) -> bool:
        """Whether there is such a file, which may lack pieces: one that a rank of this machine has
        read, or has written itself."""
        path, (step, launch) = self.here.path / file, self.stored
        if not files.exists(path) and (match := _OF_A_RANK.match(file)):
            own = self.apart.part_of(int(match[1]), launch) / f"checkpoint-{step}" / file
            if files.size_of(own) == self.here.manifest.files[file]:
                files.make_folder(path.parent)
                with suppress(FileExistsError):
                    files.share(own, path)
        return files.exists(path)

    def _open(self, file: str) -> files.File:
        """The file here, at full length, with its header."""
        path, manifest = self.here.path / file, self.here.manifest
        files.make_folder(path.parent)
        opened = files.open_or_create(path)
        opened.extend(size := manifest.files[file])
        try:
            with open_path(path) as known:
                if known.head_hash == manifest.hashes[file]:
                    return opened
        except CheckpointError:
            pass  # zeros, or damaged
        name = f"{self.name}/{file}"
        head = self.store.read_range(name, 0, min(_HEAD, size))
        length = 8 + header_length(head[:8], size, f"{self.store.address}/{name}")
        if length > len(head):
            head += self.store.read_range(name, len(head), length)
        self.num_bytes += len(head)
        if files.digest(head[:length]) != manifest.hashes[file]:
            raise self._damaged(file, "its header")
        opened.write_at(0, head[:length])
        return opened

    def _damaged(self, file: str, what: str) -> DamagedFileError:
        where = self.store.address.inside(self.name)
        return DamagedFileError(self.here.path, f"{where}/{file}: {what}: {_OTHER_HASH}")

    def _read(
        self,
        opened: Mapping[str, files.File],
        heads: Mapping[str, TensorFile],
        parts: Sequence[Part],
    ) -> None:
        ranges = [
            (file, start, stop)
            for file in opened
            for start, stop in _joined(
                (offset, offset + length)
                for part in parts
                if part[0].file == file
                for offset, length in _ranges_of(part, heads[file])
            )
        ]

        def read(found: tuple[str, int, int]) -> None:
            file, start, stop = found
            data = self.store.read_range(f"{self.name}/{file}", start, stop)
            opened[file].write_at(start, data)

        in_parallel(read, ranges, _READERS)
        self.num_bytes += sum(stop - start for _, start, stop in ranges)


def _has_blocks(part: Part) -> bool:
    """Whether what is needed of a piece can be checked without the rest of it."""
    piece, box = part
    return bool(piece.blocks) and box != piece.box


def _ranges_of(part: Part, file: TensorFile) -> Iterable[tuple[int, int]]:
    """The first byte and the length of each range of the file that is needed."""
    piece, box = part
    if _has_blocks(part):
        return file.blocks(piece.key, box.moved_into(piece.box), BLOCK).values()
    entry = file.entry(piece.key)
    return ranges_of(entry, piece.inside(entry.shape))


def _is_damaged(part: Part, file: TensorFile) -> bool:
    piece, box = part
    if _has_blocks(part):
        found = file.hash_blocks(piece.key, box.moved_into(piece.box), BLOCK)
        return any(digest != piece.blocks[number] for number, digest in found)
    return file.hash(piece.key, piece.inside(file.entry(piece.key).shape)) != piece.hash


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The ranges of bytes in order, adjacent ones as one, none longer than ``_RANGE``."""
    joined: list[list[int]] = []
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        elif stop > start:
            joined.append([start, stop])
    for start, stop in joined:
        for at in range(start, stop, _RANGE):
            yield at, min(at + _RANGE, stop)
