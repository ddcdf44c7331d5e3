"""What the pages list is what there is: settings, events, fields, figures."""

import json
import re
from dataclasses import fields
from importlib import import_module

import pytest
import torch
from pages import ROOT

import surefoot
from project import Project, metrics
from surefoot.model.packed_kernels import candidates
from surefoot.recipe.recipe import Recipe
from surefoot.schema import dotted, paths, setting_at
from surefoot.training import Context, TrainerCallback, TrainerControl, TrainerState

HOW_TO = ROOT / "docs" / "how-to"
INNER = {"pending", "interval_loss", "interval_weight"}  # of the loop's own use
INNER |= {"interval_metrics", "interval_figures", "interval_windows"}


MAY_CHANGE = [path for path in paths(Recipe) if (at := setting_at(Recipe, path)) and at.may_change]


@pytest.mark.parametrize("path", MAY_CHANGE, ids=dotted)
def test_every_setting_that_may_change_is_on_the_page(path):
    page, setting = (HOW_TO / "resume.md").read_text(), dotted(path)
    beginnings = re.findall(r"`([a-z._]+)…`", page)
    assert f"`{setting}`" in page or setting.startswith(tuple(beginnings))


def test_every_event_and_field_is_on_the_page_of_callbacks():
    page = (HOW_TO / "callbacks.md").read_text()
    events = {name for name in vars(TrainerCallback) if name.startswith("on_")}
    seen = {f.name for cls in (Context, TrainerState, TrainerControl) for f in fields(cls)}
    for word in events | seen - INNER:
        assert f"`{word}`" in page, word


def test_every_figure_is_on_the_page_of_metrics(tmp_path):
    page = (HOW_TO / "metrics.md").read_text()
    sections = {"data": {"val_size": 4}, "train": {"max_steps": 2, "eval_steps": 1}}
    project = Project(tmp_path, **sections)
    surefoot.train(project.recipe)
    results = json.loads((project.run / "all_results.json").read_text())
    for name in {name for line in [*metrics(project.run), results] for name in line}:
        assert f"`{name}`" in page, name
    for file in project.run.iterdir():
        assert file.name == ".lock" or file.is_dir() or f"`{file.name}`" in page


def devices():
    """The rows of the tables of ``docs/devices.md``: that of CPUs, and that of GPUs."""
    lines = [
        line[2:-2].split(" | ") for line in (ROOT / "docs/devices.md").read_text().splitlines()
    ]
    rows = [line for line in lines if len(line) > 3 and line[0] != "what"]
    return [row for row in rows if len(row) == 5], [row for row in rows if len(row) == 6]


def test_the_page_of_devices_names_the_same_choices_settings_and_reasons_for_both():
    cpu, gpu = devices()
    assert [row[:2] for row in cpu] == [row[:2] for row in gpu]
    assert len({row[0] for row in cpu}) == len(cpu) > 10
    known = {".".join(path) for path in paths(Recipe)}
    assert {row[1].strip("`") for row in cpu} - {""} <= known
    assert all(row[2] and row[3] and row[4] for row in cpu + gpu)


def test_the_page_of_devices_claims_no_figure_of_a_gpu_before_there_is_one():
    if "Not measured yet: no GPU was at hand." in (ROOT / "benchmarks/RESULTS.md").read_text():
        assert {row[4] for row in devices()[1]} == {"not measured"}


def test_the_page_of_devices_has_the_attention_kernels_in_the_order_of_the_code():
    (used,) = (row[2] for row in devices()[1] if row[0] == "packed attention")
    places = [used.index(name) for name in [*candidates(torch.device("cuda")), "sdpa"]]
    assert places == sorted(places)


def test_the_figures_that_would_decide_are_cases_of_the_gpu_kit(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu")
    cases = import_module("cases")
    for clause in (c for row in devices()[1] for c in row[5].strip().split("; ") if c):
        part, _, rest = clause.partition(": ")
        if part == "correct":
            assert (ROOT / rest.strip("`")).exists()
            continue
        named = {name for name in re.findall("`(.*?)`", rest) if " " in name}
        named -= {"train.deterministic: false"}  # a setting
        assert named <= {case.name for case in cases.CASES[part]()}
