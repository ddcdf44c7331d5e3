"""Files that anybody may have made: values, or an error, and never more."""

import contextlib
import pickle
import resource
import signal
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
from surefoot.errors import CheckpointError
from surefoot.plugins.trainers.pickles import read_pickle, read_record, write_pickle
from surefoot.plugins.trainers.trainer_folder import moments_by_name, trainer_groups

MODEL = tiny.model(num_hidden_layers=1)
CONTENT = {"a": torch.arange(3.0), "b": [1, 2.5, None, "x", (True,)]}
QUICK = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_what_was_written_is_read(tmp_path):
    write_pickle(tmp_path / "a.pt", CONTENT)
    found = read_pickle(tmp_path / "a.pt")
    assert torch.equal(found["a"], CONTENT["a"])
    assert found["b"] == CONTENT["b"]
    with pytest.raises(CheckpointError, match="it exists already"):
        write_pickle(tmp_path / "a.pt", CONTENT)


def test_a_disk_that_takes_no_more_is_told(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(CheckpointError, match=r"cannot write .*a\.pt: "):
            write_pickle(tmp_path / "a.pt", torch.zeros(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"a\.pt: it does not exist"):
        read_pickle(tmp_path / "a.pt")


def test_an_archive_that_would_grow_in_memory_is_refused_unread(tmp_path):
    write_pickle(tmp_path / "a.pt", {"x": torch.zeros(1000)})
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as stored,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    with pytest.raises(CheckpointError, match=r"b.pt: its entries are compressed"):
        read_pickle(tmp_path / "b.pt")
    content = torch.load(tmp_path / "b.pt", weights_only=True)  # the cure that it names
    torch.save(content, tmp_path / "c.pt")
    assert torch.equal(read_pickle(tmp_path / "c.pt")["x"], torch.zeros(1000))


def test_a_plain_pickle_of_old_torch_is_refused_with_a_cure(tmp_path):
    torch.save({"x": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"a.pt: it is damaged, or written by torch before"):
        read_pickle(tmp_path / "a.pt")
    torch.save(torch.load(tmp_path / "a.pt", weights_only=True), tmp_path / "b.pt")
    assert torch.equal(read_pickle(tmp_path / "b.pt")["x"], torch.ones(3))


@QUICK
@given(data=st.data())
def test_damage_gives_values_or_an_error(tmp_path, data):
    path = tmp_path / "a.pt"
    torch.save(CONTENT, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(CheckpointError):
        read_pickle(path)


@pytest.mark.parametrize("value", [Path("x"), print, CheckpointError], ids=repr)
def test_a_plain_pickle_of_anything_else_is_an_error(tmp_path, value):
    path = tmp_path / "a.pt"
    path.write_bytes(pickle.dumps({"a": value}))
    with pytest.raises(CheckpointError, match="nothing in it was executed"):
        read_pickle(path)


@pytest.mark.parametrize(
    "put", [b"r" + (1 << 24).to_bytes(4, "little"), b"p16777216\n", b"q\xc8"], ids=repr
)
def test_a_place_in_the_memo_beyond_the_pickle_is_refused_before_a_table_is_filled(put):
    with pytest.raises(CheckpointError, match="it puts an object at the place"):
        read_record(b"\x80\x04N" + put + b".", "x")


def test_an_index_that_names_anything_but_its_own_classes_is_refused():
    data = pickle.dumps({"state_dict_metadata": {}, "storage_data": {}, "extra": Path})
    with pytest.raises(CheckpointError, match=r"it names pathlib(\._local)?\.Path\b"):
        read_record(data, "x")


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_of_any_protocol_has_its_places_within_it(protocol):
    value = {"a": [1, "x", (2.5, None)], "b": [f"{n}" for n in range(300)]}
    value["c"] = b"x" * 1000 if protocol > 2 else ""  # older ones call a function for bytes
    value["d"] = value["b"]
    assert read_record(pickle.dumps(value, protocol=protocol), "x")["b"][-1] == "299"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 30)
    | st.floats()
    | st.text(max_size=3)
    | st.builds(torch.zeros, st.lists(st.integers(0, 3), max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["state", "param_groups", "params", "step", "exp_avg", "exp_avg_sq", 0, 1]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@QUICK
@given(VALUES)
def test_any_state_is_refused_as_a_state(saved):
    with pytest.raises(CheckpointError, match=r"not the state|contains no moments|trainable"):
        moments_by_name(saved, MODEL, Path("optimizer.pt"))


@QUICK
@given(VALUES, st.integers(0, 11))
def test_any_state_of_one_parameter_is_refused(values, number):
    sizes = [len(group) for group in trainer_groups(MODEL)]
    order = iter(range(sum(sizes)))
    good = {"step": 1, "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
    saved = {
        "state": {**dict.fromkeys(range(sum(sizes)), good), number: values},
        "param_groups": [{"params": [next(order) for _ in range(size)]} for size in sizes],
    }
    with pytest.raises(CheckpointError, match=r"optimizer\.pt: "):
        moments_by_name(saved, MODEL, Path("optimizer.pt"))
