"""The manifest: what is written is read, and nothing else is believed."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.disk.manifest import Manifest, Piece, dump, is_plain_name, parse
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box
from surefoot.storage.files import digest

HASH = "0123456789abcdef" * 2
PIECE = Piece("model/w", "F32", (2, 3), Box.whole((2, 3)), "model.safetensors", "w", HASH)
MANIFEST = Manifest(
    step=7,
    kind="full",
    created="2026-01-02T03:04:05Z",
    versions={"surefoot": "0.1.0"},
    files={"model.safetensors": 100, "config.json": 2, "state.json": 3},
    hashes={"model.safetensors": HASH, "config.json": HASH, "state.json": HASH},
    pieces=(PIECE,),
)


def sealed(raw):
    """A manifest that says anything, with a seal that fits."""
    text = json.dumps({**raw, "seal": "0" * 32}).encode()
    return text.replace(b"0" * 32, digest(text).encode())


def raw(**changes):
    return {**json.loads(dump(MANIFEST)), **changes}


def piece(**changes):
    return {**raw()["pieces"][0], **changes}


def apart(*pieces):
    return {"layout": "distributed", "pieces": list(pieces)}


HALF = piece(box=[[0, 0], [1, 3]])


def test_a_manifest_is_read_as_it_was_written():
    assert parse(dump(MANIFEST), "x") == MANIFEST


@given(
    st.builds(
        Manifest,
        step=st.integers(0, 2**63 - 1),
        kind=st.sampled_from(["full", "adapter"]),
        created=st.text(),
        versions=st.dictionaries(st.text(), st.text(), max_size=3),
        files=st.just(MANIFEST.files),
        hashes=st.just(MANIFEST.hashes),
        pieces=st.lists(st.text(), unique=True, max_size=3).map(
            lambda names: tuple(dataclasses.replace(PIECE, tensor=n, key=n) for n in sorted(names))
        ),
        parent=st.none() | st.text(),
        world_size=st.integers(0, 9),
        mesh=st.dictionaries(st.text(), st.integers(0, 9), max_size=2),
    )
)
def test_any_manifest_is_read_as_it_was_written(manifest):
    assert parse(dump(manifest), "x") == manifest


def test_the_text_has_sorted_keys_and_an_entry_a_line():
    lines = dump(MANIFEST).decode().splitlines()
    keys = [line.split('"')[1] for line in lines if line.startswith('"')]
    assert keys == sorted(keys)
    assert sum(line.startswith("  {") for line in lines) == 1
    assert json.loads(dump(MANIFEST))["pieces"][0]["box"] == [[0, 0], [2, 3]]


def test_pieces_are_found_by_role_and_by_file():
    assert {n: [*p] for n, p in MANIFEST.tensors("model").items()} == {"w": [PIECE]}
    assert [*MANIFEST.by_tensor()["model/w"]] == [PIECE]
    assert MANIFEST.tensors("optimizer") == {}
    assert MANIFEST.pieces_in("model.safetensors") == {"w": (PIECE,)}
    assert MANIFEST.pieces_in("state.safetensors") == {}
    assert PIECE.num_bytes == 24


def test_a_tensor_may_lie_in_one_place_as_several_boxes():
    parts = [HALF, piece(box=[[1, 0], [1, 3]], hash=HASH[::-1])]
    for layout in ("full", "distributed"):
        found = parse(sealed(raw(pieces=parts, layout=layout)), "x")
        assert [p.box for p in found.pieces_in("model.safetensors")["w"]] == [
            Box((0, 0), (1, 3)),
            Box((1, 0), (1, 3)),
        ]


def test_a_piece_is_found_in_what_is_stored():
    second = dataclasses.replace(PIECE, box=Box((1, 0), (1, 3)))
    assert second.inside((2, 3)) == Box((1, 0), (1, 3))  # the whole tensor is stored
    assert second.inside((1, 3)) == Box((0, 0), (1, 3))  # the box is


def test_every_flipped_bit_breaks_the_seal():
    data = dump(MANIFEST)
    for i in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[i] ^= 1 << bit
            with pytest.raises(CheckpointError):
                parse(bytes(broken), "x")


def test_every_truncation_is_refused():
    data = dump(MANIFEST)
    for length in range(len(data) - 1):
        with pytest.raises(CheckpointError):
            parse(data[:length], "x")


def test_a_later_major_version_is_refused_with_who_reads_it():
    with pytest.raises(
        CheckpointError, match=r"version 2\.0 was written by Surefoot 9\.1.*install surefoot 9\.1"
    ):
        parse(sealed(raw(version="2.0", versions={"surefoot": "9.1"})), "x")
    with pytest.raises(CheckpointError, match="written by Surefoot later"):
        parse(sealed(raw(version="2.0", versions=[])), "x")


def test_a_later_minor_version_is_read():
    assert parse(sealed(raw(version="1.7")), "x").step == 7


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": "other"}, "format is 'other'"),
        ({"version": 1}, "version is '1'"),
        ({"version": "1"}, "version is '1'"),
        ({"version": "1.0.0"}, "version is"),
        ({"step": -1}, "step cannot be"),
        ({"step": True}, "step cannot be"),
        ({"step": 1.0}, "step cannot be"),
        ({"step": 2**64}, "step cannot be"),
        ({"kind": "half"}, "kind cannot be 'half'"),
        ({"kind": ["full"]}, "kind cannot be"),
        ({"layout": "scattered"}, "layout cannot be 'scattered'"),
        ({"layout": ["full"]}, "layout cannot be"),
        ({"created": 5}, "created cannot be"),
        ({"parent": 5}, "parent cannot be"),
        ({"mesh": []}, "mesh cannot be"),
        ({"files": {"a": "1"}}, "files cannot be"),
        ({"files": {"a": -1}}, "files cannot be"),
        ({"hashes": {"a": "ABCDEF"}}, "hashes cannot be"),
        ({"versions": {"a": 1}}, "versions cannot be"),
        ({"pieces": {}}, "pieces cannot be"),
        (
            {"files": {"../x": 1}, "hashes": {"../x": HASH}, "pieces": []},
            "not the name of a file inside",
        ),
        (
            {"files": {"/etc/passwd": 1}, "hashes": {"/etc/passwd": HASH}, "pieces": []},
            "not the name of a file inside",
        ),
        (
            {"files": {"manifest.json": 1}, "hashes": {"manifest.json": HASH}, "pieces": []},
            "not the name",
        ),
        (
            {"files": {"big": 2**40}, "hashes": {"big": HASH}, "pieces": []},
            "'big' has 1099511627776 bytes",
        ),
        ({"hashes": {}}, "has a length or a hash, but not both"),
        ({"pieces": ["x"]}, "piece 0: expected the fields"),
        ({"pieces": [piece(extra=1)]}, "piece 0: expected the fields"),
        ({"pieces": [piece(tensor=1)]}, "must be text"),
        ({"pieces": [piece(dtype="F1")]}, "unknown dtype 'F1'"),
        ({"pieces": [piece(hash="12")]}, "is not an xxh3-128"),
        ({"pieces": [piece(shape=[-1])]}, "expected sizes"),
        ({"pieces": [piece(shape=[2**40, 2**40])]}, "larger than any memory"),
        ({"pieces": [piece(box=[[0, 0]])]}, "box must be a start and a shape"),
        ({"pieces": [piece(box=[[0], [2]])]}, "expected sizes"),
        ({"pieces": [piece(box=[[0, 0], [1, 3]])]}, "its 1 piece does not cover it exactly once"),
        ({"pieces": [piece(file="nowhere.safetensors")]}, "which is not a file of this checkpoint"),
        ({"pieces": [piece(file="config.json")]}, "which is not a file of this checkpoint"),
        ({"pieces": [piece(), piece()]}, "its 2 pieces do not cover it exactly once"),
        ({"pieces": [HALF, piece(box=[[1, 0], [1, 3]], key="o")]}, "is stored in several places"),
        (apart(HALF, piece(box=[[1, 0], [1, 2]], key="o")), "do not cover it exactly once"),
        (apart(HALF, piece(box=[[0, 1], [2, 2]], key="o")), "do not cover it exactly once"),
        (apart(HALF), "its 1 piece does not cover it exactly once"),
        (apart(HALF, piece(box=[[1, 0], [2, 3]], key="o")), "do not cover it exactly once"),
        (apart(HALF, piece(box=[[1, 0], [1, 1]]), piece(box=[[1, 1], [1, 2]], key="o")), "in one"),
        (apart(HALF, piece(box=[[1, 0], [1, 3]], key="o", dtype="I32")), "of different types"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_manifest_that_lies_is_refused(changes, why):
    with pytest.raises(CheckpointError, match=why):
        parse(sealed(raw(**changes)), "x")


@pytest.mark.parametrize(
    "name", ["created", "files", "hashes", "kind", "layout", "mesh", "pieces", "step"]
)
def test_a_field_that_is_missing_is_named(name):
    fields = raw()
    del fields[name]
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        parse(sealed(fields), "x")


@pytest.mark.parametrize("seal", [None, 5, "0" * 31, "G" * 32, HASH])
def test_a_seal_that_does_not_fit_is_refused(seal):
    with pytest.raises(CheckpointError, match="seal"):
        parse(json.dumps(raw(seal=seal)).encode(), "x")


def test_a_seal_that_stands_twice_is_refused():
    data = json.dumps(raw(seal=HASH, parent=HASH)).encode()
    with pytest.raises(CheckpointError, match="seal"):
        parse(data, "x")


@pytest.mark.parametrize(
    "name", ["config.json", "a", "x/y.txt", "chat template.jinja", "modèle.json", "a..b", "1/2/3/4"]
)
def test_plain_names(name):
    assert is_plain_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "/x",
        "x/",
        "x//y",
        "x/../y",
        ".hidden",
        "x/.hidden",
        "a\\b",
        "a\x00b",
        "a\nb",
        "1/2/3/4/5",
        "n" * 300,
    ],
)
def test_names_that_are_not_plain(name):
    assert not is_plain_name(name)
