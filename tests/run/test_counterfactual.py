"""Steps computed without a row: nothing changes where the row is not, and where it is, the step is
that of a run whose row has no labels."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

import surefoot
from project import Project, start
from stage_data import DATASETS, SETTINGS, written
from surefoot.cli.main import main
from surefoot.parallel.world import ALONE
from surefoot.run.counterfactual import compute_both
from surefoot.run.replay import ReplayPlan
from surefoot.training.callbacks.step_files import ROWS, STEPS, read_step_file

PROOF = pytest.mark.proof
ROW = 13  # whose text is another one in the second run


def called(*words):
    done = CliRunner().invoke(main, list(map(str, words)))
    assert not done.exception or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


def made(folder, **sections):
    data = {"eval_datasets": ["sums"], **sections.pop("data", {})}
    project = Project(
        folder, **{"checkpoint": {"save_steps": 4, "keep": None}, "data": data, **sections}
    )
    project.sections["train"] |= {"max_steps": 8}
    project.write()
    return project


def trained(folder, **sections):
    project = made(folder, **sections)
    surefoot.train(project.recipe)
    return project


def places(run, step):
    """The rows of a step, as ``surefoot rows`` names them."""
    code, said = called("rows", run, "--step", step)
    assert code == 0, said
    return re.findall(r"^  (\S.*?: line \d+): ", said, flags=re.M)


def both(run, steps, rows, folder):
    folder.mkdir()
    return compute_both(run, steps, rows, folder, ALONE)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"), method={"lora": {"rank": 2, "dropout": 0.1}})


def test_a_row_that_the_steps_do_not_have_changes_exactly_nothing(project, tmp_path):
    row = places(project.run, 3)[0]
    found = both(project.run, (6, 8), [row], tmp_path / "scratch")
    assert (found.steps, found.before.losses.keys()) == ([], {6, 7, 8})
    assert found.before == found.without
    assert found.before.evaluation["eval_loss"] > 0
    code, said = called("replay", project.run, "--step", 6, "--to", 8, "--without", row)
    assert code == 0, said
    assert f"without {row}: steps 6 to 8 do not have it" in said
    assert said.count(" +0.00e+00 ") == 3
    assert re.search(r"eval_loss after step 8: (\S+), \1, \+0.00e\+00", said)


def test_a_step_without_a_row_is_the_mean_of_the_others_and_later_ones_follow(project, tmp_path):
    row = places(project.run, 6)[0]  # the worst of four
    found = both(project.run, (6, 8), [row.replace(": line ", ":")], tmp_path / "scratch")
    assert found.steps == [6]
    assert found.replay.is_equal
    assert found.replay.plan.start_step == 5
    steps, rows = (read_step_file(project.run, name) for name in (STEPS, ROWS))
    others = np.sort(rows[20:24])[:3]  # all have as many trained tokens
    assert found.before.losses[6] == pytest.approx(np.mean(others), rel=1e-6)
    assert found.without.losses[6] == found.before.losses[6]  # the same weights
    assert found.before.norms[6] == steps["grad_norm"][5]
    assert found.without.norms[6] != found.before.norms[6]
    assert all(found.without.losses[step] != found.before.losses[step] for step in (7, 8))
    assert found.without.evaluation["eval_loss"] != found.before.evaluation["eval_loss"]


def test_what_the_row_was_does_not_matter_without_it(tmp_path):
    """Two runs that differ in the text and the length of one row."""
    projects = [made(tmp_path / name, data={"packing": True}) for name in ("one", "two")]
    path = projects[1].folder / "data" / "sums.jsonl"
    lines = path.read_text().splitlines()
    lines[ROW] = json.dumps({**json.loads(lines[ROW]), "output": "zv xq kk, zv xq kk qq."})
    path.write_text("\n".join(lines) + "\n")
    found = []
    for name, project in zip(("a", "b"), projects, strict=True):
        held_out = project.folder / "data" / "held_out.jsonl"
        held_out.write_text("\n".join(lines[:6]) + "\n")
        project.sections["data"]["eval_datasets"] = ["data/held_out.jsonl"]
        project.write()
        surefoot.train(project.recipe)
        trained_on = {row for step in range(1, 9) for row in places(project.run, step)}
        (row,) = (each for each in trained_on if each.endswith(f": line {ROW + 1}"))
        found.append(both(project.run, (1, 8), [row], tmp_path / name))
    one, two = found
    assert one.before.losses != two.before.losses
    assert one.steps == two.steps
    assert one.without.losses == pytest.approx(two.without.losses, rel=1e-5)
    assert one.without.evaluation == pytest.approx(two.without.evaluation, rel=1e-5)


def of_stage(stage):
    given = {"sft_weight": 0.5, "teacher": "model"} if stage == "distill" else {}
    settings = written(stage) if "reward" in SETTINGS.get(stage, {}) else {stage: given}
    name = DATASETS.get(stage, "sums")
    return {"stage": settings, "data": {"datasets": [name], "eval_datasets": [name]}}


@pytest.mark.parametrize(
    "stage", ["dpo", *(pytest.param(name, marks=PROOF) for name in ("pt", "rm", "kto", "distill"))]
)
def test_each_stage_leaves_a_row_out_with_its_weight(stage, tmp_path):
    run = trained(tmp_path / "run", **of_stage(stage), method="full").run
    row = places(run, 7)[0]
    found = both(run, (7, 8), [row], tmp_path / "scratch")
    assert found.steps == [7]
    assert found.without.losses[7] == pytest.approx(found.before.losses[7], rel=1e-5)
    weights = [
        read_step_file(tmp_path / "scratch" / arm, STEPS)["weight"][6]
        for arm in ("before", "without")
    ]
    whole = read_step_file(run, STEPS)["weight"][6]
    assert weights[0] == whole > weights[1] > 0
    if stage in ("dpo", "rm", "kto"):
        assert weights == [4, 3]


def test_what_cannot_be_computed_is_refused(project, tmp_path):
    code, said = called("replay", project.run, "--step", 6, "--without", "sums.jsonl:7")
    assert code == 2
    assert "--without sums.jsonl:7: no row that is trained on has this place" in said
    row = places(project.run, 6)[0]
    code, said = called("replay", project.run, "--every", 4, "--without", row)
    assert (code, "are of --step alone" in said) == (2, True)
    code, said = called("replay", project.run, "--step", 6, "--rows", "--without", row)
    assert (code, "--without computes the steps twice" in said) == (2, True)
    sampled = trained(tmp_path, **of_stage("grpo")).run
    row = places(sampled, 2)[0]
    code, said = called("replay", sampled, "--step", 2, "--without", row)
    assert code == 2
    assert "are sampled, and sampled differently once a weight is another one" in said


def test_the_run_is_only_read_and_nothing_is_left_beside_it(project):
    before = sorted((p, p.stat().st_mtime_ns, p.stat().st_nlink) for p in project.run.rglob("*"))
    row = places(project.run, 6)[0]
    assert called("replay", project.run, "--step", 6, "--without", row)[0] == 0
    assert before == sorted(
        (p, p.stat().st_mtime_ns, p.stat().st_nlink) for p in project.run.rglob("*")
    )
    assert not [p for p in project.folder.iterdir() if "replay" in p.name]
    assert ReplayPlan.of(project.run, 6, 6).start_step == 4


@PROOF
@pytest.mark.parametrize(
    "mesh", [{"num_processes": 2}, *({axis: 2} for axis in ("dp_shard", "tp", "pp"))], ids=str
)
def test_two_ranks_find_what_one_does(mesh, tmp_path):
    shown = []
    for name, parallel in (("one", {}), ("two", {"num_processes": 2, **mesh})):
        project = made(tmp_path / name, parallel=parallel)
        process = start("train", project.recipe)
        assert process.wait(timeout=300) == 0, process.stderr.read()
        row = places(project.run, 6)[0]
        words = ("--step", 6, "--to", 8, "--without", row)
        process = start("replay", project.run, *words)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        shown.append([float(x) for x in re.findall(r"^ +[678] +(?:[\d.]+) +([\d.]+)", out, re.M)])
    assert len(shown[0]) == 3
    assert shown[0] == pytest.approx(shown[1], rel=1e-3)


@PROOF
def test_a_row_of_a_stream_is_left_out(tmp_path):
    run = trained(tmp_path / "run", data={"streaming": True, "buffer_size": 8}).run
    row = places(run, 6)[0]
    found = both(run, (6, 7), [row], tmp_path / "scratch")
    assert found.steps == [6]
    assert found.without.losses[6] == found.before.losses[6]
