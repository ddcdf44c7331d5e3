import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from reference_pages import PAGES, RECIPE, cli_page, recipe_page, reference
from surefoot.cli.main import listed, main
from surefoot.methods import METHODS
from surefoot.optim import OPTIMIZERS
from surefoot.recipe.recipe import Recipe, load
from surefoot.schema import paths, settings
from surefoot.stages import STAGES

FOLDER = Path(__file__).parent.parent.parent / "docs" / "reference"


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_pages_are_what_the_code_says(name):
    committed = (FOLDER / name).read_text(encoding="utf-8")
    assert committed == PAGES[name](), "the page is stale: run `make docs` and commit it"


def test_every_section_variant_and_setting_is_on_the_page():
    page = recipe_page()
    for way in paths(Recipe):
        assert f"`{way[-1]}`" in page or f"`{way[0]}: {way[-1]}`" in page, way
    for name, choices in (("method", METHODS), ("stage", STAGES), ("optim", OPTIMIZERS)):
        for variant in choices:
            assert f"### `{name}: {variant}`" in page


def test_every_setting_of_every_section_is_documented():
    documented = list(sections())
    for cls in documented:
        assert cls.__doc__, cls
        undocumented = [s.name for s in settings(cls).values() if not s.doc]
        assert not undocumented, f"{cls.__name__}: write what {undocumented} are for"


def sections():
    for setting in settings(Recipe).values():
        for cls in [setting.section] if setting.section else setting.choices.values():
            yield cls
            yield from filter(None, (inner.section for inner in settings(cls).values()))
    yield Recipe


def test_every_command_is_on_the_page():
    page = cli_page()
    for name in listed():
        assert f"## `surefoot {name}`" in page
    assert "## `surefoot recipe show`" in page


def test_what_a_heading_says_can_be_typed():
    """`surefoot export PATH OUT verify` could not."""
    page = cli_page()
    for name in re.findall(r"^## `surefoot (.+)`$", page, re.MULTILINE):
        shown = CliRunner().invoke(main, [*name.split(), "--help"], prog_name="surefoot")
        assert shown.output.startswith(f"Usage: surefoot {name}"), name


def test_the_example_on_the_page_is_a_recipe(tmp_path):
    example = RECIPE.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "r.yaml").write_text(example)
    assert load(tmp_path / "r.yaml").method == METHODS["lora"](rank=16)


def test_the_pages_are_written_into_a_folder(tmp_path):
    result = CliRunner().invoke(reference, [str(tmp_path / "new")])
    assert result.exit_code == 0
    written = {file.name: file.read_text() for file in (tmp_path / "new").iterdir()}
    assert written == {name: page() for name, page in PAGES.items()}
