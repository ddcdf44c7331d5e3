"""Messages count in plain English."""

import pytest

from surefoot.errors import counted, shortened


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (1_234, "1,234 files")]
)
def test_one_is_singular_and_all_else_is_plural(number, said):
    assert counted(number, "file") == said


def test_nouns_with_their_verbs_agree_as_well():
    assert counted(1, "box does", "boxes do") == "1 box does"
    assert counted(2, "box does", "boxes do") == "2 boxes do"


def test_a_message_keeps_what_is_wrong_and_what_to_do_but_not_the_middle_of_a_long_value():
    value = "x" * 5000
    said = shortened(f"model.path: no folder {value!r}, and it is no hub id\nand the next problem")
    assert len(said) < 400
    assert said.startswith("model.path: no folder 'xxx")
    assert said.endswith("and it is no hub id\nand the next problem")
    assert "more characters" in said
    assert len(shortened("a word " * 2000)) < 2200
    for message in ("short", "first\nsecond", "/".join(["folder"] * 50)):
        assert shortened(message) == message
