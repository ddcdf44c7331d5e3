"""Tensor source: the names of tensors, and the values of any box of them.

A folder in any layout opens as a source. Renaming, fusing, casting and merging are views: sources
over sources. So a conversion is one expression, reads only what it writes, and builds no model.
``copy`` writes any source as Hugging Face weight files, in bounded memory.
"""

from __future__ import annotations

import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import torch

from ..errors import CheckpointError, DamagedFileError
from ..parallel.progress import wait_for_ranks
from ..parallel.sharding import Box
from ..storage import files
from ..storage.memory import only_new_collected
from ..storage.parallel_work import MAX_SPACE, ByteStream, ahead
from .disk._bytes import DTYPES, dtype_name, fill_box, write_tensor
from .disk.folder import FolderWeights, StoredBox
from .disk.tensorfile import FilePlan, Hashes, explained, plan_save
from .float32_weights import Kept, none_kept
from .saving.preparation import dump_index

Shape = tuple[int, ...]
S = TypeVar("S")
T = TypeVar("T")


class TensorSource(Protocol):
    """Named tensors that can be read box by box."""

    def shapes(self) -> Mapping[str, Shape]:
        """The name and full shape of every tensor."""

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of every tensor."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The values in one box of one tensor, on the CPU."""


def once(method: Callable[[S], T]) -> Callable[[S], T]:
    """A method of a frozen source whose result is computed once."""
    name = f"_{method.__name__}"

    @wraps(method)
    def computed(self: S) -> T:
        # Frozen dataclasses forbid assignments, not this; cached_property makes no method.
        if name not in self.__dict__:
            self.__dict__[name] = method(self)
        cached: T = self.__dict__[name]
        return cached

    return computed


def read_whole(source: TensorSource, name: str) -> torch.Tensor:
    """All values of one tensor."""
    return source.read(name, Box.whole(source.shapes()[name]))


