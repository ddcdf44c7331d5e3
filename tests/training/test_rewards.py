"""Rewards in their process: functions that fail in every way, rules, sums."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from stage_data import REWARD
from surefoot.errors import RecipeError, RunError
from surefoot.schema import read
from surefoot.schema.locations import FunctionPath
from surefoot.stages import GRPO
from surefoot.training.rewards import (
    WORKER,
    FunctionReward,
    RewardProcess,
    Texts,
    computed,
    means,
    names_of,
    rewarded,
    total,
)


@pytest.fixture(scope="module")
def process():
    made = RewardProcess()
    yield made
    made.close()


def texts(*completions, **columns):
    count = len(completions)
    origins = [f"sums:{i}" for i in range(count)]
    return Texts(["p"] * count, completions, [*map(len, completions)], columns, origins)


def function(name):
    return FunctionReward(path=FunctionPath(f"{REWARD}:{name}")).task


def rule(**settings):
    return read(GRPO, {"reward": [settings]}).reward[0].task


def rewards(process, task, given, on_error="stop", seconds=20.0):
    return computed(process, task, given, seconds, on_error).rewards


def test_a_function_gets_the_columns_that_it_names(process):
    given = texts("ab", "c", output=["x", "yz"], more=[1, 2])
    assert rewards(process, function("some"), given) == [None, 3.0]
    assert rewards(process, function("flat"), given) == [1.0, 1.0]
    assert rewards(process, function("loud"), given) == [1.0, 1.0]


def test_a_function_imports_what_lies_beside_it_and_nothing_there_shadows_python(tmp_path):
    (tmp_path / "mine.py").write_text("import random\n\nVALUE = random.Random(0).randint(2, 2)\n")
    (tmp_path / "random.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "code.py").write_text(
        "def reward(completions):\n    import mine\n    return [mine.VALUE] * len(completions)\n"
    )
    own = FunctionReward(path=FunctionPath(f"{tmp_path / 'code.py'}:reward")).task
    process = RewardProcess()
    try:
        assert rewards(process, own, texts("a", "b")) == [2.0, 2.0]
    finally:
        process.close()


FAILURES = {
    "wrong": "gave 1 reward for 2 completions",
    "missing": "defines no missing",
    "some": "missing a required argument: .output",
    "angry": "ValueError: never",
    "broken": "sums:1 .response 'bad'.: ZeroDivisionError",
    "unclear": "sums:1 .*expected a finite number or None for a reward, got nan",
    "worded": "expected a finite number or None for a reward, got '1'",
    "ending": "ended its process with code 7",
    "leaving": "SystemExit: .*enough .stage_rewards.py:",
    "hanging": "sums:1 .*took more than 0.5 seconds .reward_timeout.",
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_reward_that_fails_names_itself_and_the_row(process, name):
    with pytest.raises(RunError, match=f"stage_rewards.py:{name}: .*{FAILURES[name]}"):
        rewards(
            process, function(name), texts("a", "bad"), seconds=0.5 if name == "hanging" else 20
        )
    assert rewards(process, function("flat"), texts("a")) == [1.0]  # it works again


@pytest.mark.parametrize(
    "name", ["broken", "unclear", pytest.param("hanging", marks=pytest.mark.proof)]
)
def test_a_response_whose_reward_fails_can_be_skipped(process, name):
    seconds = 0.5 if name == "hanging" else 20.0
    given = texts("a", "bad", "c")
    assert rewards(process, function(name), given, "skip", seconds) == [1.0, None, 1.0]


def test_a_worker_whose_trainer_was_killed_says_nothing():
    """Its last result has no reader. The text of a function that exits is not printed, either."""
    task = {"rule": "function", "settings": {"path": f"{REWARD}:leaving"}, "columns": {}}
    task |= {"prompts": ["p"], "completions": ["c"], "lengths": [1], "ids": [], "sessions": [0]}
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as nowhere:
        done = subprocess.run(
            [sys.executable, "-P", WORKER],
            input=json.dumps(task).encode() + b"\n",
            stdout=nowhere,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_file_is_checked_before_a_run(process):
    process.check(function("flat"))
    with pytest.raises(RunError, match=r"there is no Python file /nowhere\.py"):
        process.check(FunctionReward(path=FunctionPath("/nowhere.py:f")).task)


def test_rules(process):
    given = texts("42", " 42 \n", "so: 7", gold=["42", 42, None])
    assert rewards(process, rule(exact_match={"column": "gold"}), given) == [1.0, 1.0, None]
    found = rewards(process, rule(regex={"pattern": r"so: (\d)", "column": "gold"}), given)
    assert found == [0.0, 0.0, None]
    assert rewards(process, rule(regex={"pattern": r"\d$"}), given) == [1.0, 0.0, 1.0]
    limits = {"soft_limit": 2, "hard_limit": 4}
    assert rewards(process, rule(length=limits), given) == [0.0, -1.0, -1.0]
    assert rewards(process, rule(length=limits), texts("abc")) == [-0.5]


def test_a_column_that_is_missing_is_named_with_those_there_are(process):
    with pytest.raises(RunError, match=r"exact_match: the dataset has no column 'gold' .*: other"):
        rewards(process, rule(exact_match={"column": "gold"}), texts("a", "b", other=[1, 2]))


def test_several_are_added_with_their_weights():
    by_reward = [[1.0, None, None], [0.5, 2.0, None]]
    assert total(by_reward, [1.0, 2.0]) == [2.0, 4.0, None]
    several = read(GRPO, {"reward": ["r.py:f", "q.py:f", {"exact_match": {"column": "a"}}]}).reward
    assert names_of(several) == ["f", "f_2", "exact_match"]
    assert means(["f", "g"], by_reward) == {"rewards/f": 1.0, "rewards/g": 1.25}


def test_the_process_ends_with_its_owner():
    made = RewardProcess()
    rewards(made, function("flat"), texts("a"))
    number = made._child.process.pid
    del made
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("no function", "expected a function as file.py:name"),
        ([{"exactmatch": {}}], "did you mean exact_match"),
        ([{"length": {"soft_limit": 3, "hard_limit": 1}}], "less than hard_limit"),
        ({"regex": {"pattern": "("}}, "not a regular expression"),
        ([], "expected at least one"),
    ],
)
def test_a_reward_that_means_nothing_is_refused(settings, words):
    with pytest.raises(RecipeError, match=words):
        read(GRPO, {"reward": settings})


WHERE = {
    "helped": r"ValueError: invalid literal for int.* \(stage_rewards.py:\d+\)",
    "none": "returned None; expected a list with a number for each completion",
    "asks_for": r"missing a required argument: 'answer'; it may take columns \(output, more\) and "
    "completion_ids, completions, log_extra, log_metric, prompts",
}


@pytest.mark.parametrize("name", WHERE)
def test_a_failure_names_the_line_and_the_columns_that_there_are(process, name):
    with pytest.raises(RunError, match=WHERE[name]):
        rewards(process, function(name), texts("a", "b", output=["x", "y"], more=[1, 2]))


@pytest.mark.parametrize("name", ["none", "asks_for", "missing", "wrong"])
def test_what_no_response_can_mend_is_an_error_also_if_others_are_skipped(process, name):
    with pytest.raises(RunError) as raised:
        rewards(process, function(name), texts("a", "b"), "skip")
    assert "on_reward_error" not in str(raised.value)


def test_a_file_that_cannot_be_imported_names_its_line(process, tmp_path):
    for number, (line, words) in enumerate(
        {
            "import nowhere_at_all": r"No module named 'nowhere_at_all' \(r1?\.py:3\)",
            "def f(:": r"SyntaxError: .*\(r1?\.py, line 3\)",
        }.items()
    ):
        path = tmp_path / f"r{number or ''}.py"
        path.write_text(f"import json\n\n{line}\n")
        task = FunctionReward(path=FunctionPath(f"{path}:f")).task
        with pytest.raises(RunError, match=words):
            rewards(process, task, texts("a"), "skip")


def test_prompts_that_are_messages_give_the_function_messages(process):
    chats = [[{"role": "user", "content": "four"}], [{"role": "user", "content": "one"}]]
    assert rewards(process, function("for_chats"), texts("ab", "c", prompt=chats)) == [6.0, 4.0]
    assert rewards(process, function("varied"), texts("a", "b", prompt=["x", "y"])) == [6 / 7, 0.0]


def test_a_function_of_trl_may_be_async_take_ids_and_log(process):
    given = replace(texts("ab", "c"), ids=[[1, 2, 3], [4]])
    found = process.compute(function("waiting"), given, 20.0)
    assert found.rewards == [3.0, 1.0]
    both = rewarded([found, replace(found, metrics={"mean_ids": [6.0]})])
    assert both.metrics == {"mean_ids": 4.0}
    assert both.extras == {"first": ["a", "c"]}


def test_a_process_that_was_killed_is_started_again(process, tmp_path, caplog):
    mark = tmp_path / "mark"
    mark.write_text("")
    assert rewards(process, function("fatal"), texts(str(mark))) == [1.0]
    assert "was killed by SIGKILL; it is started again" in caplog.text


def steps(process, name, *said, is_first=True, goal=3):
    given = [
        {"session": n, "row": {"goal": goal}, "response": one, "is_first": is_first}
        for n, one in enumerate(said)
    ]
    return process.step(f"{REWARD}:{name}", given, 20.0)


def test_a_reward_reads_the_environments_and_their_file_also_after_a_kill(process):
    first = steps(process, "Solver", "a", "b")
    assert [one["content"] for one in first["replies"]] == ["1 of 3", "1 of 3"]
    os.kill(process._child.process.pid, signal.SIGKILL)
    process._child.process.wait()
    second = steps(process, "Solver", "c", is_first=False)
    assert second["replies"][0]["content"] == "2 of 3"
    assert rewards(process, function("solved"), texts("c", "b")) == [12.0, 11.0]
    assert rewards(process, function("solved"), texts("c", "b").at(1)) == [11.0]


def test_steps_that_are_coroutines_run_at_the_same_time(process):
    assert steps(process, "AsyncCounter", "a", "b", "c") == {"replies": [None] * 3}
    found = steps(process, "AsyncCounter", "d", "broken", "e")
    assert (found["place"], found["error"].split(" (")[0]) == (1, "ValueError: no")
