"""Memory of one rank, from a description of the model and of one micro-batch. Pure arithmetic.

Sharding is FSDP2's (``parallel/sharded_model.py``): a tensor, or its shard along ``tp``, is divided
along its first dimension into ``dp_shard`` chunks of the rounded-up size. The largest rank, the
first, is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...parallel.sharding import AXES, DATA_AXES

FLOAT32 = 4  # bytes; what gradients are summed over processes in, if weights are gathered in less


@dataclass(frozen=True)
class Weight:
    """One parameter (tied ones are one), or a buffer."""

    shape: tuple[int, ...]  # of the first part along tp
    item_size: int  # bytes of an element, as it is held
    is_trained: bool
    layer: int | None  # the block it belongs to; None outside of them
    state: int = 0  # bytes that the optimizer holds for it when it is whole, but for scalars
    scalars: int = 0  # bytes of these
    is_cut: bool = True  # over the processes; buffers of modules are not
    is_last: bool = False  # its gradient comes at the very end: the input embeddings, not tied
    kept: int | None = None  # bytes of its gradient after the backward pass; None: all

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def share(self, count: int) -> int:
        """Elements of the largest of ``count`` chunks."""
        if not self.shape or not self.is_cut:
            return self.size
        return -(-self.shape[0] // count) * math.prod(self.shape[1:])

    def gradient(self, count: int) -> int:
        """Bytes of the gradient of the largest of ``count`` chunks, after the backward pass."""
        if self.kept is None or not self.size:
            return self.share(count) * self.item_size
        return self.kept * self.share(count) // self.size


@dataclass(frozen=True)
class Snapshot:
    """Live bytes at one moment, by kind."""

    activations: int  # made on the way from the input to the loss, and back
    logits: int  # as wide as the vocabulary
    copies: int  # of weights, in the type of the arithmetic

    @property
    def total(self) -> int:
        """All of them."""
        return self.activations + self.logits + self.copies

    def __add__(self, other: Snapshot) -> Snapshot:
        return Snapshot(
            self.activations + other.activations,
            self.logits + other.logits,
            self.copies + other.copies,
        )


@dataclass(frozen=True)
class Pass:
    """The memory of the peak micro-batch beside weights, gradients and optimizer; all except
    ``growing`` is without the gradients of weights."""

    kept: Snapshot  # from the forward for the backward pass
    at_peak: Snapshot  # when most is alive
    most_activations: int  # at any moment: also when logits are gone, and layers are at work
    growing: int  # the most, where the gradients of weights come on top one by one

    def with_kept(self, kept: Snapshot) -> Pass:
        """The same with what other layers keep until the end of the backward pass."""
        return Pass(
            self.kept + kept,
            self.at_peak + kept,
            self.most_activations + kept.activations,
            self.growing + kept.total,
        )

    @property
    def activations(self) -> int:
        """What is saved for the backward pass and still live at the peak, except logits."""
        return min(self.kept.activations, self.at_peak.activations)

    @property
    def working(self) -> int:
        """Temporary tensors at the peak: intermediate results, a recomputed layer."""
        return self.at_peak.activations - self.activations


@dataclass(frozen=True)
class MeshShape:
    """The mesh of a run. One rank has no mesh, and gathers nothing. A field that is none of the
    ``AXES`` says how layers are gathered; an axis that is no field is not estimated."""

    dp_replicate: int = 1
    dp_shard: int = 1
    reshard_after_forward: bool = True
    tp: int = 1
    pp: int = 1
    cp: int = 1  # of the data ranks, those that share each row

    @property
    def num_processes(self) -> int:
        """All of them."""
        return math.prod(vars(self).get(axis, 1) for axis in AXES)

    @property
    def num_data_ranks(self) -> int:
        """The number of shares into which the examples are divided."""
        count: int = math.prod(vars(self).get(axis, 1) for axis in DATA_AXES)
        return count // self.cp


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part, and the peak."""

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
    weights: Sequence[Weight],
    peak_pass: Pass,
    mesh: MeshShape,
    *,
    compute_size: int,
    accumulates: bool,
    update: int = 0,
) -> Memory:
    """The memory of the largest rank of ``mesh``.

    Args:
        weights: all parameters and buffers of the model.
        peak_pass: the peak micro-batch, on weights as they are gathered.
        mesh: the mesh of ranks.
        compute_size: bytes of an element of a gathered weight; 0 if gathered in its own dtype.
        accumulates: whether a step has several micro-batches, so that gradients of the first exist
            in the backward pass of the second; else they are allocated as activations are freed.
        update: bytes that the optimizer takes for a moment, when activations are freed.
    """
    is_alone = mesh.num_processes == 1
    count = 1 if is_alone else mesh.dp_shard
    weight_bytes = sum(weight.share(count) * weight.item_size for weight in weights)
    trained = [weight for weight in weights if weight.is_trained]
    gradients = sum(weight.gradient(count) for weight in trained)
    optimizer = sum(_state(weight, count) for weight in trained)
    if is_alone:
        buffers = peak_pass.at_peak.copies
        most = max(peak_pass.growing, gradients)
        if accumulates:
            most = gradients + peak_pass.at_peak.total
    else:
        whole = gathered(weights, mesh, compute_size)
        buffers = max(whole.between, whole.at_work, whole.at_end)
        between = whole.between + peak_pass.at_peak.total - peak_pass.at_peak.copies
        most = gradients + max(between, whole.at_work + peak_pass.most_activations, whole.at_end)
    return Memory(
        weights=weight_bytes,
        gradients=gradients,
        optimizer=optimizer,
        activations=peak_pass.activations,
        logits=peak_pass.at_peak.logits,
        working=max(peak_pass.working, update),
        buffers=buffers,
        peak=weight_bytes + optimizer + max(most, gradients + update),
    )


