"""Twenty ways in which a run hangs: each is named within the deadline, with the rank that is to
blame; and what only takes long is not ended."""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import surefoot
from project import Project, checkpoints, metrics
from surefoot.errors import HUNG
from surefoot.parallel._watchdog import REPORT
from surefoot.training.callback import TrainerCallback
from surefoot.training.callbacks.launches import started

MINUTES = 0.1
DEADLINE = 60 * MINUTES * 1.2 + 20  # from the hang to the end of the last rank, on a busy machine
# The first call is that of the trial before a run loads its model.
REWARD = """
calls = []
def never(completions, **_):
    calls.append(1)
    while len(calls) > 1:
        pass
    return [0.0] * len(completions)
"""
pytestmark = pytest.mark.proof


class At(TrainerCallback):
    """Calls ``work`` at one event of one rank, and notes when."""

    def __init__(self, event, work, *, rank=1, step=2):
        def called(args, state, control, **_):
            if rank in (None, int(os.environ["RANK"])) and state.global_step >= step:
                (args.output_dir / "hung").touch()
                work()

        setattr(self, event, called)


class Ranks:
    """Forked ranks of a run, and how they end."""

    def __init__(self, project, count=2, callback=None, prepare=lambda: None, **overrides):
        self.project, self.count = project, count
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = project.folder / "log"
        overrides = {"parallel.timeout": MINUTES, **overrides}
        self.pids = [self._fork(rank, callback, prepare, overrides) for rank in range(count)]

    def _fork(self, rank, callback, prepare, overrides):
        if pid := os.fork():
            return pid
        try:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(self.count), LOCAL_RANK=str(rank))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            prepare()
            callbacks = [] if callback is None else [callback]
            surefoot.train(self.project.recipe, callbacks=callbacks, **overrides)
            os._exit(0)
        except BaseException as error:
            os.write(2, f"rank {rank}: {error!r}".encode())
            os._exit(1)

    def reach(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            if time.monotonic() > deadline:
                self.fail()
            time.sleep(0.02)
        return time.monotonic()

    def fail(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        pytest.fail(self.log.read_text()[-3000:])

    def codes(self, seconds=240):
        deadline, codes = time.monotonic() + seconds, {}
        while len(codes) < self.count:
            for pid in set(self.pids) - codes.keys():
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                self.fail()
            time.sleep(0.02)
        return [codes[pid] for pid in self.pids]

    def hung(self, guilty, said, waiting=None):
        """The run ends in time, the report blames ``guilty``, and says ``said``."""
        began = self.reach(lambda: (self.project.run / "hung").exists())
        codes = self.codes()
        assert time.monotonic() - began < DEADLINE, "too late"
        told = json.loads((self.project.run / REPORT).read_text())
        assert told["guilty"] == guilty, told["message"]
        assert re.search(said, told["message"]), told["message"]
        assert waiting is None or told["waiting"] == waiting
        assert told["host"] == socket.gethostname()
        assert {codes[rank] for rank in guilty} <= {HUNG, -signal.SIGKILL}, codes
        assert told["message"] in self.log.read_text()
        launches = (self.project.run / "launches.jsonl").read_text().splitlines()
        assert any(json.loads(line).get("kind") == "Hang" for line in launches)
        return told


def project(folder, **sections):
    train = {"max_steps": 300, "log_steps": 1, "micro_batch_size": 1, **sections.pop("train", {})}
    return Project(folder, train=train, checkpoint={"save_steps": 500}, **sections)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def endless():
    while True:
        pass


def never_matches():
    re.match("(a|a)*b", "a" * 100)  # in C, holding the interpreter


def read_from_a_peer_that_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).recv(1)


def open_a_pipe_that_nobody_reads():
    path = Path(os.environ["HANG_FOLDER"]) / "pipe"
    if not path.exists():
        os.mkfifo(path)
    path.open("w")


def fill_a_pipe():
    _, writer = os.pipe()
    while True:
        os.write(writer, bytes(1 << 16))


def wait_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def run_a_program_that_never_ends():
    subprocess.run(["sleep", "1000"], check=False)


def leave_the_order():
    dist.all_reduce(torch.ones(3))


def sleep_in_the_kernel():
    """As a process does that waits for a disk: state D, which no handler of a signal interrupts."""
    library = ctypes.CDLL(None)
    if library.vfork() == 0:
        library.usleep.argtypes = [ctypes.c_uint]
        library.sleep(1000)


CASES = {
    "a rank that is stopped": (stop, [1], "it is stopped"),
    "an endless loop": (endless, [1], r"it is at \S*test_hangs.py:\d+ in endless"),
    "a loop in C": (never_matches, [1], r"from \S*test_hangs.py:\d+ in never_matches"),
    "a dead peer": (read_from_a_peer_that_is_silent, [1], "in read_from_a_peer_that_is_silent"),
    "a pipe without a reader": (open_a_pipe_that_nobody_reads, [1], "in open_a_pipe_that_nobody"),
    "a full pipe": (fill_a_pipe, [1], r"test_hangs.py:\d+ in fill_a_pipe"),
    "a lock": (wait_for_a_lock, [1], r"test_hangs.py:\d+ in wait_for_a_lock"),
    "a program": (run_a_program_that_never_ends, [1], "in run_a_program_that_never_ends"),
    "a rank that leaves the order": (leave_the_order, [0, 1], "in leave_the_order"),
    "a disk": (sleep_in_the_kernel, [1], "it waits for a disk or a device, at"),
}


@pytest.mark.parametrize("case", CASES)
def test_of_two_ranks_the_one_that_hangs_in_a_step_is_named(case, tmp_path, monkeypatch):
    monkeypatch.setenv("HANG_FOLDER", str(tmp_path))
    work, guilty, said = CASES[case]
    ranks = Ranks(project(tmp_path), 2, At("on_substep_end", work))
    told = ranks.hung(guilty, said, [0] if guilty == [1] else [])
    assert "while running callbacks, step 3, micro-batch 1" in told["message"]
    assert "rows: row" in told["message"]


def test_rank_0_is_named_by_its_own_watchdog(tmp_path):
    Ranks(project(tmp_path), 2, At("on_step_end", endless, rank=0)).hung([0], "in endless", [1])


@pytest.mark.parametrize(
    ("event", "phase"),
    [("on_init_end", "running callbacks, step 0"), ("on_prediction_step", "running callbacks")],
)
def test_a_hang_before_the_first_step_or_in_an_evaluation_is_named(event, phase, tmp_path):
    made = project(tmp_path, data={"val_size": 6}, train={"eval_steps": 1})
    Ranks(made, 2, At(event, endless, step=0)).hung([1], phase, [0])


def test_a_machine_that_is_gone_is_named(tmp_path):
    def vanish():
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        for pid in [*map(int, children), os.getpid()]:  # its watchdog, too
            os.kill(pid, signal.SIGSTOP)

    ranks = Ranks(project(tmp_path), 2, At("on_step_end", vanish))
    began = ranks.reach(lambda: (ranks.project.run / "hung").exists())
    assert os.waitstatus_to_exitcode(os.waitpid(ranks.pids[0], 0)[1]) in (HUNG, 1)
    assert time.monotonic() - began < DEADLINE
    for process in ranks.pids[1:]:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        for pid in [*map(int, children), process]:
            os.kill(pid, signal.SIGKILL)
    told = json.loads((ranks.project.run / REPORT).read_text())
    assert (told["guilty"], told["waiting"]) == ([1], [0])
    assert "its machine is off, or cannot be reached" in told["message"]


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_an_endless_template_is_named_with_the_thread_that_renders(tmp_path):
    made = project(tmp_path)
    config = made.folder / "model" / "chat_template.jinja"
    config.write_text(ENDLESS + config.read_text())
    made.run.mkdir()
    (made.run / "hung").touch()
    ranks = Ranks(made, 1)
    assert ranks.codes() == [HUNG]
    told = json.loads((made.run / REPORT).read_text())
    assert "while starting" in told["message"]
    assert "jinja" in told["ranks"][0]["stack"]


def test_a_disk_that_hangs_in_a_save_is_named(tmp_path):
    os.mkfifo(tmp_path / "disk")

    def prepare():
        real = os.fsync

        def fsync(descriptor):
            if checkpoints(made.run):
                (made.run / "hung").touch()
                (tmp_path / "disk").open("w")
            real(descriptor)

        os.fsync = fsync

    made = project(tmp_path)
    made.sections["checkpoint"] = {"save_steps": 2, "async_save": False}
    made.write()
    Ranks(made, 1, prepare=prepare).hung([0], r"while saving, step \d.* in fsync")


def test_a_reward_that_never_answers_is_named(tmp_path):
    stage = {"grpo": {"reward": "rewards.py:never", "group_size": 2, "max_new_tokens": 4}}
    stage["grpo"]["reward_timeout"] = 900
    made = Project(tmp_path / "p", stage=stage, train={"max_steps": 9})
    (made.folder / "rewards.py").write_text(REWARD)
    made.run.mkdir()
    (made.run / "hung").touch()
    Ranks(made, 1).hung([0], r"while preparing a batch, step \d: it is at .*child.py")


def test_an_encoder_that_is_stopped_is_named(tmp_path):
    data = {"streaming": True, "buffer_size": 10, "cutoff_len": 64, "datasets": ["sums"]}
    made = project(tmp_path, data={**data, "cache_dir": str(tmp_path / "cache")})

    def prepare():
        from surefoot.run import _encoder_worker

        real = _encoder_worker.Child

        def stopped(*arguments, **options):
            child = real(*arguments, **options)
            os.kill(child.process.pid, signal.SIGSTOP)
            made.run.mkdir(exist_ok=True)
            (made.run / "hung").write_text(str(child.process.pid))
            return child

        _encoder_worker.Child = stopped

    Ranks(made, 1, prepare=prepare).hung([0], r"it is at \S*_encoder_worker.py:\d+ in wait")
    encoder, deadline = int((made.run / "hung").read_text()), time.monotonic() + 20
    while started(encoder) is not None:  # it ends with the rank, though it is stopped
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {"dp_replicate": 2}], ids=str)
def test_on_other_meshes_too(axes, tmp_path):
    overrides = {f"parallel.{name}": value for name, value in axes.items()}
    ranks = Ranks(project(tmp_path), 2, At("on_step_end", stop), **overrides)
    ranks.hung([1], "it is stopped", [0])


