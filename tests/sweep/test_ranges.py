import pytest

from surefoot.errors import RecipeError
from surefoot.sweep.ranges import Choices, Range, parse_arguments


def values(text):
    (key,), _ = parse_arguments([f"a.b={text}"])
    return key.values


def test_a_range_has_two_ends_a_scale_and_a_step():
    assert values("1e-5..1e-3:log") == Range(1e-5, 1e-3, is_log=True)
    assert values("8..64") == Range(8, 64, is_integer=True)
    assert values("8..64:8").values() == [8, 16, 24, 32, 40, 48, 56, 64]
    assert values("-.5..0.5") == Range(-0.5, 0.5)
    assert values("0..0.3:0.1").values() == pytest.approx([0, 0.1, 0.2, 0.3])
    assert (values("8..64").count, values("0..0.3:0.1").count, values("0.1..1").count) == (
        57,
        4,
        None,
    )


def test_choices_are_yaml_so_texts_lists_and_paths_are_values():
    assert values("8,16,32") == Choices((8, 16, 32))
    assert values("linear,cosine").items == ("linear", "cosine")
    assert values("[a, b],[c]").items == (["a", "b"], ["c"])
    assert values("../one,../two").items == ("../one", "../two")
    assert values("true,false").items == (True, False)


def test_a_single_value_holds_for_all_trials():
    swept, fixed = parse_arguments(["a.b=1,2", "train.max_steps=5", "data.datasets=[x,y]"])
    assert [key.key for key in swept] == ["a.b"]
    assert fixed == ["train.max_steps=5", "data.datasets=[x,y]"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8..8", "8 must be below 8"),
        ("1e-3..1e-5:log", "1e-3 must be below 1e-5"),
        ("0..1:log", "must begin above 0"),
        ("1..9:logg", "expected log or a step above 0, got 'logg'"),
        ("8..64:10", "end at 58, not at 64"),
        ("1..x", "expected LOW..HIGH"),
        ("8,8", "8 is given twice"),
        ("", "expected KEY=RANGE"),
        ("8,,9", "not YAML"),
    ],
)
def test_what_is_no_range_is_refused_with_its_reason(text, said):
    with pytest.raises(RecipeError, match=r"a\.b=") as error:
        values(text)
    assert said in str(error.value)
