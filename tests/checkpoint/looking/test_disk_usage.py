"""A file with several names is on the disk once."""

import inspect
import os
import sys

from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.looking.listing import added, freed, stored

SIZES = (10_000, 50_000, 3)


@given(st.lists(st.sets(st.integers(0, 2)), max_size=4), st.sets(st.integers(0, 3)))
def test_a_shared_file_counts_for_the_oldest_and_is_freed_with_the_last(
    tmp_path_factory, contents, going
):
    root = tmp_path_factory.mktemp("root")
    first, folders = {}, []
    for i, held in enumerate(contents):
        folder = root / str(i)
        (folder / "sub").mkdir(parents=True)
        for number in sorted(held):
            path = folder / "sub" / f"{number}.bin"
            if number in first:
                os.link(first[number], path)
            else:
                path.write_bytes(os.urandom(SIZES[number]))
                first[number] = path
        folders.append(folder)
    blocks = {n: path.stat().st_blocks * 512 for n, path in first.items()}
    seen, expected = set(), []
    for held in contents:
        expected.append(sum(blocks[n] for n in held - seen))
        seen |= held
    assert added(map(stored, folders)) == expected
    left = set().union(*(held for i, held in enumerate(contents) if i not in going), set())
    gone = set().union(*(held for i, held in enumerate(contents) if i in going), set())
    lost = [stored(folder) for i, folder in enumerate(folders) if i in going]
    assert freed(lost) == sum(blocks[n] for n in gone - left)


def test_a_name_elsewhere_keeps_a_file(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"x" * 5000)
    assert freed([stored(tmp_path / "a")]) > 0
    os.link(tmp_path / "a" / "x", tmp_path / "kept")
    assert freed([stored(tmp_path / "a")]) == 0


def test_links_are_not_followed_and_holes_take_nothing(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "out").symlink_to("/etc")
    (folder / "nowhere").symlink_to("none")
    os.mkfifo(folder / "pipe")
    with (folder / "hole").open("wb") as file:
        file.truncate(1 << 30)
    (found,) = stored(folder)
    assert found.num_bytes == 1 << 30
    assert found.disk_bytes < 1 << 20


def test_folders_may_be_nested_deeper_than_the_stack(tmp_path):
    deep = tmp_path.joinpath(*["a"] * 300)
    deep.mkdir(parents=True)
    (deep / "x").write_text("x")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 100)
    try:
        assert len(stored(tmp_path)) == 1
    finally:
        sys.setrecursionlimit(limit)


def test_a_folder_that_is_gone_takes_nothing(tmp_path):
    assert stored(tmp_path / "none") == []
    assert added([]) == [] and freed([]) == 0
