"""What opening a model, and its first save, would raise, as far as ``config.json`` says it: called
before a row is encoded or a weight is read."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import (
    ModelError,
    RecipeError,
    RunError,
    first_line,
    installation,
)
from ..log import fell_back, silenced
from ..model.config import check_alone, quantization
from ..model.expansion import refuse_divided
from ..model.isolation import refuse_parts
from ..model.pipeline_stages import plan_pipeline_stages
from ..model.routers import refuse_stages
from ..model.section import ModelSection
from ..model.weight_matrices import refuse_read_weights
from ..optim.optimizer import Optimizer, check_learning_rates, with_parts
from ..optim.state import check_shards, shapes_of_state
from ..optim.state_tensor import check_kinds
from ..parallel.section import ParallelSection
from ..parallel.sharding import AxisShard
from ..parallel.tp_plan import module_plans
from ..parallel.world import ALONE
from ._file_checks import check_files
from .draft import MetaTensors, NetworkOptions
from .network import Network
from .open import open_network

FLASH = "flash_attention_2"
NOT_ON_META = (RuntimeError, NotImplementedError, AttributeError, IndexError)


def refuse_early(
    base: Path,
    section: ModelSection,
    options: NetworkOptions,
    optim: Optimizer,
    *,
    num_processes: int,
    output_dir: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    others: Sequence[ModelSection] = (),
) -> None:
    """Raise the errors that opening the model in ``base`` and its first save would raise, as far as
    they are known: ``ModelError``, ``RecipeError`` or ``RunError``. The model gets rows for tokens
    that only ``tokenizer`` has; of ``others``, such as a reference, the files are checked."""
    check_device(section)
    check_alone(section, num_processes)
    quantization(section)
    check_files(base, section)
    for other in others:
        check_files(None, other)
    parallel, plain = options.parallel, replace(options, parallel=ParallelSection())
    try:
        with silenced():
            network = open_network(base, section, tokenizer, ALONE, plain, MetaTensors())
    except NOT_ON_META as error:  # an architecture that needs values when it is made
        what = f"{section.path}: checked when its weights are loaded"
        cost = "finds a mistake in the method or the mesh only after the data is encoded"
        fell_back(what, f"it cannot be built on the meta device ({first_line(error)})", cost)
        return
    refuse_divided(network.module, tp=parallel.tp, pp=parallel.pp)
    if parallel.cp > 1:
        refuse_parts(network.inner)
    if parallel.tp > 1:
        refuse_read_weights(network.inner)
        module_plans(network.inner, parallel.tp)
    if parallel.pp > 1:
        refuse_stages(network.inner, section.router_bias_update_rate)
        num_stages = parallel.pp * parallel.num_parts
        plan_pipeline_stages(network.inner, num_stages, is_converted=network.weights.is_converted)
    names = with_parts(network.trainable, network.layouts)
    check_learning_rates(optim.learning_rates, names)
    check_kinds(optim, network.layouts)
    check_optimizer_shards(network, optim, parallel)
    check_disk(output_dir, size_of_save(network, optim))


def check_optimizer_shards(network: Network, optim: Optimizer, parallel: ParallelSection) -> None:
    """Raise ``RecipeError`` if the state of ``optim`` cannot be sharded as the mesh shards
    matrices: along rows by ``dp_shard``, and some of them along columns by ``tp``."""
    cuts = [AxisShard("dp_shard", 0)] if (parallel.dp_shard or 1) > 1 else []
    cuts += [AxisShard("tp", 1)] if parallel.tp > 1 else []
    matrices = {name: tuple(p.shape) for name, p in network.named.items() if p.ndim == 2}
    check_shards(optim, network.blocks.entries, matrices, tuple(cuts))


def check_device(section: ModelSection) -> None:
    """Raise ``ModelError`` if the attention of a recipe needs what this machine has not."""
    if section.attention != FLASH:
        return
    if not torch.cuda.is_available():
        raise ModelError(f"model.attention: {FLASH} needs a GPU, and there is none; use auto")
    if find_spec("flash_attn") is None and find_spec("kernels") is None:
        raise ModelError(
            f"model.attention: {FLASH} needs the package flash-attn, which is not installed; "
            "install it, or use auto"
        )


def check_packages(names: Sequence[str], setting: str) -> None:
    """Raise ``RecipeError`` if a package that ``setting`` needs is not installed."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, which wandb leaves
            how = installation(name)
            raise RecipeError(f"{setting} needs {name}, which is not installed: {how}")


def size_of_save(network: Network, optim: Optimizer) -> int:
    """The bytes of a checkpoint's weights and optimizer state."""
    weights = network.weights.state_dict().values()
    total: int = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    state = {}
    for name, parameter in network.named.items():
        at_once = network.blocks.shape_at_once(name, tuple(parameter.shape))
        shapes = shapes_of_state(optim, parameter, network.layouts[name], at_once)
        state[name] = sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
    return total + max(sum(state[name] for name in turn) for turn in network.blocks.turns())


def check_disk(folder: Path, size: int) -> None:
    """Raise ``RunError`` if the disk of ``folder`` has no room for one checkpoint."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise RunError(
            f"train.output_dir: one checkpoint takes {_readable(size)}, and the disk of {existing} "
            f"has {_readable(free)} free; free some space, or choose another folder"
        )


def _readable(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
