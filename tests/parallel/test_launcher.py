"""Processes start together, end together, and the first that fails is the one that is heard:
programs, and forks of one that has imported."""

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from surefoot.errors import OUT_OF_MEMORY, RunError
from surefoot.parallel import launcher
from surefoot.parallel.fork_server import ForkServer
from surefoot.parallel.launcher import _ProcessGroup, launch, num_processes, rerun_command
from surefoot.parallel.section import ParallelSection


def command(script):
    return [sys.executable, "-c", textwrap.dedent(script)]


FORKS = """
from surefoot.parallel.fork_server import fork_ranks
fork_ranks(lambda count: None)
"""


@pytest.fixture(params=[False, True], ids=["programs", "forks"])
def forks(request):
    return request.param


@pytest.fixture
def run_ranks(forks):
    """Runs a script in ranks: the exit code."""
    return lambda script, count, **options: launch(
        command(FORKS * forks + textwrap.dedent(script)), count, forks=forks, **options
    )


@pytest.fixture
def make_group(forks):
    """The ranks of a script, yet to be started."""
    with contextlib.ExitStack() as servers:

        def make(script, count):
            words = command(FORKS * forks + textwrap.dedent(script))
            server = ForkServer(words, os.environ, count) if forks else None
            if server:
                servers.callback(server.end)
            return _ProcessGroup(words, count, server)

        yield make


def test_every_process_is_told_who_it_is(run_ranks, tmp_path):
    script = f"""
    import os
    from pathlib import Path
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    told = " ".join(os.environ[name] for name in names)
    (Path({str(tmp_path)!r}) / os.environ["RANK"]).write_text(told)
    """
    assert run_ranks(script, 3) == 0
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [line[:4] for line in told] == [[str(r), str(r), "3", "127.0.0.1"] for r in range(3)]


def test_a_file_of_the_current_folder_is_no_module_of_the_ranks(tmp_path, monkeypatch):
    for name in ("random", "token", "rich", "tokenizers", "click"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert launch(rerun_command(["recipe", "--help"]), 2) == 0


def test_the_first_failure_ends_the_others_and_is_the_exit_code(run_ranks):
    script = """
    import os, sys, time
    if os.environ["RANK"] == "1":
        sys.exit(7)
    time.sleep(60)
    """
    began = time.monotonic()
    assert run_ranks(script, 3) == 7
    assert time.monotonic() - began < 30


def test_a_killed_process_ends_the_others(run_ranks):
    script = """
    import os, signal, time
    if os.environ["RANK"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    """
    assert run_ranks(script, 3) == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("os.kill(os.getpid(), 9)", r"rank 1 was killed by SIGKILL .*memory.* same command"),
        ("os.kill(os.getpid(), 11)", r"rank 1 was killed by SIGSEGV .*same command to resume"),
        ("sys.exit(1)", "rank 1 ended with exit code 1; its own message says why"),
        ("sys.exit(2)", "^$"),  # an error of the user's, which it has explained
        ("sys.exit(40)", "^$"),  # a hang, which its watchdog has explained
    ],
)
def test_the_rank_that_failed_is_named(run_ranks, ending, said, caplog):
    script = f"""
    import os, sys, time
    if os.environ["RANK"] == "1":
        {ending}
    time.sleep(60)
    """
    run_ranks(script, 2)
    assert re.search(said, "".join(record.message for record in caplog.records))


def test_ranks_that_leave_steps_out_have_not_failed(make_group, run_ranks):
    """They end one after another; the others must not be killed meanwhile."""
    script = """
    import os, sys, time
    time.sleep(0.3 * int(os.environ["RANK"]))
    sys.exit(3)
    """
    gang = make_group(script, 2)
    gang.start()
    assert gang.watch() == 3
    assert [process.returncode for process in gang.processes] == [3, 3]
    assert run_ranks(script, 2, max_restarts=2) == 3


def test_ranks_that_have_stopped_by_themselves_have_not_failed(make_group, run_ranks, monkeypatch):
    """One of them got a signal, a callback has requested a stop, or `surefoot stop` has."""
    monkeypatch.setattr(launcher, "_GRACE", 0.0)
    script = """
    import os, sys, time
    time.sleep(0.5 - 0.5 * int(os.environ["RANK"]))
    sys.exit(130)
    """
    gang = make_group(script, 2)
    assert gang.run() == 130
    assert [process.returncode for process in gang.processes] == [130, 130]
    assert gang.was_stopped
    assert run_ranks(script, 2, max_restarts=2) == 130


def test_of_two_failures_at_once_the_one_that_was_killed_is_told(make_group):
    """The other one may have ended before anybody looked: its connection was closed."""
    script = """
    import os, signal, sys
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(1)
    """
    gang = make_group(script, 2)
    gang.start()
    for process in gang.processes:
        process.wait()
    assert gang.watch() == 128 + signal.SIGKILL


