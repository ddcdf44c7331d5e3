"""The only place where pickles are opened: tensors and plain values come out, nothing runs.

``weights_only`` is torch's restricted reader: it knows tensors, containers and numbers, and refuses
whatever names another function. numpy's arrays are let in beside them: the Trainer keeps numpy's
generator as one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers.trainer_pt_utils import safe_globals

from .. import files
from ..errors import CheckpointError

_RECONSTRUCT = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
OF_NUMPY_1 = (_RECONSTRUCT, "numpy.core.multiarray._reconstruct")  # the name it had there


def read_pickle(path: Path) -> object:
    """What ``path`` holds, on the CPU.

    Raises:
        CheckpointError: it is damaged, or asks for more than tensors and plain values.
    """
    with files.raising(CheckpointError), files.open_file(path):
        pass  # a regular file that may be read
    try:
        with safe_globals(), torch.serialization.safe_globals([OF_NUMPY_1]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a made-up file makes the reader raise is anybody's choice
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise CheckpointError(
            f"{path}: it is damaged, or holds more than tensors and plain values, and nothing "
            f"of it was run ({reason[:200]}); go on from an earlier checkpoint"
        ) from None


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
