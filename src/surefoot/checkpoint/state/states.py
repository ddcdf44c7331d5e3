"""Stateful objects: what ``save`` stores and ``load`` restores (``state_dict``,
``load_state_dict``), plus wrappers for modules, optimizers and random generators.

Most of torch is Stateful as it is: modules, optimizers, learning rate schedulers, samplers. The
wrappers handle parameters with two names, store an optimizer's state under its parameters' names,
and the random generators.

A nested state is flattened into named tensors and a JSON structure that refers to them. Values that
JSON cannot represent are an object with one key that starts with ``$``: ``{"$tensor": name}``,
``{"$tuple": [...]}``, ``{"$dict": [[key, value], ...]}`` for keys that are not text,
``{"$float": "nan"}``, ``{"$int": "0x..."}`` beyond 53 bits. Nothing is lost or guessed: values that
cannot be restored exactly are rejected.

The local box of a tensor on a rank is computed from the recorded sharding, not from torch's own
offsets, which are wrong for uneven shards of one dimension over two axes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import CheckpointError, counted
from ...parallel.sharding import AxisShard, Box, Cuts, local_offset_and_shape
from ..disk.manifest import Kind
from ..disk.strict_json import MAX_DEPTH
from .roles import MODEL, OPTIMIZER, STATE, ShardedState, Stateful


@dataclass(frozen=True)
class FileState:
    """A state that is saved in files of its own, ``NAME.safetensors``, after its name among the
    states: weights or, under ``X_optimizer``, the optimizer state of the weights ``X``."""

    state: ShardedState

    def state_dict(self) -> dict[str, Any]:
        """The state as it is now."""
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``."""
        self.state.load_state_dict(state)


@dataclass(frozen=True)
class UnshardedState(ShardedState):
    """A state of which this process has every tensor, or DTensors with their own sharding."""

    state: Stateful

    def state_dict(self) -> dict[str, Any]:
        """The state as it is now."""
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``."""
        self.state.load_state_dict(state)


@dataclass(frozen=True)
class PartialState:
    """The optimizer state of some parameters, saved and loaded apart from that of the others."""

    whole: ShardedState
    is_own: Callable[[str], bool]  # of a parameter, by its name in files

    def state_dict(self) -> dict[str, Any]:
        """The live tensors of these parameters."""
        return {name: slots for name, slots in self.whole.state_dict().items() if self.is_own(name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become ``state``; that of the other parameters stays."""
        slots_by_name = self.whole.state_dict()
        others = {name: s for name, s in slots_by_name.items() if not self.is_own(name)}
        self.whole.load_state_dict({**others, **state})

    def cuts_of(self, pointer: str) -> Cuts | None:
        """The sharding of a tensor, which does not depend on the file that it is in."""
        return self.whole.cuts_of(pointer)

    def is_copy(self, pointer: str) -> bool:
        """Whether another rank writes this tensor, to whichever file."""
        return self.whole.is_copy(pointer)

    def like(self, pointer: str) -> torch.Tensor | None:
        """What a tensor that does not exist yet is loaded into."""
        return self.whole.like(pointer)


def adopted(states: Mapping[str, Stateful]) -> tuple[dict[str, ShardedState], dict[str, Stateful]]:
    """``model``, ``optimizer`` and every ``FileState``, which have files of their own, by role,
    and the other states. A plain module has every tensor once."""
    files: dict[str, ShardedState] = {}
    rest: dict[str, Stateful] = {}
    for name, state in states.items():
        stateful = ModuleState(state) if isinstance(state, nn.Module) else state
        if isinstance(stateful, FileState):
            files[name] = stateful.state
        elif name in (MODEL, OPTIMIZER):
            files[name] = UnshardedState(stateful)
        else:
            rest[name] = stateful
    if STATE in files:
        raise CheckpointError(f"{STATE!r} is the file of all other states; choose another name")
    return files, rest


