"""Ranks are forks of one process that has imported, and as if each had been started by itself."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from project import Project, assert_same, final_weights, losses, start, surefoot
from surefoot.errors import RunError
from surefoot.parallel.launcher import launch

FORKS = "from surefoot.parallel.fork_server import VARIABLE, fork_ranks\n"
SERVES = """
import os
if VARIABLE in os.environ:
    fork_ranks(prepare)
else:
    prepare(0)
"""


def served(script, before="pass"):
    """The command of ranks that run ``script``, once for all after what is ``before``."""
    prepare = "def prepare(count):\n" + textwrap.indent(textwrap.dedent(before), "    ")
    parts = [FORKS, prepare, SERVES, textwrap.dedent(script)]
    return [sys.executable, "-c", "\n".join(parts)]


def children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(what, seconds=30):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


def test_what_is_before_the_fork_is_done_once_for_all_ranks_and_restarts(tmp_path, capfd):
    before = f"""
    with open({str(tmp_path / "imported")!r}, "a") as file:
        file.write("x\\n")
    print("imported")
    """
    script = f"""
    with open({str(tmp_path / "began")!r}, "a") as file:
        file.write(f"{{os.environ['RANK']}}\\n")
    raise SystemExit(1 if len(open(file.name).read().split()) <= 3 else 0)
    """
    assert launch(served(script, before), 3, max_restarts=1, forks=True) in (0, 1)
    assert lines_of(tmp_path / "imported") == ["x"]
    assert set(lines_of(tmp_path / "began")) == {"0", "1", "2"}
    assert len(lines_of(tmp_path / "began")) > 3
    assert capfd.readouterr().out == "imported\n", "what was buffered is written by each fork"


def test_the_time_of_the_imports_is_part_of_the_time_to_start(tmp_path):
    script = f"""
    import subprocess, sys, time
    from surefoot.training.callbacks.launches import process_began
    if os.environ["RANK"] == "0":
        program = "from surefoot.training.callbacks.launches import *; import time; "
        program += "print(time.time() - process_began())"
        own = time.time() - process_began()
        child = subprocess.run([sys.executable, "-c", program], capture_output=True).stdout
        open({str(tmp_path / "seconds")!r}, "w").write(f"{{own}} {{child.decode()}}")
    """
    began = time.monotonic()
    assert launch(served(script, "import time\ntime.sleep(2)"), 2, forks=True) == 0
    own, child = map(float, (tmp_path / "seconds").read_text().split())
    assert 2 < own < time.monotonic() - began
    assert child < own, "it is a process of its own"


FACTS = """
import faulthandler, gc, json, random, signal, sys, threading
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
unlike = {"RANK", "LOCAL_RANK", "MASTER_PORT", "SUREFOOT_LAUNCHER", "SUREFOOT_BEGAN"}
facts = {
    "environment": {k: v for k, v in os.environ.items() if k not in unlike},
    "rank": [os.environ[name] for name in ("RANK", "LOCAL_RANK")],
    "names": sorted(set(os.environ) - {"SUREFOOT_BEGAN"}),
    "launcher": os.environ["SUREFOOT_LAUNCHER"] == str(os.getppid()),
    "leads a session": os.getsid(0) == os.getpid() == os.getpgid(0),
    "arguments": [sys.argv, sys.flags.safe_path],
    "signals": {n: repr(signal.getsignal(n)) for n in signal.valid_signals()},
    "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "folder": os.getcwd(),
    "files": {n: os.readlink(f"/proc/self/fd/{n}") for n in range(3)},
    "threads": len(os.listdir("/proc/self/task")),
    "nice": stat[16],
    "collects": gc.isenabled(),
    "faults": faulthandler.is_enabled(),
    "main": __name__,
}
with open(os.path.join(PLACE, os.environ["RANK"] + ".json"), "w") as file:
    json.dump(facts, file)
