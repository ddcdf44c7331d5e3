"""Convert once between numbers of processes, cold, and flush (reshard.py).

resharding.py make SOURCES BYTES        the folders that are converted
resharding.py TASK SUBJECT SOURCES OUT  one conversion
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import boxes
import costs
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from transformers import LlamaConfig

from surefoot.checkpoint.converting._resharding import reshard
from surefoot.checkpoint.converting.targets import TARGETS, write_dcp
from surefoot.checkpoint.disk.tensorfile import explain
from surefoot.checkpoint.layouts.layout import file_name
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.sources import copy
from surefoot.parallel.sharding import Box, Mesh
from surefoot.use.exporting.conversion import convert

EIGHT, FOUR = Mesh(dp_shard=8), Mesh(dp_shard=4)


class Held:
    """A part of a run that is its tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        """By name."""
        return self.tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """They were read into directly."""


def make(sources: Path, num_bytes: float) -> None:
    """The same weights: ours whole and of eight, and boxes as PyTorch has them, in two ways."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in boxes.shapes(num_bytes).items()}
    saved = save(sources, 1, {"model": Held(tensors)})
    saved.rename(sources / "ours_1")
    reshard(sources / "ours_1", sources / "ours_8", layout="distributed", mesh=EIGHT)
    for kind in ("rows", "columns"):
        _write_boxes(sources / f"boxes_{kind}", tensors, kind)
    model = sources / "huggingface"
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=boxes.HIDDEN,
        intermediate_size=boxes.INNER,
        vocab_size=boxes.VOCABULARY,
        num_hidden_layers=sum(name.endswith("q_proj.weight") for name in tensors),
        num_attention_heads=16,
        tie_word_embeddings=False,
        dtype="float32",
    ).save_pretrained(model)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    _to_mindspore(model, sources / "mindspore")


def _write_boxes(folder: Path, tensors: dict[str, torch.Tensor], kind: str) -> None:
    folder.mkdir()
    for rank in range(EIGHT.size):
        own, told = {}, {}
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            dim = boxes.dim_of(name, shape, kind)
            box = Box(*list(boxes.cut(shape, dim, EIGHT.size))[rank])
            own[name] = tensor[box.slices_in(Box.whole(shape))].contiguous()
            told[name] = (shape, box)
        save_file(own, folder / f"{file_name(rank)}.safetensors", metadata=explain(told))


def cp(source: Path, target: Path) -> None:
    """All of a folder."""
    subprocess.run(["cp", "-r", source, target], check=True)


def consolidate(source: Path, target: Path) -> None:
    """PyTorch's own merge."""
    target.mkdir()
    tensors = dict.fromkeys(open_folder(source).shapes(), 1)
    consolidate_safetensors_files(
        str(source), str(target), fqn_to_index_mapping=tensors, num_threads=2
    )


def load_ours(source: Path, _target: Path) -> None:
    """Into tensors that are there."""
    load(source, {"model": Held(_empty(source))})


def load_dcp(source: Path, _target: Path) -> None:
    """Into tensors that are there."""
    reader = HuggingFaceStorageReader(str(source))
    dcp.load(_empty(source), storage_reader=reader, no_dist=True)


def _empty(source: Path) -> dict[str, torch.Tensor]:
    return {name: torch.ones(shape) for name, shape in open_folder(source).shapes().items()}


def _to(mesh: Mesh) -> Callable[[Path, Path], object]:
    return lambda source, target: reshard(source, target, layout="distributed", mesh=mesh)


def _boxes_to(mesh: Mesh) -> Callable[[Path, Path], object]:
    return lambda source, target: write_dcp(open_folder(source), target, mesh=mesh)


def _to_mindspore(source: Path, target: Path) -> None:
    convert(source, target, TARGETS["mindspore"]())


def _from_mindspore(source: Path, target: Path) -> None:
    convert(source, target, TARGETS["huggingface"]())


# By task and subject: what is converted, and how.
WORK: dict[tuple[str, str], tuple[str, Callable[[Path, Path], object]]] = {
    ("merge", "cp"): ("boxes_rows", cp),
    ("merge", "surefoot"): ("boxes_rows", lambda a, b: copy(open_folder(a), b)),
    ("merge", "surefoot_checkpoint"): ("ours_8", reshard),
    ("merge", "dcp"): ("boxes_rows", consolidate),
    ("merge_columns", "cp"): ("boxes_columns", cp),
    ("merge_columns", "surefoot"): ("boxes_columns", lambda a, b: copy(open_folder(a), b)),
    ("merge_columns", "dcp"): ("boxes_columns", consolidate),
    ("reshard", "cp"): ("ours_8", cp),
    ("reshard", "surefoot"): ("boxes_rows", _boxes_to(FOUR)),
    ("reshard", "surefoot_checkpoint"): ("ours_8", _to(FOUR)),
    ("split", "cp"): ("ours_1", cp),
    ("split", "surefoot"): ("ours_1", _boxes_to(EIGHT)),
    ("split", "surefoot_checkpoint"): ("ours_1", _to(EIGHT)),
    ("mindspore", "cp"): ("huggingface", cp),
    ("mindspore", "to_mindspore"): ("huggingface", _to_mindspore),
    ("mindspore", "from_mindspore"): ("mindspore", _from_mindspore),
    ("load", "surefoot_checkpoint"): ("ours_8", load_ours),
    ("load", "dcp"): ("boxes_rows", load_dcp),
    ("load", "dcp_columns"): ("boxes_columns", load_dcp),
}


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        name, work = WORK[sys.argv[1], sys.argv[2]]
        source, target = Path(sys.argv[3]) / name, Path(sys.argv[4])
        torch.zeros(1)
        costs.report(lambda: work(source, target), source, target)
