"""The state of a torch optimizer under its parameters' names, in any order or grouping; and its
sharding, from its declarations and its parameters' sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..errors import CheckpointError, RecipeError
from ..parallel.sharding import AxisShard, Cuts, FusedSlice, local_offset_and_shape
from ._rules.rule_optimizer import dtype_of
from ._rules.sharded import sharded_as
from .bf16_weights import MASTER
from .blocks import ENTRIES, EntryTurns, check_entries
from .optimizer import Optimizer, declared_state
from .state_tensor import LIKE_PARAMETER, SCALAR, ParameterKind, Shape, StateTensor

State = Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class NamedState:
    """``{parameter: {exp_avg: ..., exp_avg_sq: ..., step: ...}}`` of an optimizer whose groups have
    ``names``, without learning rate and other settings, which follow from the recipe and the
    step."""

    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors by parameter name; empty before the first step. Afterwards a parameter
        that has had no gradient yet has no tensors, but is there: it is among the trained ones."""
        if not self.optimizer.state:
            return {}
        return {
            name: dict(self.optimizer.state.get(parameter, {}))
            for group in self.optimizer.param_groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
        }

    def load_state_dict(self, state: State) -> None:
        """Restore ``state``. Raises ``CheckpointError`` if it belongs to other parameters."""
        names = [name for group in self.optimizer.param_groups for name in group["names"]]
        if state and state.keys() != set(names):
            raise other_parameters(state, names)
        plain = self.optimizer.state_dict()
        plain["state"] = {i: dict(state[n]) for i, n in enumerate(names) if state.get(n)}
        self.optimizer.load_state_dict(plain)


def other_parameters(saved: Iterable[str], trained: Iterable[str]) -> CheckpointError:
    """The error for a state of the parameters ``saved`` where others are ``trained``."""
    unknown, missing = sorted({*saved} - {*trained}), sorted({*trained} - {*saved})
    return CheckpointError(
        f"optimizer state of other parameters: {len(unknown)} unknown, {len(missing)} missing "
        f"(for example {(unknown or missing)[0]}); resume with the method and model of the "
        "checkpoint"
    )


@dataclass(frozen=True)
class StateCuts:
    """Sharding and shapes of the state of ``optim``, by pointer: parameter name, a dot, its key."""

    optim: Optimizer
    parameters: Mapping[str, torch.Tensor]
    cuts: Mapping[str, Cuts] = field(default_factory=dict)  # of sharded parameters

    def check(self) -> None:
        """Raise ``RecipeError`` if a sharded parameter has a state that cannot be sharded."""
        for name, parameter in self.parameters.items():
            cuts = self.cuts.get(name, ()) if _is_sharded(parameter) else ()
            check_cuts(self.optim, tuple(parameter.shape), plain_cuts(cuts), name)

    def of(self, pointer: str) -> Cuts | None:
        """The sharding of a tensor of the state; None if it is not recorded."""
        name, _, key = pointer.rpartition(".")
        cuts = self.cuts.get(name)
        if cuts is None or name not in self.parameters:
            return None
        declared, shape = self._declared(key), tuple(self.parameters[name].shape)
        if isinstance(cuts, FusedSlice):  # a part of a larger tensor, which is what was cut
            return cuts if declared.shape(shape) == shape else ()
        return (declared.cuts(shape, cuts) if declared.cuts else None) or ()

    def like(self, pointer: str) -> torch.Tensor | None:
        """A tensor of the state that does not exist yet; None if all ranks have a plain one."""
        name, _, key = pointer.rpartition(".")
        parameter = self.parameters.get(name)
        if not isinstance(parameter, DTensor):
            return None
        shape = self._declared(key).shape(tuple(parameter.shape))
        if not shape:
            return None
        if shape == tuple(parameter.shape):
            return torch.zeros_like(parameter, dtype=torch.float32)
        return _zeros(
            shape, plain_cuts(self.of(pointer)), parameter, plain_cuts(self.cuts.get(name))
        )

    def _declared(self, key: str) -> StateTensor:
        declarations = {MASTER: LIKE_PARAMETER, ENTRIES: SCALAR, **self.optim.state_tensors}
        if key not in declarations:
            raise CheckpointError(
                f"optimizer state {key!r}: {type(self.optim).__name__} does not declare its "
                f"sharding, only that of {', '.join(declarations)}; add it to state_tensors"
            )
        return declarations[key]


