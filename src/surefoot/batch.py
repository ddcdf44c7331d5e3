"""The types that cross layers: features, a batch, a window of batches, outputs and a loss.

Shapes: B rows, T tokens of a row, N trained positions of the full batch, D documents of a packed
row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

IGNORE_INDEX = -100  # a label that does not count; the value torch's cross entropy ignores

# One encoded training item: names (input_ids, labels, ...) to token lists, as the cache stores
# them; columns that a stage adds (reference log-probabilities, advantages) may be floats.
Features = Mapping[str, Sequence[int]]


def without_labels(example: Features) -> Features:
    """The same example, fully masked: for a rank without examples, because all ranks of a sharded
    model must run the same number of passes, and for a row that is omitted from a step."""
    return {**example, "labels": [IGNORE_INDEX] * len(example["labels"])}


@dataclass(frozen=True)
class TrainedPositions:
    """The trained labels of a batch, in reading order, and where they are predicted: K columns."""

    labels: torch.Tensor  # [N]
    rows: torch.Tensor  # [N]
    columns: torch.Tensor  # [N] of the batch
    kept: torch.Tensor  # [K] the columns that the head is asked for
    among_kept: torch.Tensor | None  # [N] each position's column among these; None: one row, N = K
    lengths: torch.Tensor  # [E] how many of them each document has, of a rectangle each row
    host_columns: np.ndarray  # [N] ``columns``, where a GPU need not be waited for


class RowPart(Protocol):
    """The part of a packed row that is on this rank, if several ranks share it.

    Shapes: L tokens of this rank, X keys that its queries attend to, run after run.
    """

    def runs(self, window: int | None) -> tuple[Sequence[int], Sequence[int]]:
        """The lengths of its runs of queries, and of the keys that each attends to."""

    def fetched(self, heads: Sequence[torch.Tensor], window: int | None) -> list[torch.Tensor]:
        """[1, H, X, E] of each of the keys and values [1, H, L, E]. A collective call."""


class Pictures(Protocol):
    """The pictures of a batch. Pixels are large, so they are read when it is about to run, and
    gone when it has: a window may have hundreds of batches."""

    def read(self, batch: Batch) -> Batch:
        """``batch`` with what the model gets of them, and nothing left to read."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of examples.

    A packed batch is one row of all examples (B = 1) with ``cu_seqlens``, the bounds of its
    documents; a padded one is a rectangle with an ``attention_mask``. ``labels[b, t]`` is the token
    to predict *at* position t, that is, from the tokens before t. It is ``IGNORE_INDEX`` for masked
    tokens, and always at the first token of a document.

    A document of a packed row may be a prompt and several responses to it, ``branches``. The
    context of each response is then the prompt alone, for labels, positions and attention.
    """

    input_ids: torch.Tensor  # [B, T] int64
    labels: torch.Tensor  # [B, T] int64
    position_ids: torch.Tensor  # [B, T] int64, from 0 in every document
    attention_mask: torch.Tensor | None = None  # [B, T] int64, 1 for real tokens; None when packed
    # [D + 1] int32, on the CPU, 0 first and T last; None when padded
    cu_seqlens: torch.Tensor | None = None
    # [D, 1 + R] int32, on the CPU: tokens of prompt and responses, 0 of what is not there
    branches: torch.Tensor | None = None
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # for the loss of a stage
    pictures: Pictures | None = None  # not read yet; ``to`` reads them
    media: Mapping[str, torch.Tensor] = field(default_factory=dict)  # further inputs of the model
    # [A, B, T] int64, positions of A axes (M-RoPE), in place of ``position_ids``, which are before
    # them in a packed row
    axes: torch.Tensor | None = None
    part: RowPart | None = None  # which these tokens are of a row; all else describes the row
    at: TrainedPositions | None = None  # where its labels are predicted, once looked up
    at_ends: TrainedPositions | None = None  # the last token of each document, once looked up

    @property
    def num_tokens(self) -> int:
        """Number of tokens, without padding."""
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
        """With its trained positions and the ends of its documents, found while it is on the host:
        a GPU would be waited for."""
        if self.at is not None and self.at_ends is not None:
            return self
        return replace(self, at=trained_positions(self), at_ends=ends(self))

    def pinned(self) -> Batch:
        """The same batch in pinned memory, from which a GPU copies while it computes."""
        return self.mapped(lambda tensor: tensor.pin_memory())

    def read(self) -> Batch:
        """With what the model gets of its pictures, which are read now."""
        return self if self.pictures is None else self.pictures.read(self)

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``, with its trained positions and its pictures."""
        return self.read().located().mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """With ``function`` applied to each tensor but those that the host reads."""
        on_device = {n: tensor for n, tensor in _tensors(self).items() if n not in _ON_HOST}
        moved_fields = {name: function(tensor) for name, tensor in on_device.items()}
        extras = {name: function(tensor) for name, tensor in self.extras.items()}
        media = {name: function(tensor) for name, tensor in self.media.items()}

        def moved(places: TrainedPositions | None) -> TrainedPositions | None:
            if places is None:
                return None
            tensors = {name: function(tensor) for name, tensor in _tensors(places).items()}
            return replace(places, **tensors, host_columns=places.host_columns)

        at, at_ends = moved(self.at), moved(self.at_ends)
        return replace(
            self,
            **moved_fields,
            extras=extras,
            pictures=self.pictures,
            media=media,
            part=self.part,
            at=at,
            at_ends=at_ends,
        )


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor``, which is on the host, on ``device``. A copy from memory that is not pinned would
    wait for all that the GPU has to do, in each micro-batch."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


