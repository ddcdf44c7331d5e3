"""Two traces of a step show the first operation whose bits differ; a report says which steps of a
run are equal to the bit."""

import json
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import surefoot
from project import Project
from project import surefoot as command
from surefoot.cli.main import main
from surefoot.errors import RunError
from surefoot.parallel.world import ALONE
from surefoot.run.replay import ReplayPlan, compute
from surefoot.run.trace import Operation, Trace, TraceReport
from surefoot.training.callback import TrainerState


def replayed(*words):
    done = CliRunner().invoke(main, ["replay", *map(str, words)])
    assert not done.exception or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("trace"), method={"lora": {"rank": 2}})
    project.sections["train"] |= {"max_steps": 8, "log_steps": 1}
    project.sections["checkpoint"] = {"save_steps": 4, "keep": None}
    project.write()
    surefoot.train(project.recipe)
    return project.run


@pytest.fixture(scope="module")
def trace(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "step-6.trace"
    code, said = replayed(run, "--step", 6, "--trace", path)
    assert (code, "2 logged lines: equal to the bit" in said) == (0, True), said
    return path


def test_two_traces_of_one_step_are_equal(run, trace):
    head, *rows = map(json.loads, trace.read_text().splitlines())
    assert head["surroundings"]["versions"]["torch"]
    operations = [Operation(*row) for row in rows]
    modules = {each.module for each in operations}
    assert any(name.endswith("layers.0.self_attn.q_proj") for name in modules)
    assert {each.is_backward for each in operations} == {True, False}
    assert {each.step for each in operations} == {6}
    names = {each.name.split(".")[1] for each in operations}
    assert not names & {"view", "t", "detach", "empty", "empty_like"}
    code, said = replayed(run, "--step", 6, "--compare", trace)
    assert code == 0, said
    assert f"{len(operations):,} operations: equal to the bit" in said


def test_the_operation_of_another_processor_is_named(run, trace, monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    words = ("replay", run, "--step", "6", "--compare", trace)
    code, said, errors = command(*words, popen=subprocess.Popen)
    assert code == 1, errors
    assert "with other bits; the first is aten." in said
    assert "(step 6, forward)" in said
    assert "ATEN_CPU_CAPABILITY: not set -> default" in said


def test_the_operation_of_other_code_is_named(run, trace, monkeypatch):
    """Only the output head is computed in other parts."""
    monkeypatch.setattr("surefoot.model.chunked_cross_entropy.CHUNK", 4)
    code, said = replayed(run, "--step", 6, "--compare", trace)
    assert code == 1
    [line] = [line for line in said.splitlines() if line.startswith("the operations are others")]
    assert " in base_model.model.lm_head" in line
    assert "(step 6, forward)" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", 5, "--compare", "{trace}"], "other steps; its own are --step 6 --to 6"),
        (["--step", 6, "--compare", "{run}/recipe.yaml"], "did `surefoot replay --trace` write it"),
        (["--step", 6, "--compare", "{run}/none"], "cannot read --compare"),
        (["--step", 6, "--trace", "{trace}"], "is there already; name a new file"),
        (["--step", 6, "--trace", "{run}/no/file"], "is in no folder that there is"),
        ([], "name the steps: --step N with or without --to M, or --every K"),
        (["--step", 6, "--every", 2], "name the steps"),
        (["--every", 2, "--to", 6], "are of --step alone"),
        (["--step", 6, "--report", "{run}/r.json"], "--report is of --every"),
        (["--every", 9], "has not come to step 9 yet"),
    ],
)
def test_words_that_do_not_fit_are_refused_before_anything_is_computed(words, message, run, trace):
    before = trace.read_bytes()
    code, said = replayed(run, *(str(word).format(run=run, trace=trace) for word in words))
    assert code == 2, said
    assert message in " ".join(said.split())
    assert "replayed from" not in said
    assert trace.read_bytes() == before


def test_a_report_says_which_steps_are_equal(run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    lines[5]["loss"] *= 1.01
    (copied / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    path = tmp_path / "report.json"
    code, said = replayed(copied, "--every", 3, "--report", path)
    assert code == 1
    assert "1 of 2 steps equal to the bit" in said
    third, sixth = json.loads(path.read_text())["segments"]
    assert (third["step"], third["equal"], third["computed_from"]) == (3, True, 1)
    assert (third["equal_lines"], sixth["equal_lines"]) == (3, 1)
    assert (sixth["step"], sixth["equal"], sixth["computed_from"]) == (6, False, 5)
    assert "step 6 is the first that differs" in "\n".join(sixth["said"])
    assert replayed(run, "--every", 4)[0] == 0


def test_steps_of_other_ranks_are_not_computed_on_these(run, tmp_path):
    """Such as by --every, of a run that has changed its ranks."""
    plan = ReplayPlan.of(run, 6, 6)
    [arm] = plan.arms
    launch = replace(arm.launch, facts={**arm.launch.facts, "ranks": 2})
    with pytest.raises(RunError, match="to 6 were computed on 2 ranks; start as many"):
        compute(replace(plan, arms=[replace(arm, launch=launch)]), tmp_path, ALONE)


def test_a_step_without_an_update_is_not_watched_twice():
    trace, state = Trace(1), TrainerState()
    for _ in range(2):  # the first led back to a checkpoint, so it had no end
        trace.on_step_begin(None, state, None)
    ones = torch.ones(2) + 1
    trace.on_step_end(None, state, None)
    ones += 1
    assert [each.name for each in trace.operations].count("aten.add.Tensor") == 1


def an(name, result="1", module="layer"):
    return Operation(1, module, name, False, result)


def test_operations_that_only_one_has_do_not_hide_those_that_differ():
    before = [an("a"), an("b"), an("c"), an("d")]
    now = [an("a"), an("new"), an("b"), an("c", "2"), an("d", "2")]
    report = TraceReport.of(before, now)
    assert (report.num_alike, report.num_differing, report.first) == (4, 2, (3, now[3]))
    assert report.parted == (before[1], now[1])
    assert not report.is_equal
    assert TraceReport.of(before, before).is_equal
    assert not TraceReport.of([], []).is_equal
