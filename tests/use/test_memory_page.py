"""A row of the table in docs/how-to/memory.md is what the script that prints it finds."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.mark.proof
@pytest.mark.parametrize(("name", "gigabytes"), [("0.6B", 80), ("4B", 16)])
def test_a_row_of_the_page_is_what_plan_finds(name, gigabytes, tmp_path):
    import memory_table

    cells = memory_table.row_of(tmp_path, name, gigabytes)
    row = "| " + " | ".join([f"{gigabytes} GB", name, *cells]) + " |"
    assert row in (ROOT / "docs" / "how-to" / "memory.md").read_text()
