"""Every usual way to end a process lets a run save first, and is not mistaken for insistence."""

import os
import pty
import signal
import time

import pytest

from surefoot.training.control import INSISTENT, StopSignal

STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
STOPS += [signal.SIGUSR2, signal.SIGXCPU]


@pytest.fixture(autouse=True)
def _heard():
    """A closed terminal is a signal here, even if nohup has started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def in_fork(work):
    """The exit code of ``work`` in a forked process; -N if signal N killed it."""
    if (child := os.fork()) == 0:
        os._exit(work() or 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def send(*numbers):
    with StopSignal() as stop:
        for number in numbers:
            os.kill(os.getpid(), number)
    return stop.received


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_is_a_request(number):
    assert send(number) == number


@pytest.mark.parametrize(
    "later",
    [
        (signal.SIGHUP, signal.SIGHUP),  # of the kernel and of the shell
        (signal.SIGUSR1, signal.SIGTERM),  # of SLURM, before the limit and at it
        (signal.SIGHUP, signal.SIGTERM),  # of systemd
        (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1),
        (signal.SIGXCPU, signal.SIGXCPU, signal.SIGTERM),  # each second, until the hard limit
        (signal.SIGUSR1, signal.SIGUSR2),  # of Grid Engine
    ],
)
def test_what_follows_by_itself_does_not_end_the_run_at_once(later):
    assert send(*later) == later[0]


@pytest.mark.parametrize("number", INSISTENT)
@pytest.mark.parametrize("first", STOPS)
def test_the_second_signal_that_insists_does(first, number):
    numbers = [first, number, number][: 3 if first not in INSISTENT else 2]
    assert in_fork(lambda: send(*numbers)) == -number


def test_under_nohup_a_closed_terminal_is_nothing():
    def work():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return send(signal.SIGHUP) is not None

    assert in_fork(work) == 0


def test_a_run_whose_terminal_is_closed_can_still_write():
    """What it prints afterwards would be an error, and end it before it has saved."""
    child, terminal = pty.fork()
    if child == 0:
        with StopSignal() as stop:
            os.write(1, b"ready")
            while stop.received is None:
                time.sleep(0.01)
            try:
                os.write(1, b"to nobody")
                os.write(2, b"to nobody")
            except OSError:
                os._exit(1)
        os._exit(7 if stop.received == signal.SIGHUP else 2)
    os.read(terminal, 5)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
