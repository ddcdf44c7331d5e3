import json
from pathlib import Path

import pytest

import commands
import surefoot
from surefoot.recipe.recipe import Recipe, load
from surefoot.schema import json_schema

run, ok, refused = commands.of("recipe")

RECIPE = """\
model: {path: m}
data: {datasets: d}
stage: sft
train: {output_dir: runs/x, max_steps: 5}
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def test_show_prints_a_recipe_with_every_setting_and_marks_defaults(path, tmp_path):
    shown = ok("show", path)
    assert "  max_steps: 5\n" in shown
    assert "  seed: 42  # default\n" in shown
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert load(again) == load(path)


def test_show_takes_overrides(path):
    result = run("show", path, "method=lora", "method.lora.rank=4")
    assert "    rank: 4\n" in result.stdout


def test_show_dims_defaults_on_a_terminal_only(path):
    assert "\x1b[2m  seed: 42" in run("show", path, color=True).stdout
    assert "\x1b" not in run("show", path).stdout


def test_docs_explain_every_setting(path):
    assert "  # Optimizer steps to train for.\n" in run("show", path, "--docs").stdout


def test_check_says_of_each_recipe_whether_it_is_valid(path, tmp_path):
    assert ok("check", path) == f"{path}: valid\n"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(RECIPE.replace("max_steps", "max_stps"))
    result = run("check", wrong, path, tmp_path / "missing.yaml")
    assert result.exit_code == 2
    assert result.stdout == f"{path}: valid\n"
    assert f"{wrong}:4:29 train.max_stps: unknown key" in result.stderr
    assert "missing.yaml: no such file" in result.stderr
    assert "2 of 3 wrong" in result.stderr


def test_check_prints_json_for_scripts(path, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(RECIPE.replace("max_steps", "max_stps"))
    result = run("check", "--json", path, wrong)
    assert result.exit_code == 2
    valid, other = json.loads(result.stdout)
    assert valid == {"recipe": str(path), "problem": None}
    assert other["problem"].startswith(f"{wrong}:4:29 train.max_stps: unknown key")


def test_check_reads_the_file_of_another_program_as_train_does(tmp_path):
    file = tmp_path / "sft.yaml"
    text = "model_name_or_path: m\ndo_train: true\ndataset: d\noutput_dir: o\n"
    file.write_text(text + "finetuning_type: lora\n")
    assert ok("check", file) == f"{file}: valid\n"
    file.write_text(text + "finetuning_typ: lora\n")
    assert "did you mean finetuning_type?" in run("check", file).stderr


def test_no_help_shows_a_mark_of_its_layout():
    """Click takes ``\\b`` as the mark of a paragraph that keeps its lines; in a raw string it is
    text."""
    for path in Path(surefoot.__file__).parent.rglob("*.py"):
        assert 'r"""' not in (text := path.read_text()) or "\\b\n" not in text, path


def test_a_wrong_recipe_says_where(path):
    path.write_text(RECIPE.replace("max_steps", "max_stps"))
    message = refused("show", path)
    assert message == (
        f"error: {path}:4:29 train.max_stps: unknown key (did you mean max_steps?)\n"
    )


def test_schema_is_the_json_schema_of_recipes():
    assert json.loads(ok("schema")) == json_schema(Recipe)


def test_convert_prints_a_recipe_and_names_what_it_did_not_look_at(tmp_path):
    file, recipe = tmp_path / "theirs.yaml", tmp_path / "recipe.yaml"
    text = "run_mode: finetune\noutput_dir: runs/x\npretrained_model_dir: m\nprocessor: {a: 1}\n"
    file.write_text(text)
    result = run("convert", file, "data.datasets=[d]")
    assert result.exit_code == 0
    assert result.stderr == "not used: processor.a\n"
    assert "no train_dataset: set data.datasets to the training data" in run("convert", file).stderr
    recipe.write_text(result.stdout)
    assert load(recipe).model.path == "m"
    file.write_text("run_mode: eval")
    assert "use `surefoot eval RECIPE`" in run("convert", file).stderr


def test_convert_prints_the_recipe_of_llamafactorys_arguments(tmp_path):
    words = "--model_name_or_path m --do_train --dataset d --output_dir o --use_badam True"
    result = run("convert", *words.split(), "--finetuning_type", "full", "train.on_nan=skip")
    assert result.exit_code == 0, result.output
    again = tmp_path / "recipe.yaml"
    again.write_text(result.stdout)
    found = load(again)
    assert (found.model.path, found.method.switch_interval, found.train.on_nan) == ("m", 50, "skip")
    assert "LLaMA-Factory: weight_decay 0 is ignored with BAdam" in result.stderr
    assert "did you mean learning_rate?" in run("convert", "--learning_rte", "3").stderr
