"""Functions that a recipe names are checked first, and recorded in every checkpoint."""

import json
import logging
import re

import pytest

import surefoot
from commands import refused
from each import some
from project import Project, checkpoints
from stage_data import REWARD, written
from surefoot.errors import RunError
from surefoot.run.code_files import NAME


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


def test_an_environment_answers_before_its_reward_is_tried(tmp_path):
    made = project(tmp_path, "solved")
    made.sections["stage"]["grpo"]["environment"] = "rewards.py:Solver"
    made.sections["model"]["path"] = "nowhere"
    made.write()
    with pytest.raises(
        RunError, match=r"rewards.py:Solver: sums:0 .*KeyError: 'goal' \(rewards.py"
    ):
        surefoot.train(made.recipe)
