"""The process that encodes a share of a dataset: ``python -m surefoot.run._encoding_share``.

It reads a line that names the recipe, the dataset and the share, sends the fingerprint of what it
would encode, reads a row, and sends the batches behind it. It ends with the process that has
started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from ..data.rows.catalog import Catalog
from ..recipe.recipe import load_text
from ..recipe.recipe_data import read_encoding


def main() -> None:
    """Encode one share."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # schedulers send them to all
        signal.signal(number, signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between batches
    task = json.loads(sys.stdin.readline())
    encoding = read_encoding(load_text(task["recipe"], "recipe", Path()))
    dataset = encoding.complete(Catalog(encoding.section).entry(task["dataset"]))
    output.write(json.dumps({"fingerprint": dataset.fingerprint}).encode() + b"\n")
    output.flush()
    if told := sys.stdin.readline():
        first_row = json.loads(told)["first_row"]
        dataset.write_share(output, first_row, task["number"], task["count"])


if __name__ == "__main__":
    main()
