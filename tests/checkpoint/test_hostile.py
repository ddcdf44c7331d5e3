"""Folders made to harm the reader: an error, never a crash, a hang, or a read outside of them."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from each import some
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.sources import read_whole
from surefoot.checkpoint.verification import find_latest, verify
from surefoot.errors import CheckpointError
from surefoot.storage import files

from .disk.test_manifest import HASH, sealed
from .sample import blank, sample_states

LIMIT = 1 << 30  # bytes of address space for the reader; it needs a tenth of that to start


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "run", 7, sample_states(), companions={"config.json": b"{}"})


def header(text, data=b""):
    return len(text).to_bytes(8, "little") + text + data


def link(path, target):
    path.unlink()
    path.symlink_to(target)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder_instead(path):
    path.unlink()
    path.mkdir()


def listed(folder, name, size=1):
    """The manifest lists one file more."""
    raw = json.loads((folder / "manifest.json").read_text())
    raw["files"][name], raw["hashes"][name] = size, HASH
    (folder / "manifest.json").write_bytes(sealed(raw))


def linked_folder(folder):
    (folder / "sub").symlink_to("/etc")
    listed(folder, "sub/passwd", Path("/etc/passwd").stat().st_size)


def huge_state(folder):
    os.truncate(folder / "state.json", 1 << 40)
    listed(folder, "state.json", 1 << 40)


def huge_shape(folder):
    raw = json.loads((folder / "manifest.json").read_text())
    for piece in raw["pieces"]:
        piece["shape"], piece["box"] = [1 << 55], [[0], [1 << 55]]
    (folder / "manifest.json").write_bytes(sealed(raw))


MANY = b"[" + b"[]," * 30_000_000 + b"[]]"
MANIFEST, MODEL, STATE = "manifest.json", "model.safetensors", "state.json"
HOSTILE = {
    "a deep manifest": lambda f: (f / MANIFEST).write_bytes(b"[" * 10_000_000),
    "a manifest of many values": lambda f: (f / MANIFEST).write_bytes(MANY),
    "a manifest of one long text": lambda f: (f / MANIFEST).write_bytes(b'"' + b"\\" * 100_000_000),
    "a sparse manifest of a terabyte": lambda f: os.truncate(f / MANIFEST, 1 << 40),
    "a sparse model of a terabyte": lambda f: os.truncate(f / MODEL, 1 << 40),
    "a sparse state of a terabyte": huge_state,
    "a header longer than memory": lambda f: (f / MODEL).write_bytes(b"\xff" * 8 + b"{}" * 100),
    "a header of ninety megabytes": lambda f: (f / MODEL).write_bytes(header(MANY)),
    "a pipe": lambda f: pipe(f / MODEL),
    "a pipe for a manifest": lambda f: pipe(f / MANIFEST),
    "a folder for a file": lambda f: folder_instead(f / STATE),
    "an endless device": lambda f: link(f / STATE, "/dev/zero"),
    "a link to itself": lambda f: link(f / STATE, STATE),
    "a link out": lambda f: link(f / "config.json", "/etc/passwd"),
    "a path out": lambda f: listed(f, "../../x"),
    "an absolute path": lambda f: listed(f, "/etc/passwd"),
    "a linked folder": linked_folder,
    "a shape larger than memory": huge_shape,
}

READER = """
import resource, sys
from pathlib import Path
from surefoot.checkpoint.verification import verify
from surefoot.checkpoint.looking.listing import list_run
from surefoot.errors import CheckpointError
assert "torch" not in sys.modules
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
report = verify(Path(sys.argv[1]), full=True)
assert not report.ok
list_run(Path(sys.argv[1]).parent)
print(report.problems[0][:300])
"""


@pytest.mark.parametrize(
    "name", some(HOSTILE, [name for name in HOSTILE if name != "a manifest of many values"])
)
def test_a_hostile_folder_is_a_problem_within_bounded_time_and_memory(folder, name):
    HOSTILE[name](folder)
    command = [sys.executable, "-c", READER, str(folder), str(LIMIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "root:" not in done.stdout  # nothing of /etc/passwd
    with contextlib.suppress(CheckpointError):  # it may not need the part that is hostile
        load(folder, blank(sample_states()))
    assert find_latest(folder.parent).path is None


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound")
    return save(root, 1, sample_states(), companions={"config.json": b"{}"})


NAMES = [
    "manifest.json",
    "model.safetensors",
    "optimizer.safetensors",
    "state.safetensors",
    "state.json",
    "config.json",
]


@settings(max_examples=150)
@given(st.sampled_from(NAMES), st.data())
def test_noise_in_any_file_is_a_problem_and_nothing_else(sound, name, data):
    folder = sound
    content = bytearray((folder / name).read_bytes())
    before = bytes(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    (folder / name).write_bytes(content)
    try:
        assert verify(folder, full=True).ok == (bytes(content) == before)
    finally:
        (folder / name).write_bytes(before)


@settings(max_examples=200)
@given(st.data())
def test_a_plain_folder_with_a_broken_header_is_an_error_and_nothing_else(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("plain")
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "U8", "F16", "x", 1]),
            "shape": st.lists(st.integers(-1, 4) | st.just(1 << 62), max_size=3),
            "data_offsets": st.lists(st.integers(-1, 20), min_size=1, max_size=3),
        }
    )
    entries = data.draw(st.dictionaries(st.text(max_size=3), entry | st.none(), max_size=3))
    text = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(header(text, data.draw(st.binary(max_size=40))))
    try:
        source = open_folder(folder)
        for name in source.shapes():
            read_whole(source, name)
    except CheckpointError:
        assert not verify(folder, full=True).ok or source


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path):
    files.write_new(tmp_path / "secret.safetensors", header(b"{}"))
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("../secret.safetensors", "/etc/passwd", "a/b.safetensors", ".hidden", ""):
        index = {"metadata": {}, "weight_map": {"w": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="is not a file in this folder"):
            open_folder(folder)


@pytest.mark.parametrize(
    "index",
    [[], {}, {"weight_map": []}, {"weight_map": {"w": 1}}, {"weight_map": {"w": "x.safetensors"}}],
)
def test_an_index_that_is_none_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        open_folder(tmp_path)


def test_the_limits_of_this_test_are_real():
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT})); "
    command = [sys.executable, "-c", limit + f"bytearray({LIMIT})"]
    assert b"MemoryError" in subprocess.run(command, capture_output=True, check=False).stderr
