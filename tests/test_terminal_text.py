"""What others have written never acts on a terminal: errors, logs, tables, previews."""

import ast
import json
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import surefoot
from surefoot.cli.main import main
from surefoot.cli.table import cell
from surefoot.log import configure
from surefoot.terminal_text import in_bytes, one_line, visible

HOSTILE = "q\x1b[2J\x1b]0;owned\x07\x9b2J\u202egnp\udc80"
ACTING = {chr(n) for n in [*range(0x20), *range(0x7F, 0xA0)] if chr(n) != "\n"} | {
    *"\u202e\u2066\u2028"
}


@given(st.text(st.characters(codec=None)))
def test_text_that_does_nothing_stays_and_json_stays_the_same(text):
    shown = visible(text)
    assert not ACTING - {"\t"} & set(shown)
    assert visible(shown) == shown
    assert json.loads(visible(json.dumps(text, ensure_ascii=False))) == text
    assert not ACTING & set(one_line(text)) and "\n" not in one_line(text)


def test_emoji_and_languages_stay():
    plain = "中文 é 👩‍👩‍👧 עברית\tx\n"
    assert visible(plain) == plain


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "{folder}/recipe.yaml"],
        ["preview", "{folder}/recipe.yaml"],
        ["train", HOSTILE],
        [HOSTILE],
        ["train", f"--{HOSTILE}"],
        ["ckpt", "show", HOSTILE],
    ],
)
def test_errors_name_what_they_name_without_its_escapes(arguments, tmp_path):
    (tmp_path / "dataset_info.json").write_text(json.dumps({HOSTILE: {"file_name": HOSTILE}}))
    data = {"datasets": [HOSTILE[:9]], "dataset_dir": "."}
    recipe = {"model": {"path": HOSTILE[:-1]}, "data": data, HOSTILE[:-1]: 1}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    found = CliRunner().invoke(main, [word.format(folder=tmp_path) for word in arguments])
    assert found.exit_code == 2
    assert not ACTING & set(found.output), found.output


def test_no_text_of_a_file_is_read_as_markup():
    """rich reads ``[/y]`` in a path as markup, unless its console is told not to."""
    calls = [
        (file, node)
        for file in Path(surefoot.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Console")
    ]
    assert len(calls) > 8
    for file, call in calls:
        options = {option.arg: ast.unparse(option.value) for option in call.keywords}
        assert options.get("markup") == "False", f"{file}:{call.lineno}"


def test_a_log_line_too(capsys):
    configure()
    logging.getLogger("surefoot.x").info("dataset %s", HOSTILE)
    assert r"q\u001b[2J" in (text := capsys.readouterr().err)
    assert not ACTING & set(text)
    assert str(cell("a\n" + HOSTILE)).startswith(r"a\nq\u001b")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, ""),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (1_234_567, "1.23 MB"),
        (5 * 10**9, "5 GB"),
        (10**19, "1e+04 PB"),
    ],
)
def test_sizes(count, text):
    assert in_bytes(count) == text