def test_a_dead_gang_is_started_again_as_often_as_allowed(run_ranks, tmp_path):
    script = f"""
    import os, sys
    from pathlib import Path
    count = Path({str(tmp_path)!r}) / f"{{os.environ['RANK']}}"
    tries = int(count.read_text()) if count.exists() else 0
    count.write_text(str(tries + 1))
    sys.exit(1 if tries < 2 else 0)
    """
    assert run_ranks(script, 1, max_restarts=1) == 1
    assert run_ranks(script, 1, max_restarts=1) == 0
    assert (tmp_path / "0").read_text() == "3"


def test_an_error_of_the_user_is_not_tried_again(run_ranks, tmp_path):
    script = f"""
    import os, sys
    with open({str(tmp_path / "tries")!r}, "a") as file:
        file.write("x")
    sys.exit(2)
    """
    assert run_ranks(script, 1, max_restarts=5) == 2
    assert (tmp_path / "tries").read_text() == "x"


STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
STOPS += [signal.SIGUSR2, signal.SIGXCPU]


@pytest.fixture
def _hears_interrupts():
    """A shell lets what it starts in the background ignore them, and nohup the hangup."""
    before = [
        (signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler)),
        (signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_DFL)),
    ]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.usefixtures("_hears_interrupts")
@pytest.mark.parametrize("number", STOPS)
def test_a_signal_reaches_every_process_once_and_their_code_is_the_answer(
    run_ranks, tmp_path, number
):
    script = f"""
    import os, signal, sys, time
    from pathlib import Path
    def stop(number, frame):
        with open(Path({str(tmp_path)!r}) / os.environ["RANK"], "a") as file:
            file.write(f"{{number}} ")
        sys.exit(128 + number)
    for number in {[*map(int, STOPS)]}:
        signal.signal(number, stop)
    Path({str(tmp_path)!r}, "ready" + os.environ["RANK"]).touch()
    time.sleep(60)
    """

    def press():
        while len(list(tmp_path.glob("ready*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=press).start()
    assert run_ranks(script, 2, max_restarts=3) == 128 + number
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [f"{number} "] * 2


def test_a_signal_while_ranks_are_started_stops_them_all(tmp_path, monkeypatch):
    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            if options["env"]["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    assert launch(command("import time; time.sleep(60)"), 2) == 128 + signal.SIGTERM


def test_a_rank_that_has_stopped_leaves_the_others_their_time(run_ranks, tmp_path, monkeypatch):
    """Rank 0 may upload for minutes after the others have ended."""
    monkeypatch.setattr(launcher, "_GRACE", 0.1)
    script = f"""
    import os, signal, sys, time
    from pathlib import Path
    def stop(number, frame):
        if os.environ["RANK"] == "0":
            time.sleep(1.5)
            Path({str(tmp_path)!r}, "uploaded").touch()
        sys.exit(128 + number)
    signal.signal(signal.SIGTERM, stop)
    Path({str(tmp_path)!r}, "ready" + os.environ["RANK"]).touch()
    time.sleep(60)
    """

    def press():
        while len(list(tmp_path.glob("ready*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=press).start()
    assert run_ranks(script, 2) == 128 + signal.SIGTERM
    assert (tmp_path / "uploaded").exists()


def test_ranks_that_cannot_be_started_are_no_traceback_and_none_stays(monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            if started:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(RunError, match=r"rank 1 of 2 .*: Resource temporarily unavailable"):
        launch(command("import time; time.sleep(60)"), 2)
    assert started[0].returncode == -signal.SIGKILL


def test_a_machine_without_its_loopback_is_named_before_a_rank_waits_for_it(monkeypatch):
    def unreachable(*_args, **_options):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(launcher.socket, "create_connection", unreachable)
    with pytest.raises(RunError, match=r"Network is unreachable.*ip link set lo up"):
        launch([sys.executable, "-c", "pass"], 2)


def test_processes_of_another_launcher_are_taken_as_they_are(monkeypatch):
    section = ParallelSection(num_processes=4)
    assert num_processes(section) == 4
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert num_processes(section) == 1


def test_axes_that_need_more_processes_start_them():
    assert num_processes(ParallelSection(dp_replicate=2, dp_shard=3)) == 6
    assert num_processes(ParallelSection(pp=2, tp=2)) == 4
    assert num_processes(ParallelSection()) == 1


def test_a_launcher_that_is_killed_leaves_no_process_behind(tmp_path):
    script = f"""
    import os, sys, time
    from pathlib import Path
    from surefoot.parallel.world import die_with_launcher
    die_with_launcher()
    Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(60)
    """
    starter = f"from surefoot.parallel.launcher import launch; launch({command(script)!r}, 2)"
    process = subprocess.Popen([sys.executable, "-c", starter])
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.02)
    process.kill()
    process.wait()
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().split()[2] != "Z"


def test_ranks_that_have_lowered_their_batches_start_again_without_counting(run_ranks, tmp_path):
    script = f"""
    import os, sys
    from pathlib import Path
    launches = Path({str(tmp_path)!r})
    (launches / f"{{os.environ['RANK']}}-{{os.getpid()}}").touch()
    is_short = os.environ["RANK"] == "1" and len([*launches.glob("1-*")]) < 3
    sys.exit({OUT_OF_MEMORY} if is_short else 0)
    """
    assert run_ranks(script, 2) == 0
    assert len([*tmp_path.glob("1-*")]) == 3
