"""Snapshot buffer: shared memory for the images of all files of a save, allocated once and reused.

Two processes map it: the training process copies a snapshot into it, and the writer process writes
its pages to the disk without another copy. It has no name and is freed with the last of the two.

A complete file has the same layout there as on the disk. If several ranks write a file, each has
its boxes. Boxes that are one range of the file have the same offset within a page as there, so that
they can be written without a copy, together with adjacent ones. The others, boxes of columns, are
written row by row.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from ...parallel.sharding import Box
from ...storage import files
from ...storage.files import PAGE
from ...storage.memory import exclusive, free_memory
from ..apart import Apart
from ..disk.tensorfile import FilePlan, num_bytes, parse, ranges_of
from ._writing import Job, Shard, WriteShare

_SPARE = 96 << 20  # bytes for the writer process, and for what the next step may need besides
_WORTH_BYPASSING = 256 << 10  # bytes; less of a file that others write as well goes to the cache


def lacks_room(size: int) -> str | None:
    """Why ``size`` bytes of a snapshot do not fit now; None if they do. The memory is anonymous:
    the size of a container's ``/dev/shm`` is no limit to it, but its memory is."""
    free = free_memory()
    if free is None or size + _SPARE <= free:
        return None
    return f"{size + _SPARE:,} bytes are needed, {free:,} are free"


class SnapshotBuffer:
    """``size`` bytes of shared memory."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        # Pages are mapped now: a copy into pages that are not costs several times as much.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._map = mmap.mmap(descriptor, size, flags=flags)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size: int) -> SnapshotBuffer:
        """Allocate all of it; ``MemoryError`` if not enough memory is available, or if this system
        has no memory of that kind (Linux has)."""
        if not hasattr(os, "memfd_create"):
            raise MemoryError("this system does not support the shared memory that is needed")
        # Not multiprocessing.shared_memory: in a container /dev/shm is often 64 MB. Nor the target
        # file, mapped: 1.4 to 2.6 s of page faults for 2 GB (docs/decisions/0014).
        descriptor = os.memfd_create("surefoot-checkpoint", os.MFD_CLOEXEC)
        try:
            with _in_turn(size):
                if why := lacks_room(size):
                    raise MemoryError(why)
                # Not ftruncate(): pages that cannot be had later would end the copy with SIGBUS.
                os.posix_fallocate(descriptor, 0, size)
            return cls(descriptor, size)
        except MemoryError:
            os.close(descriptor)
            raise
        except OSError as error:
            os.close(descriptor)
            raise MemoryError(f"{size:,} bytes of shared memory: {error.strerror}") from error

    def close(self) -> None:
        """Free the memory, unless the other process still uses it."""
        os.close(self.descriptor)
        self.view.release()
        self._map.close()


@dataclass(frozen=True)
class FileImages:
    """The bytes of a job's tensors in the buffer, file by file."""

    arena: SnapshotBuffer
    starts: Sequence[int]  # of each shard's image
    shards: Sequence[Shard]

    @cached_property
    def _images(self) -> Mapping[str, tuple[int, FileImage]]:
        pairs = zip(self.shards, self.starts, strict=True)
        return {shard.plan.name: (start, image_of(shard)) for shard, start in pairs}

    def of(self, shard: Shard) -> memoryview:
        """The image of one file, which begins with its header."""
        start, image = self._images[shard.plan.name]
        return self.arena.view[start : start + image.size]

    def names(self, shard: Shard) -> list[str]:
        """The tensors in it, complete or as boxes."""
        return list(self._images[shard.plan.name][1].spots)

    def tensor(self, shard: Shard, name: str) -> memoryview:
        """The bytes of one tensor, or of this rank's box of it."""
        start, length = self._images[shard.plan.name][1].spots[name]
        return self.of(shard)[start : start + length]

    def hash(self, shard: Shard, name: str) -> str:
        """The hash of the same bytes."""
        return files.digest(self.tensor(shard, name))

    def blocks(self, shard: Shard, name: str, size: int) -> list[str]:
        """The hash of each ``size`` of these bytes."""
        data = self.tensor(shard, name)
        return [files.digest(data[at : at + size]) for at in range(0, len(data), size)]

    def write(self, shard: Shard, file: files.File) -> dict[str, str]:
        """Write and flush the file, or this rank's part of it; the hashes by tensor."""
        with ThreadPoolExecutor(1) as pool:  # the disk works while the core hashes
            names = self.names(shard)
            hashes = pool.submit(lambda: {name: self.hash(shard, name) for name in names})
            self._write(shard, file)
            file.sync()
            return hashes.result()

    def _write(self, shard: Shard, file: files.File) -> None:
        view, image = self.of(shard), self._images[shard.plan.name][1]
        for part in image.stretches:
            data = view[part.start : part.start + part.length]
            if shard.share is None or part.length >= _WORTH_BYPASSING:
                file.write_at(part.offset, data)
            else:
                file.write_ranges([(part.offset, part.length)], data)
        # A call for each row and tensor (600,000 for 7B parameters on four ranks), but in the
        # background: to exchange columns into rows first would cost collectives in the training
        # thread, and a rank that dies in one hangs the others (docs/decisions/0027).
        for name, box in image.scattered.items():
            ranges = ranges_of(shard.plan.header.entries[name], box)
            file.write_ranges(ranges, self.tensor(shard, name))