@pytest.mark.parametrize("launcher", ["surefoot", "torchrun"])
def test_a_launcher_ends_with_the_rank_that_hung(launcher, tmp_path):
    made = project(tmp_path)
    python = [sys.executable, "-m"]
    train = ["surefoot", "train", str(made.recipe), f"parallel.timeout={MINUTES}"]
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "--no-python", *python[:1], "-m"]
    words = [*train, "parallel.num_processes=2"] if launcher == "surefoot" else [*torchrun, *train]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*python, *words], stdout=log, stderr=log)
    path, deadline = made.run / "metrics.jsonl", time.monotonic() + 240
    while not (path.exists() and len(metrics(made.run)) > 3):
        assert time.monotonic() < deadline and process.poll() is None, (
            tmp_path / "log"
        ).read_text()
        time.sleep(0.1)
    ranks = children(process.pid)
    if launcher == "surefoot":
        ranks = children(*ranks)  # of the fork server
    ranks = [pid for pid in ranks if "train" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(ranks[1], signal.SIGSTOP)
    code = process.wait(120)
    text = (tmp_path / "log").read_text()
    assert code == (HUNG if launcher == "surefoot" else 1), text
    assert "error: hang: rank 1 of 2" in text
    assert "ended with exit code" not in text
    assert launcher == "surefoot" or "exitcode  : 40" in text
    done = json.loads((made.run / REPORT).read_text())
    assert done["rank"] == 1


def children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


class Slow(TrainerCallback):
    """Steps of which some take long, but not for longer than the limit."""

    def on_step_begin(self, args, state, control):
        time.sleep(3.0 if state.global_step % 5 == 4 else 0.03)

    def on_prediction_step(self, args, state, control):
        time.sleep(1.0)


def test_nothing_is_ended_that_only_takes_long(tmp_path):
    """Steps that vary a hundredfold, an evaluation and a save that are longer than the limit."""

    def prepare():
        real = os.fsync

        def fsync(descriptor):
            target = Path(f"/proc/self/fd/{descriptor}").readlink()
            is_model = "model.safetensors" in str(target)
            path = tmp_path / f"slow-{os.getpid()}"
            for _ in range(8 if is_model else 0):  # as long as a large file takes
                path.write_bytes(bytes(1 << 21))
                time.sleep(1.0)
            real(descriptor)

        os.fsync = fsync

    made = project(tmp_path, data={"val_size": 12}, train={"eval_steps": 6, "max_steps": 12})
    made.sections["checkpoint"] = {"save_steps": 6, "async_save": False}
    made.write()
    ranks = Ranks(made, 2, Slow(), prepare)
    assert ranks.codes(400) == [0, 0], ranks.log.read_text()
    assert not (made.run / REPORT).exists()
    assert checkpoints(made.run)[-1].name == "checkpoint-12"
    shutil.rmtree(made.run)
