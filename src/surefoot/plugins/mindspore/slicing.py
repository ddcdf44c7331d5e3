"""Which part of each tensor a rank's file contains, where no strategy file says it.

The full shapes come from the configuration of the model. The ``parallel_config`` of MindSpore's
YAML is then checked against every file. Without one, the ratio of a file's dimension to the full
one gives the number of shards, and the axis follows if only one layout of this kind of tensor gives
these shapes and values. Where several do, the folder is rejected with the ways that fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path

import torch

from ...checkpoint.disk.tensorfile import TensorFile
from ...checkpoint.layouts.layout import DcpChunk
from ...checkpoint.sources import TensorsInMemory
from ...errors import CheckpointError, counted, first_line
from ...parallel.sharding import Box
from ...storage import files
from .naming import family_of, heads_of, to_mindspore
from .ranks import Slice, check_fit
from .reading import KEEP
from .strategy import Strategy
from .tensor_layout import ParallelConfig, TensorLayout, has_row_per_token, weight_of

Shapes = Mapping[str, tuple[int, ...]]  # of full weights, by MindSpore's names
_CONFIG = "config.json"
_ASK = (
    "name the strategy files with --strategy, or the parallel_config of the training with "
    "--source-parallel-config data_parallel=2,model_parallel=2,vocab_emb_dp=false"
)


@dataclass(frozen=True)
class Slicing:
    """What is known of the slices besides the ranks' files themselves."""

    strategy: Path | None = None  # files, if they are not beside the ranks
    config: ParallelConfig | None = None  # of the YAML of the training
    model: Path | None = None  # the folder of the same model's configuration
    family: str | None = None  # of names, if they do not say it


UNKNOWN = Slicing()


def find_strategy(opened: Sequence[TensorFile], slicing: Slicing, where: Path) -> Strategy:
    """The strategy of the files of all ranks, in their order. Raises ``CheckpointError`` if the
    ``parallel_config`` does not fit them, or if without one none fits, or several."""
    problem = f"{where}: {len(opened)} ranks without strategy files"
    if slicing.model is None or not files.exists(slicing.model / _CONFIG):
        raise CheckpointError(
            f"{problem}, so the part of each rank is unknown; put the model's {_CONFIG} beside "
            f"them or name its folder (--base MODEL, or model.path beside model.weights), or {_ASK}"
        )
    try:
        shapes = _shapes(opened, slicing.model, slicing.family)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{problem}, and {slicing.model / _CONFIG} is no configuration of a model "
            f"({first_line(error)}); name its folder with --base MODEL, or {_ASK}"
        ) from None
    if (config := slicing.config) is None:
        return _inferred(opened, shapes, where)
    try:
        if config.world_size != len(opened):
            raise _MisfitError(f"it is about {counted(config.world_size, 'rank')}")
        return _strategy(opened, shapes, config, where, decides=True)
    except _MisfitError as error:
        try:
            inferred = _inferred(opened, shapes, where)
            other = f"what fits is {_reading(inferred.num_devices, inferred)}"
        except CheckpointError as unknown:
            other = f"without it: {unknown}"
        raise CheckpointError(
            f"{problem}, and {_settings_of(config)} does not fit: {error}; {other}"
        ) from None


class _MisfitError(Exception):
    """No layout of a ``parallel_config`` gives the part of a tensor that the files contain."""


def _settings_of(config: ParallelConfig) -> str:
    """The settings of a ``parallel_config`` that are not the usual ones."""
    usual = ParallelConfig()
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    settings = [
        f"{name}={value}" for name, value in values.items() if value != getattr(usual, name)
    ]
    return f"parallel_config {','.join(settings) or 'data_parallel=1'}"


def _reading(size: int, strategy: Strategy) -> str:
    """The axes of a strategy as a ``parallel_config``."""
    layouts = (layout for stage in strategy.stages for layout in stage.values())
    model_parallel = max(
        prod(replace(each, num_shards=0).counts(len(each.tensor_map[0]))) for each in layouts
    )
    return (
        f"data_parallel={size // model_parallel},model_parallel={model_parallel},"
        f"pipeline_stage={len(strategy.stages)}"
    )


