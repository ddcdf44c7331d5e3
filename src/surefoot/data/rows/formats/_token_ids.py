"""Token ids: rows that a tokenizer has already made, as those of MindRecord files are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....batch import IGNORE_INDEX
from ....errors import DataError
from ...example import Example
from .fields import Row, missing, shown, structure


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """``{"input_ids", "labels", "attention_mask"}``: lists of one length for each row."""

    main: ClassVar[str] = "input_ids"
    # Columns that other formats have.
    system: ClassVar[None] = None
    tools: ClassVar[None] = None
    chosen: ClassVar[None] = None
    rejected: ClassVar[None] = None

    input_ids: str | None = "input_ids"
    """The ids of the tokenizer."""
    labels: str | None = "labels"
    """The same ids, -100 for those that are not trained on; without it, all are."""
    attention_mask: str | None = "attention_mask"
    """1 for tokens, 0 for padding at the ends, which is dropped."""
    kto_tag: str | None = None
    """Not of this format, as ranking."""
    ranking: bool = False
    """Not of this format."""

    def __post_init__(self) -> None:
        if self.ranking or self.kto_tag:
            raise DataError("formatting: token_ids: has neither ranking nor kto_tag")

    def read(self, row: Row) -> Example:
        """The row's ids and labels; raises DataError with the reason if it has none."""
        ids = _integers(row, self.input_ids)
        if ids is None:
            raise missing(row, self.input_ids)
        labels, mask = _integers(row, self.labels), _integers(row, self.attention_mask)
        labels, mask = ids if labels is None else labels, [1] * len(ids) if mask is None else mask
        for column, values in ((self.labels, labels), (self.attention_mask, mask)):
            if len(values) != len(ids):
                raise DataError(
                    f"column {column!r}: expected as many values as {self.input_ids!r} has, "
                    f"{len(ids):,}, got {len(values):,}"
                )
        pairs = enumerate(zip(ids, labels, strict=True))
        odd = next((i for i, (token, label) in pairs if label not in (token, IGNORE_INDEX)), None)
        if odd is not None:
            raise DataError(
                f"column {self.labels!r}: expected {IGNORE_INDEX} or the id at the same position "
                f"({ids[odd]}), got {labels[odd]} at {odd}; labels are not shifted here"
            )
        start = next((i for i, value in enumerate(mask) if value), len(mask))
        stop = start + sum(mask)
        if any(value not in (0, 1) for value in mask) or not all(mask[start:stop]):
            raise DataError(
                f"column {self.attention_mask!r}: expected 1 for each token, and 0 for padding at "
                "the ends alone"
            )
        return Example(token_ids=(ids[start:stop], labels[start:stop]))


def _integers(row: Row, column: str | None) -> list[int] | None:
    """The list in a column; None if it is absent."""
    value = structure(row, column)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise DataError(f"column {column!r}: expected a list of whole numbers, got {shown(value)}")
    return value