_ON_HOST = ("cu_seqlens", "branches")
_PLACES = ("at", "at_ends")


def _tensors(holder: Batch | TrainedPositions) -> dict[str, torch.Tensor]:
    """The fields that are tensors."""
    others = {"extras", "media", "pictures", "part", "host_columns", *_PLACES}
    values = {f.name: getattr(holder, f.name) for f in fields(holder) if f.name not in others}
    return {name: value for name, value in values.items() if value is not None}


def trained_positions(batch: Batch) -> TrainedPositions:
    """The trained positions of ``batch``. ``labels[b, t]`` is predicted at position t - 1, and the
    first label of a later response at the same position as that of the first one.

    A packed row keeps only its trained positions; a rectangle, the columns where any row is
    trained.
    """
    import numpy as np

    labels = batch.labels[:, 1:].cpu().numpy()
    rows, columns = np.nonzero(labels != IGNORE_INDEX)
    trained_labels = labels[rows, columns]
    if batch.cu_seqlens is None:
        lengths = np.bincount(rows, minlength=len(labels))
    else:  # the first label of a document is never trained, so none is counted twice
        lengths = np.diff(np.searchsorted(columns, batch.cu_seqlens.numpy() - 1))
    if batch.branches is not None:
        columns = _before(batch)[columns]
    return _as_positions(batch, trained_labels, rows, columns, lengths)


def _as_positions(
    batch: Batch, labels: np.ndarray, rows: np.ndarray, columns: np.ndarray, lengths: np.ndarray
) -> TrainedPositions:
    """These positions as tensors, and the columns that the head computes."""
    import numpy as np

    here = batch.labels.new_tensor
    of_head, among = columns, None
    if len(batch.labels) > 1:
        of_head, inverse = np.unique(columns, return_inverse=True)
        among = here(inverse)
    return TrainedPositions(
        here(labels), here(rows), here(columns), here(of_head), among, here(lengths), columns
    )


def _before(batch: Batch) -> np.ndarray:
    """[T - 1] for each token of a row but the first, the position of the token before it."""
    import numpy as np

    assert batch.cu_seqlens is not None
    assert batch.branches is not None
    before = np.arange(batch.labels.shape[1] - 1)
    part_ends = _part_ends(batch.cu_seqlens, batch.branches)
    is_later, prompt_ends = batch.branches[:, 2:].numpy() > 0, part_ends[:, :1]
    starts = part_ends[:, 1:-1]  # of the second response and those after it
    before[starts[is_later] - 1] = np.broadcast_to(prompt_ends - 1, starts.shape)[is_later]
    return before


