"""Old checkpoints go, the newest and the protected stay, whatever happens in between."""

import errno
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import commands
from crash.system import But, refusing
from project import checkpoints
from surefoot.checkpoint import AsyncSaver, save
from surefoot.checkpoint.disk.commit import clean, committed
from surefoot.checkpoint.disk.folder import metrics_in
from surefoot.checkpoint.disk.retention import (
    NAME,
    RetentionPolicy,
    decide,
    drop_all,
    pin,
    pinned,
    ranked,
    seconds,
)
from surefoot.checkpoint.section import CheckpointSection
from surefoot.errors import CheckpointError
from surefoot.storage import files

from ..sample import sample_states
from .test_commit import names, publish

_, ok, refused = commands.of("ckpt")


@given(st.dictionaries(st.integers(0, 12), st.booleans(), max_size=6))
def test_what_is_dropped_is_gone_and_all_else_stays(tmp_path_factory, steps):
    root = tmp_path_factory.mktemp("run")
    folders = {publish(root, step): goes for step, goes in sorted(steps.items())}
    drop_all([folder for folder, goes in folders.items() if goes])
    assert committed(root) == [folder for folder, goes in folders.items() if not goes]
    assert names(root) == sorted(folder.name for folder, goes in folders.items() if not goes)


def test_a_removal_that_is_cut_short_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    publish(tmp_path, 1)
    publish(tmp_path, 2)

    with monkeypatch.context() as patch:
        patch.setattr(files, "os", But(rmdir=refusing(errno.EIO)))
        with pytest.raises(CheckpointError, match="cannot delete an old checkpoint"):
            drop_all([tmp_path / "checkpoint-1"])
    assert [p.name for p in committed(tmp_path)] == ["checkpoint-2"]
    assert len(clean(tmp_path)) == 1
    assert names(tmp_path) == ["checkpoint-2"]


HOUR = 3600.0
STEPS = st.integers(0, 40)
TIMES = st.none() | st.integers(-5, 60).map(lambda n: n * HOUR / 2) | st.floats(-1e12, 1e12)
METRICS = st.dictionaries(
    STEPS, st.integers(0, 3).map(float) | st.sampled_from([math.nan, math.inf, -math.inf])
)
NUMBERS = st.none() | st.integers(1, 6)
RULES = st.builds(
    RetentionPolicy,
    keep=NUMBERS,
    keep_every=NUMBERS,
    keep_best=NUMBERS,
    keep_hours=st.none() | st.integers(1, 12).map(float),
)
RUNS = st.fixed_dictionaries(
    {
        "saved": st.dictionaries(STEPS, TIMES, max_size=12),
        "rule": RULES,
        "now": st.floats(-1e12, 1e12) | st.integers(0, 60).map(lambda n: n * HOUR / 2),
        "metrics": METRICS,
        "greater": st.booleans(),
        "protected": st.sets(STEPS, max_size=2),
    }
)


def staying(run):
    verdicts = decide(**run)
    assert [verdict.step for verdict in verdicts] == sorted(run["saved"])
    return {verdict.step for verdict in verdicts if verdict.stays}


def as_documented(saved, rule, now, metrics, greater, protected):
    """The sentences of the documentation, one after the other, as naively as can be."""
    steps = sorted(saved)
    if rule.keep is None or not steps:
        return set(steps)
    stays = {step for step in steps if step in protected}
    stays |= set(steps[len(steps) - min(rule.keep, len(steps)) :])
    if rule.keep_every:
        stays |= {step for step in steps if step % rule.keep_every == 0}
    left = {s: -metrics[s] if greater else metrics[s] for s in steps if s in metrics}
    left = {s: value for s, value in left.items() if value == value}
    for _ in range(rule.keep_best or 1):
        if best := [s for s in left if all(left[s] <= value for value in left.values())]:
            stays.add(min(best))
            del left[min(best)]
    if rule.keep_hours:
        newest = saved[steps[-1]]
        end = now if newest is None else min(now, newest)
        stays |= {s for s in steps if saved[s] is None or saved[s] >= end - rule.keep_hours * HOUR}
    return stays


@given(RUNS)
def test_the_rule_is_what_the_documentation_says(run):
    assert staying(run) == as_documented(**run)


@given(RUNS)
def test_the_newest_the_best_and_the_protected_never_go(run):
    stays = staying(run)
    best = ranked(
        {s: run["metrics"][s] for s in run["saved"] if s in run["metrics"]}, greater=run["greater"]
    )
    assert {*sorted(run["saved"])[-1:], *best[:1]} <= stays
    assert run["protected"] & run["saved"].keys() <= stays


@given(RUNS, st.floats(-1e12, 1e12), st.dictionaries(STEPS, TIMES))
def test_no_clock_makes_more_go_than_the_rule_without_hours(run, now, created):
    wrong = {**run, "now": now, "saved": {s: created.get(s, t) for s, t in run["saved"].items()}}
    assert staying({**run, "rule": replace(run["rule"], keep_hours=None)}) <= staying(wrong)


@given(RUNS, st.sampled_from(["keep_every", "keep_best", "keep_hours"]))
def test_a_further_setting_only_keeps_more(run, name):
    assert staying({**run, "rule": replace(run["rule"], **{name: None})}) <= staying(run)


@given(RUNS)
def test_what_has_stayed_once_decided_stays_when_decided_again(run):
    stays = staying(run)
    left = {step: created for step, created in run["saved"].items() if step in stays}
    assert staying({**run, "saved": left}) == stays


