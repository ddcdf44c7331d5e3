"""Run by test_fuzz.py: atheris feeds a parser whatever reaches new code; only CheckpointError may
come out.

    python -m crash.fuzz header|manifest|index|folder|rules|list CORPUS [libFuzzer's options]
"""

import json
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["surefoot"]):
    from surefoot.checkpoint.disk import grid, strict_json
    from surefoot.checkpoint.disk import manifest as index
    from surefoot.checkpoint.disk import tensorfile as header
    from surefoot.checkpoint.disk.folder import MODEL_INDEX
    from surefoot.checkpoint.layouts.detection import open_weights
    from surefoot.checkpoint.verification import verify
    from surefoot.errors import CheckpointError
    from surefoot.storage import files

SEAL = re.compile(rb'("seal": ")[0-9a-f]{32}(")')
SCRATCH = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))


def sealed(data):
    """With the right seal, so that what lies behind its check is reached."""
    zeroed = SEAL.sub(rb"\g<1>" + b"0" * 32 + rb"\g<2>", data, count=1)
    return zeroed.replace(b"0" * 32, files.digest(zeroed).encode(), 1)


def parse_header(data):
    """A safetensors file's first bytes."""
    length = header.header_length(data[:8], len(data), "it")
    found = header.parse(data[8 : 8 + length], len(data), "it")
    assert found.file_size == len(data)
    for entry in found.entries.values():
        assert found.data_start <= entry.offset <= entry.offset + entry.num_bytes <= len(data)


def parse_manifest(data):
    """What is accepted must come back from what is written."""
    written = index.dump(index.parse(sealed(data), "it"))
    assert index.dump(index.parse(written, "again")) == written


def parse_index(data):
    """Hugging Face's index over weight files."""
    (SCRATCH / MODEL_INDEX).write_bytes(data)
    open_weights(SCRATCH)


def parse_folder(data):
    """A whole checkpoint whose manifest is hostile: nothing outside of it is read."""
    (SCRATCH / "manifest.json").write_bytes(sealed(data))
    verify(SCRATCH, full=True)


RULES = {
    "axes": ["pp", "dp"],
    "rules": [
        {"tensor": "model/x", "dtype": "F32", "shape": [5, 3], "cuts": [["dp", 0]], "stage": 1},
        {"tensor": "model/y", "dtype": "U8", "shape": [1 << 25], "cuts": [], "stage": 0},
    ],
}
GRID = grid.parse_grid(RULES, {"pp": 2, "dp": 2}, "it")


def parse_rules(data):
    """A manifest with rules; every rank has its boxes, and is found by them."""
    parse_manifest(data)
    found = index.parse(sealed(data), "it").grid
    for rank in range(min(found.size, 8) if found else 0):
        for tensor, box in found.boxes_of(rank).items():
            assert rank in dict(found.ranks_of(found.rule_of[tensor], box))


def parse_list(data):
    """The hash list of a rank."""
    assert [*index.parse_list(data, GRID, 0, "it")] == ["model/y"]


TARGETS = {
    "header": parse_header,
    "manifest": parse_manifest,
    "index": parse_index,
    "folder": parse_folder,
    "rules": parse_rules,
    "list": parse_list,
}


def seeds(name, corpus):
    """Something valid to start from."""
    corpus.mkdir(parents=True, exist_ok=True)
    tensors = {"a.weight": ("F32", (2, 3)), "b": ("BF16", ()), "c": ("BOOL", (0, 4))}
    head, layout = header.build(tensors)
    whole = head + bytes(layout.file_size - layout.data_start)
    (SCRATCH / "model.safetensors").write_bytes(whole)
    if name == "header":
        (corpus / "valid").write_bytes(whole)
    elif name == "list":
        hashes = {"model/y": [files.digest(b"")] * 3}
        (corpus / "valid").write_bytes(strict_json.dump({"a.safetensors": hashes}))
    elif name == "rules":
        (corpus / "valid").write_bytes(with_rules(manifest(layout, head, whole)))
    elif name == "index":
        shutil.move(SCRATCH / "model.safetensors", SCRATCH / "model-00001-of-00001.safetensors")
        names = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
        (corpus / "valid").write_bytes(strict_json.dump({"metadata": {}, "weight_map": names}))
    else:
        (corpus / "valid").write_bytes(manifest(layout, head, whole))


def manifest(layout, head, whole):
    """Of a checkpoint with that one file."""
    pieces = [
        index.Piece(
            f"model/{name}",
            entry.dtype,
            entry.shape,
            index.Box.whole(entry.shape),
            "model.safetensors",
            name,
            files.digest(whole[entry.offset : entry.offset + entry.num_bytes]),
        )
        for name, entry in layout.entries.items()
    ]
    made = index.Manifest(
        step=3,
        kind="full",
        created="2026-01-31T12:34:56Z",
        versions={"surefoot": "0.1.0"},
        files={"model.safetensors": len(whole)},
        hashes={"model.safetensors": files.digest(head)},
        pieces=pieces,
        mesh={"dp_shard": 2},
    )
    return index.dump(made)


def with_rules(data):
    """The same manifest of four ranks, with two more tensors."""
    lists = dict.fromkeys((grid.HASH_LIST.format(rank) for rank in range(4)), 2)
    found = index.parse(data, "it")
    hashes = {**found.hashes, **dict.fromkeys(lists, files.digest(b"{}"))}
    many = {"layout": "distributed", "world_size": 4, "mesh": {"pp": 2, "dp": 2}, "grid": GRID}
    return index.dump(replace(found, files={**found.files, **lists}, hashes=hashes, **many))


def main(name, corpus, options):
    seeds(name, corpus)
    target = TARGETS[name]
    target((corpus / "valid").read_bytes())

    def once(data):
        try:
            target(data)
        except CheckpointError as error:
            assert str(error)

    words = corpus.with_suffix(".dict")
    keys = [*json.loads(index.dump(index.parse(manifest_seed(), "it")))] if name != "index" else []
    words.write_text(
        "".join(
            f'"{word}"\n'
            for word in [*keys, *RULES, *RULES["rules"][0], "weight_map", "F32", "../", "1e999"]
        )
    )
    atheris.Setup([sys.argv[0], str(corpus), f"-dict={words}", *options], once)
    atheris.Fuzz()


def manifest_seed():
    head, layout = header.build({"a": ("F32", (2,))})
    return manifest(layout, head, head + bytes(layout.file_size - layout.data_start))


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