def _part_ends(cu_seqlens: torch.Tensor, branches: torch.Tensor) -> np.ndarray:
    """[D, 1 + R] where the prompt and the responses of each document end."""
    ends_DR: np.ndarray = cu_seqlens[:-1, None].numpy() + branches.numpy().cumsum(1)
    return ends_DR


def ends(batch: Batch) -> TrainedPositions:
    """The last token of each document of ``batch``, in reading order: of a padded row its last real
    token, and of responses that share a prompt, that of each. Labels there are 0."""
    import numpy as np

    if batch.cu_seqlens is not None:
        columns = _last_columns(batch.cu_seqlens, batch.branches)
        rows = np.zeros_like(columns)
    else:
        count, length = batch.input_ids.shape
        rows, columns = np.arange(count), np.full(count, length - 1)
        if batch.attention_mask is not None:
            mask = batch.attention_mask.cpu().numpy()
            columns = length - 1 - mask[:, ::-1].argmax(1)
    return _as_positions(batch, np.zeros_like(columns), rows, columns, np.ones_like(columns))


def _last_columns(cu_seqlens: torch.Tensor, branches: torch.Tensor | None) -> np.ndarray:
    if branches is None:
        last: np.ndarray = cu_seqlens[1:].numpy() - 1
        return last
    is_end = branches[:, 1:].numpy() > 0
    is_end[:, 0] = True  # also of a document without responses
    return _part_ends(cu_seqlens, branches)[:, 1:][is_end] - 1


@dataclass(frozen=True)
class Probe:
    """Documents in one row, and each alone: a model must compute the same of both."""

    together: Batch
    alone: Sequence[Batch]


Window = Sequence[Batch]  # the micro-batches of one optimizer step


@dataclass(frozen=True)
class Divergence:
    """How far a model's next-token distribution is from that of another model; see
    ``model/chunked_cross_entropy.py``."""

    role: str  # of the other model
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: float = 0.5  # jsd: the share of the other model in the mixture
    temperature: float = 1.0  # logits of both are divided by it


