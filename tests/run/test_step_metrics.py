"""What a run records of each step and each row: it is what was trained, a resume repeats it, and
commands name rows by it."""

import errno
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import surefoot
from project import Project, assert_same, final_weights, in_child, losses, start
from stage_data import DATASETS, SETTINGS, written
from surefoot.batch import Loss
from surefoot.cli.main import main
from surefoot.parallel.world import ALONE
from surefoot.stages import STAGES
from surefoot.training.callbacks.step_files import ROWS, STEPS, StepFiles, read_step_file

PROOF = pytest.mark.proof
PLANTED = 13  # a row
GARBAGE = "xq zv kk 77 qq, said zz the vv."


def read_steps(run):
    return read_step_file(run, STEPS)


def read_rows(run):
    return read_step_file(run, ROWS)


def called(*words):
    done = CliRunner().invoke(main, list(map(str, words)))
    assert not done.exception or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


def made(folder, max_steps=8, **sections):
    project = Project(folder, **{"checkpoint": {"save_steps": 4, "keep": None}, **sections})
    project.sections["train"] |= {"max_steps": max_steps}
    project.write()
    return project


def trained(folder, max_steps=8, **sections):
    project = made(folder, max_steps, **sections)
    surefoot.train(project.recipe)
    return project


def of_stage(stage):
    settings = written(stage) if "reward" in SETTINGS.get(stage, {}) else None
    data = {"datasets": [DATASETS.get(stage, "sums")]}
    return {"stage": settings or {stage: SETTINGS.get(stage, {})}, "data": data}


def files_of(run):
    return {name: (run / name).read_bytes() for name in (STEPS, ROWS)}


IN_EACH = ("sft", "dpo", "grpo")


@pytest.mark.parametrize(
    "stage", [s if s in IN_EACH else pytest.param(s, marks=PROOF) for s in STAGES.own]
)
def test_each_stage_records_its_steps_and_rows(stage, tmp_path):
    run = trained(tmp_path, **of_stage(stage)).run
    steps, rows = read_step_file(run, STEPS), read_step_file(run, ROWS)
    means = steps["loss"] / steps["weight"]
    assert dict(enumerate(means.tolist(), 1)) == losses(run)
    assert steps.nbytes == 24 * 8
    assert np.isfinite(rows).all()
    if STAGES.own[stage].max_new_tokens == 0:
        assert len(rows) == 32
        firsts = list(range(0, 32, 4))
        assert steps["first_row"].tolist() == firsts
    code, said = called("rows", run)
    assert code == 0, said
    assert f"of each the {STAGES.own[stage].row_metric[0]}" in said
    assert f"{DATASETS.get(stage, 'sums')}.jsonl: line " in said


@pytest.mark.parametrize("packing", [True, False])
def test_the_rows_of_a_step_make_its_loss(packing, tmp_path):
    run = trained(tmp_path, data={"packing": packing}).run
    code, said = called("rows", run, "--step", 3)
    assert code == 0, said
    shown = re.findall(r"line (\d+): loss ([\d.]+) .*\n.*\[\[It is", said)
    values = [float(value) for _, value in shown]
    assert values == sorted(values, reverse=True)
    assert len({line for line, _ in shown}) == 4
    rows = read_rows(run)[8:12]  # each response has five tokens
    assert np.sort(rows)[::-1] == pytest.approx(values, rel=1e-3)
    assert np.mean(rows) == pytest.approx(losses(run)[3], rel=1e-6)


