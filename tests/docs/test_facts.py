"""What the pages list is what there is: settings, events, fields, figures."""

import json
from dataclasses import fields

import pytest
from pages import ROOT

import surefoot
from project import Project, metrics
from surefoot.run.folder import FREE
from surefoot.training import Context, TrainerCallback, TrainerControl, TrainerState

HOW_TO = ROOT / "docs" / "how-to"
INNER = {"pending", "interval_loss", "interval_weight"}  # of the loop's own use
INNER |= {"interval_metrics", "interval_figures", "interval_windows"}


@pytest.mark.parametrize("setting", FREE)
def test_every_setting_that_may_change_is_on_the_page(setting):
    page = (HOW_TO / "resume.md").read_text()
    assert f"`{setting}`" in page or f"`{setting}…`" in page


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