with open(os.path.join(PLACE, "drawn"), "a") as file:
    import numpy
    file.write(f"{random.random()} {numpy.random.random()}\\n")
"""


@pytest.mark.parametrize("ignored", [None, signal.SIGHUP])  # the latter as by nohup
def test_a_fork_is_as_a_program_that_was_started(ignored, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGHUP)
    if ignored:
        signal.signal(ignored, signal.SIG_IGN)
    facts = {}
    try:
        for forks in (False, True):
            place = tmp_path / str(forks)
            place.mkdir()
            monkeypatch.setenv("PLACE", str(place))
            script = FACTS.replace("PLACE", "os.environ['PLACE']")
            assert launch(served(script, "import numpy"), 2, forks=forks) == 0
            facts[forks] = [json.loads((place / f"{rank}.json").read_text()) for rank in (0, 1)]
            for rank in facts[forks]:
                assert rank["environment"].pop("PLACE") == str(place)
            numbers = (place / "drawn").read_text().split()
            assert len(set(numbers)) == len(numbers) == 4, "two ranks draw the same numbers"
    finally:
        signal.signal(signal.SIGHUP, before)
    assert facts[True] == facts[False]
    assert facts[True][0]["launcher"]


def test_a_rank_reads_standard_input_and_holds_one_descriptor_more(tmp_path):
    script = """
    import sys
    descriptors = len(os.listdir("/proc/self/fd"))
    print(os.environ["RANK"], descriptors, sys.stdin.readline(), flush=True)
    """
    starter = "from surefoot.parallel.launcher import launch; import sys; "
    starter += f"sys.exit(launch({served(script)!r}, 1, forks=FORKS))"
    said = [
        subprocess.run(
            [sys.executable, "-c", starter.replace("FORKS", str(forks))],
            input="a line\n",
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for forks in (False, True)
    ]
    # By which the launcher knows that no rank is left, if the fork server was killed.
    assert said[1] == ["0", str(int(said[0][1]) + 1), "a", "line"]


SLEEPER = """
import signal, sys, time
from surefoot.storage.child import die_with_launcher
def stop(number, frame):
    open(os.path.join(PLACE, f"saved-{os.environ['RANK']}-{number}"), "w").close()
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
die_with_launcher()
open(os.path.join(PLACE, f"pid-{os.getpid()}-{os.getppid()}"), "w").close()
time.sleep(DURATION)
"""


def sleepers(place, seconds=60.0):
    return SLEEPER.replace("PLACE", repr(str(place))).replace("DURATION", str(seconds))


def pids(place):
    """Of the ranks, and of the processes of which they are children."""
    found = [path.name.split("-")[1:] for path in place.glob("pid-*")]
    return {int(rank) for rank, _ in found}, {int(parent) for _, parent in found}


@pytest.mark.parametrize("restarts", [0, 1])
def test_ranks_save_and_start_again_if_their_fork_server_is_killed(restarts, tmp_path, caplog):
    script = f"""
    first = not [*__import__("pathlib").Path({str(tmp_path)!r}).glob("saved-*")]
    """
    script = textwrap.dedent(script) + sleepers(tmp_path).replace("60.0", "60.0 if first else 0.1")

    def kill():
        wait_until(lambda: len(pids(tmp_path)[0]) == 2)
        (server,) = pids(tmp_path)[1]
        os.kill(server, signal.SIGKILL)

    threading.Thread(target=kill).start()
    code = launch(served(script), 2, max_restarts=restarts, forks=True)
    assert code == (0 if restarts else 128 + signal.SIGKILL)
    saved = {path.name for path in tmp_path.glob("saved-*")}
    assert saved == {"saved-0-15", "saved-1-15"}
    assert "the process that forks the ranks was killed by SIGKILL" in caplog.text
    assert "so all ranks are ended" in caplog.text
    ranks, servers = pids(tmp_path)
    assert len(servers) == 1 + restarts
    assert not any(map(is_alive, ranks | servers))


def test_ranks_that_do_not_end_with_their_fork_server_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.parallel.launcher._GRACE", 0.2)
    script = sleepers(tmp_path).replace("stop)", "signal.SIG_IGN)")

    def kill():
        wait_until(lambda: len(pids(tmp_path)[0]) == 2)
        os.kill(*pids(tmp_path)[1], signal.SIGKILL)

    threading.Thread(target=kill).start()
    assert launch(served(script), 2, forks=True) == 128 + signal.SIGKILL
    wait_until(lambda: not any(map(is_alive, pids(tmp_path)[0])), 5)


def started(script, before="pass", count=2):
    """A launcher in a process of its own."""
    starter = "from surefoot.parallel.launcher import launch; import sys; "
    starter += f"sys.exit(launch({served(script, before)!r}, {count}, 1, forks=True))"
    return subprocess.Popen([sys.executable, "-c", starter])


def test_a_launcher_that_is_killed_takes_its_fork_server_with_it_and_ranks_save(tmp_path):
    process = started(sleepers(tmp_path))
    wait_until(lambda: len(pids(tmp_path)[0]) == 2)
    process.kill()
    process.wait()
    ranks, servers = pids(tmp_path)
    wait_until(lambda: not any(map(is_alive, ranks | servers)), 20)
    assert len([*tmp_path.glob("saved-*-15")]) == 2


def test_a_launcher_that_is_killed_amid_the_imports_leaves_nothing(tmp_path):
    process = started(
        "", f"open({str(tmp_path / 'pid')!r}, 'w').close()\n__import__('time').sleep(60)"
    )
    wait_until((tmp_path / "pid").exists)
    (server,) = children(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: not is_alive(server), 20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_amid_the_imports_ends_the_run_at_once(number, tmp_path):
    process = started(
        "", f"open({str(tmp_path / 'pid')!r}, 'w').close()\n__import__('time').sleep(60)"
    )
    wait_until((tmp_path / "pid").exists)
    (server,) = children(process.pid)
    os.kill(process.pid, number)
    assert process.wait(10) == 128 + number
    assert not is_alive(server)


def test_a_fork_server_that_fails_before_the_fork_fails_as_a_rank(tmp_path, caplog):
    before = f"open({str(tmp_path / 'tries')!r}, 'a').write('x')\nraise SystemExit(CODE)"
    for code, tries in ((2, 1), (1, 2)):
        (tmp_path / "tries").write_text("")
        words = served("", before.replace("CODE", str(code)))
        assert launch(words, 2, max_restarts=1, forks=True) == code
        assert (tmp_path / "tries").read_text() == "x" * tries
    kill = served("", "import os; os.kill(os.getpid(), 11)")
    assert launch(kill, 2, forks=True) == 128 + signal.SIGSEGV
    assert "the process that forks the ranks was killed by SIGSEGV" in caplog.text


THREADS = """
import threading, time
threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
"""
CUDA = """
import sys, types
cuda = types.SimpleNamespace(_is_in_bad_fork=lambda: True)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
"""


@pytest.mark.parametrize(
    ("before", "reason"), [(THREADS, "has started threads"), (CUDA, "has initialized CUDA")]
)
def test_what_no_fork_survives_makes_programs_of_the_ranks(before, reason, tmp_path, caplog):
    script = f"""
    open(os.path.join({str(tmp_path)!r}, f"{{os.getpid()}}-{{os.getppid()}}"), "w").close()
    raise SystemExit(1)
    """
    assert launch(served(script, before), 2, max_restarts=1, forks=True) == 1
    assert {path.name.split("-")[1] for path in tmp_path.iterdir()} == {str(os.getpid())}
    assert caplog.text.count("each rank imports for itself, which takes some seconds") == 1
    assert f"an imported module {reason}" in caplog.text


def test_a_fork_that_the_system_refuses_is_an_error_and_no_rank_stays(tmp_path):
    before = """
    import os
    forks, real = [], os.fork
    def fork():
        if len(forks) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        forks.append(real())
        return forks[-1]
    os.fork = fork
    """
    with pytest.raises(RunError, match=r"rank 1 of 2 .*: Resource temporarily unavailable"):
        launch(served(sleepers(tmp_path), before), 2, forks=True)
    assert not any(map(is_alive, pids(tmp_path)[0]))


IMPORTS = """
import torch
def spy(name):
    real = getattr(torch.cuda, name)
    def asked(*args, **options):
        print("CUDA is asked:", name)
        return real(*args, **options)
    setattr(torch.cuda, name, asked)
