"""A slice means what numpy means by it, and anything else is refused."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from surefoot.errors import CheckpointError
from surefoot.parallel.box import Box, select

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
BOUNDS = st.none() | st.integers(-8, 8)
PARTS = st.integers(-6, 6) | st.builds(slice, BOUNDS, BOUNDS, st.none() | st.integers(1, 7))


def written(part):
    if isinstance(part, int):
        return str(part)
    if part is Ellipsis:
        return "..."
    ends = ["" if end is None else str(end) for end in (part.start, part.stop)]
    return ":".join(ends if part.step is None else [*ends, str(part.step)])


@st.composite
def cases(draw):
    shape = draw(SHAPES)
    parts = draw(st.lists(PARTS, max_size=len(shape)))
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), Ellipsis)
    return shape, tuple(parts)


@given(cases(), st.sampled_from(["{}", "[{}]", " {} ", "{} ,"]))
def test_a_slice_is_numpys(case, style):
    shape, parts = case
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    text = style.format(", ".join(map(written, parts)) or "...")
    try:
        expected = array[parts]
    except IndexError:
        with pytest.raises(CheckpointError, match="is outside of a dimension of"):
            select(text, shape)
        return
    selection = select(text, shape)
    read = array[selection.box.slices_in(Box.whole(shape))]
    np.testing.assert_array_equal(read[selection.index()], expected)
    assert selection.shape == expected.shape


@given(cases())
def test_no_more_is_read_than_from_the_first_to_the_last_value(case):
    shape, parts = case
    try:
        selection = select(", ".join(map(written, parts)), shape)
    except CheckpointError:
        return
    assert selection.box in Box.whole(shape) or not selection.box.size
    for size, step, count in zip(
        selection.box.shape, selection.steps, selection.counts, strict=True
    ):
        assert size == (0 if not count else (count - 1) * step + 1)


@given(st.text(max_size=12) | st.text(alphabet="0123456789:-+,.[] ", max_size=14))
@example("1e3")
@example("0x1")
@example("٣")
@example("9" * 400)
@example(",")
@example("...,...")
def test_any_other_text_is_refused_and_nothing_else_happens(text):
    try:
        assert select(text, (4, 3)).box in Box.whole((4, 3))
    except CheckpointError as error:
        assert repr(text) in str(error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "cannot read 'a'; expected for example '0:8'"),
        ("0, 0, 0", "3 indices, but the tensor has 2 dimensions [4, 3]"),
        ("...:", "cannot read"),
        ("..., ...", "'...' may occur only once"),
        ("::-1", "a step must be at least 1, got -1"),
        ("::0", "a step must be at least 1, got 0"),
        ("0:1:2:3", "has more than two colons"),
        ("4", "index 4 is outside of a dimension of size 4"),
        ("-5", "index -5 is outside of a dimension of size 4"),
        (",1", "cannot read ''"),
    ],
)
def test_a_mistake_is_named(text, words):
    with pytest.raises(CheckpointError) as caught:
        select(text, (4, 3))
    assert words in str(caught.value)
