"""Functions that a recipe names are checked first, and recorded in every checkpoint."""

import contextlib
import importlib.util
import json
import logging
import os
import re
import socket
import sys
import types

import pytest

import surefoot
from commands import refused
from each import some
from project import Project, checkpoints
from stage_data import REWARD, written
from surefoot.checkpoint.section import CheckpointSection
from surefoot.errors import RunError
from surefoot.run.code_files import NAME, code_of
from surefoot.training.callback import TrainerCallback


def project(folder, name="varied"):
    made = Project(folder, stage=written("grpo"), train={"max_steps": 2})
    (folder / "rewards.py").write_text(REWARD.read_text())
    made.sections["stage"]["grpo"]["reward"] = f"rewards.py:{name}"
    made.write()
    return made


def test_a_checkpoint_says_which_function_and_a_change_is_said(tmp_path, caplog):
    made = project(tmp_path)
    surefoot.train(made.recipe)
    recorded = json.loads((checkpoints(made.run)[-1] / NAME).read_text())
    assert list(recorded) == [f"{tmp_path / 'rewards.py'}:varied"]
    with (tmp_path / "rewards.py").open("a") as file:
        file.write("# another comment\n")
    caplog.set_level(logging.WARNING)
    surefoot.train(made.recipe, **{"train.max_steps": 3})
    assert "rewards.py:varied has changed since checkpoint-2 was saved" in caplog.text


def test_a_function_that_is_not_there_is_an_error_before_anything_is_loaded(tmp_path):
    made = project(tmp_path, "absent")
    made.sections["model"]["path"] = "nowhere"
    made.write()
    with pytest.raises(RunError, match=r"rewards.py defines no absent"):
        surefoot.train(made.recipe)


TRIED = {
    "asks_for": r"missing a required argument: 'answer'; .* columns \(instruction, output\)",
    "helped": r"sums:0 .*ValueError: .* \(rewards.py:\d+\)",
    "none": "returned None",
}


@pytest.mark.parametrize("name", some(TRIED, ["asks_for", "helped"]))
def test_a_reward_is_called_once_on_two_rows_before_a_model_is_loaded(tmp_path, name):
    made = project(tmp_path, name)
    made.sections["model"]["path"] = "nowhere"
    made.write()
    with pytest.raises(RunError, match=TRIED[name]):
        surefoot.train(made.recipe)
    assert re.search(TRIED[name], refused("reward", "check", made.recipe))


COUNTED = """
import os
from pathlib import Path
with Path(__file__).with_name("executed").open("a") as file:
    file.write(f"{os.getppid()}\\n")
"""


class Before(TrainerCallback):
    """Notes for which ranks the module has been executed before the first window."""

    def on_train_begin(self, args, state, control):
        executed = args.output_dir.parent / "executed"
        (args.output_dir.parent / "before").write_text(executed.read_text())


def train_on(count, recipe):
    """The processes of a run on so many ranks, which end well."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    pids = []
    for rank in range(count):
        if not (pid := os.fork()):
            place = {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
            os.environ.update(place | address if count > 1 else {})
            with contextlib.suppress(BaseException):
                surefoot.train(recipe, callbacks=[Before()])
                os._exit(0)
            os._exit(1)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * count
    return [str(pid) for pid in pids]


@pytest.mark.parametrize("count", [1, 2])
def test_a_module_of_rewards_is_executed_once_before_the_first_step(count, tmp_path):
    made = project(tmp_path)
    with (tmp_path / "rewards.py").open("a") as file:
        file.write(COUNTED)
    first, *_ = train_on(count, made.recipe)
    assert (tmp_path / "before").read_text().split() == [first]
    # The run's own process is another one: what a trial does to the state of a file stays there.
    assert (tmp_path / "executed").read_text().split() == [first] * 2


def test_an_environment_answers_before_its_reward_is_tried(tmp_path):
    made = project(tmp_path, "solved")
    made.sections["stage"]["grpo"]["environment"] = "rewards.py:Solver"
    made.sections["model"]["path"] = "nowhere"
    made.write()
    with pytest.raises(
        RunError, match=r"rewards.py:Solver: sums:0 .*KeyError: 'goal' \(rewards.py"
    ):
        surefoot.train(made.recipe)


def test_the_code_of_an_installed_callback_is_not_recorded_and_that_of_a_users_file_is(tmp_path):
    """An upgrade of Surefoot, or of a plugin, is not another run."""
    (tmp_path / "beside.py").write_text("X = 1\n")
    (tmp_path / "mine.py").write_text("import beside\nclass Mine: ...\n")
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mine"], sys.modules["beside"] = module, types.ModuleType("beside")
    try:
        spec.loader.exec_module(module)
        recorded = json.loads(
            code_of(CheckpointSection(), [TrainerCallback(), module.Mine()])[NAME]
        )
    finally:
        del sys.modules["mine"], sys.modules["beside"]
    assert set(recorded) == {str(tmp_path / "mine.py"), str(tmp_path / "beside.py")}
