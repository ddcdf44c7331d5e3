"""Replay the operations of a step of a model without the Python of its modules.

A step of one row of a small model is a third products; half of the rest is Python. Steps differ in
the values of their tensors and in the columns that they read. So two steps are recorded, of
different lengths: whatever differs between them must be an integer that is the length plus a
constant. A third one is computed in both ways, and must have the same bits, as must a step of each
length that is twice that of the last such step. A model whose Python reads values of tensors, or
whose step contains tensors from elsewhere, is not replayed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import first_line
from ..log import fell_back

logger = logging.getLogger(__name__)
Replay = Callable[..., torch.Tensor]  # of the length and the inputs
# Functions of a tensor that say nothing of its values; a property's is ``__get__``.
_OF_SHAPES = {
    *("__get__", "__len__", "size", "dim", "numel", "nelement", "stride", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "element_size"),
}
_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True)
class _Name:
    """What stands in generated code: a tensor, or the length plus a constant."""

    text: str


@dataclass(frozen=True)
class _Call:
    """An operation."""

    function: Any
    arguments: Any  # positional and by name, with names in place of tensors
    results: Any  # the same of what it returns


class _NotReplayableError(Exception):
    """Its text says why."""


class RecordedSteps:
    """The steps of one model, by what decides which operations they have."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._version = 0
        self._steps: dict[Hashable, _Step] = defaultdict(_Step)

    def logits(
        self,
        key: Hashable,
        compute: Callable[[], torch.Tensor],
        inputs: Sequence[torch.Tensor],
        length: int,
        *,
        version: int,
    ) -> torch.Tensor:
        """[B, V] what ``compute`` returns.

        Args:
            key: equal for steps of the same operations.
            compute: runs the model.
            inputs: all tensors of the step that are not the model's.
            length: the columns that are read.
            version: of the model's modules. Those of another version are forgotten.
        """
        if version != self._version:
            self._steps.clear()
            self._version = version
        step = self._steps[key]
        if step.is_refused or step.recorded_length == length:
            return compute()
        if step.replay is not None and length < step.bound:
            return step.replayed(length, inputs)
        if step.replay is not None:
            return self._checked(key, step, compute, inputs, length)
        recording = _Recording(length, _tensors_of(self._model), inputs)
        logits_BV = recording.run(compute)
        with self._refusing(key):
            step.add(recording)
        return logits_BV

    def _checked(
        self,
        key: Hashable,
        step: _Step,
        compute: Callable[[], torch.Tensor],
        inputs: Sequence[torch.Tensor],
        length: int,
    ) -> torch.Tensor:
        replayed_BV = None
        with self._refusing(key):
            # First: both write into the cache, and what the model writes is to stay.
            replayed_BV = step.replayed(length, inputs)
        logits_BV = compute()
        if replayed_BV is not None:
            with self._refusing(key):
                step.check(length, replayed_BV, logits_BV)
        return logits_BV

    @contextmanager
    def _refusing(self, key: Hashable) -> Iterator[None]:
        """A block after whose error the model computes all steps of ``key``."""
        try:
            yield
        except Exception as error:  # of any operation: the model computes the step itself
            what = f"{type(self._model).__name__}: each step of a response runs all of its Python"
            why = f"its operations cannot be replayed: {first_line(error)}"
            fell_back(what, why, "takes longer for a small model", logging.INFO)
            self._steps[key] = _Step(is_refused=True)


