"""Bytes that are streamed to a file are all there, in their order, however they are handed over."""

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.storage import files
from surefoot.storage.parallel_work import MAX_SPACE, ByteStream

parts = st.lists(st.tuples(st.booleans(), st.integers(1, MAX_SPACE)), min_size=6, max_size=12)


@settings(max_examples=10, deadline=None)
@given(parts=parts)
def test_what_is_filled_in_place_and_what_is_copied_follow_each_other(parts, tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "file"
    data = os.urandom(sum(size for _, size in parts))
    done = 0
    with files.create(path) as file, ByteStream(file) as stream:
        for is_in_place, size in parts:
            if is_in_place:
                stream.space(size)[:] = data[done : done + size]
                stream.add(size)
            else:
                stream.write(data[done : done + size])
            done += size
    assert path.read_bytes() == data
