"""The operations of a step and the bits of their results: two traces of a step show where bits part
company, for an upgrade of a library, another machine, or a change of code.

Operations are those that PyTorch dispatches (``torch.utils._python_dispatch``), in their order,
forward and backward, with the module in which each is (``torch.utils.module_tracker``). Views and
memory that nobody has written yet are skipped. Watching changes no bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from ..errors import RunError
from ..parallel.progress import wait_for_ranks
from ..storage import files
from ..training.arguments import Context
from ..training.callback import TrainerControl, TrainerState
from .replay import Watcher

_FORMAT = "surefoot trace 1"


@dataclass(frozen=True)
class Operation:
    """One operation of a step, with the hash of what it wrote."""

    step: int
    module: str  # in which it ran, such as "model.layers.0.self_attn"; empty: in none
    name: str  # such as "aten.mm.default"
    is_backward: bool
    result: str  # xxh3-128 of the bytes of all results

    @property
    def key(self) -> tuple[int, str, str, bool]:
        """What is the same in two traces of one step."""
        return self.step, self.module, self.name, self.is_backward

    def __str__(self) -> str:
        way = "backward" if self.is_backward else "forward"
        return f"{self.name} in {self.module or 'no module'} (step {self.step}, {way})"


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends each operation that runs within it."""

    def __init__(self, operations: list[Operation], step: int, modules: ModuleTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.step, self.modules = operations, step, modules

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func``, and record it."""
        results = func(*args, **(kwargs or {}))
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and "empty" not in func.__name__:
            # Of an operation on lists in place, nothing is returned.
            written = list(_tensors(results)) or [
                tensor
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
                for tensor in _tensors(value)
            ]
            if written:
                self._record(str(func), written)
        return results

    def _record(self, name: str, written: Sequence[torch.Tensor]) -> None:
        hashed = files.Hash()
        for tensor in written:
            plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            flat = wait_for_ranks(plain.detach().resolve_neg().cpu).contiguous().flatten()
            hashed.update(flat.view(torch.uint8).numpy().data)
        innermost = max(self.modules.parents, key=lambda name: (name.count("."), name))
        module = innermost.partition(".")[2]
        backward = self.modules.is_bw
        self.operations.append(Operation(self.step, module, name, backward, hashed.hexdigest()))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a result or an argument; of a distributed one, what is on this rank."""
    if isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


@dataclass
class Trace(Watcher):
    """Records the operations of the steps from ``first`` on: gradients and update, not sampling,
    and on the rank where it is alone."""

    first: int
    operations: list[Operation] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)

    def on_step_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Watch the step that begins."""
        step = state.global_step + 1
        self.close()  # a step without an update has no end
        if step >= self.first:
            modules = self._open.enter_context(ModuleTracker())
            self._open.enter_context(_Recorder(self.operations, step, modules))

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Watch no more."""
        self.close()

    def close(self) -> None:
        """Leave a step that an error has ended, too."""
        self._open.close()

    def save(self, path: Path, surroundings: Mapping[str, Any]) -> None:
        """Write the trace: a line of JSON with the surroundings, and one for each operation."""
        lines = [{"format": _FORMAT, "surroundings": surroundings}, *map(astuple, self.operations)]
        with files.raising(RunError, f"--trace {path}"):
            files.write_new(path, "".join(f"{json.dumps(line)}\n" for line in lines).encode())


@dataclass(frozen=True)
class TraceReport:
    """What two traces of one step have in common."""

    num_alike: int  # operations that both have, in their order
    num_differing: int  # of these, how many have other bits
    first: tuple[int, Operation] | None  # the first of them, and its number, from 1
    # Where the operations themselves are others, first: of the file, and of now.
    parted: tuple[Operation | None, Operation | None] | None

    @property
    def is_equal(self) -> bool:
        """Whether operations were compared, and all are equal to the bit."""
        return self.num_alike > 0 and self.first is None and self.parted is None

    @classmethod
    def of(cls, before: Sequence[Operation], now: Sequence[Operation]) -> TraceReport:
        """Compare the traces, aligned by step, module and operation."""
        a, b = [each.key for each in before], [each.key for each in now]
        pairs = list(zip(before, now, strict=False))
        if a != b:
            blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
            pairs = [
                (before[block.a + i], now[block.b + i])
                for block in blocks
                for i in range(block.size)
            ]
        odd = [(i, new) for i, (old, new) in enumerate(pairs, 1) if old.result != new.result]
        ways = [(x, y) for x, y in zip_longest(before, now) if not (x and y and x.key == y.key)]
        return cls(len(pairs), len(odd), odd[0] if odd else None, ways[0] if ways else None)


@dataclass(frozen=True)
class SavedTrace:
    """A trace that a file has."""

    surroundings: Mapping[str, Any]
    operations: Sequence[Operation]

    @classmethod
    def read(cls, path: Path, first: int, last: int) -> SavedTrace:
        """The trace in ``path``. Raises ``RunError``: it cannot be read, is none, or is of other
        steps than those from ``first`` to ``last``."""
        with files.reading(
            RunError, f"--compare {path}", "did `surefoot replay --trace` write it?"
        ):
            head, *rows = map(files.parse_json, files.read_file(path).splitlines())
            if head["format"] != _FORMAT:
                raise ValueError(f"its format is {head['format']}, not {_FORMAT}")
            saved = cls(head["surroundings"], [Operation(*row) for row in rows])
        steps = sorted({operation.step for operation in saved.operations})
        if steps != [*range(first, last + 1)]:
            words = f"--step {steps[0]} --to {steps[-1]}" if steps else "of none"
            raise RunError(f"--compare {path}: is of other steps; its own are {words}")
        return saved