@contextlib.contextmanager
def _in_turn(size: int) -> Iterator[None]:
    """Several ranks of a machine allocate at the same moment, and each would see the same memory
    free. They take turns, unless there is enough for all of them."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    free = free_memory()
    is_tight = free is not None and (size + _SPARE) * ranks > free
    with exclusive("memory") if ranks > 1 and is_tight else contextlib.nullcontext():
        yield


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The start of each image, aligned to a page, and the size of all of them."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end = -(-(end + size) // files.PAGE) * files.PAGE
    # A map cannot be empty.
    return starts, max(end, files.PAGE)


_ALIGNMENT = 64  # bytes, of a tensor in memory


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes that are contiguous in memory and in the file."""

    start: int  # in the image
    offset: int  # in the file
    length: int


@dataclass(frozen=True)
class FileImage:
    """The positions of everything in the image, which begins with the file's header."""

    spots: Mapping[str, tuple[int, int]]  # start and length of each tensor, or box of one, by key
    stretches: Sequence[ByteRange]  # what is written as it lies
    scattered: Mapping[str, Box]  # boxes that are not one range of the file
    size: int


def image_of(shard: Shard) -> FileImage:
    """The layout of the bytes of ``shard`` in memory."""
    header = shard.plan.header
    if shard.share is None:
        spots = {name: (entry.offset, entry.num_bytes) for name, entry in header.entries.items()}
        return FileImage(spots, [ByteRange(0, 0, header.file_size)], {}, header.file_size)
    end = header.data_start
    spots, scattered = {}, dict[str, Box]()
    stretches = [ByteRange(0, 0, end)] if shard.share.has_head else []
    for name, entry in header.entries.items():
        if (box := shard.share.boxes.get(name)) is None:
            continue
        length = num_bytes(entry.dtype, box.shape)
        # Whether it is one range or more: a box of columns has one for each row.
        runs = list(islice(ranges_of(entry, box), 2))
        if len(runs) == 1:
            start = _append(stretches, end, *runs[0])
        else:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            scattered |= {name: box} if runs else {}
        spots[name] = start, length
        end = start + length
    return FileImage(spots, stretches, scattered, end)


def _append(stretches: list[ByteRange], end: int, offset: int, length: int) -> int:
    """Add a byte range of the file; returns where in memory it begins."""
    if stretches:
        last = stretches[-1]
        if (last.start + last.length, last.offset + last.length) == (end, offset):
            stretches[-1] = ByteRange(last.start, last.offset, last.length + length)
            return end
    start = -(-end // PAGE) * PAGE + offset % PAGE
    stretches.append(ByteRange(start, offset, length))
    return start


@dataclass(frozen=True)
class JobSnapshot:
    """A job, and where its bytes are in the buffer: all that a writer process needs."""

    job: Job
    images: FileImages  # of its files of tensors
    small: Mapping[str, tuple[int, int]]  # start and length of each of its small files

    def dump(self) -> dict[str, Any]:
        """The job as plain JSON; what is large is in the buffer, and its place in the message."""
        plain = {field.name: getattr(self.job, field.name) for field in fields(Job)}
        shards = [
            {
                "role": shard.role,
                "name": shard.plan.name,
                "start": start,
                "file_size": shard.plan.header.file_size,
                "share": None if shard.share is None else asdict(shard.share),
            }
            for shard, start in zip(self.job.shards, self.images.starts, strict=True)
        ]
        plain["apart"] = None if self.job.apart is None else asdict(self.job.apart)
        root = str(self.job.root.absolute())
        return {**plain, "root": root, "shards": shards, "small": self.small}


def parse_job(message: dict[str, Any], arena: SnapshotBuffer) -> tuple[Job, FileImages]:
    """A job from its message, in the writer process. An image begins with its file's header."""
    shards = []
    for shard in message["shards"]:
        image, share = arena.view[shard["start"] :], shard["share"]
        head = bytes(image[: 8 + int.from_bytes(image[:8], "little")])
        plan = FilePlan(shard["name"], head, parse(head[8:], shard["file_size"], shard["name"]))
        if share is not None:
            boxes = {
                key: Box(tuple(box["start"]), tuple(box["shape"]))
                for key, box in share["boxes"].items()
            }
            share = WriteShare(boxes, share["has_head"])
        shards.append(Shard(shard["role"], plan, share))
    small = {n: bytes(arena.view[at : at + size]) for n, (at, size) in message["small"].items()}
    apart = None if message["apart"] is None else Apart(**message["apart"])
    known = {"root": Path(message["root"]), "shards": shards, "small": small, "apart": apart}
    job = Job(**{**message, **known})
    return job, FileImages(arena, [shard["start"] for shard in message["shards"]], shards)
