import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.sources.source import TensorsInMemory, read_whole
from surefoot.parallel.box import Box
from surefoot.plugins.mindspore.naming import DeinterleavedSource, InterleavedSource, turns_of


@st.composite
def fused(draw):
    """Tensors, how many rows they give at a time, and the fused tensor by plain torch."""
    groups = draw(st.integers(1, 5))
    rows = draw(st.lists(st.sampled_from([1, 2, 3, 17]), min_size=1, max_size=3))
    inner = draw(st.sampled_from([(), (3,)]))
    parts = {f"p{i}": torch.randn(groups * n, *inner) for i, n in enumerate(rows)}
    shaped = [part.reshape(groups, -1, *inner) for part in parts.values()]
    return parts, rows, torch.cat(shaped, 1).reshape(-1, *inner)


@given(fused(), st.data())
def test_any_rows_of_the_fused_tensor_are_those_of_its_parts(found, data):
    parts, rows, whole = found
    turns = {"f": turns_of([*parts], rows)}
    source = InterleavedSource(TensorsInMemory({**parts, "other": torch.ones(2)}), turns)
    assert source.shapes() == {"other": (2,), "f": tuple(whole.shape)}
    assert torch.equal(read_whole(source, "f"), whole)
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    columns = [data.draw(st.integers(0, 2))] * (whole.ndim - 1)
    box = Box((first, *[1] * (whole.ndim - 1)), (last - first, *columns))
    assert torch.equal(source.read("f", box), whole[box.slices_in(Box.whole(tuple(whole.shape)))])


@given(fused(), st.data())
def test_any_rows_of_a_part_come_back(found, data):
    parts, rows, whole = found
    turns = dict(zip(parts, turns_of(["f"] * len(parts), rows), strict=True))
    source = DeinterleavedSource(TensorsInMemory({"f": whole, "other": torch.ones(2)}), turns)
    assert source.shapes() == {"other": (2,)} | {n: tuple(p.shape) for n, p in parts.items()}
    for name, part in parts.items():
        assert torch.equal(read_whole(source, name), part)
        start = data.draw(st.integers(0, len(part)))
        stop = data.draw(st.integers(start, len(part)))
        columns = [data.draw(st.integers(0, 3))] * (part.ndim - 1)
        box = Box((start, *[0] * (part.ndim - 1)), (stop - start, *columns))
        assert torch.equal(source.read(name, box), part[start:stop, *map(slice, columns)])
    assert torch.equal(read_whole(source, "other"), torch.ones(2))