def test_recording_rows_changes_no_bit(tmp_path, monkeypatch):
    with_rows = trained(tmp_path / "with").run
    monkeypatch.setattr("surefoot.training.losses.means_of_rows", lambda values, batch: None)
    monkeypatch.setattr(StepFiles, "flush", lambda self: None)
    without = trained(tmp_path / "without").run
    assert not (without / ROWS).exists()
    assert losses(with_rows) == losses(without)
    assert_same(final_weights(with_rows), final_weights(without))


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_a_killed_and_resumed_run_has_the_files_of_one_that_was_not(stage, tmp_path):
    sections = of_stage(stage)
    if stage == "grpo":  # two steps a window, and a checkpoint inside one
        sections["stage"]["grpo"] |= {"passes": 2}
        sections["checkpoint"] = {"save_steps": 3, "keep": None}
    whole = trained(tmp_path / "whole", **sections).run
    project = made(tmp_path / "killed", **sections)

    def is_late():
        return len(read_steps(project.run)) >= 6

    in_child(lambda: surefoot.train(project.recipe), kill_when=is_late)
    with (project.run / ROWS).open("ab") as file:
        file.write(b"rest")  # of a write that was under way
    surefoot.train(project.recipe)
    assert files_of(project.run) == files_of(whole)


def test_a_row_whose_loss_is_nan_is_infinite_and_one_that_stands_for_none_is_no_row(tmp_path):
    files = StepFiles(tmp_path, ALONE)
    values = torch.tensor([1.0, torch.nan]), torch.tensor([3.0, torch.nan]), torch.tensor([9.0])
    groups = np.array([0, 2]), np.array([1]), np.array([], int)
    files.add(2, groups, SimpleNamespace(loss=4.0, grad_norm=1.0, weight=2.0, rows=values))
    files.flush()
    assert read_rows(tmp_path).tolist()[2:] == [1.0, 3.0, np.inf]
    assert read_steps(tmp_path).tolist() == [(4.0, 1.0, 2.0, 2)]


