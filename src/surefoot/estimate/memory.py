"""Memory of one process, from a description of the model and of one micro-batch. Pure arithmetic.

Sharding is FSDP2's (``parallel/shard.py``): a tensor is cut along its first dimension into
``dp_shard`` pieces of the rounded-up size. The largest process, the first, is what counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FLOAT32 = 4  # bytes; what gradients are summed over processes in, if weights are gathered in less


@dataclass(frozen=True)
class Weight:
    """One parameter (tied ones are one), or a buffer."""

    shape: tuple[int, ...]
    item_size: int  # bytes of an element, as it is held
    is_trained: bool
    layer: int | None  # the block it belongs to; None outside of them
    state: int = 0  # bytes that the optimizer holds for it when it is whole, but for scalars
    scalars: int = 0  # bytes of these
    is_cut: bool = True  # over the processes; buffers of modules are not

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def share(self, count: int) -> int:
        """Elements of the largest of ``count`` pieces."""
        if not self.shape or not self.is_cut:
            return self.size
        return -(-self.shape[0] // count) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Snapshot:
    """Bytes that are alive at one moment, by kind."""

    activations: int  # made on the way from the input to the loss, and back
    logits: int  # as wide as the vocabulary
    copies: int  # of weights, in the type of the arithmetic

    @property
    def total(self) -> int:
        """All of them."""
        return self.activations + self.logits + self.copies


@dataclass(frozen=True)
class Pass:
    """What the heaviest micro-batch takes beside weights, gradients and optimizer.

    All but ``growing`` is without the gradients of weights.
    """

    kept: Snapshot  # from the forward for the backward pass
    at_peak: Snapshot  # when most is alive
    growing: int  # the most, where the gradients of weights come on top one by one

    @property
    def activations(self) -> int:
        """What is kept for the backward pass and still there at the peak, but for logits."""
        return min(self.kept.activations, self.at_peak.activations)

    @property
    def working(self) -> int:
        """What is there at the peak for a short time: temporaries, a layer computed again."""
        return self.at_peak.activations - self.activations


@dataclass(frozen=True)
class Mesh:
    """How a run is spread. One process has no mesh, and gathers nothing."""

    dp_replicate: int = 1
    dp_shard: int = 1
    reshard_after_forward: bool = True

    @property
    def num_processes(self) -> int:
        """All of them."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True)
class Memory:
    """Bytes of one process by part, and the most that is taken at one time."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    working: int
    buffers: int
    peak: int

    def parts(self) -> dict[str, int]:
        """The parts by name, in the order in which they are shown."""
        names = ("weights", "gradients", "optimizer", "activations", "logits", "working", "buffers")
        return {name: getattr(self, name) for name in names}


def memory(
    weights: Sequence[Weight], one: Pass, mesh: Mesh, *, compute_size: int, accumulates: bool
) -> Memory:
    """What the largest process of ``mesh`` takes.

    Args:
        weights: all parameters and buffers of the model.
        one: the heaviest micro-batch, on weights as they are gathered.
        mesh: over how many processes.
        compute_size: bytes of an element of a gathered weight; 0 if gathered as it is held.
        accumulates: whether a step has several micro-batches. If so the gradients of the first
            are there in the backward pass of the second; if not they come while activations go.
    """
    is_alone = mesh.num_processes == 1
    count = 1 if is_alone else mesh.dp_shard
    held = sum(weight.share(count) * weight.item_size for weight in weights)
    trained = [weight for weight in weights if weight.is_trained]
    gradients = sum(weight.share(count) * weight.item_size for weight in trained)
    optimizer = sum(_state(weight, count) for weight in trained)
    buffers = one.at_peak.copies if is_alone else gathered(weights, mesh, compute_size)
    passing = one.at_peak.activations + one.at_peak.logits + buffers
    most = gradients + passing
    if is_alone and not accumulates:
        most = max(one.growing, gradients)
    return Memory(
        weights=held,
        gradients=gradients,
        optimizer=optimizer,
        activations=one.activations,
        logits=one.at_peak.logits,
        working=one.working,
        buffers=buffers,
        peak=held + optimizer + most,
    )


def _state(weight: Weight, count: int) -> int:
    if not weight.size:
        return weight.scalars
    return weight.state * weight.share(count) // weight.size + weight.scalars


def gathered(weights: Sequence[Weight], mesh: Mesh, compute_size: int) -> int:
    """What FSDP2 holds whole at the worst moment, which is in the backward pass.

    Weights outside the layers are whole throughout, with their gradients. Of the layers the one at
    work and the next one, which comes meanwhile, or all of them if they are not given back after
    the forward pass; and the gradients of one layer, with the float32 buffer in which they are
    summed over the processes.
    """
    cut = [weight for weight in weights if weight.is_cut]
    outside = [weight for weight in cut if weight.layer is None]
    layers = [
        [weight for weight in cut if weight.layer == index]
        for index in sorted({weight.layer for weight in cut if weight.layer is not None})
    ]
    sizes = [_whole(layer, compute_size) for layer in layers]
    largest = max(sizes, default=0)
    here = 2 * largest if mesh.reshard_after_forward else sum(sizes) + largest
    summed = max(FLOAT32, compute_size) if compute_size else 0
    reduced = max(
        (_whole(_trained(layer), compute_size) + _summed(layer, summed) for layer in layers),
        default=0,
    )
    return _whole(outside, compute_size) + _whole(_trained(outside), compute_size) + here + reduced


def _trained(weights: Iterable[Weight]) -> list[Weight]:
    return [weight for weight in weights if weight.is_trained]


def _whole(weights: Iterable[Weight], compute_size: int) -> int:
    return sum(weight.size * (compute_size or weight.item_size) for weight in weights)


def _summed(weights: Iterable[Weight], item_size: int) -> int:
    """The buffer in which the gradients of these weights are summed over the processes."""
    return sum(weight.size * (item_size or weight.item_size) for weight in _trained(weights))
