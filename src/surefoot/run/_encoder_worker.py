"""Encoder worker: the process that encodes while another one trains.

Its command is ``python -m surefoot.run._encoder_worker RECIPE``.

It encodes as fast as the remaining processors allow. Its results are in the cache, so it may be
ended at any time. It ends with the process that has started it.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import DataError, SurefootError
from ..recipe.recipe import load
from ..recipe.recipe_data import encode_datasets, read_encoding
from ..storage.child import Child, die_with_launcher
from ..storage.files import read_file

POLL_SECONDS = 0.05
MAX_STARTS = 3
NICE = 10
RECIPE, LOG, ERROR = "recipe.yaml", "log", "error"  # the last: what the user can mend


class EncoderWorker:
    """Encodes the datasets of a recipe in a process of its own."""

    def __init__(self, text: Callable[[], str]) -> None:
        """``text`` gives the recipe, whose model is in a folder."""
        self._text = text
        self._child: Child | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of its recipe and output
        self._starts = 0

    def __enter__(self) -> EncoderWorker:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process; its finished shards stay in the cache."""
        if self._child is not None:
            self._child.end()
        if self._folder is not None:
            self._folder.cleanup()
        self._child, self._starts = None, 0

    def start(self) -> None:
        """Start to encode what is not in the cache, unless a worker is already running. Raises
        ``DataError`` if the process cannot be started."""
        if self._child is not None and self._child.code is None:
            return
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(prefix="surefoot-encoder-")
        recipe = Path(self._folder.name, RECIPE)
        recipe.write_text(self._text(), encoding="utf-8")
        try:
            self._child = Child(
                ["-m", "surefoot.run._encoder_worker", str(recipe)], log=recipe.with_name(LOG)
            )
        except OSError as error:
            raise DataError(f"cannot start the encoder process: {error}") from error
        self._starts += 1

    def wait(self) -> None:
        """Wait a little for more. Raises ``DataError`` if nothing more will come: the data is
        broken, or the process was ended repeatedly."""
        if self._child is not None and self._child.code is not None:
            if error := self._read(ERROR):
                raise DataError(error)
            if self._starts >= MAX_STARTS:
                last_line = "".join(f": {line}" for line in self._read(LOG).splitlines()[-1:])
                raise DataError(f"the encoder process ended {self._child.ending}{last_line}")
        self.start()  # again, if it was killed, for want of memory say, or its work is gone
        time.sleep(POLL_SECONDS)

    def _read(self, name: str) -> str:
        """The content of a file that the process has written; empty if there is none."""
        file = None if self._folder is None else Path(self._folder.name, name)
        exists = file is not None and file.exists()
        return read_file(file).decode(errors="replace") if file and exists else ""


def main(recipe: Path) -> int:
    """Encode all training datasets; the exit code."""
    die_with_launcher()
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # schedulers send them to all
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    try:
        encode_datasets(read_encoding(load(recipe, is_saved=True)))
    except SurefootError as error:
        recipe.with_name(ERROR).write_text(str(error), encoding="utf-8")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
