"""The only place where pickles are opened: it returns tensors and plain values, and executes
nothing.

``weights_only`` is torch's restricted reader: it accepts tensors, containers and numbers, and
rejects any other function.

The index of a distributed checkpoint names classes of torch. It is read as records of what these
would have been built from: no class of torch is built, and any other name is rejected. DeepSpeed
saves whatever objects the user passes: in its files any name but those that build tensors becomes
such a record, and nothing of that name is looked up.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ...errors import CheckpointError
from ...storage import files


def read_pickle(path: Path) -> object:
    """The content of ``path``, on the CPU: tensors and plain values, or a ``CheckpointError``."""
    with files.raising(CheckpointError), files.open_file(path):
        pass  # a regular file that may be read
    # torch's restricted reader has had holes, such as CVE-2025-32434: it is given no file without
    # the word of the user, nor one that unpacks to more than it is (decisions/0018).
    _check_archive(path, path)
    with _harmless(path, "tensors and plain values"):
        return torch.load(path, map_location="cpu", weights_only=True)


def read_tensor(data: bytes, where: str) -> torch.Tensor:
    """The tensor in the archive ``data`` of ``torch.save``."""
    _check_archive(io.BytesIO(data), where)
    with _harmless(where, "a tensor"):
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return expect_tensor(content, where)


def read_mapped(path: Path) -> Any:
    """The content of an archive of any objects: tensors that are mapped from the file, so that they
    take no memory until they are read, and inert records in place of objects not of torch."""
    with files.raising(CheckpointError), files.open_file(path, follow=False):
        pass
    _check_archive(path, path)
    reader: Any = SimpleNamespace(__name__="records", Unpickler=_Mapped)
    with _harmless(path, "tensors"):
        return torch.load(
            path, map_location="cpu", mmap=True, pickle_module=reader, weights_only=False
        )


def expect_tensor(content: object, where: str) -> torch.Tensor:
    """``content``, if it is a tensor with all of its values, by itself and no view of less."""
    if not isinstance(content, torch.Tensor) or content.layout != torch.strided:
        raise CheckpointError(f"{where}: not a plain tensor; read it with PyTorch")
    return content


@contextmanager
def _harmless(where: object, expected: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what a made-up file makes the reader raise is anybody's choice
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise CheckpointError(
            f"{where}: it is damaged, or contains more than {expected}; nothing in it was executed "
            f"({reason[:200]}); resume from an earlier checkpoint"
        ) from None


def _check_archive(file: Path | io.BytesIO, where: object) -> None:
    """Raise unless ``file`` is an archive of ``torch.save``, as large in memory as on disk, whose
    pickle fills no table beyond its length."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = [entry.filename.partition("/")[2] for entry in entries]
            if "constants.pkl" in names:  # of a program, which torch.load would load
                raise ValueError
            if all(entry.compress_type == zipfile.ZIP_STORED for entry in entries):
                _check_memo(archive.read(entries[names.index("data.pkl")]))
                return
    except Exception:  # what a made-up file makes the reader raise is anybody's choice
        raise CheckpointError(
            f"{where}: it is damaged, or written by torch before 1.6 as a plain pickle; nothing in "
            "it was executed; resume from an earlier checkpoint, or, if you trust the file, load "
            "it and save it again with torch"
        ) from None
    raise CheckpointError(
        f"{where}: its entries are compressed, as torch.save never writes them, so they may take "
        "any amount of memory; if you trust the file, load it and save it again with torch"
    )


def write_pickle(path: Path, content: object) -> None:
    """Write ``content``, tensors and plain values, into the new file ``path`` and flush it."""
    with files.raising(CheckpointError, f"cannot write {path}"):
        files.create(path).close()
        try:
            torch.save(content, path)
        except RuntimeError as error:  # torch's word for a full disk, too
            raise CheckpointError(f"cannot write {path}: {str(error).splitlines()[0]}") from None
        with files.open_file(path, write=True) as file:
            file.sync()


class Record:
    """Inert record in place of an object: its arguments and its state, without behavior."""

    name = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: object, **_: object) -> Record:
        """Also without ``__init__``, as pickle makes most objects."""
        record = super().__new__(cls)
        record.args = args
        return record

    def __init__(self, *_: object) -> None:
        """``__new__`` has taken the arguments."""

    def __setstate__(self, state: object) -> None:
        """Record the state."""
        self.state = state

    def __getitem__(self, field: str) -> Any:
        return self.state[field]

    def __setitem__(self, key: object, value: object) -> None:
        """For a kind of dict: ignored."""

    def append(self, value: object) -> None:
        """For a kind of list: ignored."""

    add = append

    def get(self, field: str) -> Any:
        """A field that may be missing."""
        return self.state.get(field)


class _Dict(dict[Any, Any]):
    """An ``OrderedDict``; attributes of it, such as versions of modules, are ignored."""

    def __setstate__(self, state: object) -> None:
        pass


def _tensor_of(parameter: object, *_: object) -> object:
    return parameter


_REBUILD = {  # what an archive of torch builds its tensors with
    "_rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    "_rebuild_parameter": _tensor_of,
    "_rebuild_parameter_with_state": _tensor_of,
    # a tensor with attributes, without them
    "_rebuild_from_type_v2": lambda build, _kind, arguments, _attributes: build(*arguments),
}
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


_DCP = "torch.distributed.checkpoint"
_OF_AN_INDEX = {  # what the index of a distributed checkpoint is made of
    "Metadata": f"{_DCP}.metadata",
    "MetadataIndex": f"{_DCP}.metadata",
    "TensorStorageMetadata": f"{_DCP}.metadata",
    "BytesStorageMetadata": f"{_DCP}.metadata",
    "ChunkStorageMetadata": f"{_DCP}.metadata",
    "TensorProperties": f"{_DCP}.metadata",
    "_MEM_FORMAT_ENCODING": f"{_DCP}.metadata",
    "StorageMeta": f"{_DCP}.metadata",
    "_StorageInfo": f"{_DCP}.filesystem",
    "_get_layout": "torch.serialization",
    "PosixPath": "pathlib",
}


class _Records(pickle.Unpickler):
    """Torch's types, and records in place of the classes of an index. Rejects other names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and isinstance(torch_dtype := getattr(torch, name, None), torch.dtype):
            return torch_dtype
        if (module, name) == ("collections", "OrderedDict"):
            return _Dict
        if _OF_AN_INDEX.get(name) != module:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return type(name, (Record,), {"name": name})


class _Mapped(_Records):
    """Builds tensors, too; whatever else is named becomes a record."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch._utils", "torch._tensor") and name in _REBUILD:
            return _REBUILD[name]
        try:
            return super().find_class(module, name)
        except pickle.UnpicklingError:
            return type("Other", (Record,), {"name": f"{module}.{name}"})


def _check_memo(data: bytes) -> None:
    """Raise for a place in the memo that no pickle of this length needs: Python's reader would fill
    a table up to it, 32 GB for eight bytes."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _PUTS and int(argument or 0) > len(data):
            raise pickle.UnpicklingError(f"it puts an object at the place {argument:,}")


def read_record(data: bytes, where: str) -> Any:
    """The content of the pickle ``data``, as records."""
    with _harmless(where, "an index of tensors"):
        _check_memo(data)
        return _Records(io.BytesIO(data)).load()
