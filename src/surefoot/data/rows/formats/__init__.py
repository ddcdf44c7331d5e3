"""Dataset formats: one row to one Example. To add one: write its file, add its line.

The fields of a format are the columns and tags of a ``dataset_info.json`` entry, with their usual
names as defaults. ``main`` is the one column that every row must have.
"""

from __future__ import annotations

from ._alpaca import Alpaca
from ._token_ids import TokenIds
from ._trl import TRL
from ._turns import OpenAI, ShareGPT

Format = Alpaca | OpenAI | ShareGPT | TRL | TokenIds
FORMATS: dict[str, type[Format]] = {
    "alpaca": Alpaca,
    "openai": OpenAI,
    "sharegpt": ShareGPT,
    "trl": TRL,
    "token_ids": TokenIds,
}
