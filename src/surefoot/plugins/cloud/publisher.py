"""``train.push_to_hub``: upload a run while it trains, and once more at its end.

``surefoot push`` in another process uploads, one upload at a time. It never stops a run: a failure
is reported, with the command that uploads afterwards.
"""

from __future__ import annotations

import logging
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from ...run.folder import RunUploads
from ...storage.child import Child
from ...storage.files import read_file
from ...training.arguments import Context
from ...training.callback import TrainerControl, TrainerState
from ...training.section import TrainSection

logger = logging.getLogger(__name__)
LOG = "push.log"  # what the process says, in the folder of the run
_SECONDS = 10.0  # for a process that is ended


@dataclass
class HubUploads(RunUploads):
    """Uploads the run in ``folder``; a context manager that leaves no process behind."""

    folder: Path
    repository: str
    is_private: bool
    is_every_save: bool
    has_checkpoints: bool
    _child: Child | None = field(default=None, init=False)
    _is_due: bool = field(default=False, init=False)
    _has_warned: bool = field(default=False, init=False)

    def __enter__(self) -> HubUploads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None and self._child.code is None:
            self._child.end()
            logger.warning("the upload to %s is not finished%s", self.repository, self._advice())

    def on_save(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """A checkpoint is committed."""
        self._is_due = self.is_every_save
        self._continue()

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """An upload may have ended in the meantime."""
        if self._child is not None:
            self._continue()

    def finish(self, *, is_complete: bool) -> None:
        """The run has ended: upload its result and wait for it, unless the run was stopped."""
        if not is_complete:
            return
        self._wait()
        logger.info("uploading to %s", self.repository)
        self._has_warned = False
        self._start()
        self._wait()
        if not self._has_warned:
            logger.info("uploaded to %s", self.repository)

    def _continue(self) -> None:
        """Report the end of an upload, and start the next one that is due."""
        if self._child is not None and self._child.code is None:
            return
        self._end_upload()
        if self._is_due:
            self._is_due = False
            self._start()

    def _wait(self) -> None:
        if self._child is not None:
            self._child.process.wait()
            self._end_upload()

    def _start(self) -> None:
        try:
            command = ["-m", "surefoot", *self._command]
            # No library of a hub in the memory of the run, and its end is
            # an exit code (decisions/0068).
            self._child = Child(command, log=self.folder / LOG, patience=_SECONDS)
            # it hashes all weights while the run trains
            os.setpriority(os.PRIO_PROCESS, self._child.process.pid, 19)
        except OSError as error:
            self._warn(str(error))

    def _end_upload(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.code != 0:
            self._warn(_last_line(self.folder / LOG))

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("not uploaded: %s%s", reason, self._advice())

    @property
    def _command(self) -> list[str]:
        """The command that uploads, here and afterwards."""
        public = [] if self.is_private else ["--public"]
        checkpoints = ["--checkpoints"] if self.has_checkpoints else []
        return ["push", str(self.folder), self.repository, *public, *checkpoints]

    def _advice(self) -> str:
        command = shlex.join(["surefoot", *self._command])
        return f". The run is not affected; to upload it afterwards: {command}"


def uploads_of(section: TrainSection) -> HubUploads:
    """The uploads that a recipe asks for."""
    assert section.push_to_hub is not None
    return HubUploads(
        folder=section.folder,
        repository=section.push_to_hub,
        is_private=section.hub_private_repo,
        is_every_save=section.hub_strategy != "end",
        has_checkpoints=section.hub_strategy == "all_checkpoints",
    )


def _last_line(path: Path) -> str:
    try:
        lines = read_file(path).decode(errors="replace").split("\n")
    except OSError as error:
        return str(error)
    last = next((line for line in reversed(lines) if line.strip()), "no reason given")
    return last.removeprefix("error:").strip()
