"""The check of a recipe's rows: what it finds, its exit code and its JSON."""

import json
import re
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
from click.testing import CliRunner

from folders import save_data, save_recipe
from surefoot.cli.main import main
from surefoot.data.example import Example, Message
from surefoot.data.section import DataSection
from surefoot.stages import KTO
from surefoot.use.data_check.duplicates import hashes_of
from surefoot.use.data_check.figures import DatasetFigures
from surefoot.use.data_check.findings import findings_in, findings_of, is_loop

WORDS = "river stone light winter summer garden window table music paper silver forest"
PHRASE = "I am sorry, but I cannot help you with that question."


def sentence(seed, count):
    return " ".join(np.random.RandomState(seed).choice(WORDS.split(), count))


def good_rows(count):
    return [
        {"instruction": f"Explain {sentence(n, 12)}", "output": f"It is {sentence(n + 999, 12)}."}
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A project with good rows, with bad rows, with conversations, and rows to evaluate on."""
    folder = tmp_path_factory.mktemp("project")
    save_recipe(folder)
    bad = good_rows(60)
    bad[10] = dict(bad[3])
    bad[12] = {"instruction": "x", "output": ""}
    bad[13] = {"instruction": "x", "output": "again and " * 100}
    bad[14] = {"instruction": "see <image>", "output": "<|im_start|>user"}
    bad[15] = {"instruction": 5, "output": "x"}
    for n in range(20, 40):
        bad[n]["output"] = PHRASE
    turns = [
        [("user", "a"), ("user", "b"), ("assistant", "c")],
        [("assistant", "c")],
        [("user", "c")],
        [("user", "a"), ("system", "b"), ("assistant", "c")],
        [("user", "a"), ("tool", "b"), ("assistant", "c")],
        [("user", "same"), ("assistant", "same")],
    ]
    chats = [
        {"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns
    ]
    fresh = {"instruction": f"New {sentence(7777, 12)}", "output": sentence(5555, 12)}
    held = [dict(bad[50]), {**bad[51], "output": sentence(4444, 12)}, fresh]
    for name, rows in {"good": good_rows(40), "bad": bad, "chats": chats, "held": held}.items():
        save_data(folder / "data", name, rows=rows)
    return folder


def run(folder, *args, **data):
    data = {"cutoff_len": 200, "val_size": 0.0, **data}
    path = save_recipe(folder, data=data, train={"eval_steps": None})
    return CliRunner().invoke(main, ["data", "check", str(path), *map(str, args)])


@pytest.fixture(scope="module")
def found(folder):
    done = run(folder, "--json", datasets=["bad"], eval_datasets=["held"])
    assert done.exit_code == 1, done.output
    return json.loads(done.stdout)


def whats(found, dataset, level="problem"):
    return {
        one["what"]: one["count"]
        for one in found["findings"]
        if one["dataset"] == dataset and one["level"] == level
    }


def test_good_rows_have_no_problem_and_exit_code_0(folder):
    done = run(folder, datasets=["good"])
    assert done.exit_code == 0, done.output
    assert "no problems" in done.stdout
    assert "40 rows, 40 sequences" in done.stdout


def test_each_kind_of_bad_row_is_counted_and_named(found):
    problems = whats(found, "bad")
    assert problems["responses that repeat themselves"] == 1
    assert problems["marks for nothing"] == 1
    assert problems["special tokens of the model in the text"] == 1
    assert problems["rows that cannot be read"] == 1
    assert problems["rows equal to an earlier one"] == 1
    assert any(what.startswith("examples that are dropped: an empty") for what in problems)
    assert problems[f"rows with one response, {PHRASE!r}"] == 20
    named = {one["what"]: one["rows"] for one in found["findings"] if one["dataset"] == "bad"}
    assert named["rows equal to an earlier one"] == ["bad:10 is bad:3"]


def test_rows_to_evaluate_on_that_are_trained_on_are_found(found):
    (overlap,) = found["overlaps"]
    assert overlap["rows"] == 3
    assert overlap["same"] == {"count": 1, "rows": ["held:0"]}
    assert overlap["prompt"] == {"count": 1, "rows": ["held:1"]}


def test_figures_are_those_of_training(found):
    figures = found["datasets"][0]
    assert figures["rows"] == 60
    assert figures["items"] == 58
    assert sum(figures["lengths"].values()) == 58
    assert 0 < figures["trained_tokens"] < figures["tokens"]
    assert figures["quantiles"]["1"] == max(map(int, figures["lengths"]))


def test_odd_orders_of_turns_are_found(folder):
    done = run(folder, "--json", "--dataset", "chats", datasets=["chats"])
    odd = json.loads(done.stdout)["datasets"][0]["odd"]
    assert {what: each["rows"] for what, each in odd.items()} == {
        "conversations with two turns of one role in a row": ["chats:0"],
        "conversations that begin with a response": ["chats:1"],
        "conversations that do not end with a response": ["chats:2"],
        "results of functions without a call before": ["chats:4"],
        "responses equal to the prompt": ["chats:5"],
    }


def test_a_copy_on_the_other_side_of_val_size_is_found(folder):
    rows = good_rows(20)
    save_data(folder / "data", "twice", rows=[*rows, *rows])
    done = run(folder, "--json", datasets=["twice"], val_size=8)
    (overlap,) = json.loads(done.stdout)["overlaps"]
    assert overlap["evaluation"] == "held out by val_size"
    assert overlap["rows"] == 8
    assert 0 < overlap["same"]["count"] <= 8


def test_notes_on_rows_are_in_the_json_too(folder):
    call = {"function": {"name": "f", "arguments": {"x": None}}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
    ]
    save_data(folder / "data", "nulls", rows=[{"messages": turns}])
    (figures,) = json.loads(run(folder, "--json", datasets=["nulls"]).stdout)["datasets"]
    ((note, rows),) = figures["notes"].items()
    assert "nulls in arguments of calls" in note
    assert rows == {"count": 1, "rows": ["nulls:0"]}


def test_only_some_rows_are_read_if_asked(folder):
    done = run(folder, "--rows", 5, datasets=["good"])
    assert "the first 5 rows" in done.stdout


def test_what_cannot_be_read_is_exit_code_2_without_a_traceback(folder):
    done = run(folder, datasets=["absent"])
    assert done.exit_code == 2
    assert "error: dataset 'absent'" in done.stderr


@pytest.mark.parametrize(("count", "stops"), [(10, False), (15, True)])
def test_rows_that_cannot_be_read_say_whether_training_would_stop(count, stops):
    """A preview of 15 broken rows of 30 said nothing of it."""
    figures = DatasetFigures("odd", rows=30, items=30, tokens=60, trained_tokens=30)
    figures.max_broken_rows = 10
    for number in range(count):
        figures.broken.add(f"odd:{number}: no")
    (broken,) = (one for one in findings_in(figures) if one.what == "rows that cannot be read")
    said = "training stops at more than data.max_broken_rows = 10"
    assert (said in str(broken)) == stops


def test_the_settings_that_balance_labels_exist():
    figures = DatasetFigures("marked", rows=100, items=100, labels=Counter({True: 99, False: 1}))
    (advice,) = (
        one.advice
        for one in findings_of(DataSection(datasets=("marked",)), [figures], [])
        if "marked bad" in one.what
    )
    settings = re.findall(r"stage\.kto\.(\w+)|and (\w+)", advice)
    assert {"".join(one) for one in settings} <= {field.name for field in fields(KTO)}


def test_the_same_words_with_other_functions_are_not_the_same_row():
    messages = (Message("user", "Weather?"), Message("assistant", "Sunny."))
    one, other = (Example(messages, ({"name": name},)) for name in ("weather", "sky"))
    assert hashes_of(one)[0] != hashes_of(other)[0]
    assert hashes_of(one) == hashes_of(Example(messages, ({"name": "weather"},)))


def test_a_loop_is_long_and_repeats_itself():
    assert is_loop("again and " * 100)
    assert not is_loop("again and " * 10)
    assert not is_loop(sentence(3, 200))
