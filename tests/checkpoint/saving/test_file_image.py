"""How what a process writes of a file lies in memory."""

from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.disk.tensorfile import plan_save, ranges_of
from surefoot.checkpoint.saving._snapshot_buffer import image_of
from surefoot.checkpoint.saving._writing import Shard, WriteShare
from surefoot.parallel.sharding import Box
from surefoot.storage.files import PAGE

(PLAN,) = plan_save(
    "model",
    {
        "a": ("F32", (40, 30)),
        "b": ("F32", (7000,)),
        "c": ("BF16", (64, 64)),
        "d": ("U8", ()),
        "e": ("U8", (0, 3)),
    },
    None,
)


def test_a_whole_file_lies_as_it_will():
    image = image_of(Shard("model", PLAN))
    size = PLAN.header.file_size
    assert image.size == size
    assert [(s.start, s.offset, s.length) for s in image.stretches] == [(0, 0, size)]
    assert all(PLAN.header.entries[n].offset == start for n, (start, _) in image.spots.items())


def test_all_boxes_of_a_file_are_one_stretch_with_its_head():
    whole = {name: Box.whole(entry.shape) for name, entry in PLAN.header.entries.items()}
    image = image_of(Shard("model", PLAN, WriteShare(whole, has_head=True)))
    assert [(s.offset, s.length) for s in image.stretches] == [(0, PLAN.header.file_size)]


@st.composite
def boxes(draw):
    found = {}
    for name, entry in PLAN.header.entries.items():
        ends = [sorted([draw(st.integers(0, n)), draw(st.integers(0, n))]) for n in entry.shape]
        box = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
        if draw(st.booleans()) and (box.size or 0 in entry.shape):
            found[name] = box
    return found


@given(boxes(), st.booleans())
def test_every_byte_has_its_place_and_ranges_lie_in_their_page_as_in_the_file(boxes, has_head):
    image = image_of(Shard("model", PLAN, WriteShare(boxes, has_head)))
    assert image.spots.keys() == boxes.keys()
    ranges = {n: list(ranges_of(PLAN.header.entries[n], box)) for n, box in boxes.items()}
    assert image.scattered == {n: boxes[n] for n, found in ranges.items() if len(found) > 1}
    used = [(0, PLAN.header.data_start)]
    for name, (start, length) in image.spots.items():
        assert length == sum(size for _, size in ranges[name])
        used += [(start, start + length)] if length else []
    assert all(a[1] <= b[0] for a, b in zip(sorted(used), sorted(used)[1:], strict=False))
    assert max(end for _, end in used) <= image.size
    written = {}
    for part in image.stretches:
        assert part.start % PAGE == part.offset % PAGE
        written |= {part.offset + i: part.start + i for i in range(part.length)}
    expected = {i: i for i in range(PLAN.header.data_start)} if has_head else {}
    for name in boxes.keys() - image.scattered.keys():
        for offset, length in ranges[name]:
            expected |= {offset + i: image.spots[name][0] + i for i in range(length)}
    assert written == expected
