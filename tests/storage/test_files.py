"""The seam for durable bytes: whole or not at all, and clear words when the system says no."""

import errno
import os
import stat
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.sample import num_open
from crash.system import But, refusing
from surefoot.errors import CheckpointError, RunError, explain
from surefoot.storage import files


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    old = os.umask(0o027)
    yield 0o027
    os.umask(old)


def test_write_aside_replaces_the_content_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "recipe.yaml"
    files.write_aside(path, b"old")
    files.write_aside(path, b"new and longer")
    assert path.read_bytes() == b"new and longer"
    assert list(tmp_path.iterdir()) == [path]


def test_file_modes_follow_the_umask(tmp_path, umask):
    files.write_aside(tmp_path / "a", b"x")
    files.append_line(tmp_path / "b", "x")
    files.make_folder(tmp_path / "c")
    files.create(tmp_path / "d").close()
    assert [mode(tmp_path / name) for name in "abcd"] == [0o640, 0o640, 0o750, 0o640]


def test_write_aside_into_a_folder_that_is_not_there_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.write_aside(tmp_path / "no" / "file", b"")
    assert not list(tmp_path.iterdir())


def test_a_new_file_never_replaces_one(tmp_path):
    files.write_new(tmp_path / "a", b"first")
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"


def test_lines_are_appended_whole(tmp_path):
    for i in range(3):
        files.append_line(tmp_path / "log", f'{{"step": {i}}}')
    assert (tmp_path / "log").read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'


def test_an_append_that_falls_short_leaves_no_half_line(tmp_path, monkeypatch):
    files.append_line(tmp_path / "log", "whole")

    short = But(write=lambda descriptor, data: os.write(descriptor, data[:3]))
    monkeypatch.setattr(files, "os", short)
    with pytest.raises(OSError, match="only 3 of 12 bytes were written"):
        files.append_line(tmp_path / "log", "second line")
    assert (tmp_path / "log").read_text() == "whole\n"


@given(st.lists(st.tuples(st.integers(0, 100), st.binary(max_size=50))))
def test_writes_at_positions_are_read_back(tmp_path_factory, writes):
    path = tmp_path_factory.mktemp("f") / "x"
    expected = bytearray(200)
    with files.create(path) as file:
        file.reserve(200)
        for offset, data in writes:
            file.write_at(offset, data)
            expected[offset : offset + len(data)] = data
        assert file.size == 200
        assert file.read(0, 200) == expected
        assert file.read(50, 10) == expected[50:60]
    assert path.read_bytes() == expected


def test_large_reads_and_writes_go_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 7)
    data = os.urandom(100)
    with files.create(tmp_path / "x") as file:
        file.write_at(3, data)
        assert file.read(3, 100) == data


def test_reading_past_the_end_is_an_error_not_a_hang(tmp_path):
    files.write_new(tmp_path / "x", b"12345")
    file = files.open_file(tmp_path / "x")
    with pytest.raises(OSError, match="ends 3 bytes too early") as caught:
        file.read(2, 6)
    assert caught.value.filename == str(tmp_path / "x")


def test_reserved_space_is_really_taken(tmp_path):
    with files.create(tmp_path / "x") as file:
        file.reserve(1 << 20)
    assert (tmp_path / "x").stat().st_blocks * 512 >= 1 << 20


def test_more_space_than_there_is_is_refused_and_none_is_taken_meanwhile(tmp_path, monkeypatch):
    def take_all(*_):
        raise AssertionError("all that is left would be taken")

    monkeypatch.setattr(files, "os", But(posix_fallocate=take_all))
    with (
        files.create(tmp_path / "x") as file,
        pytest.raises(OSError, match="8,796,093,022,208 bytes are needed, ") as caught,
    ):
        file.reserve(1 << 43)
    assert caught.value.errno == errno.ENOSPC


def test_what_a_file_has_is_not_needed_again(tmp_path, monkeypatch):
    one_page = SimpleNamespace(f_blocks=1, f_bavail=1, f_frsize=4096)
    with files.create(tmp_path / "x") as file:
        file.reserve(1 << 20)
        monkeypatch.setattr(files, "os", But(fstatvfs=lambda _: one_page))
        file.reserve((1 << 20) + 4096)
        with pytest.raises(OSError, match="4,096 are free"):
            file.reserve((1 << 20) + 3 * 4096)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_where_nothing_can_be_reserved_the_free_space_is_looked_at(tmp_path, monkeypatch, code):
    monkeypatch.setattr(files, "os", But(posix_fallocate=refusing(code)))
    with files.create(tmp_path / "x") as file:
        file.reserve(1000)
        assert file.size == 1000
        with pytest.raises(OSError, match="bytes are needed") as caught:
            file.reserve(1 << 60)
    assert caught.value.errno == errno.ENOSPC


