"""Every recipe, command, link and piece of Python in the documentation is one that exists."""

import html
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from pages import (
    DEMO,
    LINK,
    PAGES,
    ROOT,
    SHELLS,
    anchors,
    blocks,
    name,
    prose,
    steps,
    surefoot_commands,
)
from PIL import Image
from ruamel.yaml import YAML

from plugins.board.words import words
from surefoot.cli.main import main
from surefoot.plugins.migrate.arguments import ARGUMENTS
from surefoot.recipe.prediction import Prediction
from surefoot.recipe.recipe import Recipe, load, read
from surefoot.recipe.yaml import parse
from surefoot.schema import paths
from surefoot.schema import read as read_into

MINIMAL = {
    "model": {"path": "."},
    "data": {"datasets": ["a"]},
    "stage": "sft",
    "train": {"output_dir": "run"},
}
SECTIONS = {way[0] for way in paths(Recipe)}
RECIPES = [b for page in PAGES for b in blocks(page, "yaml")]
COMMANDS = [
    (f"{block}: {line}", arguments)
    for page in PAGES
    for block in blocks(page, *SHELLS)
    for line, output in steps(block)
    if not output.startswith("error:")  # shown for its message; test_tutorial.py compares it
    for arguments in surefoot_commands(line)
]
PYTHON = [b for page in PAGES for b in blocks(page, "python")]
DECISION = re.compile(r"\d{4}-")


@pytest.mark.parametrize("block", RECIPES, ids=str)
def test_a_yaml_block_is_a_recipe_or_sections_of_one(block, tmp_path):
    sections = parse(block.text, str(block)).data
    if block.title == "answers.yaml":
        assert read_into(Prediction, sections)
        return
    assert sections.keys() <= SECTIONS
    if "model" in sections and "data" in sections:
        (tmp_path / "recipe.yaml").write_text(block.text)
        assert load(tmp_path / "recipe.yaml")
    else:
        assert read(MINIMAL, sections)


@pytest.fixture
def dry(monkeypatch):
    """Commands are read, not run; a file is there. Gives the contexts of what would have run."""
    contexts = []
    monkeypatch.setattr(click.Command, "invoke", lambda self, context: contexts.append(context))
    monkeypatch.setattr(click.Path, "convert", lambda self, value, *_: value)
    return contexts


@pytest.mark.parametrize(("where", "arguments"), COMMANDS, ids=[c[0] for c in COMMANDS])
def test_a_command_exists_with_its_options(where, arguments, dry):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    overrides = dry[-1].params.get("overrides", ()) if dry else ()
    if dry and any(str(dry[-1].params.get(name)).startswith("--") for name in ("recipe", "path")):
        return  # of LLaMA-Factory or MindSpore Transformers
    for override in overrides:
        way = tuple(override.partition("=")[0].split("."))
        if way[0] in ARGUMENTS:
            continue
        known = Prediction if dry[-1].info_name == "predict" else Recipe
        assert way in set(paths(known)), f"no setting {override}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles(block):
    compile(block.text, str(block), "exec")


def test_every_page_is_in_the_table_of_contents_once():
    contents = YAML().load(ROOT / "mkdocs.yml")["nav"]
    pages = {
        name(p).removeprefix("docs/")
        for p in ROOT.glob("docs/**/*.md")
        if not DECISION.match(p.name)
    }
    assert sorted(leaves(contents)) == sorted(pages)


def test_every_decision_is_in_the_list_of_decisions():
    folder = ROOT / "docs" / "decisions"
    listed = LINK.findall((folder / "README.md").read_text())
    assert listed == sorted(p.name for p in folder.iterdir() if DECISION.match(p.name))


def test_each_line_of_the_reports_names_a_test_that_is_there():
    page = ROOT / "docs" / "decisions" / "0105-each-line-has-a-test-or-a-reason.md"
    named = re.findall(r"`([\w/]+\.py): (test_\w+)`", page.read_text(encoding="utf-8"))
    assert len(named) > 30
    for file, test in named:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {test}(" in text, f"{file}: {test}"


def test_the_index_names_every_guide():
    guides = {f"how-to/{path.name}" for path in (ROOT / "docs" / "how-to").iterdir()}
    assert guides <= {*LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))}


def leaves(contents):
    for entry in contents:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from leaves(value) if isinstance(value, list) else [value]


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "img").iterdir()), ids=name)
def test_pictures_are_small_and_plain(picture):
    assert picture.stat().st_size < 60_000
    if picture.suffix == ".svg":
        assert not [e for e in ET.parse(picture).iter() if Path(e.tag).name.endswith("script")]


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "img").glob("board-*.png")), ids=name)
def test_a_picture_of_the_board_shows_words_that_it_has(picture):
    with Image.open(picture) as image:
        shown = json.loads(image.text["words"])
    assert len(shown) > 5
    assert not set(shown) - words(), "make pictures"


def test_the_picture_of_a_run_has_the_words_of_its_screen_in_the_demo():
    picture = (ROOT / "docs" / "img" / "train.svg").read_text(encoding="utf-8")
    rows = {}
    for y, text in re.findall(r'<text [^>]*? y="([\d.]+)"[^>]*>(.*?)</text>', picture):
        rows[y] = rows.get(y, "") + html.unescape(text).replace("\xa0", " ")
    screen = next(b for b in blocks(DEMO, "console") if "surefoot train" in b.text).text
    screen = screen[screen.index("$ surefoot train") :].splitlines()
    start = [line for line in screen[1 : screen.index("...")] if not line.startswith("step=")]
    fixed = [line for line in start if not re.search("encoded in|from the cache", line)]
    assert len(fixed) > 5
    assert not set(fixed) - {row.rstrip() for row in rows.values()}
