"""Responses on the disk as they are made: files beside the output of ``predict``, from which the
same command continues after a full disk, a kill or Ctrl-C."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import RunError, counted
from ..generate.decode import Decode, decoder
from ..generate.generation import Ids, Sample
from ..generate.section import GenerateSection
from ..storage import files
from .model_loading import LoadedModel

logger = logging.getLogger(__name__)
_PART = ".part"
_LIMIT = 1 << 34  # bytes of responses that are read back
_NAMES = {"job", "index", "ids", "finish_reason"}


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
class AnswerJournal:
    """The responses of one replica, appended as they are generated."""

    output: Output
    job: str  # identifies prompts, settings and weights
    known: Mapping[int, Sample]  # of all replicas, in earlier attempts
    decode: Decode
    replica: int
    is_writer: bool  # one rank of each replica

    def add(self, found: Mapping[int, Sample]) -> None:
        """Append responses, by the index of the prompt, and flush them."""
        if not self.is_writer:
            return
        path = self.output.part(self.replica)
        # a line break first, which ends a line that a crash has cut short
        text = "\n".join(["", *(self._line(index, one) for index, one in found.items())])
        with files.raising(RunError, self.output.on_failure):
            files.append_line(path, text)
            with files.open_file(path) as file:
                file.sync()

    def _line(self, index: int, sample: Sample) -> str:
        row = {
            "job": self.job,
            "index": index,
            "ids": sample.ids,
            "finish_reason": sample.finish_reason,
            "answer": sample.text(self.decode),
        }
        if sample.text_before_stop is not None:
            row["text_before_stop"] = sample.text_before_stop
        return json.dumps(row)


def open_journal(
    output: Output, opened: LoadedModel, asked: Sequence[Ids], section: GenerateSection, seed: int
) -> AnswerJournal:
    """The journal of this rank's replica for the prompts ``asked``; a collective call. Raises
    ``RunError`` if there are responses of another job, unless the output is to be replaced."""
    world, share = opened.world, opened.network.share
    job, known = world.from_main(
        _resumed(output, opened, [list(asked), asdict(section), seed]) if world.is_main else None
    )
    if known:
        logger.info("%s: continuing after %s", output.path, counted(len(known), "answer"))
    is_writer = world.rank == share.index * (world.size // share.count)
    return AnswerJournal(output, job, known, decoder(opened.tokenizer), share.index, is_writer)


def _resumed(
    output: Output, opened: LoadedModel, asked: Sequence[object]
) -> tuple[str, dict[int, Sample]]:
    job, rows = earlier_rows(output, opened, asked, _NAMES, ("answer", "to other prompts"))
    return job, {row["index"]: _sample(row) for row in rows}


def earlier_rows(
    output: Output,
    opened: LoadedModel,
    asked: Sequence[object],
    names: Set[str],
    what: tuple[str, str],
) -> tuple[str, list[dict[str, Any]]]:
    """The identity of the job, and the rows that earlier attempts at it have written.

    Args:
        output: the file, and whether it is to be replaced.
        opened: the model, whose weights are part of the identity.
        asked: what is to be answered, and how.
        names: keys of a complete row.
        what: a row, and what rows of another job belong to, as the error says it.

    Raises ``RunError``: there are rows of another job, which are not to be replaced.
    """
    weights = [weight_traces(folder) for folder in opened.folders]
    told = [*asked, str(opened.inner.dtype), weights]
    job = files.digest(json.dumps(told, default=str).encode())
    one, other = what
    with files.raising(RunError, f"cannot read the {one}s so far"):
        rows = [row for path in output.parts for row in complete_rows(path, names)]
    own = [row for row in rows if row["job"] == job]
    if len(own) < len(rows):
        if not output.force:
            raise RunError(
                f"{output.part(0)}: contains {counted(len(rows) - len(own), one)} {other}, "
                "settings or weights; repeat the command that wrote them, choose another "
                "--output, or discard them with --force"
            )
        output.remove_parts()
        own = []
    return job, own


def _sample(row: Mapping[str, Any]) -> Sample:
    text_before_stop = row.get("text_before_stop")
    return Sample(tuple(row["ids"]), (), row["finish_reason"], text_before_stop=text_before_stop)


def weight_traces(folder: Path) -> list[str]:
    """What changes with the files of a folder: names, lengths and times."""
    found = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in found]


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
