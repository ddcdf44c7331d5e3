"""What the loop sees of saves that happen beside it."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

import small
from surefoot.checkpoint.disk.commit import committed
from surefoot.checkpoint.disk.folder import open_checkpoint
from surefoot.checkpoint.verification import verify
from surefoot.errors import CheckpointError
from surefoot.training.callback import TrainerCallback

pytestmark = [
    pytest.mark.cold_writer,
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's"),
]


class Steps(TrainerCallback):
    """Notes what was told of saves, and does something after some steps."""

    def __init__(self, **at):
        self.at = {int(name.removeprefix("step_")): act for name, act in at.items()}
        self.saved = []

    def on_step_end(self, args, state, control):
        self.at.get(state.global_step, lambda: None)()

    def on_save(self, args, state, control):
        folder = args.output_dir / f"checkpoint-{state.global_step}"
        self.saved.append((state.global_step, verify(folder, full=True).ok))


def built(folder, *members, **section):
    made = small.trainer(folder, *members, save_steps=section.get("save_steps"))
    return small.saving(made, **{"keep": None, **section})


def steps_in(folder):
    return [int(path.name.split("-")[1]) for path in committed(folder)]


def halt(made):
    """Let the writer stand still, as one on a slow disk does, once it has nothing to do."""

    def act():
        made.saver.wait()
        os.kill(made.saver._flight.pid, signal.SIGSTOP)
        timer = threading.Timer(20, go_on(made))  # a test that fails must not hang
        timer.daemon = True
        timer.start()

    return act


def go_on(made):
    def act():
        if (pid := made.saver._flight.pid) is not None:
            os.kill(pid, signal.SIGCONT)

    return act


def test_a_run_that_saves_in_the_background_is_the_run_that_waits_for_its_saves(tmp_path):
    weights = []
    for name, is_async in (("a", True), ("b", False)):
        made = built(tmp_path / name, save_steps=1, async_save=is_async)
        made.fit()
        weights.append(small.weights(made))
        assert steps_in(tmp_path / name) == list(range(1, 9))
    small.assert_same_weights(*weights)


def test_every_save_is_told_once_it_lies_on_the_disk_and_names_the_one_before(tmp_path):
    watch = Steps()
    built(tmp_path, watch, save_steps=3).fit()
    assert watch.saved == [(3, True), (6, True), (8, True)]
    parents = [open_checkpoint(path).manifest.parent for path in committed(tmp_path)]
    assert parents == [None, "checkpoint-3", "checkpoint-6"]


def test_training_goes_on_while_a_save_is_written(tmp_path):
    made, watch, steps = built(tmp_path, save_steps=2), Steps(), []
    watch.at = {
        3: halt(made),
        5: lambda: steps.append(steps_in(tmp_path)),
        6: go_on(made),
    }
    made.callbacks.add(watch)
    made.fit()
    assert steps == [[2]]  # step 5 was learnt while step 4 was on its way
    assert steps_in(tmp_path) == [2, 4, 6, 8]


def test_a_save_that_comes_too_soon_is_left_out_if_the_recipe_says_so(tmp_path, caplog):
    made, watch = built(tmp_path, save_steps=2, on_save_busy="skip"), Steps()
    watch.at = {3: halt(made), 7: go_on(made)}
    made.callbacks.add(watch)
    made.fit()
    assert made.saver.num_skipped == 1
    assert (
        "save of checkpoint-6 skipped (1 so far): checkpoint-4 is still being written"
        in caplog.text
    )
    assert steps_in(tmp_path) == [2, 4, 8]  # the last one is never left out


def test_a_failed_save_is_told_at_the_next_step_and_stops_the_run(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    made = built(tmp_path, save_steps=2)
    with pytest.raises(CheckpointError, match="checkpoint-2: it exists already"):
        made.fit()
    assert made.state.global_step < 8


def test_a_failed_save_is_survived_and_the_next_one_names_the_last_good_one(tmp_path, caplog):
    (tmp_path / "checkpoint-4").mkdir()
    built(tmp_path, save_steps=2, on_save_error="continue").fit()
    assert steps_in(tmp_path) == [2, 6, 8]
    assert open_checkpoint(tmp_path / "checkpoint-6").manifest.parent == "checkpoint-2"
    assert f"training continues, latest checkpoint: {tmp_path / 'checkpoint-2'}" in caplog.text


def test_a_writer_that_is_killed_costs_no_step(tmp_path, caplog):
    made = built(tmp_path, save_steps=2)
    watch = Steps()
    watch.at = {5: lambda: os.kill(made.saver._flight.pid, signal.SIGKILL)}
    made.callbacks.add(watch)
    made.fit()
    assert steps_in(tmp_path) == [2, 4, 6, 8]


def test_a_disk_that_fills_and_is_freed_again_costs_only_the_saves_in_between(tmp_path, caplog):
    made, watch = built(tmp_path, save_steps=2, on_save_error="continue"), Steps()

    def limit(size):
        def act():
            made.saver.wait()
            resource.prlimit(made.saver._flight.pid, resource.RLIMIT_FSIZE, (size, -1))

        return act

    watch.at = {3: limit(1000), 5: limit(-1)}
    made.callbacks.add(watch)
    made.fit()
    assert steps_in(tmp_path) == [2, 6, 8]
    assert f"training continues, latest checkpoint: {tmp_path / 'checkpoint-2'}" in caplog.text
    assert all(verify(path, full=True).ok for path in committed(tmp_path))
    assert not list(tmp_path.glob(".*"))


def test_an_error_of_the_loop_still_waits_for_the_save_in_flight_and_saves_its_step(tmp_path):
    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control):
            if state.global_step == 4:
                raise RuntimeError("a callback of the user")

    made = built(tmp_path, Failing(), save_steps=3)
    with pytest.raises(RuntimeError, match="a callback of the user"):
        made.fit()
    assert steps_in(tmp_path) == [3, 4]
    assert made.saver._flight.pid is None


def test_sigterm_while_a_save_is_in_flight_saves_the_step_after_it(tmp_path):
    made = built(tmp_path, save_steps=3)
    watch = Steps()
    watch.at = {4: lambda: os.kill(os.getpid(), signal.SIGTERM)}
    made.callbacks.add(watch)
    made.fit()
    assert steps_in(tmp_path) == [3, 4]
    resumed = small.resume(built(tmp_path, save_steps=3), tmp_path / "checkpoint-4")
    resumed.fit()
    plain = built(tmp_path / "plain", save_steps=3)
    plain.fit()
    small.assert_same_weights(small.weights(resumed), small.weights(plain))


def test_the_best_checkpoints_by_the_metric_stay(tmp_path):
    made = small.trainer(
        tmp_path, save_steps=1, evals=small.examples(2, seed=9), eval_steps=1, max_steps=6
    )
    state = small.saving(made, keep=1, keep_best=2).fit()
    losses = {r["step"]: r["eval_loss"] for r in state.log_history if "eval_loss" in r}
    best = sorted(losses, key=losses.get)[:2]
    assert steps_in(tmp_path) == sorted({*best, 6})


def test_the_clock_may_jump_back_in_the_middle_of_a_run(tmp_path, monkeypatch):
    """An NTP correction, or a machine whose clock was wrong at the start."""
    real, made = time.time, built(tmp_path, save_steps=1, keep=2, keep_hours=0.001)
    watch = Steps()
    watch.at = {4: lambda: monkeypatch.setattr(time, "time", lambda: real() - 10**6)}
    made.callbacks.add(watch)
    made.fit()
    assert {7, 8} <= set(steps_in(tmp_path))
    assert all(verify(path, full=True).ok for path in committed(tmp_path))


@pytest.mark.parametrize(
    "jump",
    [pytest.param(-3600, marks=pytest.mark.proof), 365 * 86400],
    ids=["an hour back", "a year forward"],
)
def test_a_clock_that_jumps_makes_no_checkpoint_old(jump, tmp_path, monkeypatch):
    real, made = time.time, built(tmp_path, save_steps=1, keep=1, keep_hours=1)
    watch = Steps()
    watch.at = {4: lambda: monkeypatch.setattr(time, "time", lambda: real() + jump)}
    made.callbacks.add(watch)
    made.fit()
    assert steps_in(tmp_path) == list(range(1, 9))


def test_a_best_step_that_was_not_saved_has_no_path_in_trainer_state_json(tmp_path):
    options = {"evals": small.examples(2, seed=9), "eval_steps": 1, "max_steps": 5}
    state = small.trainer(tmp_path, save_steps=2, **options).fit()
    told = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    best = told["best_model_checkpoint"]
    assert best is None or steps_in(tmp_path).count(state.best_global_step)
    for folder in committed(tmp_path):
        told = json.loads((folder / "trainer_state.json").read_text())
        named, step = told["best_model_checkpoint"], told["best_global_step"]
        assert (named is not None) == (step in steps_in(tmp_path))


def test_a_snapshot_that_will_not_fit_is_said_before_the_first_save(tmp_path, caplog, monkeypatch):
    made = small.trainer(tmp_path, max_steps=2, save_steps=2)
    size = 3 * sum(p.nbytes for p in made.policy.module.parameters())  # with two moments
    free = "surefoot.checkpoint.saving._snapshot_buffer.free_memory"
    monkeypatch.setattr(free, lambda: size + (96 << 20) - 1000)
    made.fit()
    first, second = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert first.startswith("a snapshot of the state will not fit in main memory, which ")
    assert "set checkpoint.async_save: false" in first
    assert second.startswith("asynchronous saves are off, which makes training wait for every")
    assert "no room for a snapshot of the state (" in second
    assert verify(tmp_path / "checkpoint-2", full=True).ok


SMALL_SHM = """
mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {python} -c '
from surefoot.checkpoint.saving._snapshot_buffer import SnapshotBuffer
made = SnapshotBuffer.create(8 << 20)
made.view[:] = bytes(made.size)
made.close()
'
"""


def test_a_small_dev_shm_is_no_limit_to_a_snapshot():
    unshared = ["unshare", "--mount", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            [*unshared, "mount -t tmpfs tmpfs /dev/shm"], capture_output=True
        ).returncode
    ):
        pytest.skip("nothing may be mounted here")
    script = SMALL_SHM.format(python=sys.executable)
    done = subprocess.run([*unshared, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