def test_a_clock_set_back_keeps_what_lies_in_its_future():
    saved = {1: 100 * HOUR, 2: 101 * HOUR, 3: 5 * HOUR}  # set back before the third
    verdicts = decide(saved, RetentionPolicy(keep=1, keep_hours=2), now=6 * HOUR)
    assert all(verdict.stays for verdict in verdicts)


def test_a_clock_that_has_leapt_since_the_last_save_ages_nothing():
    saved = {step: step * HOUR for step in range(1, 6)}
    stays = [
        v.step
        for v in decide(saved, RetentionPolicy(keep=1, keep_hours=2), now=1e9 * HOUR)
        if v.stays
    ]
    assert stays == [3, 4, 5]


def test_a_checkpoint_stays_for_every_reason_there_is():
    saved = {step: step * HOUR for step in (10, 15, 20, 25)}
    metrics = {10: 0.5, 15: 0.1, 20: 0.1, 25: math.nan}
    rule = RetentionPolicy(keep=2, keep_every=10, keep_best=2, keep_hours=1)
    verdicts = decide(saved, rule, now=25 * HOUR, metrics=metrics, protected=[15])
    assert {verdict.step: verdict.why for verdict in verdicts} == {
        10: ("a multiple of 10",),
        15: ("best", "protected"),
        20: ("among the latest 2", "among the best 2", "a multiple of 10"),
        25: ("latest", "of the last 1 h"),
    }


def test_nothing_goes_where_there_is_nothing_or_no_number():
    assert decide({}, RetentionPolicy(keep=1), now=0) == []
    verdicts = decide({1: None, 2: None}, RetentionPolicy(), now=0)
    assert [verdict.why for verdict in verdicts] == [("all are kept",), ("latest",)]


@pytest.mark.parametrize("name", ["keep", "keep_every", "keep_best", "keep_hours"])
def test_a_rule_that_makes_no_sense_is_refused(name):
    for kind in (RetentionPolicy, CheckpointSection):
        with pytest.raises(ValueError, match=name):
            kind(**{name: 0})
    with pytest.raises(ValueError, match="keep_hours must be positive, got nan"):
        RetentionPolicy(keep_hours=math.nan)


def test_the_recipe_says_the_rule():
    section = CheckpointSection(keep=None, keep_every=5, keep_best=2, keep_hours=1.5)
    assert section.rule() == RetentionPolicy(keep=None, keep_every=5, keep_best=2, keep_hours=1.5)
    assert CheckpointSection().rule() == RetentionPolicy(keep=3)


def test_metrics_are_read_from_a_log():
    history = [
        {"step": 1, "loss": 2.0},
        {"step": 1, "eval_loss": 3},
        {"step": 2, "eval_loss": 1.0},
        {"step": 2, "eval_loss": 1.5},  # rolled back, and done again
        {"step": 3, "eval_loss": None},
        {"step": 4, "eval_loss": "x"},
        {"step": 6, "eval_loss": True},
        {"step": 7, "eval_loss": 10**400},
        {"step": "5", "eval_loss": 1.0},
        {"eval_loss": 1.0},
        7,
    ]
    assert metrics_in(history, "eval_loss") == {1: 3.0, 2: 1.5}


def test_times_that_are_none_are_not_known():
    assert seconds("1970-01-01T00:00:05Z") == 5
    assert seconds("1970-01-01T00:00:05") == 5
    for text in (None, "", "yesterday", "2026-13-01"):
        assert seconds(text) is None


def test_a_list_of_checkpoints_is_dropped(tmp_path):
    folders = [publish(tmp_path, step) for step in (1, 2, 3)]
    drop_all(folders[:2])
    assert names(tmp_path) == ["checkpoint-3"]
    with pytest.raises(CheckpointError, match="cannot delete an old checkpoint"):
        drop_all(folders[:1])


def steps(run):
    return [int(path.name.removeprefix("checkpoint-")) for path in checkpoints(run)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose recipe keeps one checkpoint, and has two."""
    folder = tmp_path_factory.mktemp("pins")
    (folder / "recipe.yaml").write_text("checkpoint: {keep: 1}\n")
    for step in (2, 4):
        save(folder, step, sample_states(step))
    return folder


def test_neither_a_saver_nor_prune_deletes_a_pinned_checkpoint(run):
    assert json.loads(ok("pin", run / "checkpoint-2", "--json")) == {"pinned": [2]}
    with AsyncSaver(run, keep=1, resumed_from=run / "checkpoint-4") as saver:
        saver.save(8, sample_states(8))
    assert steps(run) == [2, 4, 8], "4 is the one that it resumed from"
    pruned = json.loads(ok("prune", run, "--yes", "--json"))["checkpoints"]
    assert {one["step"]: one["why"] for one in pruned}[2] == ["pinned"]
    assert steps(run) == [2, 8]
    assert pin(run, 2, is_pinned=False) == set()
    ok("prune", run, "--yes")
    assert steps(run) == [8]


def test_only_a_checkpoint_can_be_pinned_and_a_broken_file_deletes_nothing(run):
    with pytest.raises(CheckpointError, match="has no checkpoint-3"):
        pin(run, 3, is_pinned=True)
    assert "expected a checkpoint" in refused("pin", run)
    for text in ("[1,", '{"a": 1}', "[true]"):
        (run / NAME).write_text(text)
        with pytest.raises(CheckpointError, match="repair or delete"):
            pinned(run)
    refused("prune", run, "--yes")
    (run / NAME).unlink()
