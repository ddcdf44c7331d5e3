"""The table of what depends on the device says what the code does, and claims no unmade figure."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from surefoot.model.attention.kernels import candidates
from surefoot.recipe.recipe import Recipe
from surefoot.run.machine import device_choices
from surefoot.run.machine.device_choices import CHOICES, KINDS, NOT_MEASURED
from surefoot.schema import dotted
from surefoot.schema.setting import paths

ROOT = Path(__file__).parents[2]
BY_NAME = {choice.name: choice for choice in CHOICES}


def test_no_figure_is_of_a_gpu_while_the_results_have_none():
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    if "Not measured yet: no GPU was at hand." in results:
        assert {choice.cuda.figure for choice in CHOICES} == {NOT_MEASURED}


def test_every_setting_is_one_of_the_recipe():
    known = {dotted(path) for path in paths(Recipe)}
    named = {choice.setting for choice in CHOICES} - {""}
    assert named <= known, named - known


def test_names_are_unique_and_every_choice_has_a_reason():
    assert len(BY_NAME) == len(CHOICES)
    for choice in CHOICES:
        for kind in KINDS:
            assert choice.on(kind).used and choice.on(kind).why


def test_the_figure_that_decides_is_a_case_of_the_kit():
    sys.path.append(str(ROOT / "benchmarks" / "gpu"))
    cases = import_module("cases")
    for choice in CHOICES:
        for clause in filter(None, choice.decides.split("; ")):
            part, _, rest = clause.partition(": ")
            named = [name for name in re.findall("`(.*?)`", rest) if " " in name]
            named = [name for name in named if not name.startswith(("train.", "model."))]
            if part == "correct":
                assert (ROOT / rest.strip("`")).exists()
                continue
            known = {case.name for case in cases.CASES[part]()}
            assert set(named) <= known, (choice.name, named)


def test_the_order_of_attention_kernels_is_that_of_the_code():
    used = BY_NAME["packed attention"].cuda.used
    places = [used.index(name) for name in [*candidates(torch.device("cuda")), "sdpa"]]
    assert places == sorted(places)
    assert device_choices._attention(torch.device("cuda")).endswith(used[-32:])


@pytest.mark.parametrize("name", [c.name for c in CHOICES if c.here])
def test_what_the_code_uses_here_is_what_the_table_says(name):
    where = device_choices.device()
    choice = BY_NAME[name]
    used = choice.here(where)
    words = set(re.findall(r"\w+", used))
    assert words <= set(re.findall(r"\w+", choice.on(where.type).used)), used


def test_everything_that_is_used_here_is_told():
    assert device_choices.here().keys() == BY_NAME.keys()