def _shapes(opened: Sequence[TensorFile], model: Path, family: str | None) -> Shapes:
    """The full shapes of the model by MindSpore's names, from its configuration alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    base = TensorsInMemory(dict(network.state_dict()))
    names = {name: e.shape for file in opened for name, e in file.header.entries.items()}
    family = family or family_of(names)
    if family in (None, KEEP):
        return base.shapes()
    return to_mindspore(base, family or "", heads_of(model)).shapes()


def _inferred(opened: Sequence[TensorFile], shapes: Shapes, where: Path) -> Strategy:
    """The strategy that fits the files. Raises ``CheckpointError``: there is none, or several."""
    num_stages = _num_stages(opened, shapes, where)
    size = len(opened) // num_stages
    fitting: list[tuple[ParallelConfig, Strategy]] = []
    for model_parallel in range(1, size + 1):
        if size % model_parallel == 0:
            config = ParallelConfig(size // model_parallel, model_parallel, num_stages)
            with suppress(_MisfitError):
                fitting.append((config, _strategy(opened, shapes, config, where, decides=False)))
    devices = counted(size, "device")
    if not fitting:
        raise CheckpointError(f"{where}: no layout on {devices} gives these shapes; {_ASK}")
    ways = {
        tuple(
            (name, _boxes(layouts[name], shapes[weight_of(name)], size))
            for layouts in strategy.stages
            for name in sorted(layouts)
        ): config
        for config, strategy in reversed(fitting)
    }
    if len(ways) > 1:
        readings = " and ".join(map(_settings_of, ways.values()))
        raise CheckpointError(f"{where}: the shapes fit {readings}; {_ASK}")
    return fitting[0][1]


def _num_stages(opened: Sequence[TensorFile], shapes: Shapes, where: Path) -> int:
    """The number of blocks of ranks that have no weights in common."""
    names = [{name for name in file.header.entries if weight_of(name) in shapes} for file in opened]
    for count in range(len(opened), 0, -1):
        size = len(opened) // count
        if len(opened) % count:
            continue
        blocks = [set().union(*names[i * size : (i + 1) * size]) for i in range(count)]
        if sum(map(len, blocks)) == len(set().union(*blocks)) and all(blocks):
            return count
    raise CheckpointError(f"{where}: no rank has a weight of the model; is it another model?")


def _strategy(
    opened: Sequence[TensorFile],
    shapes: Shapes,
    config: ParallelConfig,
    where: Path,
    *,
    decides: bool,
) -> Strategy:
    """The strategy on the axes of ``config``. With ``decides``, its other settings choose where a
    tensor has several layouts. Raises ``_MisfitError`` if a tensor has none, and
    ``CheckpointError`` if one has several."""
    size = len(opened) // config.pipeline_stage
    stages: list[dict[str, dict[tuple[Box, ...], TensorLayout]]] = []
    for stage in range(config.pipeline_stage):
        of_stage = opened[stage * size : (stage + 1) * size]
        parts = {n: (e.shape, file) for file in of_stage for n, e in file.header.entries.items()}
        found: dict[str, dict[tuple[Box, ...], TensorLayout]] = {}
        for name, (part, file) in sorted(parts.items()):
            if (full := shapes.get(weight_of(name))) is None:
                continue  # a number of the training, or a tensor that every rank has
            fitting = _fitting(name, full, of_stage, size, config.model_parallel)
            found[name] = {_boxes(layout, full, size): layout for layout in fitting}
            if not found[name]:
                raise _MisfitError(
                    f"{file.path} contains {list(part)} of {name[:200]!r}, whose full shape is "
                    f"{list(full)}"
                )
            # YAML files leave vocab_emb_dp out, and both of its values often fit the same shapes.
            is_said = config.vocab_emb_dp is not None or not has_row_per_token(name)
            if decides and is_said and len(found[name]) > 1:
                dtype = file.entry(name).dtype
                own = replace(config, pipeline_stage=1).stages({weight_of(name): (dtype, full)})
                boxes = _boxes(own[0][weight_of(name)], full, size)
                found[name] = {b: x for b, x in found[name].items() if b == boxes} or found[name]
        stages.append(found)
    for found in stages:
        for name, layouts in found.items():
            if len(layouts) > 1:
                raise CheckpointError(
                    f"{where}: {name[:200]!r} of shape {list(shapes[weight_of(name)])} can be "
                    f"sharded over {counted(size, 'device')} in several ways that give these "
                    f"files: {' or '.join(map(_parts, layouts.values()))}; {_ASK}"
                )
    return Strategy(
        [{name: next(iter(x.values())) for name, x in found.items()} for found in stages], where
    )


def _parts(layout: TensorLayout) -> str:
    """By what a layout shards a tensor, and into how many parts."""
    by_model = prod(replace(layout, num_shards=0).counts(len(layout.tensor_map[0])))
    by_optimizer = f" and {layout.num_shards} by enable_parallel_optimizer"
    return f"{by_model} by model_parallel{by_optimizer if layout.num_shards else ''}"


def _fitting(
    name: str,
    full: tuple[int, ...],
    opened: Sequence[TensorFile],
    size: int,
    model_parallel: int,
) -> Iterator[TensorLayout]:
    """The layouts that give the shapes, and are consistent with the values, of these files."""
    holders = [(rank, file) for rank, file in enumerate(opened) if name in file.header.entries]
    shapes = {file.entry(name).shape for _, file in holders}
    for layout in _candidates(weight_of(name), full, size, model_parallel):
        try:
            boxes = _boxes(layout, full, size)
            if shapes == {boxes[0].shape}:
                slices = [Slice(r, DcpChunk(file, full, boxes[r])) for r, file in holders]
                check_fit({name: slices}, Path())
                yield layout
        except CheckpointError:
            continue


def _candidates(
    weight: str, full: tuple[int, ...], size: int, model_parallel: int
) -> Iterator[TensorLayout]:
    """The ways MindSpore Transformers may lay out a tensor of this name."""
    for vocab_emb_dp in (True, False):
        config = ParallelConfig(size // model_parallel, model_parallel, vocab_emb_dp=vocab_emb_dp)
        try:
            (plain,) = (stage[weight] for stage in config.stages({weight: ("F32", full)}))
        except CheckpointError:
            continue
        yield plain
        divisors = (shards for shards in range(2, size + 1) if size % shards == 0)
        yield from (replace(plain, num_shards=shards) for shards in divisors)


def _boxes(layout: TensorLayout, full: tuple[int, ...], size: int) -> tuple[Box, ...]:
    return tuple(layout.box(full, device) for device in range(size))
