"""A recipe is understood once, and a run goes straight down from what it is made of."""

import ast
import dataclasses
import gc
import inspect
import re
import weakref

import pytest

from house import ROOT
from project import Project, model_folder
from source_trees import TREES
from surefoot.batch import Probe
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import Recipe, load
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


# What takes a recipe apart, beside ``recipe``, commands, and plugins, which make recipes.
READERS = {
    f"run/{name}" for name in ("folder", "from_python", "parts", "resolving", "training_run")
}
# The recipe of another launch, or of a fork, is made from that of the run, not understood.
READERS |= {"run/launch_recipe"}
READERS |= {"use/estimate/plan", "use/model_loading", "use/run_evaluation"}
IMPORTERS = {"recipe/prediction", "recipe/recipe_data", "use/_model_location", "use/estimate/plan"}
IMPORTERS |= {"use/model_loading", "use/run_evaluation"}
TAKERS = 20  # functions of ``run`` with a recipe as a parameter
SECTIONS = {field.name for field in dataclasses.fields(Recipe)}


def takes_recipe(function):
    """The parameters of ``function`` that are recipes."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return {a.arg for a in every if a.annotation and "Recipe" in words(a.annotation)}


def words(annotation):
    return re.findall(r"\w+", ast.unparse(annotation))


def functions_of(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def reads_sections(tree):
    """Whether a module reads a section of a recipe, by its usual names or by its type."""
    known = {"recipe", "_recipe", "written"}.union(*map(takes_recipe, functions_of(tree)))
    return any(
        {node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")}
        & known
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in SECTIONS
    )


def imports_recipe(tree):
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(alias.name == "Recipe" for node in imported for alias in node.names)


def modules(tell, outside):
    names = {str(file.relative_to(ROOT).with_suffix("")): tree for file, tree in TREES.items()}
    return {name for name, tree in names.items() if not name.startswith(outside) and tell(tree)}


def test_a_recipe_is_taken_apart_in_few_places():
    assert modules(reads_sections, ("recipe/", "cli/", "plugins/")) == READERS
    assert modules(imports_recipe, ("run/", "cli/", "plugins/")) == IMPORTERS
    taking = [
        f"{file.stem}.{function.name}"
        for file, tree in TREES.items()
        if file.parent == ROOT / "run"
        for function in functions_of(tree)
        if takes_recipe(function)
    ]
    assert len(taking) <= TAKERS, f"take what they need instead: {sorted(taking)}"


@pytest.mark.parametrize(
    "planted",
    [
        "def size(recipe): return recipe.train.seed",
        "class Loop:\n    def seed(self): return self._recipe.train.seed",
        "def size(mine: Recipe): return mine.data",
        "def size(mine: 'Recipe | None') -> int: return 1 if mine is None else mine.data.seed",
    ],
)
def test_what_reads_a_section_is_found(planted):
    assert reads_sections(ast.parse(planted))
    assert imports_recipe(ast.parse("def late():\n    from ..recipe.recipe import Recipe, load"))
    (function,) = functions_of(ast.parse("def plan(*, mine: Sequence[Recipe]): ..."))
    assert takes_recipe(function) == {"mine"}
    assert not reads_sections(ast.parse("def size(parts: RunParts): return parts.train.seed"))


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
