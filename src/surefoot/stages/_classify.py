"""Classification of texts: a head that scores the classes at the last token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from ..batch import IGNORE_INDEX, SCORES, Batch, Classes, Features, Loss, Outputs, OutputSpec
from ..data.example import Dropped, Encoded, Example, Truncated
from ..data.section import DataSection
from ..data.text.classification import encode_inputs
from ..data.text.collation import collate, with_columns
from ..errors import DataError, counted, did_you_mean
from ..parallel.section import ParallelSection
from ..schema import KEPT, Problem, must
from ..training import class_metrics, losses
from ..training.stage import Stage
from ._rules import must_not_shard, without_effect

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ..data.store.dataset import EncodedDataset
    from ..data.text.codec import Codec


@dataclass(frozen=True, kw_only=True)
class Classify(Stage):
    """Train a classifier of texts or conversations: a linear head scores the classes at the last
    token, as transformers' sequence classification does.

    A row has one label, in its column ``label``, or with ``multi_label`` any number of them, a list
    in ``labels``. The head starts at 0, or as in ``model.path`` if that is a classifier. The loss
    is a sum over rows.
    """

    better_if_greater: ClassVar[Mapping[str, bool]] = class_metrics.BETTER
    reads_texts = True
    reads_pairs = False
    spec: ClassVar[OutputSpec] = SCORES

    labels: Annotated[tuple[str, ...], KEPT]
    """The names of the classes, in the order of the head's numbers. Exported models have them as
    ``id2label``. A row may have the number of one, from 0, in place of its name, unless names are
    numbers.
    """
    multi_label: Annotated[bool, KEPT] = False
    """Whether a row has any number of labels: a list in ``labels``. Each is then trained for itself
    (binary cross entropy, averaged over the labels of a row).
    """
    label_column: str | None = None
    """The column with the label of a row, or with the list of them. Unset: ``label``, and with
    ``multi_label`` ``labels``.
    """
    label_weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Weights of classes, 1 if they are not named: the loss of a row is multiplied by that of its
    label; with ``multi_label``, that of a label where it is true.
    """
    label_smoothing_factor: float = 0.0
    """Label smoothing: so much of the probability of a label is spread evenly over all of them
    (arXiv:1512.00567); with ``multi_label``, over true and false.
    """
    focal_gamma: float = 0.0
    """Focal loss (arXiv:1708.02002): multiplies the loss of a label of probability p by
    ``(1 - p) ** focal_gamma``, so that what is learned already weighs less; 2 is usual.
    """

    def __post_init__(self) -> None:
        if len(set(self.labels)) < max(2, len(self.labels)):
            raise ValueError(f"labels: expected two or more different names, got {self.labels}")
        if unknown := sorted(set(self.label_weights) - set(self.labels)):
            hint = did_you_mean(unknown[0], self.labels)
            raise ValueError(f"label_weights: {unknown[0]!r} is none of labels{hint}")
        if not all(0 < weight < float("inf") for weight in self.label_weights.values()):
            raise ValueError("label_weights: expected positive numbers")
        must(self, "be in [0, 1)", "label_smoothing_factor")
        must(self, "not be negative", "focal_gamma")
        if self.focal_gamma and self.label_smoothing_factor:
            raise ValueError(
                "focal_gamma: a focal loss has one right label; leave label_smoothing_factor at 0"
            )

    @property
    def encoding(self) -> str:
        """Rows are stored with the numbers of their labels."""
        return json.dumps(["1", self.multi_label, self._column, *self.labels])

    @property
    def row_columns(self) -> frozenset[str]:
        """That of the label, or of the labels."""
        return frozenset({self._column})

    @property
    def _column(self) -> str:
        return self.label_column or ("labels" if self.multi_label else "label")

    @property
    def heads(self) -> Mapping[str, int]:
        """A logit for each class."""
        return {"values": len(self.labels)}

    @property
    def classes(self) -> Classes:
        """The names of the labels."""
        return Classes(self.labels, self.multi_label)

    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """The text of each row, or its conversation, with its labels. Raises ``DataError``: a row
        has a label that is none of ``labels``."""
        labels = [self._labels(example) for example in examples]
        labeled = [example for example, ids in zip(examples, labels, strict=True) if ids]
        encoded = iter(encode_inputs(labeled, codec))
        return [
            self._unlabeled if ids is None else _with_labels(next(encoded), ids) for ids in labels
        ]

    def collate(self, features: Sequence[Features], *, packing: bool) -> Batch:
        """Pack rows, or pad them to a rectangle; ``extras`` have their labels, and which count."""
        is_there = [any(label != IGNORE_INDEX for label in item["labels"]) for item in features]
        rows = [{**f, "is_there": [int(i)]} for f, i in zip(features, is_there, strict=True)]
        return with_columns(collate(features, packing=packing), rows, ["classes", "is_there"])

    def loss(self, role: str, outputs: Outputs, batch: Batch) -> Loss:
        """The loss of each row, summed; a row without a label has no weight."""
        assert outputs.values is not None
        logits_EK, is_there_E = outputs.values, batch.extras["is_there"] > 0
        classes = batch.extras["classes"].to(logits_EK.device).long()
        weights_K = logits_EK.new_tensor([self.label_weights.get(n, 1.0) for n in self.labels])
        if self.multi_label:
            truth_EK = classes.view(len(logits_EK), -1).bool()
            losses_E = losses.binary_cross_entropy(
                *(logits_EK, truth_EK, weights_K, self.label_smoothing_factor, self.focal_gamma)
            )
            is_right_E = ((logits_EK > 0) == truth_EK).all(1)
        else:
            losses_E = losses.cross_entropy(
                *(logits_EK, classes, weights_K, self.label_smoothing_factor, self.focal_gamma)
            )
            is_right_E = logits_EK.argmax(1) == classes

        def summed(values_E: torch.Tensor) -> torch.Tensor:
            return values_E.where(is_there_E, values_E.new_zeros(())).sum()

        metrics = {"accuracy": summed(is_right_E.detach().to(logits_EK))}
        return Loss(summed(losses_E), is_there_E.sum(), metrics, losses_E.detach().float())

    def judged(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """[E, 1 + K] the label of each row and its logits, or [E, 2 K] all of its labels."""
        import torch

        assert outputs.values is not None
        logits_EK = outputs.values.double()
        classes = batch.extras["classes"].to(logits_EK).view(len(logits_EK), -1)
        rows_EX = torch.cat([classes, logits_EK], 1)
        return rows_EX.where(batch.extras["is_there"][:, None] > 0, rows_EX.new_tensor(torch.nan))

    def summary(self, rows_EX: NDArray[np.float64]) -> Mapping[str, float]:
        """F1, the area under the ROC curve, and of one label a table of confusion."""
        import numpy as np

        labels, logits_EK = np.split(rows_EX, [rows_EX.shape[1] - len(self.labels)], axis=1)
        if self.multi_label:
            return class_metrics.of_several_labels(labels > 0, logits_EK)
        return class_metrics.of_one_label(labels[:, 0].astype(np.int64), logits_EK, self.labels)

    def remarks(
        self, examples: EncodedDataset, evals: Mapping[str, EncodedDataset]
    ) -> Iterator[str]:
        """Labels without a row. Raises ``DataError``: all rows have the same labels."""
        counts_K, is_alike = self._counts(examples)
        if is_alike:
            names = [n for n, count in zip(self.labels, counts_K, strict=True) if count]
            raise DataError(
                f"stage.classify: all {len(examples):,} rows to train on have the same label "
                f"({', '.join(names) or 'none'}), so nothing can be learned; add rows of other "
                "labels"
            )
        for name, held_out in evals.items():
            for label, seen, count in zip(
                self.labels, counts_K, self._counts(held_out)[0], strict=True
            ):
                if count and not seen:
                    yield (
                        f"stage.classify: {counted(int(count), 'row')} of "
                        f"{name or 'what val_size holds out'} with the label {label!r}, which no "
                        "row to train on has, so it cannot be learned; add rows of it"
                    )
        unseen = [repr(n) for n, count in zip(self.labels, counts_K, strict=True) if not count]
        if unseen:
            yield f"stage.classify.labels: no row to train on has {', '.join(unseen)}"

    def problems(self, data: DataSection, parallel: ParallelSection) -> Iterator[Problem]:
        """Only ends are scored; heads are not sharded along ``tp`` or ``pp``."""
        reason = "stage classify, which scores texts at their end"
        yield from without_effect(data, ("train_on_prompt", "mask_history"), reason)
        message = "stage classify has a head that cannot be sharded along {axis}; set it to 1"
        yield from must_not_shard(parallel, ("tp", "pp"), message)

    @property
    def _unlabeled(self) -> Dropped:
        what = "a list of names" if self.multi_label else "a name"
        return Dropped(
            f"no label: expected {what} of stage.classify.labels in the column {self._column!r} "
            "(stage.classify.label_column names another one)"
        )

    def _labels(self, example: Example) -> list[int] | None:
        """The number of the row's label, or for each label whether the row has it; None of a row
        that says nothing of it. Raises ``DataError``."""
        value = example.columns.get(self._column)
        if self.multi_label and isinstance(value, str) and value.lstrip().startswith("["):
            value = _parsed(value, example)  # as a CSV file has it
        if value is None:
            return None
        if not self.multi_label:
            return [self._number(value, example)]
        values = value if isinstance(value, list | tuple) else [value]
        numbers = {self._number(each, example) for each in values}
        return [int(number in numbers) for number in range(len(self.labels))]

    def _number(self, value: object, example: Example) -> int:
        """The number of a label by its name, or by that number itself where no name is one."""
        if isinstance(value, float) and value.is_integer():  # as pandas writes integers
            value = int(value)
        name = str(value).lower() if isinstance(value, bool) else str(value).strip()
        if name in self.labels:
            return self.labels.index(name)
        is_place = name.isdecimal() and int(name) < len(self.labels)
        if is_place and not any(label.isdecimal() for label in self.labels):
            return int(name)
        raise DataError(
            f"{example.origin}: the label {value!r} is none of stage.classify.labels: "
            f"{', '.join(self.labels)}{did_you_mean(name, self.labels)}"
        )

    def _counts(self, examples: EncodedDataset) -> tuple[NDArray[np.int64], bool]:
        """[K] how many rows have each label, and whether all rows have the same."""
        import numpy as np

        counts_K, kinds, start = np.zeros(len(self.labels), np.int64), set[bytes](), 0
        for store in examples.stores:
            items = examples.index[
                (examples.index >= start) & (examples.index < start + len(store))
            ]
            rows = store.features["classes"].flat[:].reshape(len(store), -1)[items - start]
            kinds |= {row.tobytes() for row in np.unique(rows, axis=0)}
            counts_K += (
                rows.sum(0)
                if self.multi_label
                else np.bincount(rows[:, 0], minlength=len(counts_K))
            )
            start += len(store)
        return counts_K, len(kinds) < 2


def _with_labels(outcome: Encoded, classes: list[int]) -> Encoded:
    if isinstance(outcome, Dropped):
        return outcome
    items = outcome.features if isinstance(outcome, Truncated) else outcome
    with_label: list[Features] = [{**item, "classes": classes} for item in items]
    return replace(outcome, features=with_label) if isinstance(outcome, Truncated) else with_label


def _parsed(value: str, example: Example) -> object:
    try:
        return json.loads(value)
    except ValueError:
        raise DataError(f"{example.origin}: no list of labels in JSON: {value!r}") from None
