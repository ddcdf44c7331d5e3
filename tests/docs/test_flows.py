"""The table of the reference flows names tests and pages that exist, in each of its fifty rows."""

import ast
import re

import pytest
from pages import LINK, ROOT

PAGE = ROOT / "docs" / "reference" / "flows.md"
ROW = re.compile(r"\| (\d+) \| (00[0-3]:\d+) \| (.+) \| ([^|]+) \| ([^|]+) \|")
ROWS = {int(m[1]): m for m in map(ROW.fullmatch, PAGE.read_text().splitlines()) if m}
FLOWS = (
    *(14, 35, 39, 46, 48, 49, 51, 52, 69, 78, 99, 102, 104, 116, 119, 121, 122, 125, 126, 130),
    *(132, 133, 135, 140, 141, 165, 166, 176, 183, 185, 191, 200, 209, 226, 241, 247, 249, 261),
    *(262, 273, 274, 275, 279, 292, 294, 301, 304, 317, 318, 322),
)
UNPROVABLE = {122, 165, 176, 209, 261}  # they need an engine, a GPU or a real hub


def test_every_row_that_was_missing_has_a_verdict():
    assert tuple(ROWS) == FLOWS
    verdicts = {number: row[4] for number, row in ROWS.items()}
    assert set(verdicts.values()) == {"HAS", "OTHER", "BUILT, NOT PROVABLE HERE"}
    assert {n for n, verdict in verdicts.items() if verdict.startswith("BUILT")} == UNPROVABLE


@pytest.mark.parametrize("number", ROWS)
def test_what_shows_a_row_exists(number):
    """Links of the page are followed by ``test_pages.py``; here they count as shown."""
    shown, verdict = ROWS[number][5], ROWS[number][4]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
    assert named or LINK.search(shown)
    assert verdict != "OTHER" or LINK.search(shown), "a page says how it is served otherwise"
    for path, test in named:
        tree = ast.parse((ROOT / path).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
