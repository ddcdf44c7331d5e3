"""What the loops of several processes see of a save: all do the same, whoever hears of it first."""

import os
import resource
import signal

import pytest

import ranks
import small
from spread import learn, resume, trainer
from spread import save as store
from surefoot.checkpoint.disk.commit import committed
from surefoot.checkpoint.verification import verify
from surefoot.training import TrainerCallback

pytestmark = pytest.mark.cold_writer


def begin(world, folder, layout, **section):
    return small.saving(trainer(world, folder), keep=None, layout=layout, **section)


def save(made, *, insist=False):
    learn(made, 1)
    made.saver.save(made.state.global_step, made.states, insist=insist)


def signal_writer(made, world, number, rank):
    if world.rank == rank:
        os.kill(made.saver._flight.pid, number)


def let_write(made, world, size):
    """Files of so many bytes, in the second process."""
    if world.rank == 1:
        limits = (size, resource.RLIM_INFINITY)
        resource.prlimit(made.saver._flight.pid, resource.RLIMIT_FSIZE, limits)


def steps(folder):
    assert all(verify(path, full=True).ok for path in committed(folder))
    return [path.name for path in committed(folder)]


def test_a_save_that_comes_too_soon_is_left_out_by_all(tmp_path):
    """Also by the one whose part has long been written."""

    def work(world):
        made = begin(world, tmp_path, "full", on_save_busy="skip")
        with made.saver:
            save(made)
            made.saver.wait()
            signal_writer(made, world, signal.SIGSTOP, rank=0)
            save(made)
            save(made)
            signal_writer(made, world, signal.SIGCONT, rank=0)
            save(made, insist=True)

    ranks.run(2, work)
    assert steps(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]


def test_a_writer_that_is_killed_is_replaced_and_the_others_write_again(tmp_path):
    for rank in (0, 1):
        folder = tmp_path / str(rank)

        def work(world, folder=folder, rank=rank):
            made = begin(world, folder, "distributed")
            with made.saver:
                save(made)
                made.saver.wait()
                signal_writer(made, world, signal.SIGSTOP, rank)  # so that it dies in the middle
                save(made)
                signal_writer(made, world, signal.SIGKILL, rank)
                save(made, insist=True)
            return str(made.saver.newest)

        assert ranks.run(2, work) == [str(folder / "checkpoint-3")] * 2
        assert steps(folder) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_all_go_on_after_a_save_that_failed_if_the_recipe_says_so(tmp_path):
    def work(world):
        made = begin(world, tmp_path, "full", on_save_error="continue")
        with made.saver:
            save(made)
            made.saver.wait()
            let_write(made, world, 10)
            save(made)
            made.saver.wait()
            let_write(made, world, resource.RLIM_INFINITY)
            save(made, insist=True)

    ranks.run(2, work)
    assert steps(tmp_path) == ["checkpoint-1", "checkpoint-3"]


def test_all_go_on_while_rank_0_alone_cannot_begin_a_save(tmp_path):
    """The folder of the run was renamed, or its pins cannot be read."""
    root, moved = tmp_path / "run", tmp_path / "moved"

    def work(world):
        made = begin(world, root, "full", on_save_error="continue")
        with made.saver:
            save(made)
            made.saver.wait()
            world.wait()
            if world.is_main:
                root.rename(moved)
            save(made)
            if world.is_main:
                moved.rename(root)
            save(made, insist=True)
            made.saver.wait()
            if world.is_main:
                (root / "pinned.json").write_text("{")  # which checkpoints to delete is not known
            save(made)
            if world.is_main:
                (root / "pinned.json").unlink()
            save(made, insist=True)

    ranks.run(2, work)
    assert steps(root) == ["checkpoint-1", "checkpoint-3", "checkpoint-5"]


class WritesOnMain(TrainerCallback):
    """As callbacks of the Hugging Face Trainer do."""

    def __init__(self, path):
        self.path = path

    def on_log(self, args, state, control, logs):
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write("logged\n")


def test_a_callback_that_writes_on_rank_0_writes_once(tmp_path):
    written = tmp_path / "written"

    def work(world):
        made = trainer(world, tmp_path)
        made.callbacks.add(WritesOnMain(written))
        made.callbacks.emit("on_log", logs={"step": 1})
        path = store(made, tmp_path)
        again = resume(trainer(world, tmp_path), path)
        again.callbacks.add(WritesOnMain(written))
        again.callbacks.emit("on_log", logs={"step": 1})
        return again.state.is_local_process_zero, again.state.is_world_process_zero

    assert ranks.run(2, work) == [(True, True), (False, False)]
    assert written.read_text() == "logged\n" * 2, "before and after a resume"
