"""The small types that cross the layers: features, a batch, a window of batches, outputs and a
loss.

Shapes: B rows, T tokens of a row, N trained positions of the whole batch, D documents of a packed
row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

IGNORE_INDEX = -100  # a label that does not count; the value torch's cross entropy ignores

# One encoded training item: names (input_ids, labels, ...) to token lists, as the cache stores
# them.
Features = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class TrainedPositions:
    """The trained labels of a batch, in reading order, and where they are predicted: at N positions
    in K columns."""

    labels: torch.Tensor  # [N]
    rows: torch.Tensor  # [N]
    columns: torch.Tensor  # [N] of the batch
    kept: torch.Tensor  # [K] the columns that the head is asked for
    among_kept: torch.Tensor | None  # [N] each position's column among these; None: one row, N = K


@dataclass(frozen=True)
class Batch:
    """One micro-batch of examples.

    A packed batch is one row of all examples end to end (B = 1) with ``cu_seqlens``, the bounds of
    its documents; a padded one is a rectangle with an ``attention_mask``. ``labels[b, t]`` is the
    token to predict *at* position t, that is, from the tokens before t; it is ``IGNORE_INDEX``
    where nothing is trained, and always at the first token of a document.

    A document of a packed row may be a prompt and two answers to it, ``branches``: what is before
    the second answer is then the prompt alone, for labels, positions and attention.
    """

    input_ids: torch.Tensor  # [B, T] int64
    labels: torch.Tensor  # [B, T] int64
    position_ids: torch.Tensor  # [B, T] int64, from 0 in every document
    attention_mask: torch.Tensor | None = None  # [B, T] int64, 1 for real tokens; None when packed
    cu_seqlens: torch.Tensor | None = (
        None  # [D + 1] int32, on the CPU, 0 first and T last; None when padded
    )
    branches: torch.Tensor | None = (
        None  # [D, 3] int32, on the CPU: tokens of prompt and answers, 0 of what is not there
    )
    extras: Mapping[str, torch.Tensor] = field(
        default_factory=dict
    )  # what a stage adds for its loss
    at: TrainedPositions | None = (
        None  # where its labels are predicted, once that has been looked up
    )

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding not counted."""
        import numpy as np

        if self.attention_mask is None:
            return self.input_ids.numel()
        return int(np.count_nonzero(self.attention_mask.cpu().numpy()))

    @property
    def num_trained(self) -> int:
        """Positions that carry a label."""
        import numpy as np

        return int(np.count_nonzero(self.labels.cpu().numpy() != IGNORE_INDEX))

    def located(self) -> Batch:
        """The same batch, with the places of its labels. Counted on the host, as long as the batch
        is there: to count on a GPU is to wait for it."""
        return self if self.at is not None else replace(self, at=trained_positions(self))

    def pinned(self) -> Batch:
        """The same batch in memory that a GPU copies from while it computes."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``, with the places of its labels."""
        return self.located()._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """With ``function`` of each tensor but those that are read on the host, where kernels are
        launched from."""
        moved = {n: tensor for n, tensor in _tensors(self).items() if n not in _ON_HOST}
        found = {name: function(tensor) for name, tensor in moved.items()}
        extras = {name: function(tensor) for name, tensor in self.extras.items()}
        at = self.at
        if at is not None:
            at = replace(at, **{name: function(part) for name, part in _tensors(at).items()})
        return replace(self, **found, extras=extras, at=at)


_ON_HOST = ("cu_seqlens", "branches")


def _tensors(holder: Batch | TrainedPositions) -> dict[str, torch.Tensor]:
    """The fields that are tensors."""
    others = {"extras", "at"}
    found = {f.name: getattr(holder, f.name) for f in fields(holder) if f.name not in others}
    return {name: value for name, value in found.items() if value is not None}


def trained_positions(batch: Batch) -> TrainedPositions:
    """The places of ``batch``. ``labels[b, t]`` is predicted at position t - 1, and the first label
    of a second answer where that of the first one is.

    A packed row keeps just its trained positions; a rectangle, the columns where any row is
    trained.
    """
    import numpy as np

    labels = batch.labels[:, 1:].cpu().numpy()
    rows, columns = np.nonzero(labels != IGNORE_INDEX)
    found = labels[rows, columns]

    def here(values: np.ndarray) -> torch.Tensor:
        return batch.labels.new_tensor(values)

    if batch.branches is not None:
        columns = _before(batch)[columns]
    if len(labels) == 1:
        return TrainedPositions(here(found), here(rows), here(columns), here(columns), None)
    kept, among_kept = np.unique(columns, return_inverse=True)
    return TrainedPositions(here(found), here(rows), here(columns), here(kept), here(among_kept))


def _before(batch: Batch) -> np.ndarray:
    """[T - 1] for each token of a row but the first, the position of the token before it."""
    import numpy as np

    assert batch.cu_seqlens is not None
    assert batch.branches is not None
    before = np.arange(batch.labels.shape[1] - 1)
    starts, parts = batch.cu_seqlens[:-1].numpy(), batch.branches.numpy()
    starts, (prompt, first, _) = starts[parts[:, 2] > 0], parts[parts[:, 2] > 0].T
    before[starts + prompt + first - 1] = starts + prompt - 1
    return before


Window = Sequence[Batch]  # the micro-batches of one optimizer step


@dataclass(frozen=True)
class Outputs:
    """What a stage asked of the model, at the trained positions in reading order.

    ``predictions`` is what the model would have said itself there: the most probable token.
    """

    logps: torch.Tensor | None = None  # [N] float32, log-probability of each label
    total: torch.Tensor | None = None  # scalar, the sum of the labels' log-probabilities
    smoothed: torch.Tensor | None = None  # scalar, the same of smoothed labels, if they are
    entropies: torch.Tensor | None = None  # [N] float32, nats
    values: torch.Tensor | None = None  # [N] float32, from a value head
    predictions: torch.Tensor | None = None  # [N] int64


@dataclass(frozen=True)
class Loss:
    """A sum and what it is a sum over. The loop divides once, by the global weight of the step."""

    total: torch.Tensor  # scalar, summed over the batch
    weight: torch.Tensor  # scalar: trained tokens, pairs, ... of the batch
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)  # sums over the same weight

    def detach(self) -> Loss:
        """The same figures without their graph."""
        metrics = {name: value.detach() for name, value in self.metrics.items()}
        return Loss(self.total.detach(), self.weight.detach(), metrics)


LossFunction = Callable[[Outputs, Batch], Loss]  # pure: what the model said, what it should have


class StepRunner(Protocol):
    """An engine: runs a window through the model and leaves summed gradients behind."""

    def __call__(
        self,
        window: Window,
        loss_function: LossFunction,
        *,
        before: Callable[[int], None],
        after: Callable[[int], None],
    ) -> list[Loss]:
        """One detached loss per micro-batch; ``before`` and ``after`` are told each one's index."""
