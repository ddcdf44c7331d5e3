"""The watchdog of a run, as one rank sees it: what is set up before the first step, so that a hang
can be explained and ended from outside.

Called once, when the process group is there. docs/decisions/0083 says why it is no thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import HUNG
from ..log import fell_back
from ..storage.child import Child
from . import _watchdog
from ._watchdog import DUMP, SIZE
from .progress import Progress
from .section import ParallelSection
from .world import World, be_patient

logger = logging.getLogger(__name__)
_PROGRAM = Path(_watchdog.__file__)
_LEAST_MINUTES = 15.0  # after which a writer process that writes nothing is replaced


@contextlib.contextmanager
def watched(world: World, section: ParallelSection, folder: Path) -> Iterator[World]:
    """``world`` with marks of progress, which a process of its own watches during the block: a rank
    that makes none for ``parallel.timeout`` is reported, also in ``folder``, and ends the run with
    the code ``HUNG``. A collective call. Elsewhere than on Linux, nothing is watched."""
    if world.is_main and section.timeout != "auto" and section.timeout < _LEAST_MINUTES:
        logger.warning(
            "parallel.timeout: %g minutes also limit starts, evaluations and saves, and a save may "
            "wait %g minutes for a slow disk: a sound run is then ended; set %g or more, or auto",
            *(section.timeout, _LEAST_MINUTES, _LEAST_MINUTES),
        )
    if sys.platform != "linux":
        yield replace(world, progress=Progress())
        return
    with contextlib.ExitStack() as stack:
        memory = os.memfd_create("surefoot-progress")
        stack.callback(os.close, memory)
        os.ftruncate(memory, SIZE)
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)  # stacks go behind the marks
        stack.enter_context(_answering(memory))
        child = _start(world, section, folder, memory)
        if child is not None:
            stack.callback(child.end)
        if world.size > 1:  # collectives fail no more by themselves before the cause is known
            world = be_patient(world)
        yield replace(world, progress=Progress(memory))


@contextlib.contextmanager
def _answering(memory: int) -> Iterator[None]:
    """A block in which two signals are answered without the interpreter, which may hang: one writes
    the stacks of all threads to ``memory``, the other ends the process."""
    faulthandler.register(DUMP, memory, all_threads=True, chain=False)
    # C calls a handler with the number of the signal, which so is the exit code of _exit.
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal(HUNG, ctypes.cast(library._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        library.signal(HUNG, None)
        faulthandler.unregister(DUMP)


def _start(world: World, section: ParallelSection, folder: Path, memory: int) -> Child | None:
    """The watchdog's process; None if it cannot be started. A collective call."""
    order: dict[str, Any] = {
        "pid": os.getpid(),
        "exit": HUNG,
        "thread": threading.get_native_id(),
        "ident": f"0x{threading.get_ident():016x}",
        "memory": f"/proc/{os.getpid()}/fd/{memory}",
        "rank": world.rank,
        "size": world.size,
        "minutes": None if section.timeout == "auto" else section.timeout,
        "folder": str(folder.absolute()),
        "token": secrets.token_hex(16),
        "listen": None,
        "judge": None,
        "flight_recorder": os.environ.get("TORCH_FR_DUMP_TEMP_FILE", ""),
        "flight_pipe": os.environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", ""),
    }
    hosts = world.gathered(socket.gethostname())
    is_local = len(set(hosts)) == 1
    child = None
    if world.is_main:
        order["listen"] = None if world.size == 1 else "127.0.0.1" if is_local else ""
        child = _started(order)
        judge = None
        if child is not None and world.size > 1:
            with contextlib.suppress(EOFError):
                if (answer := child.answer(30.0)) is not None:
                    judge = ["127.0.0.1" if is_local else _address(), answer["port"]]
                    child.send({"hosts": hosts})
        world.from_main((judge, order["token"]))
        return child
    judge, token = world.from_main(None)
    return _started({**order, "judge": judge, "token": token})


def _address() -> str:
    """Where the other machines find this one, which is that of rank 0."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _started(order: dict[str, Any]) -> Child | None:
    try:
        child = Child([str(_PROGRAM)], talks=True, patience=0)
    except OSError as error:
        why = f"it could not be started: {error}"
        fell_back(f"rank {order['rank']} has no watchdog", why, "means that a hang is not noticed")
        return None
    child.send(order)
    return child