for name in ("is_available", "device_count", "_lazy_init", "current_device"):
    spy(name)
import importlib
for name in NAMES:
    importlib.import_module(name)
from surefoot.parallel.fork_server import _why_not
print("because:", _why_not())
print("threads:", torch.get_num_threads())
"""


def test_what_ranks_import_starts_no_thread_that_a_fork_would_lose_and_asks_no_gpu():
    """OpenBLAS starts threads with numpy, and ends them before a fork."""
    source = Path(sys.modules["surefoot"].__file__).parent / "cli"
    texts = "".join(path.read_text() for path in source.glob("*.py"))
    names = {*re.findall(r'"(surefoot\.(?:run|use)\.\w+)"', texts), "peft"}
    assert len(names) > 3
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.replace("NAMES", repr(sorted(names)))],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.stdout == "because: \nthreads: 2\n", done.stdout + done.stderr


BITS = """
import hashlib, torch
torch.manual_seed(1)
a, b = (torch.randn(700, 500, requires_grad=True) for _ in range(2))
c = torch.nn.functional.softmax(a @ b.T, -1).log().sum() + torch.linalg.svdvals(a.double()).sum()
c.backward()
tensors = (c.detach(), a.grad, b.grad, torch.fft.rfft(a.detach()).abs())
text = " ".join(hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in tensors)
uses = len(os.listdir("/proc/self/task")) >= torch.get_num_threads()
print(torch.get_num_threads(), uses, text, flush=True)
"""


@pytest.mark.parametrize("threads", [pytest.param("1", marks=pytest.mark.proof), "2"])
def test_a_fork_computes_the_bits_of_a_program_in_as_many_threads(threads, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    said = []
    for forks in (False, True):
        assert launch(served(BITS, "import torch"), 1, forks=forks) == 0
        said.append(capfd.readouterr().out)
    assert said[0] == said[1]
    assert said[0].split()[:2] == [threads, "True"]


COUNTER = """
import os, sys
class Counter:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            with open(os.environ["COUNTED"], "a") as file:
                file.write(f"{os.environ.get('RANK', 'none')}\\n")
sys.meta_path.insert(0, Counter())
"""


def test_a_run_imports_torch_once_and_ends_in_the_same_bits_when_a_rank_is_killed(
    tmp_path, monkeypatch
):
    steps = {"max_steps": 40, "micro_batch_size": 2}
    words = ["parallel.num_processes=2", "parallel.max_restarts=1"]
    whole, killed = (
        Project(tmp_path / name, train=steps, checkpoint={"save_steps": 2}) for name in "ab"
    )
    assert surefoot("train", whole.recipe, *words)[0] == 0
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(COUNTER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("COUNTED", str(tmp_path / "counted"))
    process = start("train", killed.recipe, *words, popen=subprocess.Popen)  # as a user does
    wait_until(lambda: len(lines_of(killed.run / "metrics.jsonl")) > 3, 120)
    (server,) = children(process.pid)
    os.kill(children(server)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "restarting all ranks (restart 1 of 1)" in err
    assert lines_of(tmp_path / "counted") == ["none"], "torch is imported once, and by no rank"
    assert losses(killed.run) == losses(whole.run)
    assert_same(final_weights(killed.run), final_weights(whole.run))
