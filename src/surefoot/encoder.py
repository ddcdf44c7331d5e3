"""The process that encodes while another one trains: ``python -m surefoot.encoder RECIPE``.

It goes ahead as fast as it can, with what processors leave; what it finishes lies in the cache, so
that it may be ended at any time. It ends with the process that has started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import replace
from pathlib import Path

import surefoot

from .encoding import codec_of, encode_all
from .errors import DataError, SurefootError
from .model.load import resolve
from .parallel.world import LAUNCHER, die_with_launcher
from .recipe.recipe import Recipe, dump, load

POLL_SECONDS = 0.05
MAX_STARTS = 3
NICE = 10
LOG, ERROR = "log", "error"  # beside the recipe: all that it said, and what the user can mend


class Beside:
    """Encodes the datasets of a recipe in a process of its own."""

    def __init__(self, recipe: Recipe, base: Path) -> None:
        """``base`` is the folder of the model that the tokenizer comes from."""
        recipe = replace(recipe, model=replace(recipe.model, path=str(base)))
        self._folder = tempfile.TemporaryDirectory(prefix="surefoot-encoder-")
        (self._path / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process; what it has finished stays in the cache."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process, self._starts = None, 0

    def start(self) -> None:
        """Start to encode what is not in the cache, unless that goes on already.

        Raises ``DataError`` if the process cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        home, known = str(Path(surefoot.__file__).parent.parent), os.environ.get("PYTHONPATH")
        with (self._path / LOG).open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "surefoot.encoder", self._path / "recipe.yaml"],
                    env={
                        **os.environ,
                        LAUNCHER: str(os.getpid()),
                        "PYTHONPATH": os.pathsep.join([home, known] if known else [home]),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the process that trains
                )
            except OSError as error:
                raise DataError(f"cannot start the process that encodes: {error}") from error
        self._starts += 1
        weakref.finalize(self, self._process.terminate)

    def wait(self) -> None:
        """Wait a little for more.

        Raises ``DataError`` if nothing more will come: the data is broken, or the process was ended
        again and again.
        """
        if self._process is None:
            self.start()
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            time.sleep(POLL_SECONDS)
            return
        if (self._path / ERROR).exists():
            raise DataError((self._path / ERROR).read_text(encoding="utf-8"))
        if self._starts >= MAX_STARTS:
            said = (self._path / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            last = f": {said[-1]}" if said else ""
            raise DataError(f"the process that encodes the data has ended {how}{last}")
        self.start()  # killed, perhaps for want of memory; or what was encoded is gone

    @property
    def _path(self) -> Path:
        return Path(self._folder.name)


def main(recipe: Path) -> int:
    """Encode all training datasets; the exit code."""
    die_with_launcher()
    os.nice(NICE)
    try:
        loaded = load(recipe)
        for _ in encode_all(loaded, codec_of(loaded, resolve(loaded.model, weights=False))):
            pass
    except SurefootError as error:
        recipe.with_name(ERROR).write_text(str(error), encoding="utf-8")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
