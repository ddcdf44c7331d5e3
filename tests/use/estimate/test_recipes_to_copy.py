"""examples/recipes: each is read and planned with the configuration of its model, and the page and
the recipe itself say what ``surefoot plan`` says."""

import re
import sys
from pathlib import Path

import pytest

from each import each
from surefoot.recipe.recipe import load

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path.stem for path in (ROOT / "examples" / "recipes").glob("*.yaml"))
PAGE = ROOT / "docs" / "how-to" / "recipes.md"
KINDS = ("full", "lora", "qlora", "dpo", "grpo")
sys.path.insert(0, str(ROOT / "benchmarks"))


def rows():
    """The rows of the table of figures, by the recipe that each links to."""
    lines = PAGE.read_text("utf-8").splitlines()
    linked = {re.search(r"recipes/([\w-]+)\.yaml\) \|", line): line for line in lines}
    return {match[1]: line for match, line in linked.items() if match}


def test_every_model_has_every_kind_of_recipe():
    made = {f"{model}-{kind}" for model in ("qwen3", "llama", "gemma", "gpt-oss") for kind in KINDS}
    assert set(RECIPES) == made - {"gpt-oss-qlora"}  # the page says why
    assert sorted(rows()) == RECIPES


@each(RECIPES, str)
def test_a_recipe_is_short_and_says_what_the_page_says(name):
    text = (ROOT / "examples" / "recipes" / f"{name}.yaml").read_text("utf-8")
    cells = [cell.strip() for cell in rows()[name].split("|")]
    gpus, memory = cells[5], cells[6]
    assert f"# Estimated memory of {'each of ' if gpus != '1' else ''}{gpus} GPU" in text
    assert f": {memory}" in text
    assert len(text.splitlines()) <= 25


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_planned_with_one_layer_and_few_words(name, tmp_path):
    from recipe_table import planned

    plan = planned(name, tmp_path, num_tokens=16, num_hidden_layers=1, vocab_size=512)
    recipe = load(ROOT / "examples" / "recipes" / f"{name}.yaml")
    assert plan.machine.num_processes == (recipe.parallel.num_processes or 1)
    assert 0 < plan.trained_parameters <= plan.parameters
    assert (plan.trained_parameters < plan.parameters / 2) == (not name.endswith("-full"))
    assert plan.total > plan.memory.weights > 0
    assert plan.not_known is None


@pytest.mark.proof
@pytest.mark.parametrize("name", RECIPES)
def test_the_figures_of_the_page_are_those_of_plan(name):
    from recipe_table import row_of

    assert rows()[name] == row_of(name)
