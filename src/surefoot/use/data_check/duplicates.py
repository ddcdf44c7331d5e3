"""Rows that occur several times: in one dataset, and in training and evaluation data.

Rows are compared by three hashes of 64 bits: of the row, of its prompt and of its response. With
the row's number they take 32 bytes of memory, however long the row is.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...data.data_order import hold_out
from ...data.example import Example, Message
from ...errors import DataError
from ...run.parts import RunParts
from .figures import CountedRows, DatasetFigures, RepeatedResponse

NUM_SNIPPETS, SNIPPET_LENGTH = 5000, 80  # beginnings of responses that are remembered, to be shown
NUM_REPEATED, FEWEST_REPEATED = 3, 3  # responses that are reported, and rows that have them
HELD_OUT = "held out by val_size"
Mask = NDArray[np.bool_]


@dataclass
class ReadDataset:
    """The figures of a dataset, and the hashes of its rows in the order in which they were read."""

    figures: DatasetFigures
    row_hashes: array[int] = field(default_factory=lambda: array("Q"))
    prompt_hashes: array[int] = field(default_factory=lambda: array("Q"))
    response_hashes: array[int] = field(default_factory=lambda: array("Q"))
    row_numbers: array[int] = field(default_factory=lambda: array("q"))  # of the hashed rows
    snippets: dict[int, str] = field(default_factory=dict)  # by position among the hashes
    usable: array[int] = field(default_factory=lambda: array("q"))  # rows that are trained on
    num_rows: int = 0  # numbers of rows are below this

    def add(self, example: Example, row_number: int) -> None:
        """Keep the hashes of a row, and the beginning of its response."""
        response = response_of(example)
        if response is not None and len(self.snippets) < NUM_SNIPPETS:
            self.snippets[len(self.row_numbers)] = response.content[:SNIPPET_LENGTH]
        row_hash, prompt_hash, response_hash = hashes_of(example)
        self.row_hashes.append(row_hash)
        self.prompt_hashes.append(prompt_hash)
        self.response_hashes.append(response_hash)
        self.row_numbers.append(row_number)

    def name_of(self, position: int) -> str:
        """The dataset and the number of the row at a position among the hashes."""
        return f"{self.figures.name}:{self.row_numbers[position]}"


def hashes_of(example: Example) -> tuple[int, int, int]:
    """The hashes of a row: of everything, of its prompt, and of its response."""
    if (text := example.text) is not None or example.token_ids is not None:
        text = str(example.token_ids) if text is None else text
        texts = (text, text, "")
    else:
        messages, response = example.messages, response_of(example)
        is_last_turn = response is not None and example.chosen is None
        turns = messages[:-1] if is_last_turn else messages
        tools = json.dumps(example.tools, sort_keys=True, default=str) if example.tools else ""
        prompt = "\0".join([tools, *map(_text_of, turns)])
        answers = [_text_of(answer) if answer else "" for answer in (response, example.rejected)]
        row = "\1".join([prompt, *answers, str(example.label)])
        texts = (row, prompt, response.content if response else "")
    row_hash, prompt_hash, response_hash = (
        xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass")) for text in texts
    )
    return row_hash, prompt_hash, response_hash


def response_of(example: Example) -> Message | None:
    """The response of a row; of a pair, the chosen one."""
    if example.chosen is not None:
        return example.chosen
    last = example.messages[-1] if example.messages else None
    return last if last is not None and last.role == "assistant" else None


def _text_of(message: Message) -> str:
    # Calls without their ids, which may differ.
    pairs = [(call["name"], call["arguments"]) for call in message.tool_calls]
    calls = json.dumps(pairs, sort_keys=True, default=str) if pairs else ""
    pictures = "".join(f"\2{picture!r}" for picture in message.media)
    return f"{message.role}:{message.content}{calls}{pictures}"


def count_equal_rows(dataset: ReadDataset) -> None:
    """Add to the figures the rows that are equal to an earlier one of their dataset."""
    _, first_positions, which_hash = np.unique(
        _as_numpy(dataset.row_hashes), return_index=True, return_inverse=True
    )
    originals = first_positions[which_hash]  # by position, the first row with the same hash
    for position in np.flatnonzero(originals != np.arange(len(originals))).tolist():
        original = dataset.name_of(originals[position])
        dataset.figures.equal.add(f"{dataset.name_of(position)} is {original}")


def count_repeated(dataset: ReadDataset) -> None:
    """Add to the figures the responses that most rows have."""
    if not dataset.snippets:
        return
    _, first_positions, counts = np.unique(
        _as_numpy(dataset.response_hashes), return_index=True, return_counts=True
    )
    for i in np.argsort(-counts, kind="stable")[:NUM_REPEATED].tolist():
        position = int(first_positions[i])
        text = dataset.snippets.get(position, "")
        is_empty = position in dataset.snippets and not text.strip()
        if counts[i] >= FEWEST_REPEATED and not is_empty:
            repeated = RepeatedResponse(int(counts[i]), text, dataset.name_of(position))
            dataset.figures.repeated.append(repeated)


@dataclass
class Overlap:
    """Rows of an evaluation set that occur in the training data."""

    evaluation: str
    rows: int
    same: CountedRows = field(default_factory=CountedRows)  # the complete row
    prompt: CountedRows = field(default_factory=CountedRows)  # the prompt, with another response


def overlaps_of(parts: RunParts, datasets: Sequence[ReadDataset]) -> list[Overlap]:
    """The rows of each evaluation set, and of the rows that ``val_size`` holds out, that occur in
    the training data."""
    training = [dataset for dataset in datasets if not dataset.figures.is_evaluation]
    held_out = _held_out(parts, training)
    trained = [(dataset, ~mask) for dataset, mask in zip(training, held_out, strict=True)]
    none = np.empty(0, np.uint64)  # concatenate refuses a list without arrays
    trained_rows = np.concatenate([none, *(_as_numpy(d.row_hashes)[m] for d, m in trained)])
    trained_prompts = np.concatenate([none, *(_as_numpy(d.prompt_hashes)[m] for d, m in trained)])
    if not len(trained_rows):
        return []
    evaluation_sets = {
        dataset.figures.name: [(dataset, np.ones(len(dataset.row_numbers), np.bool_))]
        for dataset in datasets
        if dataset.figures.is_evaluation
    }
    if any(mask.any() for mask in held_out):
        evaluation_sets[HELD_OUT] = list(zip(training, held_out, strict=True))
    overlaps = []
    for name, masked_datasets in evaluation_sets.items():
        overlap = Overlap(name, sum(int(mask.sum()) for _, mask in masked_datasets))
        for dataset, mask in masked_datasets:
            is_same = mask & np.isin(_as_numpy(dataset.row_hashes), trained_rows)
            has_prompt = np.isin(_as_numpy(dataset.prompt_hashes), trained_prompts)
            for position in np.flatnonzero(is_same).tolist():
                overlap.same.add(dataset.name_of(position))
            for position in np.flatnonzero(mask & ~is_same & has_prompt).tolist():
                overlap.prompt.add(dataset.name_of(position))
        overlaps.append(overlap)
    return overlaps


def _held_out(parts: RunParts, training: Sequence[ReadDataset]) -> list[Mask]:
    """Which rows of each training dataset ``val_size`` holds out, as training chooses them; none
    where that is not known: if only some rows or datasets were read."""
    section = parts.data
    nothing = [np.zeros(len(dataset.row_numbers), np.bool_) for dataset in training]
    is_complete = all(dataset.figures.all_rows for dataset in training)
    is_complete = is_complete and len(training) == len(section.datasets)
    if not section.val_size or section.streaming or not is_complete:
        return nothing
    # Training numbers the rows of all its datasets one after another.
    starts = np.cumsum([0, *(dataset.num_rows for dataset in training)])
    shifted = list(zip(training, starts[:-1], strict=True))
    usable = np.concatenate([np.array(d.usable, np.int64) + start for d, start in shifted])
    try:
        is_held_out = hold_out(
            usable, num_rows=starts[-1].item(), val_size=section.val_size, seed=parts.train.seed
        )
    except DataError:  # it would leave nothing to train on, which training reports
        return nothing
    rows = usable[is_held_out]
    return [np.isin(np.array(d.row_numbers, np.int64) + start, rows) for d, start in shifted]


def _as_numpy(hashes: array[int]) -> NDArray[np.uint64]:
    return np.array(hashes, np.uint64)
