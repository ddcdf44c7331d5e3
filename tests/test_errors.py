"""Messages count in plain English."""

import pytest

from surefoot.errors import counted


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (1_234, "1,234 files")]
)
def test_one_is_singular_and_all_else_is_plural(number, said):
    assert counted(number, "file") == said


def test_nouns_with_their_verbs_agree_as_well():
    assert counted(1, "box does", "boxes do") == "1 box does"
    assert counted(2, "box does", "boxes do") == "2 boxes do"
