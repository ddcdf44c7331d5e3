"""What every dataset format promises."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from each import some
from surefoot.data.example import Example
from surefoot.data.rows.formats import FORMATS
from surefoot.errors import DataError
from surefoot.schema._setting import documentation

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
WORDS = st.sampled_from(
    ["role", "content", "from", "value", "human", "gpt", "user", "assistant", "tool_calls", "name"]
)
TURN = st.dictionaries(WORDS | st.just("weight"), WORDS | JSON, max_size=4)
NAMES = sorted(
    {
        field.default
        for kind in FORMATS.values()
        for field in dataclasses.fields(kind)
        if isinstance(field.default, str)
    }
)


@pytest.mark.parametrize("name", some(FORMATS, ["sharegpt", "openai"]))
@given(row=st.dictionaries(st.sampled_from(NAMES), JSON | st.lists(TURN, max_size=3)))
def test_any_row_is_an_example_or_a_reason(name, row):
    try:
        assert isinstance(FORMATS[name]().read(row), Example)
    except DataError as error:
        assert str(error)


@pytest.mark.parametrize("name", some(FORMATS, ["alpaca", "trl"]))
@given(row=st.dictionaries(st.sampled_from(NAMES), JSON | st.lists(TURN, max_size=3)))
def test_any_ranking_row_is_two_answers_or_a_reason(name, row):
    try:
        example = FORMATS[name](ranking=True, kto_tag="label").read(row)
    except DataError:
        return
    assert example.chosen.role == example.rejected.role == "assistant"


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_every_field_is_a_column_name_with_a_default_and_a_description(kind):
    assert kind() == kind()
    fields = {field.name for field in dataclasses.fields(kind)}
    assert kind.main in fields
    assert fields == documentation(kind).keys()


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_settings_cannot_be_changed_after_reading(kind):
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().system = "other"
