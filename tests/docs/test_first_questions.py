"""The pages for who is new: symptoms, refusals, checks in CI, messages. What they name exists."""

import ast
import re
import shlex
import tomllib

import click
import pytest
from pages import ROOT, blocks, prose, steps
from ruamel.yaml import YAML

from commands import ok
from source_trees import SRC, TREES
from surefoot.cli import main as cli
from surefoot.recipe.prediction import Prediction
from surefoot.recipe.recipe import Recipe
from surefoot.schema import paths

GUIDES = ROOT / "docs" / "how-to"
NAMES = ("symptoms", "refusals", "check-in-ci", "messages", "recipes")
CODE = re.compile(r"`([^`\n]+)`")
SETTINGS = {way[:n] for cls in (Recipe, Prediction) for way in paths(cls) for n in range(1, 9)}
SECTIONS = {way[0] for way in SETTINGS}


def codes(name):
    """What stands in backticks on a page, outside of its blocks."""
    text = (GUIDES / f"{name}.md").read_text("utf-8")
    return CODE.findall(re.sub(r"```.*?^```", "", text, flags=re.M | re.S))


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_that_a_page_names_is_there(name):
    for code in codes(name):
        for setting in re.findall(r"(?<![\w/.-])([a-z]\w*(?:\.[a-z]\w*)+)(?=$|[=:\s,])", code):
            way = tuple(setting.split("."))
            if way[0] in SECTIONS and way[-1] not in ("jsonl", "json", "yaml", "log", "md"):
                assert way in SETTINGS, setting


@pytest.mark.parametrize("name", [name for name in NAMES if name != "messages"])
def test_every_command_and_option_that_a_page_names_is_there(name):
    # Its settings, too: click keeps the help option of a command as it was first made.
    context = click.Context(cli.main, info_name="surefoot", **cli.main.context_settings)
    shown = [code for code in codes(name) if code.startswith("surefoot ")]
    assert shown
    for code in shown:
        name, *words = shlex.split(code)[1:]
        command = cli.main.get_command(context, name)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert command is not None, code
        assert words or not isinstance(command, click.Group), code
        params = command.get_params(context)
        known = {opt for one in params for opt in (*one.opts, *one.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, code


def fragments():
    """The words of errors in the tables of the page of refusals."""
    text = (GUIDES / "refusals.md").read_text("utf-8")
    for table in re.split(r"^\| the error says.*\n\|[-|]+\n", text, flags=re.M)[1:]:
        for row in table.splitlines():
            if not row.startswith("| `"):
                break
            yield CODE.search(row)[1]


def test_every_refusal_on_the_page_is_one_of_the_source():
    literals = [
        node.value
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    literals += [path.read_text("utf-8") for path in SRC.rglob("*.yaml")]
    listed = [*fragments()]
    assert len(listed) > 25
    assert not [words for words in listed if not any(words in text for text in literals)]


def test_the_files_for_ci_are_yaml_whose_command_checks_recipes(monkeypatch):
    monkeypatch.chdir(ROOT / "examples")
    workflow, hooks = (
        YAML(typ="safe").load(block.text) for block in blocks(GUIDES / "check-in-ci.md", "yml")
    )
    command = workflow["jobs"]["check"]["steps"][-1]["run"]
    (hook,) = hooks["repos"][0]["hooks"]
    assert command.startswith(hook["entry"])
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        if "cluster" not in path.parts:
            assert ok(*hook["entry"].split()[1:], path) == f"{path}: valid\n"
            assert re.search(hook["files"], f"recipes/{path.name}")


def test_the_json_on_the_page_is_what_the_command_prints(monkeypatch):
    monkeypatch.chdir(ROOT)
    (block,) = blocks(GUIDES / "check-in-ci.md", "console")
    ((typed, printed),) = steps(block)
    assert ok(*shlex.split(typed)[1:]) == printed


def test_the_page_of_messages_lists_the_commands_whose_output_is_messages():
    page = (GUIDES / "messages.md").read_text("utf-8")
    row = re.search(r"^\| (`train`.*?) \|", page, re.M)[1]
    assert set(CODE.findall(row)) == cli._WITHOUT_RESULTS <= set(cli.listed())
    (vector,) = blocks(GUIDES / "messages.md", "toml")
    assert tomllib.loads(vector.text)["sinks"]["loki"]["inputs"] == ["wanted"]
    assert "JSON" in prose(GUIDES / "messages.md")
