"""JSON that nobody vouches for."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.disk import strict_json
from surefoot.errors import CheckpointError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_what_json_can_say_is_read_back(value):
    assert strict_json.parse(json.dumps(value).encode(), "x") == value


@given(st.binary(max_size=200))
def test_anything_else_is_refused_and_never_crashes(data):
    try:
        expected = json.loads(data)
    except (ValueError, RecursionError):
        with pytest.raises(CheckpointError):
            strict_json.parse(data, "x")
    else:
        try:
            assert strict_json.parse(data, "x") == expected
        except CheckpointError:
            assert b"NaN" in data or b"Infinity" in data or b":" in data


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('{"a": NaN}', "not valid JSON: JSON has no number NaN"),
        ("[-Infinity]", "not valid JSON: JSON has no number -Infinity"),
        ("[" * 100_000, "nested deeper"),
        ('{"a":' * 100_000, "nested deeper"),
        ("{", "not valid JSON"),
        ("9" * 5000, "not valid JSON"),
        ("[0]\x00", "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_traps_are_named(text, why):
    with pytest.raises(CheckpointError, match=why):
        strict_json.parse(text.encode(), "file.json")


def test_text_that_is_not_utf8_is_refused():
    with pytest.raises(CheckpointError, match="not valid JSON"):
        strict_json.parse(b'"\xff"', "x")


def test_brackets_in_text_are_no_nesting():
    assert strict_json.parse(json.dumps("[" * 1000 + '\\"{').encode(), "x") == "[" * 1000 + '\\"{'


def test_a_list_of_empty_lists_is_refused_before_it_takes_the_memory():
    with pytest.raises(CheckpointError, match="values, more than"):
        strict_json.parse(b"[" + b"[]," * strict_json.MAX_VALUES + b"[]]", "x")


def test_too_long_a_text_is_refused(monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_BYTES", 10)
    with pytest.raises(CheckpointError, match="more than the 10 allowed"):
        strict_json.parse(b'"' + b"x" * 10 + b'"', "x")


@pytest.mark.parametrize(
    "text", [b'"\\' * 500_000, b'"' * 1_000_001, b'"\\"' * 300_000, b'\\"' * 500_000]
)
def test_hostile_quotes_take_no_longer_than_others(text):
    began = time.perf_counter()
    with pytest.raises(CheckpointError):
        strict_json.parse(text, "x")
    assert time.perf_counter() - began < 20  # quadratic would be hours


def test_only_an_object_will_do():
    with pytest.raises(CheckpointError, match="expected a JSON object, found a list"):
        strict_json.parse_object(b"[]", "x")


def test_written_json_has_sorted_keys_and_ends_in_a_newline():
    assert strict_json.dump({"b": 1, "a": [None]}) == b'{"a": [null], "b": 1}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        strict_json.dump(float("nan"))