@dataclass(frozen=True)
class FolderSource:
    """The weights of a folder.

    If a hash is known, what is read is checked against it: a tensor that is read completely, or
    block by block in order, as it is read; one of which other boxes are read, by reading it once in
    full. A tensor with several parts is checked part by part.
    """

    weights: FolderWeights
    is_checked: bool = False  # whether the caller has somebody else check the values
    _half_read: dict[StoredBox, tuple[int, files.Hash]] = field(
        default_factory=dict, repr=False, compare=False
    )  # elements hashed so far, and their hash
    _known: set[StoredBox] = field(default_factory=set, repr=False, compare=False)  # read in full

    @once
    def shapes(self) -> Mapping[str, Shape]:
        """From the headers of the files: no value is read."""
        return {name: place.entry.shape for name, place in self.weights.tensors.items()}

    @once
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """From the headers, too."""
        return {name: DTYPES[place.entry.dtype] for name, place in self.weights.tensors.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Only the bytes of ``box``, from the file into a new tensor."""
        values = torch.empty(box.shape, dtype=self.dtypes()[name])
        self.read_into(name, box, values)
        return values

    def read_into(self, name: str, box: Box, target: torch.Tensor) -> None:
        """The same into a contiguous CPU tensor of the dtype of ``name``."""
        place = self.weights.tensors[name]
        whole = Box.whole(place.entry.shape)
        if len(box.shape) != len(whole.shape) or box not in whole:
            where = f"{self.weights.folder}: {name}"
            raise CheckpointError(f"{where}: {box} is outside of shape {place.entry.shape}")
        for part in place.parts or (StoredBox(place.file, place.key, whole, place.hash),):
            if (common := box & part.box) is not None:
                self._fill(name, part, common, target[common.slices_in(box)])

    def _fill(self, name: str, part: StoredBox, box: Box, target: torch.Tensor) -> None:
        """Read ``box``, inside ``part``; directly into ``target`` if that is contiguous."""
        is_plain = target.is_contiguous()
        values = target if is_plain else torch.empty(box.shape, dtype=target.dtype)
        is_checked = part.hash is None or self.is_checked or part in self._known
        first, digest = (0, None) if is_checked else self._next_of(part, box.moved_into(part.box))
        with files.raising(CheckpointError):
            fill_box(values, part.file, part.key, part.in_file(box), digest)
            if digest is None and not is_checked:  # not the next of its bytes
                self._compare(name, part, part.file.hash(part.key, part.in_file(part.box)))
                self._known.add(part)
        if digest is not None and first + box.size < part.box.size:
            self._half_read[part] = (first + box.size, digest)
        elif digest is not None:
            self._compare(name, part, digest.hexdigest())
        if not is_plain:
            target.copy_(values)

    def _next_of(self, part: StoredBox, box: Box) -> tuple[int, files.Hash | None]:
        """The first element of ``box`` in ``part``, and the hash of all before it; None for that if
        they were not read in order."""
        first, count = next(box.runs_in(Box.whole(part.box.shape)), (0, 0))
        read, digest = self._half_read.pop(part, (0, None))
        if first == 0:
            read, digest = 0, files.Hash()
        return first, digest if first == read and count == box.size else None

    def _compare(self, name: str, part: StoredBox, digest: str) -> None:
        if digest != part.hash:
            raise DamagedFileError(
                self.weights.folder,
                f"{part.file.path}: {name} is damaged: its hash does not match",
            )


@dataclass(frozen=True)
class TensorsInMemory:
    """Tensors in memory."""

    tensors: Mapping[str, torch.Tensor]

    def shapes(self) -> Mapping[str, Shape]:
        """Unchanged."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Unchanged."""
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A view."""
        tensor = self.tensors[name]
        return wait_for_ranks(tensor[box.slices_in(Box.whole(tuple(tensor.shape)))].detach().cpu)


@dataclass(frozen=True)
class Renamed:
    """Tensors under other names (new name -> old name); tensors that are not named are omitted."""

    source: TensorSource
    names: Mapping[str, str]

    @once
    def shapes(self) -> Mapping[str, Shape]:
        """By new name."""
        shapes = self.source.shapes()
        return {new: shapes[old] for new, old in self.names.items()}

    @once
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """By new name."""
        dtypes = self.source.dtypes()
        return {new: dtypes[old] for new, old in self.names.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """By new name."""
        return self.source.read(self.names[name], box)


@dataclass(frozen=True)
class ReplacingSource(ABC):
    """Tensors that are made of others of a source, which they replace."""

    source: TensorSource

    @abstractmethod
    def made(self) -> Mapping[str, tuple[Shape, Sequence[str]]]:
        """The shape of each new tensor, and the names of those it is made of, of one type."""

    @abstractmethod
    def read_made(self, name: str, box: Box) -> torch.Tensor:
        """The values in one box of a new tensor."""

    @cached_property
    def _made(self) -> Mapping[str, tuple[Shape, Sequence[str]]]:
        return self.made()

    @once
    def shapes(self) -> Mapping[str, Shape]:
        """Of the new tensors, and of those that were not used."""
        shapes = {**self.source.shapes(), **{n: shape for n, (shape, _) in self._made.items()}}
        return {name: shapes[name] for name in self.dtypes()}

    @once
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Of a new tensor, that of the first it is made of."""
        dtypes = self.source.dtypes()
        used = {name for _, part_names in self._made.values() for name in part_names}
        left = {name: dtype for name, dtype in dtypes.items() if name not in used}
        return left | {name: dtypes[part_names[0]] for name, (_, part_names) in self._made.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """As stored, unless it is new."""
        return self.read_made(name, box) if name in self._made else self.source.read(name, box)


@dataclass(frozen=True)
class CastSource:
    """Floating point values in another dtype; integers, bools, 8-bit floats, and what is ``kept``
    do not change."""

    source: TensorSource
    dtype: torch.dtype
    kept: Kept = none_kept

    def shapes(self) -> Mapping[str, Shape]:
        """A cast changes none."""
        return self.source.shapes()

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """``dtype`` for plain floating point numbers."""
        return {name: self._target(name, dtype) for name, dtype in self.source.dtypes().items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Rounded to nearest."""
        values = self.source.read(name, box)
        return rounded(values, self._target(name, values.dtype), name)

    def _target(self, name: str, dtype: torch.dtype) -> torch.dtype:
        # 8-bit floats are quantized values; what they mean depends on scales in other tensors.
        is_cast = dtype.is_floating_point and dtype.itemsize > 1 and not self.kept(name)
        return self.dtype if is_cast else dtype


def rounded(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """``values`` of the tensor ``name`` as ``dtype``, rounded to nearest. Every cast of a weight
    that is written goes through here. Raises ``CheckpointError`` where a finite one would become
    infinite."""
    result = values.to(dtype)
    if dtype == values.dtype or torch.finfo(dtype).max >= torch.finfo(values.dtype).max:
        return result
    infinite = result.isinf()
    if infinite.any() and (infinite & values.isfinite()).any():
        raise CheckpointError(
            f"{name}: its values (up to {values[values.isfinite()].abs().max():.3g}) exceed "
            f"{str(dtype).removeprefix('torch.')}; write bfloat16 or float32 (--dtype)"
        )
    return result


class Computed(Protocol):
    """A tensor that is computed from others."""

    @property
    def shape(self) -> Shape:
        """Of the result."""

    @property
    def parts(self) -> Mapping[str, str]:
        """The names of the others by role; the result has the dtype of the first one."""

    @property
    def unused(self) -> Sequence[str]:
        """Names of tensors that it makes needless, besides the parts."""

    def compute(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The values, from the parts by role."""


@dataclass(frozen=True)
class ComputedSource(ReplacingSource):
    """A source in which tensors are replaced by others that are computed from them. For any box,
    all of a tensor is computed, and kept until another one is."""

    computed: Mapping[str, Computed]
    _last: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def made(self) -> Mapping[str, tuple[Shape, Sequence[str]]]:
        """The new tensors."""
        tensors = self.computed.items()
        return {name: (t.shape, [*t.parts.values(), *t.unused]) for name, t in tensors}

    def read_made(self, name: str, box: Box) -> torch.Tensor:
        """Computed from its parts, which are read in full."""
        whole = Box.whole(self.computed[name].shape)
        values = self._last.get(name)
        if values is None:
            values = self._compute(name)
            self._last.clear()
            if box != whole:
                self._last[name] = values
        return values[box.slices_in(whole)]

    def _compute(self, name: str) -> torch.Tensor:
        tensor = self.computed[name]
        parts = {role: read_whole(self.source, part) for role, part in tensor.parts.items()}
        return tensor.compute(parts)


@dataclass(frozen=True)
class JoinedSource:
    """Sources whose names, with their prefixes, are all different."""

    parts: Sequence[tuple[str, TensorSource]]  # each with what stands before its names

    @cached_property
    def _places(self) -> Mapping[str, tuple[TensorSource, str]]:
        return {
            f"{prefix}{name}": (part, name) for prefix, part in self.parts for name in part.shapes()
        }

    @once
    def shapes(self) -> Mapping[str, Shape]:
        """Of all sources."""
        return {f"{p}{name}": s for p, part in self.parts for name, s in part.shapes().items()}

    @once
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Of all sources."""
        return {f"{p}{name}": d for p, part in self.parts for name, d in part.dtypes().items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """From the source that contains it."""
        part, inner = self.place_of(name)
        return part.read(inner, box)

    def place_of(self, name: str) -> tuple[TensorSource, str]:
        """The source that contains it, and its name there."""
        return self._places[name]


Progress = Callable[[int], None]  # is told the bytes of each block written
_PART = ".part"
_BLOCK = MAX_SPACE  # bytes read, computed and written at a time: in the cache, also as float32
DtypeName = Literal["float32", "float16", "bfloat16"]
CASTS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@only_new_collected()
def copy(
    source: TensorSource,
    target_folder: Path | str,
    *,
    stem: str = "model",
    dtype: str | None = None,
    max_shard_size: int | None = 5_000_000_000,
    progress: Progress | None = None,
) -> Hashes:
    """Write ``source`` into ``target_folder`` as ``{stem}.safetensors``, or as several files and an
    index; returns the hashes of what was written.

    ``dtype`` (float32, float16, bfloat16) casts floating point tensors. The files appear when all
    are complete; a folder that already contains such weights is rejected.
    """
    source, folder = cast(source, dtype, none_kept), Path(target_folder)
    plans = plan_save(stem, described(source), max_shard_size)
    with files.raising(CheckpointError, f"cannot write weights to {folder}"):
        files.make_folder(folder)
        _make_room(folder, stem)
        hashes = _write(source, folder, plans, progress or silent)
        if len(plans) > 1:
            # The index comes last: without it transformers sees no model in these files.
            files.write_aside(folder / f"{stem}.safetensors.index.json", dump_index(plans))
        files.sync_folder(folder)
    return hashes


def cast(source: TensorSource, dtype: str | None, kept: Kept) -> TensorSource:
    """``source`` with its floating point tensors as ``dtype``, but for those that are ``kept``;
    unchanged if that is None."""
    if dtype is None:
        return source
    if dtype not in CASTS:
        raise CheckpointError(f"dtype {dtype!r}: expected one of {', '.join(CASTS)}")
    return CastSource(source, CASTS[dtype], kept)


def described(source: TensorSource) -> dict[str, tuple[str, Shape]]:
    """The stored dtype and shape of every tensor."""
    dtypes = source.dtypes()
    return {name: (dtype_name(name, dtypes[name]), s) for name, s in source.shapes().items()}


def silent(num_bytes: int) -> None:
    """Report no progress."""


def _make_room(folder: Path, stem: str) -> None:
    """Reject a folder with such weights; delete the leftovers of a killed copy."""
    for name in files.list_folder(folder):
        if name.startswith(stem) and ".safetensors" in name:
            raise CheckpointError(f"{folder / name}: it exists already; choose another folder")
        if name.startswith(f".{stem}") and name.endswith(_PART):
            with (
                contextlib.suppress(BlockingIOError),  # another process writes it
                files.open_file(folder / name, follow=False, write=True) as file,
            ):
                if file.lock():
                    files.remove_tree(folder / name)


def _write(
    source: TensorSource, folder: Path, plans: Sequence[FilePlan], progress: Progress
) -> Hashes:
    """Write all files under temporary names, then rename them."""
    nonce, hashes = secrets.token_hex(4), dict[str, Mapping[str, str]]()
    with contextlib.ExitStack() as stack:
        opened = []
        for plan in plans:
            path = folder / f".{plan.name}.{nonce}{_PART}"
            file = stack.enter_context(files.create(path))
            stack.callback(_remove, path)
            file.lock()
            # All are reserved before one is filled: a full disk ends
            # the copy before its first byte.
            file.reserve(plan.header.file_size)
            file.bypass_cache()
            opened.append(file)
        for file, plan in zip(opened, plans, strict=True):
            hashes[plan.name] = fill(file, source, plan, progress)
        for file, plan in zip(opened, plans, strict=True):
            files.rename(file.path, folder / plan.name)
    return hashes


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # what stopped the copy matters more
        files.remove_tree(path)


def fill(
    file: files.File, source: TensorSource, plan: FilePlan, progress: Progress
) -> dict[str, str]:
    """Write and flush a planned file; the hash of the bytes of each tensor, or box, by name."""
    boxes = {name: box for name, (_, box) in explained(plan.header).items()}
    return fill_boxes(file, source, plan.head, boxes, progress)


def fill_boxes(
    file: files.File,
    source: TensorSource,
    head: bytes,
    boxes: Mapping[str, Box],
    progress: Progress,
) -> dict[str, str]:
    """The same of a file that has these boxes of tensors after its head, in their order.

    What is stored is read to where it is written from, and hashed while it is in the core's cache.
    Of what is computed, the next block is computed in a thread while one is hashed and written.
    """
    digests, dtypes = {name: files.Hash() for name in boxes}, source.dtypes()
    stored = {name: _stored(source, name) for name in boxes}
    blocks = [
        (name, part)
        for name, box in boxes.items()
        for part in box.blocks(_BLOCK // dtypes[name].itemsize)
        if part.size
    ]
    to_compute = [block for block in blocks if stored[block[0]] is None]
    computed = ahead(lambda block: source.read(*block), to_compute)
    with contextlib.closing(computed), ByteStream(file) as stream:
        stream.write(head)
        for name, part in blocks:
            num_bytes = part.size * dtypes[name].itemsize
            if (place := stored[name]) is None:
                write_tensor(stream, next(computed), digests[name])
            else:
                space = stream.space(num_bytes)
                folder, stored_name = place
                values = torch.frombuffer(space, dtype=dtypes[name]).view(part.shape)
                folder.read_into(stored_name, part, values)
                digests[name].update(space)
                stream.add(num_bytes)
            progress(num_bytes)
    return {name: digest.hexdigest() for name, digest in digests.items()}


def _stored(source: TensorSource, name: str) -> tuple[FolderSource, str] | None:
    """The folder whose file has the values of a tensor as they are, and its name there; None if
    they are computed, or may be."""
    if isinstance(source, Renamed):
        return _stored(source.source, source.names[name])
    if isinstance(source, JoinedSource):
        return _stored(*source.place_of(name))
    return (source, name) if isinstance(source, FolderSource) else None