@dataclass
class _Step:
    recording: _Recording | None = None  # the first one, until there is a second
    replay: Replay | None = None
    bound: int = 0  # of lengths that need no check
    is_refused: bool = False

    @property
    def recorded_length(self) -> int | None:
        """Whose repetition would say nothing."""
        return self.recording.length if self.recording is not None else None

    def add(self, recording: _Recording) -> None:
        """Use a recording of a step. Raises ``_NotReplayableError``."""
        if recording.problem:
            raise _NotReplayableError(recording.problem)
        if self.recording is None:
            self.recording = recording
        else:
            self.replay, self.recording = _replay_of(self.recording, recording), None

    def replayed(self, length: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The logits of a replay."""
        assert self.replay is not None
        # Not around the eager model: FSDP gathers weights in it that could not be changed.
        with torch.inference_mode():
            return self.replay(length, *inputs)

    def check(self, length: int, replayed_BV: torch.Tensor, logits_BV: torch.Tensor) -> None:
        """Raise ``_NotReplayableError`` unless a replay has the logits of the model."""
        if not torch.equal(replayed_BV, logits_BV):
            raise _NotReplayableError(f"one of {length} columns has other logits")
        self.bound = 2 * length


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and other attributes of all modules."""
    tensors = {}
    for module in model.modules():
        for values in (module._parameters, module._buffers, vars(module)):
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    tensors[id(value)] = value
    return {f"w{number}": tensor for number, tensor in enumerate(tensors.values())}


@dataclass
class _Recording(TorchFunctionMode):
    """The operations of one step."""

    length: int
    constants: Mapping[str, torch.Tensor]
    inputs: Sequence[torch.Tensor]
    calls: list[_Call] = field(default_factory=list)
    result: _Name | None = None
    num_inputs: int = 0
    _names: dict[int, _Name] = field(default_factory=dict)
    _alive: list[torch.Tensor] = field(default_factory=list)  # or ids would be those of others
    problem: str = ""  # why it cannot be replayed

    def __post_init__(self) -> None:
        super().__init__()

    def run(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``compute`` returns."""
        self.num_inputs = len(self.inputs)
        named = {**self.constants, **{f"i{n}": tensor for n, tensor in enumerate(self.inputs)}}
        self._names = {id(tensor): _Name(name) for name, tensor in named.items()}
        values = _ValuesRead()  # type: ignore[no-untyped-call]
        with self, values:
            logits_BV = compute()
        self.problem = self.problem or values.problem
        self.result = self._names.get(id(logits_BV))
        self._names, self._alive, self.inputs = {}, [], ()  # they may be a cache that is let go
        return logits_BV

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call and note ``function``."""
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        versions = list(map(_version, given))
        result = function(*args, **kwargs)
        made = [tensor for tensor in _tensors(result) if id(tensor) not in self._names]
        is_changed = versions != list(map(_version, given))
        if made or is_changed:
            arguments = _mapped((args, kwargs), self._named)
            for tensor in made:
                self._names[id(tensor)] = _Name(f"v{len(self._alive)}")
                self._alive.append(tensor)
            self.calls.append(_Call(function, arguments, _mapped(result, self._assigned)))
        elif given and not list(_tensors(result)) and function.__name__ not in _OF_SHAPES:
            self.problem = f"{function.__name__} reads values"
        return result

    def _named(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._names:
            self.problem = "it computes with a tensor of unknown origin"
        return self._names.get(id(value))

    def _assigned(self, value: object) -> object:
        return self._named(value) if isinstance(value, torch.Tensor) else _Name("_")


class _ValuesRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices operations whose result, or its shape, tells Python of values."""

    problem = ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call ``function``."""
        if _OF_VALUES & set(function.tags) and not _has_only_numbers(function, args):
            self.problem = f"{function.__name__} depends on values"
        return function(*args, **(kwargs or {}))


def _has_only_numbers(function: Any, args: Any) -> bool:
    """Whether rows are chosen by their numbers, so that the result has their shape."""
    is_index = function is torch.ops.aten.index.Tensor
    return is_index and not any(i.dtype in (torch.bool, torch.uint8) for i in _tensors(args[1]))


def _replay_of(first: _Recording, second: _Recording) -> Replay:
    """A function of the calls that both have. Raises ``_NotReplayableError``."""
    names: dict[str, Any] = dict(second.constants)
    lines: list[str] = []
    last_use: dict[str, int] = {}
    functions: dict[Any, str] = {}
    if len(first.calls) != len(second.calls) or first.result != second.result:
        raise _NotReplayableError("steps have different operations")

    def written(value: object) -> str:
        if isinstance(value, _Name):
            if value.text.startswith("v"):
                last_use[value.text] = len(lines)
            return value.text
        if isinstance(value, tuple | list):
            text = "".join(f"{written(part)}, " for part in value)
            return f"({text})" if isinstance(value, tuple) else f"[{text}]"
        if isinstance(value, slice):
            return f"slice({written(value.start)}, {written(value.stop)}, {written(value.step)})"
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        names[name := f"c{len(names)}"] = value
        return name

    for call, other in zip(first.calls, second.calls, strict=True):
        if call.function != other.function or call.results != other.results:
            raise _NotReplayableError("steps have different operations")
        args, kwargs = _merged(call.arguments, other.arguments, first.length, second.length)
        name = functions.setdefault(call.function, f"f{len(functions)}")
        names[name] = call.function
        given = [*map(written, args), *(f"{key}={written(value)}" for key, value in kwargs.items())]
        lines.append(f"{written(call.results)} = {name}({', '.join(given)})")
    last_use[written(second.result)] = len(lines)
    for name, place in last_use.items():  # memory is freed as eager code frees it
        if place < len(lines):
            lines[place] += f"; del {name}"
    inputs = ", ".join(f"i{number}" for number in range(second.num_inputs))
    body = "\n    ".join([*lines, f"return {written(second.result)}"])
    exec(f"def replay(length, {inputs}):\n    {body}", names)
    replay: Replay = names["replay"]
    return replay


def _merged(first: Any, second: Any, first_length: int, second_length: int) -> Any:
    """What stands for both of two arguments. Raises ``_NotReplayableError``."""

    def merged(one: Any, other: Any) -> Any:
        return _merged(one, other, first_length, second_length)

    if type(first) is type(second):
        if isinstance(first, tuple | list) and len(first) == len(second):
            parts = [merged(*both) for both in zip(first, second, strict=True)]
            return parts if isinstance(first, list) else tuple(parts)
        if isinstance(first, dict) and first.keys() == second.keys():
            return {key: merged(first[key], second[key]) for key in first}
        if isinstance(first, slice):
            ends = zip(*((s.start, s.stop, s.step) for s in (first, second)), strict=True)
            return slice(*(merged(*both) for both in ends))
        if first == second:
            return first
        if type(first) is int and first - first_length == second - second_length:
            return _Name(f"length + {first - first_length}")
    raise _NotReplayableError(f"an argument is {first!r} in one step and {second!r} in another")


def _mapped(value: Any, change: Callable[[object], object]) -> Any:
    """``value`` with what is inside of containers changed."""
    if isinstance(value, tuple | list):
        parts = [_mapped(part, change) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors inside of containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