def _state(weight: Weight, count: int) -> int:
    if not weight.size:
        return weight.scalars
    return weight.state * weight.share(count) // weight.size + weight.scalars


@dataclass(frozen=True)
class Gathered:
    """What FSDP2 has unsharded beside its shards, at three moments."""

    between: int  # forward and backward pass, when logits are at work
    at_work: int  # in the backward pass of a layer
    at_end: int  # of the backward pass, when the gradients outside of layers are summed


def gathered(weights: Sequence[Weight], mesh: MeshShape, compute_size: int) -> Gathered:
    """Weights that are gathered, their gradients, and the buffers of both directions.

    Weights outside the layers are always unsharded. A layer is freed after its forward pass; in the
    backward pass one is in use while the next one is gathered, into a buffer first. Or else all
    stay until their backward pass. Once a layer has its gradients it is freed, and they are copied
    to be summed over the ranks, in float32. A rank that shards with no other copies its weights
    when they are used, not before, and its gradients three times.
    """
    is_alone = mesh.dp_shard == 1
    outside, layers = _by_layer(weights)
    sizes = [_whole(layer, compute_size) for layer in layers]
    largest, total = max(sizes, default=0), sum(sizes)
    reduced = max((_reduced(layer, compute_size, is_alone) for layer in layers), default=0)
    if mesh.reshard_after_forward:
        at_work = largest + reduced if is_alone else max(3 * largest, 2 * largest + reduced)
    else:
        at_work = total + max(largest, reduced - largest)
    whole = _whole(outside, compute_size)
    early = [weight for weight in _trained(outside) if not weight.is_last]
    return Gathered(
        between=whole if mesh.reshard_after_forward else whole + total,
        at_work=whole + _whole(early, compute_size) + at_work,
        at_end=whole + _reduced(outside, compute_size, is_alone) + reduced,
    )


def _by_layer(weights: Iterable[Weight]) -> tuple[list[Weight], list[list[Weight]]]:
    """The sharded weights: those outside of layers, and those of each layer."""
    cut = [weight for weight in weights if weight.is_cut]
    numbers = sorted({weight.layer for weight in cut if weight.layer is not None})
    outside = [weight for weight in cut if weight.layer is None]
    return outside, [[weight for weight in cut if weight.layer == index] for index in numbers]


def _reduced(weights: Iterable[Weight], compute_size: int, is_alone: bool) -> int:
    """Gradients of these weights, and the buffer in which they are summed."""
    trained = _trained(weights)
    summed = _whole(trained, max(FLOAT32, compute_size) if compute_size else 0)
    both = _whole(trained, compute_size) + summed
    return max(both, 3 * summed) if is_alone else both


def _trained(weights: Iterable[Weight]) -> list[Weight]:
    return [weight for weight in weights if weight.is_trained]


def _whole(weights: Iterable[Weight], compute_size: int) -> int:
    return sum(weight.size * (compute_size or weight.item_size) for weight in weights)
