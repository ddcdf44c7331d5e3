"""The stage that CONTRIBUTING.md adds is a stage: in its dict it trains, and resumes."""

import importlib
import sys
from dataclasses import replace

import pytest
from pages import ROOT, blocks

import surefoot
from project import Project, losses
from surefoot.recipe.recipe import load
from surefoot.stages import STAGES


@pytest.fixture
def confident(tmp_path, monkeypatch):
    (block,) = blocks(ROOT / "CONTRIBUTING.md", "python")
    (tmp_path / "confident.py").write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "confident", None)
    del sys.modules["confident"]  # as before the test, and again after it
    module = importlib.import_module("confident")
    monkeypatch.setitem(STAGES.own, "confident", module.Confident)
    return module.Confident


@pytest.mark.proof
def test_the_new_stage_trains_and_its_setting_matters(confident, tmp_path):
    recipe = load(Project(tmp_path / "project", train={"max_steps": 3}).recipe)
    first = {}
    for weight in (0.0, 0.5):
        run = tmp_path / str(weight)
        train = replace(recipe.train, output_dir=run)
        surefoot.train(replace(recipe, stage=confident(weight=weight), train=train))
        first[weight] = losses(run)[1]
    surefoot.train(replace(recipe, train=replace(recipe.train, output_dir=tmp_path / "sft")))
    assert first[0.0] == losses(tmp_path / "sft")[1] < first[0.5]