@dataclass(frozen=True)
class ModuleState:
    """A module whose tied tensors are stored once, under the first of their names."""

    module: nn.Module

    def state_dict(self) -> dict[str, Any]:
        """The live tensors, and the module's other state."""
        whole = self.module.state_dict()
        return {name: whole[name] for name, first in _first_names(whole).items() if first == name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``: every name must exist, or the one with which it shares its tensor."""
        first = _first_names(self.module.state_dict())
        self.module.load_state_dict({name: state[first_name] for name, first_name in first.items()})


def _first_names(tree: Mapping[str, Any]) -> dict[str, str]:
    """For every name the first one that has the same tensor, usually the name itself."""
    firsts: dict[object, str] = {}
    return {name: firsts.setdefault(_place(name, value), name) for name, value in tree.items()}


def _place(name: str, value: object) -> object:
    """A key that two values share only if they are the same tensor."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or not value.numel():
        return name
    storage = value.untyped_storage()._cdata
    return storage, value.storage_offset(), value.shape, value.stride(), value.dtype


@dataclass(frozen=True)
class NamedOptimizer:
    """A torch optimizer under its parameters' names, which do not depend on the order of
    parameters.

    ``{name: {exp_avg: ..., ...}, "param_groups": [{"lr": ..., "params": [name, ...]}, ...]}``. So
    weights that the optimizer does not update can be identified, and shared by the next checkpoint.
    """

    optimizer: torch.optim.Optimizer
    named_parameters: Iterable[tuple[str, nn.Parameter]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "named_parameters", list(self.named_parameters))

    def state_dict(self) -> dict[str, Any]:
        """The live tensors by name, and the settings of every group."""
        names, plain = self._names(), self.optimizer.state_dict()
        order = [name for group in names for name in group]
        groups = zip(plain["param_groups"], names, strict=True)
        return {
            **{order[i]: state for i, state in plain["state"].items()},
            "param_groups": [{**group, "params": params} for group, params in groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``. Raises ``CheckpointError`` if its groups contain other parameters."""
        names = self._names()
        order = [name for group in names for name in group]
        saved = {frozenset(group["params"]): group for group in state["param_groups"]}
        plain: dict[str, Any] = self.optimizer.state_dict()
        for i, params in enumerate(names):
            if frozenset(params) not in saved:
                raise CheckpointError(
                    "optimizer state of other parameters, or in other groups: there is no "
                    f"group of exactly these {len(params)} (for example "
                    f"{params[0] if params else 'none'})"
                )
            numbers = plain["param_groups"][i]["params"]  # PyTorch numbers parameters
            plain["param_groups"][i] = {**saved[frozenset(params)], "params": numbers}
        plain["state"] = {i: state[name] for i, name in enumerate(order) if name in state}
        self.optimizer.load_state_dict(plain)

    def _names(self) -> list[list[str]]:
        name_of = {id(parameter): name for name, parameter in self.named_parameters}
        groups = [group["params"] for group in self.optimizer.param_groups]
        if odd := [p for params in groups for p in params if id(p) not in name_of]:
            raise CheckpointError(
                f"the optimizer updates {counted(len(odd), 'parameter')} without a name, one of "
                f"shape {list(odd[0].shape)}; pass the named_parameters() of every module it "
                "updates"
            )
        return [[name_of[id(p)] for p in params] for params in groups]


class RandomState:
    """The random generators of this process, as one state."""

    def state_dict(self) -> dict[str, Any]:
        """Python's, numpy's and torch's generators, and that of the GPU in use."""
        version, words, gauss = random.getstate()
        numpy: dict[str, Any] = np.random.get_state(legacy=False)
        key, position = numpy["state"]["key"].astype(np.int64), numpy["state"]["pos"]
        state: dict[str, Any] = {
            "python": [version, list(words), gauss],
            # The Mersenne twister's 624 words are a tensor: files contain no numpy arrays.
            "numpy": {**numpy, "state": {"key": torch.from_numpy(key), "pos": int(position)}},
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators; that of a device that does not exist here is skipped."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        words = state["numpy"]["state"]
        key = words["key"].numpy().astype(np.uint32)
        np.random.set_state({**state["numpy"], "state": {"key": key, "pos": words["pos"]}})
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


Skeleton = Any  # what json.dumps takes
_EXACT = 1 << 53  # integers up to here survive in every JSON reader
_LEVELS = MAX_DEPTH // 4  # a level of the state costs up to three of the JSON


def split(tree: object, where: str) -> tuple[dict[str, torch.Tensor], Skeleton]:
    """The tensors in ``tree`` by their path ("a.0.b"), and the structure; errors name ``where``."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(value: Any, path: tuple[str, ...]) -> Skeleton:
        if isinstance(value, torch.Tensor):
            name = ".".join(path)
            if name in tensors:  # {"a": {"b": t}, "a.b": t}
                raise CheckpointError(f"{where}: two tensors would both be called {name!r}")
            tensors[name] = value
            return {"$tensor": name}
        if len(path) > _LEVELS:
            raise CheckpointError(
                f"{where}: nested deeper than {_LEVELS} levels: {'.'.join(path)[:200]}"
            )
        if isinstance(value, dict):
            return _dict(value, path, walk, where)
        if type(value) in (list, tuple):
            items = [walk(item, (*path, str(i))) for i, item in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        return _leaf(value, f"{where}.{'.'.join(path)}")

    return tensors, walk(tree, ())


def join(skeleton: Skeleton, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """The inverse of ``split``."""
    if isinstance(skeleton, list):
        return [join(item, tensors, where) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next(iter(skeleton), "")
    if not tag.startswith("$"):
        return {key: join(value, tensors, where) for key, value in skeleton.items()}
    if len(skeleton) != 1 or tag not in _READERS:
        raise CheckpointError(f"{where}: {str(skeleton)[:80]} is not a state of this format")
    try:
        return _READERS[tag](skeleton[tag], tensors, where)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {str(skeleton)[:80]} cannot be read: {error}") from error


def pointers(skeleton: Skeleton) -> list[str]:
    """The names of all tensors to which ``skeleton`` refers, in order."""
    if isinstance(skeleton, list):
        return [name for item in skeleton for name in pointers(item)]
    if not isinstance(skeleton, dict):
        return []
    if skeleton.keys() == {"$tensor"}:
        return [str(skeleton["$tensor"])]
    return [name for item in skeleton.values() for name in pointers(item)]


def _dict(
    value: Mapping[Any, Any], path: tuple[str, ...], walk: Callable[..., Skeleton], where: str
) -> Skeleton:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: walk(item, (*path, key)) for key, item in value.items()}
    where = ".".join((where, *path))
    return {"$dict": [[_key(k, where), walk(v, (*path, str(k)))] for k, v in value.items()]}


def _key(key: object, where: str) -> Skeleton:
    if type(key) is tuple:
        return {"$tuple": [_key(part, where) for part in key]}
    return _leaf(key, f"{where}: the key {str(key)[:80]!r}")


def _leaf(value: object, where: str) -> Skeleton:
    kind = type(value)
    # The type itself, not its subclasses: a numpy.float64 is a float, and
    # would come back as a plain one.
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_EXACT <= value <= _EXACT else {"$int": hex(value)}  # type: ignore[operator,arg-type]
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}  # type: ignore[arg-type]
    advice = "call .item() on it first" if hasattr(value, "item") else "store plain data instead"
    raise CheckpointError(
        f"{where}: cannot store a {kind.__module__}.{kind.__qualname__}; {advice}"
    )


_READERS: dict[str, Callable[[Any, Mapping[str, torch.Tensor], str], Any]] = {
    "$tensor": lambda name, tensors, _: tensors[name],
    "$tuple": lambda items, tensors, where: tuple(join(item, tensors, where) for item in items),
    "$dict": lambda pairs, tensors, where: {
        join(key, tensors, where): join(value, tensors, where) for key, value in pairs
    },
    "$int": lambda text, *_: int(text, 16),
    "$float": lambda text, *_: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text],
}


Tensors = Mapping[str, torch.Tensor]


class Exchange(Protocol):
    """How the ranks of a pipeline communicate."""

    def of_stages(self, value: Any) -> list[Any]:
        """The objects of all ranks, in the order of their stages."""


@dataclass(frozen=True)
class PipelinedWeights(ShardedState):
    """The weights of some pipeline stages, under the names of the full model.

    Tensors of other stages are on the meta device: they have a name and a shape but no values, and
    are neither written nor read here. So every rank checks all names, and rank 0 writes a record of
    all tensors.
    """

    here: ShardedState  # of this rank
    model: nn.Module
    elsewhere: Tensors  # on the meta device
    copies: Collection[str]  # names of what an earlier stage has as well, which then writes it
    second: Mapping[str, str]  # name in files of what is tied to it here: its name in the model
    exchange: Exchange
    kind: Kind
    small_files: Callable[..., dict[str, bytes]]  # beside the weights
    is_converted: ClassVar[bool] = False

    @property
    def is_adapter(self) -> bool:
        """Whether the files contain an adapter, not a model."""
        return self.kind == "adapter"

    def cuts_of(self, name: str) -> Cuts | None:
        """The sharding of a tensor; None if it is not recorded."""
        return self.here.cuts_of(name)

    def is_copy(self, name: str) -> bool:
        """Whether another rank writes this tensor."""
        return name in self.copies

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All names; the live tensors of this rank."""
        return {**self.elsewhere, **self.here.state_dict(), **self._second()}

    def _second(self) -> dict[str, torch.Tensor]:
        parameters = {name: self.model.get_parameter(place) for name, place in self.second.items()}
        return {name: parameter.detach() for name, parameter in parameters.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Tensors) -> None:
        """Load this rank's tensors from ``state``."""
        for name, tensor in self._second().items():
            tensor.copy_(state[name])
        elsewhere = self.elsewhere.keys() | self.second.keys()
        self.here.load_state_dict({n: tensor for n, tensor in state.items() if n not in elsewhere})


@dataclass(frozen=True)
class PipelinedOptimizer:
    """The optimizer state of some pipeline stages: ``{parameter: {slot: tensor}}``."""

    here: ShardedState  # of this rank
    elsewhere: Collection[str]  # parameters
    copies: Collection[str]
    exchange: Exchange

    def cuts_of(self, pointer: str) -> Cuts | None:
        """The sharding of a tensor of the state."""
        return self.here.cuts_of(pointer)

    def is_copy(self, pointer: str) -> bool:
        """Whether another rank writes this tensor."""
        return pointer.rpartition(".")[0] in self.copies

    def like(self, pointer: str) -> torch.Tensor | None:
        """A tensor that does not exist yet; on the meta device if never on this rank."""
        if pointer.rpartition(".")[0] in self.elsewhere:
            return torch.empty((), device="meta")
        return self.here.like(pointer)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors, and the names of all ranks: a collective call."""
        local: dict[str, dict[str, torch.Tensor]] = self.here.state_dict()
        slots = {name: [*tensors] for name, tensors in local.items()}
        all_slots = {n: s for part in self.exchange.of_stages(slots) for n, s in part.items()}
        empty = torch.empty((), device="meta")
        return {n: local.get(n) or dict.fromkeys(names, empty) for n, names in all_slots.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Load this rank's tensors from ``state``."""
        self.here.load_state_dict({n: dict(s) for n, s in state.items() if n not in self.elsewhere})


def owners(exchange: Exchange, names: Iterable[str]) -> list[set[str]]:
    """The names that each rank of a pipeline is the first to have, given those of this rank."""
    seen: set[str] = set()
    owned = []
    for names_of_rank in exchange.of_stages(list(names)):
        owned.append(set(names_of_rank) - seen)
        seen |= set(names_of_rank)
    return owned


BLOCK = 1 << 20  # elements read at a time


@dataclass(frozen=True)
class LocalBox:
    """The local part of one tensor."""

    values: torch.Tensor  # of the box; shares memory with the tensor
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    cuts: Cuts = ()  # how it is sharded

    def narrowed(self, box: Box) -> LocalBox:
        """The part of it that is inside ``box``."""
        if box == self.box:
            return self
        return LocalBox(self.values.detach()[box.slices_in(self.box)], self.shape, box)

    def fill(self, read: Callable[[Box], torch.Tensor]) -> None:
        """Copy in the result of ``read`` for boxes of the full tensor, block by block."""
        for block in self.box.blocks(BLOCK) if self.box.size else ():
            self.values[block.slices_in(self.box)].copy_(read(block))


def local_box_of(name: str, tensor: torch.Tensor, cuts: Cuts | None = None) -> LocalBox:
    """The local box of ``tensor`` on this rank. A plain tensor is replicated on every rank; a
    tensor on the meta device is on other ranks, and its local box is empty.

    If ``cuts`` are not recorded, they are derived from the tensor's placements. Raises
    ``CheckpointError`` if these are not enough.
    """
    if tensor.is_meta:
        nothing = (0,) * tensor.ndim
        return LocalBox(tensor, tuple(tensor.shape), Box(nothing, nothing))
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return LocalBox(tensor, shape, Box.whole(shape))
    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    sizes = dict(zip(_axes(tensor), mesh.shape, strict=True))
    place = dict(zip(sizes, mesh.get_coordinate() or [0] * mesh.ndim, strict=True))
    cuts = _plain_cuts(name, tensor) if cuts is None else cuts
    values, box = tensor.to_local(), Box(*local_offset_and_shape(shape, cuts, sizes, place))
    if tuple(values.shape) != box.shape:
        raise CheckpointError(
            f"{name}: this rank has {list(values.shape)}, expected {list(box.shape)} of "
            f"{list(shape)}"
        )
    return LocalBox(values, shape, box, cuts)


def _axes(tensor: DTensor) -> tuple[str, ...]:
    mesh = tensor.device_mesh
    return mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))


def _plain_cuts(name: str, tensor: DTensor) -> Cuts:
    """The sharding of a tensor whose axes shard it in their order on the mesh."""
    cuts = []
    for axis, placement in zip(_axes(tensor), tensor.placements, strict=True):
        if type(placement) is Shard:
            cuts.append(AxisShard(axis, placement.dim))
        elif not isinstance(placement, Replicate):
            raise CheckpointError(f"{name}: cannot store a tensor with the placements {placement}")
    return tuple(cuts)
