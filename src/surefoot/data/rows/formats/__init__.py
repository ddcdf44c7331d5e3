"""Dataset formats: one row to one Example. To add one: write its file, add its line.

The fields of a format are the columns and tags of a ``dataset_info.json`` entry, with their usual
names as defaults. ``main`` is the one column that every row must have.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from ...example import Example
from .alpaca import Alpaca
from .fields import Row
from .openai import OpenAI
from .sharegpt import ShareGPT


class Format(Protocol):
    """The form of the rows of a dataset."""

    main: ClassVar[str]  # the field whose column every row needs

    def read(self, row: Row) -> Example:
        """The row as an Example; raises DataError with the reason if it cannot be read."""


FORMATS: dict[str, type[Alpaca] | type[ShareGPT] | type[OpenAI]] = {
    "alpaca": Alpaca,
    "openai": OpenAI,
    "sharegpt": ShareGPT,
}
