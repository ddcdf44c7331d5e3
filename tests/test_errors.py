"""Messages count in plain English."""

import pytest

from source_trees import SRC
from surefoot.errors import counted, did_you_mean, shortened, similar


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


@pytest.mark.parametrize(
    ("word", "names", "meant"),
    [
        ("chatlm", ["chatglm3", "chatml", "llama3"], "chatml"),  # difflib's first is chatglm3
        ("stf", ["pt", "sft", "dpo"], "sft"),
        ("COSINE", ["linear", "cosine"], "cosine"),
        ("Prompt", ["prompt", "response"], "prompt"),
        ("partitoin", ["mem", "partition"], "partition"),
        ("zzz", ["linear", "cosine"], ""),
    ],
)
def test_a_proposal_is_the_name_with_its_letters_exchanged_or_else_the_most_similar(
    word, names, meant
):
    assert similar(word, names) == ([meant] if meant else [])
    assert did_you_mean(word, names) == (f" (did you mean {meant}?)" if meant else "")


def test_all_proposals_are_made_in_one_place():
    """Else each of them has its own idea of what is similar."""
    users = [path.name for path in SRC.rglob("*.py") if "get_close_matches" in path.read_text()]
    assert users == ["errors.py"]