@dataclass(frozen=True)
class OutputSpec:
    """Which outputs of a model a stage needs, and where."""

    outputs: tuple[str, ...]  # fields of ``Outputs``
    at: Literal["labels", "ends"] = "labels"  # ends: the last token of each document (a score)
    smoothing: float = 0.0  # probability that is spread evenly over the vocabulary, of each label
    temperature: float = 1.0  # logits are divided by it before log-probabilities are computed
    divergence: Divergence | None = None  # what ``divergences`` are

    @property
    def gives_scores(self) -> bool:
        """Whether documents are scored, each at its end, by a reward or by classes, say."""
        return self.at == "ends"

    def __post_init__(self) -> None:
        unknown = sorted(set(self.outputs) - {f.name for f in fields(Outputs)})
        if unknown:
            raise ValueError(f"outputs: expected fields of Outputs, got {unknown[0]!r}")
        if self.at == "ends" and set(self.outputs) != {"values"}:
            raise ValueError(f"at the ends of documents there are only values, not {self.outputs}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if ("divergences" in self.outputs) != (self.divergence is not None):
            raise ValueError("divergences need to know which, and from what")


@dataclass(frozen=True)
class RouterSums:
    """What the loss that balances the experts of a mixture is made of (Switch Transformer,
    arXiv:2101.03961, equations 4 to 6): sums over all layers and tokens but padding.

    The loss is no sum over tokens: the share of the tokens that each expert gets is multiplied by
    its mean probability. Of a whole window it is a sum over its micro-batches once these shares are
    known, which have no gradient.

    E experts.
    """

    coefficient: float
    probabilities: torch.Tensor  # [E] with a gradient
    # [E + 2] float64: tokens that each expert gets, all tokens, and the weight of the loss, which
    # only a window's has
    counts: torch.Tensor
    window: torch.Tensor | None = None  # the counts of the window of all ranks; None: alone

    def loss(self, weight: torch.Tensor) -> torch.Tensor:
        """This micro-batch's part of the loss times ``weight``, or that of the window."""
        counts = self.counts_with(weight) if self.window is None else self.window
        num_experts, (num_routed, weight) = len(self.probabilities), counts[-2:]
        factors = counts[:-2] * (num_experts * self.coefficient * weight / num_routed**2)
        loss: torch.Tensor = (factors.to(self.probabilities) * self.probabilities).sum()
        return loss

    def counts_with(self, weight: torch.Tensor) -> torch.Tensor:
        """The counts, with the weight of the loss."""
        counts = self.counts.clone()
        counts[-1] = weight.detach()
        return counts


@dataclass(frozen=True)
class Outputs:
    """The outputs of the model that a stage needs, at the trained positions in reading order.

    ``predictions`` is the most probable token at each position.
    """

    logps: torch.Tensor | None = None  # [N] float32, log-probability of each label
    total: torch.Tensor | None = None  # scalar, the sum of the labels' log-probabilities
    smoothed: torch.Tensor | None = None  # scalar, the same of smoothed labels, if they are
    entropies: torch.Tensor | None = None  # [N] float32, nats
    top_entropies: torch.Tensor | None = None  # [N] float32, nats, of the most probable words
    # [N] float32, from a value head, or [N, K] from one of K numbers
    values: torch.Tensor | None = None
    predictions: torch.Tensor | None = None  # [N] int64
    divergences: torch.Tensor | None = None  # [N] float32, nats, from another model's distribution
    # [N] ``logps`` without a gradient, where only their sum is an output
    plain_logps: torch.Tensor | None = None
    router: RouterSums | None = None  # if the model computes a loss of its routers


SCORES = OutputSpec(("values",), at="ends")  # of a reward model, or of a classifier


@dataclass(frozen=True)
class Classes:
    """What the numbers of a head mean that scores classes: each is the logit of one of them."""

    names: tuple[str, ...]
    is_multi_label: bool = False  # any number of them are true, each for itself; else just one

    def verdict(self, logits: Sequence[float]) -> dict[str, object]:
        """The classes of one text by its K ``logits``, with the probability of each."""
        largest = max(logits)
        if self.is_multi_label:
            chosen: object = [n for n, logit in zip(self.names, logits, strict=True) if logit > 0]
            probabilities = [(1 + math.tanh(logit / 2)) / 2 for logit in logits]  # sigmoid
        else:
            chosen = self.names[list(logits).index(largest)]
            weights = [math.exp(logit - largest) for logit in logits]
            probabilities = [weight / sum(weights) for weight in weights]
        by_name = dict(zip(self.names, probabilities, strict=True))
        return {"predicted": chosen, "probabilities": by_name}


@dataclass(frozen=True)
class Loss:
    """A loss sum and its weight. The loop divides once, by the global weight of the step."""

    total: torch.Tensor  # scalar, summed over the batch
    weight: torch.Tensor  # scalar: trained tokens, pairs, ... of the batch
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)  # sums over the same weight
    # [E] float32, what is recorded of each example (``Stage.row_metric``); None: nothing
    rows: torch.Tensor | None = None

    def detach(self) -> Loss:
        """The same values without their graph."""
        metrics = {name: value.detach() for name, value in self.metrics.items()}
        rows = None if self.rows is None else self.rows.detach()
        return Loss(self.total.detach(), self.weight.detach(), metrics, rows)


def with_router_loss(loss: Loss, outputs: Outputs) -> Loss:
    """``loss`` with that of the routers, if the model computes one, once for each unit of
    weight."""
    if outputs.router is None:
        return loss
    router_loss = outputs.router.loss(loss.weight)
    metrics = {**loss.metrics, "router_loss": router_loss}
    return Loss(loss.total + router_loss, loss.weight, metrics, loss.rows)


LossFunction = Callable[[Outputs, Batch], Loss]  # pure: what the model said, what it should have
Hook = Callable[[int], None]  # gets the index of a micro-batch


class StepRunner(Protocol):
    """Runs a window through the model, forward and backward, and leaves summed gradients behind."""

    def __call__(
        self, window: Window, loss_of: LossFunction, *, before: Hook, after: Hook
    ) -> list[Loss]:
        """One detached loss per micro-batch; ``before`` and ``after`` get the index of each."""
