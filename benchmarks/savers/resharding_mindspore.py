"""MindSpore's conversions, as ``resharding.py`` does the others; runs in MindSpore's environment.

resharding_mindspore.py make SOURCES BYTES
resharding_mindspore.py TASK mindspore SOURCES OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import boxes
import costs
import mindspore
import numpy as np
from mindspore.train.node_strategy_pb2 import ParallelStrategyMap
from safetensors.numpy import save_file

EIGHT, FOUR = 8, 4


def make(sources: Path, num_bytes: float) -> None:
    """The files of eight processes, by rows and with columns, whole ones, and how they are cut."""
    generator, shapes = np.random.default_rng(0), boxes.shapes(num_bytes)
    tensors = {n: generator.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}
    for kind in ("rows", "columns"):
        for ranks in (EIGHT, FOUR):
            path = sources / f"strategy_{kind}_{ranks}.ckpt"
            path.write_bytes(_strategy(shapes, kind, ranks))
        for rank in range(EIGHT):
            folder = sources / f"mindspore_{kind}" / f"rank_{rank}"
            folder.mkdir(parents=True)
            own = {n: _part(n, tensor, kind, rank) for n, tensor in tensors.items()}
            save_file(own, folder / f"model{rank}.safetensors", metadata={"format": "ms"})
    merge(sources / "mindspore_rows", sources / "mindspore_whole")


def _part(name: str, tensor: np.ndarray, kind: str, rank: int) -> np.ndarray:
    if tensor.ndim == 1:
        return tensor
    dim = boxes.dim_of(name, tensor.shape, kind)
    start, shape = list(boxes.cut(tensor.shape, dim, EIGHT))[rank]
    index = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
    return np.ascontiguousarray(tensor[index])


def _strategy(shapes: dict[str, tuple[int, ...]], kind: str, ranks: int) -> bytes:
    """How a compiled program would say that its weights are cut."""
    told = ParallelStrategyMap(current_stage=2)
    for name, shape in shapes.items():
        item = told.parallel_strategy_item.add(node_name=f"MatMul_{name}")
        item.parallel_strategys.stage = 0
        layout = told.parallel_layout_item.add(param_name=name).parallel_layouts
        layout.dev_matrix.add().dim.append(ranks)
        dim = boxes.dim_of(name, shape, kind) if len(shape) > 1 else None
        layout.tensor_map.add().dim.extend(0 if d == dim else -1 for d in range(len(shape)))
        layout.param_split_shape.add()
        layout.indices_offset.add()
        layout.field = layout.opt_weight_shard_step = layout.opt_weight_shard_size = 0
    return told.SerializeToString()


def merge(source: Path, target: Path) -> None:
    """Eight to one."""
    strategy = source.with_name(f"strategy_{source.name.split('_')[1]}_{EIGHT}.ckpt")
    mindspore.unified_safetensors(str(source), str(strategy), str(target))


def reshard(source: Path, target: Path) -> None:
    """Eight to four."""
    strategies = [str(source.with_name(f"strategy_rows_{ranks}.ckpt")) for ranks in (EIGHT, FOUR)]
    mindspore.transform_checkpoints(
        str(source), str(target), "model", *strategies, process_num=2, output_format="safetensors"
    )


def split(source: Path, target: Path) -> None:
    """One to eight."""
    mindspore.load_distributed_checkpoint(
        None,
        predict_strategy=str(source.with_name(f"strategy_rows_{EIGHT}.ckpt")),
        format="safetensors",
        unified_safetensors_dir=str(source),
        dst_safetensors_dir=str(target),
        max_process_num=2,
    )


WORK = {
    "merge": ("mindspore_rows", merge),
    "merge_columns": ("mindspore_columns", merge),
    "reshard": ("mindspore_rows", reshard),
    "split": ("mindspore_whole", split),
}


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        name, work = WORK[sys.argv[1]]
        source, target = Path(sys.argv[3]) / name, Path(sys.argv[4])
        costs.report(lambda: work(source, target), source, target)
