"""No folder, however odd, makes a command crash or hang: it is shown, or it is an error."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.test_hostile import HOSTILE, header
from each import some

from .runner import run


def assert_calm(*arguments):
    result = run(*arguments)
    assert result.exit_code in (0, 1, 2), arguments
    assert result.exception is None or isinstance(result.exception, SystemExit), arguments
    assert "Traceback" not in result.output and "root:" not in result.output
    return result


# The two that are long to write are read by the library in checkpoint/test_hostile.py.
LONG = ("a manifest of one long text", "a manifest of many values")


@pytest.mark.parametrize("name", some(HOSTILE, [name for name in HOSTILE if name not in LONG]))
def test_hostile_checkpoints(folder, name):
    HOSTILE[name](folder)
    sound = folder.with_name("checkpoint-5")
    assert_calm("ls", folder.parent)
    assert_calm("show", folder, "--norms")
    assert_calm("show", folder, "--state", "loader")
    assert assert_calm("diff", sound, folder).exit_code
    assert_calm("prune", folder.parent, "--keep", 1, "--dry-run")
    assert sound.is_dir()


SHAPES = st.lists(st.sampled_from([0, 1, 3, 7, 1 << 40, 1 << 59]), max_size=4)


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.fixed_dictionaries(
            {"dtype": st.sampled_from(["F32", "U8", "BOOL", "C64"]), "shape": SHAPES}
        ),
        max_size=3,
    ),
    st.text(max_size=8),
)
def test_plain_folders_with_any_header(tmp_path_factory, entries, log):
    folder = tmp_path_factory.mktemp("plain") / "checkpoint-7"
    folder.mkdir()
    sizes, end = {"F32": 4, "U8": 1, "BOOL": 1, "C64": 8}, 0
    for entry in entries.values():
        count = sizes[entry["dtype"]]
        for n in entry["shape"]:
            count *= n
        entry["data_offsets"] = [end, end + count]
        end += count
    data = bytes(range(256)) * 16
    (folder / "model.safetensors").write_bytes(header(json.dumps(entries).encode(), data[:end]))
    (folder / "trainer_state.json").write_text(log)
    assert_calm("ls", folder.parent, "--verify")
    assert_calm("show", folder, "--norms")
    assert_calm("diff", folder, folder)
