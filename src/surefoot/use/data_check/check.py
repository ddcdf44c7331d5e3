"""Read the rows of a recipe, dataset by dataset, to show or to check them.

Rows are read once, in batches, and encoded as for training, without the cache. ``preview`` keeps
the first examples of each dataset; ``data check`` keeps figures, and hashes to compare rows by.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice

import xxhash

from ...data.data_order import Index
from ...data.example import BrokenRow, Encoded, Example, items_of, sources_of
from ...data.rows.catalog import Catalog
from ...data.rows.registry import DatasetEntry
from ...data.rows.rows import read_examples
from ...data.text.preview import preview_example
from ...data.training_data import DrawnRows, draw_rows
from ...errors import DataError
from ...run.parts import RunParts
from .duplicates import Overlap, ReadDataset, count_equal_rows, count_repeated, overlaps_of
from .figures import CountedRows, DatasetFigures, num_limited
from .findings import Finding, findings_of, oddities

logger = logging.getLogger(__name__)
BATCH = 500  # rows that are encoded together
UNLIMITED = 1 << 30  # tokens of a sequence, and broken rows
REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class DataCheck:
    """All figures of a check, and what is to be looked at."""

    cutoff_len: int
    datasets: Sequence[DatasetFigures]
    overlaps: Sequence[Overlap]
    findings: Sequence[Finding]

    @property
    def has_problems(self) -> bool:
        """Whether a finding is a problem."""
        return any(finding.level == "problem" for finding in self.findings)

    def as_data(self) -> Mapping[str, object]:
        """All of it as plain data, without examples."""
        return {
            "ok": not self.has_problems,
            "cutoff_len": self.cutoff_len,
            "datasets": [{**figures.as_data(), "shown": []} for figures in self.datasets],
            "overlaps": [asdict(overlap) for overlap in self.overlaps],
            "findings": [asdict(finding) for finding in self.findings],
        }


def check_data(
    parts: RunParts, *, dataset: str | None = None, limit: int | None = None
) -> DataCheck:
    """Check the datasets of a run, or one ``dataset``, at most ``limit`` rows of each. Nothing
    is written to the cache. Raises ``DataError``: a dataset cannot be read at all."""
    section, catalog = parts.data, Catalog(parts.data)
    configured = [str(name) for name in (*section.datasets, *section.eval_datasets)]
    names = dict.fromkeys([dataset] if dataset else configured)
    entries = [catalog.entry(name) for name in names]
    drawn: Mapping[str, DrawnRows] = {}
    if not section.streaming:
        # Of all datasets, even to check one: a single generator draws for one after another.
        every_entry = [catalog.entry(name) for name in configured]
        drawn = draw_rows(every_entry, max_samples=section.max_samples, seed=parts.train.seed)
    reader, datasets = _Reader(parts, compares=True), []
    for entry in entries:
        chosen = drawn[entry.name].distinct if entry.name in drawn else None
        is_evaluation = entry.name not in section.datasets
        read = reader.read(entry, limit=limit, chosen=chosen, is_evaluation=is_evaluation)
        if chosen is not None:
            read.num_rows = drawn[entry.name].num_rows
        count_equal_rows(read)
        count_repeated(read)
        datasets.append(read)
    overlaps, figures = overlaps_of(parts, datasets), [dataset.figures for dataset in datasets]
    findings = findings_of(section, figures, overlaps)
    return DataCheck(parts.codec.section.longest, figures, overlaps, findings)


def preview_data(
    parts: RunParts, *, dataset: str | None = None, count: int = 3, limit: int | None = None
) -> list[DatasetFigures]:
    """The rows of each dataset of a run, or of one ``dataset``: the first ``limit``, and
    ``count`` of them as examples. Nothing is written to the cache. Raises ``DataError``."""
    section, catalog, reader = parts.data, Catalog(parts.data), _Reader(parts, num_shown=count)
    configured = map(str, (*section.datasets, *section.eval_datasets))
    names = dict.fromkeys([dataset] if dataset else configured)
    return [reader.read(catalog.entry(name), limit=limit).figures for name in names]


class _Reader:
    """Reads datasets: their figures, and the first examples or, to compare them, the hashes of all
    rows."""

    def __init__(self, parts: RunParts, *, compares: bool = False, num_shown: int = 0) -> None:
        codec = parts.codec
        self._parts, self._codec, self._compares = parts, codec, compares
        self._num_shown = num_shown
        self._picture_digests: dict[str, str] = {}  # of those that can be decoded, by ``_key``
        section = replace(parts.data, cutoff_len=UNLIMITED, on_too_long="truncate")
        self._unlimited_codec = codec.with_section(section)
        # ChatML's marks for every model: text that some template has rendered is odd for all.
        special_tokens = (*codec.tokenizer.all_special_tokens, "<|im_start|>", "<|im_end|>")
        self._special_tokens = [t for t in dict.fromkeys(map(str, special_tokens)) if len(t) > 2]

    def read(
        self,
        entry: DatasetEntry,
        *,
        limit: int | None,
        chosen: Index | None = None,
        is_evaluation: bool = False,
    ) -> ReadDataset:
        """Read and encode the rows of a dataset, at most ``limit``, or the ``chosen`` ones."""
        dataset = ReadDataset(DatasetFigures(entry.name, is_evaluation))
        dataset.figures.remarks = list(entry.source.remarks)
        dataset.figures.max_broken_rows = self._parts.data.max_broken_rows
        max_samples = entry.limit(self._parts.data.max_samples) if chosen is None else None
        rows = read_examples(
            entry,
            max_samples=max_samples,
            max_broken_rows=UNLIMITED,
            chosen=chosen,
            reading=self._parts.encoding.reading,
        )
        reported = time.monotonic()
        limited_rows = islice(rows, limit)
        while batch := list(islice(limited_rows, BATCH)):
            self._add_batch(dataset, batch)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                logger.info("reading %s: %d rows", entry.name, dataset.figures.rows)
        dataset.figures.all_rows = limit is None or next(rows, None) is None
        return dataset

    def _add_batch(self, dataset: ReadDataset, batch: Sequence[Example | BrokenRow]) -> None:
        figures, examples = dataset.figures, list[Example]()
        figures.rows += len(batch)
        for row in batch:
            if isinstance(row, BrokenRow):
                origin = f"{figures.name}:{row.index}"
                if row.is_dropped:
                    figures.dropped.setdefault(row.reason, CountedRows()).add(origin)
                else:
                    figures.broken.add(f"{origin}: {row.reason}")
                dataset.num_rows = max(dataset.num_rows, row.index + 1)
            elif not self._compares or self._decodes_pictures(figures, row):
                examples.append(row)
        untruncated = self._parts.stage.encode(examples, self._unlimited_codec)
        outcomes = self._truncated(examples, untruncated)
        items = [item for encoded in untruncated for item in items_of(encoded)]
        keeps_rows = any("row" in item for item in items)
        for example, encoded, outcome in zip(examples, untruncated, outcomes, strict=True):
            self._add_example(dataset, example, encoded, outcome)
            for key in () if keeps_rows else example.unread:
                figures.unread.setdefault(key, CountedRows()).add(example.origin)

    def _truncated(
        self, examples: Sequence[Example], untruncated: Sequence[Encoded]
    ) -> list[Encoded]:
        """The examples as they are trained on; only long ones must be encoded again for it."""
        outcomes, limit = list(untruncated), self._codec.section.longest
        longest = [max(map(num_limited, items_of(encoded)), default=0) for encoded in untruncated]
        if too_long := [i for i, length in enumerate(longest) if length > limit]:
            truncated = self._parts.stage.encode([examples[i] for i in too_long], self._codec)
            for i, outcome in zip(too_long, truncated, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _add_example(
        self, dataset: ReadDataset, example: Example, untruncated: Encoded, outcome: Encoded
    ) -> None:
        figures, row_number = dataset.figures, int(example.origin.rpartition(":")[2])
        dataset.num_rows = max(dataset.num_rows, row_number + 1)
        figures.add(example, outcome, untruncated)
        if items_of(outcome):
            dataset.usable.append(row_number)
        stage = self._parts.stage
        is_answered = stage.uses_template and not stage.reads_texts
        needs_response = is_answered and not stage.max_new_tokens
        for oddity in oddities(example, self._special_tokens, needs_response=needs_response):
            figures.odd.setdefault(oddity, CountedRows()).add(example.origin)
        if self._num_shown:
            shown = preview_example(self._codec, example, outcome, untruncated)
            figures.show(shown, self._num_shown)
        if self._compares:
            dataset.add(self._with_digests(example), row_number)

    def _decodes_pictures(self, figures: DatasetFigures, example: Example) -> bool:
        """Whether each picture of a row can be decoded. Each file is, once; pixels are not kept."""
        if self._codec.media is None:
            return True  # a row with pictures stops this run where it is encoded
        problems = []
        for picture in sources_of(example.messages):
            if _key(picture) in self._picture_digests:
                continue
            try:
                seen = self._codec.media.files.look(picture)
                self._codec.media.files.decode(seen)
                self._picture_digests[_key(picture)] = seen.digest
            except DataError as error:
                name = f"picture {picture}: " if isinstance(picture, str) else "picture: "
                problems.append(f"{example.origin}: {name}{str(error).removeprefix(name)}")
        figures.bad_pictures += problems
        return not problems

    def _with_digests(self, example: Example) -> Example:
        """A row to compare: digests in place of its pictures, which may have several names."""
        digest_of = self._picture_digests.get
        messages = tuple(
            replace(
                message, media=tuple(digest_of(_key(picture or "")) for picture in message.media)
            )
            for message in example.messages
        )
        return replace(example, messages=messages)


def _key(picture: str | bytes) -> str:
    return picture if isinstance(picture, str) else xxhash.xxh3_128_hexdigest(picture)
