"""Live-bytes tracker: counts every storage from the operation that creates it until it is freed.

Works on fake tensors as on real ones. Memory that a kernel uses inside one operation is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .memory_model import Snapshot

KINDS = ("activations", "logits", "copies")


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the storages created in it, by kind: conversions of ``weights`` are
    copies, and logits are as wide as the ``vocabulary``. ``now`` is the current amount, ``peak``
    the moment when it was largest, ``most_activations`` the largest amount of these at any moment,
    ``growing`` the peak with the bytes of gradients ``beside``."""

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        vocabulary: int,
        beside: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {_place(tensor) for tensor in weights}
        self._known: set[int] = set(self._weights)
        self._vocabulary = vocabulary
        self._alive = dict.fromkeys(KINDS, 0)
        self._beside = beside
        self.peak = self.now
        self.growing = self.most_activations = 0

    @property
    def now(self) -> Snapshot:
        """The live bytes at this moment."""
        return Snapshot(**self._alive)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run the operation, and record the storages it has created."""
        out = _run(func, args, kwargs)
        made = [tensor for tensor in _tensors(out) if _place(tensor) not in self._known]
        if made:  # not so for views, and for what an operation has changed in place
            given = {_place(tensor) for tensor in _tensors((args, kwargs))}
            made = [tensor for tensor in made if _place(tensor) not in given]
        if made:
            is_conversion = func is torch.ops.aten._to_copy.default
            is_copy = is_conversion and _place(args[0]) in self._weights
            for tensor in made:
                self._note(tensor, "copies" if is_copy else self._kind(tensor))
            self.look()
        return out

    def _kind(self, tensor: torch.Tensor) -> str:
        is_wide = tensor.ndim >= 2 and tensor.shape[-1] == self._vocabulary
        return "logits" if is_wide and tensor.is_floating_point() else "activations"

    def _note(self, tensor: torch.Tensor, kind: str) -> None:
        place, storage = _place(tensor), tensor.untyped_storage()
        if place in self._known:  # of two results that are one
            return
        self._known.add(place)
        self._alive[kind] += storage.nbytes()
        weakref.finalize(storage, self._forget, place, kind, storage.nbytes())

    def _forget(self, place: int, kind: str, num_bytes: int) -> None:
        self._known.discard(place)
        self._alive[kind] -= num_bytes

    def look(self) -> None:
        """Record a peak, if this is one."""
        now = self.now
        self.most_activations = max(self.most_activations, now.activations)
        self.growing = max(self.growing, now.total + self._beside())
        if now.total > self.peak.total:
            self.peak = now


def _place(tensor: torch.Tensor) -> int:
    """A key that two tensors share only if they share memory."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(out: object) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield leaf


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> object:
    """The result of ``func``; of a kernel that fails on fake tensors, one of the right shape."""
    if func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor):
        return _grouped_mm(*args, **(kwargs or {}))
    return func(*args, **(kwargs or {}))


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    _bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A matrix product for each expert, of E. Fake tensors know bfloat16 and widths of 16 bytes;
    a CPU computes all. The dimension that ``offs`` divides among the experts is T.

    [T, K] x [E, K, N] = [T, N]; [M, T] x [T, N] = [E, M, N]; [E, M, K] x [K, T] = [M, T].
    """
    shape = [left.shape[-2], right.shape[-1]]
    if left.ndim == right.ndim:
        assert offs is not None or left.ndim == 3
        shape.insert(0, left.shape[0] if offs is None else offs.shape[0])
    return left.new_empty(shape, dtype=out_dtype)
