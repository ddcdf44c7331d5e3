"""Pictures of encoded rows are looked at before the first step; one that changed is read again."""

import base64
import json
import os

import pytest

import pictures
from surefoot.data.media import stamps
from surefoot.data.media.files import seen_in
from surefoot.data.training_data import find, prepare
from surefoot.errors import DataError
from surefoot.recipe.recipe_data import encoding_of, open_codec


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return pictures.save_model(tmp_path_factory.mktemp("base"), "gemma3")


@pytest.fixture
def rows(tmp_path):
    """Rows in a folder, whose pictures are older than they need to be."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, pictures.rows(tmp_path))))
    for path in tmp_path.glob("*.png"):
        os.utime(path, (1e9, 1e9))
    return tmp_path


@pytest.fixture
def encoding(rows, base, monkeypatch):
    """Clocks are fine here: no time is too young to be believed."""
    monkeypatch.setattr(stamps, "_SETTLED", 0)
    made = pictures.recipe(rows, base)
    return encoding_of(made, open_codec(made, base))


def seen(data):
    return [each for number in range(len(data.train)) for each in seen_in(data.train[number])]


@pytest.fixture
def reads(encoding, monkeypatch):
    """The paths that are read to compare their content."""
    paths, true = [], type(encoding.media).is_same
    monkeypatch.setattr(
        type(encoding.media),
        "is_same",
        lambda media, path, digest: paths.append(path) or true(media, path, digest),
    )
    return paths


def test_untouched_pictures_are_not_read_again(encoding, reads):
    prepare(encoding)
    reads.clear()
    assert find(encoding) is not None
    assert reads == []


def test_a_picture_whose_times_moved_is_compared_once(encoding, reads, rows, caplog):
    before = prepare(encoding)
    reads.clear()
    os.utime(rows / "1_0.png", (1.1e9, 1.1e9))
    assert seen(prepare(encoding)) == seen(before)
    assert reads == ["1_0.png"]
    assert find(encoding) is not None
    assert reads == ["1_0.png"]
    assert "again" not in caplog.text


def test_young_times_are_not_believed(encoding, reads, monkeypatch):
    monkeypatch.setattr(stamps, "_SETTLED", 10**15)
    prepare(encoding)
    reads.clear()
    assert find(encoding) is not None
    assert len(reads) == 6


@pytest.mark.parametrize("keeps_times", [True, False])
def test_a_replaced_picture_is_encoded_again_and_so_is_the_restored_one(
    keeps_times, encoding, rows, caplog
):
    path = rows / "1_0.png"
    first, before, times = seen(prepare(encoding)), path.read_bytes(), path.stat()
    pictures.picture(path, (64, 64), seed=7)
    if keeps_times:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert find(encoding) is None
    second = seen(prepare(encoding))
    assert [a.path for a, b in zip(first, second, strict=True) if a != b] == ["1_0.png"]
    assert "is stale (picture 1_0.png has changed since it was encoded)" in caplog.text
    path.write_bytes(before)
    assert seen(prepare(encoding)) == first


def test_a_picture_that_is_gone_or_damaged_stops_it_by_row_and_name(encoding, rows):
    prepare(encoding)
    path = rows / "2_1.png"
    data = path.read_bytes()
    for change, why in (
        (lambda: path.write_bytes(data[:-100]), "truncated or damaged"),
        (path.unlink, "no such file"),
    ):
        change()
        with pytest.raises(DataError, match=rf"rows.jsonl:2: picture 2_1\.png: .*{why}"):
            prepare(encoding)


@pytest.mark.parametrize("has_entry", [True, False])
def test_a_copy_of_a_picture_is_not_believed_by_its_name(has_entry, rows, base):
    """Neither where tokens are encoded again, nor where they are in the cache."""
    made = [json.loads(line) for line in (rows / "rows.jsonl").read_text().splitlines()]
    for row in made:
        row["images"] = [
            f"data:image/png;base64,{base64.b64encode((rows / name).read_bytes()).decode()}"
            for name in row["images"]
        ]
    (rows / "rows.jsonl").write_text("\n".join(map(json.dumps, made)))
    recipe = pictures.recipe(rows, base)
    encoding = encoding_of(recipe, open_codec(recipe, base))
    first = prepare(encoding)
    copies = sorted((rows / "cache" / "media").glob("?" * 32))
    sound = [copy.read_bytes() for copy in copies]
    assert len(copies) == 6
    for copy, change in zip(
        copies, ("flip", "cut", "empty", "exchange", "folder", "gone"), strict=True
    ):
        data = copy.read_bytes()
        copy.unlink()
        if change == "folder":
            copy.mkdir()
        elif change != "gone":
            changed = {"flip": data[:50] + bytes([data[50] ^ 1]) + data[51:], "cut": data[:-9]}
            copy.write_bytes({**changed, "empty": b"", "exchange": sound[0]}[change])
    if not has_entry:
        recipe = pictures.recipe(rows, base, cutoff_len=1000)
        encoding = encoding_of(recipe, open_codec(recipe, base))
    assert seen(prepare(encoding)) == seen(first)
    assert [copy.read_bytes() for copy in copies] == sound


def test_damaged_stamps_are_made_again(encoding, reads, rows):
    prepare(encoding)
    (path,) = (rows / "cache" / "media").glob("*.stamps")
    data = path.read_bytes()
    for change in (data[:-1], data[:20] + b"x" + data[21:], b""):
        path.write_bytes(change)
        reads.clear()
        assert find(encoding) is not None
        assert len(reads) == 6
        assert path.read_bytes() == data