def test_a_disk_that_cannot_hold_the_files_stops_nothing(tmp_path, caplog, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("surefoot.training.callbacks.step_files._write", full)
    run = trained(tmp_path).run
    assert len(losses(run)) == 8
    assert caplog.text.count(f"{STEPS} and {ROWS}: not written") == 1


@PROOF
def test_a_fork_has_the_files_of_its_run(tmp_path):
    whole = trained(tmp_path).run
    code, said = called("fork", whole, tmp_path / "fork", "--step", 6)
    assert code == 0, said
    surefoot.train(tmp_path / "fork")
    assert files_of(tmp_path / "fork") == files_of(whole)


def test_what_a_power_failure_took_is_unknown(tmp_path):
    project = made(tmp_path)
    project.sections["train"]["max_steps"] = 4
    project.write()
    surefoot.train(project.recipe)
    for name, size in ((STEPS, 3 * 24 - 5), (ROWS, 9)):
        (project.run / name).write_bytes((project.run / name).read_bytes()[:size])
    project.sections["train"]["max_steps"] = 6
    project.write()
    surefoot.train(project.recipe)
    steps, rows = read_steps(project.run), read_rows(project.run)
    assert np.isnan(steps["loss"]).tolist() == [False, False, True, True, False, False]
    assert np.isnan(rows).tolist() == [False] * 2 + [True] * 14 + [False] * 8
    assert "nothing was recorded of step 3" in called("rows", project.run, "--step", 3)[1]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A run of four epochs, one of whose rows is garbage."""
    project = made(tmp_path_factory.mktemp("planted"), 24, optim={"adamw": {"learning_rate": 0.01}})
    path = project.folder / "data" / "sums.jsonl"
    rows = path.read_text().splitlines()
    rows[PLANTED] = json.dumps({**json.loads(rows[PLANTED]), "output": GARBAGE})
    path.write_text("\n".join(rows) + "\n")
    surefoot.train(project.recipe)
    return project


def first_row(said, after):
    lines = said[said.index(after) :].splitlines()
    return f"{lines[1]}\n{lines[2]}"


def test_a_planted_row_is_first(planted):
    code, said = called("rows", planted.run)
    assert code == 0, said
    row = first_row(said, "furthest from the rows around them")
    assert f"sums.jsonl: line {PLANTED + 1}: loss " in row
    assert f"[[{GARBAGE}" in row
    steps = row.partition("(step ")[2].partition(")")[0].split(", ")
    assert len(steps) == 4
    code, said = called("rows", planted.run, "--step", steps[-1])
    assert f"line {PLANTED + 1}: loss " in first_row(said, "the worst first")
    code, said = called("replay", planted.run, "--step", steps[-1], "--rows")
    assert code == 0, said
    assert "logged line: equal to the bit" in said or "logged lines: equal to the bit" in said
    assert f"line {PLANTED + 1}: loss " in first_row(said, "each run alone")
    assert "their shares of the gradient to 1\n" in said


def test_measuring_rows_leaves_the_steps_behind_it_as_they_were(planted):
    code, said = called("replay", planted.run, "--step", 6, "--to", 8, "--rows")
    assert code == 0, said
    assert "checkpoint-8: " in said
    assert "tensors: equal to the bit" in said


@pytest.mark.parametrize("stage", ["dpo", pytest.param("kto", marks=PROOF), "grpo"])
def test_shares_of_the_gradient_add_up(stage, tmp_path):
    run = trained(tmp_path, **of_stage(stage), method={"lora": {"rank": 2}}).run
    code, said = called("replay", run, "--step", 6, "--rows")
    assert code == 0, said
    total = float(said.partition("their shares of the gradient to ")[2].split()[0])
    assert total == pytest.approx(1.0, abs=2e-3)


def test_bad_input_is_said(planted, tmp_path):
    code, said = called("rows", planted.run, "--step", 25)
    assert (code, "is at step 24 (as far as it has logged), so there is no step 25" in said) == (
        2,
        True,
    )
    assert "no such folder" in called("rows", tmp_path / "none")[1]
    copy = shutil.copytree(planted.run, tmp_path / "run")
    (copy / ROWS).unlink()
    assert "the loss of this run has no numbers of rows" in called("rows", copy)[1]
    (copy / STEPS).unlink()
    assert "has no metrics of its steps and rows" in called("rows", copy)[1]
    rows = planted.folder / "data" / "sums.jsonl"
    text = rows.read_text()
    rows.write_text(text.replace("It is 3.", "It is 4.", 1))
    try:
        code, said = called("rows", planted.run)
    finally:
        rows.write_text(text)
    assert code == 2
    assert "its rows have changed since it was trained: row " in said


def test_a_loss_from_python_may_give_rows_or_none(tmp_path):
    def loss(outputs, batch):
        return Loss(-outputs.logps.sum(), (batch.labels[:, 1:] != -100).sum())

    project = made(tmp_path)
    surefoot.train(project.recipe, parts=surefoot.StageParts(loss=loss))
    assert len(read_steps(project.run)) == 8
    assert len(read_rows(project.run)) == 0


@PROOF
@pytest.mark.parametrize(
    "mesh", [{"num_processes": 2}, *({axis: 2} for axis in ("dp_shard", "tp", "pp"))], ids=str
)
def test_two_ranks_record_what_one_does(mesh, tmp_path):
    one = trained(tmp_path / "one").run
    project = made(tmp_path / "two", parallel={"num_processes": 2, **mesh})
    process = start("train", project.recipe)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert np.allclose(read_rows(one), read_rows(project.run), rtol=1e-4)
    assert (read_steps(one)["first_row"] == read_steps(project.run)["first_row"]).all()
    process = start("replay", project.run, "--step", 6, "--rows")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "was computed on 2 ranks, and the gradient of each row is measured on one" in err


@PROOF
def test_a_streamed_row_is_its_number_in_the_stream(tmp_path):
    run = trained(tmp_path, data={"streaming": True, "buffer_size": 8}).run
    code, said = called("rows", run, "--step", 3)
    assert code == 0, said
    assert said.count("sums.jsonl: line ") == 4
