"""Start `surefoot train` as a process of its own, as the board and sweeps do. No torch.

It has a session of its own, so that it survives who has started it, and Ctrl-C there.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import RunError
from ...storage.files import open_log
from .launches import LaunchFiles

LOG = "train.log"  # its output, in the folder of the run
PYTHON = (sys.executable, "-P", "-m", "surefoot")


def shown(arguments: Sequence[str]) -> str:
    """A command as one types it."""
    return f"surefoot {shlex.join(arguments)}"


def start_training(
    folder: Path,
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``surefoot`` with ``arguments``, which trains in ``folder``. It gets this process's
    environment and ``environment``. Raises ``RunError``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_log(folder / LOG) as log:
            log.write(f"$ {shown(arguments)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [*PYTHON, *arguments],
                cwd=cwd,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise RunError(f"{folder}: cannot start training: {error.strerror}") from None
    LaunchFiles(folder).announce(process.pid)
    return process
