"""Encoder worker: the process that encodes while another one trains.

Its command is ``python -m surefoot.run.encoder_worker RECIPE``.

It encodes as fast as the remaining processors allow. Its results are in the cache, so it may be
ended at any time. It ends with the process that has started it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import surefoot

from ..errors import DataError, SurefootError
from ..model.pretrained.loading import resolve
from ..parallel.launch_environment import LAUNCHER
from ..parallel.world import die_with_launcher
from ..recipe.recipe import Recipe, dump, load
from ..recipe.recipe_data import encode_datasets, open_codec

POLL_SECONDS = 0.05
MAX_STARTS = 3
NICE = 10
RECIPE, LOG, ERROR = "recipe.yaml", "log", "error"  # the last: what the user can mend


class EncoderWorker:
    """Encodes the datasets of a recipe in a process of its own."""

    def __init__(self, recipe: Recipe, base: Path) -> None:
        """``base`` is the folder of the model that the tokenizer comes from."""
        self._recipe = replace(recipe, model=replace(recipe.model, path=str(base)))
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()  # of its recipe and output
        self._end: Callable[[], object] = lambda: None
        self._starts = 0

    def __enter__(self) -> EncoderWorker:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process; its finished shards stay in the cache."""
        self._end()
        self._process, self._starts = None, 0

    def start(self) -> None:
        """Start to encode what is not in the cache, unless a worker is already running. Raises
        ``DataError`` if the process cannot be started."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        self._folder = Path(tempfile.mkdtemp(prefix="surefoot-encoder-"))
        (self._folder / RECIPE).write_text(dump(self._recipe), encoding="utf-8")
        self._process = _started(self._folder)
        self._end = weakref.finalize(self, _end, self._process, self._folder, os.getpid())
        self._starts += 1

    def wait(self) -> None:
        """Wait a little for more. Raises ``DataError`` if nothing more will come: the data is
        broken, or the process was ended repeatedly."""
        if self._process is not None and (code := self._process.poll()) is not None:
            if error := self._read(ERROR):
                raise DataError(error)
            if self._starts >= MAX_STARTS:
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
                said = "".join(f": {line}" for line in self._read(LOG).splitlines()[-1:])
                raise DataError(f"the encoder process ended {how}{said}")
        self.start()  # again, if it was killed, for want of memory say, or its work is gone
        time.sleep(POLL_SECONDS)

    def _read(self, name: str) -> str:
        """The content of a file that the process has written; empty if there is none."""
        file = self._folder / name
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _started(folder: Path) -> subprocess.Popen[bytes]:
    home, known = str(Path(surefoot.__file__).parent.parent), os.environ.get("PYTHONPATH")
    path = os.pathsep.join([home, known] if known else [home])
    with (folder / LOG).open("wb") as log:
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "surefoot.run.encoder_worker", folder / RECIPE],
                env={**os.environ, LAUNCHER: str(os.getpid()), "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the process that trains
            )
        except OSError as error:
            raise DataError(f"cannot start the encoder process: {error}") from error


def _end(process: subprocess.Popen[bytes], folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a copy of the process that has started it
        process.terminate()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def main(recipe: Path) -> int:
    """Encode all training datasets; the exit code."""
    die_with_launcher()
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # schedulers send them to all
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    try:
        loaded = load(recipe)
        encode_datasets(loaded, open_codec(loaded, resolve(loaded.model, weights=False)))
    except SurefootError as error:
        recipe.with_name(ERROR).write_text(str(error), encoding="utf-8")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