def test_a_file_closes_once_and_by_itself(tmp_path):
    file = files.create(tmp_path / "x")
    file.close()
    file.close()
    before = num_open()
    for i in range(50):
        files.create(tmp_path / str(i))
    assert num_open() <= before + 1


def test_a_file_longer_than_allowed_is_not_read(tmp_path):
    files.write_new(tmp_path / "x", b"12345")
    with files.open_file(tmp_path / "x") as file:
        assert files.read_all(file, 5) == b"12345"
        with pytest.raises(OSError, match="5 bytes are more than the 4 allowed"):
            files.read_all(file, 4)


def test_a_pipe_is_refused_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        files.open_file(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        files.open_inside(tmp_path, "pipe")


def test_links_are_followed_only_where_asked(tmp_path):
    files.write_new(tmp_path / "real", b"x")
    (tmp_path / "link").symlink_to("real")
    assert files.open_file(tmp_path / "link").read(0, 1) == b"x"
    with pytest.raises(OSError) as caught:
        files.open_file(tmp_path / "link", follow=False)
    assert "symbolic link" in explain(caught.value)


def test_nothing_outside_a_folder_is_opened_through_it(tmp_path):
    files.write_new(tmp_path / "secret", b"x")
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    files.write_new(inside / "sub" / "file", b"ok")
    (inside / "link").symlink_to("../secret")
    (inside / "up").symlink_to("..")
    assert files.open_inside(inside, "sub/file").read(0, 2) == b"ok"
    for name in ("link", "up/secret", "sub/../../secret/x"):
        with pytest.raises(OSError):
            files.open_inside(inside, name)


def test_errors_carry_the_whole_path(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        files.open_inside(tmp_path, "sub/file")
    assert explain(caught.value) == f"{tmp_path}/sub/file: it does not exist"


def test_a_lock_is_held_until_the_file_is_closed(tmp_path):
    first = files.create(tmp_path / "x")
    assert first.lock()
    second = files.open_file(tmp_path / "x")
    with pytest.raises(BlockingIOError):
        second.lock()
    first.close()
    assert second.lock()


def test_a_lock_ends_with_its_process(tmp_path):
    files.write_new(tmp_path / "x", b"")
    code = "import os, sys; from pathlib import Path; from surefoot.storage import files; "
    code += "files.open_file(Path(sys.argv[1])).lock(); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], check=False)
    assert files.open_file(tmp_path / "x").lock()


def test_a_file_knows_when_its_path_leads_elsewhere(tmp_path):
    file = files.create(tmp_path / "x")
    assert file.is_at(file.path)
    (tmp_path / "x").unlink()
    assert not file.is_at(file.path)
    files.write_new(tmp_path / "x", b"")
    assert not file.is_at(file.path)


def test_folders_are_made_with_what_is_above_them(tmp_path):
    files.make_folder(tmp_path / "a" / "b" / "c")
    files.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    with pytest.raises(FileExistsError):
        files.new_folder(tmp_path / "a")
    files.write_new(tmp_path / "file", b"")
    for below in ("file", "file/sub"):
        with pytest.raises(NotADirectoryError):
            files.make_folder(tmp_path / below)


def test_a_tree_is_removed_but_not_what_its_links_lead_to(tmp_path):
    keep = tmp_path / "keep"
    keep.mkdir()
    files.write_new(keep / "file", b"x")
    gone = tmp_path / "gone"
    (gone / "sub").mkdir(parents=True)
    (gone / "sub" / "link").symlink_to(keep)
    files.write_new(gone / "file", b"x")
    files.remove_tree(gone)
    files.remove_tree(gone)  # once more is harmless
    assert not gone.exists()
    assert (keep / "file").read_bytes() == b"x"
    (tmp_path / "link").symlink_to(keep)
    files.remove_tree(tmp_path / "link")
    assert (keep / "file").exists()


def test_only_an_empty_folder_is_removed_as_empty(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full" / "x").mkdir(parents=True)
    assert files.remove_empty_folder(tmp_path / "empty")
    assert not files.remove_empty_folder(tmp_path / "full")
    assert not files.remove_empty_folder(tmp_path / "none")


def test_questions_about_paths(tmp_path):
    files.write_new(tmp_path / "file", b"123")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert files.exists(tmp_path / "dangling") and not files.exists(tmp_path / "file" / "x")
    assert files.is_folder(tmp_path) and not files.is_folder(tmp_path / "file")
    assert not files.is_folder(tmp_path / "file" / "x")
    assert files.size_of(tmp_path / "file") == 3
    assert files.size_of(tmp_path) is None and files.size_of(tmp_path / "none") is None
    assert files.list_folder(tmp_path) == ["dangling", "file"]


@given(st.lists(st.binary(max_size=100)))
def test_hashing_piece_by_piece_is_hashing_at_once(parts):
    state = files.Hash()
    for part in parts:
        state.update(memoryview(part))
    assert (
        state.hexdigest()
        == files.digest(b"".join(parts))
        == xxhash.xxh3_128_hexdigest(b"".join(parts))
    )


def test_the_hash_is_the_published_xxh3_128():
    assert files.digest(b"") == "99aa06d3014798d86001c324468d497f"  # from the xxHash specification


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (errno.ENOSPC, None, "/a: the disk is full; free some space"),
        (errno.EROFS, None, "/a: the file system is read-only"),
        (errno.EACCES, None, "/a: no permission"),
        (errno.EIO, None, "/a: the disk reports an input/output error"),
        (errno.ENOSPC, "9 bytes are needed, 1 are free", "(9 bytes are needed, 1 are free)"),
        (errno.EXDEV, None, "/a: Invalid cross-device link"),
    ],
)
def test_errors_say_what_to_do(code, said, words):
    assert words in explain(OSError(code, said or os.strerror(code), "/a"))
    assert words.removeprefix("/a: ") in explain(OSError(code, said or os.strerror(code)))
    assert words in explain(OSError(code, said or os.strerror(code), b"/a"))
    assert explain(OSError("odd")) == "odd"


def test_an_error_of_the_system_becomes_the_callers_error():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x")
    with (
        pytest.raises(RunError, match="cannot log: /x: the disk is full") as caught,
        files.raising(RunError, "cannot log"),
    ):
        raise full
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(CheckpointError, match=r"^mine$"), files.raising(RunError):
        raise CheckpointError("mine")


def test_a_disk_that_takes_nothing_is_an_error_not_a_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "os", But(pwrite=lambda *_: 0))
    with pytest.raises(OSError, match="nothing was written"):
        files.write_new(tmp_path / "x", b"123")


