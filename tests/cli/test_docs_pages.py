import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from commands import refused
from reference_pages import PAGES, RECIPE, cli_page, names_page, recipe_page, reference
from surefoot.cli.main import listed, main
from surefoot.methods import METHODS
from surefoot.optim import OPTIMIZERS
from surefoot.plugins.migrate.arguments import GROUPS, TRAINERS
from surefoot.plugins.mindspore import recipe as mindspore
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


NAMES = {
    "per_device_train_batch_size": "train.micro_batch_size",
    "max_seq_length": "data.cutoff_len",
    "lora_alpha": "method.lora.alpha",
    "gradient_accumulation_steps": "train.global_batch_size",
    "r": "method.lora.rank",
    "lora_r": "method.lora.rank",
    "sequence_len": "data.cutoff_len",
    "num_generations": "stage.grpo.group_size",
    "runner_config.epochs": "train.num_epochs",
    "load_in_4bit": "model.quantization_bit",
}


def test_settings_are_found_by_the_names_of_other_programs():
    rows = [line.split(" | ") for line in names_page().splitlines() if line.startswith("| `")]
    for name, setting in NAMES.items():
        assert any(row[0] == f"| `{name}`" and f"`{setting}`" in row[1] for row in rows), name
    listed_names = {row[0].strip("| `") for row in rows}
    tables = [*GROUPS.values(), *TRAINERS.values(), mindspore._RULES]
    assert not {name for table in tables for name in table} - listed_names


def test_every_setting_on_the_page_of_names_is_one_of_a_recipe():
    """``model`` alone is a section, and a variant is not a setting of its own."""
    known = {".".join(way[:length]) for way in paths(Recipe) for length in range(1, len(way) + 1)}
    rows = [line.split(" | ") for line in names_page().splitlines() if line.startswith("| `")]
    for row in rows:
        settings = re.match(r"(?:`[^`]+`(?:, | or )?)*", row[1])[0]
        assert {name.strip("`") for name in re.split(", | or ", settings) if name} <= known, row


@pytest.mark.parametrize("name", ["max_seq_length", "sequence_len", "num_generations"])
def test_a_check_names_the_setting_that_an_unknown_key_means(tmp_path, name):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.split("```yaml\n")[1].split("```")[0] + f"{name}: 8\n")
    assert f"did you mean {NAMES[name]}?" in refused("recipe", "check", recipe)
