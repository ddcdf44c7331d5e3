"""Commands that start at once: forked from a process that has done nothing but import.

``python -m surefoot train`` imports for five to ten seconds of a core, and so does every rank that
it starts. Here one process for all tests imports once; what is forked from it is a process of its
own, with the arguments, environment, folder, pipes and signals it was given. The ranks that
it starts are forked from it in turn.

``Popen`` and ``run`` are those of ``subprocess``, but for the parent, which is that process. What
they cannot show is a start itself: tests of that use ``subprocess``.
"""

import atexit
import multiprocessing
import os
from functools import partial
from multiprocessing import reduction

import forks
from surefoot.checkpoint.saving import _writer_process as writer_process
from surefoot.parallel import fork_server, launcher
from surefoot.training.callbacks import launches as training_process

IMPORTED = ["surefoot.run.training_run", "surefoot.use", "torch.distributed.checkpoint"]
IMPORTED += ["surefoot.plugins.cloud.mirror", "s3fs", "first_time"]
# What a run of a tiny model imports on its way, the plot of its losses at the end above all
IMPORTED += ["surefoot.cli.main", "surefoot.cli.train", "pydantic.dataclasses"]
IMPORTED += ["matplotlib.figure", "matplotlib.backends.backend_agg"]
IMPORTED += ["transformers.models.llama.modeling_llama", "transformers.generation.utils"]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(IMPORTED)


class Popen(forks.Popen):
    """A child of the process that has imported."""

    def _begin(self, theirs, *birth):
        assert not birth[2], "other descriptors would have to be sent"
        theirs = {number: _Passed(descriptor) for number, descriptor in theirs.items()}
        self._process = SERVER.Process(target=_live, args=(theirs, *birth[:-1]))
        self._process.start()
        self.pid = self._process.pid

    def _ended(self, how):
        self._process.join(0 if how == os.WNOHANG else None)
        self.returncode = self._process.exitcode
        return self.returncode


run = partial(forks.run, popen=Popen)


class _Passed:
    """A file descriptor, the same file in the child."""

    def __init__(self, descriptor):
        self.descriptor = descriptor

    def __reduce__(self):
        return _received, (reduction.DupFd(self.descriptor),)


def _received(passed):
    return passed.detach()


def _live(theirs, *birth):
    raise SystemExit(forks.become(theirs, *birth, _with_forks))


def _with_forks(command):
    """Let the ranks, the trials and the writers that this process starts be forked, too."""
    forks.put(launcher)
    forks.put(fork_server)
    forks.put(writer_process)
    forks.put(training_process, _with_forks)


@atexit.register
def _end():
    """Kill what a failed test has left; multiprocessing would wait for it."""
    for process in multiprocessing.active_children():
        process.kill()
