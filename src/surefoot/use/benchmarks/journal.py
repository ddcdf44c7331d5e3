"""Results on the disk as they are computed, from which the same command continues after a kill."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RunError, counted
from ...generate.likelihoods.likelihood import Likelihood
from ...generate.samples import Sample
from ...storage import files
from ..answer_journal import Output, earlier_rows
from ..model_loading import LoadedModel

logger = logging.getLogger(__name__)
_NAMES = {"job", "key", "result"}


@dataclass(frozen=True)
class ResultJournal:
    """The results of one replica, appended as they are computed; ``known`` are those of all
    replicas, and of this process."""

    output: Output
    job: str  # identifies questions, settings and weights
    known: dict[str, Any]
    replica: int
    is_writer: bool  # one rank of each replica

    def add(self, found: Mapping[str, object]) -> None:
        """Append results, by their key, and flush them."""
        self.known.update(found)
        if not self.is_writer or not found:
            return
        rows = ({"job": self.job, "key": key, "result": one} for key, one in found.items())
        # a line break first, which ends a line that a crash has cut short
        text = "\n".join(["", *(json.dumps(row) for row in rows)])
        path = self.output.part(self.replica)
        with files.raising(RunError, self.output.on_failure):
            files.append_line(path, text)
            with files.open_file(path) as file:
                file.sync()


def open_results(output: Output, opened: LoadedModel, asked: object) -> ResultJournal:
    """The journal of this rank's replica for ``asked``, which is plain data; a collective call.
    Raises ``RunError`` if there are results of another job, unless they are to be replaced."""
    world, share = opened.world, opened.network.share
    job, known = world.from_main(_resumed(output, opened, asked) if world.is_main else None)
    if known:
        logger.info("%s: continuing after %s", output.path, counted(len(known), "result"))
    is_writer = world.rank == share.index * (world.size // share.count)
    return ResultJournal(output, job, known, share.index, is_writer)


def _resumed(output: Output, opened: LoadedModel, asked: object) -> tuple[str, dict[str, Any]]:
    job, rows = earlier_rows(output, opened, [asked], _NAMES, ("result", "of other questions"))
    return job, {row["key"]: row["result"] for row in rows}


@dataclass(frozen=True)
class Likelihoods:
    """Likelihoods in a journal, by the index of the question."""

    journal: ResultJournal
    keys: Sequence[str]  # of each question

    @property
    def known(self) -> Mapping[int, list[Likelihood]]:
        """Those of earlier attempts."""
        held = self.journal.known
        return {i: _read(held[key]) for i, key in enumerate(self.keys) if key in held}

    def add(self, found: Mapping[int, list[Likelihood]]) -> None:
        """Store some."""
        rows = {self.keys[i]: [[x.logp, x.is_greedy] for x in one] for i, one in found.items()}
        self.journal.add(rows)


def _read(result: Sequence[tuple[float, bool]]) -> list[Likelihood]:
    return [Likelihood(logp, is_greedy) for logp, is_greedy in result]


@dataclass(frozen=True)
class Samples:
    """Responses in a journal, by the index of the prompt."""

    journal: ResultJournal
    keys: Sequence[str]  # of each prompt

    @property
    def known(self) -> Mapping[int, Sample]:
        """Those of earlier attempts."""
        held = self.journal.known
        found = {i: held[key] for i, key in enumerate(self.keys) if key in held}
        return {i: Sample(tuple(ids), (), reason) for i, (ids, reason) in found.items()}

    def add(self, found: Mapping[int, Sample]) -> None:
        """Store some."""
        rows = {self.keys[i]: [list(one.ids), one.finish_reason] for i, one in found.items()}
        self.journal.add(rows)