def test_a_tree_deeper_than_python_calls_is_removed(tmp_path):
    deep = tmp_path / "a"
    deep.mkdir()
    for _ in range(1200):
        deep = deep / "a"
        deep.mkdir()
    files.remove_tree(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "", ".", "a/../../secret", "link/x"]
)
def test_no_name_leads_out_of_a_folder(tmp_path, name):
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "x").touch()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"not a name|irectory"):
        files.open_inside(folder, name)


@pytest.mark.parametrize("most", [1, 1000, files.BLOCK])
def test_the_hash_of_a_read_is_that_of_the_bytes_in_memory(most, tmp_path, monkeypatch):
    data = os.urandom(3000 if most == 1 else 2 * files.BLOCK + 77)
    (tmp_path / "a").write_bytes(b"head" + data)

    def wrong_once(descriptor, buffers, offset):
        count = os.preadv(descriptor, [buffers[0][:most]], offset)
        if offset == 4:
            buffers[0][0] ^= 1
        return count

    monkeypatch.setattr(files, "os", But(preadv=wrong_once))
    view, digest = memoryview(bytearray(len(data))), files.Hash()
    with files.open_file(tmp_path / "a") as file:
        file.read_into(4, view, digest)
    assert bytes(view) == bytes([data[0] ^ 1]) + data[1:]
    assert digest.hexdigest() == xxhash.xxh3_128_hexdigest(view)


def test_bytes_are_fetched_once_and_beyond_a_read_only_in_a_sequence(tmp_path, monkeypatch):
    fetched = []

    def advise(_descriptor, offset, length, _advice):
        fetched.append((offset, offset + length))

    monkeypatch.setattr(files, "_reads_ahead", lambda _: False)  # as on a disk with little
    monkeypatch.setattr(files, "os", But(posix_fadvise=advise))
    size = 20 << 20
    view = memoryview(bytearray(size))
    with files.create(tmp_path / "a") as file:
        file.reserve(2 * size)
        file.read_into(0, view)
        assert fetched[-1][1] == size
        file.read_into(size, view[: 1 << 20])
        assert fetched[-1][1] > size + (1 << 20)
        assert len(fetched) < 8
    assert all(one[1] <= other[0] for one, other in pairwise(fetched))
