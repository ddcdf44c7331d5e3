"""What every layout of checkpoint/layouts promises, whoever wrote the folder."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from checkpoint.sample import Holder, same_bits
from surefoot.checkpoint.converting.targets import TARGETS, write_dcp
from surefoot.checkpoint.layouts import LAYOUTS
from surefoot.checkpoint.layouts.detection import detect_layout
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.looking.diff import compare_tensors
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.sources import FolderSource, TensorsInMemory, copy, described, read_whole
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box, Mesh
from surefoot.plugins.mindspore.tensor_layout import ParallelConfig
from surefoot.plugins.mindspore.writing import write_distributed
from surefoot.schema import settings
from surefoot.use.exporting.conversion import convert

TENSORS = {
    "model.layers.0.weight": torch.randn(6, 4),
    "model.layers.1.weight": torch.randn(3, 2, 2).bfloat16(),
    "model.mask": torch.rand(5) > 0.5,
    "model.scale": torch.tensor(3.5),
    "model.none": torch.empty(0, 4),
}


def write_native(folder, tensors):
    return save(folder, 1, {"model": Holder(tensors), "trainer": Holder({"step": 1})}, kind="full")


def write_huggingface(folder, tensors):
    copy(TensorsInMemory(tensors), folder, max_shard_size=60)
    return folder


def write_peft(folder, tensors):
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_boxes(folder, tensors):
    write_dcp(TensorsInMemory(tensors), folder / "dcp", mesh=Mesh(dp_shard=4))
    return folder / "dcp"


def write_mindspore(folder, tensors):
    source = TensorsInMemory(tensors)
    config = ParallelConfig(2, enable_parallel_optimizer=True, parallel_optimizer_threshold=0)
    write_distributed(source, folder / "ranks", stages=config.stages(described(source)))
    return folder / "ranks"


WRITERS = {
    "native": write_native,
    "huggingface": write_huggingface,
    "peft": write_peft,
    "dcp": write_boxes,
    "mindspore": write_mindspore,
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture
def folder(layout, tmp_path):
    return WRITERS[layout](tmp_path, TENSORS)


def test_a_folder_is_recognised_by_its_layout_alone(layout, folder):
    assert detect_layout(folder) == LAYOUTS[layout]
    assert detect_layout(folder).name == layout


def test_a_source_has_the_names_shapes_types_and_values_that_were_written(layout, folder):
    for source in (FolderSource(LAYOUTS[layout].open(folder)), open_folder(folder)):
        assert source.shapes() == {name: tuple(t.shape) for name, t in TENSORS.items()}
        assert source.dtypes() == {name: t.dtype for name, t in TENSORS.items()}
        assert all(same_bits(read_whole(source, name), t) for name, t in TENSORS.items())


def test_a_box_is_read_as_a_slice(layout, folder):
    source = FolderSource(LAYOUTS[layout].open(folder))
    for start, shape in (((0, 0), (6, 4)), ((2, 1), (3, 2)), ((5, 3), (1, 1)), ((1, 0), (0, 4))):
        box = Box(start, shape)
        expected = TENSORS["model.layers.0.weight"][box.slices_in(Box.whole((6, 4)))]
        assert torch.equal(source.read("model.layers.0.weight", box), expected)


def test_what_is_read_belongs_to_the_reader(layout, folder):
    source = FolderSource(LAYOUTS[layout].open(folder))
    read_whole(source, "model.layers.0.weight").zero_()
    assert torch.equal(
        read_whole(source, "model.layers.0.weight"), TENSORS["model.layers.0.weight"]
    )


def test_a_box_that_sticks_out_is_refused(layout, folder):
    with pytest.raises(CheckpointError, match="outside of shape"):
        FolderSource(LAYOUTS[layout].open(folder)).read(
            "model.layers.0.weight", Box((5, 0), (2, 4))
        )


def test_any_layout_can_be_copied_to_a_model_folder(layout, folder, tmp_path):
    copy(open_folder(folder), tmp_path / "copy")
    again = open_folder(tmp_path / "copy")
    assert all(same_bits(read_whole(again, name), t) for name, t in TENSORS.items())


def test_a_damaged_file_is_an_error_when_it_is_opened(layout, folder):
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="safetensors"):
        LAYOUTS[layout].open(folder)


def test_an_empty_folder_is_no_layout(layout, tmp_path):
    (tmp_path / "empty").mkdir()
    assert not LAYOUTS[layout].recognise(tmp_path / "empty")
    with pytest.raises(CheckpointError):
        LAYOUTS[layout].open(tmp_path / "empty")


def test_everything_is_listed_as_the_model(layout, folder):
    every = LAYOUTS[layout].open_all(folder, None)
    assert {name for name in every if name.startswith("model/")} == {
        f"model/{name}" for name in TENSORS
    }
    assert LAYOUTS[layout].open_all(folder, frozenset({"optimizer"})) == {}


def test_a_small_file_is_read_or_none(layout, folder):
    assert LAYOUTS[layout].small_file(folder, "no-such-file.json") is None


# Options that change how the files are cut, and the layout that what is written has.
WRITTEN = {
    "surefoot": ("native", [{}, {"layout": "distributed", "mesh": Mesh(dp_shard=3)}]),
    "huggingface": ("huggingface", [{}]),
    "peft": ("peft", [{}]),
    "dcp": ("dcp", [{}, {"mesh": Mesh(dp_shard=2, tp=2)}]),
    "mindspore": (
        "mindspore",
        [
            {"names": "keep"},
            {"names": "keep", "iteration": True},
            {
                "names": "keep",
                "layout": "distributed",
                "parallel_config": ParallelConfig(2, enable_parallel_optimizer=True),
            },
        ],
    ),
}


@pytest.mark.parametrize(
    ("target", "options"), [(t, o) for t, (_, all_) in WRITTEN.items() for o in all_], ids=str
)
def test_what_a_target_writes_is_recognised_opened_and_the_same(target, options, tmp_path):
    (tmp_path / "adapter").mkdir()
    folder = write_boxes(tmp_path, TENSORS)
    if target == "peft":
        folder = write_peft(tmp_path / "adapter", TENSORS)
        (folder / "adapter_config.json").write_text("{}")
    convert(folder, tmp_path / "out", TARGETS[target](**options))
    assert detect_layout(tmp_path / "out").name == WRITTEN[target][0]
    again = open_folder(tmp_path / "out")
    assert {name: again.dtypes()[name] for name in TENSORS} == {
        name: t.dtype for name, t in TENSORS.items()
    }
    assert all(same_bits(read_whole(again, name), t) for name, t in TENSORS.items())
    assert all(verdict == "equal" for verdict in verdicts(folder, tmp_path / "out"))


def verdicts(a, b):
    return [change.verdict for change in compare_tensors(a, b, roles=["model"])]


def test_every_target_documents_its_options(tmp_path):
    assert WRITTEN.keys() <= TARGETS.keys()
    for cls in TARGETS.values():
        assert dataclasses.is_dataclass(cls)
        assert all(setting.doc and not setting.is_required for setting in settings(cls).values())
