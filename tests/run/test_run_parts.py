"""A recipe is understood once, and a run goes straight down from what it is made of."""

import ast
import dataclasses
import gc
import inspect
import weakref

import pytest

from project import Project, model_folder
from surefoot.batch import Probe
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import load
from surefoot.run import assembly, models
from surefoot.run.parts import RunParts

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def test_build_is_read_from_top_to_bottom():
    (tree,) = ast.parse(inspect.getsource(assembly.build)).body
    assert tree.end_lineno <= 50
    inner = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS) and node is not tree]
    assert not inner, "what a function decides later is not read here"
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call)
              if isinstance(node.func, ast.Name)}  # fmt: skip
    assert "partial" not in called
    handed = {name.id for call in ast.walk(tree) if isinstance(call, ast.Call)
              for name in call.args if isinstance(name, ast.Name)}  # fmt: skip
    assert not handed & called, "no function is handed down"


def test_parts_are_of_the_recipe_that_is_written_and_do_not_change(tmp_path):
    project = Project(tmp_path)
    parts = RunParts.of(load(project.recipe), None, ALONE)
    assert parts.text == RunParts.of(load(project.recipe), None, ALONE).text
    with pytest.raises(dataclasses.FrozenInstanceError):
        parts.train = None
    longer = parts.for_rows(99)
    assert (longer.models.policy.options.longest, parts.models.policy.options.longest) == (99, 0)


def test_a_reference_is_proven_on_the_same_packed_rows_as_the_policy(tmp_path):
    """In some models the tokens of a picture see each other, which only a picture shows."""
    project = Project(tmp_path, stage="dpo", data={"datasets": ["pairs"]})
    probe = Probe(None, [])
    parts = RunParts.of(load(project.recipe), None, ALONE).for_rows(9, [probe])
    options = parts.models.auxiliary("reference").options
    assert (options.probes, options.longest) == ([probe], 9)


def test_a_reference_is_gone_from_memory_when_the_policy_is_opened(tmp_path, monkeypatch):
    """A name that keeps it costs half as much memory again; no other test noticed one."""
    other = tmp_path / "reference"
    model_folder(other)
    project = Project(
        tmp_path,
        stage={"dpo": {"reference": str(other)}},
        data={"datasets": ["pairs"], "cache_dir": str(tmp_path / "cache")},
    )
    opened, alive = [], []

    def opening(*arguments, open_network=models.open_network, **options):
        network = open_network(*arguments, **options)
        opened.append(weakref.ref(network.module))
        return network

    def asked(*arguments, open_policy=assembly.open_policy, **options):
        gc.collect()
        alive.extend(reference() for reference in opened)
        return open_policy(*arguments, **options)

    monkeypatch.setattr(models, "open_network", opening)
    monkeypatch.setattr(assembly, "open_policy", asked)
    assembly.build(load(project.recipe)).saver.close()
    assert alive == [None]
