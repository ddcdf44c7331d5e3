"""Heads beside the output head: a linear map from the last hidden states to one number,
or to the logits of some classes.

Their numbers leave the model through the output head's own return. FSDP2 gathers weights for the
backward pass only when a gradient reaches what the sharded model has returned.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.layouts.detection import is_sequence_classification
from ..checkpoint.layouts.opening import SCORE, open_folder, open_role
from ..checkpoint.sources import CastSource, Renamed, TensorSource, read_whole
from ..errors import CheckpointError, ModelError, RecipeError
from ..model.weights import UndividedWeights
from ..parallel.sharding import Cuts
from ..parallel.world import World
from .shard_loading import Reader

logger = logging.getLogger(__name__)
V_HEAD, _BIAS = "v_head.summary.weight", "v_head.summary.bias"  # of TRL and LLaMA-Factory
HEADS: Mapping[str, str] = {"values": "value_head"}  # the output: the module, its weights' file


@dataclass(frozen=True)
class Heads:
    """The heads of a model, by the outputs that they compute."""

    modules: Mapping[str, nn.Linear] = field(default_factory=dict)

    @property
    def values(self) -> nn.Linear | None:
        """The head that computes ``Outputs.values``."""
        return self.modules.get("values")

    def name_in_file(self, name: str) -> str | None:
        """The name in its own file of a head's parameter; None for any other parameter."""
        splits = (f".{name}".rpartition(f".{HEADS[output]}.") for output in self.modules)
        return next((head[1:] + leaf for _, head, leaf in splits if head), None)


@dataclass(frozen=True)
class HeadWeights(UndividedWeights):
    """The weights of one head, as the state of a file of its own."""

    name: str  # of the head's module, and of the file
    head: nn.Linear
    cuts: Mapping[str, Cuts] = field(default_factory=dict)  # by names in files

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The live tensors."""
        return {f"{self.name}.{leaf}": tensor for leaf, tensor in self.head.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy ``state`` into the head. Raises ``CheckpointError`` if it is of another one."""
        live = self.state_dict()
        if state.keys() != live.keys():
            raise CheckpointError(
                f"{self.name}: expected the tensors {', '.join(live)}, found {', '.join(state)}"
            )
        for name, tensor in live.items():
            tensor.copy_(state[name])


def add_heads(model: PreTrainedModel, outputs: Mapping[str, int]) -> Heads:
    """Add a head for each of ``outputs`` to ``model``, in place, of so many numbers; on all ranks
    it begins at 0."""
    modules = {}
    weight = model.get_input_embeddings().weight
    width = model.config.get_text_config().hidden_size
    for output, size in outputs.items():
        if output not in HEADS:
            raise RecipeError(f"no head computes {output!r}; expected one of {', '.join(HEADS)}")
        head = nn.Linear(width, size, bias=False, device="cpu", dtype=torch.float32)
        nn.init.zeros_(head.weight)
        head.weight = nn.Parameter(head.weight.detach().to(weight.device))
        model.add_module(HEADS[output], head)
        modules[output] = head
    return Heads(modules)


def stored_heads(heads: Heads, folders: Sequence[Path]) -> dict[str, Reader]:
    """What reads the weights of heads, by their names in files, from the first of ``folders`` that
    has them; heads that are in none start at 0, and the log says so. Raises ``ModelError`` if a
    file is that of another head."""
    readers: dict[str, Reader] = {}
    for output, head in heads.modules.items():
        name = HEADS[output]
        opened = ((folder, _stored(folder, name)) for folder in folders)
        folder, source = next((pair for pair in opened if pair[1] is not None), (folders[-1], None))
        if source is None:
            logger.info("%s: %s has none, so it starts at 0", name, folder)
            continue
        shapes = {key: tuple(t.shape) for key, t in HeadWeights(name, head).state_dict().items()}
        if source.shapes() != shapes:
            raise ModelError(
                f"{folder}: {name}.safetensors is that of another model: it contains "
                f"{_listed(source.shapes())}, but {_listed(shapes)} are needed"
            )
        typed = CastSource(source, head.weight.dtype)
        readers |= {key: partial(typed.read, key) for key in shapes}
        logger.info("%s: read from %s", name, folder)
    return readers


def head_size(folder: Path, output: str) -> int | None:
    """How many numbers the head gives whose weights ``folder`` contains; None if there is none."""
    source = _stored(folder, HEADS[output])
    return None if source is None else source.shapes()[f"{HEADS[output]}.weight"][0]


def _stored(folder: Path, name: str) -> TensorSource | None:
    """The weights of a head in ``folder``, also where other tools store a reward's."""
    weight_name = f"{name}.weight"
    if is_sequence_classification(folder):
        return Renamed(open_folder(folder), {weight_name: SCORE})
    source = open_role(folder, name)
    if source is None or V_HEAD not in source.shapes():
        return source
    bias = source.shapes().get(_BIAS) and float(read_whole(source, _BIAS).float().sum())
    if bias:
        logger.warning("%s: %s adds %.4g to every reward, and is dropped", folder, _BIAS, bias)
    return Renamed(source, {weight_name: V_HEAD})


def _listed(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "nothing"


def refuse_headless(folder: Path, heads: Collection[str]) -> None:
    """Raise ``ModelError`` if a model that can only score is to give anything else."""
    if "values" not in heads and is_sequence_classification(Path(folder)):
        raise ModelError(
            f"{folder}: a reward model or classifier (sequence classification), which has no "
            "output head for tokens; name a language model, or train it with stage: rm or classify"
        )


def refuse_heads(world: World) -> None:
    """Raise ``RecipeError`` where a model with heads cannot be sharded yet."""
    for axis in ("tp", "pp"):
        if world.axes.get(axis, 1) > 1:
            raise RecipeError(
                f"parallel.{axis}: a model with a value head cannot be sharded along {axis} yet; "
                f"leave {axis} at 1 and use parallel.dp_shard"
            )
