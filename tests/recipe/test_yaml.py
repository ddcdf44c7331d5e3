import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from surefoot.errors import RecipeError
from surefoot.recipe.yaml import MAX_DEPTH, emit, parse


def refused(text):
    with pytest.raises(RecipeError) as caught:
        parse(text, "r.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.0e-4", 1e-4),
        ("5e5", 5e5),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("007", 7),
        ("0x10", 16),
        ("0o17", 15),
        ("0b11", 3),
        ("1_000", 1000),
        ("+3", 3),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("2026-11-21", "2026-11-21"),
        ("12:30", "12:30"),
        ("'8'", "8"),
        ("a_b", "a_b"),
        ("-_", "-_"),
        ("=", "="),
        ("!!str 3", "3"),
        ("!!float 3", 3.0),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    read = parse(f"x: {text}").data["x"]
    assert read == value
    assert type(read) is type(value)


def test_not_a_number_is_a_number():
    assert math.isnan(parse(".nan").data)


def test_an_integer_too_long_to_convert_stays_text():
    assert parse("9" * 5000).data == "9" * 5000


def test_an_empty_file_is_nothing():
    assert parse("").data is None
    assert parse("# only a comment\n").data is None


def test_every_key_and_item_has_its_place():
    document = parse("a:\n  b: 1\n  c:\n  - x\n  - y: 2\n", "r.yaml")
    assert document.data == {"a": {"b": 1, "c": ["x", {"y": 2}]}}
    assert document.marks == {
        (): (1, 1),
        ("a",): (1, 1),
        ("a", "b"): (2, 3),
        ("a", "c"): (3, 3),
        ("a", "c", 0): (4, 5),
        ("a", "c", 1): (5, 5),
        ("a", "c", 1, "y"): (5, 5),
    }


def test_json_is_yaml_too():
    assert parse('{"a": {"b": [1, 2.5, null, "x"]}}').data == {"a": {"b": [1, 2.5, None, "x"]}}


def test_an_alias_repeats_a_value():
    assert parse("a: &x {b: 1}\nc: *x\n").data == {"a": {"b": 1}, "c": {"b": 1}}


def test_an_anchor_used_twice_is_the_newer_one():
    assert parse("a: &x 1\nb: &x 2\nc: *x\n").data == {"a": 1, "b": 2, "c": 2}


def test_all_duplicate_keys_tags_and_odd_keys_are_named_at_once():
    text = "a: 1\nb:\n  c: 1\n  c: 2\na: 3\nd: !!python/object:os.system x\n? [k]\n: 1\ne: !f {}\n"
    assert refused(text).splitlines() == [
        "r.yaml:1:1 a: given twice, in line 1 and in line 5; keep one",
        "r.yaml:3:3 b.c: given twice, in line 3 and in line 4; keep one",
        "r.yaml:6:1 d: tags have no meaning in a recipe, got !!python/object:os.system",
        "r.yaml:7:3 ?: a key must be a word, got a list or a mapping",
        "r.yaml:9:1 e: tags have no meaning in a recipe, got !f",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1,\n", "r.yaml:2:1 not YAML: "),
        ("a: 1\n\tb: 2\n", "r.yaml:2:1 not YAML: "),
        ("a: b: c\n", "r.yaml:1:5 not YAML: mapping values are not allowed here (quote a text"),
        ("a: 'x\n", "r.yaml:2:1 not YAML: while scanning a quoted scalar: found unexpected end"),
        ("a: 1\n---\nb: 2\n", "r.yaml:2:1 not YAML: expected a single document in the stream"),
        ("a: *x\n", "r.yaml:1:4 not YAML: found undefined alias 'x'"),
        ("a: 1\nb: \x07\n", "r.yaml:2:4 not YAML: unprintable character #x0007"),
        ("a: @x\n", "r.yaml:1:4 not YAML: while scanning for the next token: found character '@'"),
        ("%YAML 9.9\n---\n", "r.yaml:1:1 not YAML: "),
        (" a: 1\nb: 2\n", "r.yaml:2:1 not YAML: "),
    ],
)
def test_a_syntax_error_says_where(text, message):
    assert refused(text).startswith(message)


def test_a_tab_gets_the_advice_to_use_spaces():
    assert refused("a:\n\tb: 1\n").endswith("(indent with spaces, not with tabs)")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100 + "]" * 100,
        pytest.param("[" * 1000 + "]" * 1000, marks=pytest.mark.proof),
        "{a: " * 100 + "1" + "}" * 100,
        "".join(f"{' ' * i}a:\n" for i in range(100)),
        "- " * 1000 + "1",
    ],
)
def test_what_nests_beyond_reason_is_refused(text):
    assert "nested" in refused(text)


def test_what_a_recipe_could_need_is_not_too_deep():
    parse("[" * MAX_DEPTH + "]" * MAX_DEPTH)


def test_a_bomb_of_aliases_is_refused_quickly():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    assert "repeated" in refused("\n".join(lines))


def test_a_structure_that_contains_itself_is_refused():
    assert "nested" in refused("a: &x {b: *x}\n")


@given(st.text(), st.text())
@example("%YAML 1.1\n---\n", "a: yes")
@example("? ", "")
@example("!<", "")
@example("a: !!int ", "x")
@example("a: !!float ", "nan")
@example("a: !!null ", "x")
@example("a: |", "\n\n b")
@example("- !", " -")
def test_any_text_is_read_or_refused(start, rest):
    try:
        parse(start + rest, "r.yaml")
    except RecipeError as error:
        assert str(error).startswith("r.yaml")


@given(st.text(alphabet="ab:-? []{}&*!|>'\"%@`#,\n\t0.e1_~<=/", max_size=60))
def test_any_text_of_yamls_own_characters_is_read_or_refused(text):
    try:
        parse(text, "r.yaml")
    except RecipeError as error:
        assert str(error).startswith("r.yaml")


TEXT = st.text(st.characters(codec="utf-8"))
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.sampled_from(["1e-4", "no", "null", "~", "012", "2020-01-01", "a: b", "#", "- ", "true"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


@given(PLAIN)
@example({"a": "x\ny", "b": ["\u2028", "\ufeff", "\x00", "\x85", "\U0001f600"]})
@example({"": "", " ": " ", "a ": "b\t"})
@example([{":0": ":0", "": None}, ":", {"?0": "?"}])
@example([1e-08, 1e22, 123456789.123456789, 5e-324])
def test_what_is_emitted_parses_back_equal(data):
    assert parse(emit(data)).data == data


def test_small_and_large_numbers_have_a_point_for_readers_of_yaml_1_1():
    assert emit({"a": 1e-08, "b": 1.5e300, "c": 0.25, "d": -2e-9}) == (
        "a: 1.0e-08\nb: 1.5e+300\nc: 0.25\nd: -2.0e-09\n"
    )
    assert parse(emit([math.inf, -math.inf])).data == [math.inf, -math.inf]


def test_a_setting_stands_on_one_line():
    assert emit({"a": {"b": "x" * 500, "c": ["d"] * 99, "e": "1\n2"}}).count("\n") == 4


@pytest.mark.parametrize(
    "text", ["- x\n" * 6000, "k: {a: 1}\n" * 3000, "[" * 5000, "- !!omap {}\n" * 6000]
)
def test_what_no_recipe_has_is_refused_where_it_begins_and_not_read_to_its_end(text):
    """A server that checks recipes computed for six seconds over 140 kB of them."""
    with pytest.raises(RecipeError, match="far beyond what a recipe needs"):
        parse(f"{text}\n'no end of this text", "recipe.yaml")
