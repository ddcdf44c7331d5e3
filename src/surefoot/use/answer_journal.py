"""Results on the disk as they are computed: files beside the output of ``predict`` and of tasks,
from which the same command continues after a full disk, a kill or Ctrl-C."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..errors import RunError, counted
from ..generate.generation import Ids, Sample
from ..generate.responses import Decode, decoder
from ..generate.section import GenerateSection
from ..storage import files
from .model_loading import LoadedModel

logger = logging.getLogger(__name__)
_PART = ".part"
_LIMIT = 1 << 34  # bytes of responses that are read back
_NAMES = {"job", "key", "result"}


@dataclass(frozen=True)
class Output:
    """The file of all answers, and whether to replace what is there."""

    path: Path
    force: bool = False

    def part(self, replica: int) -> Path:
        """The file with the responses of one replica so far."""
        return self.path.absolute().with_name(f"{self.path.name}{_PART}{replica or ''}")

    @property
    def parts(self) -> list[Path]:
        """Those of all replicas that exist."""
        first = self.part(0)
        names = [name for name in files.names_in(first.parent) if name.startswith(first.name)]
        ends = {name: name[len(first.name) :] for name in names}
        return [first.with_name(n) for n, end in ends.items() if not end or end.isdecimal()]

    @property
    def on_failure(self) -> str:
        """What the failure of a write means."""
        return (
            f"cannot write the answers (those so far are in {self.part(0).name}, and the same "
            "command continues after them)"
        )

    def remove_parts(self) -> None:
        """Delete the responses so far, once the output has them all."""
        with files.raising(RunError, "cannot delete the answers so far"):
            for path in self.parts:
                files.remove_tree(path)


@dataclass(frozen=True)
class ResultJournal:
    """The results of one replica, appended as they are computed; ``known`` are those of all
    replicas in earlier attempts, and of this process."""

    output: Output
    job: str  # identifies what is asked, settings and weights
    known: dict[str, Any]
    replica: int
    is_writer: bool  # one rank of each replica

    def add(self, results: Mapping[str, object]) -> None:
        """Append results, by their key, and flush them."""
        self.known.update(results)
        if not self.is_writer or not results:
            return
        rows = ({"job": self.job, "key": key, "result": result} for key, result in results.items())
        # a line break first, which ends a line that a crash has cut short
        text = "\n".join(["", *map(json.dumps, rows)])
        path = self.output.part(self.replica)
        with files.raising(RunError, self.output.on_failure):
            files.append_line(path, text)
            with files.open_file(path) as file:
                file.sync()


def open_results(
    output: Output,
    opened: LoadedModel,
    request: object,
    what: tuple[str, str] = ("result", "of other questions"),
) -> ResultJournal:
    """The journal of this rank's replica for ``request``, which is plain data; a collective call.
    ``what`` is one result, and what those of another job belong to, as errors say it. Raises
    ``RunError`` if there are results of another job, unless they are to be replaced."""
    world, share = opened.world, opened.network.share
    job, earlier_results = world.from_main(
        _earlier(output, opened, request, *what) if world.is_main else None
    )
    if earlier_results:
        logger.info("%s: continuing after %s", output.path, counted(len(earlier_results), what[0]))
    is_writer = world.rank == share.index * (world.size // share.count)
    return ResultJournal(output, job, earlier_results, share.index, is_writer)


def _earlier(
    output: Output, opened: LoadedModel, request: object, noun: str, belonging: str
) -> tuple[str, dict[str, Any]]:
    """The identity of the job, and the results that earlier attempts at it have written."""
    weights = [weight_traces(folder) for folder in opened.folders]
    job = files.digest(
        json.dumps([request, str(opened.inner.dtype), weights], default=str).encode()
    )
    with files.raising(RunError, f"cannot read the {noun}s so far"):
        rows = [row for path in output.parts for row in complete_rows(path, _NAMES)]
    job_rows = [row for row in rows if row["job"] == job]
    if len(job_rows) < len(rows):
        if not output.force:
            raise RunError(
                f"{output.part(0)}: contains {counted(len(rows) - len(job_rows), noun)} "
                f"{belonging}, settings or weights; repeat the command that wrote them, choose "
                "another --output, or discard them with --force"
            )
        output.remove_parts()
        job_rows = []
    return job, {row["key"]: row["result"] for row in job_rows}


T = TypeVar("T")


@dataclass(frozen=True)
class KeyedResults(Generic[T]):
    """Results in a journal, by the index of what was computed; ``write`` makes plain data of one,
    ``read`` the result of that."""

    journal: ResultJournal
    keys: Sequence[str]  # of each prompt, or question
    write: Callable[[T], object]
    read: Callable[[Any], T]

    @property
    def known(self) -> Mapping[int, T]:
        """The results of earlier attempts."""
        results = self.journal.known
        return {i: self.read(results[key]) for i, key in enumerate(self.keys) if key in results}

    def add(self, results: Mapping[int, T]) -> None:
        """Append results to the journal."""
        self.journal.add({self.keys[i]: self.write(result) for i, result in results.items()})


def samples_in(journal: ResultJournal, keys: Sequence[str], decode: Decode) -> KeyedResults[Sample]:
    """Responses in a journal, with their text by ``decode`` for people who read the file."""

    def write(sample: Sample) -> dict[str, object]:
        return {
            "ids": sample.ids,
            "finish_reason": sample.finish_reason,
            "answer": sample.text(decode),
            "text_before_stop": sample.text_before_stop,
        }

    def read(result: Mapping[str, Any]) -> Sample:
        before = result["text_before_stop"]
        return Sample(tuple(result["ids"]), (), result["finish_reason"], text_before_stop=before)

    return KeyedResults(journal, keys, write, read)


def open_journal(
    output: Output, opened: LoadedModel, prompts: Sequence[Ids], section: GenerateSection, seed: int
) -> KeyedResults[Sample]:
    """The responses of this rank's replica to ``prompts``; as ``open_results``."""
    request = [list(prompts), asdict(section), seed]
    journal = open_results(output, opened, request, ("answer", "to other prompts"))
    return samples_in(journal, [str(i) for i in range(len(prompts))], decoder(opened.tokenizer))


def weight_traces(folder: Path) -> list[str]:
    """What changes with the files of a folder: names, lengths and times."""
    stats = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats]


def complete_rows(path: Path, names: Set[str]) -> Iterator[dict[str, Any]]:
    """The complete lines of a file of results, which have these ``names``."""
    with files.open_file(path) as file:
        text = files.read_all(file, _LIMIT).decode(errors="replace")
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.keys() >= names:
            yield row
