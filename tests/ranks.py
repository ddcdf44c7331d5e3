"""Some gloo ranks for the length of a call: forked, so that nothing is imported twice.

``run(4, work, tp=2)`` calls ``work(world)`` in four processes and returns what it returned in each.
The first real error is raised here, with its traceback; a hang is one after ``timeout``.
"""

import os
import pickle
import select
import signal
import socket
import tempfile
import time
import traceback
from pathlib import Path

import torch

from surefoot.parallel.section import ParallelSection
from surefoot.parallel.world import ALONE, joined


def run(count, work, *, timeout=60, **parallel):
    """What ``work(world)`` returned in each of ``count`` ranks, in their order."""
    section = ParallelSection(num_processes=count, **parallel)
    if count == 1:
        return [work(ALONE)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        pids = [_fork(rank, count, port, Path(folder), section, work) for rank in range(count)]
        _wait(pids, timeout)
        found = [_outcome(Path(folder) / str(rank), rank) for rank in range(count)]
    failures = sorted((when, text) for ok, when, text in found if not ok)
    if failures:
        raise AssertionError(failures[0][1])
    return [value for _, _, value in found]


def _fork(rank, count, port, folder, section, work):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        try:
            with joined(section) as world:
                result = (True, 0.0, work(world))
                world.wait()
        except BaseException:
            result = (False, time.monotonic(), f"rank {rank}:\n{traceback.format_exc()}")
        (folder / str(rank)).write_bytes(pickle.dumps(result))
        code = 0 if result[0] else 1
    finally:
        os._exit(code)


def _wait(pids, timeout):
    """Until all have ended; after a failure or a hang the others are killed, waiting in vain."""
    handles = {os.pidfd_open(pid): pid for pid in pids}
    deadline = time.monotonic() + timeout
    try:
        while handles:
            ready, _, _ = select.select(handles, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                for pid in handles.values():
                    os.kill(pid, signal.SIGKILL)
                ready = list(handles)
            for handle in ready:
                if os.waitpid(handles.pop(handle), 0)[1]:
                    deadline = min(deadline, time.monotonic() + 1.0)
                os.close(handle)
    finally:
        for handle in handles:
            os.close(handle)


def _outcome(path, rank):
    if not path.exists():
        return False, float("inf"), f"rank {rank} hung or died"
    return pickle.loads(path.read_bytes())


torch.set_num_threads(1)