def check_shards(
    optim: Optimizer,
    entries: EntryTurns | None,
    shapes: Mapping[str, Shape],
    cuts: tuple[AxisShard, ...],
) -> None:
    """Raise ``RecipeError`` if the state of parameters of these ``shapes``, or the ``entries`` of
    them that are trained, cannot be sharded like this."""
    check_entries(entries, optim, shapes, dict.fromkeys(shapes, cuts))
    for name, shape in shapes.items():
        check_cuts(optim, shape, cuts, name)


def check_cuts(
    optim: Optimizer, shape: tuple[int, ...], cuts: tuple[AxisShard, ...], name: str
) -> None:
    """Raise ``RecipeError`` if the state of a parameter with these shards cannot be sharded."""
    if cuts and optim.offload_state:
        axes = " and ".join(f"parallel.{axis}" for axis in dict.fromkeys(c.axis for c in cuts))
        raise RecipeError(
            f"optim: offload_state is for complete parameters, and {name} is sharded over {axes}; "
            f"remove offload_state, or set {axes} to 1"
        )
    for key, declared in optim.state_tensors.items() if cuts else ():
        if not declared.belongs_to(shape, ParameterKind(is_matrix=len(shape) > 1)):
            continue
        odd = [c for c in cuts if declared.cuts is None or declared.cuts(shape, (c,)) is None]
        if odd:
            axes = " and ".join(f"parallel.{axis}" for axis in dict.fromkeys(c.axis for c in odd))
            raise RecipeError(
                f"optim: {type(optim).__name__} cannot shard its state ({key} of {name}) over "
                f"{axes}; set {'them' if ' and ' in axes else 'it'} to 1, or use another optimizer"
            )


def shapes_of_state(
    optim: Optimizer, parameter: torch.Tensor, kind: ParameterKind, at_once: Shape | None = None
) -> dict[str, tuple[Shape, torch.dtype]]:
    """Shape and dtype of each tensor that ``optim`` keeps for ``parameter`` after an update, which
    changes entries of the shape ``at_once``; None: all."""
    shape, mode = tuple(parameter.shape) if at_once is None else at_once, optim.bf16_weights
    declared = declared_state(optim, shape, kind)
    if mode == MASTER and parameter.dtype == torch.bfloat16:
        declared[MASTER] = LIKE_PARAMETER
    if shape != tuple(parameter.shape):
        declared[ENTRIES] = replace(SCALAR, dtype="int64")
    return {
        key: (declaration.shape(shape), dtype_of(declaration, parameter.dtype, mode))
        for key, declaration in declared.items()
    }


def _is_sharded(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(
        not isinstance(placed, Replicate) for placed in parameter.placements
    )


def plain_cuts(cuts: Cuts | None) -> tuple[AxisShard, ...]:
    """The shards of a tensor that has a parameter for itself."""
    return () if cuts is None or isinstance(cuts, FusedSlice) else cuts


def _zeros(
    shape: tuple[int, ...],
    cuts: tuple[AxisShard, ...],
    parameter: DTensor,
    parameter_cuts: tuple[AxisShard, ...],
) -> DTensor:
    """This rank's part of a tensor of ``shape`` with ``cuts`` along axes of the mesh of
    ``parameter``, whose own sharding is ``parameter_cuts``."""
    mesh = parameter.device_mesh
    axes = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    sizes = dict(zip(axes, mesh.shape, strict=True))
    place = dict(zip(axes, mesh.get_coordinate() or [0] * mesh.ndim, strict=True))
    dims = {cut.axis: cut.dim for cut in cuts}
    parameter_dims = {cut.axis: cut.dim for cut in parameter_cuts}
    placements: list[Placement] = []
    for axis, placed in zip(axes, parameter.placements, strict=True):
        if axis not in dims:
            placements.append(Replicate())
        else:  # as its parameter, whose cuts may be in another order than the axes of the mesh
            is_alike = dims[axis] == parameter_dims.get(axis)
            placements.append(placed if is_alike else Shard(dims[axis]))
    _, extent = local_offset_and_shape(shape, cuts, sizes, place)
    local = torch.zeros(extent, dtype=torch.float32, device=parameter.device)
    return sharded_as(parameter, local, shape, placements)
